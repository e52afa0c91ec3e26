/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 17, double_buffer, stands between rungs 6 and 7. Against rung 6: shared memory has a second
 * stage, and the copies of the next step run under the products of this one.
 *
 * Gain: 361 to 406 TFLOP/s at 4096 cubed (H100).
 *
 * The ring has 2 stages (tile/pipeline.cuh), 64 KiB a block; two blocks share an SM as in rung 6.
 *   copies     0 1 | 2 | 3 ..        step j + 1 is copied while step j is multiplied
 *   products       | 0 | 1 | 2 ..    one barrier a step */
#include "cuda/tile/copy.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/pipeline.cuh"
#include "rungs.cuh"
#include "tiles.h"

namespace {

typedef LadderMma Tile;
constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, MT = Tile::WM / 16, NT = Tile::WN / 16;
typedef smem_tile<BM, BK * 2> A;
typedef smem_tile<BK, BN * 2> B;
constexpr int STAGES = LadderDoubleBuffer::STAGES, STAGE_BYTES = A::bytes + B::bytes;

__global__ void __launch_bounds__(Tile::THREADS, 2) ladder_double_buffer_kernel(Product p) {
    extern __shared__ __align__(128) unsigned char smem[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int64_t row0 = (int64_t)blockIdx.y * BM, col0 = (int64_t)blockIdx.x * BN;
    const int warp_m = warp % 2 * Tile::WM, warp_n = warp / 2 * Tile::WN;
    const smem_addr smem_s = cvta_to_shared(smem);
    const int rows = (int)min((int64_t)BM, p.m - row0), cols = (int)min((int64_t)BN, p.n - col0);
    const int steps = (p.k + BK - 1) / BK;
    float sum[MT][2 * NT][4] = {};
    const auto copy = [&](int step, int stage) {
        const smem_addr a_s = smem_s + stage * STAGE_BYTES, b_s = a_s + A::bytes;
        const int k = step * BK, k_valid = min(BK, p.k - k);
        if (step >= steps) return;
        copy_tile_async<A, Tile::THREADS>(a_s, p.a + row0 * p.k + k, p.k, rows, k_valid, thread);
        copy_tile_async<B, Tile::THREADS>(b_s, p.b + (int64_t)k * p.n + col0, p.n, k_valid, cols,
                                          thread);
    };
    cp_ring<STAGES> ring;
    copy(0, 0);
    ring.commit();
    for (int step = 0; step < steps; ++step) {
        ring.wait(); /* this step has arrived, and every warp has read the step before */
        copy(step + 1, ring.write);
        ring.commit();
        const smem_addr a_s = smem_s + ring.read * STAGE_BYTES, b_s = a_s + A::bytes;
        const smem_addr a_at = frag_a_base<A>(a_s, lane, warp_m, 0),
                        b_at = frag_b_trans_base<B>(b_s, lane, 0, warp_n / 8);
#pragma unroll
        for (int kk = 0; kk < BK / 16; ++kk) {
            uint32_t a[MT][4], b[NT][4];
#pragma unroll
            for (int i = 0; i < MT; ++i) load_frag_a(a[i], A::down(A::along(a_at, 2 * kk), 16 * i));
#pragma unroll
            for (int j = 0; j < NT; ++j)
                load_frag_b_trans(b[j], B::along(B::down(b_at, 16 * kk), 2 * j));
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    mma_add<bf16>(sum[i][2 * j], a[i], b[j]);
                    mma_add<bf16>(sum[i][2 * j + 1], a[i], b[j] + 2);
                }
        }
        ring.advance();
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < 2 * NT; ++j)
#pragma unroll
            for (int r = 0; r < 4; r += 2) {
                const int64_t row = row0 + warp_m + i * 16 + frag_row(lane, r),
                              col = col0 + warp_n + j * 8 + frag_col(lane, r);
                if (row < p.m && col < p.n)
                    *(uint32_t *)(p.out + row * p.n + col) =
                        pack2<bf16>(sum[i][j][r], sum[i][j][r + 1]);
            }
}

} // namespace

gk_status ladder_double_buffer(const gk_context *ctx, const Product &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.n, BN), (unsigned)gk_ceil_div(p.m, BM));
    return launch<ladder_double_buffer_kernel>("gk_ladder_gemm", ctx, grid, Tile::THREADS,
                                               STAGES * STAGE_BYTES, p);
}
