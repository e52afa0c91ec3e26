/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_plan.cuh: how the work of paged_attn is divided among blocks, and how the partial results
 * of warps and blocks are merged. paged_attn_sm80, paged_attn_f32, paged_codes_sm80 and
 * paged_attn_sm90a use it. paged_latent_sm90a uses only the functions that write out (section 3).
 *
 * Terms:
 *
 *   row     one query token and one head of the group that shares a kv head
 *   tile    `lanes` rows of a sequence and a set of neighbouring kv heads, with all their keys
 *   chunk   one step of KEYS keys for each warp of the block; tiles are cut between chunks
 *   split   the result of a block for a part of a tile's keys: O, not divided, and (max, sum)
 *
 * All tiles form one list of chunks, which depends on the lengths only. Each tile starts with
 * TILE_COST extra chunks, which represent the cost of starting it. Each block takes the same number
 * of chunks of the list.
 *
 * A block that has a whole tile writes out. Otherwise it writes a split to the workspace. A block
 * has at most two splits: one of the tile that it shares with the block before, and one of the tile
 * that it shares with the block after. The splits of a tile are merged in order, by a second kernel
 * (paged_combine.cuh) or, in paged_attn_sm90a, by the last block to arrive (paged_join.cuh).
 *
 * Equal shares of a list: Stream-K, Osama et al. 2023. Splits of keys: Flash-Decoding, Dao et al.
 * 2023. */
#ifndef GPUKERN_CUDA_PAGED_PLAN_CUH
#define GPUKERN_CUDA_PAGED_PLAN_CUH

#include "../../tile/convert.cuh"
#include "../../tile/copy.cuh"
#include "../../tile/reduce.cuh"
#include "../kv.cuh"
#include "../tiles.h"

namespace {

constexpr int KEYS = paged_plan::keys, TILE_COST = paged_plan::tile_cost;

/* ---- 1. the plan ----------------------------------------------------------------------------- */
struct Call {
    Paged p;
    int block_heads, head_sets; /* neighbouring kv heads of a block; number of such sets of heads */
    int blocks;
    int lanes, chunk_keys; /* rows of a tile; keys of a chunk: KEYS x (warps / block_heads) */
    /* paged_attn_sm90a only: no tile is split. A tile belongs to the block in whose share it
     * begins. */
    bool whole_tiles;
    struct SharedTile *shared; /* workspace, [blocks][2]; NULL if no tile is shared */
    float2 *stats;             /* [blocks][2][block_heads][lanes]: (max, sum) of a split */
    /* [blocks][2][block_heads][lanes][head_dim_v]: O of a split, not divided by the sum */
    float *sums;
};

/* A tile that several blocks share. Each block has two entries. Entry [0] is a tile that an earlier
 * block began. Entry [1] is a tile that this block began and that continues in the next one. */
struct SharedTile {
    int first, last; /* first and last of these blocks; last -1: no such tile */
    /* rows [row0, row0 + rows) of the sequence whose first token is token0 */
    int token0, row0, rows, head_set;
    int unused[2];
};
static_assert(sizeof(SharedTile) == 32, "one sector");

struct Work { /* the work of one sequence */
    int rows, row_groups, first_chunk, chunks;
    int64_t cost_of_tile, cost; /* in chunks */
};

__device__ __forceinline__ Work work_of(const Call &c, const PagedSequence &s) {
    Work w;
    w.rows = s.rows * c.p.group;
    w.row_groups = (w.rows + c.lanes - 1) / c.lanes;
    const int lo = s.lo(0), hi = s.hi(s.rows - 1);
    w.first_chunk = lo / c.chunk_keys;
    w.chunks = hi > lo ? (hi + c.chunk_keys - 1) / c.chunk_keys - w.first_chunk : 0;
    w.cost_of_tile = w.chunks + TILE_COST;
    w.cost = (int64_t)w.row_groups * c.head_sets * w.cost_of_tile;
    return w;
}

/* Exclusive prefix sum of x over the block's threads; *total is the sum over all of them.
 * `scratch` holds one number for each warp and is free after the next barrier. */
template <int WARPS_, class Index>
__device__ __forceinline__ Index block_scan(Index x, Index *scratch, Index *total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Index upto = x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Index left = __shfl_up_sync(0xffffffffu, upto, step);
        if (lane >= step) upto += left;
    }
    __syncthreads(); /* scratch may be overwritten */
    if (lane == 31) scratch[warp] = upto;
    __syncthreads(); /* every warp's sum is written */
    Index before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < WARPS_; ++w) {
        if (w < warp) before += scratch[w];
        all += scratch[w];
    }
    *total = all;
    return before + upto - x;
}

