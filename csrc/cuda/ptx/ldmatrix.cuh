// SPDX-License-Identifier: BSD-3-Clause
// ldmatrix: loads 8x8 matrices of 16-bit elements from shared memory into fragments. Checked
// against PTX ISA 9.0; sm_75.
//
// All 32 lanes execute it together (.sync). A matrix is 8 rows of 16 bytes. Lanes 8i to 8i + 7
// give the addresses of the rows of matrix i, each a multiple of 16. r[i] receives two neighbours
// of a row of matrix i, or with _trans of a column (ldmatrix_element in layout/atoms.cuh). It sees
// what other threads stored before the last barrier.
#ifndef GPUKERN_PTX_LDMATRIX_CUH
#define GPUKERN_PTX_LDMATRIX_CUH

#include "smem.cuh"

static __device__ __forceinline__ void ldmatrix_x4(uint32_t *r, smem_addr row_s) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row_s)
                 : "memory");
}

static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t *r, smem_addr row_s) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row_s)
                 : "memory");
}

#endif
