/* SPDX-License-Identifier: BSD-3-Clause */
/* split.cuh: split-K through memory, for calls of gemm_sm80 and gemm_plain with too few tiles to
 * fill the GPU. Each split of k writes its sums to the workspace:
 *
 *   partials [splits][batch][m][ld]   float (double for float64), ld = n rounded up to 8
 *
 * gemm_reduce_kernel then adds them and applies the epilogue. It adds in the order of the splits,
 * which is the same in every run. */
#ifndef GPUKERN_CUDA_GEMM_SPLIT_CUH
#define GPUKERN_CUDA_GEMM_SPLIT_CUH

#include "../../host/launch.cuh"
#include "epilogue.cuh"
#include "split.h"

__host__ __device__ __forceinline__ int64_t partials_ld(int64_t n) { return (n + 7) / 8 * 8; }

/* Writes COLS sums of a row from `col` on. Columns between n and ld are padding and may be written
 * with any value. */
template <int COLS, class W>
__device__ __forceinline__ void write_partials(const GemmProblem &p, int split, int64_t batch,
                                               int64_t row, int64_t col, const W *v) {
    const int64_t ld = partials_ld(p.n);
    W *to_g = (W *)p.partials + (((int64_t)split * p.batch + batch) * p.m + row) * ld + col;
    write_cols<W, COLS>(to_g, 1, true, COLS, v);
}

/* The blocks of gemm_reduce_kernel are small, so that its little work spreads over all SMs. */
constexpr int REDUCE_THREADS = 128, REDUCE_COLS = 4;

template <class T>
__global__ void __launch_bounds__(REDUCE_THREADS) gemm_reduce_kernel(OwnProblem p) {
    typedef typename element<T>::acc W;
    const int64_t ld = partials_ld(p.n), quads = ld / REDUCE_COLS;
    const int64_t i = (int64_t)blockIdx.x * REDUCE_THREADS + threadIdx.x;
    if (i >= p.batch * p.m * quads) return;
    const int64_t col = i % quads * REDUCE_COLS, row = i / quads % p.m, batch = i / quads / p.m;
    if (col >= p.n) return;
    const int64_t step = p.batch * p.m * ld;
    const W *from_g = (const W *)p.partials + (batch * p.m + row) * ld + col;
    W sum[REDUCE_COLS] = {};
#pragma unroll 4
    for (int s = 0; s < p.splits; ++s) {
        W x[REDUCE_COLS];
        read_cols<W, REDUCE_COLS>(from_g + s * step, 1, true, REDUCE_COLS, x);
#pragma unroll
        for (int c = 0; c < REDUCE_COLS; ++c) sum[c] += x[c];
    }
    epilogue_row<T, REDUCE_COLS>(p.epilogue, gemm_place(p, batch), row, col,
                                 (int)min((int64_t)REDUCE_COLS, p.n - col), sum);
}

template <class T> inline gk_status launch_reduce(const gk_context *ctx, const OwnProblem &p) {
    const int64_t quads = p.batch * p.m * (partials_ld(p.n) / REDUCE_COLS);
    return launch<gemm_reduce_kernel<T>>(
        "gk_gemm", ctx, dim3((unsigned)gk_ceil_div(quads, REDUCE_THREADS)), REDUCE_THREADS, 0, p);
}

#endif