/* A block's share of a tile, and the part of it that this warp reads. The keys of step i start at
 * first_key + i chunk_keys, for i in [step0, steps). The warp reads those in [lo, hi). */
struct TileShare {
    PagedSequence s;
    int b, row0, last_row, head_set;
    /* leading: an earlier block began the tile; whole: no other block has a part of it */
    bool leading, whole;
    int head_kv;
    int lo, hi;             /* keys that some row sees */
    int inner_lo, inner_hi; /* keys that all rows see */
    int first_key, step0, steps;
};

/* ---- 2. keys --------------------------------------------------------------------------------- */
/* The 16 keys of a step. Lane l holds the page of key l % 16. */
struct Keys {
    int first, page; /* page -1: no key */
};

/* Looks up the pages of a step. Table entries of keys outside [lo, hi) are not read. */
__device__ __forceinline__ Keys keys_at(const Paged &p, int b, int first, int lo, int hi) {
    Keys k = {first, -1};
    const int j = first + threadIdx.x % KEYS;
    if (j >= lo && j < hi) k.page = page_of_key(p, b, j);
    return k;
}

/* Starts the copies of a step's keys into a stage; missing keys become zeros. Returns a bit for
 * each key that exists. */
template <class T, class Tile>
__device__ __forceinline__ unsigned issue(const Paged &p, const Keys &k, int head_kv,
                                          smem_addr stage_s) {
    typedef tile_copy<Tile, 32> Copy;
    const int lane = threadIdx.x % 32;
    const unsigned there = __ballot_sync(0xffffffffu, k.page >= 0) & ((1u << KEYS) - 1);
    const int in_page = (k.first + lane % KEYS) % p.block_size, page = max(k.page, 0);
    const int64_t k_at = p.k.at(page, head_kv, in_page), v_at = p.v.at(page, head_kv, in_page);
#pragma unroll
    for (int pass = 0; pass < Copy::passes; ++pass) {
        const int row = Copy::row(lane, pass),
                  col = Copy::chunk(lane, pass) * (16 / (int)sizeof(T));
        const int64_t from_k = __shfl_sync(0xffffffffu, k_at, row),
                      from_v = __shfl_sync(0xffffffffu, v_at, row);
        const bool good = there >> row & 1;
        const T *k_g = (const T *)p.k.data + from_k + col,
                *v_g = (const T *)p.v.data + from_v + col;
        const int at = Copy::offset(lane, pass);
        cp_async_cg_16(stage_s + at, k_g, good && col < p.head_dim ? 16 : 0);
        cp_async_cg_16(stage_s + Tile::bytes + at, v_g, good && col < p.head_dim_v ? 16 : 0);
    }
    return there;
}

/* A warp's ring of stages. The next STAGES steps of the warp's keys are in flight, one group of
 * copies each. The oldest stage is read next. */
template <class T, class Tile, int STAGES> struct Ring {
    static constexpr int stage_bytes = 2 * Tile::bytes;
    static_assert(KEYS * STAGES <= 64, "a bit a key on the way");
    /* pages of the next step to be copied, which are looked up one step early */
    Keys keys;
    uint64_t there; /* 16 bits for each stage, the oldest lowest */
    int at;         /* offset of the oldest stage in bytes */

    __device__ __forceinline__ void begin(const Call &c, const TileShare &work, smem_addr ring_s) {
        there = 0;
        at = 0;
        keys = keys_at(c.p, work.b, work.first_key + work.step0 * c.chunk_keys, work.lo,
                       work.step0 < work.steps ? work.hi : 0);
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage)
            fill(c, work, work.step0 + stage, stage, ring_s + stage * stage_bytes);
    }

    /* Called when all lanes have read `step`. Refills its stage with the keys of step + STAGES. */
    __device__ __forceinline__ void next(const Call &c, const TileShare &work, smem_addr ring_s,
                                         int step) {
        there >>= 16;
        fill(c, work, step + STAGES, STAGES - 1, ring_s + at);
        at = at + stage_bytes == STAGES * stage_bytes ? 0 : at + stage_bytes;
    }

    __device__ __forceinline__ void fill(const Call &c, const TileShare &work, int step, int place,
                                         smem_addr stage_s) {
        if (step < work.steps) {
            const Keys now = keys;
            keys = keys_at(c.p, work.b, now.first + c.chunk_keys, work.lo,
                           step + 1 < work.steps ? work.hi : 0);
            there |= (uint64_t)issue<T, Tile>(c.p, now, work.head_kv, stage_s) << (16 * place);
        }
        cp_async_commit_group();
    }
};

