/* SPDX-License-Identifier: BSD-3-Clause */
/* bias.cuh: reads the bias and c in accumulator order, for store_panels.cuh. It also has prefetches
 * of the bias, of c and of the epilogue's parameters, which hopper.cuh issues before the products.
 */
#ifndef GPUKERN_CUDA_GEMM_BIAS_CUH
#define GPUKERN_CUDA_GEMM_BIAS_CUH

#include "../../ptx/prefetch_l2.cuh"
#include "../../ptx/regs.cuh"
#include "epilogue.cuh"

/* Reads the bias of a lane's columns from col0 on: two of every eight. All loads are issued before
 * a value is used. Values after the last column are arbitrary, because their results are not
 * stored. ANY: the bias may be one that cannot be read in pairs. */
template <class R, bool ANY, int N>
__device__ __forceinline__ void read_bias(const GemmProblem &p, int64_t col0, int lane,
                                          float (&bias)[N]) {
    const GemmEpilogue &e = p.epilogue;
    const int64_t col = col0 + lane % 4 * 2, last = p.n - 2;
    if (ANY && !e.bias_vectors) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const int64_t first = min(col + i * 4, p.n - 1);
            read_any<R, 2>(e.bias, e.bias_dtype, first * e.bias_col, e.bias_col, false,
                           first < p.n - 1 ? 2 : 1, bias + i);
        }
    } else if (e.bias_dtype == GK_F32) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const float2 two = *(const float2 *)((const float *)e.bias + min(col + i * 4, last));
            bias[i] = two.x;
            bias[i + 1] = two.y;
        }
    } else if constexpr (element<R>::bits == 16) {
        uint32_t two[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i)
            two[i] = *(const uint32_t *)((const R *)e.bias + min(col + i * 8, last));
#pragma unroll
        for (int i = 0; i < N; ++i) bias[i] = to_acc(((const R *)&two[i / 2])[i % 2]);
    }
}

/* Reads c for N of a warp's accumulators from row0, col0 on. All loads are issued before a value
 * is used. c must have c_vectors, and p.n must be a multiple of 8. Values outside the matrix are
 * arbitrary. */
template <class R, int N>
__device__ __forceinline__ void read_c_pairs(const GemmProblem &p, int64_t c_batch, int64_t row0,
                                             int64_t col0, int lane, float *x) {
    const GemmEpilogue &e = p.epilogue;
    const int64_t col = col0 + lane % 4 * 2, low = min(row0 + lane / 4, p.m - 1),
                  high = min(low + 8, p.m - 1);
    const int64_t at[2] = {c_batch + low * e.c_row + col, c_batch + high * e.c_row + col};
    const int left = (int)(p.n - col0);
    if (e.c_dtype == GK_F32) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            float2 two = {};
            if (i / 4 * 8 < left)
                two = *(const float2 *)((const float *)e.c + at[i / 2 % 2] + i / 4 * 8);
            x[i] = two.x;
            x[i + 1] = two.y;
        }
    } else if constexpr (element<R>::bits == 16) {
        uint32_t two[N / 2];
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            two[i] = 0;
            if (i / 2 * 8 < left)
                two[i] = *(const uint32_t *)((const R *)e.c + at[i % 2] + i / 2 * 8);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = to_acc(((const R *)&two[i / 2])[i % 2]);
    }
}

/* Prefetches the bias of BN columns from col0 on into L1. */
template <int BN>
__device__ __forceinline__ void prefetch_bias(const GemmProblem &p, int64_t col0, int lane) {
    const GemmEpilogue &e = p.epilogue;
    const int bytes = e.bias_dtype == GK_F32 ? 4 : 2;
    static_assert(BN * 4 <= 32 * 32, "a sector a lane");
    if (e.bias_vectors && lane < BN * bytes / 32)
        prefetch_l1((const char *)e.bias + min(col0 * bytes + lane * 32, p.n * bytes - bytes));
}

/* Prefetches c of a warp's 16 rows x BN columns into L2 while the products run, if the columns of c
 * have stride 1. */
template <int BN>
__device__ __forceinline__ void prefetch_c(const GemmProblem &p, unsigned batch, int64_t row0,
                                           int64_t col0, int lane) {
    const GemmEpilogue &e = p.epilogue;
    if (!e.c_vectors) return;
    const int bytes = e.c_dtype == GK_F32 ? 4 : 2;
    const int64_t col = col0 + lane * 32 / bytes;
    static_assert(BN * 4 <= 32 * 32, "a sector a lane");
    const bool has = lane < BN * bytes / 32 && col < p.n;
    const int rows = (int)min((int64_t)16, p.m - row0);
    const char *c_g = (const char *)e.c + (gemm_place(p, batch).c + row0 * e.c_row + col) * bytes;
#pragma unroll 1
    for (int r = 0; r < rows; ++r, c_g += e.c_row * bytes)
        if (has) prefetch_l2(c_g);
}

/* Loads the epilogue's parameters into the constant cache. */
__device__ __forceinline__ void prefetch_epilogue(const GemmEpilogue &e) {
    have(e.alpha);
    have(e.out);
    have(e.out_row);
    have((int)e.activation);
}

#endif
