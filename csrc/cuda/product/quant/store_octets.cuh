/* SPDX-License-Identifier: BSD-3-Clause */
/* store_octets.cuh: sums of mma.sync on their way to a quantised product's result: through shared
 * memory, 32 rows of a warp at a time, so that a lane has 8 columns of a row; then what `finish` of
 * product.cuh says of one element, for 8 at once. */
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

/* Those behind the first BY take their place. */
template <int BY, class Sum, int MT, int NT>
__device__ __forceinline__ void move_sums(Sum (&sum)[MT][NT][4]) {
#pragma unroll
    for (int i = 0; i + BY < MT; ++i)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[i][n][e] = sum[i + BY][n][e];
}

/* take(row, v) of each row of the warp's WM that the lane has, and its 8 columns, which begin at 8
 * (lane % OCTETS). smem: of the block, and of nothing else since the last barrier. */
template <class Tile, class Sum, class Take>
__device__ __forceinline__ void
take_octets(unsigned char *smem, Sum (&sum)[Tile::WM / 16][Tile::WN / 8][4], const Take &take) {
    typedef SumStage<Tile> S;
    constexpr int AT_ONCE = S::ROWS / 16;
    const int lane = threadIdx.x % 32;
    float *const sums = (float *)(smem + threadIdx.x / 32 * S::WARP_BYTES);
#pragma unroll 1
    for (int row0 = 0; row0 < Tile::WM; row0 += S::ROWS) { /* one body, past which the sums move */
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
            for (int n = 0; n < Tile::WN / 8; ++n)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *(float2 *)(sums + (i * 16 + h * 8 + lane / 4) * S::LD + n * 8 + lane % 4 * 2) =
                        make_float2((float)sum[i][n][2 * h], (float)sum[i][n][2 * h + 1]);
        __syncwarp(); /* the warp's lanes read what the others stored */
#pragma unroll 1
        for (int r = lane / S::OCTETS; r < S::ROWS; r += 32 / S::OCTETS) {
            const float *from_s = sums + r * S::LD + lane % S::OCTETS * 8;
            /* half of the lanes read the second four first: no bank conflicts */
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

/* The same of a transposed result: take(column, row, v), rows row .. row + 7 of the warp. */
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
/* Which of them are read or written 16 bytes at a time, 8 of codes: they are dense and begin at
 * multiples of 16 bytes. */
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
    } else { /* codes: the check takes no other */
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

/* v: of columns col, col + 1 .., of which `valid` are inside the result, of row `row`; bias:
 * theirs */
__device__ __forceinline__ void finish_octet(const Finish &f, const Vectors &vectors, int64_t row,
                                             int64_t col, int valid, float (&v)[8],
                                             const float (&bias)[8]) {
    if (f.c) {
        float x[8];
        read_octet(f.c, f.c_dtype, row * f.c_row + col * f.c_col, f.c_col, vectors.c, valid, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = fmaf(f.beta, x[i], v[i]);
    }
    if (f.bias) /* not + 0: -0 stays */
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
