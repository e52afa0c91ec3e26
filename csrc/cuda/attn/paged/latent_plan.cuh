/* SPDX-License-Identifier: BSD-3-Clause */
/* latent_plan.cuh: how paged_latent_sm90a divides its work.
 *
 * Terms. A row is one query token and one head. A worker is `side` (1 or 2) neighbouring thread
 * blocks, each with 64 rows of the same sequence. They read the same keys at nearly the same time,
 * so the second block finds them in L2. A group is the 64 x side rows of a worker. A tile is a
 * group with all the keys that it sees. Keys are read in chunks of 64.
 *
 * All tiles form one list. The weight of a tile is its number of chunks plus tile_cost. Each worker
 * takes a share of the list. There are three kinds of shares:
 *
 *   whole tiles    if the longest share exceeds an equal one by at most `slack` chunks. Then no
 *                  tile is split, and nothing is merged.
 *   parts of tiles if the tiles are of nearly equal length and there are no more tiles than
 *                  workers. Each tile is cut into the same number of equal parts, one for each
 *                  worker.
 *   equal shares   otherwise. A boundary within `snap` chunks of a tile's end moves to that end,
 *                  because a split of a few chunks costs more than it gains in balance.
 *
 * A block reads two chunks at a time, so tiles are split only between pairs of chunks.
 *
 * A worker that has a whole tile writes out. Otherwise it writes a split (O, maximum and sum) and a
 * record to the workspace. A second kernel (paged_latent_sm90a.cu) merges the splits in order. A
 * worker has at most two splits: one of a tile that an earlier worker began, and one of a tile that
 * a later worker ends.
 *
 * The division depends only on the lengths, which are on the device. Each worker computes its own
 * share from them, so the launch does not depend on the lengths. */
#ifndef GPUKERN_CUDA_LATENT_PLAN_CUH
#define GPUKERN_CUDA_LATENT_PLAN_CUH

#include "../../host/tensormap.cuh"
#include "../../layout/wgmma.cuh"
#include "latent_tiles.h"
#include "paged_combine.cuh"

namespace {

constexpr int LATENT_ROWS = 64, LATENT_KEYS = 64; /* rows of a block; keys of a chunk */
constexpr int LATENT_DIM = 576, LATENT_DIM_V = 512;

/* For the merge: the tiles of which a worker has a part. */
struct LatentRecord {
    /* The tile that this worker begins but does not end has rows [first_row, first_row + rows) of
     * out. rows 0: there is no such tile. */
    int first_row, rows;
    bool ends; /* the worker has the last split of a tile that an earlier worker began */
};

struct LatentParams {
    Paged p;
    CUtensorMap q, cache;
    /* rows of a box of q, and whether q's tokens and heads are one dimension of its map */
    int q_box;
    bool q_flat;
    int page_box, box_bits; /* keys of a box of the cache: 16, 32 or 64; log2 of that */
    int workers, side;
    int token_blocks;      /* blocks of the merge that clear tokens of no sequence */
    LatentRecord *records; /* workspace, [workers] */
    float2 *stats;         /* [workers][2][side][64]: (max in log2, sum) of a split */
    float *sums;           /* [workers][2][side][64][512]: O of a split, not divided by the sum */
};

/* ---- 1. the work of one sequence ------------------------------------------------------------- */
struct LatentWork {
    int rows, groups, end, chunks; /* the rows see keys [0, end) at most */
    __device__ __forceinline__ int weight() const { return chunks + latent_tiles::tile_cost; }
};

__device__ __forceinline__ LatentWork latent_work(const LatentParams &a, const PagedSequence &s) {
    LatentWork w;
    w.rows = s.rows * a.p.heads_q;
    w.groups = (w.rows + LATENT_ROWS * a.side - 1) / (LATENT_ROWS * a.side);
    w.end = s.rows > 0 ? max(s.hi(s.rows - 1), 0) : 0;
    w.chunks = (w.end + LATENT_KEYS - 1) / LATENT_KEYS;
    return w;
}

/* ---- 2. a worker's share --------------------------------------------------------------------- */
/* A worker's share: the range [lo, hi) of the list, counted in chunks, or in tiles if by_tile. Tile
 * (b, group) begins at `at` <= lo. If by_tile, the worker takes part `part` of `parts` of each of
 * its tiles. */
struct LatentShare {
    int b, group, at, lo, hi;
    bool by_tile;
    int part, parts;
};

/* Adjusts a boundary x between two shares. If the beginning or the end of its tile is near, x moves
 * there, otherwise to the beginning of a pair of chunks. The tile begins at chunk `at` of the list.
 */
__device__ __forceinline__ int latent_snap(int x, int at, int weight) {
    const int before = x - at - latent_tiles::tile_cost, after = at + weight - x;
    if (before <= latent_tiles::snap) return at;
    return after <= latent_tiles::snap ? at + weight : x - before % 2;
}

/* How the list is divided. */
struct LatentDivision {
    int total, workers; /* chunks (by_tile: tiles) of the list; workers that get a share */
    bool by_tile;       /* shares are whole tiles, or parts of tiles */
    int parts;          /* of each tile, if by_tile */
};

/* Decides how the list is divided. weight: the sum over all tiles. most, least: the largest and the
 * smallest weight of a tile. */
__device__ __forceinline__ LatentDivision latent_divide(int weight, int tiles, int most, int least,
                                                        int workers) {
    typedef latent_tiles tuned;
    const int each = weight / workers + tuned::slack;
    /* tiles that each worker takes */
    const int together = tiles ? (tiles + workers - 1) / workers : 1;
    if (together * most <= each) return {tiles, (tiles + together - 1) / together, true, 1};
    const int most_parts = workers / tiles;
    if (most_parts > 0 && most - least <= tuned::slack && weight / (most_parts * tiles) <= each) {
        const int chunks = least - tuned::tile_cost; /* chunks of the shortest tile */
        const int parts = max(1, min(most_parts, (chunks + 1) / tuned::least));
        return {tiles, tiles * parts, true, parts};
    }
    return {weight, max(1, min(workers, weight / tuned::least)), false, 1};
}

/* The first chunk of a part of a tile, which is even. A tile has at least as many pairs of chunks
 * as parts, so no part is empty. */
__device__ __forceinline__ int latent_part(int chunks, int part, int parts) {
    const int pairs = (chunks + 1) / 2, each = pairs / parts;
    /* the remainder goes to the first parts */
    return 2 * (each * part + min(part, pairs - each * parts));
}

/* Finds the share of a worker. One warp. */
__device__ __forceinline__ void latent_plan(const LatentParams &a, int worker, LatentShare *out) {
    const Paged &p = a.p;
    const int lane = threadIdx.x % 32;

    /* 2.1 the list's weight, and the longest and the shortest tile */
    int weight = 0, tiles = 0, most = 0, least = INT32_MAX;
    for (int b = lane; b < p.batch; b += 32) {
        const LatentWork w = latent_work(a, paged_sequence(p, b));
        if (w.groups == 0) continue;
        weight += w.groups * w.weight();
        tiles += w.groups;
        most = max(most, w.weight());
        least = min(least, w.weight());
    }
    weight = __reduce_add_sync(0xffffffffu, weight);
    tiles = __reduce_add_sync(0xffffffffu, tiles);
    most = __reduce_max_sync(0xffffffffu, most);
    least = __reduce_min_sync(0xffffffffu, least);
    const LatentDivision division = latent_divide(weight, tiles, most, least, a.workers);
    const int64_t total = division.total;
    const bool any = worker < division.workers && tiles > 0;
    const int lo = any ? (int)(total * worker / division.workers) : (int)total;
    const int end = any ? (int)(total * (worker + 1) / division.workers) : (int)total;
    const int parts = division.parts, hi = any && parts > 1 ? lo + 1 : end;
    if (lane == 0)
        *out = {p.batch,        0,    (int)total, (int)total, (int)total, division.by_tile,
                worker % parts, parts};
    __syncwarp(); /* lane 0's empty share is stored before the code below overwrites it */
    if (!any) return;

    /* 2.2 the tiles in which the share begins and ends */
    int before = 0;
    for (int b0 = 0; b0 < p.batch && before <= hi; b0 += 32) {
        const int b = b0 + lane;
        LatentWork w = {};
        if (b < p.batch) w = latent_work(a, paged_sequence(p, b));
        const int of_tile = division.by_tile ? 1 : w.weight(), its = w.groups * of_tile;
        int upto = its;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, upto, step);
            if (lane >= step) upto += left;
        }
        const int first = before + upto - its; /* the sequence's first chunk */
        if (lo >= first && lo < first + its) {
            const int group = (lo - first) / of_tile, at = first + group * of_tile;
            out->b = b;
            out->group = group;
            out->at = at;
            out->lo = division.by_tile ? lo : latent_snap(lo, at, of_tile);
        }
        if (hi >= first && hi < first + its) {
            const int at = first + (hi - first) / of_tile * of_tile;
            out->hi = division.by_tile ? hi : latent_snap(hi, at, of_tile);
        }
        before += __shfl_sync(0xffffffffu, upto, 31);
    }
    __syncwarp(); /* the share is found */
}

