/* SPDX-License-Identifier: BSD-3-Clause */
/* stale_softmax.cuh: the online softmax of 16 rows of a warp with a reference that stays
 * (docs/numerics.md, "A maximum that may be stale").
 *   softmax(s) v = (sum 2^(c s - m) v) / (sum 2^(c s - m))   for any m that keeps the powers inside the float range
 * The first block of keys sets m to its largest score. Later blocks reuse it: no maximum, no
 * exchange between lanes, no rescaling of O. A row whose partial sum leaves the range takes its
 * block again with a new m (redo); what a row does depends on its own scores alone. s[4 n + 2 r +
 * e]: row r of the lane's two, column 8 n + e. */
#ifndef GPUKERN_CUDA_STALE_SOFTMAX_CUH
#define GPUKERN_CUDA_STALE_SOFTMAX_CUH

#include "../tile/convert.cuh"
#include "../tile/reduce.cuh"
#include "forward/fwd_score.cuh"

/* The largest weight of a row's reference block is 1; a lane's sum of weights must stay below
 * LIMIT. */
template <class T> struct StaleRange;
template <>
/* the exponents of float; O is weights times v, so some are left for v */
struct StaleRange<__nv_bfloat16> {
    static constexpr float LIMIT = 0x1p80f;
};
template <> struct StaleRange<__half> { /* weights end at 65504 */
    static constexpr float LIMIT = 0x1p15f;
};

/* m of a row that has seen no key: any score asks for a redo */
constexpr float STALE_NOTHING = -3e38f;

template <class T, int BKV> struct StaleSoftmax {
    static constexpr int N = BKV / 8;
    typedef StaleRange<T> Range;
    float m[2], total[2]; /* m in log2 units; total: this lane's share */

    __device__ __forceinline__ void clear() {
        m[0] = m[1] = STALE_NOTHING;
        total[0] = total[1] = 0;
    }

    /* Weights of scores [first, end) by the present m, added to part: of this lane, two chains a
     * row, since an addition waits for the one before it. */
    __device__ __forceinline__ void weigh(const float (&s)[N * 4], float unit_log2,
                                          float (&w)[N * 4], float (&part)[4], int first,
                                          int end) const {
#pragma unroll
        for (int i = first / 2; i < end / 2; ++i) {
            const int r = i & 1;
            w[2 * i] = ex2_approx_ftz(fmaf(s[2 * i], unit_log2, -m[r]));
            w[2 * i + 1] = ex2_approx_ftz(fmaf(s[2 * i + 1], unit_log2, -m[r]));
            part[r] += w[2 * i];
            part[2 + r] += w[2 * i + 1];
        }
    }

    /* Of a block; sum: of this lane, by row. */
    __device__ __forceinline__ void weights(const float (&s)[N * 4], float unit_log2,
                                            float (&w)[N * 4], float (&sum)[2]) const {
        float part[4] = {0, 0, 0, 0};
        weigh(s, unit_log2, w, part, 0, N * 4);
        sum[0] = part[0] + part[2];
        sum[1] = part[1] + part[3];
    }

    /* Of exponents as they are; exponent(i): that of score i. One chain a row: registers are short,
     * and powers come no faster. */
    template <class Exponent>
    __device__ __forceinline__ void weights_of(const Exponent &exponent, float (&w)[N * 4],
                                               float (&sum)[2]) const {
        sum[0] = sum[1] = 0;
#pragma unroll
        for (int i = 0; i < N * 4; ++i) {
            w[i] = ex2_approx_ftz(exponent(i));
            sum[i / 2 & 1] += w[i];
        }
    }

    /* Of masked scores: keys that no row of the warp sees have no weight, and cost nothing. */
    __device__ __forceinline__ void weights_kept(const float (&s)[N * 4], float unit_log2,
                                                 const KeptColumns &columns, float (&w)[N * 4],
                                                 float (&sum)[2]) const {
        float part[4] = {0, 0, 0, 0};
#pragma unroll
        for (int first = 0; first < N * 4; first += 16) {
            if (columns.any(first)) {
                weigh(s, unit_log2, w, part, first, first + 16);
            } else {
#pragma unroll
                for (int i = first; i < first + 16; ++i) w[i] = 0;
            }
        }
        sum[0] = part[0] + part[2];
        sum[1] = part[1] + part[3];
    }

    /* Weights as operands of the next product. */
    static __device__ __forceinline__ void pack(const float (&w)[N * 4], uint32_t (&p)[N * 2]) {
#pragma unroll
        for (int i = 0; i < N * 2; ++i) p[i] = pack2<T>(w[2 * i], w[2 * i + 1]);
    }

    /* The m that the largest score of row r asks for, the same in its four lanes; of every EACH-th
     * octet of keys. -inf: the row sees none of them. */
    template <int EACH = 1>
    static __device__ __forceinline__ float row_top(const float (&s)[N * 4], float unit_log2,
                                                    int r) {
        float top = s[2 * r];
#pragma unroll
        for (int n = 0; n < N; n += EACH)
            top = fmaxf(top, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
        return quad_max(top) * unit_log2;
    }

    /* Whether a row of this lane must take its block again; NaN does. */
    static __device__ __forceinline__ bool out_of_range(const float (&sum)[2]) {
        return !(sum[0] < Range::LIMIT) || !(sum[1] < Range::LIMIT);
    }

    /* Rows that are out of range get the m that `top` asks for. factor: what a row's older sums
     * must be multiplied by. */
    __device__ __forceinline__ void refer_again(const float (&top)[2], const float (&sum)[2],
                                                float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const unsigned lanes = __ballot_sync(0xffffffffu, !(sum[r] < Range::LIMIT));
            const bool again = lanes >> (threadIdx.x & 28) & 15;
            factor[r] = again ? ex2_approx_ftz(m[r] - top[r]) : 1.f;
            m[r] = again ? top[r] : m[r];
            total[r] *= factor[r];
        }
    }

    /* That from this block; all weights are computed again, those of other rows to the same
     * bits. */
    __device__ __forceinline__ void redo(const float (&s)[N * 4], float unit_log2,
                                         float (&w)[N * 4], float (&sum)[2], float (&factor)[2]) {
        const float top[2] = {row_top(s, unit_log2, 0), row_top(s, unit_log2, 1)};
        refer_again(top, sum, factor);
        weights(s, unit_log2, w, sum);
    }

    /* A row that sees no key of its first block asks for a redo later. */
    __device__ __forceinline__ void refer_to(const float (&top)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) m[r] = top[r] == -INFINITY ? STALE_NOTHING : top[r];
    }

    /* The first block of a tile sets m to its largest score. SAMPLED: to the largest of a quarter
     * of them, in as many instructions; whoever asks so asks also whether a row is out of range
     * then. */
    template <bool SAMPLED>
    __device__ __forceinline__ void refer(const float (&s)[N * 4], float unit_log2) {
        const float top[2] = {row_top<SAMPLED ? 4 : 1>(s, unit_log2, 0),
                              row_top<SAMPLED ? 4 : 1>(s, unit_log2, 1)};
        refer_to(top);
    }

    /* The sum of a row's weights, and lse from it where there is no sink. */
    __device__ __forceinline__ float sum_of(int r) const { return quad_sum(total[r]); }
    __device__ __forceinline__ float lse_of(int r, float sum) const {
        return (m[r] + __log2f(sum)) * LN_2;
    }

    /* What the row's sums come to, in natural units. */
    __device__ __forceinline__ RowSum result(int r, float sink) const {
        return row_sum(m[r] * LN_2, quad_sum(total[r]), sink);
    }
};

#endif
