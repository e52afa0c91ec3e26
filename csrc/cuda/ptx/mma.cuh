// SPDX-License-Identifier: BSD-3-Clause
// mma: c += a b on the tensor cores with float32 sums. Checked against PTX ISA 9.0; sm_80.
//
// All 32 lanes execute it together (.sync) and hold the fragments that layout/atoms.cuh maps
// (frag_a16, frag_b16, frag_a32, frag_b32, frag_c). It uses registers only and orders no memory.
// It is not volatile, so the compiler may move the loads of the next fragments above it. (nvcc
// moves no asm into a branch, volatile or not.)
#ifndef GPUKERN_PTX_MMA_CUH
#define GPUKERN_PTX_MMA_CUH

#include <stdint.h>

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
static __device__ __forceinline__ void mma_m16n8k16_bf16(float *c, const uint32_t *a,
                                                         const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
static __device__ __forceinline__ void mma_m16n8k16_f16(float *c, const uint32_t *a,
                                                        const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32. The operands are float32 bits, of which
// the low 13 are ignored. Without rounding (cvt_rna_tf32) they are truncated.
static __device__ __forceinline__ void mma_m16n8k8_tf32(float *c, const uint32_t *a,
                                                        const uint32_t *b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
