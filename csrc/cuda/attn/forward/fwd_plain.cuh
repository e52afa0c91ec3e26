/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_plain.cuh: attention with one warp a row, for every dtype, modifier, alignment and layout.
 * flash_attn_fwd_plain and flash_attn_fwd_partial_plain use it for the calls that the tiled kernels
 * refuse. flash_attn_fwd_plain.cu lists these calls. It also uses this file to compute single rows
 * again (fwd_mend.cuh).
 *
 *  s_j = cap(scale q k_j) - slope |i + diagonal - j|   lse = log(e^sink + sum e^s_j)
 *  out = sum e^(s_j - lse) v_j
 *
 * q [.., Sq, D], k [.., Sk, D], v [.., Sk, Dv], out [.., Sq, Dv], lse [.., Sq] float32 (float64 for
 * float64 inputs). Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) in natural units;
 * sums are float32 or float64.
 *
 * Work split: a block takes WARPS rows of one head, one row for each warp. A step takes 32 keys.
 * For the scores a lane owns one key; for the values it owns columns lane, lane + 32, and so on.
 * Shared memory has q of each warp, [WARPS][DIM]. There are instances of the kernel for DIM 256 and
 * 576.
 *
 * This kernel refuses nothing and is not tuned for speed. */
#ifndef GPUKERN_CUDA_FWD_PLAIN_CUH
#define GPUKERN_CUDA_FWD_PLAIN_CUH

#include "gpukern.h"
#include "../../../core/paged.h"
#include "../../tile/reduce.cuh"
#include "../drop.cuh"
#include "fwd_rows.cuh"
#include "../scores.cuh"
#include "../softmax.cuh"

