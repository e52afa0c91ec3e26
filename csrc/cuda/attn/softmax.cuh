/* SPDX-License-Identifier: BSD-3-Clause */
/* softmax.cuh: the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) of the attention
 * kernels.
 *
 *  m = max of the scores so far   l = sum of e^(s - m)   O = sum of e^(s - m) v
 *
 *  RowSoftmax     one row: kernels on CUDA cores and over paged caches, merges of partial results
 *  OnlineSoftmax  rows in mma accumulators: flash_attn_fwd_sm80
 *  row_sum        the final sum of a row, with the sink
 *
 * Hopper's forward uses StaleSoftmax (stale_softmax.cuh). */
#ifndef GPUKERN_CUDA_SOFTMAX_CUH
#define GPUKERN_CUDA_SOFTMAX_CUH

#include "../ptx/regs.cuh"
#include "../tile/convert.cuh"
#include "../tile/reduce.cuh"
#include "score.cuh"
#include "tiles.h"

/* ---- 1. one row ------------------------------------------------------------------------------ */
/* e^x in three precisions. */
struct ExpFull { /* rounded as the type's exp */
    template <class W> static __device__ __forceinline__ W of(W x) { return exp(x); }
};
struct ExpByTwo { /* about the same error in fewer instructions */
    static __device__ __forceinline__ float of(float x) { return exp2f(x * LOG2_E); }
};
/* relative error 2^-22; the rounding of x LOG2_E grows with |x|, where the weight is small */
struct ExpApprox {
    static __device__ __forceinline__ float of(float x) { return ex2_approx_ftz(x * LOG2_E); }
};

/* A running maximum and sum, in natural units. The caller keeps O and multiplies it by the factor
 * that raise returns. */
template <class Exp, class W = float> struct RowSoftmax {
    W peak, sum; /* -inf and 0: the row has seen no key */

    /* the peak, or 0 before the first key, because -inf - -inf is NaN */
    __device__ __forceinline__ W base() const { return peak == W(-INFINITY) ? W(0) : peak; }
    __device__ __forceinline__ W weight(W s) const { return Exp::of(s - base()); }

    /* Raises the maximum to `highest`, the largest new score. Returns the factor for the earlier
     * sum and O. */
    __device__ __forceinline__ W raise(W highest) {
        const W before = peak;
        peak = lanes_max2(before, highest);
        return Exp::of(before - base());
    }

    /* Adds a sum over other keys, whose maximum is at most this one. Returns the factor of the O
     * that belongs to it. */
    __device__ __forceinline__ W join(W their_peak, W their_sum) {
        const W factor = weight(their_peak);
        sum += factor * their_sum;
        return factor;
    }
};

/* ---- 2. rows in accumulators ----------------------------------------------------------------- */
/* M blocks of 16 rows. A lane has elements of rows frag_row(lane, 0) and frag_row(lane, 2) of each
 * block, and four lanes have the elements of a row. Scores may have any factor: times unit_log2 > 0
 * they are in log2 units. peak may be smaller than the maximum, by at most SOFTMAX_SLACK_LOG2. */
template <int M> struct OnlineSoftmax {
    float peak[M][2], total[M][2]; /* total: the sum of the row's weights in this lane */

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int m = 0; m < M; ++m) {
            peak[m][0] = peak[m][1] = -INFINITY;
            total[m][0] = total[m][1] = 0;
        }
    }

    /* Replaces the scores s [M][N][4] by weights. Rescales o [M][ND][4] if a maximum has grown. */
    template <int N, int ND>
    __device__ __forceinline__ void step(float (&s)[M][N][4], float (&o)[M][ND][4],
                                         float unit_log2) {
        float highest[M][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x = s[m][0][2 * r];
#pragma unroll
                for (int n = 0; n < N; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                highest[m][r] = fmaxf(quad_max(x), peak[m][r]);
                /* -inf - -inf is NaN, which counts as not grown */
                grown |= (highest[m][r] - peak[m][r]) * unit_log2 > SOFTMAX_SLACK_LOG2;
            }
        }
        if (__any_sync(0xffffffffu, grown)) rescale(highest, o, unit_log2);
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float shift = peak[m][r] == -INFINITY ? 0.f : peak[m][r] * unit_log2;
                /* two sums, because consecutive additions to one sum wait for each other */
                float sum0 = 0, sum1 = 0;
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    s[m][n][2 * r] = ex2_approx_ftz(fmaf(s[m][n][2 * r], unit_log2, -shift));
                    s[m][n][2 * r + 1] =
                        ex2_approx_ftz(fmaf(s[m][n][2 * r + 1], unit_log2, -shift));
                    sum0 += s[m][n][2 * r];
                    sum1 += s[m][n][2 * r + 1];
                }
                total[m][r] += sum0 + sum1;
            }
        }
    }

    /* Sets the peaks to `highest` and rescales the sums and o. */
    template <int ND>
    __device__ __forceinline__ void rescale(const float (&highest)[M][2], float (&o)[M][ND][4],
                                            float unit_log2) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float to = highest[m][r] == -INFINITY ? 0.f : highest[m][r];
                const float shrink = ex2_approx_ftz((peak[m][r] - to) * unit_log2);
                peak[m][r] = highest[m][r];
                total[m][r] *= shrink;
#pragma unroll
                for (int n = 0; n < ND; ++n) {
                    o[m][n][2 * r] *= shrink;
                    o[m][n][2 * r + 1] *= shrink;
                }
            }
        }
    }
};

/* ---- 3. the end of a row --------------------------------------------------------------------- */
/* The final sum of a row. The result is O times factor. A sum of 0 means that the row saw no key
 * and has no sink. */
struct RowSum {
    float top, share, sum;
    __device__ __forceinline__ float factor() const { return sum == 0 ? 0.f : share / sum; }
    __device__ __forceinline__ float lse() const { return sum == 0 ? -INFINITY : top + logf(sum); }
};

/* peak is in natural units; total is the sum of e^(s - peak), 0 if the row saw no key. A sink of
 * -inf counts as no sink. */
template <class Exp = ExpByTwo>
__device__ __forceinline__ RowSum row_sum(float peak, float total, float sink) {
    if (sink == -INFINITY) return {peak, 1.f, total};
    const float top = total == 0 ? sink : fmaxf(peak, sink);
    const float share = total == 0 ? 0.f : Exp::of(peak - top);
    return {top, share, total * share + Exp::of(sink - top)};
}

struct RowResult {
    float factor, lse;
};
__device__ __forceinline__ RowResult row_result(float peak, float total, float sink) {
    const RowSum x = row_sum(peak, total, sink);
    return {x.factor(), x.lse()};
}

/* W is double for float64, whose sinks are double. */
template <class W = float>
__device__ __forceinline__ W load_sink(const void *sinks, gk_dtype dtype, int64_t at) {
    if (dtype == GK_BF16) return (W)to_acc(((const __nv_bfloat16 *)sinks)[at]);
    if (dtype == GK_F16) return (W)to_acc(((const __half *)sinks)[at]);
    return ((const W *)sinks)[at];
}

template <class W = float> __device__ __forceinline__ W sink_of(const Rules &rules, int head) {
    return rules.sinks ? load_sink<W>(rules.sinks, rules.sinks_dtype, head * rules.sink_head)
                       : W(-INFINITY);
}
__device__ __forceinline__ float sink_of(const Problem &p, int head) {
    return sink_of(p.rules, head);
}

#endif
