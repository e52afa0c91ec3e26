/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 15, warp_tile, stands between rungs 5 and 6. Against rung 5: a warp has the largest tile
 * that its registers hold, 64 x 64, which is 8 x 16 sums a lane.
 *
 * Gain: none, 42.9 to 40.9 TFLOP/s at 4096 cubed (H100). It saves 15 % of shared memory's clocks,
 * but those were not what rung 5 waited for.
 *
 * A block computes 128 x 128 of out with 4 warps. A lane's rows are two runs of 4, 32 apart; its
 * columns are four runs of 4, 16 apart. That makes 6 reads of 16 bytes for 128 multiply-adds; rung
 * 5 has 4 for 64. The price is occupancy: with 128 sums a thread, each quarter of an SM runs two
 * warps, so little hides a wait.
 *
 * Shared memory is that of rung 5, with its swizzles. */
#include "cuda/layout/banks.cuh"
#include "rungs.cuh"
#include "tiles.h"

namespace {

typedef LadderWarpTile Tile;
constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, EACH_M = Tile::EACH_M,
              EACH_N = Tile::EACH_N;
static_assert(BM * BK == Tile::THREADS * 16 && BK * BN == Tile::THREADS * 16,
              "two chunks of 8 elements a thread");

constexpr GK_HD int a_at(int k, int m) { return swizzle<1, 4, 6>::apply(k * BM + m); }
constexpr GK_HD int b_at(int k, int n) {
    return swizzle<1, 0, 3>::apply((k * BN + n) / 4) * 4 + n % 4;
}

constexpr GK_HD int worst_ways() {
    int most = 0;
    for (int warp = 0; warp < 4; ++warp)
        for (int i = 0; i < 16; ++i) {
            int read_a[32] = {}, read_b[32] = {};
            for (int lane = 0; lane < 32; ++lane) {
                read_a[lane] = a_at(i, warp % 2 * Tile::WM + lane / 4 * 4 + i / 8 * 32) * 4;
                read_b[lane] = b_at(i, warp / 2 * Tile::WN + lane % 4 * 4 + i / 4 * 16) * 4;
            }
            const int found[] = {ways(read_a, 16), ways(read_b, 16)};
            for (int x : found) most = x > most ? x : most;
        }
    return most;
}
constexpr GK_HD bool steps_are_constant() {
    bool good = true;
    for (int k = 0; k < BK; ++k)
        for (int x = 0; x < 128; x += 4) {
            good = good && a_at(k, x) == a_at(k / 8 * 8, x) + k % 8 * BM &&
                   b_at(k, x) == b_at(0, x) + k * BN;
            if (x % 64 < 32) good = good && a_at(k, x + 32) == a_at(k, x) + 32;
            if (x % 32 < 16) good = good && b_at(k, x + 16) == b_at(k, x) + 16;
        }
    return good;
}
static_assert(steps_are_constant(), "what the loop relies on");
static_assert(worst_ways() == 1, "no read of shared memory meets a bank conflict");

template <typename T>
__global__ void __launch_bounds__(Tile::THREADS, 2) ladder_warp_tile_kernel(ProductOf<T> p) {
    __shared__ __align__(16) float a_s[BK * BM], b_s[BK * BN];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int64_t row0 = (int64_t)blockIdx.y * BM, col0 = (int64_t)blockIdx.x * BN;
    const int m0 = warp % 2 * Tile::WM + lane / 4 * 4, n0 = warp / 2 * Tile::WN + lane % 4 * 4;
    /* Every read is a constant distance from one of these: a's from the first or second 8 of k, b's
     * from the first or second 32 columns. */
    const float *const a_from[2] = {a_s + a_at(0, m0), a_s + a_at(8, m0)};
    const float *const b_from[2] = {b_s + b_at(0, n0), b_s + b_at(0, n0 + 32)};
    float sum[EACH_M][EACH_N] = {};
    for (int k = 0; k < p.k; k += BK) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int chunk = thread + half * Tile::THREADS;
            const int a_m = chunk / 2, a_k = chunk % 2 * 8, b_k = chunk / 16, b_n = chunk % 16 * 8;
            float v[8];
            load8(p.a + (row0 + a_m) * p.k + k + a_k, row0 + a_m < p.m && k + a_k < p.k, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) a_s[a_at(a_k + i, a_m)] = v[i];
            load8(p.b + (int64_t)(k + b_k) * p.n + col0 + b_n, k + b_k < p.k && col0 + b_n < p.n,
                  v);
            *(float4 *)&b_s[b_at(b_k, b_n)] = make_float4(v[0], v[1], v[2], v[3]);
            *(float4 *)&b_s[b_at(b_k, b_n + 4)] = make_float4(v[4], v[5], v[6], v[7]);
        }
        __syncthreads(); /* both tiles are complete */
#pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            float a[EACH_M], b[EACH_N];
#pragma unroll
            for (int i = 0; i < EACH_M; i += 4)
                *(float4 *)&a[i] = *(const float4 *)(a_from[kk / 8] + kk % 8 * BM + i / 4 * 32);
#pragma unroll
            for (int j = 0; j < EACH_N; j += 4)
                *(float4 *)&b[j] = *(const float4 *)(b_from[j / 8] + kk * BN + j / 4 % 2 * 16);
#pragma unroll
            for (int i = 0; i < EACH_M; ++i)
#pragma unroll
                for (int j = 0; j < EACH_N; ++j) sum[i][j] += a[i] * b[j];
        }
        __syncthreads(); /* every thread has read them */
    }
#pragma unroll
    for (int i = 0; i < EACH_M; ++i)
#pragma unroll
        for (int j = 0; j < EACH_N; j += 4) {
            const int64_t row = row0 + m0 + i / 4 * 32 + i % 4, col = col0 + n0 + j / 4 * 16;
            if (row < p.m && col < p.n) store4(p.out + row * p.n + col, &sum[i][j]);
        }
}

} // namespace

template <typename T> static gk_status run(const gk_context *ctx, const ProductOf<T> &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.n, BN), (unsigned)gk_ceil_div(p.m, BM));
    return launch<ladder_warp_tile_kernel<T>>("gk_ladder_gemm", ctx, grid, Tile::THREADS, 0, p);
}

gk_status ladder_warp_tile(const gk_context *ctx, const Product &p) { return run(ctx, p); }
gk_status ladder_warp_tile(const gk_context *ctx, const ProductF32 &p) { return run(ctx, p); }