/* ---- 3. out and splits ----------------------------------------------------------------------- */
/* Computes the factor of O and the lse of a row from its maximum and sum, the sink and the scale of
 * v. */
__device__ __forceinline__ RowResult finish(const Paged &p, int head, float peak, float sum) {
    const RowSum x = row_sum<ExpFull>(peak, sum, sink_of(p.rules, head));
    const float v_scale = paged_scale<float>(p.v_scale, p.v_scale_step, head / p.group);
    return {x.sum == 0 ? 0.f : x.share / x.sum * v_scale, x.lse()};
}

template <class T> __device__ __forceinline__ void store_4(T *out, float4 x, float factor) {
    /* a row without keys has sum 0 and gets factor 0 */
    *(uint2 *)out =
        make_uint2(pack2<T>(x.x * factor, x.y * factor), pack2<T>(x.z * factor, x.w * factor));
}
template <> __device__ __forceinline__ void store_4<float>(float *out, float4 x, float factor) {
    *(float4 *)out = make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
}

__device__ __forceinline__ void add_4(float4 &sum, float4 x, float weight) {
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
}

/* Merges four columns of O and the softmax of their row over `count` warps with different keys.
 * UNROLL: 1 if the loop should stay small in the instruction cache. */
struct Merged {
    RowSoftmax<ExpFull> row;
    float4 y;
};

template <int UNROLL>
__device__ __forceinline__ Merged merge_4(const float2 *stats, int stats_step, const float *o,
                                          int o_step, int count) {
    Merged all = {{-INFINITY, 0}, make_float4(0, 0, 0, 0)};
#pragma unroll UNROLL
    for (int v = 0; v < count; ++v) all.row.peak = fmaxf(all.row.peak, stats[v * stats_step].x);
#pragma unroll UNROLL
    for (int v = 0; v < count; ++v) {
        const float2 its = stats[v * stats_step];
        add_4(all.y, *(const float4 *)(o + v * o_step), all.row.join(its.x, its.y));
    }
    return all;
}

/* merge_4 of at most MOST warps or blocks, which loads all of them first. */
template <int MOST>
__device__ __forceinline__ Merged merge_4_at_once(const float2 *stats, int stats_step,
                                                  const float *o, int o_step, int count) {
    float2 its[MOST];
    float4 y[MOST];
#pragma unroll
    for (int v = 0; v < MOST; ++v) {
        its[v] = make_float2(-INFINITY, 0);
        y[v] = make_float4(0, 0, 0, 0);
        if (v < count) {
            its[v] = stats[v * stats_step];
            y[v] = *(const float4 *)(o + v * o_step);
        }
    }
    Merged all = {{-INFINITY, 0}, make_float4(0, 0, 0, 0)};
#pragma unroll
    for (int v = 0; v < MOST; ++v) all.row.peak = fmaxf(all.row.peak, its[v].x);
#pragma unroll
    for (int v = 0; v < MOST; ++v) add_4(all.y, y[v], all.row.join(its[v].x, its[v].y));
    return all;
}

/* Writes the rows of a tile without keys. */
template <class T, int THREADS>
__device__ __forceinline__ void write_nothing(const Call &c, const PagedSequence &s, int row0,
                                              int rows, int head_set) {
    const Paged &p = c.p;
    for (int line = 0; line < c.block_heads * rows; ++line) {
        const int block_head = line / rows, row = row0 + line - block_head * rows,
                  token = row / p.group;
        const int head =
            (head_set * c.block_heads + block_head) * p.group + (row - token * p.group);
        const int64_t at = (int64_t)(s.q0 + token) * p.heads_q + head;
        for (int d = threadIdx.x; d < p.head_dim_v; d += THREADS)
            ((T *)p.out)[at * p.head_dim_v + d] = from_acc<T>(0);
        if (threadIdx.x == 0 && p.lse) ((float *)p.lse)[at] = finish(p, head, -INFINITY, 0).lse;
    }
}

