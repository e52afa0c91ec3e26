// SPDX-License-Identifier: BSD-3-Clause
/* norm_sums.cuh: adds a norm's partial sums [parts, 2, N] in workspace (float32, or float64 for
 * float64 tensors) to dweight and dbias, in order. */
#ifndef GPUKERN_CUDA_ROWS_NORM_SUMS_CUH
#define GPUKERN_CUDA_ROWS_NORM_SUMS_CUH

#include "row_block.cuh"

/* Workspace for the partial sums. Both are stored even if only one gradient is wanted. */
inline size_t norm_sums_bytes(const gk_norm_bwd_args *a, int64_t parts) {
    if (!a->dweight && !a->dbias) return 0;
    const int64_t n = a->h.shape[a->h.ndim - 1];
    return (size_t)(2 * parts * n) * gk_dtype_bytes(gk_stats_dtype(a->h.dtype));
}

/* norm_sums.cu */
gk_status norm_add_sums_f32(const gk_context *, const gk_norm_bwd_args *, const void *sums,
                            int64_t parts);
gk_status norm_add_sums_f64(const gk_context *, const gk_norm_bwd_args *, const void *sums,
                            int64_t parts);

template <class W>
inline gk_status norm_add_sums(const gk_context *ctx, const gk_norm_bwd_args *a, const void *sums,
                               int64_t parts) {
    if (!a->dweight && !a->dbias) return GK_OK;
    return sizeof(W) == 8 ? norm_add_sums_f64(ctx, a, sums, parts)
                          : norm_add_sums_f32(ctx, a, sums, parts);
}

#endif
