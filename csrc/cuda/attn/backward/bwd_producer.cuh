/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_producer.cuh: the half of flash_attn_bwd_sm90a that decides what a block does and loads it:
 * what a block keeps in shared memory, which rows see its keys, and the loads of K, V, Q and dO by
 * TMA. */
#ifndef GPUKERN_CUDA_BWD_PRODUCER_CUH
#define GPUKERN_CUDA_BWD_PRODUCER_CUH

#include "../../ptx/bar.cuh"
#include "../../ptx/bulk_cluster.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/flag.cuh"
#include "../../ptx/laneid.cuh"
#include "../../ptx/tma.cuh"
#include "../../tile/tma_ring.cuh"
#include "../../layout/wgmma.cuh"
#include "bwd.cuh"
#include "bwd_order.cuh"
#include "../tma_shape.cuh"

/* Named barriers of a block; 0 is __syncthreads. */
enum {
    BAR_CONSUMERS = 1, /* both warpgroups */
    /* of a pair; one warpgroup arrives, the other waits */
    BAR_P = 2,       /* warpgroup 0 has stored P */
    BAR_DS = 3,      /* warpgroup 1 has stored dS: for warpgroup 0 */
    BAR_OWN_DS = 4,  /* for itself */
    BAR_SENT_DS = 5, /* and 6, of steps in turn; for send_ds */
    /* of every kernel */
    BAR_ADDED =
        7 /* both warpgroups have made their last additions: for the warp that tells other blocks */
};

/* ---- 1. parameters and shared memory --------------------------------------------------------- */
struct BwdHopperParams {
    CUtensorMap q, k, v, grad_out; /* boxes of 64 columns by BQ, BKV, BKV, BQ rows */
    Bwd g;
    BwdGrid grid;
    unsigned *rows_done, *keys_done; /* of each unit, how many of these tasks are done */
    /* Of each tile of dq_sum, of a pair of each half of its columns: how many blocks have added to
     * it. Ordered kernels alone. */
    unsigned *turns;
    bool up;                   /* of BwdOrderedStep */
    Divisor by_heads, by_keys; /* kv heads of a batch entry; tasks of keys of a unit */
};

/* What a block does. Of a task of keys: the keys [j0, j0 + BKV) of one kv head, and the tiles of
 * rows that see some of them, or of a pair some of either's, of every query head of the group. Rows
 * and keys count from the sequence's first. */
struct BwdWork {
    BwdTask task;
    Sequence seq;
    int b, kv_head, j0;
    int first_head;     /* query head of the group */
    int tile_lo, tiles; /* tiles of rows; 0: nobody sees these keys */
    int start;          /* the tile that comes first; after the last comes tile_lo */
    int row_tile;       /* the sequence's first tile in the workspace */
    Interval keys;      /* that some row sees: the others may hold anything */
    Interval rows;      /* that see some key: likewise */
    Interval full;      /* tiles in which every row sees every key of the block */
    int rank; /* in the pair: its first block has the first keys, and the first half of the columns
                 of dQ */
};

/* What the consumers ask of a step, written by the producer beside Q. */
struct BwdTileOf {
    int tile;    /* in the workspace, over all heads */
    int edge;    /* 1: some row does not see some key */
    int i0;      /* the tile's first row */
    float slope; /* of ALiBi, 0 = none */
};

