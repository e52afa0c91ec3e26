/* activation.cuh: the activations of gemm and their derivatives, in float or double (gk_activation in gpukern.h).
 * Hendrycks and Gimpel 2016, arXiv:1606.08415 (GELU and SiLU). */
#ifndef GPUKERN_CUDA_ACTIVATION_CUH
#define GPUKERN_CUDA_ACTIVATION_CUH

#include "../kernels.h"
#include "../ptx/regs.cuh"

__device__ __forceinline__ float act_exp(float x) { return expf(x); }
__device__ __forceinline__ double act_exp(double x) { return exp(x); }

template <class W> __device__ __forceinline__ W act_sigmoid(W x) { return 1 / (1 + act_exp(-x)); }

/* x / (1 + e^-x): 0 where e^-x is inf */
__device__ __forceinline__ float act_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
__device__ __forceinline__ double act_silu(double x) { return x / (1 + exp(-x)); }

/* x / (1 + e^-u) by the special units; far below 0 e^-u is inf and its inverse 0 */
__device__ __forceinline__ float act_silu_of(float x, float u) {
    return x * rcp_approx_ftz(1.f + ex2_approx_ftz(u * -1.44269504088896340736f));
}

template <class W> __device__ __forceinline__ W activate(gk_activation activation, W x) {
    const W sqrt_half = W(0.70710678118654752440), sqrt_2_over_pi = W(0.79788456080286535588), cubic = W(0.044715);
    switch (activation) {
    case GK_ACT_NONE: break;
    case GK_ACT_RELU: return x <= 0 ? W(0) : x; /* a NaN stays one */
    case GK_ACT_GELU: return W(0.5) * x * (1 + erf(x * sqrt_half));
    case GK_ACT_GELU_TANH: return W(0.5) * x * (1 + tanh(sqrt_2_over_pi * (x + cubic * x * x * x)));
    case GK_ACT_SILU: return act_silu(x);
    }
    return x;
}

/* For results of 16 bits: two instructions of the special units an element, absolute error below 4e-7.
 * gelu: 1 - Phi(z) by Abramowitz and Stegun 7.1.26, z = |x| / sqrt 2 */
__device__ __forceinline__ float act_gelu_16(float x) {
    const float z = fabsf(x) * 0.70710678118654752440f, t = rcp_approx_ftz(fmaf(0.3275911f, z, 1.f));
    float q = fmaf(t, 0.5f * 1.061405429f, 0.5f * -1.453152027f);
    q = fmaf(t, q, 0.5f * 1.421413741f), q = fmaf(t, q, 0.5f * -0.284496736f), q = fmaf(t, q, 0.5f * 0.254829592f);
    const float tail = x * (q * t * ex2_approx_ftz(z * z * -1.44269504088896340736f)); /* beyond |x| */
    return x < 0 ? tail : z < 20 ? x - tail : x; /* inf - inf * 0 would be a NaN */
}

/* 1/2 (1 + tanh u) = 1 / (1 + e^-2u) */
__device__ __forceinline__ float act_gelu_tanh_16(float x) {
    return act_silu_of(x, x * fmaf(x * x, 2 * 0.79788456080286535588f * 0.044715f, 2 * 0.79788456080286535588f));
}

/* One choice for all: between two of them the elements' latencies would add up. */
template <int N> __device__ __forceinline__ void activate_16(gk_activation activation, float (&v)[N]) {
    if (activation == GK_ACT_GELU) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = act_gelu_16(v[i]);
    } else if (activation == GK_ACT_GELU_TANH) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = act_gelu_tanh_16(v[i]);
    } else if (activation == GK_ACT_SILU) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] = act_silu_of(v[i], v[i]);
    }
}

/* saved is the value before the activation; for relu the output. */
template <class W> __device__ __forceinline__ W act_derivative(gk_activation activation, W x) {
    const W sqrt_half = W(0.70710678118654752440), sqrt_2_over_pi = W(0.79788456080286535588), cubic = W(0.044715);
    const W inv_sqrt_2pi = W(0.39894228040143267794);
    switch (activation) {
    case GK_ACT_NONE: break;
    case GK_ACT_RELU: return x <= 0 ? W(0) : W(1);
    case GK_ACT_GELU: return W(0.5) * (1 + erf(x * sqrt_half)) + x * inv_sqrt_2pi * act_exp(W(-0.5) * x * x);
    case GK_ACT_GELU_TANH: {
        const W t = tanh(sqrt_2_over_pi * (x + cubic * x * x * x));
        return W(0.5) * (1 + t) + W(0.5) * x * (1 - t * t) * sqrt_2_over_pi * (1 + 3 * cubic * x * x);
    }
    case GK_ACT_SILU: {
        const W s = act_sigmoid(x);
        return s * (1 + x * (1 - s));
    }
    }
    return W(1);
}

#endif
