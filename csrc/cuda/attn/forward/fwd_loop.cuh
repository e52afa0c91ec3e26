/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_loop.cuh: the loop of a consumer warpgroup of Hopper's forward kernels over its tiles, and
 * the parameters of a call: what flash_attn_fwd_sm90a and paged_prefill_sm90a share. They differ in
 * where keys lie. */
#ifndef GPUKERN_CUDA_FWD_LOOP_CUH
#define GPUKERN_CUDA_FWD_LOOP_CUH

#include "../../ptx/cluster.cuh"
#include "fwd_consumer.cuh"

/* ---- 0. a block ------------------------------------------------------------------------------ */
/* begin(smem_s) makes the barriers. Then the last warpgroup finds tiles and loads, produce(smem,
 * smem_s, tiles), and each other one consumes, consume(smem_s, tiles, warpgroup). */
template <class Tile, class Begin, class Produce, class Consume>
__device__ __forceinline__ void run_block(const Begin &begin, const Produce &produce,
                                          const Consume &consume) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    const FwdTile *tiles = (const FwdTile *)(smem + Smem<Tile>::TILES);
    /* the compiler sees that lanes agree */
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

/* The barriers of a block, and what shared memory holds at first. A barrier of the block must
 * follow. LOADERS: warps that load, and so read what tiles are. */
template <class Tile, int LOADERS = 1>
__device__ __forceinline__ void begin_block(const FwdHopperParams &x, smem_addr smem_s) {
    typedef Smem<Tile> S;
    if (threadIdx.x == 0) {
        /* a warp's rows of Q are its own until its store has read them */
        typename S::QRing(smem_s + S::Q_RING).init(Tile::WARPGROUPS * 4);
        typename S::TileRing(smem_s + S::TILE_RING).init(Tile::WARPGROUPS * 4 + LOADERS);
        typename S::KvRing(smem_s + S::K_RING).init(Tile::WARPGROUPS);
        typename S::KvRing(smem_s + S::V_RING).init(Tile::WARPGROUPS);
        mbarrier_init(smem_s + S::OVER, 1);
        fence_mbarrier_init();
        mbarrier_arrive(smem_s + S::OVER); /* its first phase is over, and there is no second */
    }
    if (x.stacked > 1) { /* rows that no head fills are finite */
        for (int i = threadIdx.x; i < S::K_AT / 16; i += S::THREADS)
            st_shared_128(smem_s + i * 16, make_uint4(0, 0, 0, 0));
        fence_proxy_async();
    }
}

/* ---- 1. a consumer warpgroup ----------------------------------------------------------------- */
/* The tile's next step of a consumer warpgroup; the same for all of a block, since turns are
 * counted. true: tile `then` follows tile `now` so that its first scores can be issued behind this
 * one's last values. Of a shorter tile the next Q is not there yet. */
template <class Tile>
__device__ __forceinline__ bool follows(const FwdHopperParams &x, const FwdTile &now,
                                        const FwdTile &then) {
    static_assert(FWD_FOLLOWED > Tile::STAGES, "every warpgroup's rows see a block of such a tile");
    const int4 a = *(const int4 *)&now.steps, b = *(const int4 *)&then.steps;
    const int least = Tile::WARPGROUPS == 2 ? min(a.x, a.y) : min(min(a.x, a.y), a.z);
    const int least_then = Tile::WARPGROUPS == 2 ? min(b.x, b.y) : min(min(b.x, b.y), b.z);
    return x.simple && !x.units.sloped && a.w >= FWD_FOLLOWED && a.w - least < Tile::STAGES &&
           b.w > 0 && least_then > 0;
}

