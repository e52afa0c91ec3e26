/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_invariant: the plan of weight_gemm in a batch-invariant call (core/invariant.h). It has no
 * kernel of its own. It chooses among the instances of other files whose sums over k have the same
 * order for every number of rows M. If it splits k, the place depends on N and K only.
 *
 * On Hopper, forms of weight with a kernel of their own take weight_wgmma's instances of 128 weight
 * rows (RT 2). There a warpgroup adds its tiles of k in one chain, whatever NT is. Clusters of two
 * halve k if no tile row fills the GPU alone and if K is a multiple of 512, which all instances cut
 * at the same place. Other forms are decoded first and multiplied by gemm, at every M.
 *
 * Groups of rows take any instance of weight_grouped_wgmma, which all have one order.
 *
 * On other GPUs, weight_gemm_sm80's instances of 32 rows serve every M, with the number of weight
 * rows that suits one row of a. That number decides how warps share k. */
#include "../../core/invariant.h"
#include "quant/weight_groups.cuh"
#include "weight_price.cuh"

extern "C" const gk_cuda_table gk_weight_wgmma_4bit_table, gk_weight_wgmma_8bit_table,
    gk_weight_decoded_table, gk_weight_grouped_wgmma_table, gk_weight_gemm_4bit_sm80_table,
    gk_weight_gemm_8bit_sm80_table;

namespace {

enum {
    /* Rows of a tile of weight_wgmma that holds all of k in one chain. */
    CHAIN_ROWS = 2 * GK_TILE,
    /* K must be a multiple of this to be halved: two stages of four packed tiles. */
    HALVED_K = 512,
    /* k is halved if there are at most this many tiles of weight rows. One row of a then takes
     * about half the time, and many rows take some 7 % more (estimated by weight_price.cuh). */
    HALVED_TILES = 128,
    SM80_TOKENS = 32
};

template <class Better>
const gk_cuda_instance *find_instance(const gk_cuda_table &table, const gk_context *ctx,
                                      const gk_weight_gemm_args *g, gk_plan *plan,
                                      const Better &better) {
    const gk_cuda_instance *best = nullptr;
    for (int i = 0; i < table.num_instances; ++i) {
        const gk_cuda_instance *const x = &table.instances[i];
        if (x->dtype == g->a.dtype && x->plan(x, ctx, g, gk_plan_begin(plan, x)) && better(*plan))
            best = x;
    }
    return best && best->plan(best, ctx, g, gk_plan_begin(plan, best)) ? best : nullptr;
}

bool plan_wgmma(const gk_cuda_table &table, const gk_context *ctx, const gk_weight_gemm_args *g,
                gk_plan *plan) {
    const int64_t m = weight_rows(g->a), k = g->a.shape[g->a.ndim - 1],
                  tiles_n = gk_ceil_div(g->n, CHAIN_ROWS);
    const int splits = k % HALVED_K == 0 && tiles_n <= HALVED_TILES ? 2 : 1;
    const int num_sms = gk_gpu_of(ctx->index)->num_sms;
    double us = 0;
    const auto better = [&](const gk_plan &x) {
        if (x.tile[1] != CHAIN_ROWS) return false;
        const double found =
            weight_wgmma_us((int)x.tile[0], 2, code_of(g->format),
                            gk_ceil_div(m, x.tile[0]) * tiles_n, splits, k, num_sms);
        const bool faster = us == 0 || found < us;
        if (faster) us = found;
        return faster;
    };
    if (!find_instance(table, ctx, g, plan, better)) return false;
    plan->us = us;
    plan->chunks = splits;
    plan->tasks = gk_ceil_div(m, plan->tile[0]) * tiles_n * splits;
    plan->waves = (double)plan->tasks / num_sms;
    return true;
}

bool plan_sm80(const gk_cuda_table &table, const gk_context *ctx, const gk_weight_gemm_args *g,
               gk_plan *plan) {
    const auto wide = [](const gk_plan &x) { return x.tile[0] == SM80_TOKENS; };
    gk_weight_gemm_args one = *g;
    for (int d = 0; d < one.a.ndim - 1; ++d) one.a.shape[d] = 1;
    if (!find_instance(table, ctx, &one, plan, wide)) return false;
    const int64_t rows = plan->tile[1];
    if (!find_instance(table, ctx, g, plan, wide)) return false;
    plan->tile[1] = rows;
    plan->tasks =
        (g->offs ? token_tiles(g, SM80_TOKENS) : gk_ceil_div(weight_rows(g->a), SM80_TOKENS)) *
        gk_ceil_div(g->n, rows);
    return gk_grid_fits(plan->tasks);
}

bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    if (!gk_batch_invariant()) return false;
    const auto any = [](const gk_plan &) { return true; };
    const bool hopper = gk_gpu_of(ctx->index)->arch == 90;
    if (hopper && g->offs && gk_weight_grouped_wgmma_table.plan(ctx, g, plan)) return true;
    if (hopper && !g->offs &&
        (plan_wgmma(gk_weight_wgmma_4bit_table, ctx, g, plan) ||
         plan_wgmma(gk_weight_wgmma_8bit_table, ctx, g, plan) ||
         find_instance(gk_weight_decoded_table, ctx, g, plan, any)))
        return true;
    return plan_sm80(gk_weight_gemm_4bit_sm80_table, ctx, g, plan) ||
           plan_sm80(gk_weight_gemm_8bit_sm80_table, ctx, g, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_weight_invariant_table = {NULL, 0, 80, plan_best};
