/* gemm_sm90a: out = activation(alpha a b + beta c + bias) on Hopper's tensor cores by wgmma, fed by tma: bfloat16, float16,
 * tf32.
 *
 * a [batch, M, K]  b [batch, K, N]   each dense along k or along its other dimension, other strides multiples of 16 bytes;
 *                                    one that is not is copied first (gemm_realign_sm90a), into the call's workspace;
 *                                    tf32: a along k, b along k, or along n, which turns the product (tf32.cuh)
 * bias [N], c broadcasts, out [batch, M, N], preact like out; float32 sums, one rounding
 * Grid: as many clusters, of one or two blocks, as fit the GPU; each takes tiles BM x BN, in the order of order.cuh, until none is
 * left. TILES = 2: two tiles side by side, above each other, where both read the same of b, or in a row, where the same of a,
 * whichever fits the result better. Each block copies half of that to both, since L2 gives the SMs some 8 TB/s and single
 * 128 x 256 tiles would ask for 12. CK = 2: two blocks sum half of k each, trade halves of their sums and store half of the columns.
 * Turned, for few rows and tf32: a and b change places (out^T = b^T a^T), so that the weights fill wgmma's 64 rows.
 * Block: WGS warpgroups that multiply, BM / WGS rows each, and one of which a single thread copies. In turns: two, each with
 * tiles of its own, every second one of the block's; one stores while the other multiplies.
 *
 * Shared memory (struct Smem): a ring of slots, each K64 times
 *   a [BM][64 k] or [BM / 64][64 k][64 m], b [BN][64 k] or [BN / 64][64 k][64 n]      swizzled by 128 bytes (wgmma.cuh);
 *   tf32: 32 for 64
 * then the warps' panels of results, the traded halves, the barriers.
 *
 * Pipeline (slots full and empty: tma_ring.cuh); one step of products stays under way while the next is issued:
 *   copies      k0 k1 k2 k3 | k4      k5         ..  runs on into the next tile while this one's sums are stored
 *   products                | 0 .. 1 .. 2 ..         slot j - 1 is let go when step j is issued and step j - 1 is done
 *   in turns, warpgroup 0   | tile 0 | results     | tile 2 ..      a barrier for each says when it may issue
 *             warpgroup 1              | tile 1      | results ..
 * Results of a's dtype go through the panels and leave by tma behind the warp's back, or, where a block has one tile or tma
 * cannot write its rows, by the lanes in chunks of 16 bytes; float32 of 16-bit operands and sums with c are stored by the lanes,
 * 8 columns each, or 8 rows where rows of the result do not begin at multiples of 16 bytes.
 * The next kernel on the stream may start its own prologue meanwhile. A launch finds neither code nor parameters in its SM's
 * caches, and every line costs 200 to 300 clocks: what the first copy waits for, and the plainest store, are each in one place.
 *
 * Workspace: the copies, (rows or columns) x (k rounded up to 16 bytes) each, or with both changed.
 * Not here: other dtypes, ieee float32, K = 0 (gemm_sm80, gemm_plain), 64 columns or fewer, up to 16 rows of dense weights
 * that need a copy (gemm_skinny), small M of tf32. */
#include "../host/launch.cuh"
#include "../host/tensormap.cuh"
#include "../ptx/cluster.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "../ptx/laneid.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../tile/tma_ring.cuh"
#include "../tile/wgmma.cuh"
#include "copies.cuh"
#include "epilogue.cuh"
#include "operands.cuh"
#include "order.cuh"
#include "results.cuh"
#include "sm90_plan.cuh"
#include "tf32.cuh"
#include "tiles.h"
#include "trade.cuh"

