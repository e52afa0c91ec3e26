/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_kinds.cuh: of what kind the scales of a scaled_gemm are; its kernels' planners ask. */
#ifndef GPUKERN_CUDA_QUANT_SCALED_KINDS_CUH
#define GPUKERN_CUDA_QUANT_SCALED_KINDS_CUH

#include "../../../formats/scales.h"

enum {
    SCALED_DECODED_ROWS =
        257 /* from so many on MXFP8 is decoded sooner than multiplied by 32 of k: 33 and 19 us of
               128 x 4096 x 4096 on an H100, 40 and 33 of 256, 47 and 68 of 512 */
};

/* Columns of a, and rows of b, that share a scale along k: 32 or 128, the least of both; 0: there
 * is one for all. */
inline int scales_along_k(const gk_scaled_gemm_args *g) {
    const gk_scales sa = gk_scales_of(&g->scale_a, g->a.shape[0], g->a.shape[1], false);
    const gk_scales sb = gk_scales_of(&g->scale_b, g->b.shape[0], g->b.shape[1], true);
    const int least = sa.col_log2 < sb.row_log2 ? sa.col_log2 : sb.row_log2;
    return least < GK_WHOLE_LOG2 ? 1 << least : 0;
}

/* Whether those of the wide tiles: float32, none of blocks of 32, and 128 columns of b share
 * one. */
inline bool scales_in_tiles(const gk_scaled_gemm_args *g) {
    const gk_scales sb = gk_scales_of(&g->scale_b, g->b.shape[0], g->b.shape[1], true);
    return scales_along_k(g) != 32 && sb.col_log2 >= 7 && g->scale_a.dtype == GK_F32 &&
           g->scale_b.dtype == GK_F32;
}

#endif
