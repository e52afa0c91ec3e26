// SPDX-License-Identifier: BSD-3-Clause
// stmatrix: stores 8 x 8 matrices of 16-bit elements from registers to shared memory, the
// reverse of ldmatrix. Checked against PTX ISA 9.0; sm_90.
#ifndef GPUKERN_PTX_STMATRIX_CUH
#define GPUKERN_PTX_STMATRIX_CUH

#include "smem.cuh"

// stmatrix.x4: all lanes. Lane l gives the address of row l % 8 of matrix l / 8, a multiple of
// 16. Register i of a lane goes to matrix i, row lane / 4, columns 2 (lane % 4) and the next.
// Other threads see it after a barrier.
static __device__ __forceinline__ void stmatrix_x4(smem_addr row_s, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_s),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

// stmatrix.x4.trans: the same, with each matrix transposed: register i of a lane goes to column
// lane / 4, rows 2 (lane % 4) and the next.
static __device__ __forceinline__ void stmatrix_x4_trans(smem_addr row_s, const uint32_t (&r)[4]) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_s),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
}

#endif
