/* SPDX-License-Identifier: BSD-3-Clause */
/* cvt_fp8.cuh: rounds two floats to two 8-bit floats, to nearest even with saturation; from
 * sm_89 on. `lo` goes to the low byte. */
#ifndef GPUKERN_CUDA_PTX_CVT_FP8_CUH
#define GPUKERN_CUDA_PTX_CVT_FP8_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x2(float lo, float hi) {
    uint16_t d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
    return d;
}

static __device__ __forceinline__ uint32_t cvt_rn_satfinite_e5m2x2(float lo, float hi) {
    uint16_t d;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
    return d;
}

#endif
