/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_producer.cuh: the producer warpgroup of Hopper's forward kernels, and the layout of a block's
 * shared memory (Smem). fwd_kernel.cuh is the kernel; fwd_masked.cuh and fwd_pages.cuh extend it.
 *
 * A block stays on its SM and processes tile after tile. One warp (find_tiles) finds the block's
 * next tile of queries and the keys that its rows see. It writes this description (FwdTile) into
 * shared memory, up to four tiles ahead, or two with a mask. One thread of another warp
 * (load_tiles) reads the descriptions and loads Q, K and V by TMA. */
#ifndef GPUKERN_CUDA_FWD_PRODUCER_CUH
#define GPUKERN_CUDA_FWD_PRODUCER_CUH

#include "../../../core/attn_mask.h"
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
    /* The TMA boxes have 64 columns. Their rows are BQ for q, BKV for k and v, and 16 for out. If a
     * tile has several heads, the box of q has seq_q rows of each. */
    CUtensorMap q, k, v, out;
    FwdParams fwd;
    FwdSchedule schedule;
    Sequence seq; /* the same for every sequence, unless `reads` is set */
    ScoreUnits units;
    /* tile heads in a sequence; query heads per kv head */
    Divisor by_batch, by_group;
    bool reads;  /* device tensors give lengths, positions or slopes */
    bool simple; /* each warp's results are whole rows of one head; no sinks, no splits */
    /* Query heads in a tile. Row r of a tile is query r % seq_q of head r / seq_q. With one head,
     * row r is query r. */
    int tile_heads;
    /* by the rows of a head in a tile; with one head, a divisor whose quotient is always 0 */
    Divisor by_head;
    int q_bytes;  /* bytes of a tile's Q, as TMA counts them */
    int box_log2; /* if InBoxes: log2 of the keys of a box */
};

/* A stored mask (attn_mask.h), and the order in which tiles of queries are processed. A free block
 * takes the next tile from a global counter. Heads are scheduled in groups whose K and V together
 * are about as large as L2. Within a group, tiles with long lists come first. All groups have the
 * same number of heads except the first, which may have fewer. So the call ends with many short
 * tiles. */
struct FwdMaskParams {
    const int32_t *data;
    int64_t batch, head; /* strides, 0 where the mask broadcasts */
    gk_mask_layout at;
    gk_mask_store store;
    int *next; /* workspace, cleared before the launch: the number of tiles taken so far */
    int units, tiles_q, tiles_k; /* units: the tiles of all heads */
    /* the last block of keys if it has fewer than 128 keys, otherwise -1 */
    int incomplete_block;
    int first; /* heads of the first group; each other group has by_width.by heads */
    Divisor by_first, by_units, by_width; /* by_units: tiles of a group other than the first */
};

/* A bias. BIAS 1: [.., Sq, Sk] in the operands' dtype. BIAS 2: a bias of keys [.., 1, Sk]. BIAS 3:
 * a bias by distance. With BIAS 2 and 3, `data` is in the workspace, where lift_keys_kernel or
 * prepare_distances_kernel has written it. */
struct FwdBiasParams {
    const void *data;
    int64_t batch, head, row; /* strides in elements; with BIAS 2, batch and head in bytes */
    int of_batch, of_head;    /* 0 if the bias broadcasts over the batch, over the heads; else 1 */
    /* BIAS 2: the 16-bit number by which the product multiplies the parts of a bias */
    uint32_t one;
    int zero; /* BIAS 3: the index of distance 0 */
};

struct FwdMaskedParams : FwdHopperParams {
    CUtensorMap bias_map; /* boxes of 64 columns x 64 rows */
    FwdMaskParams mask;
    FwdBiasParams bias;
    /* Workspace, one byte for each tile, cleared before the launch. The kernel sets it if the
     * tile's result holds a NaN or inf (fwd_mend.cuh). */
    uint8_t *spoilt;
};

template <class Tile, bool SCORES = (ScoresOf<Tile>::MASK || ScoresOf<Tile>::BIAS)>
struct ParamsOf {
    typedef FwdHopperParams type;
};
template <class Tile> struct ParamsOf<Tile, true> {
    typedef FwdMaskedParams type;
};

/* True if a tile's keys are loaded in boxes, each from one page. The tile's first key is then the
 * first of a box, which may lie before the first key that any row of the sequence sees. */
