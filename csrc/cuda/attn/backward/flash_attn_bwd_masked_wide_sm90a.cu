/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_masked_wide_sm90a: the gradients of attention with a stored mask, with a bias, or
 * with both, if head_dim of q or of v is from 129 to 256. flash_attn_bwd_masked_sm90a serves
 * smaller head_dims. The consumers are those of flash_attn_bwd_wide_sm90a (bwd_wide.cuh).
 *
 * Work split: a pair of thread blocks owns a tile of 128 keys of the mask, 64 keys each. Both take
 * the blocks of queries in the tile's list, 64 rows a step. Shared memory has no room for the words
 * of a partial block. Each thread of warpgroup 0 therefore reads its two words from global memory
 * while S^T is computed, or computes them if they are not stored. It stores P of a hidden pair as
 * -0, so that warpgroup 1 sets dS of this pair to 0.
 *
 * As in flash_attn_bwd_masked_sm90a, a second launch serves hidden rows and keys that hold NaN or
 * inf, and a tile of keys that many more queries see than the others is cut into parts. Each block
 * of a pair sums the parts of its own 64 keys.
 *
 * A bias may broadcast over the batch, the heads and the queries. A bias by distance is served, too
 * (bwd_bias.cuh).
 *
 * Not handled: a float32 bias [.., Sk]; a bias that broadcasts over keys; distance_bias together
 * with a mask or a bias; a gradient of the bias that does not broadcast and whose rows are not
 * multiples of 16 bytes; the modifiers, calls and alignments that flash_attn_bwd_masked_sm90a
 * refuses. flash_attn_bwd_scores_sm80 and flash_attn_bwd_plain serve those. */
#include "../../ptx/prefetch_l2.cuh"
#include "../mask_words.cuh"
#include "bwd_bias.cuh"

namespace {

/* ---- 1. the mask ----------------------------------------------------------------------------- */
/* The value of BwdTileOf::edge for a step whose block is partial, or whose keys end within the
 * block: the block's kind, whether all queries see its keys, and the index of its stored words. */
__device__ __forceinline__ int edge_of(int kind, int full, int words) {
    return kind | full << 2 | words << 3;
}

/* Which of a lane's pairs the mask shows, in the order of seen_by_words: bit 2 n + e of seen[r] is
 * row 8 n + e and key 8 r, relative to the lane's first. */
__device__ __forceinline__ void seen_by_mask(uint32_t (&seen)[2], const BwdMaskedParams &x,
                                             const BwdWork &w, const BwdTileOf &t) {
    const int edge = t.edge, i0 = t.i0;
    const int32_t *mask = mask_of(x, w.b, __float_as_int(t.slope));
    if ((edge & 3) == GK_BLOCK_WORDS) {
        const uint2 *words =
            (const uint2 *)(mask + x.at.words_t + (int64_t)(edge >> 3) * GK_MASK_BLOCK_INTS);
        const uint2 two = __ldg(words + 128 * w.rank + mov_tid_x() % 128);
        seen[0] = two.x >> i0 % GK_MASK_TILE / 4;
        seen[1] = two.y >> i0 % GK_MASK_TILE / 4;
        return;
    }
    const int4 *source = (const int4 *)(mask + x.at.source);
    const int key = own_key(w, 0), row = i0 + laneid() % 4 * 2;
    if (edge & 4 || x.store == GK_MASK_COLUMNS) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int j = key + 8 * r;
            seen[r] = j < w.seq.seq_k ? ~0u : 0u;
            if (edge & 4 || j >= w.seq.seq_k) continue;
            const int4 c = __ldg(source + j); /* rows that do not see the key */
            seen[r] =
                ~(columns_in<16>(c.x - row, c.y - row) | columns_in<16>(c.z - row, c.w - row));
        }
        return;
    }
    /* The store is GK_MASK_RANGES: each row has the ranges of keys that it sees. Each lane first
     * computes which of the warp's 16 keys two of the step's 64 rows see. The transpose then gives
     * it the rows that see one key. */
    const int first = key - laneid() / 4;
    uint32_t bits = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = i0 + 32 * half + laneid();
        const int4 a = __ldg(source + min(i, w.seq.seq_q - 1)); /* keys that the row sees */
        const uint32_t keys = rows_in(a.x, a.y, first) | rows_in(a.z, a.w, first);
        bits |= (i < w.seq.seq_q ? keys & 0xffffu : 0) << 16 * half;
    }
    bits = transpose_bits(bits); /* lane l: rows 32 (l / 16) to + 31 of key l % 16 */
    seen[0] = seen[1] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int half = i / 2, r = i % 2;
        const uint32_t rows = __shfl_sync(0xffffffffu, bits, 16 * half + 8 * r + laneid() / 4);
        const uint32_t own = rows >> laneid() % 4 * 2 & 0x03030303u;
        seen[r] |= (own * 0x01041040u >> 24) << 8 * half;
    }
}

