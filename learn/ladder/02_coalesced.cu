/* SPDX-License-Identifier: BSD-3-Clause */
/* Rung 2, coalesced. Against rung 1 one thing changes: neighbouring threads take neighbouring
 * columns of out, so the modulo and the division change places.
 *
 * Gain: 0.496 to 5.04 TFLOP/s at 4096 cubed (H200).
 *
 * The 32 lanes of a warp now share one element of a and read 64 bytes of one line of b: two lines
 * for 32 multiply-adds instead of 33. The model of learn/benchmarks/ladder_model.py charges L1 two
 * clocks for each load, even one that touches a single line. */
#include "rungs.cuh"
#include "tiles.h"

namespace {

template <typename T>
__global__ void __launch_bounds__(LADDER_SQUARE *LADDER_SQUARE)
    ladder_coalesced_kernel(ProductOf<T> p) {
    const int row = blockIdx.y * LADDER_SQUARE + threadIdx.x / LADDER_SQUARE;
    const int col = blockIdx.x * LADDER_SQUARE + threadIdx.x % LADDER_SQUARE;
    if (row >= p.m || col >= p.n) return;
    float sum = 0;
    for (int k = 0; k < p.k; ++k)
        sum += to_f32(p.a[(int64_t)row * p.k + k]) * to_f32(p.b[(int64_t)k * p.n + col]);
    p.out[(int64_t)row * p.n + col] = from_f32<T>(sum);
}

} // namespace

template <typename T> static gk_status run(const gk_context *ctx, const ProductOf<T> &p) {
    const dim3 grid((unsigned)gk_ceil_div(p.n, LADDER_SQUARE),
                    (unsigned)gk_ceil_div(p.m, LADDER_SQUARE));
    return launch<ladder_coalesced_kernel<T>>("gk_ladder_gemm", ctx, grid,
                                              LADDER_SQUARE * LADDER_SQUARE, 0, p);
}

gk_status ladder_coalesced(const gk_context *ctx, const Product &p) { return run(ctx, p); }
gk_status ladder_coalesced(const gk_context *ctx, const ProductF32 &p) { return run(ctx, p); }
