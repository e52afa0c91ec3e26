/* activation.cuh: the activations of gemm and their derivatives, in float or double (gk_activation in gpukern.h).
 * Hendrycks and Gimpel 2016, arXiv:1606.08415 (GELU and SiLU). */
#ifndef GPUKERN_CUDA_ACTIVATION_CUH
#define GPUKERN_CUDA_ACTIVATION_CUH

#include "../kernels.h"

__device__ __forceinline__ float act_exp(float x) { return expf(x); }
__device__ __forceinline__ double act_exp(double x) { return exp(x); }

template <class W> __device__ __forceinline__ W act_sigmoid(W x) { return 1 / (1 + act_exp(-x)); }

/* x / (1 + e^-x): 0 where e^-x is inf */
__device__ __forceinline__ float act_silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
__device__ __forceinline__ double act_silu(double x) { return x / (1 + exp(-x)); }

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
