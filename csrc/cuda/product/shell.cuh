/* SPDX-License-Identifier: BSD-3-Clause */
/* shell.cuh: the persistent kernel that Hopper's scaled, sparse and grouped products share.
 *
 * The shell loops over the tiles of a result, fills a ring of shared-memory stages, and starts
 * and ends a block. A policy P says what a tile is: which copies a stage has, how a stage is
 * multiplied, and how the sums are stored.
 *
 * Grid: as many blocks, or clusters of blocks, as the GPU holds at once. Cluster c takes tiles
 * c, c + stride, c + 2 stride and so on. The ring is not drained between tiles: the producer
 * already fills stages for the next tile while the consumers store this one. All blocks of a
 * cluster take the same tiles. Either each block sums its own split of k (P::SPLITS_K), or each
 * has its own columns and they share multicast copies (P::SHARES).
 *
 * Block: P::CONSUMERS warpgroups multiply. They are followed by P::PRODUCER_WARPS warps: one
 * thread of the first such warp fills the ring, and the other warps may help (P::HELPERS).
 *
 * Shared memory: P lays out bytes 0 to P::BARRIERS_AT. The barriers of the ring and P's own
 * barriers (P::MORE_BARRIERS) follow. Address 0 is a multiple of 1024.
 *
 * A policy has these members (OneResult below supplies the common answers):
 *   Params                     the kernel's parameter
 *   CONSUMERS, PRODUCER_WARPS, PER_SM (blocks), STAGES, BARRIERS_AT, MORE_BARRIERS
 *   SPLITS_K, SHARES           what a cluster does; at most one of the two is true
 *   cluster(p)                 blocks of a cluster: 1 or 2
 *   stride(p)                  clusters of the grid: the step from a cluster's tile to its next
 *   OPAQUE_BASE                keeps the base address in a register; false if no register is left
 *   CONSUMER_REGS, PRODUCER_REGS   for setmaxnreg; 0 leaves the registers as they are
 *   FULL_ARRIVALS              arrivals at a stage's full barrier, by its producers
 *   EMPTY_ARRIVALS             arrivals at a stage's empty barrier, by the consumers of one block
 *   begin(p, base_s)           one thread: initialises P's own barriers
 *   LISTS, list(shell)         if LISTS: one warp derives the tiles from data on the device
 *   Tile, tiles(shell)         the type of a tile, and their number
 *   tile(shell, t), steps(shell, tile)   tile t, and its steps of k
 *   Source                     where a tile's copies begin: Source(p, shell, tile)
 *   Source::fill(p, stage)     one thread: announces a stage's bytes and starts its copies
 *   help(shell)                if HELPERS: the loop of the other producer warps
 *   Consumer                   state of a consumer thread over all tiles: Consumer(shell)
 *   Consumer::take(shell, tile, turn)  one tile: multiplies its stages, then stores its results
 *   Consumer::end(shell)       waits for what must have ended before the block may exit
 *
 * Inside its loop over stages, a policy does not branch on a dtype or on a kind of scale. Such
 * branches cost 10 to 15 % of an 8-bit product (measured on an H200,
 * docs/worklog/scaled_gemm.md). */
#ifndef GPUKERN_CUDA_PRODUCT_SHELL_CUH
#define GPUKERN_CUDA_PRODUCT_SHELL_CUH

#include "gemm/order.cuh"
#include "../host/launch.cuh"
#include "../host/tensormap.cuh"
#include "../layout/wgmma.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/laneid.cuh"
#include "../ptx/opaque.cuh"
#include "../ptx/tma.cuh"
#include "../tile/tma_ring.cuh"

/* The tiles of one result in their order, and how many steps of k (one stage each) a tile has.
 * Made on the host. */
struct TileScheduler {
    TileOrder order;
    unsigned tiles;
    int steps;
};

inline TileScheduler tile_scheduler(int64_t tiles_m, int64_t tiles_n, int group, int64_t steps) {
    TileScheduler w;
    w.order = tile_order((int)tiles_m, (int)tiles_n, group);
    w.tiles = (unsigned)(tiles_m * tiles_n);
    w.steps = (int)steps;
    return w;
}

