/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_tf32_sm90a: gemm_sm90a's product for float32 operands, which TMA rounds to tf32 while it
 * copies. It uses the cooperative schedule.
 *
 * WGMMA reads tf32 from shared memory K-major only. So an MN-major b becomes WGMMA's A, from
 * registers, with swap-AB (out^T = b^T a^T; tf32.cuh). Any other operand that is not K-major is
 * first transposed into the call's workspace (gemm_realign_sm90a). hopper.cuh describes what all
 * schedules share. Refuses: float32 in full precision (gemm_plain), small M. */
#include "hopper_launch.cuh"
#include "tf32.cuh"

namespace {

template <class Shape, int MODE> struct GemmTf32 : Gemm<float, Shape, MODE> {
    typedef Gemm<float, Shape, MODE> Base;
    typedef typename Base::S S;
    typedef typename S::A A;
    typedef typename S::B B;
    typedef Shell<GemmTf32> Block;
    static constexpr int MT = S::MT, N = Shape::BN / 2;
    static constexpr bool SWAP_AB = Shape::SWAP_AB;
    static_assert(Shape::K64 == 1 && MT == (SWAP_AB ? 2 : 1), "what load_tf32 brings");

    struct Consumer {
        const GemmProblem &p;
        float sum[MT][N];
        unsigned exchange_parity = 0, batch = 0;
        int panel = 0; /* the staging panel written longest ago */
        const int row0;
        coord tile = {};
        tma_at at = {};

        __device__ __forceinline__ explicit Consumer(Block &shell)
            : p(shell.p.p), row0(shell.me.warpgroup * MT * 64) {}

        __device__ __forceinline__ bool take(Block &shell, unsigned t, int) {
            const typename Base::Thread &block = shell.me;
            const GemmParams &x = shell.p;
            if (!SWAP_AB) block.find_results(t, batch, tile, at);
            if (t == shell.first()) griddepcontrol_wait(); /* for the bias and c */
            prefetch_epilogue(p.epilogue);
            if (!SWAP_AB && x.plain)
                prefetch_bias<S::COLS>(p, tile.col + block.part * S::COLS, block.lane);
            if constexpr (SWAP_AB)
                multiply_swapab<B, S::STAGE_BYTES>(
                    sum, shell.ring,
                    block.ring_s + A::offset((block.warpgroup * 4 + block.warp) * 32),
                    block.ring_s + A::bytes, shell.part_steps, block.lane,
                    [&](smem_addr barrier_s) { block.release(barrier_s); });
            else
                block.multiply(shell.ring, sum, row0, shell.part_steps);
            block.end_products(sum, shell.ring.before(), shell.part_steps);

            /* Found only now, so that no register holds it over the products. */
            if (SWAP_AB) block.find_results(t, batch, tile, at);
            const int lane = SWAP_AB ? laneid() : threadIdx.x % 32;
            const smem_addr staging_s = block.staging_s();
            const auto store = [&](auto &sums) {
                if constexpr (SWAP_AB) { /* a warp's 32 columns of the result, COLS rows */
                    const int row = tile.col + block.part * S::COLS,
                              col = tile.row + (block.warpgroup * 4 + block.warp) * 32;
                    if (x.plain) {
                        at.c[0] = col;
                        at.c[1] = row;
                        store_plain_transposed<typename S::Panel, Shape::PANELS>(x, sums, staging_s,
                                                                                 panel, at, lane);
                    } else {
                        store_any_transposed(p, gemm_place(p, batch), sums, row, col, lane);
                    }
                } else {
                    const int row = tile.row + row0, col = tile.col + block.part * S::COLS;
                    at.c[0] = col;
                    at.c[1] = row + block.warp * 16;
                    if (x.no_epilogue)
                        store_panels<float, typename S::Panel, Shape::PANELS, STORE_SUMS, true>(
                            x, sums[0], staging_s, at, batch, lane);
                    else if (x.plain)
                        store_panels<float, typename S::Panel, Shape::PANELS, STORE_CHEAP, true>(
                            x, sums[0], staging_s, at, batch, lane);
                    else
                        store_any<float, S::COLS>(p, gemm_place(p, batch), sums[0], staging_s,
                                                  row + block.warp * 16, p.m, col, x.across, lane);
                }
            };
            if constexpr (Shape::SPLITS > 1) {
                float mine[MT][N / 2];
                block.exchange(sum, mine, exchange_parity);
                store(mine);
            } else {
                store(sum);
            }
            return true;
        }
        __device__ __forceinline__ void end(Block &shell) {
            /* Shared memory must stay allocated until TMA has read it. */
            if (shell.me.lane == 0) tma_store_wait_group_read<0>();
            shell.me.end_exchange(exchange_parity);
        }
    };
};

template <class Shape>
gk_status run_tf32(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static constexpr Instance only[] = {
        instance_of<GemmTf32<Shape, Shape::SWAP_AB ? A_ALONG_M : 0>>()};
    return run_instance(only, ctx, args, plan, workspace);
}

} // namespace

#define SM90_TF32(type, name, bm, bn, stages, wgs, panels, tiles, splits, k64, percent, bytes) \
    HOPPER_LAUNCH(gemm_tf32_sm90a_##type, float, type, bytes, run_tf32<type>)
#define SM90_TF32_SWAP_AB SM90_TF32
#include "instances.def"
