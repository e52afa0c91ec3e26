/* SPDX-License-Identifier: BSD-3-Clause */
/* hopper.cuh: what the schedules of Hopper's gemm share as policies of shell.cuh: parameters,
 * shared memory, the order of tiles, copies, and products from shared memory. Each schedule adds
 * its Consumer in a file of its own: gemm_sm90a (cooperative), gemm_pingpong_sm90a,
 * gemm_swapab_sm90a, gemm_tf32_sm90a. docs/kernels/gemm_hopper.md explains all of it.
 *
 * Grid: as many clusters of two, four or eight blocks as fit the GPU. Each cluster takes tiles
 * of BM x BN in the order of order.cuh until none is left. The tiles of a cluster form a column,
 * which shares b, or a row, which shares a; the plan chooses for each call. Eight tiles are 4 x
 * 2 and share both. Each block copies its part of a shared operand to all blocks that read it,
 * by multicast. Without sharing, 128 x 256 tiles would ask L2 for 12 TB/s, and L2 gives the SMs
 * about 8.
 *
 * Split-K: the two or four blocks of a cluster sum a split of k each, exchange their sums, and
 * store a share of the columns each.
 *
 * The last wave (TAIL): if at most half of the clusters still have tiles, each cluster takes one
 * tile instead of two and each block sums half of k. The second block sends its sums into the
 * first block's ring, which is no longer needed, and the first block adds and stores them.
 *
 * Block: WGS consumer warpgroups, and a producer warpgroup, of which one thread copies.
 *
 * Shared memory (struct Smem): a ring of stages, each K64 times
 *   a [BM][64 k] or [BM / 64][64 k][64 m], b [BN][64 k] or [BN / 64][64 k][64 n]
 * swizzled by 128 bytes (wgmma.cuh; 32 instead of 64 for tf32). The warps' epilogue staging
 * tiles, the exchanged sums and the barriers follow.
 *
 * Launch latency: at a launch neither code nor parameters are in the SM's caches, and every line
 * costs 200 to 300 clocks. So the parameters that the first copy needs lie together, and the
 * simplest store is straight-line code. The next kernel of the stream may start its own prologue
 * meanwhile. */
#ifndef GPUKERN_CUDA_GEMM_HOPPER_CUH
#define GPUKERN_CUDA_GEMM_HOPPER_CUH

#include "../shell.cuh"
#include "../../ptx/cluster.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "../../ptx/laneid.cuh"
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../tile/tma_ring.cuh"
#include "../../layout/wgmma.cuh"
#include "copies.cuh"
#include "epilogue.cuh"
#include "exchange.cuh"
#include "operands.h"
#include "order.cuh"
#include "store_any.cuh"
#include "store_panels.cuh"
#include "store_transposed.cuh"
#include "tiles.h"