template <class Tile> struct BwdSmem {
    static constexpr int BQ = Tile::BQ, BKV = Tile::BKV, THREADS = 3 * 128;
    typedef wgmma_panels<BKV, Tile::HEAD_DIM> K;
    typedef wgmma_panels<BKV, Tile::HEAD_DIM_V> V;
    typedef wgmma_panels<BQ, Tile::HEAD_DIM> Q;
    typedef wgmma_panels<BQ, Tile::HEAD_DIM_V> O; /* dO */
    /* dS [rows][keys], a panel of 64 keys a warpgroup; of a pair dS^T [keys][rows] */
    typedef wgmma_panels<Tile::PAIR ? BKV : BQ, Tile::PAIR ? BQ : BKV> Scores;
    typedef tma_ring<Tile::STAGES> Ring;
    typedef tma_ring<Tile::O_STAGES> ORing;
    static constexpr int BLOCKS = Tile::PAIR ? 2 : 1; /* of a cluster */
    /* of the other block's K the columns that this block makes dQ of */
    typedef wgmma_panels<BKV, Tile::PAIR ? 128 : 64> PeerK;
    static constexpr int STATS = BQ * 8; /* of a tile's rows lse, then delta */
    static constexpr int K_AT = 0, V_AT = K_AT + K::bytes, PEER_K_AT = V_AT + V::bytes,
                         Q_AT = PEER_K_AT + (Tile::PAIR ? PeerK::bytes : 0),
                         O_AT = Q_AT + Tile::STAGES * Q::bytes;
    static constexpr int DS_AT = O_AT + Tile::O_STAGES * O::bytes,
                         PEER_DS_AT = DS_AT + 2 * Scores::bytes,
                         P_AT = PEER_DS_AT + (Tile::PAIR ? 2 * Scores::bytes : 0),
                         STATS_AT =
                             P_AT + (Tile::PAIR ? BQ * BKV * 4
                                                : 0); /* P^T in float32, as it lies in lanes */
    /* of Q and stats, and but for pairs of dO; of pairs: of dO, and two barriers in turn for dS of
     * the other block */
    static constexpr int RING = STATS_AT + Tile::STAGES * STATS;
    static constexpr int O_RING = RING + Ring::bytes, PEER_FULL = O_RING + ORing::bytes;
    /* barriers */
    static constexpr int KV_FULL = PEER_FULL + 16, RAW = KV_FULL + 8, TURN = RAW + 8,
                         ADDED = TURN + 8;
    static constexpr int TILES = ADDED + 8, WORK = TILES + Tile::STAGES * (int)sizeof(BwdTileOf);
    static constexpr int BYTES = WORK + (int)sizeof(BwdWork);
    static constexpr GK_HD int peer_full(int step) { return PEER_FULL + 8 * (step & 1); }
    static_assert(BYTES <= 227 * 1024, "a block has an SM's shared memory");
    static_assert(Q::bytes % 1024 == 0 && O::bytes % 1024 == 0 && Scores::bytes % 1024 == 0,
                  "tiles are whole blocks");
    static_assert(STATS % 16 == 0, "stats are copied in units of 16 bytes");
};

/* ---- 2. which rows --------------------------------------------------------------------------- */
/* Blocks of one head are neighbours: they read the same rows. Under a causal rule the first keys
 * are seen by most rows and come first. */
template <class Tile>
__device__ __forceinline__ void place_block(BwdWork &w, const BwdHopperParams &x) {
    constexpr int BQ = Tile::BQ, BKV = Tile::BKV, BLOCKS = BwdSmem<Tile>::BLOCKS;
    const Bwd &g = x.g;
    w.rank = BLOCKS > 1 ? (int)cluster_ctarank() : 0;
    w.task = x.grid.task(blockIdx.x / BLOCKS);
    w.b = (int)x.by_heads.into((uint32_t)w.task.unit);
    w.kv_head = w.task.unit - w.b * g.p.heads_kv;
    w.first_head = w.kv_head * g.p.group;
    if (w.task.unit >= x.grid.units || w.task.kind != BWD_KEYS) return;
    const int kv_tiles = x.grid.keys, tile_kv = x.up ? kv_tiles - 1 - w.task.index : w.task.index;
    const int first = tile_kv * BLOCKS * BKV; /* key of the pair */
    w.j0 = first + w.rank * BKV;
    w.seq = sequence_of(g.p, w.b);
    w.keys = seen_keys(w.seq);
    w.rows = {0, 0};
    w.row_tile = row_tile_of(g, w.seq, w.b);
    w.full = full_tiles(w.seq, w.j0, BKV, BQ);
    const int lo = max(first, w.keys.lo), hi = min(first + BLOCKS * BKV, w.keys.hi);
    Interval see = {0, 0};
    if (lo < hi) {
        see = seeing_rows(w.seq, lo, hi);
        w.rows = seeing_rows(w.seq, w.keys.lo, w.keys.hi);
    }
    w.tile_lo = see.lo / BQ;
    w.tiles = see.hi > see.lo ? (see.hi + BQ - 1) / BQ - w.tile_lo : 0;
    /* blocks of a head add to different rows of dQ at a time */
    w.start = BwdGrid::share(x.by_keys, tile_kv, w.tiles);
}

/* ---- 3. the producer ------------------------------------------------------------------------- */
/* Rows of a tile outside [first, end) become zeros: what lies there may be NaN, which times 0 would
 * be NaN. One warp. */
template <class Panels>
__device__ __forceinline__ void clear_outside(smem_addr tile_s, int first, int end) {
#pragma unroll 1
    for (int i = laneid(); i < Panels::rows * 8; i += 32) {
        if (i / 8 >= first && i / 8 < end) continue;
#pragma unroll 1
        for (int c = 0; c < Panels::panels; ++c)
            st_shared_128(tile_s + c * Panels::panel_bytes + i * 16, make_uint4(0, 0, 0, 0));
    }
}

/* One warp loads: K and V once, of a pair also the columns of the other block's K that this one
 * makes dQ of; then Q with its stats, and dO, tile after tile. Of a pair dO has a ring of its own.
 * A tile with rows that must not be read goes through a barrier of its own, and is whole once those
 * rows are zero. */
