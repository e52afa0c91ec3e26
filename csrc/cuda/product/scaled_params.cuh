/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_params.cuh: what the policies of scaled_gemm share: how they sum, and scales along k as
 * TMA reads them. */
#ifndef GPUKERN_CUDA_PRODUCT_SCALED_PARAMS_CUH
#define GPUKERN_CUDA_PRODUCT_SCALED_PARAMS_CUH

#include "../host/tensormap.cuh"
#include "quant/scaled_operands.cuh"
#include "finish.cuh"

enum Sums {
    ALL,
    PARTS,
    BLOCKS
};

/* Scales along k in shared memory. The steps of k come in groups of four, one buffer a group. */
enum {
    BLOCK_STEPS = 4,
    BLOCK_SB_BYTES =
        128 /* 4 steps of b's scales, and 3 neighbours if columns of blocks lie side by side */
};

/* A part's element as a float. Of int8 exact up to 2^22, where 128 products reach 2^21: they are
 * the low
 * bits of 1.5 2^23, which is subtracted. An addition and a subtraction take less than the
 * conversion. */
__device__ __forceinline__ float part_value(float x) { return x; }
__device__ __forceinline__ float part_value(int32_t x) {
    return __uint_as_float((uint32_t)x + 0x4b400000u) - 12582912.f;
}

template <Sums SUMS, class D> struct SumOf {
    typedef float type;
};
template <class D> struct SumOf<ALL, D> {
    typedef D type;
};

/* Scales along k as TMA reads them: rows x steps, of which one lies side by side. */
struct BlockScales {
    bool fit, k_inner;
    TensorShape shape;
};

inline BlockScales block_scales_of(const void *data, int64_t rows, int64_t steps, int64_t row_step,
                                   int64_t k_step) {
    BlockScales x = {};
    x.k_inner = k_step == 1 || steps == 1;
    if (x.k_inner)
        x.shape = {data, GK_F32, {steps, rows, 1, 1, 1}, {1, row_step, 0, 0, 0}, false};
    else
        x.shape = {data, GK_F32, {rows, steps, 1, 1, 1}, {1, k_step, 0, 0, 0}, false};
    x.fit = (x.k_inner || row_step == 1 || rows == 1) && tensor_map_fits(x.shape);
    return x;
}

/* Both operands' scales along k as TMA reads them: float32, a's of each row, b's of 128 columns. */
struct BlockScalesOfBoth {
    bool fit;
    BlockScales a, b;
};

inline BlockScalesOfBoth block_scales_of_both(const gk_scaled_gemm_args *g) {
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1],
                  steps = gk_ceil_div(k, 128);
    const gk_scales sa = gk_scales_of(&g->scale_a, m, k, false),
                    sb = gk_scales_of(&g->scale_b, k, n, true);
    BlockScalesOfBoth x = {};
    if (sa.dtype != GK_F32 || sb.dtype != GK_F32 || !sa.data || !sb.data) return x;
    if (sa.col_log2 != 7 || sb.row_log2 != 7) return x;
    const bool one_block = sb.col_log2 == GK_WHOLE_LOG2 && n <= 128;
    if ((sa.row_log2 != 0 && m > 1) || (sb.col_log2 != 7 && !one_block)) return x;
    x.a = block_scales_of(sa.data, m, steps, sa.row, sa.col);
    x.b = block_scales_of(sb.data, gk_ceil_div(n, 128), steps, sb.col, sb.row);
    x.fit = x.a.fit && x.b.fit;
    return x;
}

/* How a box of 4 steps and `rows` rows of such scales lies in shared memory: not swizzled. */
inline smem_box block_scales_box(const BlockScales &x, int rows) {
    const int inner = x.k_inner ? BLOCK_STEPS : rows, outer = x.k_inner ? rows : BLOCK_STEPS;
    return {{3, {inner, outer, 1}, {1, inner, inner * outer}}, 4, 0};
}

/* Bytes of a copy of b's scales: of one block, or of 4 neighbours if these lie side by side. */
inline int block_sb_bytes(const BlockScales &x) {
    return x.k_inner ? 4 * BLOCK_STEPS : 16 * BLOCK_STEPS;
}

inline Finish finish_of(const gk_scaled_gemm_args *g) {
    return finish_of(g->out, g->bias, g->c, g->beta, g->out_scale, g->activation);
}

/* The form of the fast instances but for scales along k: float32 scales, and a result that is only
 * rounded. */
inline bool plain_form(const gk_scaled_gemm_args *g, const Finish &f) {
    return g->scale_a.data && g->scale_b.data && g->scale_a.dtype == GK_F32 &&
           g->scale_b.dtype == GK_F32 && f.out_dtype == GK_BF16 && only_rounds(f);
}

/* Maps of boxes of `rows` rows, and of the rows that remain at the end, because TMA fills rows
 * outside a tensor at a third of the speed (192 x 4096 x 4096 took 15.0 us, 256 x 4096 x 4096
 * 9.6). */
inline gk_status make_row_maps(const TensorShape &x, int rows, CUtensorMap *inside,
                               CUtensorMap *last) {
    const int rest = (int)(x.size[1] % rows);
    const gk_status status = make_tensor_map("scaled_gemm", x, wgmma_box(1, rows), inside);
    return status == GK_OK && rest > 0 ? make_tensor_map("scaled_gemm", x, wgmma_box(1, rest), last)
                                       : status;
}

#endif
