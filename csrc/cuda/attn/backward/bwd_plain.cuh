/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_plain.cuh: the gradients of attention for every dtype, alignment and modifier. The kernels of
 * flash_attn_bwd_plain and flash_attn_bwd_partial_plain (Dao 2023, arXiv:2307.08691, Algorithm 2,
 * run twice: by rows for dq, by keys for dk and dv). The equations are in bwd.cuh.
 *
 * Reads q, grad_out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv], or packed, with any leading
 * strides, and the stats of the pre-pass. Writes dq, dk, dv. Sums are float, or double for float64.
 *
 * Work split: a warp for each row or key and head. While scores are computed, a lane holds one of
 * 32 keys (or rows); while they are added up, it holds columns. The order of sums is fixed, so
 * results are deterministic; there are no atomics. Shared memory: each warp's own row of both
 * operands, Pair<W>. Loads go through L1 without a pipeline.
 *
 * These kernels are not tuned for speed. Other kernels take 16-bit and float32 calls with aligned
 * rows; float32 with dropout is served here only. */
#ifndef GPUKERN_CUDA_BWD_PLAIN_CUH
#define GPUKERN_CUDA_BWD_PLAIN_CUH

#include "bwd.cuh"
#include "../drop.cuh"
#include "../tiles.h"

namespace {

constexpr int WARPS_PLAIN = BWD_PLAIN_WARPS, COLUMNS = 256, PER_LANE = COLUMNS / 32;

/* A row of q or k, and the row of grad_out or v that belongs to it. All lanes read the same
 * element, so there are no bank conflicts. */
template <class W> struct Pair {
    W left[COLUMNS], right[COLUMNS];
};

template <class T, class W>
__device__ __forceinline__ void load_row(W *to_s, const T *row_g, int n, int lane) {
    for (int d = lane; d < n; d += 32) to_s[d] = to_acc(row_g[d]);
}

template <class T, class W>
__device__ __forceinline__ void add_scaled(W *sum, W x, const T *row_g, int n, int lane) {
#pragma unroll
    for (int c = 0; c < PER_LANE; ++c)
        if (lane + c * 32 < n) sum[c] += x * to_acc(row_g[lane + c * 32]);
}

template <class T, class W>
__device__ __forceinline__ void store_row(T *to_g, const W *sum, W factor, int n, int lane) {
#pragma unroll
    for (int c = 0; c < PER_LANE; ++c)
        if (lane + c * 32 < n) to_g[lane + c * 32] = from_acc<T>(sum[c] * factor);
}

/* Finds the sequence and the index in it of row or key `unit`, counted over the whole tensor.
 * Returns false if it belongs to no sequence. */
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

/* Calls take(head, b, i, sequence) for this warp's row or key i. A token of no sequence has
 * none; the pre-pass has cleared its gradients. */
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

/* ---- 1. dq: a warp for each query row -------------------------------------------------------- */
template <class T, class Grad>
__global__ void __launch_bounds__(WARPS_PLAIN * 32)
    bwd_plain_dq_kernel(const __grid_constant__ Dropping<Bwd> g) {
    typedef typename element<T>::acc W;
    __shared__ Pair<W> rows_s[WARPS_PLAIN];
    const Problem &p = g.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    take_task<true>(g, [&](int head, int b, const int &i, const Sequence &s) {
        const int64_t at = (int64_t)head * g.row_tiles + row_tile_of(g, s, b);
        const W *stat = (const W *)g.stats + (at * g.tile_rows + i) * 2;
        const W lse = stat[0], delta = stat[1];
        const int lo = s.span.lo(i), hi = s.span.hi(i), kv_head = head / p.group;
        W sum[PER_LANE] = {};
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
                if (lane < n) {
                    const W qk = dot_eighths(rows_s[warp].left, k + j * p.k.row, p.head_dim);
                    const W keep = drop_of<W>(g.drop, drop_row0(p, b, head, s.q0 + i), j);
                    const W dp =
                        keep * dot_eighths(rows_s[warp].right, v + j * p.v.row, p.head_dim_v);
                    ds = pair_gradient(score, qk, dp, lse, delta, i, j, &weight);
                }
#pragma unroll 1
                for (int c = 0; c < n; ++c)
                    add_scaled(sum, __shfl_sync(0xffffffffu, ds, c), k + (j0 + c) * p.k.row,
                               p.head_dim, lane);
            }
        }
        store_row((Grad *)g.dq.data + b * g.dq.batch + head * g.dq.head + (s.q0 + i) * g.dq.row,
                  sum, (W)p.rules.scale, p.head_dim, lane);
    });
}

