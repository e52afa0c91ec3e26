/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 6, mma. Against rung 5: the tensor cores do the multiplying. One mma.sync of a warp
 * multiplies 16 x 16 by 16 x 8 elements, and the operands stay bfloat16.
 *
 * Gain: 37.5 to 313 TFLOP/s at 4096 cubed (H200).
 *
 * A block computes 128 x 128 of out with 4 warps of 64 x 64.
 *
 * Shared memory: one stage with a [128 m][64 k] and b [64 k][128 n], swizzled (smem_tile). cp.async
 * fills it without passing through registers. ldmatrix loads four 8 x 8 matrices at once and
 * transposes those of b on the way.
 *
 * A block copies, then multiplies. Two blocks share an SM, and each hides half of the other's
 * waits:
 *   block 1   copy .... | products |            copy .... | products
 *   block 2             | copy .... | products |           copy .... */
#include "cuda/tile/copy.cuh"
#include "cuda/tile/fragment.cuh"
#include "rungs.cuh"
#include "tiles.h"

namespace {

typedef LadderMma Tile;
constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, MT = Tile::WM / 16, NT = Tile::WN / 16;
typedef smem_tile<BM, BK * 2> A;
typedef smem_tile<BK, BN * 2> B;

__global__ void __launch_bounds__(Tile::THREADS, 2) ladder_mma_kernel(Product p) {
    __shared__ __align__(128) unsigned char smem[A::bytes + B::bytes];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int64_t row0 = (int64_t)blockIdx.y * BM, col0 = (int64_t)blockIdx.x * BN;
    const int warp_m = warp % 2 * Tile::WM, warp_n = warp / 2 * Tile::WN;
    const smem_addr a_s = cvta_to_shared(smem), b_s = a_s + A::bytes;
    const smem_addr a_at = frag_a_base<A>(a_s, lane, warp_m, 0),
                    b_at = frag_b_trans_base<B>(b_s, lane, 0, warp_n / 8);
    float sum[MT][2 * NT][4] = {};
    for (int k = 0; k < p.k; k += BK) {
        const int k_valid = min(BK, p.k - k), rows = (int)min((int64_t)BM, p.m - row0),
                  cols = (int)min((int64_t)BN, p.n - col0);
        copy_tile_async<A, Tile::THREADS>(a_s, p.a + row0 * p.k + k, p.k, rows, k_valid, thread);
        copy_tile_async<B, Tile::THREADS>(b_s, p.b + (int64_t)k * p.n + col0, p.n, k_valid, cols,
                                          thread);
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncthreads(); /* the copies of all threads have arrived */
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
        __syncthreads(); /* every warp has read the stage */
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

gk_status ladder_mma(const gk_context *ctx, const Product &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.n, BN), (unsigned)gk_ceil_div(p.m, BM));
    return launch<ladder_mma_kernel>("gk_ladder_gemm", ctx, grid, Tile::THREADS, 0, p);
}
