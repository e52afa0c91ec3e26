/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_producer.cuh: the producer warpgroup of the Hopper backward, and the layout of a block's
 * shared memory (BwdSmem). The kernel is in bwd_consumer.cuh.
 *
 * place_block finds the block's task and the rows that see its keys. One warp (load_tiles) loads K,
 * V, Q and dO by TMA. Another warp (send_ds) sends dS to the other block of a pair. In ordered
 * kernels one thread (keep_order) makes the blocks add to dQ in a fixed order. */
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
#include "../../../core/attn_mask.h"
#include "../tiles.h"
#include "../tma_shape.cuh"

/* Named barriers of a block; 0 is __syncthreads. */
enum {
    BAR_CONSUMERS = 1, /* both consumer warpgroups */
    /* wide kernel only; one warpgroup arrives, the other waits */
    BAR_P = 2,       /* warpgroup 0 has stored P */
    BAR_DS = 3,      /* warpgroup 1 has stored dS; warpgroup 0 waits */
    BAR_OWN_DS = 4,  /* the same, warpgroup 1 waits */
    BAR_SENT_DS = 5, /* and 6, alternating by step: dS may be sent; send_ds waits */
    /* every kernel */
    /* both warpgroups have made their last additions; warp 11 waits and signals other blocks */
    BAR_ADDED = 7
};

/* ---- 1. parameters and shared memory --------------------------------------------------------- */
struct BwdHopperParams {
    CUtensorMap q, k, v, grad_out; /* boxes of 64 columns and BQ, BKV, BKV, BQ rows */
    Bwd g;
    BwdGrid grid;
    /* for each work unit, the number of finished rows tasks and of finished keys tasks */
    unsigned *rows_done, *keys_done;
    /* Ordered kernels only: how many blocks have added to each tile of dq_sum. In pairs there is
     * one count for each half of the columns. */
    unsigned *turns;
    bool up;                   /* direction, see BwdOrderedStep */
    Divisor by_heads, by_keys; /* kv heads of a batch entry; keys tasks of a unit */
    unsigned *spoilt;          /* masked kernel only: set to 1 if a gradient is not finite */
};

/* A block's task. A keys task has the keys [j0, j0 + BKV) of one kv head. For every query head of
 * the group it takes the tiles of rows that see at least one of these keys. Both blocks of a pair
 * take the tiles whose rows see a key of either block. Rows and keys count from the first of their
 * sequence. */
struct BwdWork {
    BwdTask task;
    Sequence seq;
    int b, kv_head, j0;
    int first_head;     /* first query head of the group */
    int tile_lo, tiles; /* tiles of rows; 0: no row sees these keys */
    int start;          /* the loop begins at tile_lo + start and wraps around to tile_lo */
    int row_tile;       /* the sequence's first tile in the workspace */
    Interval keys;      /* keys that some row sees; other keys may hold anything */
    Interval rows;      /* rows that see some key; other rows may hold anything */
    Interval full;      /* tiles in which every row sees every key of the block */
    /* The block's index in its pair. Block 0 has the first keys and adds the first half of the
     * columns of dQ. */
    int rank;
};

/* The description of a step, written by the producer for the consumers. */
struct BwdTileOf {
    int tile; /* index in the workspace, over all heads */
    /* not 0: some pairs may be hidden. Masked kernel for head_dim up to 128: 2 plus the words'
     * first bit */
    int edge;
    int i0; /* the tile's first row */
    /* ALiBi slope, 0 = none. Masked kernels store the query head's number in these bits */
    float slope;
};

/* True if two warps of the producer also read dS of every step, to sum the gradient of a bias. */
template <class Tile> constexpr bool bwd_collects = Tile::PAIR && ScoresOf<Tile>::BIAS;
/* The threads that meet at BAR_SENT_DS. */
template <class Tile> constexpr int BWD_SENT_DS = 128 + 32 + (bwd_collects<Tile> ? 64 : 0);

