/* SPDX-License-Identifier: BSD-3-Clause */
/* cvt_s8.cuh: rounds a float to a signed byte. Checked against PTX ISA 9.0. */
#ifndef GPUKERN_CUDA_PTX_CVT_S8_CUH
#define GPUKERN_CUDA_PTX_CVT_S8_CUH

#include <stdint.h>

/* cvt.rni.s8.f32, sm_20: to nearest even, clamped to -128 .. 127; NaN becomes 0. The upper three
 * bytes of the result are not specified here. */
static __device__ __forceinline__ uint32_t cvt_rni_s8(float x) {
    uint32_t d;
    asm("cvt.rni.s8.f32 %0, %1;" : "=r"(d) : "f"(x));
    return d;
}

#endif
