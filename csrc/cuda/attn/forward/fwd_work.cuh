/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_work.cuh: the work split of the tiled forward kernels. It says which tile of queries a block
 * takes and which part of the keys the tile attends to. It also says where results go: to the
 * tensors, or as partial results to the workspace, where split_combine merges them.
 *
 * fwd_sm80.cuh and flash_attn_fwd_simt use all of it. The Hopper kernels take tiles in another
 * order (fwd_schedule.cuh). */
#ifndef GPUKERN_CUDA_FWD_WORK_CUH
#define GPUKERN_CUDA_FWD_WORK_CUH

#include "gpukern.h"
#include "../../../core/invariant.h"
#include "../../tile/divisor.h"
#include "fwd_rows.cuh"
#include "../split_combine.cuh"
#include "../tiles.h"

/* The order of blocks in the kernels that use fwd_work. kv heads form groups whose keys and values
 * fit in L2 together. Within a group, the last tile of queries of every head comes first: under a
 * causal mask it sees the most keys, and long blocks must not start last. The splits of one tile
 * are neighbours. */
struct FwdParams {
    Problem problem;
    int tiles_q, splits;
    Divisor by_splits;
    int together;       /* query heads of such a group, a multiple of problem.group */
    float *out_splits;  /* splits > 1: [splits][rows][head_dim_v] */
    float *lse_splits;  /* splits > 1: [splits][rows] */
    int64_t split_rows; /* rows of all heads together */
};

/* The batch entry, the query head, the first row and the split of a block's tile. */
struct FwdWork {
    int b, head, i0, split;
};

template <int BQ> __device__ __forceinline__ FwdWork fwd_work(const FwdParams &p, unsigned block) {
    const unsigned heads = p.problem.batch * p.problem.heads_q;
    const unsigned split = block % p.splits, rest = block / p.splits;
    const unsigned group = rest / (p.together * p.tiles_q),
                   inside = rest - group * (p.together * p.tiles_q);
    const unsigned first = group * p.together, width = min((unsigned)p.together, heads - first);
    const unsigned tile = inside / width, flat = first + inside - tile * width;
    return {(int)(flat / p.problem.heads_q), (int)(flat % p.problem.heads_q),
            (int)((p.tiles_q - 1 - tile) * BQ), (int)split};
}

/* The keys of a block: `tiles` key tiles of BKV keys, from key lo on. At least one row of the block
 * sees keys of [lo, hi). Keys from hi on may hold anything, including NaN. */
struct FwdKeys {
    int lo, hi, tiles;
    /* every row sees all keys of key tiles plain_first to plain_end - 1 */
    int plain_first, plain_end;
};

/* Computes the keys of one split. The first key tile begins at a multiple of `step`, a power of 2,
 * so it may have keys before the first visible one. These may hold anything. */
template <int BKV>
__device__ __forceinline__ FwdKeys fwd_keys(const FwdParams &p, const Span &span, int i0, int rows,
                                            int split, int step = 1) {
    FwdKeys k;
    const int seen = span.lo(i0), lo = seen & -step;
    k.hi = span.hi(i0 + rows - 1);
    /* so small that `all` times SPLIT_MOST stays below 2^31 */
    const unsigned all = k.hi > seen ? (k.hi - lo + BKV - 1) / BKV : 0;
    const int first = p.by_splits.into(all * split);
    k.tiles = (int)p.by_splits.into(all * (split + 1)) - first;
    k.lo = lo + first * BKV;
    k.plain_first = (span.lo(i0 + rows - 1) - lo + BKV - 1) / BKV - first;
    k.plain_end = max(span.hi(i0) - lo, 0) / BKV - first;
    return k;
}

/* ---- host ------------------------------------------------------------------------------------ */
/* How full the waves of `blocks` blocks are on average, if `at_once` blocks run at the same
 * time. */
inline double fwd_filled(int64_t blocks, int64_t at_once) {
    return (double)blocks / (double)(gk_ceil_div(blocks, at_once) * at_once);
}

/* The number of parts into which the keys are split: the smallest number that fills the GPU nearly
 * as well as the best one. It depends only on shapes and the number of SMs. */
inline int fwd_splits(int64_t blocks, int64_t tiles_k, int64_t at_once) {
    const int64_t most = gk_min_i64(SPLIT_MOST, tiles_k / SPLIT_TILES);
    if (blocks == 0 || (double)blocks >= SPLIT_BELOW * (double)at_once) return 1;
    double best = 0;
    for (int64_t s = 1; s <= most; ++s) {
        const double filled = fwd_filled(blocks * s, at_once);
        if (filled > best) best = filled;
    }
    int splits = 1;
    while (splits < most && fwd_filled(blocks * splits, at_once) < SPLIT_NEAR * best) ++splits;
    return splits;
}

inline int64_t fwd_blocks(const FwdParams &p) {
    return (int64_t)p.tiles_q * p.problem.heads_q * p.problem.batch * p.splits;
}

/* The largest number of query heads of one kv head that fit in a tile of bq rows. */
inline int fwd_tile_heads(const Problem &p, int bq) {
    if (p.seq_q == 0) return 1; /* a packed call with empty sequences only */
    for (int heads = (int)gk_min_i64(p.group, bq / p.seq_q); heads > 1; --heads)
        if (p.group % heads == 0) return heads;
    return 1;
}

/* Fills in the parameters of a call. ctas: blocks that run on one SM at the same time. least: the
 * smallest number of splits. The splits of a packed call follow from the shapes of its tensors and
 * not from max_seqlen, so that a looser max_seqlen gives the same bits. */
