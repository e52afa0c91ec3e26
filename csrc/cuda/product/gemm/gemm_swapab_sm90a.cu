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

template <class T, class Shape, int MODE> struct GemmSwapAB : Gemm<T, Shape, MODE> {
    typedef Gemm<T, Shape, MODE> Base;
    typedef typename Base::S S;
    typedef Shell<GemmSwapAB> Block;
    static_assert(Shape::SWAP_AB && Shape::WGS == 1 && S::MT == 1, "64 weights");

    struct Consumer {
        const OwnProblem &p;
        float sum[1][Shape::BN / 2];
        unsigned exchange_parity = 0, batch = 0;
        coord tile = {};
        tma_at at = {};

        __device__ __forceinline__ explicit Consumer(Block &shell) : p(shell.p.p) {}

        __device__ __forceinline__ bool take(Block &shell, unsigned t, int) {
            const typename Base::Thread &block = shell.me;
            const GemmParams &x = shell.p;
            block.find_results(t, batch, tile, at);
            if (t == shell.first()) griddepcontrol_wait(); /* for the bias and c */
            prefetch_epilogue(p.epilogue);
            block.multiply(shell.ring, sum, 0, shell.part_steps);
            block.end_products(sum, shell.ring.before(), shell.part_steps);
            float *const staging = (float *)(shell.base + S::PANELS);
            const auto store = [&](const auto &sums) {
                store_transposed<T, S::COLS, S::SWAPAB_LD>(
                    p, gemm_place(p, batch), sums, staging, tile.row,
                    tile.col + block.part * S::COLS, x.no_epilogue, x.keep);
            };
            if constexpr (Shape::SPLITS > 1) {
                float mine[1][Shape::BN / 2 / Shape::SPLITS];
                block.exchange(sum, mine, exchange_parity);
                store(mine[0]);
            } else {
                store(sum[0]);
            }
            return true;
        }
        __device__ __forceinline__ void end(Block &shell) {
            shell.me.end_exchange(exchange_parity);
        }
    };
};

} // namespace

#define SM90_SWAP_AB(type, name, bm, bn, stages, wgs, panels, tiles, splits, k64, percent, bytes) \
    HOPPER_LAUNCH_16(gemm_swapab_sm90a, GemmSwapAB, type, bytes)
#include "instances.def"
