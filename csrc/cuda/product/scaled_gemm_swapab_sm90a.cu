/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm_swapab_sm90a: scaled_gemm on Hopper with swap-AB (scaled_swapped.cuh), for up to 64
 * rows of a. It also serves more rows, if scaled_gemm_sm90a refuses their scales along k. Only in
 * that case it serves batch-invariant calls, because it splits k.
 *
 * Workspace: a copy of each operand that is not K-major with rows of whole 16 bytes.
 *
 * Refuses: K = 0, e5m2, int8 with scales for 32 of k. */
#include "../../core/invariant.h"
#include "scaled_swapped_plan.cuh"

namespace {

#define E4M3(name, NT, KS, STAGES, sums, any)                                                  \
    SWAPPED("scaled_gemm_swapab_sm90a_e4m3_" name, GK_E4M3, e4m3, float, NT, KS, STAGES, sums, \
            any, 128)
#define INT8(name, NT, KS, STAGES, sums, any)                                                  \
    SWAPPED("scaled_gemm_swapab_sm90a_i8_" name, GK_I8, int8_t, int32_t, NT, KS, STAGES, sums, \
            any, 128)

/* The narrowest come first. For 64 tokens, stages of 512 of k take 32.3 us instead of 32.9 with
 * 256 (64 x 28672 x 4096), and 6.66 instead of 6.59 (64 x 4096 x 4096). */
const gk_cuda_instance instances[] = {
    E4M3("fast_64x16", 16, 4, 5, ALL, false),
    E4M3("fast_64x32", 32, 4, 4, ALL, false),
    E4M3("fast_64x64", 64, 4, 3, ALL, false),
    E4M3("64x16", 16, 4, 5, PARTS, false),
    E4M3("64x32", 32, 4, 4, PARTS, false),
    E4M3("64x64", 64, 2, 6, PARTS, false),
    E4M3("block_64x16", 16, 4, 5, BLOCKS, false),
    E4M3("block_64x32", 32, 4, 4, BLOCKS, false),
    E4M3("block_64x64", 64, 4, 3, BLOCKS, false),
    INT8("64x16", 16, 4, 5, ALL, false),
    INT8("64x64", 64, 4, 3, ALL, false),
    /* for every other form of scales, epilogue and result */
    E4M3("any_64x16", 16, 4, 5, PARTS, true),
    E4M3("any_64x64", 64, 2, 6, PARTS, true),
    E4M3("block_any_64x16", 16, 2, 8, BLOCKS, true),
    E4M3("block_any_64x64", 64, 2, 5, BLOCKS, true),
    INT8("any_64x16", 16, 4, 5, ALL, true),
    INT8("any_64x64", 64, 4, 3, ALL, true),
    INT8("block_any_64x16", 16, 2, 8, BLOCKS, true),
    INT8("block_any_64x64", 64, 2, 5, BLOCKS, true),
};

/* Chooses the first instance that serves the call and whose tile holds all tokens. For more than 64
 * tokens, it chooses tiles of 64. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const bool suits_tiles = scales_along_k(g) == 0 || scales_in_tiles(g);
    if (suits_tiles && (g->a.shape[0] > 64 || gk_batch_invariant())) return false;
    for (const gk_cuda_instance &instance : instances) {
        if (g->a.shape[0] > instance.key[KEY_NT] && instance.key[KEY_NT] < 64) continue;
        if (swapped_plan(&instance, ctx, args, gk_plan_begin(plan, NULL))) return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_swapab_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