template <class Tile, bool ORDERED>
__device__ __forceinline__ void load_tiles(const BwdHopperParams &x, const BwdWork &w,
                                           unsigned char *smem, smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    const Bwd &g = x.g;
    const int b = g.p.cu_q ? 0 : w.b, steps = w.tiles * g.p.group;
    const smem_addr raw_s = smem_s + S::RAW, kv_s = smem_s + S::KV_FULL;
    /* of a pair: the other block's first key, and the first of both */
    const int peer_j0 = Tile::PAIR ? w.j0 + (w.rank == 0 ? Tile::BKV : -Tile::BKV) : w.j0,
              pair_j0 = min(w.j0, peer_j0);
    const bool kv_ragged = w.keys.lo > pair_j0 || w.keys.hi < pair_j0 + S::BLOCKS * Tile::BKV;
    unsigned raw_parity = 0;
    if (laneid() == 0) {
        const smem_addr to_s = kv_ragged ? raw_s : kv_s;
        mbarrier_arrive_expect_tx(to_s,
                                  S::K::bytes + S::V::bytes + (Tile::PAIR ? S::PeerK::bytes : 0));
        load_panels<typename S::K>(smem_s + S::K_AT, &x.k, w.seq.k0 + w.j0, w.kv_head, b, to_s);
        load_panels<typename S::V>(smem_s + S::V_AT, &x.v, w.seq.k0 + w.j0, w.kv_head, b, to_s);
        if constexpr (Tile::PAIR)
            load_panels<typename S::PeerK>(smem_s + S::PEER_K_AT, &x.k, w.seq.k0 + peer_j0,
                                           w.kv_head, b, to_s, S::PeerK::cols * w.rank);
    }
    if (kv_ragged) {
        mbarrier_wait(raw_s, raw_parity);
        raw_parity ^= 1;
        clear_outside<typename S::K>(smem_s + S::K_AT, w.keys.lo - w.j0, w.keys.hi - w.j0);
        clear_outside<typename S::V>(smem_s + S::V_AT, w.keys.lo - w.j0, w.keys.hi - w.j0);
        if constexpr (Tile::PAIR)
            clear_outside<typename S::PeerK>(smem_s + S::PEER_K_AT, w.keys.lo - peer_j0,
                                             w.keys.hi - peer_j0);
        fence_proxy_async(); /* this lane's zeros come before wgmma's reads */
        __syncwarp();
        if (laneid() == 0) mbarrier_arrive(kv_s);
    }
    const tma_steps<Tile::STAGES> ring = {smem_s + S::RING};
    const tma_steps<Tile::O_STAGES> o_ring = {smem_s + S::O_RING};
    const int first_tile = w.tile_lo + (!ORDERED ? w.start : x.up ? 0 : w.tiles - 1);
    typename BwdSteps<ORDERED>::type at = {w.first_head, first_tile};
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        const int i0 = at.tile * Tile::BQ,
                  stats_tile = at.head * g.row_tiles + w.row_tile + at.tile;
        const int stage = ring.stage(n), row = w.seq.q0 + i0;
        const smem_addr q_s = smem_s + S::Q_AT + stage * S::Q::bytes,
                        o_s = smem_s + S::O_AT + o_ring.stage(n) * S::O::bytes;
        const bool ragged = w.rows.lo > i0 || w.rows.hi < i0 + Tile::BQ;
        ring.wait_empty(n);
        if (laneid() == 0) {
            const smem_addr to_s = ragged ? raw_s : ring.full(n);
            ((BwdTileOf *)(smem + S::TILES))[stage] = {
                stats_tile, at.tile < w.full.lo || at.tile >= w.full.hi, i0,
                slope_of<float>(g.p.rules, w.b, at.head)};
            load_panels<typename S::Q>(q_s, &x.q, row, at.head, b, to_s);
            if constexpr (!Tile::PAIR)
                load_panels<typename S::O>(o_s, &x.grad_out, row, at.head, b, to_s);
            if (n == 0 && x.grid.rows > 0) { /* while the first Q and dO come */
                wait_count(x.rows_done + w.task.unit, x.grid.rows * S::BLOCKS * BwdGrid::PARTS);
                /* stats are there for TMA; zeros for whoever sees a full stage */
                fence_proxy_async_global();
            }
            /* not before that wait: whoever sees a full stage sees what it waited for */
            mbarrier_arrive_expect_tx(to_s,
                                      S::Q::bytes + (Tile::PAIR ? 0 : S::O::bytes) + S::STATS);
            bulk_load(smem_s + S::STATS_AT + stage * S::STATS,
                      (const char *)g.stats + (int64_t)stats_tile * S::STATS, S::STATS, to_s);
        }
        __syncwarp();
        if (ragged) {
            mbarrier_wait(raw_s, raw_parity);
            raw_parity ^= 1;
            clear_outside<typename S::Q>(q_s, w.rows.lo - i0, w.rows.hi - i0);
            if constexpr (!Tile::PAIR)
                clear_outside<typename S::O>(o_s, w.rows.lo - i0, w.rows.hi - i0);
            fence_proxy_async(); /* as above */
            __syncwarp();
            if (laneid() == 0) mbarrier_arrive(ring.full(n));
        }
        if constexpr (Tile::PAIR) {
            o_ring.wait_empty(n);
            if (laneid() == 0) {
                const smem_addr to_s = ragged ? raw_s : o_ring.full(n);
                mbarrier_arrive_expect_tx(to_s, S::O::bytes);
                load_panels<typename S::O>(o_s, &x.grad_out, row, at.head, b, to_s);
            }
            __syncwarp();
            if (ragged) {
                mbarrier_wait(raw_s, raw_parity);
                raw_parity ^= 1;
                clear_outside<typename S::O>(o_s, w.rows.lo - i0, w.rows.hi - i0);
                fence_proxy_async(); /* as above */
                __syncwarp();
                if (laneid() == 0) mbarrier_arrive(o_ring.full(n));
            }
        }
        if constexpr (ORDERED)
            at.next(w.first_head, g.p.group, x.up);
        else
            at.next(w.tile_lo, w.tiles, w.start);
    }
}