/* The same for causal, window, kv_start and kv_end, in a call without a mask. */
__device__ __forceinline__ void seen_by_rules(uint32_t (&seen)[2], const BwdMaskedParams &,
                                              const BwdWork &w, const BwdTileOf &t) {
    const Span &span = w.seq.span;
    const int row = t.i0 + laneid() % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int j = own_key(w, 0) + 8 * r;
        const bool any = j >= span.key_lo && j < span.key_hi;
        seen[r] =
            any ? columns_in<16>(span.row_lo(j) - row, span.row_hi(j, w.seq.seq_q) - row) : 0u;
    }
}

/* ---- 2. the producer ------------------------------------------------------------------------- */
/* Prefetches a step's bias, 64 rows x 64 keys, so that warpgroup 0 then reads it from L2. One
 * warp. */
__device__ __forceinline__ void prefetch_bias(const BwdMaskedParams &x, const BwdWork &w, int head,
                                              int row0) {
    if (w.j0 >= w.seq.seq_k || x.bias_row == 0) return;
    const int last = min(w.j0 + 63, w.seq.seq_k - 1);
#pragma unroll 1
    for (int i = row0 + laneid(); i < min(row0 + 64, w.seq.seq_q); i += 32) {
        const char *from = bias_of(x, w, head) + i * x.bias_row;
        prefetch_l2(from + w.j0 * 2);
        prefetch_l2(from + last * 2);
    }
}

/* One warp loads K, V and the columns of the other block's K once. Then it loads Q with its stats,
 * and dO, step after step. In the second launch it replaces NaN and inf in them by 0. */
