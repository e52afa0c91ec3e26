/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_kinds.cuh: classifies the scales of a scaled_gemm call for its planners. */
#ifndef GPUKERN_CUDA_QUANT_SCALED_KINDS_CUH
#define GPUKERN_CUDA_QUANT_SCALED_KINDS_CUH

#include "../../../formats/scales.h"

enum {
    /* From this many rows on, decoding MXFP8 is faster than 8-bit products with scales for 32 of
     * k. On an H100, K = N = 4096: 128 rows take 33 us decoded and 19 directly, 256 rows 40 and
     * 33, 512 rows 47 and 68. */
    SCALED_DECODED_ROWS = 257
};

/* The length along k that shares a scale, 32 or 128, whichever operand has the shorter. 0: one
 * scale for all of k. */
inline int scales_along_k(const gk_scaled_gemm_args *g) {
    const gk_scales sa = gk_scales_of(&g->scale_a, g->a.shape[0], g->a.shape[1], false);
    const gk_scales sb = gk_scales_of(&g->scale_b, g->b.shape[0], g->b.shape[1], true);
    const int least = sa.col_log2 < sb.row_log2 ? sa.col_log2 : sb.row_log2;
    return least < GK_WHOLE_LOG2 ? 1 << least : 0;
}

/* True if the scales suit the wide tiles: float32, not for 32 of k, and shared by at least 128
 * columns of b. */
inline bool scales_in_tiles(const gk_scaled_gemm_args *g) {
    const gk_scales sb = gk_scales_of(&g->scale_b, g->b.shape[0], g->b.shape[1], true);
    return scales_along_k(g) != 32 && sb.col_log2 >= 7 && g->scale_a.dtype == GK_F32 &&
           g->scale_b.dtype == GK_F32;
}

#endif
