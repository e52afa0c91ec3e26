/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_plain.cuh: the gradients of attention for every dtype, alignment and modifier. It has the
 * kernels of flash_attn_bwd_plain and flash_attn_bwd_partial_plain (Dao 2023, arXiv:2307.08691,
 * Algorithm 2, run twice: by rows for dq, by keys for dk and dv). The equations are in bwd.cuh.
 *
 * Reads q, grad_out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv], or packed, with any leading
 * strides, and the stats of the pre-pass. Writes dq, dk, dv. Sums are float, or double for float64.
 *
 * With a mask or biases (../scores.cuh) it also computes the gradients of the biases, with one
 * thread for each element.
 *
 * Work split: dq has a warp for each row of each query head, dk and dv a warp for each key of each
 * kv head. While scores are computed, a lane has one of 32 keys (or rows). While they are added up,
 * a lane has columns 32 apart. The order of sums is fixed, so results are deterministic; there are
 * no atomics. Shared memory has each warp's own row of both operands, Pair<W, DIM>. Loads go
 * through L1 without a pipeline.
 *
 * These kernels refuse nothing and are not tuned for speed. Other kernels take most 16-bit and
 * float32 calls with aligned rows. These calls run here only: float32 with dropout, a mask or
 * biases; deterministic with a mask or biases; and with a head_dim above 256 whatever
 * flash_attn_bwd_gemms refuses. */
#ifndef GPUKERN_CUDA_BWD_PLAIN_CUH
#define GPUKERN_CUDA_BWD_PLAIN_CUH

#include "../../../core/paged.h"
#include "bwd.cuh"
#include "../drop.cuh"
#include "../scores.cuh"
#include "../tiles.h"
#include "../../ptx/opaque.cuh"