template <class Tile> struct BwdSmem {
    static constexpr int BQ = Tile::BQ, BKV = Tile::BKV, THREADS = 3 * 128;
    typedef wgmma_panels<BKV, Tile::HEAD_DIM> K;
    typedef wgmma_panels<BKV, Tile::HEAD_DIM_V> V;
    typedef wgmma_panels<BQ, Tile::HEAD_DIM> Q;
    typedef wgmma_panels<BQ, Tile::HEAD_DIM_V> O; /* dO */
    /* dS [rows][keys] with a panel of 64 keys for each warpgroup; wide kernel: dS^T [keys][rows] */
    typedef wgmma_panels<Tile::PAIR ? BKV : BQ, Tile::PAIR ? BQ : BKV> Scores;
    typedef tma_ring<Tile::STAGES> Ring;
    typedef tma_ring<Tile::O_STAGES> ORing;
    static constexpr int BLOCKS = Tile::PAIR ? 2 : 1; /* blocks of a cluster */
    /* the columns of the other block's K for which this block computes dQ */
    typedef wgmma_panels<BKV, Tile::PAIR ? 128 : 64> PeerK;
    static constexpr int STATS = BQ * 8; /* lse of a tile's rows, then delta */
    static constexpr int K_AT = 0, V_AT = K_AT + K::bytes, PEER_K_AT = V_AT + V::bytes,
                         Q_AT = PEER_K_AT + (Tile::PAIR ? PeerK::bytes : 0),
                         O_AT = Q_AT + Tile::STAGES * Q::bytes;
    /* P_AT: P^T of the wide kernel in float32, in accumulator order */
    static constexpr int DS_AT = O_AT + Tile::O_STAGES * O::bytes,
                         PEER_DS_AT = DS_AT + 2 * Scores::bytes,
                         P_AT = PEER_DS_AT + (Tile::PAIR ? 2 * Scores::bytes : 0),
                         BIAS_AT = P_AT + (Tile::PAIR ? BQ * BKV * 4 : 0),
                         STATS_AT = BIAS_AT + (ScoresOf<Tile>::BIAS && !Tile::PAIR
                                                   ? Tile::STAGES * Scores::bytes
                                                   : 0);
    /* Masked kernel: the words of a mask's block, for each stage. Pairs have no room for them, and
     * warpgroup 0 reads them from global memory. */
    static constexpr int WORDS_BYTES = GK_MASK_BLOCK_INTS * 4,
                         WORDS_AT = STATS_AT + Tile::STAGES * STATS;
    /* RING: Q, stats and, without pairs, dO. O_RING: dO of pairs. PEER_FULL: two alternating
     * barriers for the other block's dS. */
    static constexpr int RING =
        WORDS_AT + (bwd_masked<Tile> && !Tile::PAIR ? Tile::STAGES * WORDS_BYTES : 0);
    static constexpr int O_RING = RING + Ring::bytes, PEER_FULL = O_RING + ORing::bytes;
    /* barriers */
    static constexpr int KV_FULL = PEER_FULL + 16, RAW = KV_FULL + 8, TURN = RAW + 8,
                         ADDED = TURN + 8;
    static constexpr int TILES = ADDED + 8, WORK = TILES + Tile::STAGES * (int)sizeof(BwdTileOf);
    /* masked kernels: BwdPlace, the producer's position in the mask's lists and the block's part of
     * a tile */
    static constexpr int PLACE = WORK + (int)sizeof(BwdWork);
    /* the first row and the head of a step, for the warps that sum the gradient of a bias */
    static constexpr int COLLECT = PLACE + (bwd_masked<Tile> ? 48 : 0);
    static constexpr int BYTES = COLLECT + (bwd_collects<Tile> ? 16 : 0);
    static constexpr GK_HD int peer_full(int step) { return PEER_FULL + 8 * (step & 1); }
    static_assert(BYTES <= 227 * 1024, "a block has an SM's shared memory");
    static_assert(Q::bytes % 1024 == 0 && O::bytes % 1024 == 0 && Scores::bytes % 1024 == 0,
                  "tiles are whole blocks");
    static_assert(STATS % 16 == 0, "stats are copied in units of 16 bytes");
};