namespace {

template <class Tile> constexpr int THREADS = (Tile::WGS + 1) * 128;         /* a warpgroup of producers */
template <class Tile> constexpr int CLUSTER_OF = Tile::TILES * Tile::SPLITS; /* blocks */
constexpr int K_STEPS = WGMMA_ROW_BYTES / 32;                                /* of wgmma in a K_BLOCK */
template <class T> constexpr int K_BLOCK = WGMMA_ROW_BYTES / (int)sizeof(T);
/* A comes through registers, and the product is turned */
template <class T, class Tile> constexpr bool TURNED_TF32 = sizeof(T) == 4 && Tile::SWAP_AB;
/* a, the weights of few rows, is read once: L2 may keep the rest */
template <class T, class Tile> constexpr bool ONCE = sizeof(T) == 2 && Tile::SWAP_AB;
/* results leave the panels by tma, under the next tile's products; one warpgroup's block seldom has a next */
template <class T, class Tile> constexpr bool BY_TMA = sizeof(T) == 4 || Tile::WGS > 1;

/* ---- 1 the call ---------------------------------------------------------------------------------------------- */
struct Params {
    CUtensorMap a, b;         /* [batch dimensions, up to 3][m or n][k], or with k and the other changed */
    CUtensorMap a_end, b_end; /* along k: boxes of the last rows of m or n, where they do not fill one of a's or b's */
    CUtensorMap out, preact;  /* where `plain`, by tma */
    /* what a block begins with stands together: what is not in the constant cache takes 200 clocks a line */
    TileOrder order;    /* of clusters' tiles */
    bool batched;       /* more than one product */
    bool in_row;        /* a cluster's two tiles, not one above the other */
    bool plain, ragged; /* store_plain serves the call: rows of whole chunks of 16 bytes; others */
    bool straight;      /* such rows, without what takes many instructions */
    bool bare;          /* such rows, of nothing but the sums times alpha; turned ones, too */
    bool keep;          /* turned: the next kernel should find the results in L2 */
    bool across; /* store_any: the lanes' values lie down the rows; in the epilogue rows and columns change places */
    GemmProblem p;
};

template <class T, class Tile, int MODE> struct Smem {
    static constexpr bool ALONG_M = MODE & A_ALONG_M, ALONG_N = MODE & B_ALONG_N;
    typedef wgmma_tile<Tile::BM, ALONG_M, K_BLOCK<T>> A;
    typedef wgmma_tile<Tile::BN, ALONG_N, K_BLOCK<T>> B;
    template <int SHARERS> using APart = wgmma_part<Tile::BM, ALONG_M, SHARERS, K_BLOCK<T>>;
    template <int SHARERS> using BPart = wgmma_part<Tile::BN, ALONG_N, SHARERS, K_BLOCK<T>>;
    static constexpr int BLOCK = A::bytes + B::bytes, SLOT = Tile::K64 * BLOCK; /* K_BLOCK of k; a step */
    static constexpr int STAGES = Tile::STAGES * SLOT <= MOST_RING ? Tile::STAGES : MOST_RING / SLOT,
                         RING = STAGES * SLOT;

    /* The columns of a tile that a block finishes, and a warp's 16 rows of up to 128 bytes on their way from the accumulators'
     * order to that of rows; turned: all columns as rows of 64 floats, 4 more to spread them over the banks. */
    static constexpr int COLS = Tile::BN / Tile::SPLITS, PANEL_COLS = COLS >= 64 && sizeof(T) == 2 ? 64 : 32;
    typedef smem_tile<16, PANEL_COLS *(int)sizeof(T)> Panel;
    static constexpr bool BY_PANELS = !Tile::SWAP_AB || TURNED_TF32<T, Tile>;
    static constexpr int TURNED_LD = 64 + 4, WARP_PANELS = BY_PANELS ? Tile::PANELS * 2048 : COLS * TURNED_LD;

    static constexpr int PANELS = RING, TRADE = PANELS + Tile::WGS * 4 * WARP_PANELS;
    /* wgmma a step of 64 rows of a warpgroup */
    static constexpr int MT = Tile::BM / (Tile::PING_PONG ? 1 : Tile::WGS) / 64;
    static constexpr int WARPGROUP_TRADE = Tile::SPLITS > 1 ? MT * COLS * 256 : 0; /* what the other part of k sends */
    static constexpr int BARRIERS = TRADE + Tile::WGS * WARPGROUP_TRADE, TRADED = BARRIERS + tma_ring<STAGES>::bytes;
    /* two barriers more, of traded halves or of turns; and to align the ring */
    static constexpr int BYTES = TRADED + 16 + WGMMA_BLOCK_BYTES;
    /* whose registers an SM can hold. Two: the next kernel's get ready beside this one's, or at least a copy's */
    static constexpr int BLOCKS =
        THREADS<Tile> <= 256 && (sizeof(T) == 2 ? MT * Tile::BN <= 128 : BYTES <= 113 * 1024) ? 2 : 1;
    static_assert(BYTES <= 232448 && PANELS % 1024 == 0, "shared memory of a block");
    static_assert(BLOCKS == 1 || THREADS<Tile> <= 256, "a thread keeps 128 registers");
    static_assert(Tile::SWAP_AB || COLS % 8 == 0, "panels begin at multiples of 16 bytes");
    static_assert(Tile::TILES * Tile::SPLITS <= 2 && (BY_PANELS || Tile::WGS == 1),
                  "two blocks share or trade; one turns");
    static_assert(!Tile::PING_PONG || (Tile::WGS == 2 && Tile::SPLITS == 1 && !Tile::SWAP_AB),
                  "two warpgroups take turns");
    static_assert(MT <= 2, "sums of a warpgroup are stored by one body, past which they move once");
};

/* Where a batch entry's boxes begin; dimensions without a stride are not in the map. */
__device__ __forceinline__ void place_batch(const GemmProblem &p, const int64_t *strides, unsigned batch, tma_at &at) {
#pragma unroll
    for (int d = TENSOR_DIMS - 3; d >= 0; --d) {
        if (d >= p.ndim) continue;
        at.c[2 + d] = strides[d] ? (int)(batch % (unsigned)p.shape[d]) : 0;
        batch /= (unsigned)p.shape[d];
    }
}

/* ---- 2 the kernel -------------------------------------------------------------------------------------------- */
template <class T, class Tile, int MODE>
__global__ void __cluster_dims__(CLUSTER_OF<Tile>, 1, 1) __launch_bounds__(THREADS<Tile>, (Smem<T, Tile, MODE>::BLOCKS))
    gemm_sm90a_kernel(const __grid_constant__ Params x) {
    typedef Smem<T, Tile, MODE> S;
    typedef typename S::A A;
    typedef typename S::B B;
    typedef Copies<S, Tile::TILES, 1, ONCE<T, Tile>> InRow; /* the cluster's tiles */
    typedef Copies<S, 1, Tile::TILES, ONCE<T, Tile>> InColumn;
    constexpr int BM = Tile::BM, BN = Tile::BN, STAGES = S::STAGES, WGS = Tile::WGS;
    constexpr int TILES = Tile::TILES, CK = Tile::SPLITS, CLUSTER = CLUSTER_OF<Tile>;
    constexpr int MT = S::MT, BK = Tile::K64 * K_BLOCK<T>;
    constexpr bool IN_TURNS = Tile::PING_PONG;
    constexpr bool LATE = IN_TURNS || TURNED_TF32<T, Tile>; /* no register keeps a tile's place over its products */
    static_assert(!TURNED_TF32<T, Tile> || (MT == 2 && Tile::K64 == 1), "what load_tf32 brings");
    static_assert(BM % (64 * WGS) == 0 && BN % 16 == 0 && BN <= 256, "whole wgmma");
    extern __shared__ __align__(1024) unsigned char smem[];
    const GemmProblem &p = x.p;
    const int lane = threadIdx.x % 32, block_warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0); /* the warp's own */
    const int warpgroup = block_warp / 4, warp = block_warp % 4;
    const int rank = CLUSTER > 1 ? (int)cluster_ctarank() : 0;
    const int part = CK > 1 ? rank : 0; /* of k */
    const bool in_row = TILES > 1 && x.in_row;
    const smem_addr ring_s = (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<STAGES> ring(ring_s + S::BARRIERS);

    if (threadIdx.x == 0) {
        prefetch_tensormap(&x.a);
        prefetch_tensormap(&x.b);
        ring.init((IN_TURNS ? 1 : WGS) * TILES);
        if (IN_TURNS) mbarrier_init(ring_s + S::TRADED, 4), mbarrier_init(ring_s + S::TRADED + 8, 4);
        if (CK > 1) mbarrier_init(ring_s + S::TRADED, 1), mbarrier_init(ring_s + S::TRADED + 8, WGS * 4);
        fence_mbarrier_init();
    }
    if (CLUSTER > 1) barrier_cluster_arrive();

    /* what the first copies take, under the wait for all blocks' barriers */
    const unsigned tiles = x.order.tiles.by, all = tiles * (unsigned)p.batch;
    const unsigned first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
    const int all_steps = (int)((p.k + BK - 1) / BK), part_steps = (all_steps + CK - 1) / CK;
    const int step0 = part * part_steps, steps = max(0, min(part_steps, all_steps - step0));
    const auto place = [&](unsigned t, unsigned batch) -> coord {
        const TilePlace tile = tile_place(t - batch * tiles, x.order);
        if (TILES == 1) return {tile.row * BM, tile.col * BN};
        const int down = !in_row, rank = (int)cluster_ctarank(); /* asked anew: no register keeps it */
        return {((tile.row << down) + (rank & down)) * BM, ((tile.col << in_row) + (rank & in_row)) * BN};
    };
    Source a_from, b_from;
    const auto find_copies = [&](unsigned t) {
        const unsigned batch = x.order.tiles.into(t);
        const coord tile = place(t, batch);
        const int rank = (int)cluster_ctarank(); /* here, too */
        if (in_row)
            InRow::find(x, tile, rank, a_from, b_from);
        else
            InColumn::find(x, tile, rank, a_from, b_from);
        if (x.batched) place_batch(p, p.a_batch, batch, a_from.at), place_batch(p, p.b_batch, batch, b_from.at);
    };
    if (block_warp == WGS * 4) {
        find_copies(first);
        have(a_from.x), have(b_from.x), have(a_from.bytes + b_from.bytes);
    }

    /* the barriers are there before any block's copies or arrivals reach them */
    if (CLUSTER > 1)
        barrier_cluster_wait();
    else
        __syncthreads();
    griddepcontrol_launch_dependents(); /* the next kernel's start may overlap this one's end */

    if (warpgroup == WGS) {
        /* ---- 2.1 copies ---- */
        if (WGS > 1) setmaxnreg_dec<producer_regs(Tile::PING_PONG)>();
        if (warp == 0 && elect_one()) {
            /* what the kernel before wrote is there, and what it read may be overwritten; without a tile, too: no block ends
             * before that kernel has */
            griddepcontrol_wait();
            for (unsigned t = first; t < all; t += step) {
                if (t != first) find_copies(t);
                for (int k = step0; k < step0 + steps; ++k) {
                    ring.wait_empty(); /* all readers of what this step overwrites, here and in the others, have let go */
                    mbarrier_arrive_expect_tx(ring.full(), Tile::K64 * (a_from.bytes + b_from.bytes));
#pragma unroll
                    for (int kb = 0; kb < Tile::K64; ++kb) {
                        const int at_k = k * BK + kb * K_BLOCK<T>;
                        const smem_addr to_s = ring_s + ring.slot * S::SLOT + kb * S::BLOCK;
                        if (in_row)
                            InRow::copy(a_from, b_from, to_s, at_k, rank, ring.full());
                        else
                            InColumn::copy(a_from, b_from, to_s, at_k, rank, ring.full());
                    }
                    ring.advance();
                }
            }
            /* all readers' last arrivals have come: none is on its way to a block that has left */
            for (int s = 0; s < STAGES; ++s) ring.wait_empty(), ring.advance();
        }
    } else {
        /* ---- 2.2 products ---- */
        if (WGS > 1) setmaxnreg_inc<consumer_regs(Tile::PING_PONG)>();
        float sum[MT][BN / 2];
        unsigned trade_parity = 0;
        int panel = 0;                                /* that store_plain_turned wrote longest ago */
        const bool tells = warp == 0 && lane < TILES; /* a lane for each block that copies into this one */
        const auto let_go = [&](smem_addr barrier_s) {
            if (!tells) return;
            if (CLUSTER > 1)
                mbarrier_arrive_cluster(barrier_s, TILES > 1 ? lane : rank);
            else
                mbarrier_arrive(barrier_s);
        };
        /* in turns every second tile is this warpgroup's, from the one of its own number on */
        const unsigned mine = IN_TURNS ? first + warpgroup * step : first, next = IN_TURNS ? 2 * step : step;
        const int row0 = IN_TURNS ? 0 : warpgroup * MT * 64;
        unsigned turn_parity = warpgroup ^ 1; /* nobody ends the first one's first turn */
        if (IN_TURNS && warpgroup > 0) ring.skip(steps);
        coord tile = {};
        unsigned batch = 0;
        tma_at at = {};
        const auto find_results = [&](unsigned t) {
            batch = x.order.tiles.into(t), tile = place(t, batch);
            if (x.batched) place_batch(p, p.out_batch, batch, at);
        };
        for (unsigned t = mine; t < all; t += next) {
            if (!LATE) find_results(t);
            if (t == mine) griddepcontrol_wait(); /* for the bias and c */
            if (!IN_TURNS) touch_epilogue(p.epilogue);
            if (!Tile::SWAP_AB && !LATE && x.plain) touch_bias<S::COLS>(p, tile.col + part * S::COLS, lane);
            if constexpr (TURNED_TF32<T, Tile>)
                multiply_turned<B, S::SLOT>(sum, ring, ring_s + A::offset((warpgroup * 4 + warp) * 32),
                                            ring_s + A::bytes, steps, lane, let_go);
            if (IN_TURNS) mbarrier_wait(ring_s + S::TRADED + 8 * warpgroup, turn_parity), turn_parity ^= 1;
            for (int k = 0; !TURNED_TF32<T, Tile> && k < steps; ++k) {
                const smem_addr a_s = ring_s + ring.slot * S::SLOT, b_s = a_s + A::bytes;
                const smem_addr before = ring.empty() + (ring.slot == 0 ? 8 * (STAGES - 1) : -8);
                ring.wait_full();
                wgmma_pin(sum);
                wgmma_fence(); /* sums may have been touched by other code */
#pragma unroll
                for (int kk = 0; kk < Tile::K64 * K_STEPS; ++kk) {
                    const int block = kk / K_STEPS * S::BLOCK, at = kk % K_STEPS;
                    const uint64_t b = B::descriptor(b_s + block + at * B::step_bytes);
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        const uint64_t a = A::descriptor(a_s + block + A::offset(row0 + m * 64) + at * A::step_bytes);
                        if constexpr (sizeof(T) == 4)
                            wgmma_tf32_ss<BN>(sum[m], a, b, k + kk > 0);
                        else
                            wgmma_ss<T, BN, S::ALONG_M, S::ALONG_N>(sum[m], a, b, k + kk > 0);
                    }
                }
                wgmma_commit_group();
                wgmma_wait_group<1>(); /* the step before is done: its slot may be overwritten */
                if (k > 0) let_go(before);
                ring.advance();
            }
            const smem_addr last = ring.empty() + (ring.slot == 0 ? 8 * (STAGES - 1) : -8);
            if (IN_TURNS) {
                if (lane == 0)
                    mbarrier_arrive(ring_s + S::TRADED + 8 * (warpgroup ^ 1)); /* all products are on their way */
                ring.skip(steps);
            }
            wgmma_wait_group<0>();
            wgmma_pin(sum);
            if (steps > 0) let_go(last);
            if (CK > 1 && steps == 0) {
#pragma unroll
                for (int i = 0; i < MT * BN / 2; ++i) sum[i / (BN / 2)][i % (BN / 2)] = 0;
            }

            /* ---- 2.3 results ---- */
            if (LATE) find_results(t);
            const int lane = LATE ? laneid() : threadIdx.x % 32;
            const smem_addr panels_s = ring_s + S::PANELS + (warpgroup * 4 + warp) * S::WARP_PANELS;
            const auto store = [&](auto &sums, int m) {
                const int row = tile.row + row0 + m * 64, col = tile.col + part * S::COLS;
                if constexpr (Tile::SWAP_AB) {
                    float *const turned = (float *)(smem + (panels_s - cvta_to_shared(smem)) -
                                                    warp * S::WARP_PANELS); /* the warpgroup's */
                    store_turned<T, S::COLS, S::TURNED_LD>(p, gemm_place(p, batch), sums, turned, row, col, x.bare,
                                                           x.keep);
                } else if (x.bare) {
                    at.c[0] = col, at.c[1] = row + warp * 16;
                    store_plain<T, typename S::Panel, Tile::PANELS, STORE_BARE, BY_TMA<T, Tile>>(x, sums, panels_s, at,
                                                                                                 batch, lane);
                } else if (x.plain || (!IN_TURNS && x.ragged)) {
                    at.c[0] = col, at.c[1] = row + warp * 16;
                    /* in turns one body serves all: its time is hidden, and it takes fewer registers */
                    if (!IN_TURNS && x.straight)
                        store_plain<T, typename S::Panel, Tile::PANELS, STORE_STRAIGHT, BY_TMA<T, Tile>>(
                            x, sums, panels_s, at, batch, lane);
                    else if constexpr (sizeof(T) == 2)
                        store_plain<T, typename S::Panel, Tile::PANELS, IN_TURNS ? STORE_CURVED : STORE_RAGGED,
                                    BY_TMA<T, Tile>>(x, sums, panels_s, at, batch, lane);
                } else if constexpr (!IN_TURNS) {
                    store_any<T, S::COLS>(p, gemm_place(p, batch), sums, panels_s, row + warp * 16, p.m, col, x.across,
                                          lane);
                }
            };
            /* a warp's 32 columns of the result, S::COLS rows */
            const auto store_pair = [&](auto &sums) {
                const int row = tile.col + part * S::COLS, col = tile.row + (warpgroup * 4 + warp) * 32;
                if (x.plain) {
                    at.c[0] = col, at.c[1] = row;
                    store_plain_turned<typename S::Panel, Tile::PANELS>(x, sums, panels_s, panel, at, lane);
                } else {
                    store_any_turned(p, gemm_place(p, batch), sums, row, col, lane);
                }
            };
            if constexpr (CK > 1) {
                const int there = rank ^ 1, slot = S::TRADE + warpgroup * S::WARPGROUP_TRADE;
                const smem_addr full_s = ring_s + S::TRADED, empty_s = full_s + 8;
                const smem_addr from_s = ring_s + slot + mov_tid_x() % 128 * 16; /* nor here */
                if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full_s, WGS * S::WARPGROUP_TRADE);
                mbarrier_wait(empty_s, trade_parity ^ 1); /* the other has read what came of the last tile */
                float mine[MT][BN / 4];
                trade_halves(sum, mine, part, mapa(from_s, there), mapa(full_s, there), from_s, full_s, trade_parity);
                __syncwarp(); /* the warp has read what came */
                if (lane == 0) mbarrier_arrive_cluster(empty_s, there);
                trade_parity ^= 1;
                if constexpr (TURNED_TF32<T, Tile>)
                    store_pair(mine);
                else
                    for (int m = 0; m < MT; ++m) store(mine[m], m);
            } else if constexpr (TURNED_TF32<T, Tile>) {
                store_pair(sum);
            } else {
                /* one body, past which the sums move */
#pragma unroll 1
                for (int m = 0; m < MT; ++m) {
                    store(sum[0], m);
#pragma unroll
                    for (int i = 0; MT > 1 && i < BN / 2; ++i) sum[0][i] = sum[MT - 1][i];
                }
            }
        }
        if (BY_TMA<T, Tile> && lane == 0)
            tma_store_wait_group_read<0>(); /* shared memory stays until the last panel has been read */
        if (CK > 1 && threadIdx.x == 0) mbarrier_wait(ring_s + S::TRADED + 8, trade_parity ^ 1); /* the other's, too */
    }
    if (CLUSTER > 1) barrier_cluster(); /* no block leaves while the other still copies to it */
}

