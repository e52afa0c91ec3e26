/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_swapab_sm90a: gemm_sm90a's product for small M. It computes out^T = b^T a^T, so that the
 * weights fill WGMMA's 64 rows and the M rows of a are its columns. For M up to 64, two blocks
 * split k. For larger M, four blocks share b's tile. hopper.cuh describes what all schedules
 * share.
 *
 * Pipeline (stages full and empty: tma_ring.cuh): as in gemm_sm90a, with one consumer warpgroup.
 * The sums are transposed through shared memory. */
#include "hopper_launch.cuh"

namespace {

template <class T, class Tile, int MODE>
__global__ void __cluster_dims__(CLUSTER_OF<Tile>, 1, 1)
    __launch_bounds__(THREADS<Tile>, (Smem<T, Tile, MODE>::BLOCKS))
        gemm_swapab_sm90a_kernel(const __grid_constant__ Params x) {
    typedef Block<T, Tile, MODE> Block;
    typedef typename Block::S S;
    static_assert(Tile::SWAP_AB && Tile::WGS == 1 && S::MT == 1, "64 weights");
    extern __shared__ __align__(1024) unsigned char smem[];
    Block block(x, smem);
    block.begin(1, [] {});
    if (block.warpgroup == Tile::WGS) {
        block.produce();
    } else {
        const OwnProblem &p = x.p;
        float sum[1][Tile::BN / 2];
        unsigned exchange_parity = 0, batch = 0;
        coord tile = {};
        tma_at at = {};
        for (unsigned t = block.first; t < block.all; t += block.step) {
            block.find_results(t, batch, tile, at);
            if (t == block.first) griddepcontrol_wait(); /* for the bias and c */
            prefetch_epilogue(p.epilogue);
            block.multiply(sum, 0, block.steps);
            block.end_products(sum, block.ring.before());
            float *const staging =
                (float *)(smem + (block.ring_s + S::PANELS - cvta_to_shared(smem)));
            const auto store = [&](const auto &sums) {
                store_transposed<T, S::COLS, S::SWAPAB_LD>(
                    p, gemm_place(p, batch), sums, staging, tile.row,
                    tile.col + block.part * S::COLS, x.no_epilogue, x.keep);
            };
            if constexpr (Tile::SPLITS > 1) {
                float mine[1][Tile::BN / 2 / Tile::SPLITS];
                block.exchange(sum, mine, exchange_parity);
                store(mine[0]);
            } else {
                store(sum[0]);
            }
        }
        block.end_exchange(exchange_parity);
    }
    block.leave();
}

template <class T, class Tile>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static constexpr Instance of_mode[] = {
        instance_of<T, Tile, 0, gemm_swapab_sm90a_kernel<T, Tile, 0>>(),
        instance_of<T, Tile, 1, gemm_swapab_sm90a_kernel<T, Tile, 1>>(),
        instance_of<T, Tile, 2, gemm_swapab_sm90a_kernel<T, Tile, 2>>(),
        instance_of<T, Tile, 3, gemm_swapab_sm90a_kernel<T, Tile, 3>>()};
    return run_instance(of_mode, ctx, args, plan, workspace);
}

} // namespace

#define SM90_SWAP_AB(type, name, bm, bn, stages, wgs, panels, tiles, splits, k64, percent, bytes) \
    HOPPER_LAUNCH_16(gemm_swapab_sm90a, type, bytes)
#include "instances.def"
