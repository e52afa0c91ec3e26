/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_sm90a: out = activation(alpha a b + beta c + bias) on Hopper for bfloat16 and float16, by
 * WGMMA with operands copied by TMA. It uses the cooperative schedule: the consumer warpgroups
 * of a block share a tile, BM / WGS rows each. hopper.cuh describes what all schedules share.
 *
 * a [batch, M, K], b [batch, K, N]: each K-major or MN-major, with other strides that are
 * multiples of 16 bytes. Any other operand is first copied into the call's workspace
 * (gemm_realign_sm90a). bias [N], c broadcasts, out [batch, M, N], preact like out. Sums are
 * float32 and rounded once.
 *
 * Pipeline (stages full and empty: tma_ring.cuh):
 *   producer    k0 k1 k2 k3 | k4      k5         ..
 *   consumers               | 0 .. 1 .. 2 ..
 * A consumer issues step j, waits for step j - 1, and releases the stage of step j - 1. The
 * producer goes on with the next tile while this tile's sums are stored.
 *
 * Results of a's dtype go through staging tiles and leave by TMA. If a block has one tile, or
 * TMA cannot write the rows, they are stored from registers in 16-byte chunks. Three kinds of
 * results are stored from registers 8 elements at a time: float32 results of 16-bit operands, a
 * c that cannot be read in pairs, and rows that are not dense. c of a large tile is prefetched
 * into L2 under its products.
 *
 * Workspace: the copies, (rows or columns) x (k rounded up to 16 bytes) each, or transposed.
 *
 * Refuses: float32 (gemm_tf32_sm90a, gemm_plain), K = 0 (gemm_sm80), M or N of at most 16 with
 * small K (gemm_skinny). Small M is gemm_swapab_sm90a's. */
#include "hopper_launch.cuh"

namespace {

template <class T, class Tile, int MODE>
__global__ void __cluster_dims__(CLUSTER_OF<Tile>, 1, 1)
    __launch_bounds__(THREADS<Tile>, (Smem<T, Tile, MODE>::BLOCKS))
        gemm_sm90a_kernel(const __grid_constant__ Params x) {
    typedef Block<T, Tile, MODE> Block;
    typedef typename Block::S S;
    constexpr bool TMA = BY_TMA<T, Tile>;
    static_assert(S::MT == 1 && !Tile::SWAP_AB && !Tile::PING_PONG,
                  "a cooperative tile of 64 rows a warpgroup");
    extern __shared__ __align__(1024) unsigned char smem[];
    Block block(x, smem);
    block.begin(Tile::WGS, [] {});
    if (block.warpgroup == Tile::WGS) {
        block.produce();
    } else {
        if (Tile::WGS > 1) setmaxnreg_inc<consumer_regs(Tile::PING_PONG)>();
        const OwnProblem &p = x.p;
        float sum[1][Tile::BN / 2];
        unsigned exchange_parity = 0, batch = 0;
        const int row0 = Tile::WGS > 1 ? block.warpgroup * 64 : 0;
        coord tile = {};
        tma_at at = {};
        for (unsigned t = block.first; t < block.all; t += block.step) {
            block.find_results(t, batch, tile, at);
            if (t == block.first) griddepcontrol_wait(); /* for the bias and c */
            prefetch_epilogue(p.epilogue);
            if (x.plain) prefetch_bias<S::COLS>(p, tile.col + block.part * S::COLS, block.lane);
            own_prefetch<S::COLS>(p, tile.row + row0 + block.warp * 16,
                                  tile.col + block.part * S::COLS, block.lane);
            if (TMA && !x.across) /* in small tiles its loop would cost every step 5 instructions */
                prefetch_c<S::COLS>(p, batch, tile.row + row0 + block.warp * 16,
                                    tile.col + block.part * S::COLS, block.lane);
            block.multiply(sum, row0, block.steps_of(t));
            block.end_products(sum, block.ring.before());
            if constexpr (TAIL<T, Tile, MODE>)
                if (block.halved(t) && !block.add_halves(sum[0])) break;

            const int lane = threadIdx.x % 32;
            const smem_addr staging_s = block.staging_s();
            const auto store = [&](auto &sums) {
                const int row = tile.row + row0, col = tile.col + block.part * S::COLS;
                at.c[0] = col;
                at.c[1] = row + block.warp * 16;
                if (!OWN_EPILOGUE && x.no_epilogue)
                    store_panels<T, typename S::Panel, Tile::PANELS, STORE_SUMS, TMA>(
                        x, sums, staging_s, at, batch, lane);
                else if (x.cheap_epilogue)
                    store_panels<T, typename S::Panel, Tile::PANELS, STORE_CHEAP, TMA>(
                        x, sums, staging_s, at, batch, lane);
                else if (OWN_EPILOGUE || x.plain || x.unaligned)
                    store_panels<T, typename S::Panel, Tile::PANELS, STORE_UNALIGNED, TMA>(
                        x, sums, staging_s, at, batch, lane);
                else if constexpr (!OWN_EPILOGUE)
                    store_any<T, S::COLS>(p, gemm_place(p, batch), sums, staging_s,
                                          row + block.warp * 16, p.m, col, x.across, lane);
            };
            if constexpr (Tile::SPLITS > 1) {
                float mine[1][Tile::BN / 2 / Tile::SPLITS];
                block.exchange(sum, mine, exchange_parity);
                store(mine[0]);
            } else {
                store(sum[0]);
            }
        }
        /* Shared memory must stay allocated until TMA has read it. */
        if (TMA && block.lane == 0) tma_store_wait_group_read<0>();
        block.end_exchange(exchange_parity);
    }
    block.leave();
}

/* ---- the launch ------------------------------------------------------------------------------ */
template <class T, class Tile>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static constexpr Instance of_mode[] = {
        instance_of<T, Tile, 0, gemm_sm90a_kernel<T, Tile, 0>>(),
        instance_of<T, Tile, 1, gemm_sm90a_kernel<T, Tile, 1>>(),
        instance_of<T, Tile, 2, gemm_sm90a_kernel<T, Tile, 2>>(),
        instance_of<T, Tile, 3, gemm_sm90a_kernel<T, Tile, 3>>()};
    return run_instance(of_mode, ctx, args, plan, workspace);
}

} // namespace

/* The plan halves tiles (HALVES) where the kernel can (TAIL). */
#define SM90_COOP(type, name, bm, bn, stages, wgs, panels, tiles, splits, k64, percent, bytes) \
    static_assert(TAIL<__nv_bfloat16, type, 0> == ((COOP_TRAITS(wgs, tiles) & HALVES) != 0) && \
                      (type::ACROSS != 0) == ((COOP_TRAITS(wgs, tiles) & GRID) != 0),          \
                  "traits");                                                                   \
    HOPPER_LAUNCH_16(gemm_sm90a, type, bytes)
#define SM90_NARROW SM90_COOP
#include "instances.def"
