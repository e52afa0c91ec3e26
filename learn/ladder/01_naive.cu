/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 1, naive. One thread computes one element of out and reads its operands from global memory.
 *
 * The starting point: 0.496 TFLOP/s at 4096 cubed (H200), 0.0006 of cuBLAS.
 *
 * Neighbouring threads take neighbouring rows of out. So the 32 lanes of a warp read 32 different
 * rows of a, that is 32 lines of 128 bytes for 64 bytes of values, and one shared element of b.
 * Nearly all of these reads hit L1, but L1 delivers one line a clock: 33 clocks for 32
 * multiply-adds. The kernel waits for L1, not for memory. */
#include "rungs.cuh"
#include "tiles.h"

namespace {

template <typename T>
__global__ void __launch_bounds__(LADDER_SQUARE *LADDER_SQUARE)
    ladder_naive_kernel(ProductOf<T> p) {
    const int row = blockIdx.x * LADDER_SQUARE + threadIdx.x % LADDER_SQUARE;
    const int col = blockIdx.y * LADDER_SQUARE + threadIdx.x / LADDER_SQUARE;
    if (row >= p.m || col >= p.n) return;
    float sum = 0;
    for (int k = 0; k < p.k; ++k)
        sum += to_f32(p.a[(int64_t)row * p.k + k]) * to_f32(p.b[(int64_t)k * p.n + col]);
    p.out[(int64_t)row * p.n + col] = from_f32<T>(sum);
}

} // namespace

template <typename T> static gk_status run(const gk_context *ctx, const ProductOf<T> &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.m, LADDER_SQUARE),
                    (unsigned)gk_ceil_div(p.n, LADDER_SQUARE));
    return launch<ladder_naive_kernel<T>>("gk_ladder_gemm", ctx, grid,
                                          LADDER_SQUARE * LADDER_SQUARE, 0, p);
}

gk_status ladder_naive(const gk_context *ctx, const Product &p) { return run(ctx, p); }
gk_status ladder_naive(const gk_context *ctx, const ProductF32 &p) { return run(ctx, p); }