/* One warp of a block of a pair: sends dS of a step to the other block once warpgroup 1 has stored
 * it. Nobody tells that it has been read: this block stores dS of two steps on only when it has the
 * other's dS of one step on, which that block stored when both its warpgroups were through with
 * this one. So two named barriers in turn are enough, too. */
template <class Tile>
__device__ __forceinline__ void send_ds(const BwdHopperParams &x, const BwdWork &w,
                                        smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    const int steps = w.tiles * x.g.p.group;
    const unsigned peer = w.rank ^ 1;
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        bar_sync(BAR_SENT_DS + (n & 1), 128 + 32);
        if (laneid() == 0) {
            const int at = (n & 1) * S::Scores::bytes;
            const smem_addr full_s = smem_s + S::peer_full(n);
            mbarrier_arrive_expect_tx(full_s, S::Scores::bytes); /* what the other block sends */
            bulk_copy_cluster(mapa(smem_s + S::PEER_DS_AT + at, peer), smem_s + S::DS_AT + at,
                              S::Scores::bytes, mapa(full_s, peer));
        }
        __syncwarp();
    }
}

/* One thread of an ordered kernel: tells the consumers when it is this block's turn at a step's
 * tile, and passes the turn on when they have added. It waits for blocks of lower numbers alone.
 * The next turn is looked for while the consumers add, and told before this one is passed on, which
 * takes until the additions are made; the consumers are at most one step ahead then. */
template <class Tile>
__device__ __forceinline__ void keep_order(const BwdHopperParams &x, const BwdWork &w,
                                           smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    const Bwd &g = x.g;
    /* of a pair: its blocks add to halves of their own */
    constexpr int KEYS = S::BLOCKS * Tile::BKV;
    const int steps = w.tiles * g.p.group;
    if (steps == 0) return;
    BwdOrderedStep at = {w.first_head, w.tile_lo + (x.up ? 0 : w.tiles - 1)};
    unsigned *turn = NULL;
    /* turn: the counter of the tile at hand. How many blocks add to it before this one: those that
     * have keys which the tile's rows see are neighbours, and this one adds after those on one
     * side. */
    const auto look = [&]() {
        const int i0 = at.tile * Tile::BQ, last_row = min(i0 + Tile::BQ, w.seq.seq_q) - 1,
                  own = w.j0 / KEYS;
        turn = x.turns + (at.head * g.row_tiles + w.row_tile + at.tile) * S::BLOCKS + w.rank;
        at.next(w.first_head, g.p.group, x.up);
        return (unsigned)(x.up ? (w.seq.span.hi(last_row) - 1) / KEYS - own
                               : own - w.seq.span.lo(i0) / KEYS);
    };
    unsigned before = look();
    wait_count(turn, before);
    mbarrier_arrive(smem_s + S::TURN);
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        unsigned *own = turn;
        const bool more = n + 1 < steps;
        bool ready = false;
        if (more) before = look();
        do {
            if (more && !ready) ready = ld_acquire(turn) >= before;
        } while (!mbarrier_try_wait_parity(smem_s + S::ADDED, n & 1));
        if (ready) mbarrier_arrive(smem_s + S::TURN);
        red_add_release(own);
        if (more && !ready) {
            wait_count(turn, before);
            mbarrier_arrive(smem_s + S::TURN);
        }
    }
}

#endif
