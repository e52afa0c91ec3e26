/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_scores_sm80: attention with a mask, a bias or a distance bias on tensor cores by
 * mma.sync, 16-bit, dense, with every modifier. The kernel is in fwd_sm80.cuh; ../scores_mma.cuh
 * reads the mask and the biases. If NaN of a hidden key has reached rows of the result, a second
 * kernel (fwd_mend.cuh) computes them again.
 *
 * It serves the calls that flash_attn_fwd_masked_sm90a and flash_attn_fwd_masked_wide_sm90a refuse:
 * GPUs other than Hopper, a mask together with causal or a window, softcap, ALiBi, dropout, biases
 * that broadcast over keys or are float32, two biases. There are tiles for three head_dims only, to
 * save compile time.
 *
 * Workspace: partial results if the keys are split, then one byte for each tile (fwd_mend.cuh). Not
 * handled: float32, unaligned rows (flash_attn_fwd_plain). */
#include "fwd_mend.cuh"
#include "fwd_sm80.cuh"
#include "../scores_tiles.h"

namespace {

template <class Tile, bool DROP>
bool plan_scores(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    if (!gk_scores_of(a) || (a->dropout_p > 0) != DROP || fwd_by_parts(a) ||
        !plan<Tile>(instance, ctx, args, to))
        return false;
    const FwdParams &p = gk_own<FwdParams>(to);
    to->workspace_bytes = (size_t)gk_round_up((int64_t)to->workspace_bytes, 16) +
                          (size_t)p.problem.batch * (size_t)p.problem.heads_q * (size_t)p.tiles_q;
    return gk_grid_fits(to->tasks);
}

template <class T, class Tile, bool DROP>
gk_status run_scores(const gk_context *ctx, const void *args, const gk_plan *plan,
                     void *workspace) {
    static const char op[] = "gk_flash_attn_fwd";
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    typename ParamsOf<DROP, true>::type p;
    (FwdParams &)p = gk_own<FwdParams>(plan);
    take_dropout(p, a);
    const Problem &x = p.problem;
    const size_t tiles = (size_t)x.batch * (size_t)x.heads_q * (size_t)p.tiles_q;
    p.scores = mma_scores_of(gk_scores_of(a), x.seq_q, x.seq_k);
    fwd_place(&p, workspace);
    p.spoilt = (uint8_t *)workspace + (plan->workspace_bytes - tiles);
    gk_status status = clear_memory(op, ctx, p.spoilt, tiles);
    if (status == GK_OK)
        status = launch<flash_attn_fwd_sm80_kernel<T, Tile, true, DROP, true>>(
            op, ctx, dim3((unsigned)plan->tasks), Smem<Tile>::THREADS, Smem<Tile>::BYTES, p);
    if (status == GK_OK) status = fwd_finish<T>(op, ctx, a, p);
    return status == GK_OK ? fwd_mend(ctx, a, p.spoilt, Tile::BQ) : status;
}

#define INSTANCE(NAME, T, DTYPE, TILE, DROP)          \
    {NAME,                                            \
     DTYPE,                                           \
     plan_scores<TILE, DROP>,                         \
     run_scores<T, TILE, DROP>,                       \
     {TILE::HEAD_DIM, true, Smem<TILE>::BYTES, true}, \
     NULL}
#define INSTANCES(label, TILE, DROP)                                                        \
    INSTANCE("flash_attn_fwd_scores_sm80_bf16_" label, __nv_bfloat16, GK_BF16, TILE, DROP), \
        INSTANCE("flash_attn_fwd_scores_sm80_f16_" label, __half, GK_F16, TILE, DROP)

const gk_cuda_instance instances[] = {
    INSTANCES("d64", FwdScoresTile<64>, false),
    INSTANCES("d128", FwdScoresTile<128>, false),
    INSTANCES("d256", FwdScoresTile<256>, false),
    INSTANCES("d64_drop", FwdScoresTile<64>, true),
    INSTANCES("d128_drop", FwdScoresTile<128>, true),
    INSTANCES("d256_drop", FwdScoresTile<256>, true),
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_scores_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
