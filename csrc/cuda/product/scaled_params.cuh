/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_params.cuh: shared by the two policies of scaled_gemm (scaled_wide.cuh,
 * scaled_swapped.cuh): the ways of summing over k, and scales along k as TMA reads them. */
#ifndef GPUKERN_CUDA_PRODUCT_SCALED_PARAMS_CUH
#define GPUKERN_CUDA_PRODUCT_SCALED_PARAMS_CUH

#include "../host/tensormap.cuh"
#include "quant/scaled_operands.cuh"
#include "finish.cuh"

/* How a policy sums over k. */
enum Sums {
    ALL,   /* one sum */
    PARTS, /* sums of 128 of k, which are added in float32 */
    BLOCKS /* sums of a block of k, each multiplied by its scales */
};

/* Scales along k in shared memory: one buffer for each group of four steps of k. */
enum {
    BLOCK_STEPS = 4,
    BLOCK_SB_BYTES = 128 /* 4 steps of b's scales, with 3 neighbours if columns are dense */
};

/* A part's element as float32. int8 is exact up to 2^22; a sum of 128 products reaches 2^21. The
 * value is added to the bits of 1.5 2^23, and 1.5 2^23 is subtracted. That is faster than a
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

/* Scales along k as TMA reads them: rows x steps, one of which has stride 1. */
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

/* The scales along k of both operands, if TMA can read them: float32, one for each row of a and
 * for each 128 columns of b. */
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

/* The box of 4 steps and `rows` rows of such scales in shared memory, not swizzled. */
inline smem_box block_scales_box(const BlockScales &x, int rows) {
    const int inner = x.k_inner ? BLOCK_STEPS : rows, outer = x.k_inner ? rows : BLOCK_STEPS;
    return {{3, {inner, outer, 1}, {1, inner, inner * outer}}, 4, 0};
}

/* Bytes of a copy of b's scales: of one block of columns, or of 4 neighbours if columns are
 * dense. */
inline int block_sb_bytes(const BlockScales &x) {
    return x.k_inner ? 4 * BLOCK_STEPS : 16 * BLOCK_STEPS;
}

inline Finish finish_of(const gk_scaled_gemm_args *g) {
    return finish_of(g->out, g->bias, g->c, g->beta, g->out_scale, g->activation);
}

/* True if a call may use the fast instances, apart from its scales along k: float32 scales, and
 * a bfloat16 result with no epilogue. */
inline bool plain_form(const gk_scaled_gemm_args *g, const Finish &f) {
    return g->scale_a.data && g->scale_b.data && g->scale_a.dtype == GK_F32 &&
           g->scale_b.dtype == GK_F32 && f.out_dtype == GK_BF16 && only_rounds(f);
}

/* Makes a map with boxes of `rows` rows, and one for the remaining rows at the end. TMA fills
 * rows outside a tensor at a third of its speed (192 x 4096 x 4096 took 15.0 us, 256 x 4096 x
 * 4096 9.6). */
inline gk_status make_row_maps(const char *op, const TensorShape &x, int elem_bytes, int rows,
                               CUtensorMap *inside, CUtensorMap *last) {
    const int rest = (int)(x.size[1] % rows);
    const gk_status status = make_tensor_map(op, x, wgmma_box(elem_bytes, rows), inside);
    return status == GK_OK && rest > 0 ? make_tensor_map(op, x, wgmma_box(elem_bytes, rest), last)
                                       : status;
}

#endif