/* Tile after tile. PARTIAL: out is float32. */
template <class T, class Tile, bool MODIFIED, bool PARTIAL = false>
__device__ __forceinline__ void consume(const FwdHopperParams &x, smem_addr smem_s,
                                        const FwdTile *tiles, int warpgroup) {
    typedef Smem<Tile> S;
    typedef Consumer<T, Tile, MODIFIED> C;
    const tma_steps<Tile::Q_BUFFERS> q = {smem_s + S::Q_RING};
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    if (warpgroup == Tile::WARPGROUPS - 1) bar_arrive(1, 256); /* warpgroup 0 has the first turn */
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
        if (C::LEADS && lead > 0) { /* V of these blocks comes after the next Q */
            if (C::AHEAD) {
                c.release_q(at.q_empty);
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
                if constexpr (PARTIAL)
                    store_partial<T, Tile>(x, t, c.softmax, c.o);
                else
                    store_simple<T, Tile>(x, t, c.softmax, c.o, q_s);
            });
        } else {
            clear(c.o);
            c.release_q(C::AHEAD ? at.q_empty : q.empty(n));
            c.ready = false;
        }
        if (!C::EARLY || !c.ready) {
            c.pass(step + at.end, blocks - at.end);
            if (own == 0 && blocks > 0) /* that of the last product */
                turn_begin<Tile>(warpgroup), turn_end<Tile>(warpgroup);
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
        step += blocks;
        __syncwarp(); /* all lanes have read t */
        if (laneid() == 0) mbarrier_arrive(described.empty(n));
    }
    /* shared memory stays until TMA has read it */
    if (laneid() == 0) tma_store_wait_group_read<0>();
}

/* ---- 2. host: the parameters ----------------------------------------------------------------- */
/* What TMA copies of Q at once, 64 columns: a tile's rows, or by stacked heads those of each. */
template <class Tile> inline smem_box q_box(const FwdHopperParams &x) {
    return x.stacked > 1 ? wgmma_box(2, x.fwd.problem.seq_q, x.stacked) : Smem<Tile>::Q::box();
}

/* The first tiles of a head, from whose queries the window reaches back to the sequence's first
 * key: they see fewer keys than the others do. All of them where the window ends nowhere; 0 where
 * tensors say where queries stand. */
inline int fwd_young(const Problem &p, int bq, int tiles) {
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
    x.stacked = x.units.capped && x.units.sloped ? 1 : fwd_stacked(problem_of(ctx, a), BQ);
    x.fwd = fwd_params(ctx, a, BQ, Tile::BKV, 1, x.stacked);
    const Problem &p = x.fwd.problem;
    x.by_head = divisor_of(x.stacked > 1 ? (uint32_t)p.seq_q : INT32_MAX);
    x.q_bytes = Smem<Tile>::Q::panels * tma_box_of(q_box<Tile>(x)).bytes;
    x.schedule.tiles = x.fwd.tiles_q;
    x.schedule.splits = x.fwd.splits;
    x.schedule.heads = (p.cu_q ? p.heads_q : p.batch * p.heads_q) / x.stacked;
    const int young = fwd_young(p, BQ, x.schedule.tiles);
    x.schedule.paired = p.rules.right >= 0 && young == x.schedule.tiles && x.fwd.splits == 1;
    /* those of all heads come last where their keys stay in L2: they are read at several times */
    const double young_bytes = (double)p.batch * p.heads_kv * (double)p.rules.left *
                               (p.head_dim + p.head_dim_v) * gk_dtype_bytes(a->k.dtype);
    if (p.rules.right >= 0 && young < x.schedule.tiles && x.fwd.splits == 1 &&
        young_bytes <= FWD_L2_SHARE * gk_gpu_of(ctx->index)->l2_bytes)
        x.schedule.young = young;
    x.by_group = divisor_of((uint32_t)gk_max_i64(p.group, 1));
    x.by_batch = divisor_of((uint32_t)gk_max_i64(p.heads_q / x.stacked, 1));
    const int sms = gk_gpu_of(ctx->index)->num_sms;
    fwd_deal(&x.schedule, sms);
    if (p.cu_q) { /* each sequence ends in a tile, or a pair, of its own */
        const int64_t units =
            x.schedule.heads * (p.total_q / BQ + (int64_t)p.batch) * x.schedule.splits;
        x.schedule.units = (int)gk_min_i64(units, INT32_MAX);
        x.schedule.blocks = (int)gk_min_i64(units, sms);
    }
    const Rules &r = p.rules;
    x.reads = p.cu_q || r.alibi_slopes || r.kv_start || r.kv_end || r.q_start;
    x.simple = x.fwd.splits == 1 && x.stacked == 1 && !r.sinks && !fwd_by_parts(a);
    if (!x.reads) x.seq = dense_sequence(p);
    return x;
}

#endif
