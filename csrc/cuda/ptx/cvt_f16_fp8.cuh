/* SPDX-License-Identifier: BSD-3-Clause */
/* cvt_f16_fp8.cuh: 8-bit floats to float16, which holds every one of them; from sm_89 on. */
#ifndef GPUKERN_CUDA_PTX_CVT_F16_FP8_CUH
#define GPUKERN_CUDA_PTX_CVT_F16_FP8_CUH

#include <stdint.h>

// cvt.rn.f16x2.e4m3x2, twice: bytes 0 and 1 of the codes in *lo, 2 and 3 in *hi. mov.b32 names the
// halves, which costs nothing; a shift would.
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