template <class Tile> struct InBoxes {
    static constexpr bool value = false;
};

/* The description of a tile of queries, written by the producer. */
struct __align__(16) FwdTile {
    /* A consumer reads this part first, in one load.
     *
     * own: for each warpgroup, the number of key blocks that its rows see.
     *
     * blocks: the number of key blocks of the tile; -1 means that there are no more tiles. */
    struct __align__(16) {
        int own[3], blocks;
    } steps;
    /* Coordinates at which the loads begin; b is 0 in a packed call. */
    struct __align__(16) {
        int q_row, k_row, head_kv, b;
    } from;
    FwdWork work;
    Sequence seq;
    FwdKeys keys;
    Score score;
    int rows;    /* rows in use, over all heads of the tile */
    int nearest; /* the key block that is taken first (fwd_block) */
    /* If positive, only this many keys of the last block belong to the sequence. Later rows of V
     * may hold NaN. */
    int incomplete;
};

/* The additional description of a tile with a stored mask.
 *
 * data: the mask of the tile's head. tile: the tile's index among the mask's tiles of queries.
 *
 * partial: one bit for each entry of the tile's list, 1 if the block is partial. */
struct FwdMarks {
    const int32_t *data;
    int tile;
    uint32_t partial[FWD_MASK_BLOCKS / 32];
    __device__ __forceinline__ bool is_partial(int entry) const {
        return partial[entry / 32] >> entry % 32 & 1;
    }
};

/* The key block that a tile takes at step `at`. */
template <bool MODIFIED> __device__ __forceinline__ int block_at(const FwdTile &t, int at) {
    return MODIFIED ? fwd_block(at, t.nearest) : at;
}

/* The head and query of a tile's row. The query may lie past the end of the sequence. */
struct FwdRow {
    int head, i;
};
__device__ __forceinline__ FwdRow row_of(const FwdHopperParams &x, const FwdTile &t, int row) {
    const int at = t.work.i0 + row, head = (int)x.by_head.into((unsigned)at);
    return {t.work.head + head, at - head * (int)x.by_head.by};
}

/* LIFT (Smem): eight keys have two 8 x 8 matrices of additional columns, 256 bytes. */
constexpr int LIFT_ROWS = 8;

