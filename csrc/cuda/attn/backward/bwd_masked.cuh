/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_masked.cuh: what flash_attn_bwd_masked_sm90a and flash_attn_bwd_masked_wide_sm90a have in
 * common. flash_attn_bwd_masked_sm90a.cu describes these kernels.
 *
 * 1. How the producer reads the lists of a stored mask, step after step.
 *
 * 2. How the second launch replaces NaN of hidden rows and keys.
 *
 * 3. How the parts of a tile of keys are summed, if the tile is cut.
 *
 * 4. Plan, workspace and launch. serves_masked says which calls are refused. */
#ifndef GPUKERN_CUDA_BWD_MASKED_CUH
#define GPUKERN_CUDA_BWD_MASKED_CUH

#include "../../ptx/opaque.cuh"
#include "bwd_consumer.cuh"
#include "bwd_split.cuh"

#include <float.h>

namespace {

struct BwdMaskedParams : BwdHopperParams {
    CUtensorMap bias, dbias; /* boxes of 64 columns and BQ rows */
    float least;             /* a bias of at most this value hides the key */
    bool with_dbias;
    int bias_of_batch, bias_of_head; /* 0 if the bias broadcasts over the batch, over the heads */
    const int32_t *mask;
    int64_t mask_batch, mask_head; /* strides, 0 where the mask broadcasts */
    gk_mask_layout at;
    gk_mask_store store;
    bool again; /* this is the second launch */
    BwdSplit split;
    /* [unit][split.tiles][block of a pair][split.most][PART_FLOATS]: dK and dV of each part, in
     * accumulator order. stored: for each tile that is cut, the number of parts that have stored
     * theirs. */
    float *sums;
    unsigned *stored;
    /* Wide kernels read the bias without TMA. The strides are in bytes, 0 where the bias
     * broadcasts. */
    const char *bias_data;
    int64_t bias_batch, bias_head, bias_row;
    /* the float32 sums of the bias's gradient (bwd_bias.cuh), NULL = none; strides in elements */
    float *bias_sums;
    int64_t sums_batch, sums_head, sums_row;
};

/* The number of floats in dK and dV of one part of a block's keys. */
template <class Tile> constexpr int PART_FLOATS = Tile::BKV * (Tile::HEAD_DIM + Tile::HEAD_DIM_V);

/* The address of a head's bias. */
__device__ __forceinline__ const char *bias_of(const BwdMaskedParams &x, const BwdWork &w,
                                               int head) {
    return x.bias_data + w.b * x.bias_batch + head * x.bias_head;
}

/* ---- 1. lists -------------------------------------------------------------------------------- */
__device__ __forceinline__ const int32_t *mask_of(const BwdMaskedParams &x, int b, int head) {
    return x.mask + b * x.mask_batch + head * x.mask_head;
}

/* The blocks of queries of one head that see a tile of keys. An entry is 4 block + kind. */
__device__ __forceinline__ const uint16_t *list_of(const BwdMaskedParams &x, int b, int head,
                                                   int tile) {
    return (const uint16_t *)(mask_of(x, b, head) + x.at.lists_t) + (int64_t)tile * x.at.tiles_q;
}

/* The length of a list. Zeros follow the last entry, and no entry is 0. */
__device__ __forceinline__ int length_of(const BwdMaskedParams &x, const uint16_t *list) {
    int lo = 0, hi = (int)x.at.tiles_q;
#pragma unroll 1
    while (lo < hi) {
        const int middle = (lo + hi) / 2;
        if (__ldg(list + middle))
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

/* The number of steps of entries [from, to) of a list. A block of 128 queries takes a step for each
 * of its tiles of BQ rows. */
template <class Tile>
__device__ __forceinline__ int steps_of_list(const uint16_t *list, int from, int to, int seq_q) {
    if (from >= to) return 0;
    const int last = __ldg(list + to - 1) >> 2,
              rows = min(seq_q - last * GK_MASK_TILE, (int)GK_MASK_TILE);
    return (to - from - 1) * (GK_MASK_TILE / Tile::BQ) + (rows + Tile::BQ - 1) / Tile::BQ;
}

/* The producer's position in the lists, the step at this position, and the block's part of its tile
 * of keys. It is in shared memory, because the producer has few registers. */
struct BwdPlace {
    enum Field {
        HEAD,
        LEFT,  /* entries of the head's list that are left */
        INDEX, /* the next entry */
        KEPT,  /* entries before INDEX whose words are stored */
        ROW,   /* the step's first row */
        KIND,  /* kind of the step's block. GK_BLOCK_MADE: the producer computes the words */
        /* with GK_BLOCK_MADE: all queries see the block's keys, but the last keys of the block do
         * not exist */
        FULL,
        WORDS, /* index of the stored words */
        PARTS, /* parts into which the block's tile of keys is cut. 0: the block has no work */
        PART,  /* this block's part */
        LAST   /* 1: this part has stored its sums after all other parts */
    };
    smem_addr at_s;
    __device__ __forceinline__ int operator[](Field f) const {
        return (int)ld_shared_32(at_s + 4 * f);
    }
    __device__ __forceinline__ void set(Field f, int x) const { st_shared_32(at_s + 4 * f, x); }
};

/* Moves the position to the next step. All lanes of a warp take part. Without a mask a step takes
 * the next tile of rows of a head, or the first tile of the next head. */
template <class Tile>
__device__ __forceinline__ void next_step(const BwdMaskedParams &x, const BwdWork &w,
                                          const BwdPlace &at) {
    int i0 = at[BwdPlace::ROW] + Tile::BQ;
    if constexpr (!ScoresOf<Tile>::MASK) {
        const int head = at[BwdPlace::HEAD];
        const bool next_head = head < w.first_head || i0 >= (w.tile_lo + w.start) * Tile::BQ;
        if (next_head) i0 = w.tile_lo * Tile::BQ;
        const int row_tile = i0 / Tile::BQ;
        __syncwarp(); /* all lanes have read */
        at.set(BwdPlace::HEAD, head + next_head);
        at.set(BwdPlace::ROW, i0);
        at.set(BwdPlace::KIND,
               row_tile < w.full.lo || row_tile >= w.full.hi ? GK_BLOCK_MADE : GK_BLOCK_FULL);
        __syncwarp();
        return;
    }
    const int tile = w.j0 / GK_MASK_TILE;
    int head = at[BwdPlace::HEAD], left = at[BwdPlace::LEFT], index = at[BwdPlace::INDEX],
        kept = at[BwdPlace::KEPT];
    __syncwarp(); /* all lanes have read */
    /* the step begins the next block of the list */
    if (i0 % GK_MASK_TILE == 0 || i0 >= w.seq.seq_q) {
        while (left == 0) {
            ++head;
            index = kept = 0;
            left = x.mask_head && head > w.first_head ? length_of(x, list_of(x, w.b, head, tile))
                                                      : w.tile_lo;
        }
        const int entry = __ldg(list_of(x, w.b, head, tile) + index);
        const int block = entry >> 2, kind = entry & 3;
        i0 = block * GK_MASK_TILE;
        at.set(BwdPlace::KIND, kind == GK_BLOCK_FULL && w.seq.seq_k - w.j0 < GK_MASK_TILE
                                   ? (int)GK_BLOCK_MADE
                                   : kind);
        at.set(BwdPlace::FULL, kind == GK_BLOCK_FULL);
        at.set(BwdPlace::WORDS,
               (int)gk_mask_words_of(x.store, tile, block, x.at.tiles_q, 4 * kept));
        at.set(BwdPlace::HEAD, head);
        at.set(BwdPlace::LEFT, left - 1);
        at.set(BwdPlace::INDEX, index + 1);
        at.set(BwdPlace::KEPT, kept + (kind == GK_BLOCK_WORDS));
    }
    at.set(BwdPlace::ROW, i0);
    __syncwarp();
}

/* Counts the entries before INDEX, the first entry of this block's part, whose words are stored.
 * All lanes of a warp take part. */
__device__ __forceinline__ int words_before(const BwdMaskedParams &x, const BwdWork &w,
                                            const BwdPlace &at) {
    int kept = 0;
#pragma unroll 1
    for (int i = laneid(); i < at[BwdPlace::INDEX]; i += 32) {
        const int entry = __ldg(list_of(x, w.b, at[BwdPlace::HEAD], w.j0 / GK_MASK_TILE) + i);
        kept += (entry & 3) == GK_BLOCK_WORDS;
    }
    return __reduce_add_sync(0xffffffffu, kept);
}

/* Sets the position to the beginning of a part, and w.tiles to the number of its steps. */
template <class Tile>
__device__ __forceinline__ void place_part(BwdWork &w, const BwdMaskedParams &x, const BwdPlace &at,
                                           int tile, int part, int parts) {
    const auto list = [&](int h) { return list_of(x, w.b, w.first_head + h, tile); };
    int steps = 0;
    bwd_take_part(
        x.g.p.group, part, parts,
        [&](int h) { return h == 0 || x.mask_head == 0 ? w.tile_lo : length_of(x, list(h)); },
        [&](int h, int first, int end, int length) {
            if (steps == 0) {
                at.set(BwdPlace::HEAD, w.first_head + h);
                at.set(BwdPlace::LEFT, length - first);
                at.set(BwdPlace::INDEX, first);
            }
            steps += steps_of_list<Tile>(list(h), first, end, w.seq.seq_q);
        });
    w.tiles = steps;
}

/* Finds the keys of a keys task, its part of them and its steps. The caller has set w.task, w.rank
 * and the heads of the unit. Sets w.tile_lo to the length of the first head's list. One thread. */
template <class Tile>
__device__ __forceinline__ void place_keys(BwdWork &w, const BwdMaskedParams &x, smem_addr smem_s) {
    const Bwd &g = x.g;
    const BwdPlace at = {smem_s + BwdSmem<Tile>::PLACE};
    const int4 *tiles = (const int4 *)(mask_of(x, w.b, w.first_head) + x.at.tiles_t);
    const int rank = x.split.rank(w.task.index), part = x.split.part(w.task.index);
    const int4 longest = __ldg(tiles + rank);
    int parts = 1;
    if (rank < x.split.tiles) {
        const bool any = x.split.tiles < (int)x.at.tiles_k; /* some tile is not cut */
        parts = x.split.parts(longest.x * g.p.group,
                              any ? __ldg(tiles + x.split.tiles).x * g.p.group : 0);
    }
    const int tile = longest.z;
    at.set(BwdPlace::PARTS, part < parts ? parts : 0);
    at.set(BwdPlace::PART, part);
    if (part >= parts) return;
    w.j0 = tile * GK_MASK_TILE + (Tile::PAIR ? w.rank * Tile::BKV : 0);
    w.seq = sequence_of(g.p, w.b);
    w.row_tile = row_tile_of(g, w.seq, w.b);
    w.tile_lo = longest.x;
    at.set(BwdPlace::HEAD, w.first_head - 1);
    at.set(BwdPlace::LEFT, 0);
    at.set(BwdPlace::INDEX, 0);
    if (parts > 1) return place_part<Tile>(w, x, at, tile, part, parts);
    w.tiles = steps_of_list<Tile>(list_of(x, w.b, w.first_head, tile), 0, longest.x, w.seq.seq_q);
    if (x.mask_head == 0) {
        w.tiles *= g.p.group;
        return;
    }
#pragma unroll 1
    for (int h = 1; h < g.p.group; ++h) {
        const uint16_t *list = list_of(x, w.b, w.first_head + h, tile);
        w.tiles += steps_of_list<Tile>(list, 0, length_of(x, list), w.seq.seq_q);
    }
}

/* ---- 2. tiles that may hold NaN -------------------------------------------------------------- */
/* Replaces NaN and inf in a tile by 0. One warp. */
template <class T, class Panels> __device__ __forceinline__ void clear_wild(smem_addr tile_s) {
    constexpr uint32_t EXPONENT = element<T>::dtype == GK_BF16 ? 0x7f80u : 0x7c00u;
    const auto tame = [](uint32_t two) {
        const uint32_t low = (two & EXPONENT) == EXPONENT ? 0 : 0xffffu,
                       high = (two >> 16 & EXPONENT) == EXPONENT ? 0 : 0xffff0000u;
        return two & (low | high);
    };
#pragma unroll 1
    for (int i = laneid(); i < Panels::bytes / 16; i += 32) {
        const uint4 x = ld_shared_128(tile_s + i * 16);
        st_shared_128(tile_s + i * 16, make_uint4(tame(x.x), tame(x.y), tame(x.z), tame(x.w)));
    }
}

/* If delta of a row is NaN, sets its lse to NaN, too, so that its weights become NaN. One warp. */
template <class Tile> __device__ __forceinline__ void carry_nan(smem_addr stats_s) {
#pragma unroll 1
    for (int r = laneid(); r < Tile::BQ; r += 32) {
        const uint32_t delta = ld_shared_32(stats_s + (Tile::BQ + r) * 4);
        if (isnan(__uint_as_float(delta))) st_shared_32(stats_s + r * 4, delta);
    }
}

/* ---- 3. parts -------------------------------------------------------------------------------- */
/* True if the block has no work: its tile of keys is cut into too few parts. */
template <class Tile> __device__ __forceinline__ bool without_keys(smem_addr smem_s) {
    const BwdPlace at = {smem_s + BwdSmem<Tile>::PLACE};
    return at[BwdPlace::PARTS] == 0;
}

/* Store and add the sums of a part. Each consumer thread moves 16 bytes at a time. */
template <int M> __device__ __forceinline__ void store_sums(float *to, const float (&d)[M]) {
#pragma unroll
    for (int i = 0; i < M; i += 4)
        __stcg((float4 *)(to + 256 * i) + threadIdx.x,
               make_float4(d[i], d[i + 1], d[i + 2], d[i + 3]));
}
template <int M> __device__ __forceinline__ void add_sums(float (&d)[M], const float *from) {
#pragma unroll
    for (int i = 0; i < M; i += 4) {
        const float4 a = __ldcg((const float4 *)(from + 256 * i) + threadIdx.x);
        d[i] += a.x;
        d[i + 1] += a.y;
        d[i + 2] += a.z;
        d[i + 3] += a.w;
    }
}

/* If the tile is not cut, returns true. Otherwise stores this part's sums. In the part that stores
 * last, the sums become those of all parts, added in the order of the parts, and the result is
 * true. In the other parts it is false. each(take) calls take(d, place) for each array of sums of a
 * thread. Both consumer warpgroups call this. */
template <class Tile, class Each>
__device__ __forceinline__ bool join_parts(const BwdMaskedParams &x, const BwdWork &w,
                                           smem_addr smem_s, const Each &each) {
    typedef BwdSmem<Tile> S;
    const BwdPlace at = {smem_s + S::PLACE};
    const int parts = at[BwdPlace::PARTS];
    if (parts <= 1) return true;
    int tile = w.task.unit * x.split.tiles + x.split.rank(w.task.index);
    if (Tile::PAIR) tile = tile * S::BLOCKS + w.rank;
    float *all = x.sums + (int64_t)tile * x.split.most * PART_FLOATS<Tile>;
    float *own = all + at[BwdPlace::PART] * PART_FLOATS<Tile>;
    each([&](const auto &d, int place) { store_sums(own + place, d); });
    bar_sync(BAR_CONSUMERS, 256); /* this part is complete */
    if (threadIdx.x == 0)
        at.set(BwdPlace::LAST, atom_inc_acq_rel(x.stored + tile) == (unsigned)parts - 1);
    bar_sync(BAR_CONSUMERS, 256);
    if (!at[BwdPlace::LAST]) return false;
    each([&](auto &d, int) {
#pragma unroll
        for (float &sum : d) sum = 0;
    });
#pragma unroll 1
    for (int p = 0; p < parts; ++p)
        each([&](auto &d, int place) { add_sums(d, all + p * PART_FLOATS<Tile> + place); });
    return true;
}

/* ---- 4. plan --------------------------------------------------------------------------------- */
inline bool bias_fits(const gk_flash_attn_bwd_args *a, const gk_tensor &t, bool broadcasts) {
    const gk_tensor &q = a->fwd.q;
    return t.dtype == q.dtype && t.shape[2] == q.shape[2] && t.shape[3] == a->fwd.k.shape[2] &&
           (broadcasts || (t.shape[0] == q.shape[0] && t.shape[1] == q.shape[1])) &&
           t.shape[3] > 1 && t.stride[3] == 1 && tensor_map_fits(attn_shape(t));
}

/* A bias [.., Sq, Sk] that TMA loads, and its gradient, which TMA stores. BwdBiasByLoads of
 * bwd_bias.cuh has the same functions for the wide kernels. */
template <class Tile> struct BwdBiasByTma {
    static constexpr bool BIAS = ScoresOf<Tile>::BIAS;

    static bool serves(const gk_flash_attn_bwd_args *a) {
        const gk_attn_scores *scores = gk_scores_of_bwd(a);
        if (!scores->bias != !BIAS || scores->distance_bias) return false;
        if (BIAS && !bias_fits(a, *scores->bias, true)) return false;
        return !gk_dbias_of(a) || bias_fits(a, *gk_dbias_of(a), false);
    }
    /* Bytes that the gradient of the bias needs at the end of the workspace. */
    static size_t bytes(const gk_flash_attn_bwd_args *) { return 0; }
    /* Fills in the parameters. The last argument is the address of those bytes. */
    static gk_status prepare(const gk_context *, const gk_flash_attn_bwd_args *a,
                             BwdMaskedParams &x, void *) {
        typedef BwdSmem<Tile> S;
        if (!BIAS) return GK_OK;
        const gk_tensor &bias = *gk_scores_of_bwd(a)->bias, *dbias = gk_dbias_of(a);
        x.bias_of_batch = bias.shape[0] > 1;
        x.bias_of_head = bias.shape[1] > 1;
        gk_status status = make_tensor_map(OP, attn_shape(bias), S::Scores::box(), &x.bias);
        if (status == GK_OK && dbias)
            status = make_tensor_map(OP, attn_shape(*dbias), S::Scores::box(), &x.dbias);
        x.with_dbias = dbias != NULL;
        return status;
    }
    /* Called between the two launches, and after the second. */
    static gk_status between(const gk_context *, const gk_flash_attn_bwd_args *,
                             const BwdMaskedParams &) {
        return GK_OK;
    }
    static gk_status finish(const gk_context *, const gk_flash_attn_bwd_args *,
                            const BwdMaskedParams &) {
        return GK_OK;
    }
};

template <class Tile, class Bias> bool serves_masked(const gk_flash_attn_bwd_args *a) {
    constexpr bool MASK = ScoresOf<Tile>::MASK;
    const gk_attn_scores *scores = gk_scores_of_bwd(a);
    const gk_attn_rules &r = a->fwd.rules;
    if (!scores || !scores->mask != !MASK || !Bias::serves(a)) return false;
    if (a->deterministic || r.softcap > 0 || r.alibi_slopes || !(r.scale > 0)) return false;
    if (r.kv_start || r.kv_end || r.q_start || a->fwd.cu_seqlens_q) return false;
    if (!rows_aligned(a->fwd.out)) return false;
    return !MASK || (!r.is_causal && r.window_left < 0 && r.window_right < 0 &&
                     scores->mask->shape[2] ==
                         gk_attn_mask_ints(scores->store, a->fwd.q.shape[2], a->fwd.k.shape[2], 1));
}

template <class Tile> BwdSplit split_of(const Bwd &g) {
    if (!ScoresOf<Tile>::MASK) return {0, 1};
    return bwd_split_of(g.p.group * gk_ceil_div(g.p.seq_q, GK_MASK_TILE),
                        gk_ceil_div(g.p.seq_k, GK_MASK_TILE),
                        Tile::PAIR ? BWD_SPLIT_TILES_OF_PAIRS : BWD_SPLIT_TILES);
}

/* The workspace: first what flash_attn_bwd_sm90a has, up to its counters. Then come the counters
 * of the second launch, the mark `spoilt`, the counts of stored parts of both launches, and the
 * sums of parts. The sums take no more than dq_sum, because only units of at least 4,000 rows
 * are cut. */
struct MaskedSpace {
    size_t counters, stored; /* bytes for one launch */
    /* offset from the first counter; bytes from the first counter to the end */
    size_t sums_at, bytes;

    template <class Tile> static MaskedSpace of(const BwdGrid &grid, const Bwd &g) {
        const BwdSplit split = split_of<Tile>(g);
        const size_t tiles = (size_t)grid.units * (size_t)split.tiles * BwdSmem<Tile>::BLOCKS;
        /* tiles that are cut, counted once for each block of a pair */
        const size_t cut = split.most > 1 ? tiles : 0;
        MaskedSpace s;
        s.counters = counters_bytes<Tile>(grid, g, false);
        s.stored = cut * sizeof(unsigned);
        s.sums_at = (size_t)gk_round_up((int64_t)s.cleared(), 256);
        s.bytes = s.sums_at + cut * (size_t)split.most * PART_FLOATS<Tile> * sizeof(float);
        return s;
    }
    size_t cleared() const { return 2 * counters + sizeof(unsigned) + 2 * stored; }
};

template <class Tile, class Bias = BwdBiasByTma<Tile>>
bool plan_masked(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *to) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    if (!serves_masked<Tile, Bias>(a) || !plan<Tile>(instance, ctx, args, to)) return false;
    const Bwd &g = gk_own<Bwd>(to);
    BwdGrid grid = grid_of<Tile>(ctx, a, g);
    if (grid.rows == 0) return false; /* the call has no keys or no rows */
    const MaskedSpace space = MaskedSpace::of<Tile>(grid, g);
    to->workspace_bytes += space.bytes - space.counters;
    if (Bias::bytes(a) > 0)
        to->workspace_bytes =
            (size_t)gk_round_up((int64_t)to->workspace_bytes, 256) + Bias::bytes(a);
    grid.keys += split_of<Tile>(g).more_tasks();
    to->tasks = (int64_t)grid.blocks() * BwdSmem<Tile>::BLOCKS;
    return true;
}

template <class T, class Consumer, class Bias = BwdBiasByTma<typename Consumer::Tile>>
gk_status run_masked(const gk_context *ctx, const void *args, const gk_plan *plan,
                     void *workspace) {
    typedef typename Consumer::Tile Tile;
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    const gk_attn_scores *scores = gk_scores_of_bwd(a);
    BwdMaskedParams x = {};
    gk_status status = hopper_params<Consumer>(ctx, a, plan, workspace, &x);
    if (ScoresOf<Tile>::MASK) {
        const gk_tensor &mask = *scores->mask;
        x.mask = (const int32_t *)mask.data;
        x.mask_batch = mask.shape[0] == 1 ? 0 : mask.stride[0];
        x.mask_head = mask.shape[1] == 1 ? 0 : mask.stride[1];
        x.store = scores->store;
        x.at = gk_mask_layout_of(x.store, a->fwd.q.shape[2], a->fwd.k.shape[2], true);
    }
    if (ScoresOf<Tile>::BIAS) {
        const bool of_f16 = scores->bias && scores->bias->dtype == GK_F16;
        x.least = of_f16 ? -65504.f : scores->bias ? -0x1.fep127f : -FLT_MAX;
        if (status == GK_OK)
            status = Bias::prepare(ctx, a, x,
                                   (char *)workspace + plan->workspace_bytes - Bias::bytes(a));
        const gk_tensor *dbias = x.with_dbias ? gk_dbias_of(a) : NULL;
        /* Blocks of pairs that no step visits must have the gradient 0. */
        const gk_attn_rules &r = a->fwd.rules;
        const bool partly =
            ScoresOf<Tile>::MASK || r.is_causal || r.window_left >= 0 || r.window_right >= 0;
        if (status == GK_OK && dbias && partly)
            status = clear_memory(OP, ctx, dbias->data, (size_t)gk_numel(dbias) * 2);
    }
    const MaskedSpace space = MaskedSpace::of<Tile>(x.grid, x.g);
    x.spoilt = x.rows_done + space.counters / sizeof(unsigned) * 2;
    x.stored = x.spoilt + 1;
    x.sums = (float *)((char *)x.rows_done + space.sums_at);
    x.split = split_of<Tile>(x.g);
    x.grid.keys += x.split.more_tasks();
    x.grid.prepare();
    if (status == GK_OK) status = clear_memory(OP, ctx, x.rows_done, space.cleared());
    for (int pass = 0; pass < 2 && status == GK_OK; ++pass) {
        x.again = pass > 0;
        status = launch<flash_attn_bwd_sm90a_kernel<Consumer>>(
            OP, ctx, dim3((unsigned)plan->tasks), BwdSmem<Tile>::THREADS, BwdSmem<Tile>::BYTES, x);
        x.rows_done += space.counters / sizeof(unsigned);
        x.keys_done += space.counters / sizeof(unsigned);
        x.stored += space.stored / sizeof(unsigned);
        if (status == GK_OK)
            status = pass == 0 ? Bias::between(ctx, a, x) : Bias::finish(ctx, a, x);
    }
    return status == GK_OK && x.g.dsinks ? bwd_sinks(ctx, element<T>::dtype, x.g) : status;
}

} // namespace

#endif
