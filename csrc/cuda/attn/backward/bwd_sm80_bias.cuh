/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_sm80_bias.cuh: the part of bwd_sm80.cuh for calls with a stored mask or biases
 * (../scores_mma.cuh), which flash_attn_bwd_scores_sm80 runs. It skips steps whose block of the
 * mask is empty, adds the biases to the scores, and stores the gradients of the biases.
 *
 * If the bias broadcasts, its gradient is summed in float32 by atomic adds. Otherwise each element
 * is stored once. */
#ifndef GPUKERN_CUDA_BWD_SM80_BIAS_CUH
#define GPUKERN_CUDA_BWD_SM80_BIAS_CUH

#include "bwd_sm80_scores.cuh"
#include "../scores_mma.cuh"

namespace {

/* ---- 1. parameters --------------------------------------------------------------------------- */
/* A call with a mask or biases. P: Bwd or Dropping<Bwd>. */
template <class P> struct ScoredBwd : Scored<P> {
    /* The gradient of the bias, with strides that are 0 where the bias broadcasts; NULL = not
     * wanted. With `sums` the kernel adds to float32 elements, otherwise it stores elements of the
     * bias's dtype. */
    void *dbias;
    int64_t dbias_stride[4];
    bool sums;
    float *ddistance; /* [Hq or 1][Sq + Sk - 1]; NULL = not wanted */
    int64_t ddistance_head;
};
template <class P> __host__ __device__ inline float drop_factor(const ScoredBwd<P> &p) {
    return drop_factor((const P &)p);
}

/* The parameters of the kernel. SCORES: a mask or biases. */
template <bool DROP, bool SCORES> struct ParamsOf {
    typedef typename dropping_if<Bwd, DROP>::type type;
};
template <bool DROP> struct ParamsOf<DROP, true> {
    typedef ScoredBwd<typename dropping_if<Bwd, DROP>::type> type;
};

/* ---- 2. the next step ------------------------------------------------------------------------ */
/* Moves (*head, *tile) to the first step at or after it whose block of the mask is not empty.
 * Returns false if there is none. */
template <class Tile, class G>
__device__ __forceinline__ bool seen_step(const G &g, int b, int j0, int tile_lo, int tile_hi,
                                          int head_end, int *head, int *tile) {
    const MmaScores &x = g.scores;
    for (; *head < head_end; ++*head, *tile = tile_lo) {
        if (!x.mask && *tile < tile_hi) return true;
        if (!x.mask) continue;
        const int32_t *data = mask_of(x, b, *head);
        for (; *tile < tile_hi; ++*tile)
            if (block_flag(x, data, *tile * Tile::bq, j0) != GK_BLOCK_EMPTY) return true;
    }
    return false;
}

/* ---- 3. the mask bits and the bias of a step ------------------------------------------------- */
/* The mask bits and the bias of a lane's keys in one step. */
template <int M> struct StepScores {
    uint32_t bits[M][2]; /* bit 2 n + e is 1 if query mask.row + 8 n + e sees the key */
    float bias[M][2];    /* the key's bias, if it is the same for all queries; otherwise 0 */
    bool whole;          /* no pair of the step is hidden or changed by a bias or a modifier */
};
template <class T, int M, class G>
__device__ __forceinline__ StepScores<M> step_scores(const G &g, int b, int head, const Mask &mask,
                                                     bool in_span) {
    const MmaScores &x = g.scores;
    StepScores<M> y;
    y.whole = in_span && !x.bias && !x.distance && !g.p.rules.modified;
#pragma unroll
    for (int m = 0; m < M; ++m) {
        y.bits[m][0] = y.bits[m][1] = ~0u;
        y.bias[m][0] = y.bias[m][1] = 0;
    }
    if (x.bias && x.bias_stride[2] == 0) {
        const char *from = bias_of<T>(x, b, head);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int key = min(mask.key + 16 * m + 8 * h, x.seq_k - 1);
                const float v = bias_at<T>(x, from, key * x.bias_stride[3]);
                y.bias[m][h] = v <= x.least ? -INFINITY : v;
            }
    }
    if (!x.mask) return y;
    const int32_t *data = mask_of(x, b, head);
    if ((block_flag(x, data, mask.row, mask.key) & 3) <= GK_BLOCK_FULL) return y;
    y.whole = false;
    const int first = mask.row / GK_MASK_TILE * GK_MASK_TILE + mask.row % 8,
              skip = mask.row % GK_MASK_TILE / 8 * 2;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            y.bits[m][h] = bits_of_key(x, data, mask.key + 16 * m + 8 * h, first) >> skip;
    return y;
}

