// SPDX-License-Identifier: BSD-3-Clause
// movmatrix: transposes an 8x8 matrix of 16-bit elements between the lanes of a warp. Checked
// against PTX ISA 9.0.
#ifndef GPUKERN_PTX_MOVMATRIX_CUH
#define GPUKERN_PTX_MOVMATRIX_CUH

#include <stdint.h>

// movmatrix.sync.aligned.m8n8.trans.b16, sm_75. All 32 lanes together; registers only. Lane l
// gives elements (l / 4, 2 (l % 4) + {0, 1}) and receives the same elements of the transpose.
static __device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

#endif
