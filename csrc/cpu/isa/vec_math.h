/* SPDX-License-Identifier: BSD-3-Clause */
/* vec_math.h: functions of a vector that need no instruction beside vec.h's verbs.
 * Minimax polynomials found by a weighted Remez exchange; the stated bound is theirs plus float32
 * rounding. */
#ifndef GPUKERN_VEC_MATH_H
#define GPUKERN_VEC_MATH_H

#include "vec.h"

/* tanh, relative error below 2e-7 */
INLINE vf vf_tanh(vf x) {
    vf ax = vf_max(-x, x), t = x * x;
    vf p = vf_fma(vf_set1(-0.005602740717244392f), t, vf_set1(0.020539938387067032f));
    p = vf_fma(p, t, vf_set1(-0.05370532053438902f));
    p = vf_fma(p, t, vf_set1(0.13330932164514403f));
    p = vf_fma(p, t, vf_set1(-0.3333325220376818f));
    p = vf_fma(p, t, vf_set1(0.9999999955223664f)) * x;
    vf e = vf_exp2(ax * (-2 * GK_LOG2E));
    vf q = (1.0f - e) / (1.0f + e);
    q = vf_select(vf_lt(x, vf_set1(0.0f)), -q, q);
    return vf_select(vf_lt(t, vf_set1(0.4f)), p, q);
}

/* erf, absolute error below 2e-7 */
INLINE vf vf_erf(vf x) {
    vf ax = vf_min(vf_set1(9.0f), vf_max(-x, x)), t = x * x;
    vf p = vf_fma(vf_set1(7.853861180093309e-05f), t, vf_set1(-0.0008010193569257794f));
    p = vf_fma(p, t, vf_set1(0.005188327678681839f));
    p = vf_fma(p, t, vf_set1(-0.026853811930971312f));
    p = vf_fma(p, t, vf_set1(0.1128358514848707f));
    p = vf_fma(p, t, vf_set1(-0.3761262582422034f));
    p = vf_fma(p, t, vf_set1(1.128379165726714f)) * x;
    vf u = 1.0f / (1.0f + 0.5f * ax); /* erfc(x) = exp(-x^2) Q(1 / (1 + x/2)) */
    vf q = vf_fma(vf_set1(0.07358226826820538f), u, vf_set1(-0.32656212353093333f));
    q = vf_fma(q, u, vf_set1(0.3703690315561158f));
    q = vf_fma(q, u, vf_set1(0.03713060666780108f));
    q = vf_fma(q, u, vf_set1(0.2871080256519141f));
    q = vf_fma(q, u, vf_set1(0.2751701744795469f));
    q = vf_fma(q, u, vf_set1(0.28274697397556164f));
    q = vf_fma(q, u, vf_set1(-2.5869306793141285e-05f));
    q = 1.0f - q * vf_exp2(ax * ax * -GK_LOG2E);
    q = vf_select(vf_lt(x, vf_set1(0.0f)), -q, q);
    return vf_select(vf_lt(t, vf_set1(1.0f)), p, q); /* NaN passes through min, max and q */
}

/* 1 / (1 + exp(-x)) and what is missing to 1, each to a few units of itself; below -87 the result,
 * under 2e-38, is 0 */
INLINE vf vf_sigmoid_and_rest(vf x, vf *rest) {
    vf e = vf_exp2(vf_min(vf_set1(126.0f), x * -GK_LOG2E)), s = 1.0f / (1.0f + e);
    *rest = e * s;
    return vf_select(vf_lt(x, vf_set1(-87.0f)), vf_set1(0.0f), s);
}
INLINE vf vf_sigmoid(vf x) {
    vf rest;
    return vf_sigmoid_and_rest(x, &rest);
}

#endif
