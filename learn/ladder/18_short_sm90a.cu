/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 18, short, stands behind rung 8. It computes rung 8's product in fifty lines of code.
 *
 * Gain: as fast with less code. The prediction was rung 8's, 611 TFLOP/s at 4096 cubed; an H100
 * gave 653.
 *
 * Against rung 8: there is no producer warpgroup. Thread 0 multiplies like all others and also
 * issues the copies, three steps ahead. It issues a copy once all warps are done with the step
 * whose stage the copy overwrites.
 *
 * A block computes one tile of 128 x 256 of out with two warpgroups of 64 x 256. The ring has 4
 * stages:
 *   copies     k0 k1 k2 | k3 | k4 ..       issued behind the barrier of a step
 *   products            | 0 .. 1 .. 2      step j is issued before step j - 1 is waited for */
#include "hopper.cuh"

namespace {

typedef HopperSmem S;
typedef LadderWgmma Tile;
constexpr int THREADS = Tile::WGS * Tile::WARPGROUP, AHEAD = Tile::STAGES - 1;

__global__ void __launch_bounds__(THREADS, 1)
    ladder_short_kernel(const __grid_constant__ HopperParams x) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr ring_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    const int warp = threadIdx.x / 32, row = blockIdx.x / x.tiles_n * Tile::BM,
              col = blockIdx.x % x.tiles_n * Tile::BN;
    const int steps = (x.p.k + Tile::BK - 1) / Tile::BK;
    tma_ring<Tile::STAGES> ring(ring_s + S::RING), ahead = ring;
    const auto copy = [&](int step) {
        const smem_addr a_s = ring_s + ahead.stage * S::STAGE_BYTES, b_s = a_s + S::A::bytes;
        if (threadIdx.x != 0 || step >= steps) return;
        mbarrier_arrive_expect_tx(ahead.full(), S::STAGE_BYTES);
        tma_load_5d(a_s, &x.a, {{step * Tile::BK, row}}, ahead.full());
        for (int n = 0; n < Tile::BN; n += 64)
            tma_load_5d(b_s + S::B::offset(n), &x.b, {{col + n, step * Tile::BK}}, ahead.full());
        ahead.advance();
    };
    if (threadIdx.x == 0) {
        ring.init(1);
        fence_mbarrier_init();
    }
    __syncthreads(); /* the barriers are initialised */
    for (int step = 0; step < AHEAD; ++step) copy(step);
    float sum[1][Tile::BN / 2];
    for (int step = 0; step < steps; ++step, ring.advance()) {
        const smem_addr a_s = ring_s + ring.stage * S::STAGE_BYTES, b_s = a_s + S::A::bytes;
        ring.wait_full();
        wgmma_pin(sum);
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < Tile::BK / 16; ++kk)
            wgmma_ss<bf16, Tile::BN, 0, 1>(
                sum[0], S::A::descriptor(a_s + S::A::offset(warp / 4 * 64) + kk * S::A::step_bytes),
                S::B::descriptor(b_s + kk * S::B::step_bytes), step + kk > 0);
        wgmma_commit_group();
        wgmma_wait_group<1>(); /* this warpgroup has finished the step before, */
        __syncthreads();       /* and so has the other: its stage may be overwritten */
        copy(step + AHEAD);
    }
    wgmma_wait_group<0>();
    wgmma_pin(sum);
    store_pairs(x.p, sum[0], row + warp * 16, col, threadIdx.x % 32);
}

} // namespace

gk_status ladder_short(const gk_context *ctx, const Product &p) {
    HopperParams x;
    const gk_status status = hopper_params(p, Tile::BM, 1, &x);
    if (status != GK_OK) return status;
    return launch<ladder_short_kernel>("gk_ladder_gemm", ctx, dim3(x.tiles_m * x.tiles_n), THREADS,
                                       S::bytes(0), x);
}
