/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 9, cluster. Against rung 8: blocks run in pairs, one tile below the other, and share the
 * copies of b.
 *
 * Gain: none, 594 TFLOP/s before and after at 4096 cubed (H200). L2 was asked for a quarter less,
 * as planned, but L2 was not the limit. The pairs pay off in rungs 11 and 12.
 *
 * Both tiles of a pair need the same 64 k x 256 n of b. Each block reads half of it from L2, and
 * TMA multicasts that half into the shared memory of both blocks. A block reads 32 KiB a step from
 * L2 instead of 48.
 *
 * This changes the ring. full[s] counts the bytes that the copies of either block bring. empty[s]
 * counts the consumers of both blocks, because a block's copy overwrites the stage in both. So a
 * consumer arrives at the barriers of both blocks. No block may exit while the other can still
 * write to its memory or arrive at its barriers. */
#include "cuda/ptx/cluster.cuh"
#include "hopper.cuh"

namespace {

typedef HopperSmem S;
typedef LadderWgmma Tile;
constexpr int PAIR = 2, SHARE = Tile::BN / PAIR; /* columns of b that a block copies */

__global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    ladder_cluster_kernel(const __grid_constant__ HopperParams x) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr ring_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<Tile::STAGES> ring(ring_s + S::RING);
    const int warpgroup = threadIdx.x / Tile::WARPGROUP, warp = threadIdx.x / 32 % 4,
              lane = threadIdx.x % 32;
    const int rank = (int)cluster_ctarank(), tile = blockIdx.x / PAIR;
    const int row = (tile / x.tiles_n * PAIR + rank) * Tile::BM, col = tile % x.tiles_n * Tile::BN;
    const int steps = (x.p.k + Tile::BK - 1) / Tile::BK;
    if (threadIdx.x == 0) {
        ring.init(Tile::WGS * PAIR);
        fence_mbarrier_init();
    }
    /* the barriers are initialised before copies or arrivals of the other block reach them */
    barrier_cluster();

    if (warpgroup == Tile::WGS) {
        /* ---- copies ---- */
        if (threadIdx.x % Tile::WARPGROUP == 0) {
            for (int k = 0; k < steps; ++k) {
                const smem_addr a_s = ring_s + ring.stage * S::STAGE_BYTES, b_s = a_s + S::A::bytes;
                ring.wait_empty(); /* the consumers of both blocks have released it */
                mbarrier_arrive_expect_tx(ring.full(), S::STAGE_BYTES);
                tma_load_5d(a_s, &x.a, {{k * Tile::BK, row}}, ring.full());
#pragma unroll
                for (int i = 0; i < SHARE; i += 64) {
                    const int n = rank * SHARE + i;
                    tma_load_5d_multicast(b_s + S::B::offset(n), &x.b, {{col + n, k * Tile::BK}},
                                          ring.full(), 3);
                }
                ring.advance();
            }
            for (int s = 0; s < Tile::STAGES; ++s) {
                ring.wait_empty();
                ring.advance();
            } /* all arrivals have come, so no consumer still uses a barrier */
        }
    } else {
        /* ---- products ---- */
        const bool releases = warp == 0 && lane < PAIR; /* lane i arrives at block i's barrier */
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
            if (k > 0 && releases) mbarrier_arrive_cluster(before, lane);
            ring.advance();
        }
        const smem_addr last = ring.empty() + (ring.stage == 0 ? 8 * (Tile::STAGES - 1) : -8);
        wgmma_wait_group<0>();
        wgmma_pin(sum);
        if (releases) mbarrier_arrive_cluster(last, lane);
        store_pairs(x.p, sum[0], row + warpgroup * 64 + warp * 16, col, lane);
    }
    barrier_cluster(); /* no block leaves while the other still copies to it */
}

} // namespace

gk_status ladder_cluster(const gk_context *ctx, const Product &p) {
    HopperParams x;
    const gk_status status = hopper_params(p, Tile::BM * PAIR, 1, &x);
    if (status != GK_OK) return status;
    return launch<ladder_cluster_kernel>("gk_ladder_gemm", ctx, dim3(x.tiles_m * x.tiles_n * PAIR),
                                         Tile::THREADS, S::bytes(0), x);
}