namespace {

/* NARROW, WIDE: the largest head_dim of the two instances of each kernel. checks.c refuses a larger
 * one. */
constexpr int WARPS_PLAIN = BWD_PLAIN_WARPS, NARROW = 256, WIDE = GK_CACHE_HEAD_DIM;

struct BwdPlain : Dropping<Bwd> {
    Scores scores;
    /* gradients of the bias and the distance bias, contiguous, with their shapes; NULL = not
     * wanted */
    void *dbias, *ddistance;
    int bias_shape[4];
    int distance_heads;
};

/* A row of q or k, and the row of grad_out or v that belongs to it. All lanes read the same
 * element, so there are no bank conflicts. */
template <class W, int DIM> struct Pair {
    W left[DIM], right[DIM];
};

template <class T, class W>
__device__ __forceinline__ void load_row(W *to_s, const T *row_g, int n, int lane) {
    for (int d = lane; d < n; d += 32) to_s[d] = to_acc(row_g[d]);
}

template <class T, class W, int PER_LANE>
__device__ __forceinline__ void add_scaled(W (&sum)[PER_LANE], W x, const T *row_g, int n,
                                           int lane) {
#pragma unroll
    for (int c = 0; c < PER_LANE; ++c)
        if (lane + c * 32 < n) sum[c] += x * to_acc(row_g[lane + c * 32]);
}

template <class T, class W, int PER_LANE>
__device__ __forceinline__ void store_row(T *to_g, const W (&sum)[PER_LANE], W factor, int n,
                                          int lane) {
#pragma unroll
    for (int c = 0; c < PER_LANE; ++c)
        if (lane + c * 32 < n) to_g[lane + c * 32] = from_acc<T>(sum[c] * factor);
}

/* Finds the sequence of row or key number `unit`, counted over the whole tensor, and its index in
 * that sequence. In packed calls it gives only the sequence. Returns false if the token belongs to
 * no sequence. */
__device__ __forceinline__ bool place_of(const Bwd &g, const int32_t *cu, int64_t step, int seq,
                                         int64_t unit, int *b, int *i) {
    if (!cu) {
        *b = (int)(unit / seq);
        *i = (int)(unit % seq);
        return true;
    }
    *b = owner_of(cu, step, g.p.batch, (int)unit);
    return *b >= 0;
}

/* Calls take(head, b, i, sequence) for this warp's row or key i. If its token belongs to no
 * sequence, there is no call, and the pre-pass has cleared the token's gradients. */
template <bool QUERIES, class Take>
__device__ __forceinline__ void take_task(const Bwd &g, const Take &take) {
    const Problem &p = g.p;
    const int64_t rows = p.cu_q ? (QUERIES ? p.total_q : p.total_k)
                                : (int64_t)p.batch * (QUERIES ? p.seq_q : p.seq_k);
    const int64_t task = (int64_t)blockIdx.x * WARPS_PLAIN + threadIdx.x / 32;
    if (task >= rows * (QUERIES ? p.heads_q : p.heads_kv)) return;
    const int head = (int)(task / rows);
    const int64_t unit = task % rows;
    int b, i;
    if (!place_of(g, QUERIES ? p.cu_q : p.cu_k, QUERIES ? p.cu_q_step : p.cu_k_step,
                  QUERIES ? p.seq_q : p.seq_k, unit, &b, &i))
        return;
    const Sequence s = sequence_of(p, b);
    if (p.cu_q) i = (int)unit - (QUERIES ? s.q0 : s.k0);
    if (i >= (QUERIES ? s.seq_q : s.seq_k)) return;
    take(head, b, i, s);
}

/* The gradient of a visible pair's score after the softcap, which is where the biases are added.
 * bias: the sum of the pair's biases. derivative: that of the softcap. The result times the
 * derivative is the gradient of scale q k. */
template <class W>
__device__ __forceinline__ W biased_gradient(const WideScore<W> &x, W bias, W qk, W dp, W lse,
                                             W delta, int i, int j, W *weight, W *derivative) {
    *weight = exp(score_fine(x, qk, i, j, derivative) + bias - lse);
    return *weight * (dp - delta);
}

/* ---- 1. dq: a warp for each query row -------------------------------------------------------- */
/* DIM: the largest head_dim. SCORES: the call has a mask or biases. Such calls have an instance of
 * their own, so that other calls do not pay for the tests. */
template <class T, class Grad, int DIM, bool SCORES>
__global__ void __launch_bounds__(WARPS_PLAIN * 32, SCORES ? 1 : 0)
    bwd_plain_dq_kernel(const __grid_constant__ BwdPlain g) {
    typedef typename element<T>::acc W;
    __shared__ Pair<W, DIM> rows_s[WARPS_PLAIN];
    const Problem &p = g.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    take_task<true>(g, [&](int head, int b, const int &i, const Sequence &s) {
        const int64_t at = (int64_t)head * g.row_tiles + row_tile_of(g, s, b);
        const W *stat = (const W *)g.stats + (at * g.tile_rows + i) * 2;
        const W lse = stat[0], delta = stat[1];
        const int lo = s.span.lo(i), hi = s.span.hi(i), kv_head = head / p.group;
        W sum[DIM / 32] = {};
        if (lo < hi && lse != INFINITY) {
            const int64_t row = s.q0 + i;
            load_row((W *)rows_s[warp].left,
                     (const T *)p.q.data + b * p.q.batch + head * p.q.head + row * p.q.row,
                     p.head_dim, lane);
            load_row((W *)rows_s[warp].right,
                     (const T *)g.grad_out.data + b * g.grad_out.batch + head * g.grad_out.head +
                         row * g.grad_out.row,
                     p.head_dim_v, lane);
            __syncwarp(); /* the row is visible to all lanes */
            const WideScore<W> score = score_of<W>(p, s, b, head);
            const T *k = (const T *)p.k.data + b * p.k.batch + kv_head * p.k.head + s.k0 * p.k.row;
            const T *v = (const T *)p.v.data + b * p.v.batch + kv_head * p.v.head + s.k0 * p.v.row;
            for (int j0 = lo; j0 < hi; j0 += 32) {
                const int j = j0 + lane, n = min(hi - j0, 32);
                W ds = 0, weight = 0;
                bool visible = lane < n;
                unsigned keys = ~0u;
                W bias = 0;
                if constexpr (SCORES) {
                    /* Computed again in every step: as loop variables, these values make float64
                     * spill. */
                    uint32_t head_now = (uint32_t)head;
                    opaque(head_now);
                    const HeadScores<W> scores = head_scores<W>(g.scores, b, (int)head_now);
                    visible = visible && scores.add(i, j, &bias);
                    keys = __ballot_sync(0xffffffffu, visible);
                }
                if (visible) {
                    const W qk = dot_eighths(rows_s[warp].left, k + j * p.k.row, p.head_dim);
                    const W keep = drop_of<W>(g.drop, drop_row0(p, b, head, s.q0 + i), j);
                    const W dp =
                        keep * dot_eighths(rows_s[warp].right, v + j * p.v.row, p.head_dim_v);
                    if constexpr (SCORES) {
                        W derivative;
                        ds = biased_gradient(score, bias, qk, dp, lse, delta, i, j, &weight,
                                             &derivative) *
                             derivative;
                    } else {
                        ds = pair_gradient(score, qk, dp, lse, delta, i, j, &weight);
                    }
                }
#pragma unroll 1
                for (int c = 0; c < n; ++c) {
                    const W ds_c = __shfl_sync(0xffffffffu, ds, c);
                    if (SCORES && !(keys >> c & 1)) continue; /* K of a hidden key may hold NaN */
                    add_scaled(sum, ds_c, k + (j0 + c) * p.k.row, p.head_dim, lane);
                }
            }
        }
        store_row((Grad *)g.dq.data + b * g.dq.batch + head * g.dq.head + (s.q0 + i) * g.dq.row,
                  sum, (W)p.rules.scale, p.head_dim, lane);
    });
}

/* ---- 2. dk, dv: a warp for each key ---------------------------------------------------------- */
template <class T, class Grad, int DIM, bool SCORES>
__global__ void __launch_bounds__(WARPS_PLAIN * 32)
    bwd_plain_dkv_kernel(const __grid_constant__ BwdPlain g) {
    typedef typename element<T>::acc W;
    __shared__ Pair<W, DIM> rows_s[WARPS_PLAIN];
    const Problem &p = g.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    take_task<false>(g, [&](int kv_head, int b, const int &j, const Sequence &s) {
        W sum_k[DIM / 32] = {}, sum_v[DIM / 32] = {};
        const int i_lo = s.span.row_lo(j), i_hi = s.span.row_hi(j, s.seq_q);
        if (j >= s.span.key_lo && j < s.span.key_hi && i_lo < i_hi) {
            const int64_t key = s.k0 + j;
            load_row((W *)rows_s[warp].left,
                     (const T *)p.k.data + b * p.k.batch + kv_head * p.k.head + key * p.k.row,
                     p.head_dim, lane);
            load_row((W *)rows_s[warp].right,
                     (const T *)p.v.data + b * p.v.batch + kv_head * p.v.head + key * p.v.row,
                     p.head_dim_v, lane);
            __syncwarp(); /* the key is visible to all lanes */
            for (int head = kv_head * p.group; head < (kv_head + 1) * p.group; ++head) {
                const WideScore<W> score = score_of<W>(p, s, b, head);
                HeadScores<W> scores;
                if constexpr (SCORES) scores = head_scores<W>(g.scores, b, head);
                const int64_t at = (int64_t)head * g.row_tiles + row_tile_of(g, s, b);
                const W *stats = (const W *)g.stats + at * g.tile_rows * 2;
                const T *q = (const T *)p.q.data + b * p.q.batch + head * p.q.head + s.q0 * p.q.row;
                const T *grad_out = (const T *)g.grad_out.data + b * g.grad_out.batch +
                                    head * g.grad_out.head + s.q0 * g.grad_out.row;
                for (int i0 = i_lo; i0 < i_hi; i0 += 32) {
                    const int i = i0 + lane, n = min(i_hi - i0, 32);
                    W ds = 0, weight = 0;
                    bool counts = false;
                    if (lane < n) {
                        const W lse = stats[(int64_t)i * 2], delta = stats[(int64_t)i * 2 + 1];
                        counts = lse != INFINITY;
                        W bias = 0;
                        if constexpr (SCORES) counts = counts && scores.add(i, j, &bias);
                        if (counts) {
                            const W qk =
                                dot_eighths(rows_s[warp].left, q + i * p.q.row, p.head_dim);
                            const W keep = drop_of<W>(g.drop, drop_row0(p, b, head, s.q0 + i), j);
                            const W dp =
                                keep * dot_eighths(rows_s[warp].right,
                                                   grad_out + i * g.grad_out.row, p.head_dim_v);
                            if constexpr (SCORES) {
                                W derivative;
                                ds = biased_gradient(score, bias, qk, dp, lse, delta, i, j, &weight,
                                                     &derivative) *
                                     derivative;
                            } else {
                                ds = pair_gradient(score, qk, dp, lse, delta, i, j, &weight);
                            }
                            weight *= keep;
                        }
                    }
                    const unsigned rows_that_count = __ballot_sync(0xffffffffu, counts);
                    for (int c = 0; c < n; ++c) {
                        const W ds_c = __shfl_sync(0xffffffffu, ds, c),
                                weight_c = __shfl_sync(0xffffffffu, weight, c);
                        /* a row that sees no key may hold anything, including NaN */
                        if (!(rows_that_count >> c & 1)) continue;
                        add_scaled(sum_k, ds_c, q + (i0 + c) * p.q.row, p.head_dim, lane);
                        add_scaled(sum_v, weight_c, grad_out + (i0 + c) * g.grad_out.row,
                                   p.head_dim_v, lane);
                    }
                }
            }
        }
        store_row((Grad *)g.dk.data + b * g.dk.batch + kv_head * g.dk.head + (s.k0 + j) * g.dk.row,
                  sum_k, (W)p.rules.scale, p.head_dim, lane);
        store_row((Grad *)g.dv.data + b * g.dv.batch + kv_head * g.dv.head + (s.k0 + j) * g.dv.row,
                  sum_v, (W)1, p.head_dim_v, lane);
    });
}

/* ---- 3. gradients of biases ------------------------------------------------------------------ */
/* One thread computes each element of the gradient. It recomputes all pairs to which the element is
 * added, and sums their gradients in double. The kernels differ in the loop over these pairs. */
constexpr int BIAS_THREADS = 128;

template <class T, class W> __device__ __forceinline__ W dot_rows(const T *a, const T *b, int n) {
    W part[8] = {};
#pragma unroll 1
    for (int d = 0; d < n; d += 8)
#pragma unroll
        for (int e = 0; e < 8; ++e) part[e] = fma(to_acc(a[d + e]), to_acc(b[d + e]), part[e]);
    return ((part[0] + part[1]) + (part[2] + part[3])) +
           ((part[4] + part[5]) + (part[6] + part[7]));
}

/* The gradient of the biased score of row i and key j; 0 if the pair is hidden. */
template <class T, class W>
__device__ __forceinline__ W score_gradient(const BwdPlain &g, const Sequence &s,
                                            const WideScore<W> &score, const HeadScores<W> &scores,
                                            int b, int head, int i, int j) {
    const Problem &p = g.p;
    W bias = 0;
    if (j < s.span.lo(i) || j >= s.span.hi(i) || !scores.add(i, j, &bias)) return 0;
    const W *stat = (const W *)g.stats +
                    (((int64_t)head * g.row_tiles + row_tile_of(g, s, b)) * g.tile_rows + i) * 2;
    if (stat[0] == (W)INFINITY) return 0;
    const int kv_head = head / p.group;
    const W qk = dot_rows<T, W>((const T *)p.q.data + p.q.at(b, head, i),
                                (const T *)p.k.data + p.k.at(b, kv_head, j), p.head_dim);
    const W keep = drop_of<W>(g.drop, drop_row0(p, b, head, i), j);
    const W dp = keep * dot_rows<T, W>((const T *)g.grad_out.data + g.grad_out.at(b, head, i),
                                       (const T *)p.v.data + p.v.at(b, kv_head, j), p.head_dim_v);
    W weight, derivative;
    return biased_gradient(score, bias, qk, dp, stat[0], stat[1], i, j, &weight, &derivative);
}

__device__ __forceinline__ void store_bias(void *to, gk_dtype dtype, int64_t at, double value) {
    if (dtype == GK_F64)
        ((double *)to)[at] = value;
    else if (dtype == GK_F32)
        ((float *)to)[at] = (float)value;
    else if (dtype == GK_F16)
        ((__half *)to)[at] = from_acc<__half>((float)value);
    else
        ((__nv_bfloat16 *)to)[at] = from_acc<__nv_bfloat16>((float)value);
}

template <class T>
__global__ void __launch_bounds__(BIAS_THREADS, 4)
    bwd_plain_dbias_kernel(const __grid_constant__ BwdPlain g) {
    typedef typename element<T>::acc W;
    /* The block's index encodes batch entry, head, row and block of columns of the gradient, which
     * has the bias's own shape and may broadcast. One dimension holds all, because y and z of a
     * grid end at 65,535. */
    const int *shape = g.bias_shape;
    const unsigned column_blocks = (shape[3] + BIAS_THREADS - 1) / BIAS_THREADS;
    const unsigned row = blockIdx.x / column_blocks, head_row = row / shape[2];
    const int col = (int)(blockIdx.x % column_blocks * BIAS_THREADS + threadIdx.x);
    if (col >= shape[3]) return;
    const int place[4] = {(int)(head_row / shape[1]), (int)(head_row % shape[1]),
                          (int)(row % shape[2]), col};
    const int all[4] = {g.p.batch, g.p.heads_q, g.p.seq_q, g.p.seq_k};
    /* the pairs to which this element is added, as a range in each dimension */
    int from[4], end[4];
#pragma unroll
    for (int d = 0; d < 4; ++d) {
        from[d] = shape[d] == 1 ? 0 : place[d];
        end[d] = shape[d] == 1 ? all[d] : place[d] + 1;
    }
    double sum = 0;
    for (int b = from[0]; b < end[0]; ++b) {
        const Sequence s = sequence_of(g.p, b);
        for (int head = from[1]; head < end[1]; ++head) {
            const WideScore<W> score = score_of<W>(g.p, s, b, head);
            const HeadScores<W> scores = head_scores<W>(g.scores, b, head);
            for (int i = from[2]; i < end[2]; ++i)
                for (int j = from[3]; j < end[3]; ++j)
                    sum += score_gradient<T, W>(g, s, score, scores, b, head, i, j);
        }
    }
    const int64_t at =
        (((int64_t)place[0] * shape[1] + place[1]) * shape[2] + place[2]) * shape[3] + place[3];
    store_bias(g.dbias, g.scores.bias_dtype, at, sum);
}

template <class T>
__global__ void __launch_bounds__(BIAS_THREADS)
    bwd_plain_ddistance_kernel(const __grid_constant__ BwdPlain g) {
    typedef typename element<T>::acc W;
    const int distances = g.p.seq_q + g.p.seq_k - 1;
    const int blocks = (distances + BIAS_THREADS - 1) / BIAS_THREADS; /* of a head */
    const int own = (int)blockIdx.x / blocks;
    const int at = ((int)blockIdx.x - own * blocks) * BIAS_THREADS + (int)threadIdx.x;
    if (at >= distances) return;
    const int ahead = at - (g.p.seq_q - 1); /* key - query */
    const int end = g.distance_heads == 1 ? g.p.heads_q : own + 1;
    double sum = 0;
    for (int b = 0; b < g.p.batch; ++b) {
        const Sequence s = sequence_of(g.p, b);
        for (int head = own; head < end; ++head) {
            const WideScore<W> score = score_of<W>(g.p, s, b, head);
            const HeadScores<W> scores = head_scores<W>(g.scores, b, head);
            for (int i = max(0, -ahead); i < min(g.p.seq_q, g.p.seq_k - ahead); ++i)
                sum += score_gradient<T, W>(g, s, score, scores, b, head, i, i + ahead);
        }
    }
    store_bias(g.ddistance, sizeof(W) == 8 ? GK_F64 : GK_F32, (int64_t)own * distances + at, sum);
}

/* ---- 4. launch ------------------------------------------------------------------------------- */
template <bool VALUE> struct Bool {
    static constexpr bool value = VALUE;
};

int64_t blocks_of(int64_t rows, int heads) { return gk_ceil_div(rows * heads, WARPS_PLAIN); }

/* Blocks of the kernels of the biases' gradients; 0 if there is no such gradient. */
int64_t dbias_blocks(const gk_tensor *dbias) {
    if (!dbias) return 0;
    const int64_t *n = dbias->shape;
    return gk_ceil_div(n[3], BIAS_THREADS) * n[2] * n[1] * n[0];
}
int64_t ddistance_blocks(const gk_tensor *ddistance) {
    if (!ddistance) return 0;
    return gk_ceil_div(ddistance->shape[1], BIAS_THREADS) * ddistance->shape[0];
}

template <class T>
bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    if (!gk_grid_fits(dbias_blocks(gk_dbias_of(a))) ||
        !gk_grid_fits(ddistance_blocks(gk_ddistance_of(a))))
        return false;
    Bwd &g = gk_own<Bwd>(to) = bwd_of(ctx, a, BWD_PLAIN_ROWS, 0);
    g.lse_factor = 1;
    to->tile[0] = to->tile[1] = 1;
    to->tasks = blocks_of(g.p.cu_q ? g.p.total_k : (int64_t)g.p.batch * g.p.seq_k, g.p.heads_kv);
    to->workspace_bytes = stats_bytes(g, sizeof(typename element<T>::acc));
    return true;
}