/* ---- 3 the plan ---------------------------------------------------------------------------------------------- */
extern const gk_cuda_row *const sm90_rows;
extern const int num_sm90_rows;

bool plan_best(const gk_context *ctx, const void *args, gk_plan *to) {
    return plan_hopper(sm90_rows, num_sm90_rows, ctx, args, to);
}

/* ---- 4 the launch -------------------------------------------------------------------------------------------- */
/* What the host asks of an instance of the kernel. */
struct Instance {
    bool along_m, along_n;  /* as a and b lie in shared memory */
    int a_box[2], b_box[2]; /* rows of their copies, unshared and shared */
    bool by_panels, by_tma; /* how results leave */
    int panel_cols;
    gk_status (*launch)(const gk_context *ctx, unsigned blocks, const Params &x);
};

template <class T, class Tile, int MODE>
gk_status launch_instance(const gk_context *ctx, unsigned blocks, const Params &x) {
    return launch<gemm_sm90a_kernel<T, Tile, MODE>>("gk_gemm", ctx, dim3(blocks), THREADS<Tile>,
                                                    (size_t)Smem<T, Tile, MODE>::BYTES, x, true);
}

template <class T, class Tile, int MODE> constexpr Instance instance() {
    typedef Smem<T, Tile, MODE> S;
    return {S::ALONG_M,
            S::ALONG_N,
            {S::template APart<1>::box_rows, S::template APart<Tile::TILES>::box_rows},
            {S::template BPart<1>::box_rows, S::template BPart<Tile::TILES>::box_rows},
            S::BY_PANELS,
            BY_TMA<T, Tile>,
            S::PANEL_COLS,
            launch_instance<T, Tile, MODE>};
}