/* ---- 2. dk, dv: a warp for each key ---------------------------------------------------------- */
template <class T, class Grad>
__global__ void __launch_bounds__(WARPS_PLAIN * 32)
    bwd_plain_dkv_kernel(const __grid_constant__ Dropping<Bwd> g) {
    typedef typename element<T>::acc W;
    __shared__ Pair<W> rows_s[WARPS_PLAIN];
    const Problem &p = g.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    take_task<false>(g, [&](int kv_head, int b, const int &j, const Sequence &s) {
        W sum_k[PER_LANE] = {}, sum_v[PER_LANE] = {};
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
                        if (counts) {
                            const W qk =
                                dot_eighths(rows_s[warp].left, q + i * p.q.row, p.head_dim);
                            const W keep = drop_of<W>(g.drop, drop_row0(p, b, head, s.q0 + i), j);
                            const W dp =
                                keep * dot_eighths(rows_s[warp].right,
                                                   grad_out + i * g.grad_out.row, p.head_dim_v);
                            ds = pair_gradient(score, qk, dp, lse, delta, i, j, &weight);
                            weight *= keep;
                        }
                    }
                    const unsigned rows_that_count = __ballot_sync(0xffffffffu, counts);
                    for (int c = 0; c < n; ++c) {
                        const W ds_c = __shfl_sync(0xffffffffu, ds, c),
                                weight_c = __shfl_sync(0xffffffffu, weight, c);
                        /* a row without keys may hold anything */
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

/* ---- 3. launch ------------------------------------------------------------------------------- */
int64_t blocks_of(int64_t rows, int heads) { return gk_ceil_div(rows * heads, WARPS_PLAIN); }

template <class T>
bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    Bwd &g = gk_own<Bwd>(to) = bwd_of(ctx, (const gk_flash_attn_bwd_args *)args, BWD_PLAIN_ROWS, 0);
    g.lse_factor = 1;
    to->tile[0] = to->tile[1] = 1;
    to->tasks = blocks_of(g.p.cu_q ? g.p.total_k : (int64_t)g.p.batch * g.p.seq_k, g.p.heads_kv);
    to->workspace_bytes = stats_bytes(g, sizeof(typename element<T>::acc));
    return true;
}

template <class T, class Grad = T>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    Dropping<Bwd> g;
    (Bwd &)g = gk_own<Bwd>(plan);
    g.drop = dropout_of(&((const gk_flash_attn_bwd_args *)args)->fwd);
    g.stats = workspace;
    gk_status status = bwd_pre(ctx, element<T>::dtype, g, element<Grad>::dtype);
    const Problem &p = g.p;
    const int64_t rows_q = p.cu_q ? p.total_q : (int64_t)p.batch * p.seq_q;
    const int64_t rows_k = p.cu_q ? p.total_k : (int64_t)p.batch * p.seq_k;
    if (status == GK_OK)
        status = launch<bwd_plain_dq_kernel<T, Grad>>("gk_flash_attn_bwd", ctx,
                                                      dim3((unsigned)blocks_of(rows_q, p.heads_q)),
                                                      WARPS_PLAIN * 32, 0, g);
    if (status == GK_OK)
        status = launch<bwd_plain_dkv_kernel<T, Grad>>(
            "gk_flash_attn_bwd", ctx, dim3((unsigned)blocks_of(rows_k, p.heads_kv)),
            WARPS_PLAIN * 32, 0, g);
    return status;
}

} // namespace

#endif
