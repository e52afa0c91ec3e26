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

template <class T, class Tile, int MODE>
__global__ void __cluster_dims__(CLUSTER_OF<Tile>, 1, 1)
    __launch_bounds__(THREADS<Tile>, (Smem<T, Tile, MODE>::BLOCKS))
        gemm_pingpong_sm90a_kernel(const __grid_constant__ Params x) {
    typedef Block<T, Tile, MODE> Block;
    typedef typename Block::S S;
    constexpr int MT = S::MT, N = Tile::BN / 2;
    static_assert(Tile::PING_PONG, "a tile for each warpgroup");
    extern __shared__ __align__(1024) unsigned char smem[];
    Block block(x, smem);
    /* Barrier order_s + 8 w: warpgroup w may issue its products. */
    const smem_addr order_s = block.ring_s + S::EXCHANGED;
    block.begin(1, [&] {
        mbarrier_init(order_s, 4);
        mbarrier_init(order_s + 8, 4);
    });
    if (block.warpgroup == Tile::WGS) {
        block.produce();
    } else {
        setmaxnreg_inc<consumer_regs(Tile::PING_PONG)>();
        float sum[MT][N];
        const int warpgroup = block.warpgroup;
        const unsigned mine = block.first + warpgroup * block.step, next = 2 * block.step;
        unsigned phase_parity = warpgroup ^ 1; /* warpgroup 0 does not wait for its first tile */
        if (warpgroup > 0) block.ring.skip(block.steps);
        tma_at at = {};
        for (unsigned t = mine; t < block.all; t += next) {
            if (t == mine) griddepcontrol_wait(); /* for the bias */
            mbarrier_wait(order_s + 8 * warpgroup, phase_parity);
            phase_parity ^= 1;
            block.multiply(sum, 0, block.steps);
            const smem_addr last = block.ring.before();
            /* All products of this tile have been issued. */
            if (block.lane == 0) mbarrier_arrive(order_s + 8 * (warpgroup ^ 1));
            block.ring.skip(block.steps);
            block.end_products(sum, last);

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
                    store_panels<T, typename S::Panel, Tile::PANELS, STORE_SUMS, true>(
                        x, sums, staging_s, at, batch, lane);
                else if (x.plain) /* one variant for the rest: ping-pong hides its time */
                    store_panels<T, typename S::Panel, Tile::PANELS, STORE_ACTIVATED, true>(
                        x, sums, staging_s, at, batch, lane);
            };
            /* One copy of the code; sums of the second 64 rows are shifted down. */
#pragma unroll 1
            for (int m = 0; m < MT; ++m) {
                store(sum[0], m);
#pragma unroll
                for (int i = 0; i < N; ++i) sum[0][i] = sum[MT - 1][i];
            }
        }
        /* Shared memory must stay allocated until TMA has read it. */
        if (block.lane == 0) tma_store_wait_group_read<0>();
    }
    block.leave();
}

template <class T, class Tile>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static constexpr Instance of_mode[] = {
        instance_of<T, Tile, 0, gemm_pingpong_sm90a_kernel<T, Tile, 0>>(),
        instance_of<T, Tile, 1, gemm_pingpong_sm90a_kernel<T, Tile, 1>>(),
        instance_of<T, Tile, 2, gemm_pingpong_sm90a_kernel<T, Tile, 2>>(),
        instance_of<T, Tile, 3, gemm_pingpong_sm90a_kernel<T, Tile, 3>>()};
    return run_instance(of_mode, ctx, args, plan, workspace);
}

} // namespace

#define SM90_PING_PONG(type, name, bm, bn, stages, wgs, panels, tiles, splits, k64, percent, \
                       bytes)                                                                \
    HOPPER_LAUNCH_16(gemm_pingpong_sm90a, type, bytes)
#include "instances.def"
