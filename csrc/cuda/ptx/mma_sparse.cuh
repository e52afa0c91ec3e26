// SPDX-License-Identifier: BSD-3-Clause
// mma_sparse: c += a b on the tensor cores, where a has two non-zeros in every four elements
// along k. Checked against PTX ISA 9.0; sm_80.
//
// a is a fragment of the values only, in the layout of mma.cuh for half of k (16 x 16 of 16
// bits, 16 x 32 bytes). b is two consecutive fragments along k, of 8 columns. meta gives the
// values' positions: two numbers of 2 bits for every four elements, in increasing order, from
// the lowest bits on.
//   16 bits   SELECT 0 uses lanes 0 and 1 of each quad, SELECT 1 lanes 2 and 3. Lane 2 SELECT + i
//             of quad q holds 16 of k from 16 i on: row q in its low half, and row q + 8 in its
//             high half.
//   8 bits    Lane i of quad q holds 32 of k from 32 (i / 2) on of row q + 8 (i % 2).
#ifndef GPUKERN_PTX_MMA_SPARSE_CUH
#define GPUKERN_PTX_MMA_SPARSE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

template <class T, int SELECT>
static __device__ __forceinline__ void mma_sparse(float *c, const uint32_t *a, const uint32_t *b,
                                                  uint32_t meta) = delete;

#define GK_MMA_SPARSE_16(T, NAME, SELECT)                                                       \
    template <>                                                                                 \
    __device__ __forceinline__ void mma_sparse<T, SELECT>(float *c, const uint32_t *a,          \
                                                          const uint32_t *b, uint32_t meta) {   \
        asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." NAME "." NAME ".f32 " \
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, "        \
            "%12, " #SELECT ";"                                                                 \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                    \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]),      \
              "r"(b[3]), "r"(meta));                                                            \
    }

GK_MMA_SPARSE_16(__nv_bfloat16, "bf16", 0)
GK_MMA_SPARSE_16(__nv_bfloat16, "bf16", 1)
GK_MMA_SPARSE_16(__half, "f16", 0)
GK_MMA_SPARSE_16(__half, "f16", 1)

// mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32
static __device__ __forceinline__ void mma_sparse_s8(int *c, const uint32_t *a, const uint32_t *b,
                                                     uint32_t meta) {
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0;"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(meta));
}

#endif