template <class T, class Grad = T>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    BwdPlain g = {};
    (Bwd &)g = gk_own<Bwd>(plan);
    g.drop = dropout_of(&a->fwd);
    const gk_attn_scores *scores = gk_scores_of_bwd(a);
    g.scores = scores_of(scores, g.p.seq_q, g.p.seq_k);
    const gk_tensor *dbias = gk_dbias_of(a), *ddistance = gk_ddistance_of(a);
    if (dbias) g.dbias = dbias->data;
    if (ddistance) {
        g.ddistance = ddistance->data;
        g.distance_heads = (int)ddistance->shape[0];
    }
    for (int d = 0; dbias && d < 4; ++d) g.bias_shape[d] = (int)dbias->shape[d];
    g.stats = workspace;
    gk_status status = bwd_pre(ctx, element<T>::dtype, g, element<Grad>::dtype);
    const Problem &p = g.p;
    const int64_t rows_q = p.cu_q ? p.total_q : (int64_t)p.batch * p.seq_q;
    const int64_t rows_k = p.cu_q ? p.total_k : (int64_t)p.batch * p.seq_k;
    const dim3 blocks_q((unsigned)blocks_of(rows_q, p.heads_q)),
        blocks_k((unsigned)blocks_of(rows_k, p.heads_kv));
    const auto both = [&](auto has_scores, auto is_wide) {
        constexpr bool SCORES = decltype(has_scores)::value;
        constexpr int DIM = decltype(is_wide)::value ? WIDE : NARROW;
        if (status == GK_OK)
            status = launch<bwd_plain_dq_kernel<T, Grad, DIM, SCORES>>(
                "gk_flash_attn_bwd", ctx, blocks_q, WARPS_PLAIN * 32, 0, g);
        if (status == GK_OK)
            status = launch<bwd_plain_dkv_kernel<T, Grad, DIM, SCORES>>(
                "gk_flash_attn_bwd", ctx, blocks_k, WARPS_PLAIN * 32, 0, g);
    };
    const auto at_dim = [&](auto has_scores) {
        if (max(p.head_dim, p.head_dim_v) > NARROW)
            both(has_scores, Bool<true>());
        else
            both(has_scores, Bool<false>());
    };
    /* Float32 gradients of 16-bit operands are requested only for parts of a longer sequence. Those
     * calls have neither masks nor biases. */
    constexpr bool MAY = sizeof(T) == sizeof(Grad);
    if (MAY && scores)
        at_dim(Bool<MAY>());
    else
        at_dim(Bool<false>());
    if constexpr (MAY) {
        if (status == GK_OK && dbias)
            status = launch<bwd_plain_dbias_kernel<T>>(
                "gk_flash_attn_bwd", ctx, dim3((unsigned)dbias_blocks(dbias)), BIAS_THREADS, 0, g);
        if (status == GK_OK && ddistance)
            status = launch<bwd_plain_ddistance_kernel<T>>(
                "gk_flash_attn_bwd", ctx, dim3((unsigned)ddistance_blocks(ddistance)), BIAS_THREADS,
                0, g);
    }
    return status;
}

} // namespace

#endif
