/* SPDX-License-Identifier: BSD-3-Clause */
/* score.cuh: what becomes of scale * q k before the softmax: softcap, then ALiBi.
 *   s = cap tanh(scale qk / cap) - slope |i + diagonal - j|
 * Kernels work in log2 units: weights are exp2(s log2(e) - m). */
#ifndef GPUKERN_CUDA_SCORE_CUH
#define GPUKERN_CUDA_SCORE_CUH

#include "../ptx/regs.cuh"
#include "../tile/convert.cuh"
#include "problem.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

template <class W> struct WideScore { /* W: float, double for float64 */
    W scale;                          /* of qk, natural units */
    W softcap;                        /* 0 = off */
    W slope;                          /* of this head, 0 = off */
    int position0;                    /* row i stands at position i + position0 */
};
typedef WideScore<float> Score;

template <class W = float>
__device__ __forceinline__ WideScore<W> score_of(const Problem &p, const Sequence &s, int b,
                                                 int head) {
    return {(W)p.rules.scale, (W)p.rules.softcap, slope_of<W>(p.rules, b, head),
            span_clamp(s.diagonal)};
}

/* tanh through one exponential: exact to 1e-7 of 1, so nothing near 0. 2^x may be infinite: 1 / x
 * is 0 then. */
__device__ __forceinline__ float tanh_fast(float x) {
    return fmaf(-2.f, rcp_approx_ftz(ex2_approx_ftz(2 * LOG2_E * x) + 1), 1.f);
}

/* tanh to a relative error of 1e-6, which 16 bits need of every score, however large the cap: below
 * 1/8 its series, of which the next term is 2e-7. Both sides, no branch. */
__device__ __forceinline__ float tanh_near(float x) {
    const float square = x * x;
    const float near = fmaf(x * square, fmaf(2.f / 15, square, -1.f / 3), x), far = tanh_fast(x);
    return fabsf(x) < 0.125f ? near : far;
}

/* tanh within a few units of the last place, near 0 too, where tanh_fast has lost them: there a
 * polynomial in x^2, fitted to (tanh(x) / x - 1) / x^2 over [0, 0.36], error 8e-8. Both sides, no
 * branch. */
__device__ __forceinline__ float tanh_fine(float x) {
    const float square = x * x;
    const float tail = fmaf(fmaf(fmaf(0.015608073f, square, -0.052207918f), square, 0.13313011f),
                            square, -0.33332589f);
    const float far = copysignf(tanh_fast(fabsf(x)), x);
    return fabsf(x) < 0.6f ? fmaf(x * square, tail, x) : far;
}
__device__ __forceinline__ double tanh_fine(double x) { return tanh(x); }

/* qk -> s in natural units, and ds / d(scale qk). distance: i + position0 - j. For 16 bits. */
__device__ __forceinline__ float score_fast(const Score &x, float qk, float distance,
                                            float *derivative) {
    float s = qk * x.scale;
    *derivative = 1;
    if (x.softcap > 0) {
        const float t = tanh_near(qk * __fdividef(x.scale, x.softcap));
        s = x.softcap * t;
        *derivative = 1 - t * t;
    }
    return s - x.slope * fabsf(distance);
}

/* The same for float32 and float64: every step rounded as W rounds it, so that a score is the same
 * in forward, in lse and in backward. */
template <class W>
__device__ __forceinline__ W score_fine(const WideScore<W> &x, W qk, int i, int j, W *derivative) {
    W s = qk * x.scale;
    *derivative = 1;
    if (x.softcap > 0) {
        const W t = tanh_fine(qk * (x.scale / x.softcap));
        s = x.softcap * t;
        *derivative = 1 - t * t;
    }
    return x.slope != 0 ? fma(-x.slope, (W)abs(i + x.position0 - j), s) : s;
}

template <class W>
__device__ __forceinline__ W score_fine(const WideScore<W> &x, W qk, int i, int j) {
    W derivative;
    return score_fine(x, qk, i, j, &derivative);
}

/* A product of rows in the kernels for any alignment, n a multiple of 8: eight sums, of every
 * eighth product. Short sums round less, and none waits for the last. One order for scores, dP and
 * delta (Bwd::dp_part). */
template <class T, class W>
__device__ __forceinline__ W dot_eighths(const W *a_s, const T *b_g, int n) {
    W part[8] = {};
#pragma unroll 1
    for (int d = 0; d < n; d += 8)
#pragma unroll
        for (int e = 0; e < 8; ++e) part[e] = fma(a_s[d + e], to_acc(b_g[d + e]), part[e]);
    return ((part[0] + part[1]) + (part[2] + part[3])) +
           ((part[4] + part[5]) + (part[6] + part[7]));
}

#endif