/* The number of steps of a keys task. In masked kernels BwdWork::tiles already counts all heads. */
template <class Tile> __device__ __forceinline__ int steps_of(const Bwd &g, const BwdWork &w) {
    return bwd_masked<Tile> ? w.tiles : w.tiles * g.p.group;
}

/* ---- 2. which rows --------------------------------------------------------------------------- */
/* Fills in the block's task. Consecutive blocks belong to one head, because they read the same
 * rows. Under a causal mask the first keys come first, because most rows see them. */
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
    const int first = tile_kv * BLOCKS * BKV; /* first key of the block or the pair */
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
    /* Blocks of one head begin at different tiles, so that they add to different rows of dQ. */
    w.start = BwdGrid::share(x.by_keys, tile_kv, w.tiles);
}

/* ---- 3. the producer ------------------------------------------------------------------------- */
/* Zeroes the rows of a tile outside [first, end). They may hold NaN, and NaN times 0 is NaN. One
 * warp. */
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

/* One warp loads K and V once. In a pair it also loads those columns of the other block's K for
 * which this block computes dQ. Then it loads Q with its stats, and dO, tile after tile. In a pair
 * dO has a ring of its own.
 *
 * If a tile has rows that must not be read, TMA arrives at the barrier RAW instead of the stage's.
 * The warp then zeroes these rows and marks the stage full. */
