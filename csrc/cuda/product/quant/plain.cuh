/* SPDX-License-Identifier: BSD-3-Clause */
/* plain.cuh: a tile of a quantised product on every GPU, for any shape and strides.
 * product_plain.cu and grouped_gemm_plain.cu use it for calls that no faster kernel serves.
 *
 * A block computes 64 x 64 results, and a thread 4 x 4. Both operands are decoded to floats in
 * shared memory, PLAIN_K of k at a time. Sums over PLAIN_K of k are exact for int8. They are added
 * to int32 sums, or they are multiplied by the scales of their block of k and added to float32
 * sums. */
#ifndef GPUKERN_CUDA_QUANT_PLAIN_CUH
#define GPUKERN_CUDA_QUANT_PLAIN_CUH

#include "product.cuh"
#include "tiles.h"

struct PlainProduct {
    const void *a;
    int64_t a_m, a_k, m, n, k;
    gk_dtype a_dtype;
    gk_scales sa, sb;
    Finish f;
    bool exact, along_k;
};

/* Computes rows [row0, row_end), at most 64, and columns from col0 on, over k [k_begin, k_end).
 * b(k, column) reads the other operand. ReadB::SCALES_ALONG_K is true if the op of that operand may
 * have scales along k. */
template <class ReadB>
__device__ __forceinline__ void plain_tile(const PlainProduct &p, const ReadB &b, int64_t row0,
                                           int64_t row_end, int64_t col0, int64_t k_begin,
                                           int64_t k_end) {
    __shared__ float a_s[PLAIN_K][PLAIN_TILE + 1], b_s[PLAIN_K][PLAIN_TILE + 1];
    const int tr = threadIdx.x / 16, tc = threadIdx.x % 16; /* rows tr + 16 i, columns tc + 16 j */
    float sum[4][4] = {};
    int whole[4][4] = {};
    for (int64_t k0 = k_begin; k0 < k_end; k0 += PLAIN_K) {
        __syncthreads();
        for (int i = threadIdx.x; i < PLAIN_TILE * PLAIN_K; i += 256) {
            const int k = i % PLAIN_K, x = i / PLAIN_K;
            const bool in_k = k0 + k < k_end;
            a_s[k][x] = in_k && row0 + x < row_end
                            ? load_any(p.a, p.a_dtype, (row0 + x) * p.a_m + (k0 + k) * p.a_k)
                            : 0.f;
            b_s[k][x] = in_k && col0 + x < p.n ? b(k0 + k, col0 + x) : 0.f;
        }
        __syncthreads();
        float part[4][4] = {};
#pragma unroll 4
        for (int k = 0; k < PLAIN_K; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    part[i][j] = fmaf(a_s[k][tr + 16 * i], b_s[k][tc + 16 * j], part[i][j]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int64_t row = min(row0 + tr + 16 * i, row_end - 1),
                              col = min(col0 + tc + 16 * j, p.n - 1);
                if (p.exact)
                    whole[i][j] += (int)part[i][j];
                else if (ReadB::SCALES_ALONG_K && p.along_k)
                    sum[i][j] = fmaf(part[i][j] * scale_of(p.sa, row, k0), scale_of(p.sb, k0, col),
                                     sum[i][j]);
                else
                    sum[i][j] += part[i][j];
            }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int64_t row = row0 + tr + 16 * i, col = col0 + tc + 16 * j;
            if (row >= row_end || col >= p.n) continue;
            float x = p.exact ? (float)whole[i][j] : sum[i][j];
            if (!p.along_k) x = times_scales(x, scale_of(p.sa, row, 0), scale_of(p.sb, 0, col));
            store_value<CodesBySoftware>(p.f, row, col, finish(p.f, row, col, x));
        }
}

/* b as a matrix in memory. */
struct MatrixB {
    static constexpr bool SCALES_ALONG_K = true;
    const void *data;
    int64_t step_k, step_n;
    gk_dtype dtype;
    __device__ __forceinline__ float operator()(int64_t k, int64_t n) const {
        return load_any(data, dtype, k * step_k + n * step_n);
    }
};

template <class ReadB> struct PlainParams {
    PlainProduct p;
    ReadB b;
};

template <class ReadB>
__global__ void __launch_bounds__(256) product_plain_kernel(PlainParams<ReadB> x) {
    const int64_t row0 = (int64_t)blockIdx.y * PLAIN_TILE;
    plain_tile(x.p, x.b, row0, min(row0 + PLAIN_TILE, x.p.m), (int64_t)blockIdx.x * PLAIN_TILE, 0,
               x.p.k);
}

inline bool plain_in_grid(int64_t m) { return m <= (int64_t)PLAIN_TILE * 65535; }

template <class ReadB>
gk_status start_plain(const gk_context *ctx, const char *op, const PlainParams<ReadB> &x) {
    const dim3 grid((unsigned)gk_ceil_div(x.p.n, PLAIN_TILE),
                    (unsigned)gk_ceil_div(x.p.m, PLAIN_TILE));
    return launch<product_plain_kernel<ReadB>>(op, ctx, grid, 256, 0, x);
}

#endif
