/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 14, column, stands between rungs 3 and 4. Against rung 3: a thread sums 8 elements of one
 * column of out, so its tile grows in one dimension.
 *
 * Gain: 8.82 to 13.6 TFLOP/s at 4096 cubed (H100).
 *
 * A block computes 64 x 64 of out with 512 threads. A warp has 8 rows and 32 columns, and a lane
 * has one of the columns.
 *
 * Shared memory: a_s [64 m][32 k] and b_s [32 k][64 n], both of floats. One value of b serves 8
 * multiply-adds. The values of a are the same for all lanes and are read 4 steps of k at a time.
 * That makes 3 reads for 8 multiply-adds; rung 3 needs 1.25 for 1. */
#include "rungs.cuh"
#include "tiles.h"

namespace {

typedef LadderColumn Tile;
constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, EACH = Tile::EACH;
static_assert(BM / EACH * BN == Tile::THREADS, "a thread has a column of 8");

template <typename T>
__global__ void __launch_bounds__(Tile::THREADS) ladder_column_kernel(ProductOf<T> p) {
    __shared__ __align__(16) float a_s[BM][BK], b_s[BK][BN];
    const int thread = threadIdx.x, n = thread % BN, m0 = thread / BN * EACH;
    const int64_t row0 = (int64_t)blockIdx.y * BM, col0 = (int64_t)blockIdx.x * BN;
    float sum[EACH] = {};
    for (int k = 0; k < p.k; k += BK) {
#pragma unroll
        for (int i = 0; i < BM * BK / Tile::THREADS; ++i) {
            const int at = thread + i * Tile::THREADS, m = at / BK, kk = at % BK;
            a_s[m][kk] =
                row0 + m < p.m && k + kk < p.k ? to_f32(p.a[(row0 + m) * p.k + k + kk]) : 0;
        }
#pragma unroll
        for (int i = 0; i < BK * BN / Tile::THREADS; ++i) {
            const int at = thread + i * Tile::THREADS, kk = at / BN, col = at % BN;
            b_s[kk][col] = k + kk < p.k && col0 + col < p.n
                               ? to_f32(p.b[(int64_t)(k + kk) * p.n + col0 + col])
                               : 0;
        }
        __syncthreads(); /* both tiles are complete */
#pragma unroll
        for (int kk = 0; kk < BK; kk += 4) {
            const float b[4] = {b_s[kk][n], b_s[kk + 1][n], b_s[kk + 2][n], b_s[kk + 3][n]};
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const float4 a = *(const float4 *)&a_s[m0 + i][kk];
                sum[i] += a.x * b[0];
                sum[i] += a.y * b[1];
                sum[i] += a.z * b[2];
                sum[i] += a.w * b[3];
            }
        }
        __syncthreads(); /* every thread has read them */
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (row0 + m0 + i < p.m && col0 + n < p.n)
            p.out[(row0 + m0 + i) * p.n + col0 + n] = from_f32<T>(sum[i]);
}

} // namespace

template <typename T> static gk_status run(const gk_context *ctx, const ProductOf<T> &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.n, BN), (unsigned)gk_ceil_div(p.m, BM));
    return launch<ladder_column_kernel<T>>("gk_ladder_gemm", ctx, grid, Tile::THREADS, 0, p);
}

gk_status ladder_column(const gk_context *ctx, const Product &p) { return run(ctx, p); }
gk_status ladder_column(const gk_context *ctx, const ProductF32 &p) { return run(ctx, p); }