template <class Tile> struct Smem {
    static constexpr int BQ = Tile::WARPGROUPS * 64, THREADS = (Tile::WARPGROUPS + 1) * 128;
    typedef wgmma_panels<BQ, Tile::HEAD_DIM> Q;
    typedef wgmma_panels<Tile::BKV, Tile::HEAD_DIM> K;
    typedef wgmma_panels<Tile::BKV, Tile::HEAD_DIM_V> V;
    typedef tma_ring<Tile::Q_BUFFERS> QRing;
    /* How a tile treats the mask and the bias.
     *
     * BIAS: the consumers add a bias [.., Sq, Sk] to the exponents.
     *
     * LIFT: the bias of keys is 16 additional columns of K.
     *
     * TABLE: a bias by distance. S starts as this bias, and the product is added to it.
     *
     * SCORED: any of these or a mask. */
    static constexpr bool MASK = ScoresOf<Tile>::MASK != 0, LIFT = ScoresOf<Tile>::BIAS == 2,
                          TABLE = ScoresOf<Tile>::BIAS == 3, BIAS = ScoresOf<Tile>::BIAS == 1,
                          SCORED = MASK || LIFT || TABLE || BIAS;
    /* MASK: the number of steps that one block of the mask's list takes. With two, the first step
     * has the first 64 keys and the low halves of the words. The last block takes one step if it
     * has no more keys than that. */
    static constexpr int STEPS = MASK ? GK_MASK_TILE / Tile::BKV : 1;
    static_assert(!MASK || (STEPS <= 2 && STEPS * Tile::BKV == GK_MASK_TILE),
                  "a step takes a block of the list or half of one");
    /* Descriptions that may be written ahead. Finding a tile takes longer than multiplying one with
     * few keys. With a mask, blocks compete for tiles, and a block that finds far ahead takes tiles
     * that an idle block could compute. */
    static constexpr int TILE_STAGES = MASK ? 2 : 4;
    typedef tma_ring<TILE_STAGES> TileRing;
    typedef tma_ring<Tile::STAGES> KvRing;
    static constexpr int K_AT = Tile::Q_BUFFERS * Q::bytes, V_AT = K_AT + Tile::STAGES * K::bytes;
    typedef wgmma_panels<64, Tile::BKV> Bias; /* the bias of a warpgroup's rows in one step */
    /* LIFT: the 16 additional columns of K in each stage, in WGMMA's layout without swizzle: 8 x 8
     * matrices of 128 bytes, two for each 8 keys. The other operand lies before these stages. It
     * has 8 rows, which the product reads again for every 8 rows of Q. Each row has `one` in three
     * columns and 0 in the others. (compute-sanitizer takes such a read for one of 2 KB, so these
     * rows cannot lie at the end.) */
    static constexpr int LIFT_BYTES = Tile::BKV * 32, ONES_BYTES = 256;
    /* TABLE: the biases of a block's distances, in two copies. The second copy begins one element
     * later, so that every pair of columns is an aligned load in one of them. */
    static constexpr int COPY_BYTES = (BQ + Tile::BKV) * 4, TABLE_STAGES = 2;
    static constexpr int BIAS_AT = V_AT + Tile::STAGES * V::bytes;
    static constexpr int ONES_AT = BIAS_AT, LIFT_AT = ONES_AT + ONES_BYTES;
    static constexpr int Q_RING = BIAS_AT + (TABLE  ? TABLE_STAGES * 2 * COPY_BYTES
                                             : BIAS ? Tile::WARPGROUPS * Bias::bytes
                                             : LIFT ? Tile::STAGES * LIFT_BYTES + ONES_BYTES
                                                    : 0),
                         K_RING = Q_RING + QRing::bytes;
    static constexpr int V_RING = K_RING + KvRing::bytes, TILE_RING = V_RING + KvRing::bytes;
    static constexpr int OVER = TILE_RING + TileRing::bytes, TILES = OVER + 16;
    /* With MASK, the FwdMarks follow the FwdTiles, each in the space of one FwdTile (marks_of).
     * Then come the words of partial blocks, in stages of 2 KB. With BIAS and steps of 128 keys
     * there is room for one stage only. */
    static constexpr int WORDS_STAGES = BIAS && STEPS == 1 ? 1 : 2,
                         WORDS_BYTES = GK_MASK_BLOCK_INTS * 4;
    static constexpr int WORDS_AT = TILES + TILE_STAGES * (MASK ? 2 : 1) * (int)sizeof(FwdTile);
    static constexpr int WORDS_RING = WORDS_AT + (MASK ? WORDS_STAGES * WORDS_BYTES : 0);
    /* BIAS: a ring of one stage for each warpgroup; TABLE: one ring of two stages */
    static constexpr int BIAS_RING = WORDS_RING + (MASK ? WORDS_STAGES * 16 : 0);
    /* MASK: the number of tiles that warp 1 has described, and the number that warp 2 has read.
     * They are in shared memory, because the producer has only 24 registers. */
    static constexpr int COUNTS = BIAS_RING + (BIAS || TABLE ? 32 : 0);
    static constexpr int BYTES = COUNTS + (MASK ? 16 : 0);
    static_assert(sizeof(FwdMarks) <= sizeof(FwdTile), "marks take the place of a tile");
    __device__ static __forceinline__ FwdMarks &marks_of(FwdTile &t) {
        return *(FwdMarks *)(&t + TILE_STAGES);
    }
    __device__ static __forceinline__ const FwdMarks &marks_of(const FwdTile &t) {
        return *(const FwdMarks *)(&t + TILE_STAGES);
    }
    static_assert(BYTES <= 227 * 1024, "a block has an SM's shared memory");
    static_assert(V::panels <= Q::panels, "out takes Q's place");
    static_assert(!SCORED || Tile::WARPGROUPS == 2, "a ring for each warpgroup");
    static_assert(Tile::WARPGROUPS * Tile::CONSUMER_REGISTERS + Tile::PRODUCER_REGISTERS <=
                      65536 / THREADS / 8 * 8 * (Tile::WARPGROUPS + 1),
                  "registers are moved, not made: setmaxnreg would wait for ever");
};

/* ---- 2. the producer ------------------------------------------------------------------------- */
/* Reports impossible cu_seqlens of a packed call, also for sequences without a tile. One warp. */
__device__ __forceinline__ void check_sequences(const Problem &p) {
#pragma unroll 1
    for (int b = laneid(); b < p.batch; b += 32) sequence_of(p, b);
}

