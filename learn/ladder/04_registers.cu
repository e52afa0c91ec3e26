/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 4, registers. Against rung 3: a thread sums 8 x 8 elements of out, so that 16 values read
 * from shared memory serve 64 multiply-adds.
 *
 * Gain: 7.78 to 23.1 TFLOP/s at 4096 cubed (H200).
 *
 * A block computes 128 x 128 of out with 8 warps of 64 x 32. A lane's 8 rows are 8 apart and its 8
 * columns 4 apart. Each read of a warp therefore covers neighbouring values, which lie in different
 * banks.
 *
 * Shared memory: a_s [16 k][128 m], because lanes read along m, and b_s [16 k][128 n], both of
 * floats.
 *
 * Two faults are left for rung 5. First, a is read along k and stored along m: the 16 lanes that
 * hold the 16 elements of one row store them 128 floats apart, into one bank, so each store takes
 * 16 passes. Second, every value moves with an instruction of its own. */
#include "cuda/layout/banks.cuh"
#include "rungs.cuh"
#include "tiles.h"

namespace {

typedef LadderRegisters Tile;
constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, EACH = Tile::EACH;

constexpr GK_HD int store_ways_a() {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = (lane % BK * BM + lane / BK) * 4;
    return ways(bytes, 4);
}
static_assert(store_ways_a() == 16, "the conflict that the next rung is rid of");

template <typename T>
__global__ void __launch_bounds__(Tile::THREADS, 2) ladder_registers_kernel(ProductOf<T> p) {
    __shared__ float a_s[BK][BM], b_s[BK][BN];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int64_t row0 = (int64_t)blockIdx.y * BM, col0 = (int64_t)blockIdx.x * BN;
    const int m0 = warp % 2 * Tile::WM + lane / 4, n0 = warp / 2 * Tile::WN + lane % 4;
    float sum[EACH][EACH] = {};
    for (int k = 0; k < p.k; k += BK) {
#pragma unroll
        for (int i = 0; i < BM * BK / Tile::THREADS; ++i) {
            const int m = thread / BK + i * (Tile::THREADS / BK), kk = thread % BK;
            a_s[kk][m] =
                row0 + m < p.m && k + kk < p.k ? to_f32(p.a[(row0 + m) * p.k + k + kk]) : 0;
        }
#pragma unroll
        for (int i = 0; i < BK * BN / Tile::THREADS; ++i) {
            const int kk = thread / BN + i * (Tile::THREADS / BN), n = thread % BN;
            b_s[kk][n] = k + kk < p.k && col0 + n < p.n
                             ? to_f32(p.b[(int64_t)(k + kk) * p.n + col0 + n])
                             : 0;
        }
        __syncthreads(); /* both tiles are complete */
#pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            float a[EACH], b[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                a[i] = a_s[kk][m0 + 8 * i];
                b[i] = b_s[kk][n0 + 4 * i];
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i)
#pragma unroll
                for (int j = 0; j < EACH; ++j) sum[i][j] += a[i] * b[j];
        }
        __syncthreads(); /* every thread has read them */
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
            const int64_t row = row0 + m0 + 8 * i, col = col0 + n0 + 4 * j;
            if (row < p.m && col < p.n) p.out[row * p.n + col] = from_f32<T>(sum[i][j]);
        }
}

} // namespace

template <typename T> static gk_status run(const gk_context *ctx, const ProductOf<T> &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.n, BN), (unsigned)gk_ceil_div(p.m, BM));
    return launch<ladder_registers_kernel<T>>("gk_ladder_gemm", ctx, grid, Tile::THREADS, 0, p);
}

gk_status ladder_registers(const gk_context *ctx, const Product &p) { return run(ctx, p); }
gk_status ladder_registers(const gk_context *ctx, const ProductF32 &p) { return run(ctx, p); }