/* An operand's maps, the second where the last box of its rows is lower. */
gk_status make_maps(const TensorShape &x, int k_block, int box, int end, CUtensorMap *inside, CUtensorMap *last) {
    const gk_status status = make_tensor_map("gk_gemm", x, k_block, box, inside);
    return status == GK_OK && end > 0 ? make_tensor_map("gk_gemm", x, k_block, end, last) : status;
}

gk_status start(const gk_cuda_row *row, const Instance &in, const gk_context *ctx, const HopperPlan &plan,
                TensorShape a, TensorShape b, Params *x) {
    const gk_dtype dtype = row->dtype;
    const bool turned = is(row, TURNED);
    x->in_row = plan.in_row;
    a.tf32 = b.tf32 = dtype == GK_F32;
    const int k_block = WGMMA_ROW_BYTES / (int)gk_dtype_bytes(dtype);
    const int a_box = in.a_box[x->in_row], b_box = in.b_box[!x->in_row];
    const int a_end = in.along_m ? 0 : (int)(x->p.m % a_box), b_end = in.along_n ? 0 : (int)(x->p.n % b_box);
    gk_status status = make_maps(a, k_block, a_box, a_end, &x->a, &x->a_end);
    if (status == GK_OK) status = make_maps(b, k_block, b_box, b_end, &x->b, &x->b_end);
    if (status != GK_OK) return status;
    const GemmEpilogue &e = x->p.epilogue;
    const int64_t cols = turned ? x->p.m : x->p.n;
    const bool alike = !e.c && e.out_dtype == dtype;
    /* activations of float32 results are exact: too many instructions for every panel's own */
    const bool by_panels =
        in.by_panels && alike && (dtype != GK_F32 || e.activation == GK_ACT_NONE || e.activation == GK_ACT_RELU);
    const TensorShape out = result_of(x->p, turned, false), preact = result_of(x->p, turned, true);
    const bool chunks = whole_chunks(x->p, dtype, turned);
    const auto maps = [&](const TensorShape &t, CUtensorMap *map) {
        return tensor_map_fits(t) && make_tensor_map("gk_gemm", t, in.panel_cols, 16, map) == GK_OK;
    };
    x->plain = by_panels && chunks && (!in.by_tma || (maps(out, &x->out) && (!e.preact || maps(preact, &x->preact))));
    /* two columns share an activation's inverse, and what stands past an odd last column is not the same in every run */
    x->ragged = by_panels && !x->plain && dtype != GK_F32 && (cols % 2 == 0 || e.activation <= GK_ACT_RELU);
    x->straight =
        x->plain && (dtype == GK_F32 || (e.activation <= GK_ACT_RELU && !e.preact && (!e.bias || e.bias_vectors)));
    x->bare = (x->plain || (!in.by_panels && chunks)) && !e.bias && !e.preact && e.activation == GK_ACT_NONE;
    if (is(row, IN_TURNS) && !x->plain)
        return gk_fail(GK_ERR_UNSUPPORTED, "gk_gemm: in turns tma stores, which it cannot here");
    x->batched = x->p.ndim > 0;
    x->keep = x->p.m * x->p.n * x->p.batch * (int64_t)gk_dtype_bytes(dtype) <= KEEP_BYTES;
    x->order = tile_order(x->p.tiles_m, x->p.tiles_n, x->p.group);
    if (x->ragged && cols % 2 != 0) x->p.epilogue.bias_vectors = false; /* two columns are read at a time */
    x->across = !turned && !x->ragged && !e.out_vectors;
    if (x->across) x->p.epilogue = gemm_swapped(x->p).epilogue;
    return in.launch(ctx, plan.clusters * (unsigned)cluster_of(row), *x);
}

