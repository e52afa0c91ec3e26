/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_score.cuh: softcap and ALiBi in flash_attn_fwd_sm90a, applied to a block of scores while the
 * next products run.
 *
 * Issue slots limit the speed. The weights of a block take 3.5 instructions a score, and while
 * products are in flight each instruction takes about 3 clocks. So every constant of a call is a
 * kernel parameter, which an instruction reads as an operand. The exponent of a weight is one
 * multiply-add of the product s:
 *
 *   softcap   2^(s t - m), t = scale log2(e) P(s^2)
 *             if all scores of a warp are small: 3 instructions, and half a one for the test
 *   ALiBi     2^(s scale log2(e) + a), a = -m - slope |i + diagonal - j|
 *
 * The ALiBi addend a is computed while the kernel waits for the product. Three cases compute the
 * complete score in log2 units first: softcap with ALiBi, a tile's first block, and a block that is
 * redone. */
#ifndef GPUKERN_CUDA_FWD_SCORE_CUH
#define GPUKERN_CUDA_FWD_SCORE_CUH

#include "../../layout/layout.cuh" /* GK_HD */

#ifdef __CUDACC__
#include "../../ptx/opaque.cuh"
#include "../score.cuh"
#endif

#include <math.h>
#include <stdint.h>

/* The constants of a call, computed on the host. A score is near if x = scale s / cap is below
 * 0.272. For such x, tanh(x) / x = 1 + a x^2 + b x^4 with a relative error of 1e-6.
 *
 * With q = s^2 + add, a score is near if q is below `end`, a power of two. The q of all near scores
 * have the same exponent, so the bitwise or of many q shows whether all scores are near. */
struct ScoreUnits {
    float unit_log2; /* scale log2(e) */
    float add, end;  /* for q: the offset, and the bound of near scores */
    float limit;     /* scores with |s| below this are near */
    float c[3];      /* scale log2(e) tanh(x) / x = c0 + c1 q + c2 q^2 */
    float power;     /* e^(-2 scale s / cap) is 2^(s power) */
    float over;      /* cap in log2 units */
    bool capped, has_alibi;
    bool plain; /* false: scale or softcap is outside the range in which these formulas hold */
};

inline ScoreUnits score_units(double scale, double softcap, bool has_alibi) {
    constexpr double log2_e = 1.4426950408889634, a = -0.33321135, b = 0.12795151;
    ScoreUnits u = {};
    u.capped = softcap > 0;
    u.has_alibi = has_alibi;
    const double factor = u.capped ? scale / softcap : 1;
    /* the bounds keep the largest score finite and the powers below at full precision */
    u.plain = scale > 1e-30 && ((!u.capped && !has_alibi) || (scale >= 1e-6 && scale <= 1e6 &&
                                                              factor >= 1e-15 && factor <= 1e3));
    const double unit = (float)scale * log2_e;
    u.unit_log2 = (float)unit;
    if (!u.plain || !u.capped) return u;
    u.power = (float)(-2 * log2_e * factor);
    u.over = (float)(unit / factor);
    /* For very small factors c2 is not a normal float. The near range then ends at x = 1e-3, where
     * the term with c2 is negligible. */
    const double most = (factor > 1e-6 ? 0.272 : 1e-3) / factor, x2 = factor * factor;
    const double end = exp2(ceil(log2(most * most)) + 1), add = end - most * most;
    u.end = (float)end;
    u.add = (float)add;
    u.limit = (float)(0.9999 * most);
    u.c[2] = (float)(unit * b * x2 * x2);
    u.c[1] = (float)(unit * (a * x2 - 2 * b * x2 * x2 * add));
    u.c[0] = (float)(unit * (1 - a * x2 * add + b * x2 * x2 * add * add));
    return u;
}

inline GK_HD float cap_square(float s, const ScoreUnits &u) { return fmaf(s, s, u.add); }
/* The factor of s if s is near (q < end). */
inline GK_HD float cap_factor(float q, const ScoreUnits &u) {
    return fmaf(fmaf(u.c[2], q, u.c[1]), q, u.c[0]);
}

/* The columns of a lane that lie in [from, to), as one bit each. Relative to its first column, a
 * lane has columns 0, 1, 8, 9, 16, 17 and so on of a block. */
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
/* Which of a lane's columns its two rows see, and what the rows of the warp have in common. Each
 * bit is a column. */
struct KeptColumns {
    uint32_t kept[2];
    uint32_t some, whole; /* columns that some row sees; columns that all rows see */

