/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_sm90a: attention on Hopper's tensor cores, 16-bit, dense and packed, every
 * modifier. It is FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) with a stale softmax
 * reference (stale_softmax.cuh):
 *
 *  S = Q K^T   s = score(S), -inf for keys that a row does not see   P = 2^(s - m)   O = O + P V
 *  out = O / (sum P + 2^(sink - m))   lse = m + log(sum P + 2^(sink - m))
 *
 * q [.., Sq, D], k [.., Sk, D], v [.., Sk, Dv], out [.., Sq, Dv], with strides that TMA can
 * describe; lse [.., Sq] float32. D and Dv are multiples of 8 up to HEAD_DIM and HEAD_DIM_V; TMA
 * fills the remaining columns with zeros.
 *
 * Work split: a block stays on its SM and takes one tile of queries after another
 * (fwd_schedule.cuh). In the producer warpgroup one warp finds the tiles and one thread loads Q, K
 * and V by TMA. Each consumer warpgroup owns 64 rows of S and O. If the tiles would not fill the
 * GPU, the keys of a tile are split. The partial results then go through the workspace.
 *
 *  A step of a consumer, key block j                        (tensor cores work in the background)
 *    issue S_j = Q K_j^T
 *    issue O  += P_(j-1) V_(j-1)
 *    wait for S_j alone, release K_j
 *    P_j = 2^(S_j - m)                                      runs under O += P_(j-1) V_(j-1)
 *    wait for O, release V_(j-1); rows whose sums left float's range redo the block
 *
 * Not handled: strides and offsets that TMA cannot describe, and a scale or softcap outside the
 * range of fwd_score.cuh. flash_attn_fwd_sm80 serves those. */
#include "fwd_kernel.cuh"

namespace {

/* ---- table ----------------------------------------------------------------------------------- */
#define INSTANCE(name, T, dtype, TILE, MODIFIED)                                      \
    {name,                                                                            \
     dtype,                                                                           \
     plan<TILE>,                                                                      \
     run<T, TILE, MODIFIED>,                                                          \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, MODIFIED, Smem<TILE>::BYTES, Smem<TILE>::BQ}, \
     NULL}
#define INSTANCES(label, TILE)                                                                     \
    INSTANCE("flash_attn_fwd_sm90a_bf16_" label, __nv_bfloat16, GK_BF16, TILE, false),             \
        INSTANCE("flash_attn_fwd_sm90a_f16_" label, __half, GK_F16, TILE, false),                  \
        INSTANCE("flash_attn_fwd_sm90a_bf16_" label "_score", __nv_bfloat16, GK_BF16, TILE, true), \
        INSTANCE("flash_attn_fwd_sm90a_f16_" label "_score", __half, GK_F16, TILE, true)

const gk_cuda_instance instances[] = {
    INSTANCES("d64", FwdHopper64),           INSTANCES("d64_short", FwdHopper64Short),
    INSTANCES("d96", FwdHopper96),           INSTANCES("d128", FwdHopper128),
    INSTANCES("d192_128", FwdHopper192v128), INSTANCES("d192", FwdHopper192),
    INSTANCES("d256", FwdHopper256)};

/* Chooses the first instance that serves the call. Short sequences skip instances with 192 rows,
 * whose tiles waste more. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    const int64_t seq_q = a->cu_seqlens_q ? a->max_seqlen_q : a->q.shape[2];
    const bool wasteful = seq_q <= (a->rules.is_causal ? FWD_SHORT_CAUSAL : FWD_SHORT);
    for (const gk_cuda_instance &instance : instances) {
        if (instance.dtype != a->q.dtype || (instance.key[FwdKey::BQ] > 128 && wasteful) ||
            !instance.plan(&instance, ctx, args, to))
            continue;
        to->kernel = &instance;
        return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
