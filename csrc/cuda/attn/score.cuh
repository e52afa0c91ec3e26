/* SPDX-License-Identifier: BSD-3-Clause */
/* score.cuh: softcap and ALiBi, which make a score from scale * q k, before the softmax. Every
 * attention kernel includes it.
 *
 *  s = cap tanh(scale qk / cap) - slope |i + diagonal - j|
 *
 * Most kernels work in log2 units, where a weight is 2^(s log2(e) - m). */
#ifndef GPUKERN_CUDA_SCORE_CUH
#define GPUKERN_CUDA_SCORE_CUH

#include "../ptx/regs.cuh"
#include "../tile/convert.cuh"
#include "problem.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

template <class W> struct WideScore { /* W: float, or double for float64 */
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

/* tanh by one exponential. Its absolute error is 1e-7, so values near 0 lose their relative
 * precision. If 2^x overflows to infinity, its reciprocal is 0, which is right. */
__device__ __forceinline__ float tanh_fast(float x) {
    return fmaf(-2.f, rcp_approx_ftz(ex2_approx_ftz(2 * LOG2_E * x) + 1), 1.f);
}

/* tanh with a relative error of 1e-6, which 16-bit results need for every score, however large the
 * cap is. Below 1/8 it uses the series, whose next term is 2e-7. Both forms are computed; there is
 * no branch. */
__device__ __forceinline__ float tanh_near(float x) {
    const float square = x * x;
    const float near = fmaf(x * square, fmaf(2.f / 15, square, -1.f / 3), x), far = tanh_fast(x);
    return fabsf(x) < 0.125f ? near : far;
}

/* tanh within a few units in the last place, also near 0, where tanh_fast loses its digits.
 * There it uses a polynomial in x^2 that is fitted to (tanh(x) / x - 1) / x^2 over [0, 0.36],
 * with an error of 8e-8. Both forms are computed; there is no branch. */
__device__ __forceinline__ float tanh_fine(float x) {
    const float square = x * x;
    const float tail = fmaf(fmaf(fmaf(0.015608073f, square, -0.052207918f), square, 0.13313011f),
                            square, -0.33332589f);
    const float far = copysignf(tanh_fast(fabsf(x)), x);
    return fabsf(x) < 0.6f ? fmaf(x * square, tail, x) : far;
}
__device__ __forceinline__ double tanh_fine(double x) { return tanh(x); }

/* The score in natural units of a raw product qk, for 16-bit inputs. *derivative becomes
 * ds / d(scale qk). distance: i + position0 - j. */
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

/* score_fast for float32 and float64. Every step is rounded to W, so that a score has the same
 * bits in forward, in lse and in backward. */
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

/* The dot product of two rows in the kernels that take any alignment; n is a multiple of 8. Each of
 * eight partial sums takes every eighth product: short sums round less, and consecutive additions
 * do not wait for each other. Scores, dP and delta use the same order (Bwd::dp_part). */
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