    __device__ __forceinline__ void agree() {
        some = __reduce_or_sync(0xffffffffu, kept[0] | kept[1]);
        whole = __reduce_and_sync(0xffffffffu, kept[0] & kept[1]);
    }
    /* For scores first to first + 15, which are four groups of 8 keys. any: some row sees one of
     * these keys. all: every row sees all of them. */
    __device__ __forceinline__ bool any(int first) const { return some >> first / 2 & 255; }
    __device__ __forceinline__ bool all(int first) const {
        return (whole >> first / 2 & 255) == 255;
    }
    __device__ __forceinline__ bool has(int i) const {
        return kept[i / 2 & 1] >> (i / 4 * 2 + i % 2) & 1;
    }
};

/* Sets the scores of columns that a row does not see to -inf. s[4 n + 2 r + e] belongs to row r and
 * bit 2 n + e. */
template <int N>
__device__ __forceinline__ void keep_columns(float (&s)[N], const KeptColumns &columns) {
#pragma unroll
    for (int first = 0; first < N; first += 16) {
        if (columns.all(first)) continue;
#pragma unroll
        for (int i = first; i < first + 16; ++i)
            if (!columns.has(i)) s[i] = -INFINITY;
    }
}

/* tanh(scale s / cap) of a score that is not near. */
__device__ __forceinline__ float cap_far(float s, const ScoreUnits &u) {
    const float y = ex2_approx_ftz(fabsf(s) * u.power);
    return copysignf((1 - y) * rcp_approx_ftz(1 + y), s);
}

/* The addend of the exponent of score i: ALiBi minus the row's reference m. ahead: the positions of
 * the lane's two rows, relative to its first key. Distances up to 2^24 are exact; larger ones are
 * rounded to float. slope: in log2 units. */
__device__ __forceinline__ float alibi_addend(int i, const float (&slope)[2],
                                              const float (&ahead)[2], const float (&m)[2]) {
    const int r = i / 2 & 1;
    return fmaf(-slope[r], fabsf(ahead[r] - (float)(i / 4 * 8 + i % 2)), -m[r]);
}

/* The exponents of scores i and i + 1 under a softcap, with ALiBi or a slope of 0. ahead: as above,
 * for row 0. If a score is not near, the code branches for two scores at a time; there are no
 * registers for more. The bits of a score depend on itself alone. */
template <int N>
__device__ __forceinline__ void cap_exponents(float (&s)[N], int i, const ScoreUnits &u,
                                              float slope, float ahead, const float (&m)[2],
                                              float (&to)[2]) {
    const int r = i / 2 & 1;
    const auto addend = [&](int e) {
        return fmaf(-slope, fabsf(ahead - (float)(i / 4 * 8 + e - 8 * r)), -m[r]);
    };
    bool near = true;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        opaque(s[i + e]); /* otherwise the compiler moves all polynomials before the tests */
        const float q = cap_square(s[i + e], u);
        near = near && q < u.end;
        to[e] = fmaf(s[i + e], cap_factor(q, u), addend(e));
    }
    if (__all_sync(0xffffffffu, near)) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        opaque(to[e]); /* otherwise the compiler makes a branch for each score */
        float far = fmaf(cap_far(s[i + e], u), u.over, addend(e));
        opaque(far);
        to[e] = cap_square(s[i + e], u) < u.end ? to[e] : far;
    }
}

/* ALiBi addends for a block whose keys all lie on one side of all rows. side: 1 if the keys come
 * before the rows, -1 if they come after. The part that all keys of a row have in common is
 * computed once, so an addend is one multiply-add. */
struct OneSidedAlibi {
    float each[2], common[2];
    __device__ __forceinline__ float addend(int i) const {
        return fmaf(each[i / 2 & 1], (float)(i / 4 * 8 + i % 2), common[i / 2 & 1]);
    }
};
__device__ __forceinline__ OneSidedAlibi one_sided_alibi(const float (&slope)[2],
                                                         const float (&ahead)[2], int side,
                                                         const float (&m)[2]) {
    OneSidedAlibi y;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        y.each[r] = side < 0 ? -slope[r] : slope[r];
        y.common[r] = -fmaf(y.each[r], ahead[r], m[r]);
    }
    return y;
}

/* The ALiBi addends of all scores of a block. */
template <int N>
__device__ __forceinline__ void alibi_addends(float (&to)[N], const float (&slope)[2],
                                              const float (&ahead)[2], int side,
                                              const float (&m)[2]) {
    if (side == 0) {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = alibi_addend(i, slope, ahead, m);
    } else {
        const OneSidedAlibi of = one_sided_alibi(slope, ahead, side, m);
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = of.addend(i);
    }
}
#endif

#endif