template <class T, class Tile>
__device__ __forceinline__ void load_masked_pair(const BwdMaskedParams &x, const BwdWork &w,
                                                 unsigned char *smem, smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    const Bwd &g = x.g;
    const smem_addr raw_s = smem_s + S::RAW, kv_s = smem_s + S::KV_FULL;
    if (laneid() == 0) {
        const int peer_j0 = w.j0 + (w.rank == 0 ? Tile::BKV : -Tile::BKV);
        const smem_addr to_s = x.again ? raw_s : kv_s;
        mbarrier_arrive_expect_tx(to_s, S::K::bytes + S::V::bytes + S::PeerK::bytes);
        load_panels<typename S::K>(smem_s + S::K_AT, &x.k, w.j0, w.kv_head, w.b, to_s);
        load_panels<typename S::V>(smem_s + S::V_AT, &x.v, w.j0, w.kv_head, w.b, to_s);
        load_panels<typename S::PeerK>(smem_s + S::PEER_K_AT, &x.k, peer_j0, w.kv_head, w.b, to_s,
                                       S::PeerK::cols * w.rank);
    }
    if (x.again) {
        mbarrier_wait(raw_s, 0);
        clear_wild<T, typename S::K>(smem_s + S::K_AT);
        clear_wild<T, typename S::V>(smem_s + S::V_AT);
        clear_wild<T, typename S::PeerK>(smem_s + S::PEER_K_AT);
        fence_proxy_async(); /* orders this lane's stores before WGMMA's reads */
        __syncwarp();
        if (laneid() == 0) mbarrier_arrive(kv_s);
    }
    const tma_steps<Tile::STAGES> ring = {smem_s + S::RING};
    const tma_steps<Tile::O_STAGES> o_ring = {smem_s + S::O_RING};
    const BwdPlace at = {smem_s + S::PLACE};
    if constexpr (ScoresOf<Tile>::MASK) {
        at.set(BwdPlace::KEPT, words_before(x, w, at)); /* place() has set the other fields */
    } else {
        at.set(BwdPlace::HEAD, w.first_head - 1);
    }
    at.set(BwdPlace::ROW, GK_MASK_TILE - Tile::BQ);
    __syncwarp();
#pragma unroll 1
    for (int n = 0; n < ((const volatile BwdWork &)w).tiles; ++n) {
        next_step<Tile>(x, w, at);
        if constexpr (ScoresOf<Tile>::BIAS == BWD_BIAS)
            prefetch_bias(x, w, at[BwdPlace::HEAD], at[BwdPlace::ROW]);
        const smem_addr q_s = smem_s + S::Q_AT + ring.stage(n) * S::Q::bytes,
                        o_s = smem_s + S::O_AT + o_ring.stage(n) * S::O::bytes,
                        stats_s = smem_s + S::STATS_AT + ring.stage(n) * S::STATS;
        ring.wait_empty(n);
        if (laneid() == 0) {
            const smem_addr to_s = x.again ? raw_s : ring.full(n);
            const int i0 = at[BwdPlace::ROW];
            int kind = at[BwdPlace::KIND];
            /* rows past the end must not get a bias, which may be infinite */
            if (!ScoresOf<Tile>::MASK && i0 + Tile::BQ > w.seq.seq_q) kind = GK_BLOCK_MADE;
            load_panels<typename S::Q>(q_s, &x.q, i0, at[BwdPlace::HEAD], w.b, to_s);
            const int stats_tile = at[BwdPlace::HEAD] * g.row_tiles + w.row_tile + i0 / Tile::BQ;
            int edge = 0;
            if (kind != GK_BLOCK_FULL)
                edge = ScoresOf<Tile>::MASK ? edge_of(kind, at[BwdPlace::FULL], at[BwdPlace::WORDS])
                                            : kind;
            ((BwdTileOf *)(smem + S::TILES))[ring.stage(n)] = {stats_tile, edge, i0,
                                                               __int_as_float(at[BwdPlace::HEAD])};
            if (n == 0) { /* see load_tiles */
                wait_count(x.rows_done + w.task.unit, x.grid.rows * S::BLOCKS * BwdGrid::PARTS);
                fence_proxy_async_global();
            }
            mbarrier_arrive_expect_tx(to_s, S::Q::bytes + S::STATS);
            bulk_load(stats_s, (const char *)g.stats + (int64_t)stats_tile * S::STATS, S::STATS,
                      to_s);
        }
        __syncwarp();
        if (x.again) { /* the barrier RAW has one phase for K and V, then two for each step */
            mbarrier_wait(raw_s, 1);
            clear_wild<T, typename S::Q>(q_s);
            carry_nan<Tile>(stats_s);
            fence_proxy_async(); /* as above */
            __syncwarp();
            if (laneid() == 0) mbarrier_arrive(ring.full(n));
        }
        o_ring.wait_empty(n);
        if (laneid() == 0) {
            const smem_addr to_s = x.again ? raw_s : o_ring.full(n);
            mbarrier_arrive_expect_tx(to_s, S::O::bytes);
            load_panels<typename S::O>(o_s, &x.grad_out, at[BwdPlace::ROW], at[BwdPlace::HEAD], w.b,
                                       to_s);
        }
        __syncwarp();
        if (x.again) {
            mbarrier_wait(raw_s, 0);
            clear_wild<T, typename S::O>(o_s);
            fence_proxy_async(); /* as above */
            __syncwarp();
            if (laneid() == 0) mbarrier_arrive(o_ring.full(n));
        }
    }
}

/* ---- 3. the consumer ------------------------------------------------------------------------- */
template <class T, class Tile_, bool MODIFIED, bool ORDERED>
struct BwdMaskedWideConsumer : BwdWideConsumer<T, Tile_, MODIFIED, ORDERED> {
    typedef Tile_ Tile;
    typedef BwdMaskedParams Params;
    typedef BwdSmem<Tile> S;
    static constexpr bool SPLITS = ScoresOf<Tile>::MASK;
    static_assert(GK_MASK_TILE == 2 * Tile::BQ && GK_MASK_TILE == 2 * Tile::BKV && !ORDERED,
                  "a pair has a tile of keys, and a step half of a block of queries");

