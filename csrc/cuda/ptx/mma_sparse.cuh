// SPDX-License-Identifier: BSD-3-Clause
// mma_sparse: c += a b on the tensor cores, of an a with two non-zeros of each four along k.
// Checked against PTX ISA 9.0; sm_80.
//
// a is the fragment of the values alone, as mma.cuh has it of half of k (16 x 16 of 16 bits, 16 x
// 32 bytes); b is two fragments of 8 columns one behind the other along k. meta says where the
// values stand, two numbers of 2 bits for each four, the lower first, from the lowest bits on, each
// pair in order:
//   16 bits   SELECT 0: lanes 0 and 1 of each quad, 1: lanes 2 and 3. Lane 2 SELECT + i of quad q has 16 k from 16 i on, of row q in
//             its low half, of row q + 8 in its high half.
//   8 bits    Lane i of quad q has 32 k from 32 (i / 2) on of row q + 8 (i % 2).
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
