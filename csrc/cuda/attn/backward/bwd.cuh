/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd.cuh: the backward call as its kernels see it, and the workspace that its passes share. Every
 * backward kernel of attention includes it.
 *
 *  delta_i = sum_d dO_id O_id - dlse_i     P_ij = exp(s_ij - lse_i)
 *  dS_ij = P_ij (dO_i . V_j - delta_i) cap'
 *  dQ_i = scale sum_j dS_ij K_j     dK_j = scale sum_i dS_ij Q_i     dV_j = sum_i P_ij dO_i
 *  dsink_h = -sum_i exp(sink_h - lse_i) delta_i
 *  dbias_ij = P_ij (dO_i . V_j - delta_i), summed over the pairs that share an element of the bias
 *
 * cap' is the derivative of the softcap, 1 without one. Query rows are counted in tiles of
 * tile_rows within each sequence, so a tile never spans two sequences and the workspace has a fixed
 * size. Sequence b starts at tile q0 / tile_rows + b (packed) or b * tiles (dense). */
#ifndef GPUKERN_CUDA_BWD_CUH
#define GPUKERN_CUDA_BWD_CUH

#include "../../tile/convert.cuh"
#include "../score.cuh"

struct Bwd {
    Problem p;
    Rows grad_out, dq, dk, dv;
    Stats grad_lse; /* data NULL = 0 */
    void *dsinks;   /* [Hq] or NULL */
    int64_t dsink_head;
    /* workspace [Hq][row_tiles][tile_rows] of {lse, delta}. Rows that see no key and rows past the
     * end of a sequence have {inf, 0}. */
    void *stats;
    bool stats_apart; /* true: a tile has tile_rows values of lse, then as many of delta */
    /* workspace [Hq][row_tiles][tile_rows * columns], zeroed by the pre-pass; NULL = none */
    float *dq_sum;
    double lse_factor; /* stats hold lse times this factor: 1, or log2(e) */
    /* The rules' values as floats. Kernels read them from the parameters as operands, without a
     * register. */
    float scale, softcap;
    int tile_rows, tiles, row_tiles, columns;
    /* float32 only: the number of columns of each partial sum of dP and delta. 0: eight partial
     * sums, each of every eighth column (dot_eighths). */
    int dp_part;
    bool vector_out; /* out and grad_out can be read 16 bytes at a time */
};

/* The first tile of a sequence. With r = tile_rows, a packed sequence of n rows has ceil(n / r)
 * tiles from floor(q0 / r) + b on. They end before tile floor((q0 + n) / r) + b + 1, where the
 * next sequence starts. */
__device__ __forceinline__ int row_tile_of(const Bwd &g, const Sequence &s, int b) {
    return g.p.cu_q ? s.q0 / g.tile_rows + b : b * g.tiles;
}

/* The keys that at least one row sees. The rows' intervals overlap or touch, so their union is one
 * interval. Other keys may hold anything, including NaN. */
struct Interval {
    int lo, hi;
};

__device__ __forceinline__ Interval seen_keys(const Sequence &s) {
    const Span &x = s.span;
    if (s.seq_q <= 0 || x.hi_off <= x.lo_off) return {0, 0};
    return {max(x.key_lo, x.lo_off), min(x.key_hi, s.seq_q - 1 + x.hi_off)};
}

/* The rows that see some key of [lo, hi), hi > lo. */
__device__ __forceinline__ Interval seeing_rows(const Sequence &s, int lo, int hi) {
    return {s.span.row_lo(lo), s.span.row_hi(hi - 1, s.seq_q)};
}

/* The tiles of rows in which every row sees all of keys [j0, j0 + bkv). Only other tiles need a
 * mask. */
__device__ __forceinline__ Interval full_tiles(const Sequence &s, int j0, int bkv, int bq) {
    const Span &x = s.span;
    if (j0 < x.key_lo || j0 + bkv > x.key_hi) return {0, 0};
    const int first_row = max(j0 + bkv - x.hi_off, 0), last_row = j0 - x.lo_off;
    const int end = last_row >= s.seq_q - 1 ? SPAN_FAR : max(last_row + 1, 0) / bq;
    return {(first_row + bq - 1) / bq, end};
}

