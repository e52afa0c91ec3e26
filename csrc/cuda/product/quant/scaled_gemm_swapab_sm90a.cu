/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm_swapab_sm90a: scaled_gemm on Hopper with one scale along k or blocks of 128
 * (scaled_swapab.cuh): of up to 64 rows of a; of more where the scales along k are not those of
 * scaled_gemm_sm90a. */
#include "scaled_swapab.cuh"

namespace {

#define ROW(name, dtype, E, D, Sum, WGS, BN) \
    SWAPAB_ROW("scaled_gemm_swapab_sm90a_" name, dtype, E, D, Sum, WGS, BN, 128, 2)

const gk_cuda_instance instances[] = {
    ROW("e4m3_64x16", GK_E4M3, e4m3, float, float, 1, 16),
    ROW("e4m3_64x32", GK_E4M3, e4m3, float, float, 1, 32),
    ROW("e4m3_128x64", GK_E4M3, e4m3, float, float, 2, 64),
    ROW("e4m3_64x64", GK_E4M3, e4m3, float, float, 1, 64),
    ROW("i8_64x16", GK_I8, int8_t, int32_t, int32_t, 1, 16),
    ROW("i8_64x64", GK_I8, int8_t, int32_t, int32_t, 1, 64),
    ROW("i8_block_64x16", GK_I8, int8_t, int32_t, float, 1, 16),
    ROW("i8_block_64x64", GK_I8, int8_t, int32_t, float, 1, 64),
};

/* The narrowest that holds the tokens; of two, the one of more weights where it has tiles for all
 * SMs. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    if (g->a.shape[0] > 64 && (scales_along_k(g) == 0 || scales_in_tiles(g))) return false;
    for (const gk_cuda_instance &row : instances) {
        if (g->a.shape[0] > row.key[KEY_BN] && row.key[KEY_BN] < 64) continue;
        if (row.key[KEY_WGS] == 2 && swapab_tiles(&row, g) < gk_gpu_of(ctx->index)->num_sms)
            continue;
        if (g->a.dtype == row.dtype && swapab_plan_row(&row, ctx, args, plan)) return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_swapab_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
