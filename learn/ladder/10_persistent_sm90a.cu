/* SPDX-License-Identifier: BSD-3-Clause */
/* Rungs 10, 11 and 12. Against rung 9 the kernel is persistent: as many clusters start as fit, one
 * on every two SMs, and each computes tile after tile.
 *
 * Rung 10, persistent: while the consumers store the results of a tile, the producer fills the ring
 * for the next. Gain: 594 to 607 TFLOP/s at 4096 cubed (H200).
 *       copies     t0 .......... t1: k0 k1 k2 k3 |  k4 ..
 *       products   t0 .......... store            | t1 ..
 *
 * Rung 11, overlap: results leave through shared memory. A warp rearranges 16 rows x 64 columns
 * from wgmma's order into rows (stmatrix), has TMA store them, and goes on. The stores run under
 * the products of the next tile. Gain: 607 to 666 TFLOP/s.
 *       products   t0 .......... t1 ..........
 *       tma             t1's k0 ..  t0's results ..
 *
 * Rung 12, raster: rung 11 with its tiles in another order (order.cuh), in groups of 8 rows of
 * tiles. Clusters that run at the same time then share rows of a and columns of b in L2. Gain: none
 * (667 TFLOP/s).
 *
 * Shared memory for rungs 11 and 12: behind the ring, each warp has 2 panels of 16 rows x 128
 * bytes. */
#include "cuda/product/gemm/order.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "hopper.cuh"