/* Merges the sums of the block's warps, o_s [warps][LANES][PITCH] and stats_s [warps][LANES],
 * for each head, and writes out or the block's split. The caller must synchronise the block
 * before. */
template <class T, int WARPS_, int LANES, int PITCH>
__device__ __forceinline__ void merge_warps(const Call &c, const TileShare &x, const float *o_s,
                                            const float2 *stats_s) {
    const Paged &p = c.p;
    const int quads = p.head_dim_v / 4, rows_here = x.last_row - x.row0 + 1;
    const int64_t split = ((int64_t)blockIdx.x * 2 + !x.leading) * c.block_heads;
    for (int i = threadIdx.x; i < c.block_heads * rows_here * quads; i += WARPS_ * 32) {
        const int line = i / quads, col = (i - line * quads) * 4;
        const int block_head = line / rows_here, r = line - block_head * rows_here;
        /* block_heads divides the number of warps */
        const int first = block_head * LANES + r, step = c.block_heads * LANES;
        const Merged all = merge_4<1>(stats_s + first, step, o_s + first * PITCH + col,
                                      step * PITCH, WARPS_ / c.block_heads);
        if (x.whole) {
            const int token = (x.row0 + r) / p.group;
            const int head = (x.head_set * c.block_heads + block_head) * p.group +
                             (x.row0 + r - token * p.group);
            const int64_t at = (int64_t)(x.s.q0 + token) * p.heads_q + head;
            const RowResult f = finish(p, head, all.row.peak, all.row.sum);
            store_4<T>((T *)p.out + at * p.head_dim_v + col, all.y, f.factor);
            if (col == 0 && p.lse) ((float *)p.lse)[at] = f.lse;
        } else {
            const int64_t at = (split + block_head) * LANES + r;
            *(float4 *)(c.sums + at * p.head_dim_v + col) = all.y;
            if (col == 0) c.stats[at] = make_float2(all.row.peak, all.row.sum);
        }
    }
}

/* ---- 4. the loop over a block's shares ------------------------------------------------------- */
/* This block's chunks [begin, end) of the list; the sequence that holds the first of them
 * (`found`); and the first chunk of that sequence (`found_at`). Index: a type that can count all
 * chunks. */
template <int WARPS_, class Index = int64_t> struct Chunks {
    Index scratch[WARPS_], found_at;
    int found;
    Index begin, end, share;
};

/* The number of chunks of the sequence that this thread counts in find_chunks, with TILE_COST for
 * each tile. */
__device__ __forceinline__ int64_t own_cost(const Call &c) {
    return threadIdx.x < c.p.batch ? work_of(c, paged_sequence(c.p, threadIdx.x)).cost : 0;
}

/* Finds the block's chunks. All threads take part, each with its own_cost. Returns false if there
 * are none. */
template <int WARPS_, class Index>
__device__ __forceinline__ bool find_chunks(const Call &c, Chunks<WARPS_, Index> &plan,
                                            Index cost) {
    constexpr int THREADS = WARPS_ * 32;
    const Paged &p = c.p;
    Index total, carry = 0, more = 0;
    for (int b = threadIdx.x + THREADS; b < p.batch; b += THREADS)
        more += (Index)work_of(c, paged_sequence(p, b)).cost;
    Index at = block_scan<WARPS_>(cost + more, plan.scratch, &total);
    const Index blocks = (Index)gridDim.x, share = (total + blocks - 1) / blocks;
    const Index begin = (Index)blockIdx.x * share, end = min(begin + share, total);
    SharedTile *const shared = c.shared + 2 * blockIdx.x; /* written by thread 0 only */
    if (threadIdx.x == 0 && c.shared) shared[0].last = shared[1].last = -1;
    if (begin >= end) return false;
    /* one round, unless there are more sequences than threads */
    for (int b = threadIdx.x;; b += THREADS) {
        if (p.batch > THREADS) {
            cost = b < p.batch ? (Index)work_of(c, paged_sequence(p, b)).cost : Index(0);
            at = carry + block_scan<WARPS_>(cost, plan.scratch, &total);
            carry += total;
        }
        if (at <= begin && begin < at + cost) {
            plan.found = b;
            plan.found_at = at;
        }
        if (p.batch <= THREADS || carry > begin) break;
    }
    if (threadIdx.x == 0) {
        plan.begin = begin;
        plan.end = end;
        plan.share = share;
    }
    __syncthreads(); /* the plan is written */
    return true;
}

