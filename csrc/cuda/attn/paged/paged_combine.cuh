/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_combine.cuh: the second kernel of paged_attn_sm80, paged_codes_sm80 and paged_attn_f32. It
 * merges the tiles that several blocks share (paged_plan.cuh), in the order of their splits. It
 * also zeroes the results of tokens that belong to no sequence. paged_attn_sm90a merges in its own
 * kernel (paged_join.cuh). */
#ifndef GPUKERN_CUDA_PAGED_COMBINE_CUH
#define GPUKERN_CUDA_PAGED_COMBINE_CUH

#include "paged_plan.cuh"

namespace {

/* ---- 1. the kernel --------------------------------------------------------------------------- */
constexpr int COMBINE_WARPS = paged_plan::combine_warps, COMBINE_THREADS = COMBINE_WARPS * 32;

/* Zeroes a token that belongs to no sequence. One warp. */
template <class T> __device__ __forceinline__ void clear_unowned_token(const Paged &p, int token) {
    const int lane = threadIdx.x % 32;
    if (token >= p.tokens || paged_owner(p, token) >= 0) return;
    const int64_t row = (int64_t)token * p.heads_q;
    for (int i = lane; p.lse && i < p.heads_q; i += 32) ((float *)p.lse)[row + i] = -INFINITY;
    for (int i = lane; i < p.heads_q * p.head_dim_v; i += 32)
        ((T *)p.out)[row * p.head_dim_v + i] = from_acc<T>(0);
}

/* Merges columns 4 quad .. 4 quad + 3 of a row over the splits of blocks from, from + step, and so
 * on up to last. first: the block that began the tile. there: the row has these columns. Loads
 * SPLITS splits at a time. */
template <int SPLITS>
__device__ __forceinline__ Merged sum_splits(const Call &c, int first, int from, int last, int step,
                                             int64_t lane_at, int quad, bool there) {
    const int64_t split_rows = (int64_t)c.block_heads * c.lanes;
    Merged all = {{-INFINITY, 0}, make_float4(0, 0, 0, 0)};
    for (int i0 = from; i0 <= last; i0 += step * SPLITS) {
        float2 stats[SPLITS];
        float4 o[SPLITS];
        float highest = -INFINITY;
#pragma unroll
        for (int u = 0; u < SPLITS; ++u) {
            const int i = i0 + u * step;
            const int64_t split = (i * 2 + (i == first)) * split_rows + lane_at;
            stats[u] = make_float2(-INFINITY, 0);
            o[u] = make_float4(0, 0, 0, 0);
            if (i <= last) stats[u] = c.stats[split];
            if (i <= last && there)
                o[u] = *(const float4 *)(c.sums + split * c.p.head_dim_v + quad * 4);
        }
#pragma unroll
        for (int u = 0; u < SPLITS; ++u) highest = fmaxf(highest, stats[u].x);
        const float shrink = all.row.raise(highest);
        all.y.x *= shrink;
        all.y.y *= shrink;
        all.y.z *= shrink;
        all.y.w *= shrink;
        all.row.sum *= shrink;
#pragma unroll
        for (int u = 0; u < SPLITS; ++u) add_4(all.y, o[u], all.row.join(stats[u].x, stats[u].y));
    }
    return all;
}

/* The first blocks of the grid: one for each split. The blocks of a tile's splits divide its rows
 * among them. So every warp is busy with many splits of a small tile as well as with few splits of
 * a large one. In the remaining blocks each warp checks whether a token belongs to a sequence. */
template <class T> __global__ void __launch_bounds__(COMBINE_THREADS) paged_combine_kernel(Call c) {
    const Paged &p = c.p;
    __shared__ __align__(16) float sums_s[COMBINE_WARPS][256]; /* 256: the largest head_dim_v */
    __shared__ float2 stats_s[COMBINE_WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    if ((int)blockIdx.x >= 2 * c.blocks) {
        clear_unowned_token<T>(p, ((int)blockIdx.x - 2 * c.blocks) * COMBINE_WARPS + warp);
        return;
    }

    /* 1.1 this block's rows of the tile: mine, mine + splits, and so on. Its warps divide the
     * rows, and the splits of each row. */
    const SharedTile tile = c.shared[blockIdx.x];
    if (tile.last < 0) return;
    const int splits = tile.last - tile.first + 1, mine = (int)blockIdx.x / 2 - tile.first;
    const int lines = c.block_heads * tile.rows - mine,
              rows = lines > 0 ? (lines + splits - 1) / splits : 0;
    int warps_of_row = COMBINE_WARPS;
    while (warps_of_row > 1 && COMBINE_WARPS / warps_of_row < rows) warps_of_row /= 2;
    const int at_once = COMBINE_WARPS / warps_of_row, quads = p.head_dim_v / 4;

    for (int row0 = 0; row0 < rows; row0 += at_once) {
        /* 1.2 a lane takes four columns at a time */
        const int line = mine + (row0 + warp / warps_of_row) * splits,
                  block_head = line / tile.rows;
        const int64_t lane_at = (int64_t)block_head * c.lanes + line - block_head * tile.rows;
        const bool works = row0 + warp / warps_of_row < rows;
        for (int quad = lane; works && quad - lane < quads; quad += 32) {
            const Merged all = sum_splits<paged_plan::combine_splits>(
                c, tile.first, tile.first + warp % warps_of_row, tile.last, warps_of_row, lane_at,
                quad, quad < quads);
            if (quad < quads) *(float4 *)&sums_s[warp][quad * 4] = all.y;
            if (lane == 0) stats_s[warp] = make_float2(all.row.peak, all.row.sum);
        }
        __syncthreads(); /* every warp's sums are written */

        /* 1.3 merge the warps of a row */
        const int rows_here = min(at_once, rows - row0);
        for (int x = threadIdx.x; x < rows_here * quads; x += COMBINE_THREADS) {
            const int place = x / quads, quad = x - place * quads, warp0 = place * warps_of_row;
            const Merged all =
                merge_4<4>(stats_s + warp0, 1, &sums_s[warp0][quad * 4], 256, warps_of_row);
            const int its_line = mine + (row0 + place) * splits, block_head = its_line / tile.rows;
            const int row = tile.row0 + its_line - block_head * tile.rows, token = row / p.group;
            const int head =
                (tile.head_set * c.block_heads + block_head) * p.group + row - token * p.group;
            const int64_t at = (int64_t)(tile.token0 + token) * p.heads_q + head;
            const RowResult f = finish(p, head, all.row.peak, all.row.sum);
            store_4<T>((T *)p.out + at * p.head_dim_v + quad * 4, all.y, f.factor);
            if (quad == 0 && p.lse) ((float *)p.lse)[at] = f.lse;
        }
        __syncthreads(); /* the sums have been read */
    }
}

/* ---- 2. launch ------------------------------------------------------------------------------- */
/* Sets the addresses of a call's splits in the workspace. */
inline void place_splits(Call &c, const Sizes &z, void *workspace) {
    if (!z.combines) return;
    char *at = (char *)workspace;
    c.shared = (SharedTile *)at;
    at += z.shared_bytes;
    c.stats = (float2 *)at;
    at += z.stats_bytes;
    c.sums = (float *)at;
}

template <class T> gk_status launch_combine(const gk_context *ctx, const Call &c) {
    const int64_t token_blocks = c.p.cu_q ? gk_ceil_div(c.p.tokens, COMBINE_WARPS) : 0;
    const dim3 grid((unsigned)(2 * c.blocks + token_blocks));
    return launch<paged_combine_kernel<T>>("gk_paged_attn", ctx, grid, COMBINE_THREADS, 0, c);
}

template <class T, auto KERNEL>
gk_status run_pair(const gk_context *ctx, const void *, const gk_plan *plan, void *workspace) {
    const gk_cuda_instance *instance = (const gk_cuda_instance *)plan->kernel;
    const Sizes &z = gk_own<Planned>(plan).sizes;
    Call c = gk_own<Planned>(plan).call;
    place_splits(c, z, workspace);
    if (c.p.tokens == 0 || c.p.heads_q == 0) return GK_OK;
    const gk_status status =
        launch<KERNEL>("gk_paged_attn", ctx, dim3((unsigned)c.blocks),
                       instance->key[PagedKey::WARPS] * 32, instance->key[PagedKey::SMEM], c);
    if (status != GK_OK || !z.combines) return status;
    return launch_combine<T>(ctx, c);
}

} // namespace

#endif
