/* SPDX-License-Identifier: BSD-3-Clause */
/* activation.cuh: the activations of gemm and their derivatives, in float or double (gk_activation
 * in gpukern.h). Hendrycks and Gimpel 2016, arXiv:1606.08415 (GELU and SiLU). */
#ifndef GPUKERN_CUDA_ACTIVATION_CUH
#define GPUKERN_CUDA_ACTIVATION_CUH

#include "../../kernels.h"
#include "../../ptx/regs.cuh"

__device__ __forceinline__ float act_exp(float x) { return expf(x); }
__device__ __forceinline__ double act_exp(double x) { return exp(x); }

template <class W> __device__ __forceinline__ W act_sigmoid(W x) { return 1 / (1 + act_exp(-x)); }

/* x / (1 + e^-x). It is 0 if e^-x overflows. */
__device__ __forceinline__ float act_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
__device__ __forceinline__ double act_silu(double x) { return x / (1 + exp(-x)); }

template <class W> __device__ __forceinline__ W activate(gk_activation activation, W x) {
    const W sqrt_half = W(0.70710678118654752440), sqrt_2_over_pi = W(0.79788456080286535588),
            cubic = W(0.044715);
    switch (activation) {
    case GK_ACT_NONE: break;
    case GK_ACT_RELU: return x <= 0 ? W(0) : x; /* NaN stays NaN */
    case GK_ACT_GELU: return W(0.5) * x * (1 + erf(x * sqrt_half));
    case GK_ACT_GELU_TANH: return W(0.5) * x * (1 + tanh(sqrt_2_over_pi * (x + cubic * x * x * x)));
    case GK_ACT_SILU: return act_silu(x);
    }
    return x;
}

/* Applies an activation two values at a time, in a loop that is not unrolled. The exact
 * activations of eight values would be longer than the rest of an epilogue and would dominate
 * compile time. */
template <int N, class W>
__device__ __forceinline__ void activate_in_place(gk_activation activation, W *v) {
    constexpr int EACH = N % 2 == 0 ? 2 : 1;
#pragma unroll 1
    for (int n = 0; n < N; n += EACH) {
        W some[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) some[i] = activate(activation, v[i]);
#pragma unroll
        for (int i = 0; i + EACH < N; ++i) v[i] = v[i + EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[N - EACH + i] = some[i];
    }
}

/* ---- fast activations for results of 16 bits ------------------------------------------------- */
/* They take two values at a time. Each value needs an exponential, and both share one reciprocal.
 */

/* x becomes x / (1 + 2^u), y becomes y / (1 + 2^w). u and w are limited to 63, so that the product
 * of the denominators stays finite. If u is NaN, fminf drops it, but x is NaN then, too. */
__device__ __forceinline__ void act_logistic_2(float &x, float &y, float u, float w) {
    const float a = 1.f + ex2_approx_ftz(fminf(u, 63.f)), b = 1.f + ex2_approx_ftz(fminf(w, 63.f));
    const float inverse = rcp_approx_ftz(a * b);
    x *= inverse * b;
    y *= inverse * a;
}

/* An x below -40 is replaced by -40, where silu is -2e-16. */
__device__ __forceinline__ void act_silu_2(float &x, float &y) {
    x = max_nan(x, -40.f);
    y = max_nan(y, -40.f);
    act_logistic_2(x, y, x * -1.44269504088896340736f, y * -1.44269504088896340736f);
}

/* Uses 1/2 (1 + tanh u) = 1 / (1 + e^-2u). An x below -7.25 is replaced by -7.25, where gelu_tanh
 * is -7e-17. */
__device__ __forceinline__ void act_gelu_tanh_2(float &x, float &y) {
    constexpr float once = -1.44269504088896340736f * 2 * 0.79788456080286535588f,
                    cubed = once * 0.044715f;
    x = max_nan(x, -7.25f);
    y = max_nan(y, -7.25f);
    act_logistic_2(x, y, x * fmaf(x * x, cubed, once), y * fmaf(y * y, cubed, once));
}

/* gelu(x) = max(x, 0) - |x| (1 - Phi(|x|)). This function returns the second term for x >= 0. 1 -
 * Phi is computed by Abramowitz and Stegun 7.1.26 with t = 1 / d, with an absolute error below
 * 4e-7. From x = 14 on it is 0. */
__device__ __forceinline__ float act_gelu_tail(float x, float t) {
    float q = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
    q = fmaf(t, q, 0.5f * 1.421413741f);
    q = fmaf(t, q, 0.5f * -0.284496736f);
    q = fmaf(t, q, 0.5f * 0.254829592f);
    return q * (t * x) * ex2_approx_ftz(x * (x * (-0.5f * 1.44269504088896340736f)));
}

__device__ __forceinline__ void act_gelu_2(float &x, float &y) {
    constexpr float p = 0.3275911f * 0.70710678118654752440f;
    const float u = fminf(fabsf(x), 14.f), w = fminf(fabsf(y), 14.f);
    const float a = fmaf(u, p, 1.f), b = fmaf(w, p, 1.f), inverse = rcp_approx_ftz(a * b);
    x = max_nan(x, 0.f) - act_gelu_tail(u, inverse * b);
    y = max_nan(y, 0.f) - act_gelu_tail(w, inverse * a);
}

/* Applies an activation to N values, N even. The activation is chosen outside the loops, because a
 * branch for each pair would serialise the values' latencies. */
template <int N> __device__ __forceinline__ void activate_16(gk_activation activation, float *v) {
    if (activation == GK_ACT_GELU) {
#pragma unroll
        for (int i = 0; i < N; i += 2) act_gelu_2(v[i], v[i + 1]);
    } else if (activation == GK_ACT_GELU_TANH) {
#pragma unroll
        for (int i = 0; i < N; i += 2) act_gelu_tanh_2(v[i], v[i + 1]);
    } else if (activation == GK_ACT_SILU) {
#pragma unroll
        for (int i = 0; i < N; i += 2) act_silu_2(v[i], v[i + 1]);
    } else if (activation == GK_ACT_RELU) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = v[i] <= 0 ? 0.f : v[i]; /* NaN stays NaN */
    }
}

/* The derivative of an activation. x: the value before the activation; for relu it may be the
 * output. For values beyond +-1000, also infinite ones, the derivative is its limit, 0 or 1. NaN
 * stays NaN. */
template <class W> __device__ __forceinline__ W act_derivative(gk_activation activation, W x) {
    const W sqrt_half = W(0.70710678118654752440), sqrt_2_over_pi = W(0.79788456080286535588),
            cubic = W(0.044715);
    const W inv_sqrt_2pi = W(0.39894228040143267794);
    x = x > W(1000) ? W(1000) : x < W(-1000) ? W(-1000) : x;
    switch (activation) {
    case GK_ACT_NONE: break;
    case GK_ACT_RELU: return x <= 0 ? W(0) : W(1);
    case GK_ACT_GELU:
        return W(0.5) * (1 + erf(x * sqrt_half)) + x * inv_sqrt_2pi * act_exp(W(-0.5) * x * x);
    case GK_ACT_GELU_TANH: {
        const W t = tanh(sqrt_2_over_pi * (x + cubic * x * x * x));
        return W(0.5) * (1 + t) +
               W(0.5) * x * (1 - t * t) * sqrt_2_over_pi * (1 + 3 * cubic * x * x);
    }
    case GK_ACT_SILU: {
        const W s = act_sigmoid(x);
        return s * (1 + x * (1 - s));
    }
    }
    return W(1);
}

#endif
