/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 3, shared. Against rung 2: the block first copies a 32 x 32 square of a and one of b to
 * shared memory as floats. Every thread then takes 32 products from there.
 *
 * Gain: 5.04 to 7.78 TFLOP/s at 4096 cubed (H200).
 *
 * An element of a is read from global memory once for 32 columns, and converted once, instead of
 * once for each column. Shared memory delivers 128 bytes a clock. A row of b costs one clock. A
 * read of 16 bytes of a, which all lanes share, covers 4 steps of k; the model charges one clock
 * for it, and the profiler counted two (learn/ladder.md). */
#include "rungs.cuh"
#include "tiles.h"

namespace {

constexpr int SQUARE = LADDER_SQUARE;

template <typename T>
__global__ void __launch_bounds__(SQUARE *SQUARE) ladder_shared_kernel(ProductOf<T> p) {
    __shared__ __align__(16) float a_s[SQUARE][SQUARE], b_s[SQUARE][SQUARE];
    const int x = threadIdx.x % SQUARE, y = threadIdx.x / SQUARE;
    const int row = blockIdx.y * SQUARE + y, col = blockIdx.x * SQUARE + x;
    float sum = 0;
    for (int k = 0; k < p.k; k += SQUARE) {
        a_s[y][x] = row < p.m && k + x < p.k ? to_f32(p.a[(int64_t)row * p.k + k + x]) : 0;
        b_s[y][x] = k + y < p.k && col < p.n ? to_f32(p.b[(int64_t)(k + y) * p.n + col]) : 0;
        __syncthreads(); /* both squares are complete */
#pragma unroll
        for (int kk = 0; kk < SQUARE; ++kk) sum += a_s[y][kk] * b_s[kk][x];
        __syncthreads(); /* every thread has read them */
    }
    if (row < p.m && col < p.n) p.out[(int64_t)row * p.n + col] = from_f32<T>(sum);
}

} // namespace

template <typename T> static gk_status run(const gk_context *ctx, const ProductOf<T> &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.n, SQUARE), (unsigned)gk_ceil_div(p.m, SQUARE));
    return launch<ladder_shared_kernel<T>>("gk_ladder_gemm", ctx, grid, SQUARE * SQUARE, 0, p);
}

gk_status ladder_shared(const gk_context *ctx, const Product &p) { return run(ctx, p); }
gk_status ladder_shared(const gk_context *ctx, const ProductF32 &p) { return run(ctx, p); }