/* Base of policies that compute one result. Their Params have a member `TileScheduler scheduler`.
 */
struct OneResult {
    typedef TilePlace Tile;
    static constexpr bool SPLITS_K = false, SHARES = false, LISTS = false, HELPERS = false;
    static constexpr bool OPAQUE_BASE = true;
    static constexpr int CONSUMER_REGS = 0, PRODUCER_REGS = 0, FULL_ARRIVALS = 1, MORE_BARRIERS = 0;
    template <class Params> static GK_HD int cluster(const Params &) { return 1; }
    template <class Params> static __device__ __forceinline__ unsigned stride(const Params &) {
        return gridDim.x;
    }
    template <class S> static __device__ __forceinline__ unsigned tiles(const S &shell) {
        return shell.p.scheduler.tiles;
    }
    template <class S> static __device__ __forceinline__ Tile tile(const S &shell, unsigned t) {
        return tile_place(t, shell.p.scheduler.order);
    }
    template <class S> static __device__ __forceinline__ int steps(const S &shell, const Tile &) {
        return shell.part_steps;
    }
    /* What the producer does while the kernel in front still runs. It may bring operands into L2,
     * but not read them: that kernel, or one before it, may be writing them. */
    template <class S> static __device__ __forceinline__ void before_previous_ends(const S &) {}
};

/* A stage that the producer is about to fill. */
struct ProductStage {
    smem_addr base_s; /* base of the block's shared memory */
    smem_addr full_s; /* the barrier that counts the stage's bytes */
    int stage;
    int step;      /* step of k, counted over all of k */
    int tile_step; /* the same step, counted from this block's first step of the tile */
    int turn;      /* number of tiles that this block has taken before */
};

