/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_producer.cuh: the half of flash_attn_fwd_sm90a that finds tiles and loads them: what a block
 * keeps in shared memory, which tile comes next and which keys it sees, and the loads of Q, K and V
 * by TMA. */
#ifndef GPUKERN_CUDA_FWD_PRODUCER_CUH
#define GPUKERN_CUDA_FWD_PRODUCER_CUH

#include "../../ptx/griddepcontrol.cuh"
#include "../../ptx/laneid.cuh"
#include "../../ptx/tma.cuh"
#include "../../tile/tma_ring.cuh"
#include "../../layout/wgmma.cuh"
#include "fwd_schedule.cuh"
#include "fwd_score.cuh"
#include "fwd_work.cuh"
#include "../score.cuh"
#include "../tma_shape.cuh"

/* ---- 1. parameters and shared memory --------------------------------------------------------- */
struct FwdHopperParams {
    /* boxes of 64 columns by BQ (a head's, by stacked heads), BKV, BKV, 16 rows */
    CUtensorMap q, k, v, out;
    FwdParams fwd;
    FwdSchedule schedule;
    Sequence seq; /* every sequence, unless `reads` */
    ScoreUnits units;
    /* a sequence's heads, as tiles count them; query heads of a kv head */
    Divisor by_batch, by_group;
    bool reads;  /* tensors say where a tile's keys lie, or what becomes of its scores */
    bool simple; /* results are whole rows of one head, without sinks */
    int stacked; /* query heads of a tile: row r of it is query r % seq_q of head r / seq_q. 1: r is
                    the query */
    Divisor by_head; /* rows of a head in a tile; of one head more than there are */
    int q_bytes;     /* of a tile, as TMA counts */
    int box_log2;    /* InBoxes: keys of a box */
};

/* Whether the keys of a tile come in boxes, each of a page: then tiles begin where a box does,
 * which may be before the first key that any row of the sequence sees. */
template <class Tile> struct InBoxes {
    static constexpr bool value = false;
};

/* A tile of queries, written by the producer beside Q. */
struct __align__(16) FwdTile {
    /* What a consumer needs before anything else, one load. own: blocks of keys that the rows of
     * each warpgroup see; blocks: of the tile, -1: there are no more tiles */
    struct __align__(16) {
        int own[3], blocks;
    } steps;
    /* Where the loads begin. b: of a packed call 0 */
    struct __align__(16) {
        int q_row, k_row, head_kv, b;
    } from;
    FwdWork work;
    Sequence seq;
    FwdKeys keys;
    Score score;
    int rows;    /* of all its heads */
    int nearest; /* the block that comes first: fwd_block */
    int ragged;  /* > 0: so many keys of the last block are the sequence's; V's other rows may hold
                    NaN */
};

/* The block of keys that a tile takes at its step `at`. */
template <bool MODIFIED> __device__ __forceinline__ int block_at(const FwdTile &t, int at) {
    return MODIFIED ? fwd_block(at, t.nearest) : at;
}

/* Row `row` of a tile, that of a query past the sequence too. */
struct FwdRow {
    int head, i;
};
__device__ __forceinline__ FwdRow row_of(const FwdHopperParams &x, const FwdTile &t, int row) {
    const int at = t.work.i0 + row, head = (int)x.by_head.into((unsigned)at);
    return {t.work.head + head, at - head * (int)x.by_head.by};
}