gk_status run_row(const Instance *of_mode, const gk_context *ctx, const gk_plan *plan, void *workspace) {
    const gk_cuda_row *row = (const gk_cuda_row *)plan->kernel;
    const HopperPlan &own = gk_own<HopperPlan>(plan);
    const Instance &in = of_mode[row->dtype == GK_F32 ? 0 : own.operands.mode];
    Params x;
    if (own.operands.bytes == 0) {
        x.p = own.operands.p;
        return start(row, in, ctx, own, own.operands.x[0], own.operands.x[1], &x);
    }
    Operands o = own.operands;
    const int copies = place_copies(workspace, &o);
    const gk_status status = realign("gk_gemm", ctx, o.copies, copies);
    if (status != GK_OK) return status;
    x.p = o.p;
    return start(row, in, ctx, own, o.x[0], o.x[1], &x);
}

template <class T, class Tile>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *workspace) {
    if constexpr (sizeof(T) == 4) {
        static constexpr Instance only[] = {instance<T, Tile, Tile::SWAP_AB ? A_ALONG_M : 0>()};
        return run_row(only, ctx, plan, workspace);
    } else {
        static constexpr Instance of_mode[] = {instance<T, Tile, 0>(), instance<T, Tile, 1>(), instance<T, Tile, 2>(),
                                               instance<T, Tile, 3>()};
        return run_row(of_mode, ctx, plan, workspace);
    }
}

