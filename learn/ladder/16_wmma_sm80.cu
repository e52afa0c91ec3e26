/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 16, wmma, stands between rungs 5 and 6. It uses the tensor cores through CUDA's own C++
 * interface, nvcuda::wmma.
 *
 * Gain: 42.9 (rung 5) to 168 TFLOP/s at 4096 cubed; rung 6 reaches 361 (H100).
 *
 * A warp fills, multiplies and stores a fragment as a whole. The interface does not say which lane
 * holds which element, so two things that rung 6 does are impossible here. Operands cannot be
 * swizzled; instead each row is padded by 16 bytes, so that rows start in different banks. Results
 * cannot be rounded in place; they pass through shared memory.
 *
 * A block computes 128 x 128 of out with 8 warps of 64 x 32, each of 4 x 2 fragments of 16 x 16.
 *
 * Shared memory: a_s [128 m][32 k + 8] and b_s [32 k][128 n + 8] in bfloat16, filled by cp.async,
 * and 1 KiB of floats a warp for the results. */
#include <mma.h>

#include "cuda/ptx/cp_async.cuh"
#include "rungs.cuh"
#include "tiles.h"

namespace {

namespace wmma = nvcuda::wmma;
typedef LadderWmma Tile;
constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, MT = Tile::WM / 16, NT = Tile::WN / 16;
constexpr int A_ROW = BK + 8, B_ROW = BN + 8; /* padded row lengths, in elements */

__global__ void __launch_bounds__(Tile::THREADS, 2) ladder_wmma_kernel(Product p) {
    __shared__ __align__(128) bf16 a_s[BM * A_ROW], b_s[BK * B_ROW];
    __shared__ __align__(128) float out_s[Tile::THREADS / 32][256];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int64_t row0 = (int64_t)blockIdx.y * BM, col0 = (int64_t)blockIdx.x * BN;
    const int m0 = warp % 2 * Tile::WM, n0 = warp / 2 * Tile::WN;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[MT][NT];
#pragma unroll
    for (int i = 0; i < MT * NT; ++i) wmma::fill_fragment(sum[i / NT][i % NT], 0.0f);
    for (int k = 0; k < p.k; k += BK) {
#pragma unroll
        for (int i = 0; i < BM * BK / 8 / Tile::THREADS; ++i) {
            const int at = thread + i * Tile::THREADS, m = at / (BK / 8), kk = at % (BK / 8) * 8;
            const bool valid = row0 + m < p.m && k + kk < p.k;
            cp_async_cg_16(cvta_to_shared(a_s + m * A_ROW + kk),
                           valid ? p.a + (row0 + m) * p.k + k + kk : p.a, valid * 16);
        }
#pragma unroll
        for (int i = 0; i < BK * BN / 8 / Tile::THREADS; ++i) {
            const int at = thread + i * Tile::THREADS, kk = at / (BN / 8), n = at % (BN / 8) * 8;
            const bool valid = k + kk < p.k && col0 + n < p.n;
            cp_async_cg_16(cvta_to_shared(b_s + kk * B_ROW + n),
                           valid ? p.b + (int64_t)(k + kk) * p.n + col0 + n : p.b, valid * 16);
        }
        cp_async_commit_group();
        cp_async_wait_group<0>();
        __syncthreads(); /* the copies of all threads have arrived */
#pragma unroll 1 /* unrolling both steps would need more registers than two blocks an SM leave */
        for (int kk = 0; kk < BK; kk += 16) {
            wmma::fragment<wmma::matrix_b, 16, 16, 16, bf16, wmma::row_major> b[NT];
#pragma unroll
            for (int j = 0; j < NT; ++j)
                wmma::load_matrix_sync(b[j], b_s + kk * B_ROW + n0 + 16 * j, B_ROW);
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                wmma::fragment<wmma::matrix_a, 16, 16, 16, bf16, wmma::row_major> a;
                wmma::load_matrix_sync(a, a_s + (m0 + 16 * i) * A_ROW + kk, A_ROW);
#pragma unroll
                for (int j = 0; j < NT; ++j) wmma::mma_sync(sum[i][j], a, b[j], sum[i][j]);
            }
        }
        __syncthreads(); /* every warp has read them */
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            wmma::store_matrix_sync(out_s[warp], sum[i][j], 16, wmma::mem_row_major);
            __syncwarp(); /* the fragment is complete */
            const int64_t row = row0 + m0 + 16 * i + lane / 2,
                          col = col0 + n0 + 16 * j + lane % 2 * 8;
            const float *const x = out_s[warp] + lane * 8;
            if (row < p.m && col < p.n)
                *(uint4 *)(p.out + row * p.n + col) =
                    make_uint4(pack2<bf16>(x[0], x[1]), pack2<bf16>(x[2], x[3]),
                               pack2<bf16>(x[4], x[5]), pack2<bf16>(x[6], x[7]));
            __syncwarp(); /* every lane has read it */
        }
}

} // namespace

gk_status ladder_wmma(const gk_context *ctx, const Product &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.n, BN), (unsigned)gk_ceil_div(p.m, BM));
    return launch<ladder_wmma_kernel>("gk_ladder_gemm", ctx, grid, Tile::THREADS, 0, p);
}
