/* SPDX-License-Identifier: BSD-3-Clause */
/* codes_f16.cuh: converts 8-bit codes to float16 in registers, in plain arithmetic that every GPU
 * has. float16 holds every code of e4m3, e5m2 and int8.
 *
 *   e5m2: the code is the upper byte of a float16.
 *   e4m3: the code is placed one bit lower, which gives its value times 2^-8, also for subnormal
 *         codes. The user multiplies sums by 2^8 at the end (codes_f16_up).
 *   int8: the code is placed in the fraction of 1024, which is then subtracted. */
#ifndef GPUKERN_CUDA_TILE_CODES_F16_CUH
#define GPUKERN_CUDA_TILE_CODES_F16_CUH

#include "../ptx/regs.cuh"
#include "gpukern.h"

#include <cuda_fp16.h>
#include <stdint.h>

__device__ __forceinline__ uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) {
    union {
        uint32_t bits;
        __half2 pair;
    } x, y, z;
    x.bits = a;
    y.bits = b;
    z.bits = c;
    x.pair = __hfma2(x.pair, y.pair, z.pair);
    return x.bits;
}

/* Decodes two e4m3 codes, which are in the upper bytes of x's halves.
 *
 * Codes of NaN must become NaN. The bits of NaN decode to 1.875. Times 9 2^12 this overflows to
 * infinity; 1.75, the largest finite value, does not. Adding 0 times the product therefore adds NaN
 * or 0. The two FMAs run in parallel with the integer instructions. */
__device__ __forceinline__ uint32_t e4m3_pair(uint32_t x) {
    const uint32_t pair = (x >> 1 & 0x3f803f80u) | (x & 0x80008000u);
    return fma_f16x2(fma_f16x2(pair, 0x78807880u, 0), 0, pair);
}

/* What sums of codes_to_f16x4's results must be multiplied by, to be sums of the codes' values. */
template <gk_dtype CODE> constexpr float codes_f16_up = CODE == GK_E4M3 ? 256.f : 1.f;

/* Converts four codes: bytes 0 and 2 to *even, bytes 1 and 3 to *odd. An odd byte is already the
 * upper byte of its half of the word. */
template <gk_dtype CODE>
__device__ __forceinline__ void codes_to_f16x4(uint32_t *even, uint32_t *odd, uint32_t codes) {
    if (CODE == GK_I8) { /* the bits of 1024 + (code + 128), minus 1152 */
        const uint32_t above = codes ^ 0x80808080u, one = 0x3c003c00u, less = 0xe480e480u;
        *even = fma_f16x2(prmt(above, 0x64646464u, 0x4240), one, less);
        *odd = fma_f16x2(prmt(above, 0x64646464u, 0x4341), one, less);
    } else if (CODE == GK_E4M3) { /* e4m3_pair masks the lower bytes */
        *even = e4m3_pair(codes << 8);
        *odd = e4m3_pair(codes);
    } else {
        *even = prmt(codes, 0, 0x2404);
        *odd = codes & 0xff00ff00u;
    }
}

#endif
