// SPDX-License-Identifier: BSD-3-Clause
// tma_box: a TMA box, derived from its layout in shared memory. A kernel's tile types define that
// layout once (box() of smem_tile and wgmma_panels; wgmma_box). Tensor maps, the tests' byte model
// of TMA and the pictures of docs/layout.md all use it.
#ifndef GPUKERN_LAYOUT_TMA_BOX_CUH
#define GPUKERN_LAYOUT_TMA_BOX_CUH

#include "banks.cuh"

enum {
    TMA_MAX_BOX = 256 // elements of a dimension
};

// ok false: TMA cannot produce this layout, because of dimension `mode`. size: elements of each
// dimension, the densest first. swizzle_bytes: bytes that a swizzled row spans, 0 without
// swizzle.
struct tma_box {
    bool ok;
    int mode, size[3], swizzle_bytes, bytes;
};

constexpr tma_box tma_box_of(const smem_box &box) {
    tma_box r = {
        true, 0, {1, 1, 1}, box.swizzle_bits > 0 ? 16 << box.swizzle_bits : 0, box.elem_bytes};
    for (int m = 0; m < box.lies.modes; ++m) {
        // Dimensions must be contiguous, rows must be whole chunks of 16 bytes, and a swizzle
        // must span a row.
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
