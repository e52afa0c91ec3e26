/* SPDX-License-Identifier: BSD-3-Clause */
/* activation.h: the activations of gemm and of gated linear units, and their derivatives, as
 * vectors (gk_activation in gpukern.h). */
#ifndef GPUKERN_CPU_ACTIVATION_H
#define GPUKERN_CPU_ACTIVATION_H

#include "vec_math.h"

INLINE vf activate(vf x, gk_activation activation) {
    switch (activation) {
    case GK_ACT_RELU: return vf_select(vf_lt(x, vf_set1(0)), vf_set1(0), x); /* NaN stays NaN */
    case GK_ACT_GELU: return 0.5f * x * (1.0f + vf_erf(x * 0.70710678f));
    case GK_ACT_GELU_TANH: /* (1 + tanh(u)) / 2 = sigmoid(2 u), which does not cancel for u < 0 */
        return x * vf_sigmoid(1.5957691f * vf_fma(0.044715f * x * x, x, x));
    case GK_ACT_SILU: return x * vf_sigmoid(x);
    default: return x;
    }
}

/* The derivative at x, the value before the activation. Not for relu. */
INLINE vf activation_slope(vf x, gk_activation activation) {
    const vf one = vf_set1(1);
    /* An overflowed preact gets the limit of the derivative, 0 or 1. All activations have
     * reached it at |x| = 1000. NaN stays NaN. */
    x = vf_max(vf_set1(-1000), vf_min(vf_set1(1000), x));
    switch (activation) {
    case GK_ACT_GELU: {
        vf density = 0.39894228f * vf_exp2(x * x * (-0.5f * GK_LOG2E));
        return vf_fma(x, density, 0.5f * (1.0f + vf_erf(x * 0.70710678f)));
    }
    /* derivative of x s(2 u) is s + s 2 u' x (1 - s); neither s nor 1 - s cancels */
    case GK_ACT_GELU_TANH: {
        vf xx = x * x, rest,
           s = vf_sigmoid_and_rest(1.5957691f * vf_fma(0.044715f * xx, x, x), &rest);
        return vf_fma(s, x * rest * (1.5957691f * vf_fma(vf_set1(3 * 0.044715f), xx, one)), s);
    }
    case GK_ACT_SILU: {
        vf rest, s = vf_sigmoid_and_rest(x, &rest);
        return vf_fma(s, x * rest, s);
    }
    default: return one;
    }
}

#endif