/* Of all modes: narrow panels may leave room for more slots. */
template <class T, class Tile> constexpr int smem_of() {
    constexpr int some[] = {Smem<T, Tile, 0>::BYTES, Smem<T, Tile, 1>::BYTES, Smem<T, Tile, 2>::BYTES,
                            Smem<T, Tile, 3>::BYTES};
    int most = 0;
    for (int bytes : some) most = bytes > most ? bytes : most;
    return most;
}

template <class T, class Tile> constexpr int traits_of() {
    return (Tile::SWAP_AB ? TURNED : 0) | (Tile::PING_PONG ? IN_TURNS : 0);
}

#define ROW(name, T, Tile)                                                                                    \
    {name,                                                                                                    \
     element<T>::dtype,                                                                                       \
     plan_hopper_row,                                                                                         \
     run<T, Tile>,                                                                                            \
     {Tile::BM, Tile::BN, Tile::TILES, PERCENT<Tile>, smem_of<T, Tile>(), Tile::SPLITS, traits_of<T, Tile>(), \
      Tile::K64 * K_BLOCK<T>},                                                                                \
     NULL}
#define ROWS(name, T)                                                                                                 \
    ROW("gemm_sm90a_" name "_128x256x64", T, Coop128x256),                                                            \
        ROW("gemm_sm90a_" name "_128x176x64_in_turns", T, PingPong128x176),                                           \
        ROW("gemm_sm90a_" name "_128x224x64", T, Coop128x224), ROW("gemm_sm90a_" name "_128x192x64", T, Coop128x192), \
        ROW("gemm_sm90a_" name "_128x128x64", T, Coop128x128), ROW("gemm_sm90a_" name "_128x96x64", T, Coop128x96),   \
        ROW("gemm_sm90a_" name "_64x128x64", T, Coop64x128), ROW("gemm_sm90a_" name "_64x64x64", T, Coop64x64),       \
        ROW("gemm_sm90a_" name "_128x128x64_k2", T, Coop128x128Split),                                                \
        ROW("gemm_sm90a_" name "_64x64x64_k2", T, Coop64x64Split),                                                    \
        ROW("gemm_sm90a_" name "_turned_64x16x256_k2", T, SwapAB64x16),                                               \
        ROW("gemm_sm90a_" name "_turned_64x32x128_k2", T, SwapAB64x32),                                               \
        ROW("gemm_sm90a_" name "_turned_64x64x128_k2", T, SwapAB64x64)

