/* SPDX-License-Identifier: BSD-3-Clause */
/* activation_slope.cuh: fast activations together with their derivatives (slopes), for results of
 * 16 bits. As in activation.cuh, two values share a reciprocal. act_derivative is exact instead,
 * but needs several times as many instructions.
 *
 *   silu        s = 1 / (1 + e^-x):        x s,   s + x s (1 - s)
 *   gelu_tanh   s = 1 / (1 + e^-2u(x)):    x s,   s + 2 x s (1 - s) u'(x)
 *   gelu        x Phi(x),                  Phi(x) + x phi(x) */
#ifndef GPUKERN_CUDA_ACTIVATION_SLOPE_CUH
#define GPUKERN_CUDA_ACTIVATION_SLOPE_CUH

#include "activation.cuh"

/* x limited to [-end, end]. Beyond these ends a slope is 0 or 1. NaN stays NaN. */
__device__ __forceinline__ float act_ends(float x, float end) {
    return -max_nan(-max_nan(x, -end), -end);
}

/* s = 1 / (1 + 2^u), t = 1 / (1 + 2^w). u and w are limited to 64, so that the product of the
 * denominators stays finite. fminf also drops a NaN, which would otherwise reach the other value
 * through the common reciprocal. */
__device__ __forceinline__ void act_sigmoid_2(float u, float w, float &s, float &t) {
    const float a = 1.f + ex2_approx_ftz(fminf(u, 64.f)), b = 1.f + ex2_approx_ftz(fminf(w, 64.f));
    const float inverse = rcp_approx_ftz(a * b);
    s = inverse * b;
    t = inverse * a;
}

/* The slope at x, or 0 if x is at the lower end. The formulas give some 1e-15 there instead of 0.
 * NaN stays NaN. */
__device__ __forceinline__ float act_slope(float x, float end, float slope) {
    return x <= -end ? 0.f : slope;
}

__device__ __forceinline__ void act_silu_slope_2(float &x, float &y, float &dx, float &dy) {
    constexpr float once = -1.44269504088896340736f;
    const float a = act_ends(x, 40.f), b = act_ends(y, 40.f);
    float s, t;
    act_sigmoid_2(a * once, b * once, s, t);
    dx = act_slope(x, 40.f, fmaf(a * s, 1.f - s, s));
    dy = act_slope(y, 40.f, fmaf(b * t, 1.f - t, t));
    x = max_nan(x, -40.f) * s;
    y = max_nan(y, -40.f) * t;
}

__device__ __forceinline__ void act_gelu_tanh_slope_2(float &x, float &y, float &dx, float &dy) {
    constexpr float u1 = 0.79788456080286535588f, u3 = u1 * 0.044715f,
                    twice = -2 * 1.44269504088896340736f;
    const float a = act_ends(x, 7.25f), b = act_ends(y, 7.25f), a2 = a * a, b2 = b * b;
    float s, t;
    act_sigmoid_2(twice * a * fmaf(a2, u3, u1), twice * b * fmaf(b2, u3, u1), s, t);
    dx = act_slope(x, 7.25f, fmaf(2.f * a * fmaf(a2, 3.f * u3, u1), s * (1.f - s), s));
    dy = act_slope(y, 7.25f, fmaf(2.f * b * fmaf(b2, 3.f * u3, u1), t * (1.f - t), t));
    x = max_nan(x, -7.25f) * s;
    y = max_nan(y, -7.25f) * t;
}

/* 1 - Phi(u) for u >= 0, by Abramowitz and Stegun 7.1.26 with t = 1 / (1 + p u / sqrt 2) and
 * e = exp(-u^2 / 2). The absolute error is below 1e-7. */
__device__ __forceinline__ float act_upper_tail(float t, float e) {
    float q = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
    q = fmaf(t, q, 0.5f * 1.421413741f);
    q = fmaf(t, q, 0.5f * -0.284496736f);
    q = fmaf(t, q, 0.5f * 0.254829592f);
    return q * t * e;
}

__device__ __forceinline__ void act_gelu_slope_2(float &x, float &y, float &dx, float &dy) {
    constexpr float p = 0.3275911f * 0.70710678118654752440f,
                    half = -0.5f * 1.44269504088896340736f, inv_sqrt_2pi = 0.39894228040143267794f;
    const float a = act_ends(x, 14.f), b = act_ends(y, 14.f);
    const float u = fminf(fabsf(a), 14.f), w = fminf(fabsf(b), 14.f); /* without NaN */
    const float c = fmaf(u, p, 1.f), d = fmaf(w, p, 1.f), inverse = rcp_approx_ftz(c * d);
    const float e = ex2_approx_ftz(u * u * half), f = ex2_approx_ftz(w * w * half);
    const float over = act_upper_tail(inverse * d, e), above = act_upper_tail(inverse * c, f);
    dx = fmaf(a * inv_sqrt_2pi, e, a < 0 ? over : 1.f - over);
    dy = fmaf(b * inv_sqrt_2pi, f, b < 0 ? above : 1.f - above);
    x = max_nan(x, 0.f) - u * over;
    y = max_nan(y, 0.f) - w * above;
}

/* act_lowest and act_put_nan give silu and gelu of -inf the result that PyTorch and the exact forms
 * give: -inf times 0, which is NaN. The fast forms would return 0, because they limit a value
 * before they multiply by it. act_lowest returns a bit for each value that is -inf. act_put_nan
 * sets these values to NaN after the activation. */
template <int N> __device__ __forceinline__ unsigned act_lowest(const float (&v)[N]) {
    unsigned lowest = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) lowest |= (unsigned)(v[i] == -INFINITY) << i;
    return lowest;
}

template <int N>
__device__ __forceinline__ void act_put_nan(gk_activation activation, unsigned lowest,
                                            float (&v)[N]) {
    if (!lowest || activation == GK_ACT_NONE || activation == GK_ACT_RELU) return;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = lowest >> i & 1 ? NAN : v[i];
}

/* Replaces the N values v by their activations, and sets slope to the derivatives. N is even. For
 * relu, v may also be the output. The activation is chosen outside the loops, as in activate_16. */
template <int N>
__device__ __forceinline__ void activate_and_slope_16(gk_activation activation, float (&v)[N],
                                                      float (&slope)[N]) {
    if (activation == GK_ACT_GELU) {
#pragma unroll
        for (int i = 0; i < N; i += 2) act_gelu_slope_2(v[i], v[i + 1], slope[i], slope[i + 1]);
    } else if (activation == GK_ACT_GELU_TANH) {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            act_gelu_tanh_slope_2(v[i], v[i + 1], slope[i], slope[i + 1]);
    } else if (activation == GK_ACT_SILU) {
#pragma unroll
        for (int i = 0; i < N; i += 2) act_silu_slope_2(v[i], v[i + 1], slope[i], slope[i + 1]);
    } else {
        const bool relu = activation == GK_ACT_RELU;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            slope[i] = relu && v[i] <= 0 ? 0.f : 1.f;
            v[i] = relu && v[i] <= 0 ? 0.f : v[i]; /* NaN stays NaN */
        }
    }
}

#endif