template <class Tile> struct Smem {
    static constexpr int BQ = Tile::WARPGROUPS * 64, THREADS = (Tile::WARPGROUPS + 1) * 128;
    typedef wgmma_panels<BQ, Tile::HEAD_DIM> Q;
    typedef wgmma_panels<Tile::BKV, Tile::HEAD_DIM> K;
    typedef wgmma_panels<Tile::BKV, Tile::HEAD_DIM_V> V;
    typedef tma_ring<Tile::Q_BUFFERS> QRing;
    static constexpr int TILE_STAGES = 4; /* the finder is slower than a tile of few keys */
    typedef tma_ring<TILE_STAGES> TileRing;
    typedef tma_ring<Tile::STAGES> KvRing;
    static constexpr int K_AT = Tile::Q_BUFFERS * Q::bytes, V_AT = K_AT + Tile::STAGES * K::bytes;
    static constexpr int Q_RING = V_AT + Tile::STAGES * V::bytes, K_RING = Q_RING + QRing::bytes;
    static constexpr int V_RING = K_RING + KvRing::bytes, TILE_RING = V_RING + KvRing::bytes;
    static constexpr int OVER = TILE_RING + TileRing::bytes, TILES = OVER + 16;
    static constexpr int BYTES = TILES + TILE_STAGES * (int)sizeof(FwdTile);
    static_assert(BYTES <= 227 * 1024, "a block has an SM's shared memory");
    static_assert(V::panels <= Q::panels, "out takes Q's place");
    static_assert(Tile::WARPGROUPS * Tile::CONSUMER_REGISTERS + Tile::PRODUCER_REGISTERS <=
                      65536 / THREADS / 8 * 8 * (Tile::WARPGROUPS + 1),
                  "registers are moved, not made: setmaxnreg would wait for ever");
};

/* ---- 2. the producer ------------------------------------------------------------------------- */
/* Reports lengths of a packed call that cannot be, also of sequences that have no tile. One
 * warp. */
__device__ __forceinline__ void check_sequences(const Problem &p) {
#pragma unroll 1
    for (int b = laneid(); b < p.batch; b += 32) sequence_of(p, b);
}

/* Tiles of sequence b of a packed call. */
template <int BQ> __device__ __forceinline__ int packed_tiles(const Problem &p, int b) {
    const int q0 = min(max(p.cu_q[b * p.cu_q_step], 0), p.total_q);
    const int end = min(max(p.cu_q[(b + 1) * p.cu_q_step], q0), p.total_q);
    return (min(end - q0, p.seq_q) + BQ - 1) / BQ;
}

/* The sequence that a unit of a packed call belongs to, -1: there is no such unit. unit: becomes
 * its number within the sequence. All lanes; 32 sequences at a time, a lane each. */
template <int BQ>
__device__ __forceinline__ int packed_owner(const Problem &p, const FwdSchedule &s, int &unit) {
#pragma unroll 1
    for (int first = 0; first < p.batch; first += 32) {
        const int b = first + laneid();
        const int units =
            b < p.batch ? fwd_units_of(packed_tiles<BQ>(p, b), s.paired) * s.splits * s.heads : 0;
        int end = units;
#pragma unroll 1
        for (int step = 1; step < 32; step *= 2) {
            const int left = __shfl_up_sync(0xffffffffu, end, step);
            if (laneid() >= step) end += left;
        }
        const unsigned later = __ballot_sync(0xffffffffu, unit < end);
        if (later) {
            const int owner = __ffs(later) - 1;
            unit -= __shfl_sync(0xffffffffu, end - units, owner);
            return first + owner;
        }
        unit -= __shfl_sync(0xffffffffu, end, 31);
    }
    return -1;
}

/* Where the tile lies that a block takes at step i. i0 < 0: a unit of a packed call has no second
 * one; false: there are no more. All lanes. */
template <int BQ>
__device__ __forceinline__ bool place_tile(const FwdHopperParams &x, int i, FwdWork *work) {
    const Problem &p = x.fwd.problem;
    FwdWork found;
    if (p.cu_q) {
        int unit = blockIdx.x + i / 2 * x.schedule.blocks;
        const int b = unit < x.schedule.units ? packed_owner<BQ>(p, x.schedule, unit) : -1;
        if (b < 0) return false;
        const FwdUnit u = fwd_unit(packed_tiles<BQ>(p, b), x.schedule, unit);
        found = {b, u.head * x.stacked, (i & 1 ? u.tile[1] : u.tile[0]) * BQ, u.split};
    } else {
        const FwdPlace at = fwd_place_of(x.schedule, blockIdx.x, i);
        if (at.head < 0) return false;
        const int b = (int)x.by_batch.into((unsigned)at.head);
        found = {b, (at.head - b * (int)x.by_batch.by) * x.stacked, at.tile * BQ, at.split};
    }
    if (laneid() == 0) *work = found;
    __syncwarp();
    return true;
}

