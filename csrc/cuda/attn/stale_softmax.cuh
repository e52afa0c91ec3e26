/* SPDX-License-Identifier: BSD-3-Clause */
/* stale_softmax.cuh: the online softmax of Hopper's forward kernels, for 16 rows of a warp, with a
 * reference m that rarely changes (docs/numerics.md, "A maximum that may be stale").
 *
 *   softmax(s) v = (sum 2^(c s - m) v) / (sum 2^(c s - m))
 *
 * This holds for any m that keeps the powers inside the range of float.
 *
 * The first key block sets m to its largest score. Later blocks reuse m: they need no maximum, no
 * exchange between lanes and no rescaling of O. If a row's partial sum leaves the range, the row
 * recomputes its block with a new m (redo). A row's bits depend on its own scores alone.
 *
 * Layout: s[4 n + 2 r + e] is row r of the lane's two rows, column 8 n + e. */
#ifndef GPUKERN_CUDA_STALE_SOFTMAX_CUH
#define GPUKERN_CUDA_STALE_SOFTMAX_CUH

#include "../tile/convert.cuh"
#include "../tile/reduce.cuh"
#include "forward/fwd_score.cuh"

/* Weights in the block that sets m are at most 1. In later blocks, the sum of a lane's weights must
 * stay below LIMIT. */
template <class T> struct StaleRange;
/* bfloat16 has float's exponent range. O is a sum of weights times v, so a part of the range is
 * left for v. */
template <> struct StaleRange<__nv_bfloat16> {
    static constexpr float LIMIT = 0x1p80f;
};
template <> struct StaleRange<__half> { /* the largest float16 is 65504 */
    static constexpr float LIMIT = 0x1p15f;
};

/* m of a row that has seen no key. Any finite score then leaves the range and triggers a redo. */
constexpr float STALE_NOTHING = -3e38f;

template <class T, int BKV> struct StaleSoftmax {
    static constexpr int N = BKV / 8;
    typedef StaleRange<T> Range;
    /* m is in log2 units; total is the sum of the row's weights in this lane */
    float m[2], total[2];

    __device__ __forceinline__ void clear() {
        m[0] = m[1] = STALE_NOTHING;
        total[0] = total[1] = 0;
    }

    /* Computes the weights of scores first to end - 1 with the present m and adds them to part.
     * Each row of a lane has two partial sums, because consecutive additions to one sum wait for
     * each other. */
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

    /* Computes the weights of a block. sum: this lane's sum of each row. */
    __device__ __forceinline__ void weights(const float (&s)[N * 4], float unit_log2,
                                            float (&w)[N * 4], float (&sum)[2]) const {
        float part[4] = {0, 0, 0, 0};
        weigh(s, unit_log2, w, part, 0, N * 4);
        sum[0] = part[0] + part[2];
        sum[1] = part[1] + part[3];
    }

    /* Computes the weights whose exponents are exponent(i). Each row has one sum: registers are
     * few, and the exponentials are not faster than one chain of additions. */
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

    /* Computes the weights of masked scores. Groups of columns that no row of the warp sees get
     * weight 0 without an exponential. */
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

    /* Packs weights to 16 bits, as the A operand of P V. */
    static __device__ __forceinline__ void pack(const float (&w)[N * 4], uint32_t (&p)[N * 2]) {
#pragma unroll
        for (int i = 0; i < N * 2; ++i) p[i] = pack2<T>(w[2 * i], w[2 * i + 1]);
    }

    /* The m that fits the largest score of row r, the same in the row's four lanes. It looks at
     * every EACH-th group of 8 keys. If the row sees none of these keys, it is -inf. */
    template <int EACH = 1>
    static __device__ __forceinline__ float row_top(const float (&s)[N * 4], float unit_log2,
                                                    int r) {
        float top = s[2 * r];
#pragma unroll
        for (int n = 0; n < N; n += EACH)
            top = fmaxf(top, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
        return quad_max(top) * unit_log2;
    }

    /* True if a row of this lane must redo its block. NaN counts as out of range. */
    static __device__ __forceinline__ bool out_of_range(const float (&sum)[2]) {
        return !(sum[0] < Range::LIMIT) || !(sum[1] < Range::LIMIT);
    }

    /* If the row is out of range, sets its m to `top` and returns true. factor: the number by which
     * the row's earlier sums and O must be multiplied. */
    __device__ __forceinline__ bool refer_row_again(int r, float top, float sum, float &factor) {
        const unsigned lanes = __ballot_sync(0xffffffffu, !(sum < Range::LIMIT));
        const bool again = lanes >> (threadIdx.x & 28) & 15;
        factor = again ? ex2_approx_ftz(m[r] - top) : 1.f;
        m[r] = again ? top : m[r];
        total[r] *= factor;
        return again;
    }
    __device__ __forceinline__ void refer_again(const float (&top)[2], const float (&sum)[2],
                                                float (&factor)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) refer_row_again(r, top[r], sum[r], factor[r]);
    }

    /* Recomputes the block with new m for the rows that are out of range. The weights of other
     * rows get the same bits as before. */
    __device__ __forceinline__ void redo(const float (&s)[N * 4], float unit_log2,
                                         float (&w)[N * 4], float (&sum)[2], float (&factor)[2]) {
        const float top[2] = {row_top(s, unit_log2, 0), row_top(s, unit_log2, 1)};
        refer_again(top, sum, factor);
        weights(s, unit_log2, w, sum);
    }

    /* Sets m of the first block. A row that sees no key of it triggers a redo later. */
    __device__ __forceinline__ void refer_to(const float (&top)[2]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) m[r] = top[r] == -INFINITY ? STALE_NOTHING : top[r];
    }

    /* Sets m to the largest score of a tile's first block. SAMPLED: looks at a quarter of the
     * scores and takes a quarter of the instructions. The caller must then also check out_of_range
     * for this block. */
    template <bool SAMPLED>
    __device__ __forceinline__ void refer(const float (&s)[N * 4], float unit_log2) {
        const float top[2] = {row_top<SAMPLED ? 4 : 1>(s, unit_log2, 0),
                              row_top<SAMPLED ? 4 : 1>(s, unit_log2, 1)};
        refer_to(top);
    }

    /* The sum of a row's weights, and the lse that follows from it without a sink. */
    __device__ __forceinline__ float sum_of(int r) const { return quad_sum(total[r]); }
    __device__ __forceinline__ float lse_of(int r, float sum) const {
        return (m[r] + __log2f(sum)) * LN_2;
    }

    /* The row's final sums in natural units, with its sink. */
    __device__ __forceinline__ RowSum result(int r, float sink) const {
        return row_sum(m[r] * LN_2, quad_sum(total[r]), sink);
    }
};

#endif
