/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_mma.cuh: copies, products and stores of the backward's two mma.sync kernels, bwd_sm80.cuh
 * and bwd_dq_sm80.cuh. A warp has M x 16 rows and N x 8 columns of accumulators. */
#ifndef GPUKERN_CUDA_BWD_MMA_CUH
#define GPUKERN_CUDA_BWD_MMA_CUH

#include "../../tile/copy.cuh"
#include "../../tile/fragment.cuh"
#include "bwd.cuh"
#include "../tiles.h"

/* Copies rows [first, end) of a tile whose row 0 is at src_g. Sets the other rows to zero without
 * reading them. */
template <class Tile, int THREADS, class T>
__device__ __forceinline__ void copy_rows(smem_addr tile_s, const T *src_g, int64_t row_stride,
                                          int first, int end, int columns) {
    typedef tile_copy<Tile, THREADS> C;
    static_assert(C::same_chunk && C::total % THREADS == 0, "a thread copies one column of chunks");
    const int row = C::row(threadIdx.x, 0), chunk = C::chunk(threadIdx.x, 0);
    if (chunk * 8 >= columns) end = first; /* columns is a multiple of 8 */
    src_g += row * row_stride + chunk * 8;
#pragma unroll
    for (int pass = 0; pass < C::passes; ++pass) {
        const int at = row + pass * (THREADS / Tile::chunks);
        cp_async_cg_16(tile_s + C::offset(threadIdx.x, pass), src_g,
                       at >= first && at < end ? 16 : 0);
        src_g += row_stride * (THREADS / Tile::chunks);
    }
}

/* c [16 * M][8 * N] += A B^T, where A is 16 * M rows and 16 columns of one tile and B is 8 * N
 * rows and 16 columns of another. */
template <class TileA, class TileB, class T, int M, int N>
__device__ __forceinline__ void mma_rows(float (&c)[M][N][4], smem_addr a_at, smem_addr b_at) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) load_frag_a(a[m], TileA::down(a_at, 16 * m));
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        uint32_t b[4];
        load_frag_b(b, TileB::down(b_at, 16 * n));
#pragma unroll
        for (int m = 0; m < M; ++m) {
            mma_add<T>(c[m][2 * n], a[m], b);
            mma_add<T>(c[m][2 * n + 1], a[m], b + 2);
        }
    }
}

/* Two elements with NaN and infinities replaced by finite numbers, so that 0 times them is 0. */
template <class T> __device__ __forceinline__ uint32_t finite2(uint32_t x);
template <> __device__ __forceinline__ uint32_t finite2<__nv_bfloat16>(uint32_t x) {
    const uint32_t most = 0x7f7f7f7fu, least = 0xff7fff7fu;
    const __nv_bfloat162 y =
        __hmin2(__hmax2(*(const __nv_bfloat162 *)&x, *(const __nv_bfloat162 *)&least),
                *(const __nv_bfloat162 *)&most);
    return *(const uint32_t *)&y;
}
template <> __device__ __forceinline__ uint32_t finite2<__half>(uint32_t x) {
    const uint32_t most = 0x7bff7bffu, least = 0xfbfffbffu;
    const __half2 y =
        __hmin2(__hmax2(*(const __half2 *)&x, *(const __half2 *)&least), *(const __half2 *)&most);
    return *(const uint32_t *)&y;
}

/* c [16 * M][8 * N] += a [16 * M][16] B, where B is 16 rows and 8 * N columns of a tile. FINITE: B
 * may hold NaN or inf that belong to an element 0 of A. They are replaced by finite numbers. */
template <class TileB, class T, bool FINITE = false, int M, int N>
__device__ __forceinline__ void mma_columns(float (&c)[M][N][4], const uint32_t (&a)[M][4],
                                            smem_addr b_base) {
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
        uint32_t b[4];
        load_frag_b_trans(b, TileB::along(b_base, 2 * n));
        if (FINITE)
#pragma unroll
            for (int e = 0; e < 4; ++e) b[e] = finite2<T>(b[e]);
#pragma unroll
        for (int m = 0; m < M; ++m) {
            mma_add<T>(c[m][2 * n], a[m], b);
            mma_add<T>(c[m][2 * n + 1], a[m], b + 2);
        }
    }
}

/* Stores c times factor in float32. row, col: the place of c[0][0][0] in to_g, which has `rows`
 * rows and `columns` columns, an even number. */
template <int M, int N>
__device__ __forceinline__ void store_sums(float *to_g, int64_t row_stride,
                                           const float (&c)[M][N][4], float factor, int row,
                                           int col, int rows, int columns) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row + 16 * m + 8 * half;
#pragma unroll
            for (int n = 0; n < N; ++n)
                if (i < rows && col + 8 * n < columns)
                    *(float2 *)(to_g + i * row_stride + col + 8 * n) =
                        make_float2(c[m][n][2 * half] * factor, c[m][n][2 * half + 1] * factor);
        }
}

#endif