/* Records a tile that other blocks share. own: the tile's first chunk. One thread calls it. */
__device__ __forceinline__ void note_shared(SharedTile *shared, const TileShare &x, int64_t own,
                                            int chunks, int64_t share) {
    shared[!x.leading] = {(int)(own / share),
                          (int)((own + chunks - 1) / share),
                          x.s.q0,
                          x.row0,
                          x.last_row - x.row0 + 1,
                          x.head_set};
}

/* Calls stream.attend(c, share) for each tile of which the block has chunks. All blocks and all
 * threads call it. */
template <class T, int WARPS_, class Stream>
__device__ __forceinline__ void each_tile(const Call &c, Stream &stream) {
    constexpr int THREADS = WARPS_ * 32;
    const Paged &p = c.p;
    __shared__ Chunks<WARPS_> plan; /* in shared memory, because the streams need the registers */
    const int warp = threadIdx.x / 32;
    SharedTile *const shared = c.shared + 2 * blockIdx.x;
    if (!find_chunks<WARPS_, int64_t>(c, plan, own_cost(c))) return;
    int64_t next = plan.found_at; /* the first chunk of sequence b */

    /* all tiles of which the block has chunks, in the order of the list */
    for (int b = plan.found; next < plan.end; ++b) {
        const PagedSequence s = paged_sequence(p, b);
        const Work w = work_of(c, s);
        const int64_t first = next;
        next += w.cost;
        const int num_tiles = w.row_groups * c.head_sets;
        for (int tile = (int)(max(plan.begin - first, (int64_t)0) / w.cost_of_tile);
             tile < num_tiles; ++tile) {
            /* first chunk of the tile, after its TILE_COST */
            const int64_t own = first + tile * w.cost_of_tile + TILE_COST;
            const int row_group = tile / c.head_sets, head_set = tile - row_group * c.head_sets;
            const int row0 = row_group * c.lanes, last_row = min(row0 + c.lanes, w.rows) - 1;
            if (w.chunks == 0 && own - TILE_COST >= plan.begin && own - TILE_COST < plan.end)
                write_nothing<T, THREADS>(c, s, row0, last_row - row0 + 1, head_set);
            if (own >= plan.end) break;
            const int chunk0 = (int)max(plan.begin - own, (int64_t)0),
                      chunk1 = (int)min(plan.end - own, (int64_t)w.chunks);
            if (chunk0 >= chunk1) continue;
            const bool leading = own < plan.begin, whole = !leading && own + w.chunks <= plan.end;
            TileShare x = {s, b, row0, last_row, head_set, leading, whole};
            if (!whole && threadIdx.x == 0) note_shared(shared, x, own, w.chunks, plan.share);
            x.head_kv = head_set * c.block_heads + warp % c.block_heads;
            x.lo = s.lo(row0 / p.group);
            x.hi = s.hi(last_row / p.group);
            x.inner_lo = s.lo(last_row / p.group);
            x.inner_hi = s.hi(row0 / p.group);
            x.first_key = (w.first_chunk + chunk0) * c.chunk_keys + warp / c.block_heads * KEYS;
            x.step0 =
                x.first_key + KEYS <= x.lo ? (x.lo - x.first_key - KEYS) / c.chunk_keys + 1 : 0;
            x.steps = min(chunk1 - chunk0,
                          x.hi > x.first_key ? (x.hi - x.first_key - 1) / c.chunk_keys + 1 : 0);
            stream.attend(c, x);
        }
    }
}

/* ---- 5. launch ------------------------------------------------------------------------------- */
/* An instance's key. */
struct PagedKey {
    enum {
        HEAD_DIM,
        LANES,
        WARPS,
        BLOCKS,   /* blocks on an SM */
        SMEM,     /* bytes of shared memory */
        MOST_ROWS /* most rows of a sequence; 0: any number */
    };
};

