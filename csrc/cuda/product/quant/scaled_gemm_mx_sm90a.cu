/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm_mx_sm90a: scaled_gemm on Hopper of e4m3 with scales of 32 along k, in float32 or
 * powers of two in a byte, of one operand or both (scaled_swapab.cuh). A sum of 32 of k is one
 * WGMMA. */
#include "scaled_swapab.cuh"

namespace {

#define ROW(name, BN, AT_ONCE) \
    SWAPAB_ROW("scaled_gemm_mx_sm90a_" name, GK_E4M3, e4m3, float, float, 1, BN, 32, AT_ONCE)

const gk_cuda_instance instances[] = {
    ROW("e4m3_64x16", 16, 4),
    ROW("e4m3_64x32", 32, 4),
    ROW("e4m3_64x64", 64, 2),
};

/* The narrowest that holds the tokens; 32 of them also where there is an SM for each such tile. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    for (const gk_cuda_instance &row : instances) {
        const int bn = row.key[KEY_BN];
        const bool small = swapab_tiles(&row, g) <= gk_gpu_of(ctx->index)->num_sms;
        if (g->a.shape[0] > bn && !(bn == 32 && small) && bn != 64) continue;
        if (g->a.dtype == row.dtype && swapab_plan_row(&row, ctx, args, plan)) return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_mx_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