/* Which keys the tile's rows see; stacked heads are all alike. One thread. */
template <class Tile, bool MODIFIED>
__device__ __forceinline__ void describe_keys(FwdTile &t, const FwdHopperParams &x) {
    const int rows = min(t.seq.seq_q - t.work.i0, Smem<Tile>::BQ); /* queries */
    const int filled = x.stacked > 1 ? x.stacked * x.fwd.problem.seq_q : rows;
    const FwdKeys keys = fwd_keys<Tile::BKV>(x.fwd, t.seq.span, t.work.i0, rows, t.work.split,
                                             InBoxes<Tile>::value ? 1 << x.box_log2 : 1);
    /* TMA makes rows past a dense tensor zero; keys that no row of the sequence sees may hold
     * anything */
    const int seen = t.seq.span.hi(t.seq.seq_q - 1),
              left = seen - keys.lo - (keys.tiles - 1) * Tile::BKV;
    t.keys = keys;
    t.rows = filled;
    t.steps.blocks = keys.tiles;
    t.from = {t.seq.q0 + t.work.i0, t.seq.k0 + keys.lo, (int)x.by_group.into((unsigned)t.work.head),
              x.fwd.problem.cu_q ? 0 : t.work.b};
#pragma unroll 1
    for (int g = 0; g < Tile::WARPGROUPS; ++g) {
        const int last = x.stacked > 1 ? rows - 1 : min(64 * g + 63, rows - 1);
        const int sees = max(t.seq.span.hi(t.work.i0 + last) - t.keys.lo, 0);
        t.steps.own[g] =
            64 * g < filled ? min(t.keys.tiles, (sees + Tile::BKV - 1) / Tile::BKV) : 0;
    }
    if (MODIFIED) {
        const int stands = t.work.i0 + rows - 1 + span_clamp(t.seq.diagonal) -
                           keys.lo; /* the last row, among the keys */
        t.nearest = x.units.sloped ? min(max(stands, 0) / Tile::BKV, max(keys.tiles - 1, 0)) : 0;
    }
    t.ragged = (x.fwd.problem.cu_q || seen < x.fwd.problem.seq_k) && left < Tile::BKV ? left : 0;
}

/* Tile n's description is complete. One thread. */
template <class Tile, bool MODIFIED>
__device__ __forceinline__ void describe(FwdTile &t, const FwdHopperParams &x, smem_addr full_s) {
    describe_keys<Tile, MODIFIED>(t, x);
    if (MODIFIED) t.score = score_of(x.fwd.problem, t.seq, t.work.b, t.work.head);
    mbarrier_arrive(full_s);
}

/* One warp describes tile after tile in shared memory, while the tile before is still loaded.
 * Registers are few here: what can be read or worked out again is. sequence(b): where sequence b
 * lies, of calls that read it from tensors. */
template <class Tile, bool MODIFIED, class SequenceOf>
__device__ __forceinline__ void find_tiles(const FwdHopperParams &x, unsigned char *smem,
                                           smem_addr smem_s, const SequenceOf &sequence) {
    typedef Smem<Tile> S;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    int n = 0;
    if (!x.reads) { /* every sequence is alike: one lane, and no wait */
#pragma unroll 1
        for (;; ++n) {
            described.wait_empty(n);
            FwdTile &t = ((FwdTile *)(smem + S::TILES))[n % S::TILE_STAGES];
            if (!place_tile<S::BQ>(x, n, &t.work)) break;
            if (laneid() == 0) {
                t.seq = x.seq;
                describe<Tile, MODIFIED>(t, x, described.full(n));
            }
            __syncwarp();
        }
    } else {
        griddepcontrol_wait(); /* what the kernel before wrote of them is there */
#pragma unroll 1
        for (int i = 0;; ++i) {
            described.wait_empty(n);
            FwdTile &t = ((FwdTile *)(smem + S::TILES))[n % S::TILE_STAGES];
            if (!place_tile<S::BQ>(x, i, &t.work)) break;
            if (t.work.i0 >= 0 && laneid() == 0) t.seq = sequence(t.work.b);
            __syncwarp();
            if (t.work.i0 >= 0 && t.seq.seq_q > t.work.i0) {
                if (laneid() == 0) describe<Tile, MODIFIED>(t, x, described.full(n));
                ++n;
            }
            __syncwarp();
        }
    }
    if (laneid() == 0) {
        ((FwdTile *)(smem + S::TILES))[n % S::TILE_STAGES].steps.blocks = -1;
        mbarrier_arrive(described.full(n));
    }
}