template <class Tile, bool ORDERED>
__device__ __forceinline__ void load_tiles(const BwdHopperParams &x, const BwdWork &w,
                                           unsigned char *smem, smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    const Bwd &g = x.g;
    const int b = g.p.cu_q ? 0 : w.b, steps = w.tiles * g.p.group;
    const smem_addr raw_s = smem_s + S::RAW, kv_s = smem_s + S::KV_FULL;
    /* in a pair: the first key of the other block, and the first key of the pair */
    const int peer_j0 = Tile::PAIR ? w.j0 + (w.rank == 0 ? Tile::BKV : -Tile::BKV) : w.j0,
              pair_j0 = min(w.j0, peer_j0);
    const bool kv_incomplete = w.keys.lo > pair_j0 || w.keys.hi < pair_j0 + S::BLOCKS * Tile::BKV;
    unsigned raw_parity = 0;
    if (laneid() == 0) {
        const smem_addr to_s = kv_incomplete ? raw_s : kv_s;
        mbarrier_arrive_expect_tx(to_s,
                                  S::K::bytes + S::V::bytes + (Tile::PAIR ? S::PeerK::bytes : 0));
        load_panels<typename S::K>(smem_s + S::K_AT, &x.k, w.seq.k0 + w.j0, w.kv_head, b, to_s);
        load_panels<typename S::V>(smem_s + S::V_AT, &x.v, w.seq.k0 + w.j0, w.kv_head, b, to_s);
        if constexpr (Tile::PAIR)
            load_panels<typename S::PeerK>(smem_s + S::PEER_K_AT, &x.k, w.seq.k0 + peer_j0,
                                           w.kv_head, b, to_s, S::PeerK::cols * w.rank);
    }
    if (kv_incomplete) {
        mbarrier_wait(raw_s, raw_parity);
        raw_parity ^= 1;
        clear_outside<typename S::K>(smem_s + S::K_AT, w.keys.lo - w.j0, w.keys.hi - w.j0);
        clear_outside<typename S::V>(smem_s + S::V_AT, w.keys.lo - w.j0, w.keys.hi - w.j0);
        if constexpr (Tile::PAIR)
            clear_outside<typename S::PeerK>(smem_s + S::PEER_K_AT, w.keys.lo - peer_j0,
                                             w.keys.hi - peer_j0);
        fence_proxy_async(); /* orders this lane's zeros before WGMMA's reads */
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
        const bool incomplete = w.rows.lo > i0 || w.rows.hi < i0 + Tile::BQ;
        ring.wait_empty(n);
        if (laneid() == 0) {
            const smem_addr to_s = incomplete ? raw_s : ring.full(n);
            ((BwdTileOf *)(smem + S::TILES))[stage] = {
                stats_tile, at.tile < w.full.lo || at.tile >= w.full.hi, i0,
                slope_of<float>(g.p.rules, w.b, at.head)};
            load_panels<typename S::Q>(q_s, &x.q, row, at.head, b, to_s);
            if constexpr (!Tile::PAIR)
                load_panels<typename S::O>(o_s, &x.grad_out, row, at.head, b, to_s);
            if (n == 0 && x.grid.rows > 0) { /* while the first Q and dO are in flight */
                wait_count(x.rows_done + w.task.unit, x.grid.rows * S::BLOCKS * BwdGrid::PARTS);
                /* Orders the stats and zeros of the rows tasks before the bulk load of the stats
                 * below and before the consumers' additions to dQ. */
                fence_proxy_async_global();
            }
            /* This arrival comes after wait_count: a consumer that sees the stage full then also
             * sees the results of the rows tasks. */
            mbarrier_arrive_expect_tx(to_s,
                                      S::Q::bytes + (Tile::PAIR ? 0 : S::O::bytes) + S::STATS);
            bulk_load(smem_s + S::STATS_AT + stage * S::STATS,
                      (const char *)g.stats + (int64_t)stats_tile * S::STATS, S::STATS, to_s);
        }
        __syncwarp();
        if (incomplete) {
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
                const smem_addr to_s = incomplete ? raw_s : o_ring.full(n);
                mbarrier_arrive_expect_tx(to_s, S::O::bytes);
                load_panels<typename S::O>(o_s, &x.grad_out, row, at.head, b, to_s);
            }
            __syncwarp();
            if (incomplete) {
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

/* One warp of each block of a pair sends dS of a step to the other block, once warpgroup 1 has
 * stored it.
 *
 * There is no signal that dS has been read. Instead, a block stores dS of step n + 2 only after it
 * has received the other block's dS of step n + 1. The other block stored that after both of its
 * warpgroups had finished step n. For the same reason two alternating named barriers are enough.
 *
 * The warps that sum the gradient of a bias have also read dS of step n by then. They arrive at
 * this warp's named barrier of step n + 1. Only after that barrier does this warp let the mbarrier
 * for the other block's dS of step n + 1 complete. */
template <class Tile>
__device__ __forceinline__ void send_ds(const BwdHopperParams &x, const BwdWork &w,
                                        smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    const int steps = steps_of<Tile>(x.g, w);
    const unsigned peer = w.rank ^ 1;
#pragma unroll 1
    for (int n = 0; n < steps; ++n) {
        bar_sync(BAR_SENT_DS + (n & 1), BWD_SENT_DS<Tile>);
        if (laneid() == 0) {
            const int at = (n & 1) * S::Scores::bytes;
            const smem_addr full_s = smem_s + S::peer_full(n);
            /* for what the other block sends */
            mbarrier_arrive_expect_tx(full_s, S::Scores::bytes);
            bulk_copy_cluster(mapa(smem_s + S::PEER_DS_AT + at, peer), smem_s + S::DS_AT + at,
                              S::Scores::bytes, mapa(full_s, peer));
        }
        __syncwarp();
    }
}

/* One thread of an ordered kernel runs this. It signals the consumers when this block may add to
 * the tile of a step, and signals the next block when they have added. It waits only for blocks
 * with lower numbers.
 *
 * While the consumers add, it already polls the counter of the next tile. If that tile is ready, it
 * signals the consumers before it releases the present tile, because the release waits until the
 * additions are done. The consumers are then at most one step ahead. */
template <class Tile>
__device__ __forceinline__ void keep_order(const BwdHopperParams &x, const BwdWork &w,
                                           smem_addr smem_s) {
    typedef BwdSmem<Tile> S;
    const Bwd &g = x.g;
    /* keys of a block, or of a pair, whose blocks add to different halves of the columns */
    constexpr int KEYS = S::BLOCKS * Tile::BKV;
    const int steps = w.tiles * g.p.group;
    if (steps == 0) return;
    BwdOrderedStep at = {w.first_head, w.tile_lo + (x.up ? 0 : w.tiles - 1)};
    unsigned *turn = NULL;
    /* Sets `turn` to the counter of the current tile and returns how many blocks add to this tile
     * before this one. The blocks whose keys the tile's rows see are neighbours. Those on one side
     * of this block add first. */
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
