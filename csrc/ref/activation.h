/* SPDX-License-Identifier: BSD-3-Clause */
/* activation.h: the activations and their derivatives in double (gk_activation in gpukern.h). */
#ifndef GPUKERN_REF_ACTIVATION_H
#define GPUKERN_REF_ACTIVATION_H

#include "../core/internal.h"

#define SQRT_HALF 0.70710678118654752440
#define SQRT_2_OVER_PI 0.79788456080286535588
#define INV_SQRT_2PI 0.39894228040143267794
#define TANH_CUBIC 0.044715

/* A NaN stays NaN: the comparisons are false for it, so it reaches an arithmetic expression. */
static inline double act(gk_activation activation, double x) {
    switch (activation) {
    case GK_ACT_NONE: break;
    case GK_ACT_RELU: return x < 0 ? 0 : x;
    case GK_ACT_GELU: return 0.5 * x * (1 + erf(x * SQRT_HALF));
    case GK_ACT_GELU_TANH:
        return 0.5 * x * (1 + tanh(SQRT_2_OVER_PI * (x + TANH_CUBIC * x * x * x)));
    case GK_ACT_SILU: return x / (1 + exp(-x));
    }
    return x;
}

/* The derivative at x, the value before the activation. For relu x may also be the result, which
 * has the same sign. An overflowed x gets the limit of the derivative, 0 or 1; all activations
 * have reached it at |x| = 1000. */
static inline double act_derivative(gk_activation activation, double x) {
    x = x > 1000 ? 1000 : x < -1000 ? -1000 : x;
    switch (activation) {
    case GK_ACT_NONE: break;
    case GK_ACT_RELU: return x <= 0 ? 0 : 1;
    case GK_ACT_GELU: return 0.5 * (1 + erf(x * SQRT_HALF)) + x * INV_SQRT_2PI * exp(-0.5 * x * x);
    case GK_ACT_GELU_TANH: {
        double t = tanh(SQRT_2_OVER_PI * (x + TANH_CUBIC * x * x * x));
        return 0.5 * (1 + t) +
               0.5 * x * (1 - t * t) * SQRT_2_OVER_PI * (1 + 3 * TANH_CUBIC * x * x);
    }
    case GK_ACT_SILU: {
        double s = 1 / (1 + exp(-x));
        return s * (1 + x * (1 - s));
    }
    }
    return 1;
}

#endif