namespace {

typedef HopperSmem S;
typedef LadderWgmma Tile;
typedef smem_tile<16, 128> Panel;
constexpr int PAIR = 2, SHARE = Tile::BN / PAIR; /* columns of b that a block copies */
constexpr int WARP_PANELS = Tile::PANELS * Panel::bytes, ALL_PANELS = Tile::WGS * 4 * WARP_PANELS;

/* Stores a warp's 16 rows x 256 columns, one panel of 64 columns after the other. */
__device__ __forceinline__ void store_panels(const CUtensorMap *out,
                                             const float (&sum)[Tile::BN / 2], smem_addr panels_s,
                                             int row, int col, int lane) {
    const unsigned put = Panel::offset(lane % 16, 0);
#pragma unroll
    for (int c = 0; c < Tile::BN / 64; ++c) {
        const smem_addr panel_s = panels_s + c % Tile::PANELS * Panel::bytes;
        const float *v = sum + c * 32;
        if (lane == 0) tma_store_wait_group_read<Tile::PANELS - 1>();
        __syncwarp(); /* TMA has read the panel's earlier contents */
#pragma unroll
        /* rows 0-7 and 8-15 of 8 columns, then the same rows of the next 8 columns */
        for (int j = 0; j < Panel::chunks; j += 2) {
            const uint32_t two[4] = {
                pack2<bf16>(v[4 * j], v[4 * j + 1]), pack2<bf16>(v[4 * j + 2], v[4 * j + 3]),
                pack2<bf16>(v[4 * j + 4], v[4 * j + 5]), pack2<bf16>(v[4 * j + 6], v[4 * j + 7])};
            stmatrix_x4(panel_s + Panel::chunk(put, j + lane / 16), two);
        }
        fence_proxy_async(); /* this lane's writes are visible to TMA */
        __syncwarp();        /* and so are those of all lanes */
        if (lane == 0) {
            tma_store_5d(out, {{col + c * 64, row}}, panel_s);
            tma_store_commit_group();
        }
    }
}

template <bool OVERLAP>
__global__ void __cluster_dims__(PAIR, 1, 1) __launch_bounds__(Tile::THREADS, 1)
    ladder_persistent_kernel(const __grid_constant__ HopperParams x) {
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr ring_s =
        (cvta_to_shared(smem) + WGMMA_BLOCK_BYTES - 1) / WGMMA_BLOCK_BYTES * WGMMA_BLOCK_BYTES;
    tma_ring<Tile::STAGES> ring(ring_s + S::RING + (OVERLAP ? ALL_PANELS : 0));
    const int warpgroup = threadIdx.x / Tile::WARPGROUP, warp = threadIdx.x / 32 % 4,
              lane = threadIdx.x % 32;
    const int rank = (int)cluster_ctarank(), first = blockIdx.x / PAIR, clusters = gridDim.x / PAIR;
    const int tiles = x.tiles_m * x.tiles_n, steps = (x.p.k + Tile::BK - 1) / Tile::BK;
    if (threadIdx.x == 0) {
        ring.init(Tile::WGS * PAIR);
        fence_mbarrier_init();
    }
    /* the barriers are initialised before copies or arrivals of the other block reach them */
    barrier_cluster();

    if (warpgroup == Tile::WGS) {
        /* ---- copies ---- */
        if (threadIdx.x % Tile::WARPGROUP == 0) {
            for (int t = first; t < tiles; t += clusters) {
                const TilePlace at = tile_place(t, x.tiles_m, x.tiles_n, x.group);
                const int row = (at.row * PAIR + rank) * Tile::BM, col = at.col * Tile::BN;
                for (int k = 0; k < steps; ++k) {
                    const smem_addr a_s = ring_s + ring.stage * S::STAGE_BYTES,
                                    b_s = a_s + S::A::bytes;
                    ring.wait_empty(); /* the consumers of both blocks have released it */
                    mbarrier_arrive_expect_tx(ring.full(), S::STAGE_BYTES);
                    tma_load_5d(a_s, &x.a, {{k * Tile::BK, row}}, ring.full());
#pragma unroll
                    for (int i = 0; i < SHARE; i += 64) {
                        const int n = rank * SHARE + i;
                        tma_load_5d_multicast(b_s + S::B::offset(n), &x.b,
                                              {{col + n, k * Tile::BK}}, ring.full(), 3);
                    }
                    ring.advance();
                }
            }
            for (int s = 0; s < Tile::STAGES; ++s) {
                ring.wait_empty();
                ring.advance();
            } /* all arrivals have come, so no consumer still uses a barrier */
        }
    } else {
        /* ---- products ---- */
        const bool releases = warp == 0 && lane < PAIR; /* lane i arrives at block i's barrier */
        const smem_addr panels_s = ring_s + S::RING + (warpgroup * 4 + warp) * WARP_PANELS;
        float sum[1][Tile::BN / 2];
        for (int t = first; t < tiles; t += clusters) {
            for (int k = 0; k < steps; ++k) {
                const smem_addr a_s = ring_s + ring.stage * S::STAGE_BYTES, b_s = a_s + S::A::bytes;
                const smem_addr before =
                    ring.empty() + (ring.stage == 0 ? 8 * (Tile::STAGES - 1) : -8);
                ring.wait_full();
                wgmma_pin(sum);
                /* the sums' registers were just read by the last tile's store: order that before
                 * the first wgmma */
                wgmma_fence();
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

            const TilePlace at = tile_place(t, x.tiles_m, x.tiles_n, x.group);
            const int row = (at.row * PAIR + rank) * Tile::BM + warpgroup * 64 + warp * 16,
                      col = at.col * Tile::BN;
            if (OVERLAP)
                store_panels(&x.out, sum[0], panels_s, row, col, lane);
            else
                store_pairs(x.p, sum[0], row, col, lane);
        }
        /* shared memory must stay until TMA has read it */
        if (OVERLAP && lane == 0) tma_store_wait_group_read<0>();
    }
    barrier_cluster(); /* no block leaves while the other still copies to it */
}

template <bool OVERLAP> gk_status start(const gk_context *ctx, const Product &p, int group) {
    HopperParams x;
    const gk_status status = hopper_params(p, Tile::BM * PAIR, group, &x);
    if (status != GK_OK) return status;
    const int clusters =
        (int)gk_min_i64(x.tiles_m * x.tiles_n, gk_gpu_of(ctx->index)->num_sms / PAIR);
    return launch<ladder_persistent_kernel<OVERLAP>>("gk_ladder_gemm", ctx, dim3(clusters * PAIR),
                                                     Tile::THREADS,
                                                     S::bytes(OVERLAP ? ALL_PANELS : 0), x);
}

} // namespace

gk_status ladder_persistent(const gk_context *ctx, const Product &p) {
    return start<false>(ctx, p, 1);
}
gk_status ladder_overlap(const gk_context *ctx, const Product &p) { return start<true>(ctx, p, 1); }
gk_status ladder_raster(const gk_context *ctx, const Product &p) {
    return start<true>(ctx, p, Tile::GROUP);
}