/* The number of tiles of sequence b in a packed call. */
template <int BQ> __device__ __forceinline__ int packed_tiles(const Problem &p, int b) {
    const int q0 = min(max(p.cu_q[b * p.cu_q_step], 0), p.total_q);
    const int end = min(max(p.cu_q[(b + 1) * p.cu_q_step], q0), p.total_q);
    return (min(end - q0, p.seq_q) + BQ - 1) / BQ;
}

/* The sequence that contains work unit `unit` of a packed call, or -1. On return `unit` is the
 * index within that sequence. All lanes of a warp take part; each pass looks at 32 sequences. */
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

/* Finds the i-th tile of the block. Returns false if there are no more. work->i0 < 0 means that
 * this work unit of a packed call has no second tile. All lanes take part. */
template <int BQ>
__device__ __forceinline__ bool place_tile(const FwdHopperParams &x, int i, FwdWork *work) {
    const Problem &p = x.fwd.problem;
    FwdWork found;
    if (p.cu_q) {
        int unit = blockIdx.x + i / 2 * x.schedule.blocks;
        const int b = unit < x.schedule.units ? packed_owner<BQ>(p, x.schedule, unit) : -1;
        if (b < 0) return false;
        const FwdUnit u = fwd_unit(packed_tiles<BQ>(p, b), x.schedule, unit);
        found = {b, u.head * x.tile_heads, (i & 1 ? u.tile[1] : u.tile[0]) * BQ, u.split};
    } else {
        const FwdPlace at = fwd_place_of(x.schedule, blockIdx.x, i);
        if (at.head < 0) return false;
        const int b = (int)x.by_batch.into((unsigned)at.head);
        found = {b, (at.head - b * (int)x.by_batch.by) * x.tile_heads, at.tile * BQ, at.split};
    }
    if (laneid() == 0) *work = found;
    __syncwarp();
    return true;
}

/* Fills in which keys the tile's rows see. All heads of a tile see the same keys. One thread. */
template <class Tile, bool MODIFIED>
__device__ __forceinline__ void describe_keys(FwdTile &t, const FwdHopperParams &x) {
    const int rows = min(t.seq.seq_q - t.work.i0, Smem<Tile>::BQ); /* queries */
    const int filled = x.tile_heads > 1 ? x.tile_heads * x.fwd.problem.seq_q : rows;
    const FwdKeys keys =
        fwd_keys<Tile::BKV>(x.fwd, t.seq.span, t.work.i0, rows, t.work.split,
                            InBoxes<Tile>::value        ? 1 << x.box_log2
                            : ScoresOf<Tile>::BIAS == 3 ? 4 /* 16 bytes of the table */
                            : ScoresOf<Tile>::BIAS == 2 ? LIFT_ROWS
                            : ScoresOf<Tile>::BIAS == 1 ? 8 /* 16 bytes, which TMA's columns need */
                                                        : 1);
    /* TMA fills rows past the end of a dense tensor with zeros. Other keys that no row of the
     * sequence sees may hold anything, including NaN. */
    const int seen = t.seq.span.hi(t.seq.seq_q - 1),
              left = seen - keys.lo - (keys.tiles - 1) * Tile::BKV;
    t.keys = keys;
    t.rows = filled;
    t.steps.blocks = keys.tiles;
    t.from = {t.seq.q0 + t.work.i0, t.seq.k0 + keys.lo, (int)x.by_group.into((unsigned)t.work.head),
              x.fwd.problem.cu_q ? 0 : t.work.b};
#pragma unroll 1
    for (int g = 0; g < Tile::WARPGROUPS; ++g) {
        const int last = x.tile_heads > 1 ? rows - 1 : min(64 * g + 63, rows - 1);
        const int sees = max(t.seq.span.hi(t.work.i0 + last) - t.keys.lo, 0);
        t.steps.own[g] =
            64 * g < filled ? min(t.keys.tiles, (sees + Tile::BKV - 1) / Tile::BKV) : 0;
    }
    if (MODIFIED) {
        /* the last row's position, relative to the first key */
        const int stands = t.work.i0 + rows - 1 + span_clamp(t.seq.diagonal) - keys.lo;
        t.nearest = x.units.has_alibi ? min(max(stands, 0) / Tile::BKV, max(keys.tiles - 1, 0)) : 0;
    }
    t.incomplete =
        (x.fwd.problem.cu_q || seen < x.fwd.problem.seq_k) && left < Tile::BKV ? left : 0;
}

