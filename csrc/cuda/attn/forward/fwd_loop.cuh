/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_loop.cuh: the tile loop of a consumer warpgroup in Hopper's forward kernels, and the
 * parameters of a call.
 *
 * flash_attn_fwd_sm90a, its float32 variant (PARTIAL), flash_attn_fwd_drop_sm90a,
 * flash_attn_fwd_masked_sm90a and paged_prefill_sm90a use this file. They differ in the producer:
 * where the keys are, and in which order tiles and keys are taken.
 *
 * A block has WARPGROUPS consumer warpgroups and one producer warpgroup. It stays on its SM and
 * processes tile after tile, in the order of fwd_schedule.cuh, or with a mask in that of
 * fwd_masked.cuh. */
#ifndef GPUKERN_CUDA_FWD_LOOP_CUH
#define GPUKERN_CUDA_FWD_LOOP_CUH

#include "../../ptx/cluster.cuh"
#include "fwd_consumer.cuh"

/* ---- 0. a block ------------------------------------------------------------------------------ */
/* Runs one block. begin(smem_s) initialises the barriers. Then the last warpgroup runs
 * produce(smem, smem_s, tiles), and the others run consume(smem_s, tiles, warpgroup). */
template <class Tile, class Begin, class Produce, class Consume>
__device__ __forceinline__ void run_block(const Begin &begin, const Produce &produce,
                                          const Consume &consume) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    const FwdTile *tiles = (const FwdTile *)(smem + Smem<Tile>::TILES);
    /* the shuffle shows the compiler that the value is uniform over the warp */
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    begin(smem_s);
    griddepcontrol_launch_dependents();
    __syncthreads();
    if (warpgroup == Tile::WARPGROUPS) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        produce(smem, smem_s, tiles);
    } else {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        consume(smem_s, tiles, warpgroup);
    }
}

/* Initialises the barriers and, if a tile has several heads, zeroes Q. The caller must synchronise
 * the block afterwards. LOADERS: the number of producer warps that read tile descriptions. */