inline FwdParams fwd_params(const gk_context *ctx, const gk_flash_attn_args *a, int bq, int bkv,
                            int ctas, int tile_heads = 1, int least = 1) {
    FwdParams p = {};
    p.problem = problem_of(ctx, a);
    const Problem &x = p.problem;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    p.tiles_q = (int)gk_ceil_div(x.seq_q, bq);
    p.splits = 1;
    p.split_rows = (x.cu_q ? x.total_q : (int64_t)x.batch * x.seq_q) * x.heads_q;
    const int64_t tiles =
        (x.cu_q ? (x.total_q / bq + x.batch) * (int64_t)x.heads_q : fwd_blocks(p)) / tile_heads;
    const int64_t keys = x.cu_q ? x.total_k / gk_max_i64(x.batch, 1) : x.seq_k;
    /* In a batch-invariant call the split of a sequence must not depend on the others. */
    const int64_t found = gk_batch_invariant() ? 1
                                               : fwd_splits(tiles, gk_ceil_div(keys, bkv),
                                                            (int64_t)gpu->num_sms * ctas);
    p.splits = (int)gk_max_i64(least, found);
    p.by_splits = divisor_of(p.splits);
    const double head_bytes =
        (double)x.seq_k * (x.head_dim + x.head_dim_v) * (double)gk_dtype_bytes(a->k.dtype);
    const double fit = FWD_L2_SHARE * (double)gpu->l2_bytes / (head_bytes > 0 ? head_bytes : 1);
    const int64_t heads_kv = (int64_t)x.batch * x.heads_kv;
    const int64_t kv_together =
        fit<1 ? 1 : fit>(double) heads_kv ? gk_max_i64(heads_kv, 1) : (int64_t)fit;
    p.together = (int)gk_max_i64(kv_together * x.group, 1);
    return p;
}

/* True if the result is made from float32 partial results even with one split: out is wider than q,
 * or the result is merged with the old value of out. */
inline bool fwd_by_parts(const gk_flash_attn_args *a) {
    return gk_accumulates(a) || (a->out.dtype != a->q.dtype && !gk_is_code(a->q.dtype));
}

/* True if there is a single partial result that needs no merge, so that the kernel can store it
 * directly to `out`. */
inline bool fwd_is_part(const gk_flash_attn_args *a, const FwdParams &p) {
    if (!fwd_by_parts(a) || p.splits > 1 || gk_accumulates(a) || a->rules.sinks) return false;
    int64_t dense = 1;
    for (int d = a->out.ndim - 1; d >= 0; dense *= a->out.shape[d--])
        if (a->out.shape[d] > 1 && a->out.stride[d] != dense) return false;
    return (uintptr_t)a->out.data % 8 == 0;
}

/* Sets the places of the partial results in the workspace. */
inline void fwd_place(FwdParams *p, void *workspace) {
    p->out_splits = (float *)workspace;
    if (workspace)
        p->lse_splits = p->out_splits + p->splits * p->split_rows * p->problem.head_dim_v;
}

inline size_t fwd_workspace_bytes(const FwdParams &p) {
    return p.splits > 1 ? split_combine_bytes(p.splits, p.split_rows, p.problem.head_dim_v) : 0;
}

/* Fills in the fields that every forward plan has. ctas: as in fwd_params; tasks: blocks of the
 * grid. */
inline void fwd_plan(const gk_context *ctx, const FwdParams &p, int bq, int bkv, int ctas,
                     int64_t tasks, gk_plan *to) {
    to->tile[0] = bq;
    to->tile[1] = bkv;
    to->tasks = tasks;
    to->chunks = p.splits;
    to->waves = (double)tasks / ((double)gk_gpu_of(ctx->index)->num_sms * ctas);
    to->workspace_bytes = fwd_workspace_bytes(p);
}

/* The merge of partial results, without the strides of out, which depend on its layout. */
inline SplitCombine fwd_combine(const FwdParams &p) {
    const Problem &x = p.problem;
    SplitCombine c = {};
    c.out_splits = p.out_splits;
    c.lse_splits = p.lse_splits;
    c.splits = p.splits;
    c.rows = p.split_rows;
    c.head_dim_v = x.head_dim_v;
    c.out = (void *)x.out.data;
    c.lse = (float *)x.lse.data;
    c.sinks = x.rules.sinks;
    c.sinks_dtype = x.rules.sinks_dtype;
    return c;
}

/* Runs the two steps after the kernel: the merge of partial results, and the rows of `out` that
 * belong to no sequence. */
template <class T>
inline gk_status fwd_finish(const char *op, const gk_context *ctx, const gk_flash_attn_args *a,
                            const FwdParams &p) {
    const Problem &x = p.problem;
    if ((p.splits > 1 || fwd_by_parts(a)) && !fwd_is_part(a, p) && p.split_rows > 0) {
        SplitCombine c = fwd_combine(p);
        c.accumulates = gk_accumulates(a) != 0;
        if (x.cu_q) {
            c.size_y = x.total_q;
            c.size_z = x.heads_q;
            c.out_y = x.out.row;
            c.out_z = x.out.head;
            c.sink_z = x.rules.sink_head;
        } else {
            c.size_y = x.heads_q;
            c.size_z = x.seq_q;
            c.out_x = x.out.batch;
            c.out_y = x.out.head;
            c.out_z = x.out.row;
            c.sink_y = x.rules.sink_head;
        }
        const gk_status status = split_combine(op, ctx, a->out.dtype, c);
        if (status != GK_OK) return status;
    }
    return a->out.dtype == GK_F32 ? clear_unowned<float>(op, ctx, x) : clear_unowned<T>(op, ctx, x);
}

#endif
