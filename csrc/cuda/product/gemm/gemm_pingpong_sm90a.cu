/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_pingpong_sm90a: gemm_sm90a's product with the ping-pong schedule. Each of two consumer
 * warpgroups takes every second tile of the block, and one stores while the other multiplies.
 * For results that TMA can store. hopper.cuh describes what all schedules share.
 *
 * Pipeline (stages full and empty: tma_ring.cuh):
 *   producer        k0 k1 k2 k3 | k4      k5         ..  tile after tile
 *   warpgroup 0     | tile 0 | results     | tile 2 ..
 *   warpgroup 1              | tile 1      | results ..
 * A barrier for each warpgroup says when it may issue its products. */
#include "hopper_launch.cuh"

namespace {

template <class T, class Shape, int MODE> struct GemmPingPong : Gemm<T, Shape, MODE> {
    typedef Gemm<T, Shape, MODE> Base;
    typedef typename Base::S S;
    typedef Shell<GemmPingPong> Block;
    static constexpr int MT = S::MT, N = Shape::BN / 2;
    static_assert(Shape::PING_PONG, "a tile for each warpgroup");

    struct Consumer {
        float sum[MT][N];
        /* Barrier order_s + 8 w: warpgroup w may issue its products. */
        const smem_addr order_s;
        unsigned phase_parity;
        tma_at at = {};

        __device__ __forceinline__ explicit Consumer(Block &shell)
            : order_s(shell.base_s + S::EXCHANGED),
              phase_parity(shell.me.warpgroup ^
                           1) { /* warpgroup 0 does not wait for its first tile */
            if (shell.me.warpgroup > 0) shell.ring.skip(shell.part_steps);
        }

        __device__ __forceinline__ bool take(Block &shell, unsigned t, int) {
            const typename Base::Thread &block = shell.me;
            const GemmParams &x = shell.p;
            const int warpgroup = block.warpgroup;
            if (t == shell.mine()) griddepcontrol_wait(); /* for the bias */
            mbarrier_wait(order_s + 8 * warpgroup, phase_parity);
            phase_parity ^= 1;
            block.multiply(shell.ring, sum, 0, shell.part_steps);
            const smem_addr last = shell.ring.before();
            /* All products of this tile have been issued. */
            if (block.lane == 0) mbarrier_arrive(order_s + 8 * (warpgroup ^ 1));
            shell.ring.skip(shell.part_steps);
            block.end_products(sum, last, shell.part_steps);

            /* Found only now, so that no register holds the tile's coordinates over its
             * products. */
            unsigned batch;
            coord tile;
            block.find_results(t, batch, tile, at);
            const int lane = laneid();
            const smem_addr staging_s = block.staging_s();
            const auto store = [&](auto &sums, int m) {
                at.c[0] = tile.col;
                at.c[1] = tile.row + m * 64 + block.warp * 16;
                if (!OWN_EPILOGUE && x.no_epilogue)
                    store_panels<T, typename S::Panel, Shape::PANELS, STORE_SUMS, true>(
                        x, sums, staging_s, at, batch, lane);
                else if (x.plain) /* one variant for the rest: ping-pong hides its time */
                    store_panels<T, typename S::Panel, Shape::PANELS, STORE_ACTIVATED, true>(
                        x, sums, staging_s, at, batch, lane);
            };
            /* One copy of the code; sums of the second 64 rows are shifted down. */
#pragma unroll 1
            for (int m = 0; m < MT; ++m) {
                store(sum[0], m);
#pragma unroll
                for (int i = 0; i < N; ++i) sum[0][i] = sum[MT - 1][i];
            }
            return true;
        }
        /* Shared memory must stay allocated until TMA has read it. */
        __device__ __forceinline__ void end(Block &shell) {
            if (shell.me.lane == 0) tma_store_wait_group_read<0>();
        }
    };
};

} // namespace

#define SM90_PING_PONG(type, name, bm, bn, stages, wgs, panels, tiles, splits, k64, percent, \
                       bytes)                                                                \
    HOPPER_LAUNCH_16(gemm_pingpong_sm90a, GemmPingPong, type, bytes)
#include "instances.def"