namespace {

/* One warpgroup more, for the producer. */
template <class Tile> constexpr int THREADS = (Tile::WGS + 1) * 128;
template <class Tile> constexpr int CLUSTER_OF = Tile::TILES * Tile::SPLITS; /* blocks */
constexpr int K_STEPS = WGMMA_ROW_BYTES / 32; /* WGMMA instructions along k in a K_BLOCK */
template <class T> constexpr int K_BLOCK = WGMMA_ROW_BYTES * 8 / element<T>::bits;
template <class T> constexpr bool TF32 = element<T>::mma == MMA_TF32;
/* Swap-AB with tf32: WGMMA's A comes from registers. */
template <class T, class Tile> constexpr bool SWAPAB_TF32 = TF32<T> && Tile::SWAP_AB;
/* Small M with split-K: a holds the weights and is read once, so L2 may drop it first. */
template <class T, class Tile> constexpr bool ONCE = !TF32<T> && Tile::SWAP_AB && Tile::SPLITS > 1;
/* The tiles of the last wave may be halved along k. */
template <class T, class Tile, int MODE>
constexpr bool TAIL =
    !TF32<T> && Tile::TILES == 2 && Tile::WGS == 2 && !Tile::SWAP_AB && !Tile::PING_PONG &&
    may_halve(Tile::BM, Tile::BN, MODE == (A_ALONG_M | B_ALONG_N));
/* Results leave the staging panels by TMA, under the next tile's products. A block of one
 * warpgroup seldom has a next tile, so it stores from registers, unless BN is no multiple of 64,
 * where panels overlap. */
template <class R, class Tile>
constexpr bool BY_TMA = element<R>::bits == 32 || Tile::WGS > 1 || Tile::BN % 64 != 0;

/* ---- the call and shared memory -------------------------------------------------------------- */
struct GemmParams {
    /* [batch dimensions, up to 3][m or n][k], or the last two swapped */
    CUtensorMap a, b;
    /* Lower boxes for the last rows of m or n of a K-major operand, if they do not fill a box of
     * a or b. */
    CUtensorMap a_end, b_end;
    CUtensorMap out, preact; /* if `plain` and the results leave by TMA */
    /* The parameters that a block reads first are adjacent: each line outside the constant cache
     * costs 200 clocks. */
    TileOrder order; /* of the clusters' tiles */
    unsigned whole;  /* the first `whole` tiles are one task each; the others are halved along k and
                        are two tasks each */
    bool batched;    /* more than one product */
    bool in_row;     /* the tiles of a cluster form a row, not a column */
    /* store_panels serves the call. plain: rows of whole chunks of 16 bytes. unaligned: rows of any
     * alignment, without c. */
    bool plain, unaligned;
    /* Plain, without c, and with an epilogue of few instructions. */
    bool cheap_epilogue;
    /* Rows of whole chunks, and an epilogue that only multiplies by alpha. Also set for swap-AB. */
    bool no_epilogue;
    bool keep; /* swap-AB: keep the results in L2 for the next kernel */
    /* store_any: a lane stores values of one column, because the result's rows are not dense. The
     * epilogue then has rows and columns exchanged. */
    bool across;
    OwnProblem p;
};

/* R: the narrow type of results. */
template <class T, class Tile, int MODE, class R = T> struct Smem {
    static constexpr bool ALONG_M = MODE & A_ALONG_M, ALONG_N = MODE & B_ALONG_N;
    typedef wgmma_tile<Tile::BM, ALONG_M, K_BLOCK<T>> A;
    typedef wgmma_tile<Tile::BN, ALONG_N, K_BLOCK<T>> B;
    template <int SHARERS> using APart = wgmma_part<Tile::BM, ALONG_M, SHARERS, K_BLOCK<T>>;
    template <int SHARERS> using BPart = wgmma_part<Tile::BN, ALONG_N, SHARERS, K_BLOCK<T>>;
    /* Bytes of K_BLOCK elements of k, and of a stage. */
    static constexpr int BLOCK = A::bytes + B::bytes, STAGE_BYTES = Tile::K64 * BLOCK;
    static constexpr int STAGES = Tile::STAGES * STAGE_BYTES <= MOST_RING ? Tile::STAGES
                                                                          : MOST_RING / STAGE_BYTES,
                         RING = STAGES * STAGE_BYTES;

    /* COLS: columns of a tile that one block finishes. PANEL: a warp's staging tile, 16 rows of
     * up to 128 bytes, in which accumulators are reordered into rows. Swap-AB instead stages all
     * columns as rows of 64 floats, padded by 4 to spread them over the banks. */
    static constexpr int COLS = Tile::BN / Tile::SPLITS,
                         PANEL_COLS = COLS >= 64 && element<R>::bits == 16 ? 64 : 32;
    typedef smem_tile<16, PANEL_COLS * element<R>::bits / 8> Panel;
    static constexpr bool BY_PANELS = !Tile::SWAP_AB || SWAPAB_TF32<T, Tile>;
    static constexpr int SWAPAB_LD = 64 + 4,
                         WARP_PANELS = BY_PANELS ? Tile::PANELS * 2048 : COLS * SWAPAB_LD;

    static constexpr int PANELS = RING, EXCHANGE = PANELS + Tile::WGS * 4 * WARP_PANELS;
    /* WGMMA of 64 rows that a warpgroup issues for each K step. */
    static constexpr int MT = Tile::BM / (Tile::PING_PONG ? 1 : Tile::WGS) / 64;
    /* Bytes of sums that one other block sends, and that all others send to a warpgroup. */
    static constexpr int FROM_BLOCK = MT * COLS * 256,
                         WARPGROUP_EXCHANGE = (Tile::SPLITS - 1) * FROM_BLOCK;
    static constexpr int BARRIERS = EXCHANGE + Tile::WGS * WARPGROUP_EXCHANGE,
                         EXCHANGED = BARRIERS + tma_ring<STAGES>::bytes;
    /* Two more barriers, for exchanged sums or for ping-pong, and room to align the ring. */
    static constexpr int BYTES = EXCHANGED + 16 + WGMMA_BLOCK_BYTES;
    /* Blocks that an SM's registers can hold. With two, the next kernel's blocks, or at least a
     * realign kernel's, can start beside this kernel's. */
    static constexpr int BLOCKS =
        THREADS<Tile> <= 256 && (TF32<T> ? BYTES <= 113 * 1024 : MT * Tile::BN <= 128) ? 2 : 1;
    static_assert(BYTES <= 232448 && PANELS % 1024 == 0, "shared memory of a block");
    static_assert(BLOCKS == 1 || THREADS<Tile> <= 256, "a thread keeps 128 registers");
    static_assert(Tile::SWAP_AB || COLS % 8 == 0, "panels begin at multiples of 16 bytes");
    static_assert(!BY_PANELS || COLS >= PANEL_COLS,
                  "put_panels and store_any take whole panels of sums");
    static_assert((Tile::TILES == 1 || Tile::SPLITS == 1) && (BY_PANELS || Tile::WGS == 1),
                  "blocks share or exchange; one ping-pongs");
    static_assert(!Tile::PING_PONG || (Tile::WGS == 2 && Tile::SPLITS == 1 && !Tile::SWAP_AB),
                  "two warpgroups ping-pong");
    static_assert(!TAIL<T, Tile, MODE> || Tile::BM * Tile::BN * 4 <= RING,
                  "the ring holds a tile's sums");
    static_assert(MT <= 2, "sums of a warpgroup are stored by one body, past which they move once");
};

/* ---- a policy of shell.cuh, but for its Consumer --------------------------------------------- */
/* Sets the batch coordinates of a box. A dimension without a stride is not in the map. */
__device__ __forceinline__ void place_batch(const GemmProblem &p, const int64_t *strides,
                                            unsigned batch, tma_at &at) {
#pragma unroll
    for (int d = TENSOR_DIMS - 3; d >= 0; --d) {
        if (d >= p.ndim) continue;
        at.c[2 + d] = strides[d] ? (int)(batch % (unsigned)p.shape[d]) : 0;
        batch /= (unsigned)p.shape[d];
    }
}

/* What the schedules have in common. Shape: a tile of tiles.h. R: the narrow type of results. */
template <class T_, class Shape, int MODE, class R = T_> struct Gemm : OneResult {
    typedef T_ T;
    typedef Shape Size;
    typedef GemmParams Params;
    typedef unsigned Tile; /* a task: a tile, or half of one along k */
    typedef Smem<T, Shape, MODE, R> S;
    static constexpr int TILES = Shape::TILES, SPLITS = Shape::SPLITS, CLUSTER = CLUSTER_OF<Shape>,
                         WGS = Shape::WGS, BK = Shape::K64 * K_BLOCK<T>;
    static constexpr bool GRID = Shape::ACROSS > 0, HALVES = TAIL<T, Shape, MODE>;
    static constexpr int ACROSS = GRID ? Shape::ACROSS : TILES, DOWN = GRID ? TILES / ACROSS : 1;
    typedef Copies<S, ACROSS, DOWN, ONCE<T, Shape>> InRow; /* the cluster's tiles form a row */
    typedef Copies<S, GRID ? ACROSS : 1, GRID ? DOWN : TILES, ONCE<T, Shape>> InColumn;
    /* Blocks that copy into this one, including itself. */
    static constexpr int WRITERS = ACROSS + DOWN - 1;
    static_assert(CLUSTER > 1, "a block has neighbours");
    static_assert(Shape::BM % (64 * WGS) == 0 && Shape::BN % 16 == 0 && Shape::BN <= 256,
                  "whole wgmma");

    static constexpr int CONSUMERS = WGS, PRODUCER_WARPS = 4, PER_SM = S::BLOCKS;
    static constexpr int STAGES = S::STAGES, BARRIERS_AT = S::BARRIERS, MORE_BARRIERS = 2;
    /* SHARES also where a cluster splits k: a stage is released by an arrival that goes through
     * the cluster, and the producer waits for the last ones. */
    static constexpr bool SHARES = true, FINDS_EARLY = true, OPAQUE_BASE = false,
                          ALTERNATE = Shape::PING_PONG;
    static constexpr int CONSUMER_REGS = WGS > 1 ? consumer_regs(Shape::PING_PONG) : 0,
                         PRODUCER_REGS = WGS > 1 ? producer_regs(Shape::PING_PONG) : 0;
    static constexpr int EMPTY_ARRIVALS = (Shape::PING_PONG ? 1 : WGS) * WRITERS;
    static GK_HD int cluster(const Params &) { return CLUSTER; }

    static __device__ __forceinline__ void prefetch(const Params &x) {
        prefetch_tensormap(&x.a);
        prefetch_tensormap(&x.b);
    }
    static __device__ __forceinline__ void begin(const Params &, smem_addr base_s) {
        const smem_addr more_s = base_s + S::EXCHANGED;
        if (Shape::PING_PONG) {
            mbarrier_init(more_s, 4);
            mbarrier_init(more_s + 8, 4);
        }
        if (SPLITS > 1) {
            mbarrier_init(more_s, 1);
            mbarrier_init(more_s + 8, (SPLITS - 1) * WGS * 4);
        }
        if (HALVES) {
            mbarrier_init(more_s, 1);
            mbarrier_init(more_s + 8, WGS * 4);
        }
    }

    /* ---- the copies of a task ---- */
    struct Source {
        PartSource a, b;
        unsigned task;
        bool side_by_side;
        int rank;

        __device__ __forceinline__ void fill(const Params &x, const ProductStage &s) const {
            const bool alone = HALVES && task >= x.whole;
            mbarrier_arrive_expect_tx(s.full_s, Shape::K64 * (a.bytes + b.bytes));
#pragma unroll
            for (int kb = 0; kb < Shape::K64; ++kb) {
                const int at_k = s.step * BK + kb * K_BLOCK<T>;
                const smem_addr to_s = s.base_s + s.stage * S::STAGE_BYTES + kb * S::BLOCK;
                if (alone && side_by_side)
                    InRow::copy_alone(x, a, b, to_s, at_k, s.full_s);
                else if (alone)
                    InColumn::copy_alone(x, a, b, to_s, at_k, s.full_s);
                else if (side_by_side)
                    InRow::copy(a, b, to_s, at_k, rank, s.full_s);
                else
                    InColumn::copy(a, b, to_s, at_k, rank, s.full_s);
            }
        }
    };

    /* ---- a thread's view of its block ---- */
    struct Thread {
        typedef tma_ring<S::STAGES> Ring;
        const Params &x;
        const int lane, warpgroup, warp, rank, part; /* part: index of the split of k */
        /* signals_empty: this lane signals one of the WRITERS blocks that a stage is empty */
        const bool side_by_side, signals_empty;
        const smem_addr ring_s;
        /* Tasks: their number, this cluster's first, and the step to its next. They are kept: the
         * ping-pong producer has no register left to compute them again. */
        unsigned all, first, step;
        Source source; /* in the producer: of its current task */

        template <class Block>
        __device__ __forceinline__ explicit Thread(const Block &shell)
            : x(shell.p), lane(threadIdx.x % 32), warpgroup(shell.warp / 4), warp(shell.warp % 4),
              rank((int)shell.rank), part(SPLITS > 1 ? rank : 0),
              side_by_side(GRID || (TILES > 1 && shell.p.in_row)),
              signals_empty(warp == 0 && lane < WRITERS), ring_s(shell.base_s) {}

        /* True if task t is half of a tile along k. */
        __device__ __forceinline__ bool halved(unsigned t) const { return HALVES && t >= x.whole; }
        /* The tile of task t, in the order of order.cuh. */
        __device__ __forceinline__ unsigned tile_of(unsigned t) const {
            return halved(t) ? x.whole + (t - x.whole) / 2 : t;
        }
        /* Where a task's tile lies in the result. */
        __device__ __forceinline__ coord place(unsigned t, unsigned batch) const {
            const TilePlace tile = tile_place(tile_of(t) - batch * x.order.tiles.by, x.order);
            if (TILES == 1) return {tile.row * Shape::BM, tile.col * Shape::BN};
            /* Read cluster_ctarank() again, so that no register holds it over the products. */
            const int rank = (int)(halved(t) ? (t - x.whole) % 2 : cluster_ctarank());
            const int down = side_by_side ? DOWN : TILES, right = side_by_side ? ACROSS : 1;
            return {(tile.row * down + (GRID ? rank / ACROSS : rank & (down - 1))) * Shape::BM,
                    (tile.col * right + (rank & (right - 1))) * Shape::BN};
        }
        __device__ __forceinline__ void find_copies(unsigned t) {
            const unsigned batch = x.order.tiles.into(tile_of(t));
            const coord tile = place(t, batch);
            const int rank_now = (int)cluster_ctarank(); /* read again, as in place() */
            if (side_by_side)
                InRow::find(x, tile, rank_now, source.a, source.b);
            else
                InColumn::find(x, tile, rank_now, source.a, source.b);
            if (x.batched) {
                place_batch(x.p, x.p.a_batch, batch, source.a.at);
                place_batch(x.p, x.p.b_batch, batch, source.b.at);
            }
            source.task = t;
            source.side_by_side = side_by_side;
            source.rank = rank;
        }
        /* A task's tile in the result and in the batch. */
        __device__ __forceinline__ void find_results(unsigned t, unsigned &batch, coord &tile,
                                                     tma_at &at) const {
            batch = x.order.tiles.into(tile_of(t));
            tile = place(t, batch);
            if (x.batched) place_batch(x.p, x.p.out_batch, batch, at);
        }

        /* The rank that this lane signals: lanes 0 to ACROSS - 1 take the blocks of this row, the
         * next lanes the other blocks of this column. */
        __device__ __forceinline__ int writer_rank() const {
            const int row = rank / ACROSS, other = lane - ACROSS;
            return other < 0 ? row * ACROSS + lane
                             : (other + (other >= row)) * ACROSS + rank % ACROSS;
        }
        /* A warpgroup releases a stage to each block that copies into this one. */
        __device__ __forceinline__ void release(smem_addr barrier_s) const {
            if (signals_empty) release_by_lane(barrier_s);
        }
        __device__ __forceinline__ void release_by_lane(smem_addr barrier_s) const {
            mbarrier_arrive_cluster(barrier_s, GRID ? writer_rank() : TILES > 1 ? lane : rank);
        }

        /* Sums a tile's products from shared memory, rows row0 on. One step of products stays in
         * flight while the next is issued. */
        template <int MT, int N>
        __device__ __forceinline__ void multiply(Ring &ring, float (&sum)[MT][N], int row0,
                                                 int steps) const {
            typedef typename S::A A;
            typedef typename S::B B;
            for (int k = 0; k < steps; ++k) {
                const smem_addr a_s = ring_s + ring.stage * S::STAGE_BYTES, b_s = a_s + A::bytes,
                                before = ring.before();
                ring.wait_full();
                wgmma_pin(sum);
                wgmma_fence(); /* other code may have written the accumulators */
                const uint64_t a_first = A::descriptor(a_s + A::offset(row0)),
                               b_first = B::descriptor(b_s);
#pragma unroll
                for (int kk = 0; kk < Shape::K64 * K_STEPS; ++kk) {
                    const int block = kk / K_STEPS * S::BLOCK, at = kk % K_STEPS;
                    const uint64_t b = wgmma_descriptor_add(b_first, block + at * B::step_bytes);
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        const uint64_t a = wgmma_descriptor_add(a_first, block + A::offset(m * 64) +
                                                                             at * A::step_bytes);
                        if constexpr (TF32<T>)
                            wgmma_tf32_ss<2 * N>(sum[m], a, b, k + kk > 0);
                        else
                            wgmma_ss<T, 2 * N, S::ALONG_M, S::ALONG_N>(sum[m], a, b, k + kk > 0);
                    }
                }
                wgmma_commit_group();
                wgmma_wait_group<1>(); /* the previous step is done: its stage may be overwritten */
                if (k > 0 && signals_empty) release_by_lane(before);
                ring.advance();
            }
        }

        /* Waits for a tile's last products and releases the last stage, whose barrier is `last`. */
        template <int MT, int N>
        __device__ __forceinline__ void end_products(float (&sum)[MT][N], smem_addr last,
                                                     int steps) const {
            wgmma_wait_group<0>();
            wgmma_pin(sum);
            if (steps > 0) release(last);
            if (SPLITS > 1 && steps == 0) {
#pragma unroll
                for (int i = 0; i < MT * N; ++i) sum[i / N][i % N] = 0;
            }
        }

        /* Split-K: mine becomes this block's share of the columns, summed over all blocks. */
        template <int MT, int N>
        __device__ __forceinline__ void
        exchange(const float (&sum)[MT][N], float (&mine)[MT][N / SPLITS], unsigned &parity) const {
            const int mailbox = S::EXCHANGE + warpgroup * S::WARPGROUP_EXCHANGE;
            const smem_addr full_s = ring_s + S::EXCHANGED, empty_s = full_s + 8;
            /* mov_tid_x: the address is recomputed, so that no register holds it over the products.
             */
            const smem_addr from_s = ring_s + mailbox + mov_tid_x() % 128 * 16;
            if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full_s, WGS * S::WARPGROUP_EXCHANGE);
            mbarrier_wait(empty_s, parity ^ 1); /* the others have read the last tile's sums */
            exchange_parts<SPLITS>(sum, mine, part, S::FROM_BLOCK, from_s, full_s, parity);
            __syncwarp(); /* the whole warp has read the received sums */
            if (lane < SPLITS && lane != part) mbarrier_arrive_cluster(empty_s, lane);
            parity ^= 1;
        }
        /* A halved tile: the second block sends its sums into the first block's ring, whose last
         * stages have been read by then. Returns false in the second block, which stores nothing.
         */
        template <int N> __device__ __forceinline__ bool add_halves(float (&sum)[N]) const {
            constexpr int STEP = WGS * 128 * 16; /* bytes of four sums of every thread */
            const smem_addr full_s = ring_s + S::EXCHANGED, free_s = full_s + 8,
                            from_s = ring_s + mov_tid_x() * 16;
            if (rank == 0) {
                if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full_s, STEP * (N / 4));
                __syncwarp();
                if (lane == 0) mbarrier_arrive_cluster(free_s, 1);
                mbarrier_wait(full_s, 0);
#pragma unroll
                for (int i = 0; i < N; i += 4) {
                    const uint4 y = ld_shared_128(from_s + i / 4 * STEP);
                    sum[i] += __uint_as_float(y.x);
                    sum[i + 1] += __uint_as_float(y.y);
                    sum[i + 2] += __uint_as_float(y.z);
                    sum[i + 3] += __uint_as_float(y.w);
                }
                return true;
            }
            mbarrier_wait(free_s, 0);
            const uint32_t to = mapa(from_s, 0), full_there = mapa(full_s, 0);
#pragma unroll
            for (int i = 0; i < N; i += 4)
                st_async_128(to + i / 4 * STEP, sum[i], sum[i + 1], sum[i + 2], sum[i + 3],
                             full_there);
            return false;
        }
        /* No block exits while another still reads its shared memory or copies into it. */
        __device__ __forceinline__ void end_exchange(unsigned parity) const {
            if (SPLITS > 1 && threadIdx.x == 0)
                mbarrier_wait(ring_s + S::EXCHANGED + 8, parity ^ 1);
        }

        /* A warp's epilogue staging tiles. */
        __device__ __forceinline__ smem_addr staging_s() const {
            return ring_s + S::PANELS + (warpgroup * 4 + warp) * S::WARP_PANELS;
        }
    };

    /* ---- what the shell asks ---- */
    /* Finds the first copies while the block waits for the barriers of the other blocks. */
    template <class Block> static __device__ __forceinline__ void find_early(Block &shell) {
        Thread &me = shell.me;
        const Params &x = shell.p;
        me.all = x.order.tiles.by * (unsigned)x.p.batch;
        if (HALVES) me.all += me.all - x.whole;
        me.first = blockIdx.x / CLUSTER;
        me.step = gridDim.x / CLUSTER;
        shell.split(((unsigned)x.p.k + BK - 1) / BK, SPLITS);
        if (shell.warp == WGS * 4) {
            me.find_copies(shell.first());
            have(me.source.a.x);
            have(me.source.b.x);
            have(me.source.a.bytes + me.source.b.bytes);
        }
    }
    template <class Block> static __device__ __forceinline__ unsigned tiles(const Block &shell) {
        return shell.me.all;
    }
    template <class Block>
    static __device__ __forceinline__ unsigned tile(const Block &, unsigned t) {
        return t;
    }
    /* Stages that this block takes of task t. Steps beyond the end of k read zeros. */
    template <class Block>
    static __device__ __forceinline__ int steps(const Block &shell, unsigned t) {
        return shell.me.halved(t) ? (shell.part_steps + 1) / 2 : shell.part_steps;
    }
    template <class Block>
    static __device__ __forceinline__ int first_step(const Block &shell, unsigned t) {
        return shell.me.halved(t) ? shell.me.rank * steps(shell, t) : shell.first_step;
    }
};

} // namespace

#endif
