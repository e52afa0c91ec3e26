/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_groups.cuh: weight_gemm for groups of rows of a (experts), on every GPU: which tile a
 * block takes.
 *
 *   out[i] = a[i] w[g]^T for rows i of group g,   w[g] = rows [g n', g n' + n) of the weight
 *
 * n' is n rounded up to the 64 rows of a packed tile. A task is a tile of one group's weight rows
 * and of its tokens. Tasks are numbered group by group (groups.cuh). Within a group, up to
 * GROUPED_ROWS consecutive tiles of tokens share weight rows in L2.
 *
 * The ends of groups are on the device. The host only knows that M rows in G groups have at most
 * (M + (G + 1) (NT - 1)) / NT tiles of NT tokens, one part for the rows of no group among them. */
#ifndef GPUKERN_CUDA_QUANT_WEIGHT_GROUPS_CUH
#define GPUKERN_CUDA_QUANT_WEIGHT_GROUPS_CUH

#include "groups.cuh"
#include "weight.cuh"

enum {
    WEIGHT_MOST_GROUPS = 512
};
typedef GroupListOf<WEIGHT_MOST_GROUPS> WeightGroupList;

struct WeightTask {
    int group;    /* groups.count: rows of no group; -1: no task */
    int row, end; /* rows of a: [row, end) */
    int col;      /* tile of the group's weight rows */
    bool shared;  /* other tiles of tokens read the same weight rows */
};

/* stride: from a block's task to its next. As in find_task, the tile that comes first in a column
 * rotates, or else a block might get the short last tile of every column. */
template <int NT>
__device__ __forceinline__ WeightTask weight_task(const Groups &x, const WeightGroupList &list,
                                                  int task, int stride = 0x7fffffff) {
    if (task >= tasks_in(x, list)) return {-1, 0, 0, 0, false};
    const int group = group_of(x, list, task), begin = list.begin[group],
              end = group < x.count ? list.begin[group + 1] : (int)x.total,
              tiles = tiles_in<NT>(end - begin), in_group = task - list.first[group];
    if (tiles == 1) return {group, begin, end, in_group, false};
    const int strip = in_group / (GROUPED_ROWS * x.across) * GROUPED_ROWS,
              rest = in_group - strip * x.across, down = min(GROUPED_ROWS, tiles - strip),
              col = rest / down, turn = (task - rest + col * down) / stride,
              row = begin + (strip + (rest - col * down + turn) % down) * NT;
    return {group, row, min(row + NT, end), col, true};
}

/* ---- host ------------------------------------------------------------------------------------ */
inline int64_t group_rows(const gk_weight_gemm_args *g) { return gk_round_up(g->n, GK_TILE); }

/* Tiles of NT tokens, at most. */
inline int64_t token_tiles(const gk_weight_gemm_args *g, int nt) {
    const int64_t m = weight_rows(g->a), parts = gk_min_i64(g->offs->shape[0] + 1, m);
    return (m + parts * (nt - 1)) / nt;
}

inline Groups weight_groups(const gk_context *ctx, const gk_weight_gemm_args *g, int rows) {
    Groups x = {};
    x.ends = (const int32_t *)g->offs->data;
    x.step = g->offs->stride[0];
    x.total = weight_rows(g->a);
    x.count = (int)g->offs->shape[0];
    x.across = (int)gk_ceil_div(g->n, rows);
    x.error_word = ctx->error_word;
    return x;
}

/* Elements of bias from group to group. Sets f's step along N. */
inline int64_t bias_of_groups(const gk_weight_gemm_args *g, Finish *f) {
    if (!g->bias) return 0;
    f->bias_step = g->bias->stride[g->bias->ndim - 1];
    return g->bias->ndim == 2 ? g->bias->stride[0] : 0;
}

#endif
