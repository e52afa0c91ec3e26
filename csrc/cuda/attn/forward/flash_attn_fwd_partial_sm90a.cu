/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_partial_sm90a: flash_attn_fwd_sm90a with an unrounded float32 out, for context
 * parallelism. The result may be merged with an attention over other keys (out_0, lse_0), which out
 * and lse hold before the call:
 *
 *  lse = log(e^lse_0 + e^lse_1)    out = out_0 e^(lse_0 - lse) + out_1 e^(lse_1 - lse)
 *
 * The merge happens in the registers that hold O: out is read and written once, without a second
 * launch. q [.., Sq, D], k [.., Sk, D], v [.., Sk, Dv] bfloat16; out [.., Sq, Dv] float32, rows
 * aligned to 8 bytes; lse [.., Sq] float32. The kernel is in fwd_kernel.cuh.
 *
 * Not handled: float16, softcap and ALiBi, head_dim over 128, split keys. The other kernels serve
 * those with partial results in the workspace and a merge (fwd_work.cuh). */
#include "fwd_kernel.cuh"

namespace {

/* True if every row begins at a multiple of 8 bytes. */
bool rows_of_pairs(const gk_tensor &t) {
    if ((uintptr_t)t.data % 8 != 0) return false;
    for (int d = 0; d < t.ndim - 1; ++d)
        if (t.shape[d] > 1 && t.stride[d] % 2 != 0) return false;
    return true;
}

template <class Tile>
bool plan_partial(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                  gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    return fwd_by_parts(a) && rows_of_pairs(a->out) && plan<Tile, true>(instance, ctx, args, to);
}

#define INSTANCE(name, T, dtype, TILE)                                             \
    {name,                                                                         \
     dtype,                                                                        \
     plan_partial<TILE>,                                                           \
     run<T, TILE, false, true>,                                                    \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, false, Smem<TILE>::BYTES, Smem<TILE>::BQ}, \
     NULL}

const gk_cuda_instance instances[] = {
    INSTANCE("flash_attn_fwd_partial_sm90a_bf16_d64", __nv_bfloat16, GK_BF16, FwdHopper64),
    INSTANCE("flash_attn_fwd_partial_sm90a_bf16_d128", __nv_bfloat16, GK_BF16, FwdHopper128),
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_partial_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
