/* SPDX-License-Identifier: BSD-3-Clause */
/* product.cuh: scales and the epilogue of quantised products, shared by all their CUDA kernels:
 *
 *   out = activation(alpha sum + beta c + bias) / out_scale
 *
 * The epilogue is computed in float32 and rounded once. */
#ifndef GPUKERN_CUDA_QUANT_PRODUCT_CUH
#define GPUKERN_CUDA_QUANT_PRODUCT_CUH

#include "../../../formats/scales.h"
#include "../gemm/activation.cuh"
#include "../../host/launch.cuh"
#include "../../tile/codes.cuh"
#include "../../tile/convert.cuh"

__device__ __forceinline__ float scale_value(const void *data, gk_dtype dtype, int64_t at) {
    if (dtype == GK_F32) return __ldg((const float *)data + at);
    if (dtype == GK_BF16) return to_f32(((const __nv_bfloat16 *)data)[at]);
    if (dtype == GK_F16) return to_f32(((const __half *)data)[at]);
    return code_value(dtype,
                      __ldg((const uint8_t *)data + at)); /* the op's checks allow no other dtype */
}
__device__ __forceinline__ float scale_of(const gk_scales &s, int64_t row, int64_t col) {
    if (!s.data) return 1;
    return scale_value(s.data, s.dtype, (row >> s.row_log2) * s.row + (col >> s.col_log2) * s.col);
}

/* Multiplies a sum by one scale and then by the other. The product of both scales could overflow
 * although the sum is 0 or small, or underflow although the sum is large. */
__device__ __forceinline__ float times_scales(float sum, float a, float b) { return sum * a * b; }

/* True if x is 0, subnormal, infinite or NaN. */
__device__ __forceinline__ bool leaves_normal(float x) {
    return 2 * __float_as_uint(x) - 0x01000000u >= 0xfe000000u;
}

/* Combines the scales by[R] of R rows with the scale b of a block of columns. A sum of row i is to
 * be multiplied by by[i] and then by the returned factor.
 *
 * Usually by[i] becomes by[i] b, and 1 is returned. If the product of two scales that are not 0
 * leaves the normal range of float32, by[] is unchanged and b is returned. */
template <int R> __device__ __forceinline__ float join_scales(float (&by)[R], float b) {
    float all[R];
    bool far = false;
#pragma unroll
    for (int i = 0; i < R; ++i) {
        all[i] = by[i] * b;
        far = far || leaves_normal(all[i]);
    }
    if (far) { /* rare. Products with a scale of 0 do not count; rows beyond the last have scale 0.
                */
        far = false;
#pragma unroll
        for (int i = 0; i < R; ++i) far = far || (leaves_normal(all[i]) && by[i] != 0 && b != 0);
        if (far) return b;
    }
#pragma unroll
    for (int i = 0; i < R; ++i) by[i] = all[i];
    return 1;
}

__device__ __forceinline__ float load_any(const void *data, gk_dtype dtype, int64_t at) {
    return scale_value(data, dtype, at);
}

/* The parameters of the epilogue of a result [m, n]. */
struct Finish {
    void *out;
    const void *bias, *c;
    const float *out_scale, *alpha; /* on the device. NULL: 1 */
    int64_t out_row, bias_step, c_row, c_col;
    gk_dtype out_dtype, bias_dtype, c_dtype;
    gk_activation activation;
    float beta;
};

/* Computes the result at (row, col) from its sum x. */
__device__ __forceinline__ float finish(const Finish &f, int64_t row, int64_t col, float x) {
    if (f.alpha) x *= *f.alpha;
    if (f.c) x = fmaf(f.beta, load_any(f.c, f.c_dtype, row * f.c_row + col * f.c_col), x);
    if (f.bias) x += load_any(f.bias, f.bias_dtype, col * f.bias_step);
    x = activate(f.activation, x);
    return f.out_scale ? __fdiv_rn(x, *f.out_scale) : x;
}

template <class Codes>
__device__ __forceinline__ void store_value(const Finish &f, int64_t row, int64_t col, float x) {
    const int64_t at = row * f.out_row + col;
    if (f.out_dtype == GK_F32) {
        ((float *)f.out)[at] = x;
    } else if (f.out_dtype == GK_BF16) {
        ((__nv_bfloat16 *)f.out)[at] = from_f32<__nv_bfloat16>(x);
    } else if (f.out_dtype == GK_F16) {
        ((__half *)f.out)[at] = from_f32<__half>(x);
    } else { /* 8-bit codes: the op's checks allow no other dtype */
        const float v[4] = {x, 0, 0, 0};
        ((uint8_t *)f.out)[at] = (uint8_t)codes_x4<Codes>(f.out_dtype, v);
    }
}

inline int64_t step_of(const gk_tensor *t, int from_end) {
    return t->ndim < from_end || t->shape[t->ndim - from_end] == 1 ? 0
                                                                   : t->stride[t->ndim - from_end];
}

inline Finish finish_of(const gk_tensor &out, const gk_tensor *bias, const gk_tensor *c,
                        double beta, const gk_tensor *out_scale, gk_activation activation) {
    Finish f = {};
    f.out = out.data;
    f.out_row = out.ndim > 1 ? out.stride[out.ndim - 2] : 0;
    f.out_dtype = out.dtype;
    if (bias) {
        f.bias = bias->data;
        f.bias_dtype = bias->dtype;
        f.bias_step = bias->stride[0];
    }
    if (c && beta != 0) {
        f.c = c->data;
        f.c_dtype = c->dtype;
        f.c_row = step_of(c, 2);
        f.c_col = step_of(c, 1);
    }
    f.beta = (float)beta;
    f.activation = activation;
    f.out_scale = out_scale ? (const float *)out_scale->data : nullptr;
    return f;
}

#endif
