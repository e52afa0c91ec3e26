/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_score.cuh: softcap and ALiBi in flash_attn_fwd_sm90a, on a block of products while the next ones run. Issue slots decide: a
 * block's weights take 3.5 a score, and beside products in flight each costs some 3 clocks. So a finished score stays
 * in the unit of the product, scale goes into the exponent's multiply-add, and every number that a call fixes is a kernel
 * parameter, which an instruction reads as an operand:
 *   s' = s P((scale s / cap)^2) = cap / scale tanh(scale s / cap)      5 slots and 1 for the test where all are near 0
 *   s'' = s' - slope / scale |i + diagonal - j|                        2 slots; 1 where all keys lie on one side of all rows */
#ifndef GPUKERN_CUDA_FWD_SCORE_CUH
#define GPUKERN_CUDA_FWD_SCORE_CUH

#include "../layout/layout.cuh" /* GK_HD */

#include <math.h>
#include <stdint.h>

/* Made on the host. c: tanh(x) / x = 1 + c1 x^2 + c2 x^4 + c3 x^6 for x below 0.4, error 1.2e-7, with (scale / cap)^(2 n)
 * in c_n. */
struct ScoreUnits {
    float unit_log2; /* of a finished score */
    float per_slope; /* a slope times this is one of finished scores */
    float power;     /* e^(-2 scale s / cap) is 2^(s power) */
    float over;      /* cap / scale */
    float limit;     /* |s| below this takes the polynomial */
    float c[3];
    bool capped, sloped;
    bool plain; /* false: scores in natural units, by modify() of mask.cuh */
};

inline ScoreUnits score_units(double scale, double softcap, bool sloped) {
    constexpr double log2_e = 1.4426950408889634;
    constexpr double tail[3] = {-0.3333188295, 0.1327762902, -0.04779421538};
    ScoreUnits u = {};
    u.capped = softcap > 0, u.sloped = sloped;
    const double factor = u.capped ? scale / softcap : 1;
    /* the largest product is the largest score, and powers below have full precision */
    u.plain = scale > 1e-30 &&
              ((!u.capped && !sloped) || (scale >= 1e-6 && scale <= 1e6 && factor >= 1e-15 && factor <= 1e3));
    u.unit_log2 = (float)(u.plain ? (float)scale : 1) * (float)log2_e;
    u.per_slope = (float)(u.plain ? 1 / scale : 1);
    if (!u.plain || !u.capped) return u;
    u.power = (float)(-2 * log2_e * factor), u.over = (float)(1 / factor);
    /* where c3 and c2 have no floats of full precision any more scores end earlier, before these terms count */
    u.limit = (float)((factor > 1e-6 ? 0.4 : 1e-3) / factor);
    double power = 1;
    for (int n = 0; n < 3; ++n) power *= factor * factor, u.c[n] = (float)(tail[n] * power);
    return u;
}

/* |s| below limit. */
inline GK_HD float capped_near(float s, const ScoreUnits &u) {
    const float q = s * s;
    return s * fmaf(fmaf(fmaf(u.c[2], q, u.c[1]), q, u.c[0]), q, 1.f);
}

/* Of a lane's columns 0, 1, 8, 9, 16, .. of a block those in [from, to), a bit each. */
template <int COLUMNS> GK_HD inline uint32_t columns_in(int from, int to) {
    uint32_t bits[2];
    for (int i = 0; i < 2; ++i) {
        const int end = i ? to : from, whole = end < 0 ? 0 : end / 8, rest = end < 0 ? 0 : end % 8;
        const int before = 2 * whole + (rest < 2 ? rest : 2);
        bits[i] = (uint32_t)(((uint64_t)1 << (before < COLUMNS ? before : COLUMNS)) - 1);
    }
    return bits[1] & ~bits[0];
}

#ifdef __CUDACC__
#include "../ptx/opaque.cuh"
#include "score.cuh"

/* Scores of columns that are not `kept` become -inf. s[4 n + 2 r + e]: row r, bit 2 n + e. */
template <int N> __device__ __forceinline__ void keep_columns(float (&s)[N], const uint32_t (&kept)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (!(kept[i / 2 & 1] >> (i / 4 * 2 + i % 2) & 1)) s[i] = -INFINITY;
}

/* Softcap. The polynomial for scores below the limit, whatever stands beside them. Where a warp has no others that is all;
 * else 16 of a lane's scores at a time, each behind a branch: side by side they take 64 registers more. */
template <int N> __device__ __forceinline__ void cap_scores(float (&s)[N], const ScoreUnits &u) {
    float top[2] = {0, 0}; /* two chains */
#pragma unroll
    for (int i = 0; i < N; ++i) top[i & 1] = fmaxf(top[i & 1], fabsf(s[i]));
    if (__all_sync(0xffffffffu, fmaxf(top[0], top[1]) < u.limit)) {
#pragma unroll
        for (int i = 0; i < N; ++i) s[i] = capped_near(s[i], u);
        return;
    }
#pragma unroll
    for (int first = 0; first < N; first += 16) {
        float some = 0;
#pragma unroll
        for (int i = first; i < first + 16; ++i) {
            opaque(s[i]); /* or both branches' polynomials move ahead of the test, all at once */
            float near = capped_near(s[i], u);
            opaque(near); /* or it becomes a branch a score */
            some = fmaxf(some, fabsf(s[i]));
            s[i] = fabsf(s[i]) >= u.limit ? s[i] : near;
        }
        if (__all_sync(0xffffffffu, some < u.limit)) continue;
#pragma unroll
        for (int i = first; i < first + 16; ++i) {
            const float y = ex2_approx_ftz(fabsf(s[i]) * u.power);
            float far = copysignf((1 - y) * rcp_approx_ftz(1 + y) * u.over, s[i]);
            opaque(far);
            s[i] = fabsf(s[i]) >= u.limit ? far : s[i];
        }
    }
}

/* ALiBi of keys on one side of the row: what differs from key to key. slope: falls away from the row, so it is negative behind it;
 * the rest, slope times ahead, is the same for all of them. */
template <int N> __device__ __forceinline__ void lean_one_side(float (&s)[N], const float (&slope)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = fmaf(slope[i / 2 & 1], (float)(i / 4 * 8 + i % 2), s[i]);
}

/* ALiBi. ahead: from the lane's first key to where rows 0 and 8 stand. Distances are exact where they are small; past 2^24
 * they round as any float of their size does. */
template <int N>
__device__ __forceinline__ void lean_scores(float (&s)[N], const float (&slope)[2], const float (&ahead)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int r = i / 2 & 1;
        s[i] = fmaf(-slope[r], fabsf(ahead[r] - (float)(i / 4 * 8 + i % 2)), s[i]);
    }
}
#endif

#endif
