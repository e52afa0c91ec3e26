/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_params.cuh: what the two policies of scaled_gemm on Hopper (scaled_wide.cuh,
 * scaled_swapped.cuh) share: the ways of summing over k, scales along k as TMA reads them, and
 * tests for the fast instances. sparse_wide.cuh uses the ways of summing, too. */
#ifndef GPUKERN_CUDA_PRODUCT_SCALED_PARAMS_CUH
#define GPUKERN_CUDA_PRODUCT_SCALED_PARAMS_CUH

#include "../host/tensormap.cuh"
#include "quant/scaled_operands.cuh"
#include "finish.cuh"

/* How a policy sums over k. */
enum Sums {
    ALL,   /* one sum over all of k */
    PARTS, /* separate sums of 128 of k, which are added in float32 */
    BLOCKS /* separate sums of a block of k, each multiplied by its scales and added in float32 */
};

/* Scales along k in shared memory. One buffer holds those of a group of BLOCK_STEPS steps of k. */
enum {
    BLOCK_STEPS = 4,
    /* Room for 4 steps of b's scales. If stride 1 is along columns, TMA copies the scales of 4
     * neighbouring blocks of columns. */
    BLOCK_SB_BYTES = 128
};

/* Converts an element of a part to float32. An integer is added to the bits of the float 1.5 2^23,
 * and 1.5 2^23 is subtracted from that float. This is faster than a conversion and exact below
 * 2^22. A sum of 128 int8 products has at most 2^21. */
__device__ __forceinline__ float part_value(float x) { return x; }
__device__ __forceinline__ float part_value(int32_t x) {
    return __uint_as_float((uint32_t)x + 0x4b400000u) - 12582912.f;
}

/* The type of the sum over all of k, if WGMMA's accumulators have type D. */
template <Sums SUMS, class D> struct SumOf {
    typedef float type;
};
template <class D> struct SumOf<ALL, D> {
    typedef D type;
};

/* Scales along k as a tensor for TMA: rows x steps of k. One of the two dimensions must have
 * stride 1; k_inner says that it is k. */
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

/* The scales along k of both operands, if TMA can read them (fit). They must be float32, with one
 * scale for each row of a and one for each 128 columns of b. */
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

/* The TMA box of such scales: 4 steps of k and `rows` rows, not swizzled in shared memory. */
inline smem_box block_scales_box(const BlockScales &x, int rows) {
    const int inner = x.k_inner ? BLOCK_STEPS : rows, outer = x.k_inner ? rows : BLOCK_STEPS;
    return {{3, {inner, outer, 1}, {1, inner, inner * outer}}, 4, 0};
}

/* Bytes of a copy of b's scales for 4 steps of k. It has one block of columns if k has stride 1,
 * else 4 neighbouring blocks. */
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

/* Makes a tensor map with boxes of `rows` rows, and one with a box of the remaining rows at the
 * end. One map for both would be slow, because TMA fills rows outside a tensor at a third of its
 * normal speed (measured: 192 x 4096 x 4096 took 15.0 us, but 256 x 4096 x 4096 took 9.6 us). */
inline gk_status make_row_maps(const char *op, const TensorShape &x, int elem_bytes, int rows,
                               CUtensorMap *inside, CUtensorMap *last) {
    const int rest = (int)(x.size[1] % rows);
    const gk_status status = make_tensor_map(op, x, wgmma_box(elem_bytes, rows), inside);
    return status == GK_OK && rest > 0 ? make_tensor_map(op, x, wgmma_box(elem_bytes, rest), last)
                                       : status;
}

#endif