/* The mask bits and biases of a step; empty without SCORES. */
template <int M, bool SCORES> struct StepOf {
    struct type {};
};
template <int M> struct StepOf<M, true> {
    typedef StepScores<M> type;
};

/* ---- 4. P and dS, and the gradients of the biases -------------------------------------------- */
/* Stores the gradients ds of the pairs into the gradient of the bias, or adds them if it
 * broadcasts. Also adds them to the gradient of the distance bias. i, j: query and key of ds[0][0].
 * The layout is that of addends_of. Hidden pairs and rows past seq_q are left out. */
template <class T, int M, class G>
__device__ __forceinline__ void store_bias_gradients(const G &g, const float (&ds)[M][4],
                                                     const bool (&visible)[M][4], int b, int head,
                                                     int i, int j) {
    if (g.dbias) {
        const int64_t own = b * g.dbias_stride[0] + head * g.dbias_stride[1];
        if (g.dbias_stride[2] == 0 && g.sums) { /* one atomic add a key for the quad's rows */
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float sum = (visible[m][2 * h] ? ds[m][2 * h] : 0) +
                                (visible[m][2 * h + 1] ? ds[m][2 * h + 1] : 0);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
                    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
                    const int key = j + 16 * m + 8 * h;
                    if (threadIdx.x % 4 == 0 && key < g.p.seq_k)
                        atomicAdd((float *)g.dbias + own + key * g.dbias_stride[3], sum);
                }
        } else {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    if (!visible[m][r]) continue;
                    const int64_t at = own + (i + r % 2) * g.dbias_stride[2] +
                                       (j + 16 * m + r / 2 * 8) * g.dbias_stride[3];
                    if (g.sums)
                        atomicAdd((float *)g.dbias + at, ds[m][r]);
                    else if (g.scores.wide)
                        ((float *)g.dbias)[at] = ds[m][r];
                    else
                        ((T *)g.dbias)[at] = from_f32<T>(ds[m][r]);
                }
        }
    }
    if (g.ddistance) {
        float *to = g.ddistance + head * g.ddistance_head + (g.p.seq_q - 1);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                if (visible[m][r]) atomicAdd(to + (j + 16 * m + r / 2 * 8) - (i + r % 2), ds[m][r]);
    }
}

/* Does the work of modified_gradients in a call with a mask or biases, and stores the gradients of
 * the biases. */
template <class T, bool DROP, int M, int N, class G>
__device__ __forceinline__ void
scored_gradients(const G &g, float (&s)[M][N][4], float (&dp)[M][N][4], int n, uint4 stats,
                 const Score &score, float distance0, const Mask &mask, uint2 keep, float factor,
                 int b, int head, const StepScores<M> &step) {
    float ds[M][4];
    bool visible[M][4];
    addends_of<T>(ds, g.scores, b, head, mask.row + 8 * n, mask.key, step.bits, step.bias, n);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float distance = distance0 + (n * 8 + r % 2 - m * 16 - r / 2 * 8);
            const float lse = __uint_as_float(r & 1 ? stats.z : stats.x),
                        delta = __uint_as_float(r & 1 ? stats.w : stats.y);
            float derivative;
            const float logit = score_fast(score, s[m][n][r], distance, &derivative) + ds[m][r];
            visible[m][r] =
                mask.sees(m, n, r) && ds[m][r] != -INFINITY && mask.row + 8 * n + r % 2 < g.p.seq_q;
            const float w = visible[m][r] ? ex2_approx_ftz(logit * LOG2_E - lse) : 0;
            const bool kept = !DROP || ((r & 1 ? keep.y : keep.x) & 1u << (16 * m + 8 * (r / 2)));
            if (DROP) dp[m][n][r] = kept ? dp[m][n][r] * factor : 0;
            ds[m][r] = w * (dp[m][n][r] - delta);
            s[m][n][r] = kept ? w : 0;
            dp[m][n][r] = visible[m][r] ? ds[m][r] * derivative : 0;
        }
    store_bias_gradients<T>(g, ds, visible, b, head, mask.row + 8 * n, mask.key);
}

} // namespace

#endif
