/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm_mx_sm90a: scaled_gemm on Hopper for e4m3 with scales for each 32 of k, of one
 * operand or both. Scales are float32, or powers of two in a byte (MXFP8). A sum over 32 of k is
 * one WGMMA (scaled_swapped.cuh). */
#include "scaled_swapped_plan.cuh"

namespace {

#define MX(name, NT, STAGES) \
    SWAPPED("scaled_gemm_mx_sm90a_" name, GK_E4M3, e4m3, float, NT, 2, STAGES, BLOCKS, true, 32)

const gk_cuda_instance instances[] = {
    MX("e4m3_64x16", 16, 8),
    MX("e4m3_64x32", 32, 6),
    MX("e4m3_64x64", 64, 5),
};

/* Chooses the narrowest tile that holds all tokens. Tiles of 32 tokens are also used for more
 * tokens, if there is a pair of SMs for each such tile. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    for (const gk_cuda_instance &instance : instances) {
        const int nt = instance.key[KEY_NT];
        const bool small = 2 * swapped_tiles(&instance, g) <= gk_gpu_of(ctx->index)->num_sms;
        if (g->a.shape[0] > nt && !(nt == 32 && small) && nt != 64) continue;
        if (swapped_plan(&instance, ctx, args, gk_plan_begin(plan, NULL))) return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_mx_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