namespace {

/* Warps are independent, so any block size that fills an SM will do. */
constexpr int THREADS = 128, WARPS = THREADS / 32;
/* The largest head_dim of each of the two instances. checks.c refuses a larger one. */
constexpr int NARROW = 256, WIDE = GK_CACHE_HEAD_DIM;

struct Params {
    Problem problem;
    int groups; /* number of groups of WARPS rows in a head */
    Dropout drop;
    bool accumulates;
    Scores scores;
};

/* ---- 1. the kernel --------------------------------------------------------------------------- */
/* PARTIAL: out has the accumulator's type, and the result may be merged with its old value. */
template <class T, bool PARTIAL> struct OutOf {
    typedef T type;
};
template <class T> struct OutOf<T, true> {
    typedef typename element<T>::acc type;
};

/* Computes the rows of a group, one in each warp. DIM: the largest head_dim. SCORES: the call has a
 * mask or biases (../scores.cuh). MEND: computes a row only if the row in out is not finite. */
template <class T, int DIM, bool PARTIAL, bool SCORES, bool MEND>
__device__ __forceinline__ void attend_rows(const Params &params, int group, int head, int b) {
    typedef typename element<T>::acc W;
    typedef typename OutOf<T, PARTIAL>::type Out;
    constexpr int COLS = DIM / 32; /* columns of a lane */
    __shared__ W q_all_s[WARPS][DIM];
    const Problem &p = params.problem;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int i = group * WARPS + warp;
    const Sequence seq = sequence_of(p, b);
    if (i >= seq.seq_q) return;
    if (MEND) {
        const T *held = (const T *)p.out.data + p.out.at(b, head, i);
        W spoilt = 0;
        for (int d = lane; d < p.head_dim_v; d += 32)
            spoilt = fma((W)to_acc(held[d]), (W)0, spoilt);
        if (__all_sync(0xffffffffu, spoilt == 0)) return;
    }

    W *q_s = q_all_s[warp];
    const T *q_g = (const T *)p.q.data + p.q.at(b, head, seq.q0 + i);
    for (int d = lane; d < p.head_dim; d += 32) q_s[d] = to_acc(q_g[d]);
    __syncwarp(); /* q_s is complete before any lane reads it */

    const int head_kv = head / p.group;
    const T *k_g = (const T *)p.k.data + p.k.at(b, head_kv, seq.k0);
    const T *v_g = (const T *)p.v.data + p.v.at(b, head_kv, seq.k0);
    const WideScore<W> score = score_of<W>(p, seq, b, head);
    HeadScores<W> scores;
    if constexpr (SCORES) scores = head_scores<W>(params.scores, b, head);

    /* The sink is the first term of the softmax. */
    const W sink = sink_of<W>(p.rules, head);
    RowSoftmax<ExpFull, W> softmax = {sink, W(sink == (W)-INFINITY ? 0 : 1)};
    W o[COLS] = {};
    const int lo = seq.span.lo(i), hi = seq.span.hi(i);
    const int64_t row = drop_row0(p, b, head, seq.q0 + i);
    for (int j0 = lo; j0 < hi; j0 += 32) {
        const int j = j0 + lane, keys = min(32, hi - j0);
        W s = (W)-INFINITY;
        bool sees = lane < keys;
        if constexpr (SCORES) {
            W unused = 0;
            sees = sees && scores.add(i, j, &unused);
        }
        if (sees) s = score_fine(score, dot_eighths(q_s, k_g + j * p.k.row, p.head_dim), i, j);
        unsigned seen = ~0u;
        if constexpr (SCORES) {
            if (sees) scores.add(i, j, &s);
            seen = __ballot_sync(0xffffffffu, sees);
            if (seen == 0) continue;
        }
        const W highest = warp_max(s);
        if (highest > softmax.peak) {
            const W shrink = softmax.raise(highest);
            softmax.sum *= shrink;
#pragma unroll
            for (int c = 0; c < COLS; ++c) o[c] *= shrink;
        }
        W weight = softmax.weight(s);
        softmax.sum += warp_sum(weight);
        weight *= drop_of<W>(params.drop, row, j);
        for (int t = 0; t < keys; ++t) {
            const W w = __shfl_sync(0xffffffffu, weight, t);
            if (SCORES && !(seen >> t & 1)) continue; /* V of a hidden key may hold NaN */
            const T *v = v_g + (j0 + t) * p.v.row;
#pragma unroll
            for (int c = 0; c < COLS; ++c)
                if (c * 32 + lane < p.head_dim_v) o[c] += w * to_acc(v[c * 32 + lane]);
        }
    }

    Out *out_g = (Out *)p.out.data + p.out.at(b, head, seq.q0 + i);
    const int64_t lse_at = b * p.lse.batch + head * p.lse.head + (int64_t)(seq.q0 + i) * p.lse.row;
    if constexpr (PARTIAL) {
        /* The old value counts as one more key, whose score is its lse. */
        if (params.accumulates) {
            const W old_lse = ((const W *)p.lse.data)[lse_at];
            __syncwarp(); /* all lanes have read old_lse before it is overwritten */
            if (old_lse > softmax.peak) {
                const W shrink = softmax.raise(old_lse);
                softmax.sum *= shrink;
#pragma unroll
                for (int c = 0; c < COLS; ++c) o[c] *= shrink;
            }
            const W weight = old_lse == (W)-INFINITY ? 0 : softmax.weight(old_lse);
            softmax.sum += weight;
#pragma unroll
            for (int c = 0; c < COLS; ++c)
                if (weight != 0 && c * 32 + lane < p.head_dim_v)
                    o[c] += weight * out_g[c * 32 + lane];
        }
    }
    const W total = softmax.sum, factor = total == 0 ? 0 : 1 / total;
#pragma unroll
    for (int c = 0; c < COLS; ++c)
        if (c * 32 + lane < p.head_dim_v)
            out_g[c * 32 + lane] = from_acc<Out>(total == 0 ? 0 : o[c] * factor);
    if (lane == 0 && p.lse.data)
        ((W *)p.lse.data)[lse_at] = total == 0 ? (W)-INFINITY : softmax.peak + log(total);
}

/* The number of blocks on an SM that leaves each thread enough registers, so that nothing
 * spills. */
template <class T, int DIM, bool SCORES> constexpr int resident() {
    return sizeof(T) < 8 ? 4 : DIM > NARROW ? 2 : SCORES ? 3 : 4;
}

template <class T, int DIM, bool PARTIAL, bool SCORES>
__global__ void __launch_bounds__(THREADS, (resident<T, DIM, SCORES>()))
    flash_attn_fwd_plain_kernel(Params params) {
    const int group = blockIdx.x % params.groups, rest = blockIdx.x / params.groups;
    attend_rows<T, DIM, PARTIAL, SCORES, false>(params, group, rest % params.problem.heads_q,
                                                rest / params.problem.heads_q);
}

/* ---- 2. launcher and table ------------------------------------------------------------------- */
template <class T, bool PARTIAL = false> int blocks_an_sm() {
    return blocks_per_sm<flash_attn_fwd_plain_kernel<T, NARROW, PARTIAL, false>>(THREADS, 0);
}

bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    Params &x = gk_own<Params>(to) = {problem_of(ctx, (const gk_flash_attn_args *)args)};
    x.drop = dropout_of((const gk_flash_attn_args *)args);
    x.accumulates = gk_accumulates((const gk_flash_attn_args *)args) != 0;
    x.scores =
        scores_of(gk_scores_of((const gk_flash_attn_args *)args), x.problem.seq_q, x.problem.seq_k);
    x.groups = (int)gk_ceil_div(x.problem.seq_q, WARPS);
    to->tile[0] = WARPS;
    to->tile[1] = 32;
    to->tasks = gk_ceil_div(x.problem.seq_q, WARPS) * x.problem.heads_q * x.problem.batch;
    return gk_grid_fits(to->tasks);
}

template <class T, int DIM, bool PARTIAL>
gk_status attend(const gk_context *ctx, const Params &x, dim3 blocks) {
    static const char op[] = "gk_flash_attn_fwd";
    return x.scores.any
               ? launch<flash_attn_fwd_plain_kernel<T, DIM, PARTIAL, true>>(op, ctx, blocks,
                                                                            THREADS, 0, x)
               : launch<flash_attn_fwd_plain_kernel<T, DIM, PARTIAL, false>>(op, ctx, blocks,
                                                                             THREADS, 0, x);
}

template <class T, bool PARTIAL = false>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *) {
    const Params &x = gk_own<Params>(plan);
    const dim3 blocks((unsigned)plan->tasks);
    const bool wide = max(x.problem.head_dim, x.problem.head_dim_v) > NARROW;
    const gk_status status = wide ? attend<T, WIDE, PARTIAL>(ctx, x, blocks)
                                  : attend<T, NARROW, PARTIAL>(ctx, x, blocks);
    return status == GK_OK ? clear_unowned<typename OutOf<T, PARTIAL>::type>("gk_flash_attn_fwd",
                                                                             ctx, x.problem)
                           : status;
}

} // namespace

#endif