/* P of a visible pair in float32 or float64, and dS without the factor scale. */
template <class W>
__device__ __forceinline__ W pair_gradient(const WideScore<W> &x, W qk, W dp, W lse, W delta, int i,
                                           int j, W *p) {
    W derivative;
    *p = exp(score_fine(x, qk, i, j, &derivative) - lse);
    return *p * (dp - delta) * derivative;
}

/* ---- host ------------------------------------------------------------------------------------ */
inline Bwd bwd_of(const gk_context *ctx, const gk_flash_attn_bwd_args *a, int tile_rows,
                  int columns) {
    Bwd g = {};
    g.p = problem_of(ctx, &a->fwd);
    g.grad_out = rows_of(a->grad_out);
    g.dq = rows_of(a->dq);
    g.dk = rows_of(a->dk);
    g.dv = rows_of(a->dv);
    if (a->grad_lse) g.grad_lse = stats_of(*a->grad_lse);
    if (a->dsinks) {
        g.dsinks = a->dsinks->data;
        g.dsink_head = a->dsinks->stride[0];
    }
    g.tile_rows = tile_rows;
    g.columns = columns;
    g.scale = (float)g.p.rules.scale;
    g.softcap = (float)g.p.rules.softcap;
    g.tiles = (int)gk_ceil_div(g.p.seq_q, tile_rows);
    g.row_tiles = g.p.cu_q ? g.p.total_q / tile_rows + g.p.batch : g.p.batch * g.tiles;
    g.vector_out = rows_aligned(a->fwd.out) && rows_aligned(a->grad_out);
    return g;
}

/* True if the tiled kernels of the padded head_dim can serve the call. */
inline bool tile_takes(const gk_context *ctx, const gk_flash_attn_bwd_args *a, int head_dim,
                       int smem_bytes) {
    const gk_flash_attn_args &f = a->fwd;
    const int last = f.q.ndim - 1;
    return gk_max_i64(f.q.shape[last], f.v.shape[last]) <= head_dim && rows_aligned(f.q) &&
           rows_aligned(f.k) && rows_aligned(f.v) && rows_aligned(a->grad_out) &&
           rows_aligned(a->dq) && rows_aligned(a->dk) && rows_aligned(a->dv) &&
           smem_fits(ctx, smem_bytes);
}

/* Bytes of the workspace's stats and of dq_sum. wide_bytes: bytes of one lse, 4 or 8. */
inline size_t stats_bytes(const Bwd &g, size_t wide_bytes) {
    return (size_t)gk_round_up(
        (int64_t)g.p.heads_q * g.row_tiles * g.tile_rows * 2 * (int64_t)wide_bytes, 256);
}

inline size_t dq_sum_bytes(const Bwd &g) {
    return (size_t)g.p.heads_q * (size_t)g.row_tiles * (size_t)g.tile_rows * (size_t)g.columns * 4;
}

/* flash_attn_bwd_pre.cu: fills in stats, zeroes dq_sum and writes dsinks. In packed calls it
 * zeroes the gradients of tokens that belong to no sequence; `grads` is their dtype. */
gk_status bwd_pre(const gk_context *ctx, gk_dtype dtype, const Bwd &g, gk_dtype grads);

/* Computes dsinks alone from existing stats; 16-bit calls. */
gk_status bwd_sinks(const gk_context *ctx, gk_dtype dtype, const Bwd &g);

/* flash_attn_bwd_dq_sm80.cu, flash_attn_bwd_dq_drop_sm80.cu: dq by rows, summed in a fixed
 * order. lse is in log2 units. Tile: a BwdDqTile of tiles.h; G: Bwd or Dropping<Bwd>. */
template <class Tile, class G> gk_status bwd_dq(const gk_context *ctx, gk_dtype dtype, const G &g);

/* flash_attn_bwd_partial_dq_sm80.cu: bwd_dq with an unrounded float32 result. */
gk_status bwd_partial_dq(const gk_context *ctx, gk_dtype dtype, const Bwd &g);

#endif