    static __device__ __forceinline__ bool leaves(const Params &x) {
        return x.again && *x.spoilt == 0;
    }
    static __device__ __forceinline__ bool has_no_work(smem_addr smem_s) {
        return without_keys<Tile>(smem_s);
    }
    /* Finds the block's task. One thread. */
    static __device__ __forceinline__ void place(BwdWork &w, const Params &x, smem_addr smem_s) {
        const Bwd &g = x.g;
        if constexpr (!ScoresOf<Tile>::MASK) { /* w.start is the number of tiles of each head */
            place_block<Tile>(w, x);
            w.start = w.tiles;
            w.tiles *= g.p.group;
            return;
        }
        w.rank = (int)cluster_ctarank();
        w.task = x.grid.task(blockIdx.x / S::BLOCKS);
        w.b = (int)x.by_heads.into((uint32_t)w.task.unit);
        w.kv_head = w.task.unit - w.b * g.p.heads_kv;
        w.first_head = w.kv_head * g.p.group;
        if (w.task.unit >= x.grid.units || w.task.kind != BWD_KEYS) return;
        place_keys<Tile>(w, x, smem_s);
    }
    static __device__ __forceinline__ void load(const Params &x, const BwdWork &w,
                                                unsigned char *smem, smem_addr smem_s) {
        load_masked_pair<T, Tile>(x, w, smem, smem_s);
    }
    /* Sums the gradient of the bias. Two warps. */
    static __device__ __forceinline__ void collect(const Params &x, const BwdWork &w,
                                                   const unsigned char *, smem_addr smem_s) {
        collect_bias<T, Tile>(x, w, smem_s);
    }
    __device__ __forceinline__ void store(const Params &x, const BwdWork &w, smem_addr smem_s,
                                          int warpgroup) {
        if constexpr (SPLITS) {
            if (!join_parts<Tile>(x, w, smem_s, [&](const auto &take) { take(this->sum, 0); }))
                return;
        }
        float wild = 0; /* NaN if a gradient is NaN or inf */
#pragma unroll
        for (int i = 0; i < Tile::HEAD_DIM / 2; ++i) wild = fmaf(this->sum[i], 0.f, wild);
        if (wild != 0) *x.spoilt = 1;
        BwdWideConsumer<T, Tile_, MODIFIED, ORDERED>::store(x, w, smem_s, warpgroup);
    }
};

/* ---- 4. table -------------------------------------------------------------------------------- */
#define INSTANCE(name, T, dtype, TILE)                                             \
    {name,                                                                         \
     dtype,                                                                        \
     plan_masked<TILE, BiasOf<T, TILE>>,                                           \
     run_masked<T, BwdMaskedWideConsumer<T, TILE, false, false>, BiasOf<T, TILE>>, \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, 0, BwdSmem<TILE>::BYTES, TILE::BQ},        \
     NULL}
#define INSTANCES(label, TILE)                                                              \
    INSTANCE("flash_attn_bwd_masked_wide_sm90a_bf16_" label, __nv_bfloat16, GK_BF16, TILE), \
        INSTANCE("flash_attn_bwd_masked_wide_sm90a_f16_" label, __half, GK_F16, TILE)

template <class T, class Tile>
using BiasOf =
    std::conditional_t<ScoresOf<Tile>::BIAS != 0, BwdBiasByLoads<T, Tile>, BwdBiasByTma<Tile>>;

typedef BwdMasked<BwdHopper192, 1, 0> Masked192;
typedef BwdMasked<BwdHopper192, 0, BWD_BIAS> Biased192;
typedef BwdMasked<BwdHopper192, 1, BWD_BIAS> MaskedBiased192;
typedef BwdMasked<BwdHopper192, 0, BWD_DISTANCE> Distance192;
typedef BwdMasked<BwdHopper256, 1, 0> Masked256;
typedef BwdMasked<BwdHopper256, 0, BWD_BIAS> Biased256;
typedef BwdMasked<BwdHopper256, 1, BWD_BIAS> MaskedBiased256;
typedef BwdMasked<BwdHopper256, 0, BWD_DISTANCE> Distance256;

const gk_cuda_instance instances[] = {INSTANCES("d192_mask", Masked192),
                                      INSTANCES("d192_bias", Biased192),
                                      INSTANCES("d192_mask_bias", MaskedBiased192),
                                      INSTANCES("d192_distance", Distance192),
                                      INSTANCES("d256_mask", Masked256),
                                      INSTANCES("d256_bias", Biased256),
                                      INSTANCES("d256_mask_bias", MaskedBiased256),
                                      INSTANCES("d256_distance", Distance256)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_masked_wide_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
