/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_partial_sm80: flash_attn_bwd_sm80 with unrounded float32 gradients. The caller
 * adds them to the gradients of other parts of the sequence.
 *
 * It uses the deterministic kernels in their MODIFIED form, which serves every call, so there is
 * one instance for each dtype.
 *
 * Not handled: head_dim over 128, dropout, unaligned rows (flash_attn_bwd_partial_plain). */
#include "bwd_sm80_run.cuh"

namespace {

typedef Bwd128Small Tile;
constexpr int BYTES =
    Smem<Tile>::bytes > BwdDq128::smem_bytes ? Smem<Tile>::bytes : BwdDq128::smem_bytes;

bool plan_partial(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    if (a->fwd.dropout_p > 0 || !tile_takes(ctx, a, Tile::head_dim, BYTES)) return false;
    Bwd &g = gk_own<Bwd>(to) = bwd_of(ctx, a, Tile::bq, Tile::head_dim);
    g.lse_factor = LOG2_E;
    to->tile[0] = Tile::bq;
    to->tile[1] = Tile::bkv;
    to->tasks = blocks_of<Tile>(g.p);
    to->workspace_bytes = stats_bytes(g, sizeof(float));
    return true;
}

template <class T>
gk_status run_partial(const gk_context *ctx, const void *, const gk_plan *plan, void *workspace) {
    Bwd g = gk_own<Bwd>(plan);
    g.stats = workspace;
    gk_status status = bwd_pre(ctx, element<T>::dtype, g, GK_F32);
    if (status == GK_OK)
        status = launch<bwd_sm80_kernel<T, Tile, true, false, false, float>>(
            OP, ctx, dim3((unsigned)blocks_of<Tile>(g.p)), Shape<Tile>::THREADS, Smem<Tile>::bytes,
            g);
    return status == GK_OK ? bwd_partial_dq(ctx, element<T>::dtype, g) : status;
}

const gk_cuda_instance table[] = {
    {"flash_attn_bwd_partial_sm80_bf16_d128",
     GK_BF16,
     plan_partial,
     run_partial<__nv_bfloat16>,
     {128},
     NULL},
    {"flash_attn_bwd_partial_sm80_f16_d128",
     GK_F16,
     plan_partial,
     run_partial<__half>,
     {128},
     NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_partial_sm80_table = {
    table, sizeof table / sizeof table[0], 80, NULL};