/* The grid fills the device and does not depend on the lengths. */
struct Sizes {
    int blocks, block_heads;
    bool combines; /* blocks may share a tile, or tokens may belong to no sequence */
    int64_t shared_bytes, stats_bytes, sums_bytes;
};

inline Sizes sizes_of(const gk_cuda_instance *instance, const gk_context *ctx,
                      const gk_paged_attn_args *a) {
    Sizes z = {};
    const int64_t heads_kv = a->k_cache.shape[2];
    z.blocks = gk_gpu_of(ctx->index)->num_sms * instance->key[PagedKey::BLOCKS];
    /* With neighbouring heads, blocks read whole cache lines. But there are fewer tiles, so each is
     * cut into more splits. */
    const int64_t few = z.blocks / paged_plan::splits, batch = a->seq_lens.shape[0];
    z.block_heads = 1;
    for (int n = 2; n <= instance->key[PagedKey::WARPS] && heads_kv > 0 && heads_kv % n == 0 &&
                    batch * (heads_kv / n) >= few;
         n *= 2)
        z.block_heads = n;
    /* If a row of the block table holds at most one chunk, every tile is one chunk and no two
     * blocks share it. Then there is no second launch and no workspace. */
    const int64_t chunk_keys = KEYS * (instance->key[PagedKey::WARPS] / z.block_heads);
    z.combines = a->cu_seqlens_q || a->block_table.shape[1] * a->k_cache.shape[1] > chunk_keys;
    if (!z.combines) return z;
    const int64_t rows = (int64_t)z.blocks * 2 * z.block_heads * instance->key[PagedKey::LANES];
    z.shared_bytes = z.blocks * 2 * (int64_t)sizeof(SharedTile);
    z.stats_bytes = gk_round_up(rows * 8, 64);
    z.sums_bytes = gk_round_up(rows * a->v_cache.shape[3] * 4, 64);
    return z;
}

inline bool in_16_bytes(const gk_tensor &t) {
    const int64_t each = 16 / (int64_t)gk_dtype_bytes(t.dtype);
    return gk_numel(&t) == 0 || (t.shape[t.ndim - 1] % each == 0 && rows_aligned(t));
}

inline bool serves(const gk_cuda_instance *instance, const gk_context *ctx,
                   const gk_paged_attn_args *a) {
    const int64_t tokens = a->q.shape[0], heads_q = a->q.shape[1], heads_kv = a->k_cache.shape[2];
    if (tokens * heads_q > INT32_MAX || heads_kv == 0) return false;
    if (a->q.shape[2] > instance->key[PagedKey::HEAD_DIM] ||
        a->v_cache.shape[3] > instance->key[PagedKey::HEAD_DIM])
        return false;
    if (instance->key[PagedKey::MOST_ROWS] &&
        paged_seq_q(a) * (heads_q / heads_kv) > instance->key[PagedKey::MOST_ROWS])
        return false;
    return in_16_bytes(a->q) && in_16_bytes(a->k_cache) && in_16_bytes(a->v_cache) &&
           in_16_bytes(a->out) && smem_fits(ctx, instance->key[PagedKey::SMEM] + 1024);
}

/* What a plan keeps: the launch, without the addresses in the workspace. */
struct Planned {
    Sizes sizes;
    Call call;
};

inline bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    if (a->k_cache.dtype != a->q.dtype || !serves(instance, ctx, a)) return false;
    Planned &own = gk_own<Planned>(to);
    const Sizes &z = own.sizes = sizes_of(instance, ctx, a);
    Call &c = own.call = {};
    c.p = paged_of(ctx, a);
    c.block_heads = z.block_heads;
    c.head_sets = c.p.heads_kv / z.block_heads;
    c.blocks = z.blocks;
    c.lanes = instance->key[PagedKey::LANES];
    c.chunk_keys = KEYS * (instance->key[PagedKey::WARPS] / z.block_heads);
    to->tile[0] = instance->key[PagedKey::LANES];
    to->tile[1] = KEYS;
    to->tile[2] = c.chunk_keys;
    to->tasks = z.blocks;
    to->waves = 1;
    to->workspace_bytes = (size_t)(z.shared_bytes + z.stats_bytes + z.sums_bytes);
    return true;
}

} // namespace

#endif
