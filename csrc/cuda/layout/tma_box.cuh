// SPDX-License-Identifier: BSD-3-Clause
// tma_box: what TMA is told of a box, from how the box lies in shared memory. A kernel's tile types
// say that once (box() of smem_tile, wgmma_panels; wgmma_box): tensor maps, the tests' byte model
// of TMA and the pictures of docs/layout.md take it from there.
#ifndef GPUKERN_LAYOUT_TMA_BOX_CUH
#define GPUKERN_LAYOUT_TMA_BOX_CUH

#include "banks.cuh"

enum {
    TMA_MAX_BOX = 256 // elements of a dimension
};

// ok false: TMA cannot lay a box so, and mode is to blame. size: elements of each dimension, the
// densest first. swizzle_bytes: what a swizzled row spans, 0 without.
struct tma_box {
    bool ok;
    int mode, size[3], swizzle_bytes, bytes;
};

constexpr tma_box tma_box_of(const smem_box &box) {
    tma_box r = {
        true, 0, {1, 1, 1}, box.swizzle_bits > 0 ? 16 << box.swizzle_bits : 0, box.elem_bytes};
    for (int m = 0; m < box.lies.modes; ++m) {
        // dimensions lie one behind the other without a gap, chunks of 16 bytes are whole, and a
        // swizzle spans a row
        const int n = box.lies.shape[m], before = r.bytes / box.elem_bytes;
        const bool row = m > 0 || (n * box.elem_bytes % 16 == 0 &&
                                   (r.swizzle_bytes == 0 || r.swizzle_bytes == n * box.elem_bytes));
        if (m == 3 || n < 1 || n > TMA_MAX_BOX || !row || (n > 1 && box.lies.stride[m] != before)) {
            r.ok = false;
            r.mode = m;
            return r;
        }
        r.size[m] = n;
        r.bytes *= n;
    }
    return r;
}

#endif
