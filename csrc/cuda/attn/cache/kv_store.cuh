/* SPDX-License-Identifier: BSD-3-Clause */
/* kv_store.cuh: helpers of the kernels that write into a paged cache: the limits to which a value
 * is saturated, its rounding to 8-bit codes, and the check that rows can be moved in aligned
 * vectors. A vector is named `piece` in the code. */
#ifndef GPUKERN_CUDA_KV_STORE_CUH
#define GPUKERN_CUDA_KV_STORE_CUH

#include "../../tile/codes.cuh"
#include "../../tile/convert.cuh"
#include "../kv.cuh"

/* The largest finite value of a cache dtype. */
template <class T> constexpr typename element<T>::acc largest();
template <> constexpr double largest<double>() { return 1.7976931348623157e308; }
template <> constexpr float largest<float>() { return 3.402823466e38f; }
template <> constexpr float largest<__nv_bfloat16>() { return 3.3895313892515355e38f; }
template <> constexpr float largest<__half>() { return 65504.f; }

/* Converts a double to a float that rounds to the same 8-bit code (gk_f64_to_odd_f32 in
 * csrc/formats/codes.h). */
__device__ __forceinline__ float to_odd_f32(double x) {
    const float f = (float)x;
    if (x != x || (double)f == x || isinf(f)) return f;
    return __uint_as_float((__float_as_uint(f) - (fabs((double)f) > fabs(x))) | 1);
}
__device__ __forceinline__ float to_odd_f32(float x) { return x; }

/* ---- host ------------------------------------------------------------------------------------ */
/* True if every row of t is dense and consists of whole vectors of `piece` elements, each aligned
 * to its size. */
inline bool in_pieces(const gk_tensor &t, int piece) {
    const int last = t.ndim - 1;
    const int64_t bytes = piece * (int64_t)gk_dtype_bytes(t.dtype);
    if (gk_numel(&t) == 0) return true;
    bool good = t.shape[last] % piece == 0 && (t.stride[last] == 1 || t.shape[last] <= 1) &&
                (uintptr_t)t.data % bytes == 0;
    for (int d = 0; d < last; ++d) good = good && (t.shape[d] <= 1 || t.stride[d] % piece == 0);
    return good;
}

#endif
