/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_grouped.cuh: what Hopper's kernels of weight_gemm for groups of rows
 * (weight_grouped_mma_sm90a.cu, weight_grouped_wgmma_sm90a.cu) have in common, beside their tasks
 * (quant/weight_groups.cuh).
 *
 * A tile's copies may bring tokens of other groups, and a last tile of 128 weight rows may hold 64
 * of the next group. Their results are not stored. */
#ifndef GPUKERN_CUDA_PRODUCT_WEIGHT_GROUPED_CUH
#define GPUKERN_CUDA_PRODUCT_WEIGHT_GROUPED_CUH

#include "quant/weight_groups.cuh"
#include "weight_form.cuh"

/* The first row of a tile's box of tokens. TMA fills rows outside a tensor at a third of its speed,
 * so a box does not begin where it would end behind the last row. */
__device__ __forceinline__ int box_row(int row, int box, int m) {
    return min(row, max(0, m - box));
}

template <class F> bool weight_groups_serve(const gk_weight_gemm_args *g) {
    if (!g->offs || g->offs->shape[0] < 1 || g->offs->shape[0] > WEIGHT_MOST_GROUPS) return false;
    return group_rows(g) * g->offs->shape[0] <= 1 << 30 && weight_form_fits<F>(g);
}

#endif
