/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_gemm_int8_sm90a: grouped_gemm of int8 on Hopper, for groups of rows (grouped.cuh).
 *
 *   out[rows of g] = activation(scale_a scale_b (a[rows of g] b[g]) + bias)
 *
 * Both operands are K-major. WGMMA sums in int32, which is exact over all of k, so the sums stay
 * in the accumulators of the instruction (grouped_one_sum.cuh).
 *
 * Refuses: groups of k, scales along k, scales that are powers of two in a byte, other layouts and
 * rows that TMA cannot read (grouped_gemm_sm80, grouped_gemm_plain). */
#include "grouped_one_sum.cuh"

namespace {

typedef OneSum<int8_t, int32_t> Int8Groups;

bool plan_int8(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    const gk_scales sa = gk_scales_of(g->scale_a, g->a.shape[0], g->a.shape[1], false);
    const gk_scales sb = gk_scales_of(g->scale_b, g->a.shape[1], g->b.shape[g->b.ndim - 1], true);
    if (sa.dtype != GK_F32 || sb.dtype != GK_F32 || sa.col_log2 < GK_WHOLE_LOG2 ||
        sb.row_log2 < GK_WHOLE_LOG2)
        return false;
    plan->tile[2] = WGMMA_ROW_BYTES;
    return grouped_fits(g, false, false, plan);
}

gk_status run_int8(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    GroupedParams p = {};
    set_scales(g, p);
    return run_grouped<Int8Groups>(ctx, g, plan, p);
}

const gk_cuda_instance instances[] = {
    {"grouped_gemm_int8_sm90a_256x128", GK_I8, plan_int8, run_int8, {0}, NULL}};

} // namespace

extern "C" const gk_cuda_table gk_grouped_gemm_int8_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