template <class Tile, int LOADERS = 1>
__device__ __forceinline__ void begin_block(const FwdHopperParams &x, smem_addr smem_s) {
    typedef Smem<Tile> S;
    if (threadIdx.x == 0) {
        /* each warp releases its own 16 rows of Q, after its TMA store has read O from them */
        typename S::QRing(smem_s + S::Q_RING).init(Tile::WARPGROUPS * 4);
        typename S::TileRing(smem_s + S::TILE_RING).init(Tile::WARPGROUPS * 4 + LOADERS);
        typename S::KvRing(smem_s + S::K_RING).init(Tile::WARPGROUPS, 1 + S::LIFT);
        typename S::KvRing(smem_s + S::V_RING).init(Tile::WARPGROUPS);
        mbarrier_init(smem_s + S::OVER, 1);
        if constexpr (S::MASK)
            tma_ring<S::WORDS_STAGES>(smem_s + S::WORDS_RING).init(Tile::WARPGROUPS * 4);
        if constexpr (S::TABLE)
            tma_ring<S::TABLE_STAGES>(smem_s + S::BIAS_RING).init(Tile::WARPGROUPS * 4);
        else if constexpr (S::BIAS)
            for (int w = 0; w < Tile::WARPGROUPS; ++w)
                tma_ring<1>(smem_s + S::BIAS_RING + 16 * w).init(4);
        fence_mbarrier_init();
        /* completes the only phase of this barrier, see Consumer::end_basic_block */
        mbarrier_arrive(smem_s + S::OVER);
    }
    if (x.tile_heads > 1) { /* Q's rows that belong to no head must be finite */
        for (int i = threadIdx.x; i < S::K_AT / 16; i += S::THREADS)
            st_shared_128(smem_s + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
    }
}

/* ---- 1. a consumer warpgroup ----------------------------------------------------------------- */
/* True if the next tile's first S may be issued right behind this tile's last P V. All warpgroups
 * of a block must agree, because they alternate on counted barriers. In a tile of fewer than
 * FWD_FOLLOWED key blocks this is false: the next Q has not arrived by then. */
template <class Tile>
__device__ __forceinline__ bool follows(const FwdHopperParams &x, const FwdTile &now,
                                        const FwdTile &then) {
    static_assert(FWD_FOLLOWED > Tile::STAGES, "every warpgroup's rows see a block of such a tile");
    const int4 a = *(const int4 *)&now.steps, b = *(const int4 *)&then.steps;
    const int least = Tile::WARPGROUPS == 2 ? min(a.x, a.y) : min(min(a.x, a.y), a.z);
    const int least_then = Tile::WARPGROUPS == 2 ? min(b.x, b.y) : min(min(b.x, b.y), b.z);
    return x.simple && !x.units.has_alibi && a.w >= FWD_FOLLOWED && a.w - least < Tile::STAGES &&
           b.w > 0 && least_then > 0;
}

/* The loop of a consumer warpgroup over the block's tiles. PARTIAL: out is float32. */
template <class T, class Tile, bool MODIFIED, bool PARTIAL = false>
__device__ __forceinline__ void consume(const typename ParamsOf<Tile>::type &x, smem_addr smem_s,
                                        const FwdTile *tiles, int warpgroup) {
    typedef Smem<Tile> S;
    typedef Consumer<T, Tile, MODIFIED> C;
    const tma_steps<Tile::Q_BUFFERS> q = {smem_s + S::Q_RING};
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    if (warpgroup == Tile::WARPGROUPS - 1) bar_arrive(1, 256); /* warpgroup 0 issues first */
    C c(x, smem_s, warpgroup);
#pragma unroll 1
    for (int n = 0, step = 0;; ++n) {
        q.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int4 steps = *(const int4 *)&t.steps;
        const int blocks = steps.w, own = warpgroup == 0   ? steps.x
                                          : warpgroup == 1 ? steps.y
                                                           : steps.z;
        if (blocks < 0) break;
        const int lead = C::LEADS && own > 0 ? c.lead(t, own) : 0;
        const smem_addr q_s = smem_s + q.stage(n) * S::Q::bytes;
        typename C::At at = {step, lead, C::from_nearest(x) ? lead + own : own, q_s,
                             C::AHEAD && n > 0 ? q.empty(n - 1) : 0};
        c.softmax.clear();
        /* The loader loads the next tile's Q before V of these blocks. That Q goes into the buffer
         * of the previous tile's Q, so this buffer must be released now. */
        if (C::LEADS && lead > 0) {
            if (C::AHEAD) {
                c.stages().release_q(at.q_empty);
                at.q_empty = 0;
            }
            c.pass(step, lead);
        }
        if (own > 0) {
            c.first_block(t, at);
            c.other_blocks(t, at);
            smem_addr next_s = 0;
            if (C::EARLY) {
                described.wait_full(n + 1);
                if (follows<Tile>(x, t, tiles[(n + 1) % S::TILE_STAGES])) {
                    q.wait_full(n + 1);
                    next_s = smem_s + q.stage(n + 1) * S::Q::bytes;
                }
            }
            c.last_values(t, at, next_s, [&] {
                c.note_spoilt(t);
                if constexpr (PARTIAL)
                    store_partial<T, Tile>(x, t, c.softmax, c.o);
                else
                    store_simple<T, Tile>(x, t, c.softmax, c.o, q_s);
            });
        } else {
            clear(c.o);
            c.stages().release_q(C::AHEAD ? at.q_empty : q.empty(n));
            c.ready = false;
        }
        /* with a bias, no register is left for `blocks` */
        const int all = C::BIAS ? t.steps.blocks : blocks;
        if (!C::EARLY || !c.ready) {
            c.pass(step + at.end, all - at.end);
            /* the counted barriers of the last P V, which this warpgroup does not compute */
            if (own == 0 && all > 0) turn_begin<Tile>(warpgroup), turn_end<Tile>(warpgroup);
            c.note_spoilt(t);
            if constexpr (PARTIAL)
                store_partial<T, Tile>(x, t, c.softmax, c.o);
            else if (x.fwd.splits > 1)
                store_part<T, Tile>(x, t, c.softmax, c.o);
            else if (!C::AHEAD)
                store_direct<T, Tile>(x, t, c.softmax, c.o);
            else if (x.simple)
                store_simple<T, Tile>(x, t, c.softmax, c.o, q_s);
            else
                store_tile<T, Tile>(x, t, c.softmax, c.o, q_s);
        }
        step += all;
        __syncwarp(); /* all lanes have read t */
        if (laneid() == 0) mbarrier_arrive(described.empty(n));
    }
    /* the block must not end before TMA has read its shared memory */
    if (laneid() == 0) tma_store_wait_group_read<0>();
}

/* ---- 2. host: the parameters ----------------------------------------------------------------- */
/* The box of Q that one TMA copy loads, 64 columns wide: all rows of the tile or, with several
 * heads in a tile, seq_q rows of each. */
template <class Tile> inline smem_box q_box(const FwdHopperParams &x) {
    return x.tile_heads > 1 ? wgmma_box(2, x.fwd.problem.seq_q, x.tile_heads)
                            : Smem<Tile>::Q::box();
}

/* The number of a head's first tiles that see fewer keys than later tiles, because their window
 * reaches back to key 0. Returns `tiles` if there is no left bound, and 0 if device tensors give
 * the positions of the queries. */
inline int fwd_short_tiles(const Problem &p, int bq, int tiles) {
    const int64_t left = p.rules.left;
    if (left < 0 || left >= p.seq_k - 1) return tiles;
    if (p.cu_q || p.rules.q_start) return 0;
    return (int)gk_min_i64(gk_ceil_div(gk_max_i64(left - p.rules.diagonal, 0), bq), tiles);
}

template <class Tile>
inline FwdHopperParams fwd_hopper_params(const gk_context *ctx, const gk_flash_attn_args *a) {
    constexpr int BQ = Smem<Tile>::BQ;
    FwdHopperParams x = {};
    x.units = score_units(a->rules.scale, a->rules.softcap, a->rules.alibi_slopes != NULL);
    x.tile_heads = x.units.capped && x.units.has_alibi ? 1 : fwd_tile_heads(problem_of(ctx, a), BQ);
    x.fwd = fwd_params(ctx, a, BQ, Tile::BKV, 1, x.tile_heads);
    const Problem &p = x.fwd.problem;
    x.by_head = divisor_of(x.tile_heads > 1 ? (uint32_t)p.seq_q : INT32_MAX);
    x.q_bytes = Smem<Tile>::Q::panels * tma_box_of(q_box<Tile>(x)).bytes;
    x.schedule.tiles = x.fwd.tiles_q;
    x.schedule.splits = x.fwd.splits;
    x.schedule.heads = (p.cu_q ? p.heads_q : p.batch * p.heads_q) / x.tile_heads;
    const int short_tiles = fwd_short_tiles(p, BQ, x.schedule.tiles);
    x.schedule.paired = p.rules.right >= 0 && short_tiles == x.schedule.tiles && x.fwd.splits == 1;
    /* Schedules the short tiles of all heads last. Their keys are then read a second time, so this
     * is done only if these keys stay in L2. */
    const double short_bytes = (double)p.batch * p.heads_kv * (double)p.rules.left *
                               (p.head_dim + p.head_dim_v) * gk_dtype_bytes(a->k.dtype);
    if (p.rules.right >= 0 && short_tiles < x.schedule.tiles && x.fwd.splits == 1 &&
        short_bytes <= FWD_L2_SHARE * gk_gpu_of(ctx->index)->l2_bytes)
        x.schedule.short_tiles = short_tiles;
    x.by_group = divisor_of((uint32_t)gk_max_i64(p.group, 1));
    x.by_batch = divisor_of((uint32_t)gk_max_i64(p.heads_q / x.tile_heads, 1));
    const int sms = gk_gpu_of(ctx->index)->num_sms;
    fwd_make_schedule(&x.schedule, sms);
    if (p.cu_q) { /* an upper bound, because each sequence may end in a partial tile or pair */
        const int64_t units =
            x.schedule.heads * (p.total_q / BQ + (int64_t)p.batch) * x.schedule.splits;
        x.schedule.units = (int)gk_min_i64(units, INT32_MAX);
        x.schedule.blocks = (int)gk_min_i64(units, sms);
    }
    const Rules &r = p.rules;
    x.reads = p.cu_q || r.alibi_slopes || r.kv_start || r.kv_end || r.q_start;
    x.simple = x.fwd.splits == 1 && x.tile_heads == 1 && !r.sinks && !fwd_by_parts(a);
    if (!x.reads) x.seq = dense_sequence(p);
    return x;
}

#endif
