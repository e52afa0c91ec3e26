/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 9, cluster: rung 8 in pairs of blocks, one tile below the other, that share what they read
 * of b.
 *
 * Both tiles need the same 64 k x 256 n of b. Each block asks L2 for half of it and has tma put
 * that half into both blocks' shared memory (multicast): 32 KiB a step and block from L2 instead of
 * 48.
 *
 * What that changes in the ring: full[s] counts bytes that either block's copies bring; empty[s]
 * counts the consumers of both blocks, since this block's copy overwrites the stage in both. So a
 * consumer tells both, and no block may leave while the other can still write to it or tell it
 * something. */
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
    /* the barriers are there before the other block's copies or arrivals reach them */
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
            } /* the last arrivals have come */
        }
    } else {
        /* ---- products ---- */
        const bool tells = warp == 0 && lane < PAIR; /* lane i tells block i */
        float sum[1][Tile::BN / 2];
        for (int k = 0; k < steps; ++k) {
            const smem_addr a_s = ring_s + ring.stage * S::STAGE_BYTES, b_s = a_s + S::A::bytes;
            const smem_addr before = ring.empty() + (ring.stage == 0 ? 8 * (Tile::STAGES - 1) : -8);
            ring.wait_full();
            wgmma_pin(sum);
            wgmma_fence(); /* the first step's sums are registers that other code may have used */
#pragma unroll
            for (int kk = 0; kk < Tile::BK / 16; ++kk) {
                const uint64_t a = S::A::descriptor(a_s + S::A::offset(warpgroup * 64) +
                                                    kk * S::A::step_bytes),
                               b = S::B::descriptor(b_s + kk * S::B::step_bytes);
                wgmma_ss<bf16, Tile::BN, 0, 1>(sum[0], a, b, k + kk > 0);
            }
            wgmma_commit_group();
            wgmma_wait_group<1>(); /* the step before is done: its stage may be overwritten */
            if (k > 0 && tells) mbarrier_arrive_cluster(before, lane);
            ring.advance();
        }
        const smem_addr last = ring.empty() + (ring.stage == 0 ? 8 * (Tile::STAGES - 1) : -8);
        wgmma_wait_group<0>();
        wgmma_pin(sum);
        if (tells) mbarrier_arrive_cluster(last, lane);
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