/* ---- 3. the tiles of a share ----------------------------------------------------------------- */
struct LatentTile {
    PagedSequence s;
    LatentWork w;
    int b, group;
    int t0, t1; /* the worker's chunks */
    __device__ __forceinline__ bool whole() const { return t0 == 0 && t1 == w.chunks; }
};

/* Calls f(tile) for each tile of the share. The loop bounds of f come from loads. The shuffles
 * prove to the compiler that the bounds are the same in all lanes. Without them it serialises wgmma
 * (C7520). */
template <class F>
__device__ __forceinline__ void each_latent_tile(const LatentParams &a, const LatentShare &share,
                                                 F f) {
    constexpr int cost = latent_tiles::tile_cost;
    int b = __shfl_sync(0xffffffffu, share.b, 0), group = __shfl_sync(0xffffffffu, share.group, 0);
    int at = __shfl_sync(0xffffffffu, share.at, 0);
    const int lo = __shfl_sync(0xffffffffu, share.lo, 0),
              hi = __shfl_sync(0xffffffffu, share.hi, 0);
    const bool by_tile = share.by_tile;
    const int part = __shfl_sync(0xffffffffu, share.part, 0),
              parts = __shfl_sync(0xffffffffu, share.parts, 0);
#pragma unroll 1
    for (; at < hi && b < a.p.batch; ++b, group = 0) {
        LatentTile x;
        x.b = b;
        x.s = paged_sequence(a.p, b);
        x.w = latent_work(a, x.s);
        const int groups = __shfl_sync(0xffffffffu, x.w.groups, 0);
        x.w.chunks = __shfl_sync(0xffffffffu, x.w.chunks, 0);
#pragma unroll 1
        for (; group < groups && at < hi; ++group) {
            x.group = group;
            x.t0 = by_tile ? latent_part(x.w.chunks, part, parts) : max(0, lo - at - cost);
            x.t1 = min(x.w.chunks,
                       by_tile ? latent_part(x.w.chunks, part + 1, parts) : hi - at - cost);
            if (x.t1 > x.t0 || (x.w.chunks == 0 && at >= lo)) f(x);
            at += by_tile ? 1 : x.w.weight();
        }
    }
}

} // namespace

#endif