const gk_cuda_row rows[] = {
    ROWS("bf16", __nv_bfloat16),
    ROWS("f16", __half),
    ROW("gemm_sm90a_tf32_128x256x32", float, Tf32_128x256),
    ROW("gemm_sm90a_tf32_128x192x32", float, Tf32_128x192),
    ROW("gemm_sm90a_tf32_128x128x32", float, Tf32_128x128),
    ROW("gemm_sm90a_tf32_64x128x32", float, Tf32_64x128),
    ROW("gemm_sm90a_tf32_128x128x32_k2", float, Tf32_128x128Split),
    ROW("gemm_sm90a_tf32_64x64x32_k2", float, Tf32_64x64Split),
    ROW("gemm_sm90a_tf32_turned_256x128x32", float, Tf32SwapAB256x128),
    ROW("gemm_sm90a_tf32_turned_128x128x32", float, Tf32SwapAB128x128),
    ROW("gemm_sm90a_tf32_turned_128x128x32_k2", float, Tf32SwapAB128x128Split),
    ROW("gemm_sm90a_tf32_turned_128x64x32_k2", float, Tf32SwapAB128x64Split),
};
const gk_cuda_row *const sm90_rows = rows;
const int num_sm90_rows = sizeof rows / sizeof rows[0];

} // namespace

extern "C" const gk_cuda_table gk_gemm_sm90a_table = {rows, sizeof rows / sizeof rows[0], 90, plan_best};
