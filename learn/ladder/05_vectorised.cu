/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 5, vectorised. Against rung 4: every access moves 16 bytes (8 elements from global memory, 4
 * floats to or from shared memory, 4 results), and no access has a bank conflict.
 *
 * Gain: 23.1 to 37.5 TFLOP/s at 4096 cubed (H200).
 *
 * Shared memory holds the same two tiles as in rung 4. A swizzle of the float's index moves some of
 * the values:
 *   a_s [16 k][128 m]   A warp stores 16 rows of a at a time, with k and k + 8 of each row.
 *                       Values of k 8 to 15 are stored 16 columns off, in the 16 banks that
 *                       k 0 to 7 leave free.
 *   b_s [16 k][128 n]   A lane stores 32 bytes as two halves. Without a swizzle, lanes 4 apart
 *                       would meet in a bank. In every second 128 bytes, the two halves of each
 *                       32 bytes change places.
 *
 * A lane's rows are two runs of 4, 32 apart. Its columns are two runs of 4, 16 apart. Each run is
 * one read of 16 bytes. */
#include "cuda/ptx/regs.cuh"
#include "cuda/layout/banks.cuh"
#include "rungs.cuh"
#include "tiles.h"

namespace {

typedef LadderRegisters Tile;
constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, EACH = Tile::EACH;
static_assert(BM * BK == Tile::THREADS * 8 && BK * BN == Tile::THREADS * 8,
              "a chunk of 8 elements a thread");

/* Index in floats of element (k, m) of a_s and of element (k, n) of b_s. */
constexpr GK_HD int a_at(int k, int m) { return swizzle<1, 4, 6>::apply(k * BM + m); }
constexpr GK_HD int b_at(int k, int n) {
    return swizzle<1, 0, 3>::apply((k * BN + n) / 4) * 4 + n % 4;
}

/* The worst bank conflict of any warp, over the stores to a_s and b_s (both halves) and the reads
 * of both. */
constexpr GK_HD int worst_ways() {
    int most = 0;
    for (int warp = 0; warp < 8; ++warp)
        for (int i = 0; i < 8; ++i) {
            int store_a[32] = {}, store_b[32] = {}, read_a[32] = {}, read_b[32] = {};
            for (int lane = 0; lane < 32; ++lane) {
                const int thread = warp * 32 + lane;
                store_a[lane] = a_at(thread % 2 * 8 + i, thread / 2) * 4;
                store_b[lane] = b_at(thread / 16, thread % 16 * 8 + i / 4 * 4) * 4;
                read_a[lane] = a_at(2 * i, warp % 2 * Tile::WM + lane / 4 * 4) * 4;
                read_b[lane] = b_at(2 * i, warp / 2 * Tile::WN + lane % 4 * 4) * 4;
            }
            const int found[] = {ways(store_a, 4), ways(store_b, 16), ways(read_a, 16),
                                 ways(read_b, 16)};
            for (int x : found) most = x > most ? x : most;
        }
    return most;
}
static_assert(worst_ways() == 1, "no access of shared memory meets a bank conflict");

/* True if every access of a thread is a constant distance from its first one. The main loop relies
 * on that: a step of up to 8 in k, of 32 rows of a or of 16 columns of b changes no swizzled bit.
 */
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

template <typename T>
__global__ void __launch_bounds__(Tile::THREADS, 2) ladder_vectorised_kernel(ProductOf<T> p) {
    __shared__ __align__(16) float a_s[BK * BM], b_s[BK * BN];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int64_t row0 = (int64_t)blockIdx.y * BM, col0 = (int64_t)blockIdx.x * BN;
    const int m0 = warp % 2 * Tile::WM + lane / 4 * 4, n0 = warp / 2 * Tile::WN + lane % 4 * 4;
    /* the chunk of 8 elements that this thread copies, of a and of b */
    const int a_m = thread / 2, a_k = thread % 2 * 8, b_k = thread / 16, b_n = thread % 16 * 8;
    const T *a_g = p.a + (row0 + a_m) * p.k + a_k, *b_g = p.b + (int64_t)b_k * p.n + col0 + b_n;
    float *const a_to = a_s + a_at(a_k, a_m);
    const float *const a_from[2] = {a_s + a_at(0, m0), a_s + a_at(8, m0)}, *const b_from =
                                                                               b_s + b_at(0, n0);
    float sum[EACH][EACH] = {};
    for (int k = 0; k < p.k; k += BK) {
        float v[8];
        load8(a_g + k, row0 + a_m < p.m && k + a_k < p.k, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) a_to[i * BM] = v[i];
        load8(b_g + (int64_t)k * p.n, k + b_k < p.k && col0 + b_n < p.n, v);
        *(float4 *)&b_s[b_at(b_k, b_n)] = make_float4(v[0], v[1], v[2], v[3]);
        *(float4 *)&b_s[b_at(b_k, b_n + 4)] = make_float4(v[4], v[5], v[6], v[7]);
        __syncthreads(); /* both tiles are complete */
#pragma unroll
        for (int kk = 0; kk < BK; ++kk) {
            const float *const a_kk = a_from[kk / 8] + kk % 8 * BM, *const b_kk = b_from + kk * BN;
            const float4 a_lo = *(const float4 *)a_kk, a_hi = *(const float4 *)(a_kk + 32);
            const float4 b_lo = *(const float4 *)b_kk, b_hi = *(const float4 *)(b_kk + 16);
            const float a[EACH] = {a_lo.x, a_lo.y, a_lo.z, a_lo.w, a_hi.x, a_hi.y, a_hi.z, a_hi.w};
            const float b[EACH] = {b_lo.x, b_lo.y, b_lo.z, b_lo.w, b_hi.x, b_hi.y, b_hi.z, b_hi.w};
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
        for (int j = 0; j < EACH; j += 4) {
            const int64_t row = row0 + m0 + i / 4 * 32 + i % 4, col = col0 + n0 + j * 4;
            if (row < p.m && col < p.n) store4(p.out + row * p.n + col, &sum[i][j]);
        }
}

} // namespace

template <typename T> static gk_status run(const gk_context *ctx, const ProductOf<T> &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.n, BN), (unsigned)gk_ceil_div(p.m, BM));
    return launch<ladder_vectorised_kernel<T>>("gk_ladder_gemm", ctx, grid, Tile::THREADS, 0, p);
}

gk_status ladder_vectorised(const gk_context *ctx, const Product &p) { return run(ctx, p); }
gk_status ladder_vectorised(const gk_context *ctx, const ProductF32 &p) { return run(ctx, p); }