/* Completes the description of a tile and marks its stage full. One thread. */
template <class Tile, bool MODIFIED>
__device__ __forceinline__ void describe(FwdTile &t, const FwdHopperParams &x, smem_addr full_s) {
    describe_keys<Tile, MODIFIED>(t, x);
    if (MODIFIED) t.score = score_of(x.fwd.problem, t.seq, t.work.b, t.work.head);
    mbarrier_arrive(full_s);
}

/* One warp writes tile descriptions while other warps load and compute earlier tiles. The producer
 * has few registers, so values are recomputed or reread instead of kept. sequence(b): the range of
 * sequence b, in calls that read it from device tensors. */
template <class Tile, bool MODIFIED, class SequenceOf>
__device__ __forceinline__ void find_tiles(const FwdHopperParams &x, unsigned char *smem,
                                           smem_addr smem_s, const SequenceOf &sequence) {
    typedef Smem<Tile> S;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    int n = 0;
    /* All sequences are alike. One lane does the work, and it need not wait for the previous
     * kernel. */
    if (!x.reads) {
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
        griddepcontrol_wait(); /* wait until the previous kernel has written those tensors */
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

/* Loads Q of tile n in boxes of COLUMNS columns. One thread. For a tile without keys, or for the
 * end marker, it completes the barrier without a load. */
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

/* The block of keys that a tile takes at step j. load_tiles calls key(t, j) for K at step j, then
 * value(t, j - 1) for V of the previous step. ListedBlocks (fwd_masked.cuh) reads a mask's list
 * instead. */
template <bool MODIFIED> struct OrderedBlocks {
    __device__ __forceinline__ int key(const FwdTile &t, int j) const {
        return block_at<MODIFIED>(t, j);
    }
    __device__ __forceinline__ int value(const FwdTile &t, int j) const {
        return block_at<MODIFIED>(t, j);
    }
};

/* Loads K and V in the order in which the consumers read them: K_0, K_1, V_0, K_2, V_1, and so on.
 * With two Q buffers, the next tile's Q follows after K_2 and V_1 of this tile. */
template <class Tile, bool MODIFIED, class Blocks = OrderedBlocks<MODIFIED>>
__device__ __forceinline__ void load_tiles(const FwdHopperParams &x, const FwdTile *tiles,
                                           smem_addr smem_s, Blocks of = Blocks()) {
    typedef Smem<Tile> S;
    constexpr bool AHEAD = Tile::Q_BUFFERS == 2;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const tma_steps<Tile::STAGES> k = {smem_s + S::K_RING}, v = {smem_s + S::V_RING};
    described.wait_full(0);
    if (AHEAD) load_q<Tile>(x, tiles[0], smem_s, 0);
    int n = 0, step = 0; /* step: key blocks of earlier tiles */
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
                                           t.from.k_row + of.key(t, j) * Tile::BKV, t.from.head_kv,
                                           t.from.b, k.full(at));
            }
            if (!AHEAD && j == 0) load_q<Tile>(x, t, smem_s, n);
            if (j > 0) {
                const int at = step + j - 1;
                v.wait_empty(at);
                mbarrier_arrive_expect_tx(v.full(at), S::V::bytes);
                load_panels<typename S::V>(smem_s + S::V_AT + v.stage(at) * S::V::bytes, &x.v,
                                           t.from.k_row + of.value(t, j - 1) * Tile::BKV,
                                           t.from.head_kv, t.from.b, v.full(at));
            }
            /* The next tile's Q. Its buffer becomes free when all warps have their first weights of
             * this tile. Loads that are needed sooner go first. */
            if (AHEAD && j == min(2, blocks)) {
                described.wait_full(n + 1);
                load_q<Tile>(x, tiles[(n + 1) % S::TILE_STAGES], smem_s, n + 1);
            }
        }
        step += blocks;
        mbarrier_arrive(described.empty(n));
        if (!AHEAD) described.wait_full(n + 1);
    }
    /* the end marker, which signals the end to the consumers */
    if (!AHEAD) load_q<Tile>(x, tiles[n % S::TILE_STAGES], smem_s, n);
}

#endif
