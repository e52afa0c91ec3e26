// SPDX-License-Identifier: BSD-3-Clause
// mma_s8: c += a b on the tensor cores for 8-bit integers, with int32 sums that wrap. Checked
// against PTX ISA 9.0; sm_80.
//
// A fragment of 16 x 32 bytes has the layout of mma.cuh's 16 x 16 elements of 16 bits. A
// register holds four consecutive bytes along k, so ldmatrix serves both.
#ifndef GPUKERN_PTX_MMA_S8_CUH
#define GPUKERN_PTX_MMA_S8_CUH

#include <stdint.h>

// mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
static __device__ __forceinline__ void mma_m16n8k32_s8(int *c, const uint32_t *a,
                                                       const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
