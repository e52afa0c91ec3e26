/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 8, wgmma. Against rung 7: Hopper's tensor cores read both operands directly from shared
 * memory, and TMA fills it.
 *
 * Gain: 356 to 594 TFLOP/s at 4096 cubed (H200).
 *
 * One wgmma multiplies 64 x 16 by 16 x 256 for a warpgroup of 128 threads and runs in the
 * background. No thread spends an instruction on fragments or addresses. TMA copies a box of a
 * matrix with one instruction of one thread. It swizzles the box as wgmma expects and writes zeros
 * past the matrix's end.
 *
 * A block computes one tile of 128 x 256 of out. Warpgroups 0 and 1 are consumers, 64 x 256 each.
 * One thread of warpgroup 2 is the producer. The ring has 4 stages (tma_ring.cuh), and one step of
 * products is always in flight:
 *   copies     k0 k1 k2 k3 | k4 ..         the producer waits for an empty stage
 *   products   | 0 .. 1 .. 2 ..            a consumer waits for a full stage; it releases stage
 *                                          j - 1 once step j is issued and step j - 1 is done */
#include "hopper.cuh"

namespace {

typedef HopperSmem S;
typedef LadderWgmma Tile;

__global__ void __launch_bounds__(Tile::THREADS, 1)
    ladder_wgmma_kernel(const __grid_constant__ HopperParams x) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr ring_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<Tile::STAGES> ring(ring_s + S::RING);
    const int warpgroup = threadIdx.x / Tile::WARPGROUP, warp = threadIdx.x / 32 % 4,
              lane = threadIdx.x % 32;
    const int row = blockIdx.x / x.tiles_n * Tile::BM, col = blockIdx.x % x.tiles_n * Tile::BN;
    const int steps = (x.p.k + Tile::BK - 1) / Tile::BK;
    if (threadIdx.x == 0) {
        ring.init(Tile::WGS);
        fence_mbarrier_init();
    }
    __syncthreads(); /* the barriers are initialised */

    if (warpgroup == Tile::WGS) {
        /* ---- copies ---- */
        if (threadIdx.x % Tile::WARPGROUP != 0) return;
        for (int k = 0; k < steps; ++k) {
            const smem_addr a_s = ring_s + ring.stage * S::STAGE_BYTES, b_s = a_s + S::A::bytes;
            ring.wait_empty();
            mbarrier_arrive_expect_tx(ring.full(), S::STAGE_BYTES);
            tma_load_5d(a_s, &x.a, {{k * Tile::BK, row}}, ring.full());
#pragma unroll
            for (int n = 0; n < Tile::BN; n += 64)
                tma_load_5d(b_s + S::B::offset(n), &x.b, {{col + n, k * Tile::BK}}, ring.full());
            ring.advance();
        }
        return;
    }

    /* ---- products ---- */
    float sum[1][Tile::BN / 2];
    for (int k = 0; k < steps; ++k) {
        const smem_addr a_s = ring_s + ring.stage * S::STAGE_BYTES, b_s = a_s + S::A::bytes;
        const smem_addr before = ring.empty() + (ring.stage == 0 ? 8 * (Tile::STAGES - 1) : -8);
        ring.wait_full();
        wgmma_pin(sum);
        wgmma_fence(); /* order earlier writes of the sums' registers before the first wgmma */
#pragma unroll
        for (int kk = 0; kk < Tile::BK / 16; ++kk) {
            const uint64_t a = S::A::descriptor(a_s + S::A::offset(warpgroup * 64) +
                                                kk * S::A::step_bytes),
                           b = S::B::descriptor(b_s + kk * S::B::step_bytes);
            wgmma_ss<bf16, Tile::BN, 0, 1>(sum[0], a, b, k + kk > 0);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>(); /* the step before is done: its stage may be overwritten */
        if (k > 0 && threadIdx.x % Tile::WARPGROUP == 0) mbarrier_arrive(before);
        ring.advance();
    }
    wgmma_wait_group<0>();
    wgmma_pin(sum);
    store_pairs(x.p, sum[0], row + warpgroup * 64 + warp * 16, col, lane);
}

} // namespace

gk_status ladder_wgmma(const gk_context *ctx, const Product &p) {
    HopperParams x;
    const gk_status status = hopper_params(p, Tile::BM, 1, &x);
    if (status != GK_OK) return status;
    return launch<ladder_wgmma_kernel>("gk_ladder_gemm", ctx, dim3(x.tiles_m * x.tiles_n),
                                       Tile::THREADS, S::bytes(0), x);
}
