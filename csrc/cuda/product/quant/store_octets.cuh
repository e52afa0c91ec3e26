/* SPDX-License-Identifier: BSD-3-Clause */
/* store_octets.cuh: the epilogue of the quantised mma.sync products (scaled_gemm_sm80.cu,
 * sparse_gemm_sm80.cu, grouped_gemm_sm80.cu). A warp's sums go through shared memory, 32 rows at a
 * time, so that a lane gets 8 columns of a row. finish_octet then applies the formula of `finish`
 * in product.cuh to these 8 elements and stores them. */
#ifndef GPUKERN_CUDA_QUANT_STORE_OCTETS_CUH
#define GPUKERN_CUDA_QUANT_STORE_OCTETS_CUH

#include "../gemm/epilogue.cuh"
#include "product.cuh"

/* ---- sums through shared memory -------------------------------------------------------------- */
template <class Tile> struct SumStage {
    static constexpr int ROWS = Tile::WM < 32 ? Tile::WM : 32, LD = Tile::WN + 8,
                         WARP_BYTES = ROWS * LD * 4;
    static constexpr int BYTES = Tile::THREADS / 32 * WARP_BYTES, OCTETS = Tile::WN / 8;
};

/* Shifts the sums down by BY tiles of 16 rows. */
template <int BY, class Sum, int MT, int NT>
__device__ __forceinline__ void move_sums(Sum (&sum)[MT][NT][4]) {
#pragma unroll
    for (int i = 0; i + BY < MT; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[i][n][e] = sum[i + BY][n][e];
}

/* Calls take(row, v) for each of the lane's rows among the warp's WM. v has the sums of 8 columns
 * from 8 (lane % OCTETS) on. smem: the block's shared memory. No thread may use it since the last
 * barrier. */
template <class Tile, class Sum, class Take>
__device__ __forceinline__ void
take_octets(unsigned char *smem, Sum (&sum)[Tile::WM / 16][Tile::WN / 8][4], const Take &take) {
    typedef SumStage<Tile> S;
    constexpr int AT_ONCE = S::ROWS / 16;
    const int lane = threadIdx.x % 32;
    float *const sums = (float *)(smem + threadIdx.x / 32 * S::WARP_BYTES);
#pragma unroll 1
    for (int row0 = 0; row0 < Tile::WM; row0 += S::ROWS) { /* each pass shifts the sums down */
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
            for (int n = 0; n < Tile::WN / 8; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *(float2 *)(sums + (i * 16 + h * 8 + lane / 4) * S::LD + n * 8 + lane % 4 * 2) =
                        make_float2((float)sum[i][n][2 * h], (float)sum[i][n][2 * h + 1]);
        __syncwarp(); /* lanes read what other lanes wrote */
#pragma unroll 1
        for (int r = lane / S::OCTETS; r < S::ROWS; r += 32 / S::OCTETS) {
            const float *from_s = sums + r * S::LD + lane % S::OCTETS * 8;
            /* Half of the lanes read their second four sums first, which avoids bank conflicts. */
            const bool late = lane / 4 % 2;
            const float4 x = *(const float4 *)(from_s + (late ? 4 : 0)),
                         y = *(const float4 *)(from_s + (late ? 0 : 4));
            float v[8] = {late ? y.x : x.x, late ? y.y : x.y, late ? y.z : x.z, late ? y.w : x.w,
                          late ? x.x : y.x, late ? x.y : y.y, late ? x.z : y.z, late ? x.w : y.w};
            take(row0 + r, v);
        }
        __syncwarp();
        move_sums<AT_ONCE>(sum);
    }
}

/* The same for a transposed result: calls take(column, row, v), where v has rows `row` to row +
 * 7 of the warp. */
template <class Tile> struct SumStageAcross {
    static constexpr int ROWS = Tile::WM < 32 ? Tile::WM : 32, LD = ROWS + 4,
                         WARP_BYTES = Tile::WN * LD * 4;
    static constexpr int BYTES = Tile::THREADS / 32 * WARP_BYTES, OCTETS = ROWS / 8;
};
template <class Tile, class Sum, class Take>
__device__ __forceinline__ void take_octets_across(unsigned char *smem,
                                                   Sum (&sum)[Tile::WM / 16][Tile::WN / 8][4],
                                                   const Take &take) {
    typedef SumStageAcross<Tile> S;
    constexpr int AT_ONCE = S::ROWS / 16;
    const int lane = threadIdx.x % 32;
    float *const sums = (float *)(smem + threadIdx.x / 32 * S::WARP_BYTES);
#pragma unroll 1
    for (int row0 = 0; row0 < Tile::WM; row0 += S::ROWS) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
            for (int n = 0; n < Tile::WN / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sums[(n * 8 + lane % 4 * 2 + e % 2) * S::LD + i * 16 + e / 2 * 8 + lane / 4] =
                        (float)sum[i][n][e];
        __syncwarp();
#pragma unroll 1
        for (int c = lane / S::OCTETS; c < Tile::WN; c += 32 / S::OCTETS) {
            const float *from_s = sums + c * S::LD + lane % S::OCTETS * 8;
            const float4 x = *(const float4 *)from_s, y = *(const float4 *)(from_s + 4);
            float v[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
            take(c, row0 + lane % S::OCTETS * 8, v);
        }
        __syncwarp();
        move_sums<AT_ONCE>(sum);
    }
}

/* ---- 8 neighbours of a row ------------------------------------------------------------------- */
/* True for c or the result if 8 neighbours of a row can be accessed 16 bytes at a time (8-bit
 * codes: 8 bytes): columns have stride 1, and rows are aligned to 16 bytes. */
struct Vectors {
    bool c, out;
};

inline bool octets_aligned(const void *data, gk_dtype dtype, int64_t row) {
    return (uintptr_t)data % 16 == 0 && gk_whole_chunks(dtype, row);
}
inline Vectors vectors_of(const Finish &f) {
    return {f.c && f.c_col == 1 && octets_aligned(f.c, f.c_dtype, f.c_row),
            octets_aligned(f.out, f.out_dtype, f.out_row)};
}

__device__ __forceinline__ void read_octet(const void *data, gk_dtype dtype, int64_t at,
                                           int64_t step, bool vectors, int valid, float (&v)[8]) {
    if (dtype == GK_F32) {
        read_cols<float, 8>((const float *)data + at, step, vectors, valid, v);
    } else if (dtype == GK_BF16) {
        read_cols<__nv_bfloat16, 8>((const __nv_bfloat16 *)data + at, step, vectors, valid, v);
    } else if (dtype == GK_F16) {
        read_cols<__half, 8>((const __half *)data + at, step, vectors, valid, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = i < valid ? load_any(data, dtype, at + i * step) : 0.f;
    }
}

__device__ __forceinline__ void write_octet(const Finish &f, int64_t at, bool vectors, int valid,
                                            const float (&v)[8]) {
    if (f.out_dtype == GK_F32) {
        write_cols<float, 8>((float *)f.out + at, 1, vectors, valid, v);
    } else if (f.out_dtype == GK_BF16) {
        write_cols<__nv_bfloat16, 8>((__nv_bfloat16 *)f.out + at, 1, vectors, valid, v);
    } else if (f.out_dtype == GK_F16) {
        write_cols<__half, 8>((__half *)f.out + at, 1, vectors, valid, v);
    } else { /* codes: the op's check allows no other dtype */
        uint8_t *const to_g = (uint8_t *)f.out + at;
        const uint2 codes = make_uint2(codes_x4<CodesBySoftware>(f.out_dtype, v),
                                       codes_x4<CodesBySoftware>(f.out_dtype, v + 4));
        if (vectors && valid == 8) {
            *(uint2 *)to_g = codes;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < valid) to_g[i] = (uint8_t)((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
        }
    }
}

/* Applies the epilogue to columns col to col + 7 of row `row`, and stores those `valid` that lie
 * inside the result. v: their sums. bias: the biases of these columns. */
__device__ __forceinline__ void finish_octet(const Finish &f, const Vectors &vectors, int64_t row,
                                             int64_t col, int valid, float (&v)[8],
                                             const float (&bias)[8]) {
    if (f.c) {
        float x[8];
        read_octet(f.c, f.c_dtype, row * f.c_row + col * f.c_col, f.c_col, vectors.c, valid, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = fmaf(f.beta, x[i], v[i]);
    }
    if (f.bias) /* a branch, because adding 0 would turn -0 into +0 */
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] += bias[i];
    if (f.activation != GK_ACT_NONE) activate_in_place<8>(f.activation, v);
    if (f.out_scale) {
        const float scale = *f.out_scale;
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __fdiv_rn(v[i], scale);
    }
    write_octet(f, row * f.out_row + col, vectors.out, valid, v);
}

#endif