template <class P> struct Shell {
    static constexpr int CONSUMER_WARPS = 4 * P::CONSUMERS;
    static constexpr int THREADS = 32 * (CONSUMER_WARPS + P::PRODUCER_WARPS);
    static constexpr int MORE_BARRIERS_AT = P::BARRIERS_AT + tma_ring<P::STAGES>::bytes;
    static constexpr int SMEM = MORE_BARRIERS_AT + 8 * P::MORE_BARRIERS + WGMMA_BLOCK_BYTES;
    static constexpr bool CLUSTERS = P::SPLITS_K || P::SHARES;
    static_assert(SMEM * P::PER_SM + 1024 * (P::PER_SM - 1) <= 227 * 1024,
                  "shared memory of an SM");
    static_assert(!(P::SPLITS_K && P::SHARES), "a cluster does one of the two");

    const typename P::Params &p;
    const smem_addr base_s;
    unsigned char *const base; /* the same address for ordinary loads and stores */
    tma_ring<P::STAGES> ring;
    const int warp;             /* index in the block; uniform over the warp's lanes */
    const unsigned rank;        /* of the block in its cluster */
    int first_step, part_steps; /* this block's steps of k of each tile (SPLITS_K: of its split) */

    __device__ __forceinline__ Shell(const typename P::Params &params, smem_addr base_at,
                                     unsigned char *memory)
        : p(params), base_s(base_at), base(memory), ring(base_at + P::BARRIERS_AT),
          warp(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
          rank(CLUSTERS ? cluster_ctarank() : 0), first_step(0), part_steps(0) {
        if constexpr (P::SPLITS_K) {
            const int part = (p.scheduler.steps + 1) / 2;
            first_step = (int)rank * part;
            part_steps = max(0, min(part, p.scheduler.steps - first_step));
        } else if constexpr (!P::LISTS) {
            part_steps = p.scheduler.steps;
        }
    }

    /* This cluster's first tile, and the step to its next. */
    __device__ __forceinline__ unsigned first() const { return blockIdx.x / P::cluster(p); }
    __device__ __forceinline__ unsigned stride() const { return P::stride(p); }

    __device__ __forceinline__ void sync_all() const {
        if (CLUSTERS && P::cluster(p) > 1) barrier_cluster();
        if (!P::SPLITS_K) __syncthreads();
    }

    /* Initialises the barriers; they are visible to all threads of the cluster when it returns.
     * From then on the next kernel of the stream may start its prologue. */
    __device__ __forceinline__ void begin() const {
        if (threadIdx.x == 0) {
            ring.init(P::EMPTY_ARRIVALS * (P::SHARES ? P::cluster(p) : 1), P::FULL_ARRIVALS);
            P::begin(p, base_s);
            fence_mbarrier_init();
        }
        if constexpr (P::LISTS) {
            griddepcontrol_wait();
            if (warp == CONSUMER_WARPS) P::list(*this);
        }
        sync_all();
        griddepcontrol_launch_dependents();
    }

    __device__ __forceinline__ void produce() {
        P::before_previous_ends(*this);
        griddepcontrol_wait();
        int turn = 0;
        for (unsigned t = first(); t < P::tiles(*this); t += stride(), ++turn) {
            const typename P::Tile tile = P::tile(*this, t);
            const typename P::Source source(p, *this, tile);
            const int steps = P::steps(*this, tile);
#pragma unroll 1
            for (int i = 0; i < steps; ++i) {
                ring.wait_empty();
                source.fill(p, {base_s, ring.full(), ring.stage, first_step + i, i, turn});
                ring.advance();
            }
        }
        /* Wait for the last arrivals at every stage. Otherwise an arrival from the other block
         * could reach shared memory of a block that has exited. */
        if constexpr (P::SHARES)
            for (int s = 0; s < P::STAGES; ++s) {
                ring.wait_empty();
                ring.advance();
            }
    }

    __device__ __forceinline__ void consume() {
        griddepcontrol_wait();
        typename P::Consumer consumer(*this);
        int turn = 0;
        for (unsigned t = first(); t < P::tiles(*this); t += stride(), ++turn)
            consumer.take(*this, P::tile(*this, t), turn);
        consumer.end(*this);
    }
};

template <class P>
__global__ void __launch_bounds__(Shell<P>::THREADS, P::PER_SM)
    product_kernel(const __grid_constant__ typename P::Params p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    smem_addr base_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    /* Without this, the compiler recomputes every address from the block's base (5 % of a
     * precise product). */
    if constexpr (P::OPAQUE_BASE) opaque(base_s);
    Shell<P> shell(p, base_s, smem + (base_s - cvta_to_shared(smem)));
    shell.begin();
    if (shell.warp < Shell<P>::CONSUMER_WARPS) {
        if constexpr (P::CONSUMER_REGS > 0) setmaxnreg_inc<P::CONSUMER_REGS>();
        shell.consume();
    } else {
        if constexpr (P::PRODUCER_REGS > 0) setmaxnreg_dec<P::PRODUCER_REGS>();
        if (shell.warp == Shell<P>::CONSUMER_WARPS) {
            if (elect_one()) shell.produce();
        } else if constexpr (P::HELPERS) {
            griddepcontrol_wait();
            P::help(shell);
        }
    }
    if constexpr (Shell<P>::CLUSTERS) {
        __syncwarp();
        /* No block exits while the other may still write into its shared memory. */
        if (P::cluster(p) > 1) barrier_cluster();
    }
}

/* Launches `clusters` clusters. */
template <class P>
gk_status launch_clusters(const char *op, const gk_context *ctx, const typename P::Params &p,
                          int64_t clusters) {
    return launch<product_kernel<P>>(op, ctx, dim3((unsigned)(clusters * P::cluster(p))),
                                     Shell<P>::THREADS, Shell<P>::SMEM, p, true, P::cluster(p));
}
/* Launches min(tiles, what fits) clusters. most: blocks that the GPU holds at once. */
template <class P>
gk_status launch_product(const char *op, const gk_context *ctx, const typename P::Params &p,
                         int64_t most) {
    return launch_clusters<P>(op, ctx, p,
                              gk_min_i64(p.scheduler.tiles, gk_clusters_of(most, P::cluster(p))));
}

#endif
