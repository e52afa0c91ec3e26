/* SPDX-License-Identifier: BSD-3-Clause */
/* codes_sm90a.cuh: rounds to 8-bit floats with the cvt instruction. */
#ifndef GPUKERN_CUDA_TILE_CODES_SM90A_CUH
#define GPUKERN_CUDA_TILE_CODES_SM90A_CUH

#include "../ptx/cvt_fp8.cuh"
#include "codes.cuh"

struct CodesByHardware {
    static __device__ __forceinline__ uint32_t e4m3x2(float lo, float hi) {
        return cvt_rn_satfinite_e4m3x2(lo, hi);
    }
    static __device__ __forceinline__ uint32_t e5m2x2(float lo, float hi) {
        return cvt_rn_satfinite_e5m2x2(lo, hi);
    }
};

#endif
