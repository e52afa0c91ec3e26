/* SPDX-License-Identifier: BSD-3-Clause */
/* shell.cuh: the persistent kernel of Hopper's products: plain, scaled, sparse and grouped.
 *
 * The shell loops over the tiles of a result, fills a ring of shared-memory stages, and starts
 * and ends a block. A policy P says what a tile is: which copies a stage has, how a stage is
 * multiplied, and how the sums are stored.
 *
 * Grid: as many blocks, or clusters of blocks, as the GPU holds at once. Cluster c takes tiles
 * c, c + stride, c + 2 stride and so on. The ring is not drained between tiles: the producer
 * already fills stages for the next tile while the consumers store this one. All blocks of a
 * cluster take the same tiles. Either each block sums its own split of k (P::SPLITS_K), or each
 * has its own rows or columns and they share multicast copies (P::SHARES).
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
 *   cluster(p)                 blocks of a cluster
 *   CLUSTER                    the same if every call has as many, more than 1; else 0
 *   stride(p)                  clusters of the grid: the step from a cluster's tile to its next
 *   OPAQUE_BASE                keeps the base address in a register; false if no register is left
 *   CONSUMER_REGS, PRODUCER_REGS   for setmaxnreg; 0 leaves the registers as they are
 *   FULL_ARRIVALS              arrivals at a stage's full barrier, by its producers
 *   EMPTY_ARRIVALS             arrivals at a stage's empty barrier, by the consumers of one block;
 *                              if CLUSTER, of all blocks
 *   ALTERNATE                  each consumer warpgroup takes every CONSUMERS-th tile alone
 *   prefetch(p)                one thread: fetches tensor maps, before any barrier is initialised
 *   begin(p, base_s)           one thread: initialises P's own barriers
 *   Thread                     what P adds to a thread's view of its block: Thread(shell)
 *   LISTS, list(shell)         if LISTS: one warp derives the tiles from data on the device
 *   Tile, tiles(shell)         the type of a tile, and their number
 *   tile(shell, t)             tile t
 *   steps(shell, tile), first_step(shell, tile)   this block's steps of k, and the first of them
 *   Source                     where a tile's copies begin: Source(p, shell, tile)
 *   Source::fill(p, stage)     one thread: announces a stage's bytes and starts its copies
 *   help(shell)                if HELPERS: the loop of the other producer warps
 *   Consumer                   state of a consumer thread over all tiles: Consumer(shell)
 *   Consumer::take(shell, tile, turn)  one tile: multiplies its stages, then stores its results
 *   Consumer::end(shell)       waits for what must have ended before the block may exit
 *
 * Where a launch is much of the time (FINDS_EARLY), find_early(shell) finds the first tile while
 * the block waits for the barriers of the other blocks. It sets me.first and me.step, the
 * cluster's first tile and the step to its next, and shell.part_steps. The producer's Source is
 * me.source, which find_early and me.find_copies(tile) set. `take` calls griddepcontrol_wait for
 * the block's first tile, where it needs it, and returns false after a block's last tile if it
 * knows.
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
    static constexpr bool OPAQUE_BASE = true, FINDS_EARLY = false, ALTERNATE = false;
    static constexpr int CLUSTER = 0;
    static constexpr int CONSUMER_REGS = 0, PRODUCER_REGS = 0, FULL_ARRIVALS = 1, MORE_BARRIERS = 0;
    struct Thread {
        template <class S> __device__ __forceinline__ explicit Thread(const S &) {}
    };
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
    template <class S, class T>
    static __device__ __forceinline__ int first_step(const S &shell, const T &) {
        return shell.first_step;
    }
    template <class Params> static __device__ __forceinline__ void prefetch(const Params &) {}
    template <class S> static __device__ __forceinline__ void find_early(S &) {}
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
    static_assert(SMEM <= 227 * 1024, "shared memory of a block");
    static_assert(!(P::SPLITS_K && P::SHARES), "a cluster does one of the two");
    static_assert(!P::FINDS_EARLY || P::CLUSTER > 1, "find_early runs under a cluster's barrier");

    const typename P::Params &p;
    const smem_addr base_s;
    unsigned char *const base; /* the same address for ordinary loads and stores */
    tma_ring<P::STAGES> ring;
    const int warp;             /* index in the block; uniform over the warp's lanes */
    const unsigned rank;        /* of the block in its cluster */
    int first_step, part_steps; /* this block's steps of k of each tile (SPLITS_K: of its split) */
    typename P::Thread me;      /* what P adds */

    static __device__ __forceinline__ smem_addr base_of(const unsigned char *smem) {
        smem_addr at_s =
            (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
        /* Without this, the compiler recomputes every address from the block's base (5 % of a
         * precise product). */
        if constexpr (P::OPAQUE_BASE) opaque(at_s);
        return at_s;
    }
    __device__ __forceinline__ Shell(const typename P::Params &params, unsigned char *smem)
        : p(params), base_s(base_of(smem)), base(smem + (base_s - cvta_to_shared(smem))),
          ring(base_s + P::BARRIERS_AT), warp(__shfl_sync(0xffffffff, threadIdx.x / 32, 0)),
          rank(CLUSTERS ? cluster_ctarank() : 0), first_step(0), part_steps(0), me(*this) {
        if constexpr (P::SPLITS_K) {
            split(p.scheduler.steps, 2);
        } else if constexpr (!P::LISTS && !P::FINDS_EARLY) {
            part_steps = p.scheduler.steps;
        }
    }

    /* Divides the steps of k among `splits` blocks. Unsigned, because a signed division takes four
     * more instructions, in front of the block's first copy. */
    __device__ __forceinline__ void split(unsigned steps, unsigned splits) {
        const unsigned part = (steps + splits - 1) / splits;
        first_step = splits > 1 ? (int)(rank * part) : 0;
        part_steps = splits > 1 ? max(0, min((int)part, (int)steps - first_step)) : (int)steps;
    }

    /* This cluster's first tile, and the step to its next. */
    __device__ __forceinline__ unsigned first() const {
        if constexpr (P::FINDS_EARLY) return me.first;
        return blockIdx.x / P::cluster(p);
    }
    __device__ __forceinline__ unsigned stride() const {
        if constexpr (P::FINDS_EARLY) return me.step;
        return P::stride(p);
    }

    /* Initialises the barriers; they are visible to all threads of the cluster when it returns.
     * From then on the next kernel of the stream may start its prologue. */
    __device__ __forceinline__ void begin() {
        if (threadIdx.x == 0) {
            P::prefetch(p);
            ring.init(P::EMPTY_ARRIVALS * (P::SHARES && P::CLUSTER == 0 ? P::cluster(p) : 1),
                      P::FULL_ARRIVALS);
            P::begin(p, base_s);
            fence_mbarrier_init();
        }
        if constexpr (P::LISTS) {
            griddepcontrol_wait();
            if (warp == CONSUMER_WARPS) P::list(*this);
        }
        if (CLUSTERS && P::cluster(p) > 1) {
            barrier_cluster_arrive();
            P::find_early(*this);
            barrier_cluster_wait();
        }
        if (!P::SPLITS_K && P::CLUSTER == 0) __syncthreads();
        griddepcontrol_launch_dependents();
    }

    /* Where the copies of tile t begin. */
    __device__ __forceinline__ decltype(auto) source_of(unsigned t, const typename P::Tile &tile) {
        if constexpr (P::FINDS_EARLY) {
            if (t != first()) me.find_copies(tile);
            return (me.source);
        } else {
            return typename P::Source(p, *this, tile);
        }
    }

    __device__ __forceinline__ void produce() {
        P::before_previous_ends(*this);
        griddepcontrol_wait();
        int turn = 0;
        for (unsigned t = first(); t < P::tiles(*this); t += stride(), ++turn) {
            const typename P::Tile tile = P::tile(*this, t);
            const auto &source = source_of(t, tile);
            const int steps = P::steps(*this, tile);
#pragma unroll 1
            for (int i = 0; i < steps; ++i) {
                ring.wait_empty();
                source.fill(
                    p, {base_s, ring.full(), ring.stage, P::first_step(*this, tile) + i, i, turn});
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

    /* The first tile that this consumer warpgroup takes. */
    __device__ __forceinline__ unsigned mine() const {
        return first() + (P::ALTERNATE ? warp / 4 * stride() : 0);
    }
    /* Takes tile t. Returns false if it is known to be the block's last. */
    __device__ __forceinline__ bool took(typename P::Consumer &consumer, unsigned t, int turn) {
        if constexpr (P::FINDS_EARLY) return consumer.take(*this, P::tile(*this, t), turn);
        consumer.take(*this, P::tile(*this, t), turn);
        return true;
    }
    __device__ __forceinline__ void consume() {
        if constexpr (!P::FINDS_EARLY) griddepcontrol_wait();
        typename P::Consumer consumer(*this);
        int turn = 0;
        constexpr unsigned TURNS = P::ALTERNATE ? P::CONSUMERS : 1;
        for (unsigned t = mine(); t < P::tiles(*this); t += TURNS * stride(), ++turn)
            if (!took(consumer, t, turn)) break;
        consumer.end(*this);
    }

    __device__ __forceinline__ void consumer_warps() {
        if constexpr (P::CONSUMER_REGS > 0) setmaxnreg_inc<P::CONSUMER_REGS>();
        consume();
    }
    /* fills: this is the warp that fills the ring. */
    __device__ __forceinline__ void producer_warps(bool fills) {
        if constexpr (P::PRODUCER_REGS > 0) setmaxnreg_dec<P::PRODUCER_REGS>();
        if (fills) {
            if (elect_one()) produce();
        } else if constexpr (P::HELPERS) {
            griddepcontrol_wait();
            P::help(*this);
        }
    }

    __device__ __forceinline__ void run() {
        begin();
        /* Asked by warpgroup, the compiler places the producer behind the consumers, beside the
         * code with which it waits for a stage. Asked by warp, it places it before them, and
         * every wait jumps over all of their code: 0.1 us a step of plain gemm. */
        if constexpr (P::FINDS_EARLY) {
            if (me.warpgroup == P::CONSUMERS)
                producer_warps(me.warp == 0);
            else
                consumer_warps();
        } else if (warp < CONSUMER_WARPS) {
            consumer_warps();
        } else {
            producer_warps(warp == CONSUMER_WARPS);
        }
        if constexpr (CLUSTERS) {
            /* Gemm's producer would otherwise yield in every step. */
            if constexpr (!P::FINDS_EARLY) __syncwarp();
            /* No block exits while the other may still write into its shared memory. */
            if (P::cluster(p) > 1) barrier_cluster();
        }
    }
};
/* The launch says how many blocks a cluster has. */
template <class P>
__global__ void __launch_bounds__(Shell<P>::THREADS, P::PER_SM)
    product_kernel(const __grid_constant__ typename P::Params p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Shell<P> shell(p, smem);
    shell.run();
}
/* Every call has clusters of P::CLUSTER blocks. A barrier of the cluster then does not ask first
 * whether the launch made clusters. */
template <class P>
__global__ void __cluster_dims__(P::CLUSTER, 1, 1) __launch_bounds__(Shell<P>::THREADS, P::PER_SM)
    product_in_clusters_kernel(const __grid_constant__ typename P::Params p) {
    extern __shared__ __align__(1024) unsigned char smem[];
    Shell<P> shell(p, smem);
    shell.run();
}

/* Launches `clusters` clusters. */
template <class P>
gk_status launch_clusters(const char *op, const gk_context *ctx, const typename P::Params &p,
                          int64_t clusters) {
    const dim3 grid((unsigned)(clusters * P::cluster(p)));
    if constexpr (P::CLUSTER > 0)
        return launch<product_in_clusters_kernel<P>>(op, ctx, grid, Shell<P>::THREADS,
                                                     Shell<P>::SMEM, p, true);
    else
        return launch<product_kernel<P>>(op, ctx, grid, Shell<P>::THREADS, Shell<P>::SMEM, p, true,
                                         P::cluster(p));
}
/* Launches min(tiles, what fits) clusters. most: blocks that the GPU holds at once. */
template <class P>
gk_status launch_product(const char *op, const gk_context *ctx, const typename P::Params &p,
                         int64_t most) {
    return launch_clusters<P>(op, ctx, p,
                              gk_min_i64(p.scheduler.tiles, gk_clusters_of(most, P::cluster(p))));
}

#endif