/* One thread loads. Q of tile n, by boxes of so many columns; no load where the tile sees no key or
 * there is no tile. */
template <class Tile, int COLUMNS = 64>
__device__ __forceinline__ void load_q(const FwdHopperParams &x, const FwdTile &t, smem_addr smem_s,
                                       int n) {
    typedef typename Smem<Tile>::Q Q;
    const tma_steps<Tile::Q_BUFFERS> q = {smem_s + Smem<Tile>::Q_RING};
    q.wait_empty(n);
    if (t.steps.blocks > 0) {
        mbarrier_arrive_expect_tx(q.full(n), x.q_bytes);
        load_panels<Q, COLUMNS>(smem_s + q.stage(n) * Q::bytes, &x.q, t.from.q_row, t.work.head,
                                t.from.b, q.full(n));
    } else {
        mbarrier_arrive(q.full(n));
    }
}

/* K and V in the order in which the consumers ask: K_0, K_1, V_0, K_2, V_1, ..; where there are two
 * buffers the next tile's Q after K_2 and V_1. */
template <class Tile, bool MODIFIED>
__device__ __forceinline__ void load_tiles(const FwdHopperParams &x, const FwdTile *tiles,
                                           smem_addr smem_s) {
    typedef Smem<Tile> S;
    constexpr bool AHEAD = Tile::Q_BUFFERS == 2;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const tma_steps<Tile::STAGES> k = {smem_s + S::K_RING}, v = {smem_s + S::V_RING};
    described.wait_full(0);
    if (AHEAD) load_q<Tile>(x, tiles[0], smem_s, 0);
    int n = 0, step = 0; /* step: blocks of keys of earlier tiles */
#pragma unroll 1
    for (; tiles[n % S::TILE_STAGES].steps.blocks >= 0; ++n) {
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int blocks = t.steps.blocks;
#pragma unroll 1
        for (int j = 0; j <= blocks; ++j) {
            if (j < blocks) {
                const int at = step + j;
                k.wait_empty(at);
                mbarrier_arrive_expect_tx(k.full(at), S::K::bytes);
                load_panels<typename S::K>(smem_s + S::K_AT + k.stage(at) * S::K::bytes, &x.k,
                                           t.from.k_row + block_at<MODIFIED>(t, j) * Tile::BKV,
                                           t.from.head_kv, t.from.b, k.full(at));
            }
            if (!AHEAD && j == 0) load_q<Tile>(x, t, smem_s, n);
            if (j > 0) {
                const int at = step + j - 1;
                v.wait_empty(at);
                mbarrier_arrive_expect_tx(v.full(at), S::V::bytes);
                load_panels<typename S::V>(smem_s + S::V_AT + v.stage(at) * S::V::bytes, &x.v,
                                           t.from.k_row + block_at<MODIFIED>(t, j - 1) * Tile::BKV,
                                           t.from.head_kv, t.from.b, v.full(at));
            }
            /* its buffer is free once all have taken their first block; what they need sooner goes
             * first */
            if (AHEAD && j == min(2, blocks)) {
                described.wait_full(n + 1);
                load_q<Tile>(x, tiles[(n + 1) % S::TILE_STAGES], smem_s, n + 1);
            }
        }
        step += blocks;
        mbarrier_arrive(described.empty(n));
        if (!AHEAD) described.wait_full(n + 1);
    }
    /* tells the consumers that there is no more */
    if (!AHEAD) load_q<Tile>(x, tiles[n % S::TILE_STAGES], smem_s, n);
}

#endif
