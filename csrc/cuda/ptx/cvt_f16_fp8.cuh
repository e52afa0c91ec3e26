/* SPDX-License-Identifier: BSD-3-Clause */
/* cvt_f16_fp8.cuh: converts 8-bit floats to float16, which holds all of them; from sm_89 on. */
#ifndef GPUKERN_CUDA_PTX_CVT_F16_FP8_CUH
#define GPUKERN_CUDA_PTX_CVT_F16_FP8_CUH

#include <stdint.h>

/* cvt.rn.f16x2.e4m3x2, twice: codes in bytes 0 and 1 go to *lo, those in bytes 2 and 3 to *hi.
 * mov.b32 names the halves at no cost; a shift would be an instruction. */
static __device__ __forceinline__ void cvt_rn_f16x2_e4m3x4(uint32_t *lo, uint32_t *hi,
                                                           uint32_t codes) {
    asm("{\n\t"
        ".reg .b16 l, h;\n\t"
        "mov.b32 {l, h}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, l;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, h;\n\t"
        "}"
        : "=r"(*lo), "=r"(*hi)
        : "r"(codes));
}

#endif
