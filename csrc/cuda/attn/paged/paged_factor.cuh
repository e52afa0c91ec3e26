/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_factor.cuh: the factor scale x k_scale of Q K^T, for kernels that multiply each score by
 * one factor. */
#ifndef GPUKERN_CUDA_PAGED_FACTOR_CUH
#define GPUKERN_CUDA_PAGED_FACTOR_CUH

#include <float.h>

#include "../kv.cuh"

/* Limits a factor to finite numbers, so that the score of zero codes is 0 and not NaN. The limit
 * leaves room for LOG2_E. NaN stays NaN. */
__device__ __forceinline__ float finite_factor(float x) {
    constexpr float most = FLT_MAX / LOG2_E;
    return x > most ? most : x < -most ? -most : x;
}
__device__ __forceinline__ double finite_factor(double x) {
    return x > DBL_MAX ? DBL_MAX : x < -DBL_MAX ? -DBL_MAX : x;
}

template <class W> __device__ __forceinline__ W paged_factor(const Paged &p, int head_kv) {
    return finite_factor((W)p.rules.scale * paged_scale<W>(p.k_scale, p.k_scale_step, head_kv));
}

#endif
