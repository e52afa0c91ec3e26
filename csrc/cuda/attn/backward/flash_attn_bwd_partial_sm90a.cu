/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_partial_sm90a: flash_attn_bwd_sm90a with unrounded float32 gradients. The caller
 * adds them to the gradients of other parts of the sequence, for example those of the ranks of a
 * ring.
 *
 * dK and dV are stored from registers, and dQ is dq_sum times scale. Everything else is in
 * bwd_keys.cuh and bwd_consumer.cuh.
 *
 * Not handled: float16, softcap and ALiBi, each of which would double the compile time; strides
 * that TMA cannot describe; head_dim over 128. flash_attn_bwd_partial_sm80 and
 * flash_attn_bwd_partial_plain serve those. */
#include "bwd_keys.cuh"

namespace {

template <class T, class Tile, bool MODIFIED, bool ORDERED>
struct BwdPartialConsumer : BwdConsumer<T, Tile, MODIFIED, ORDERED> {
    typedef float Grad;

    __device__ __forceinline__ void store(const BwdHopperParams &x, const BwdWork &w, smem_addr,
                                          int warpgroup) const {
        const Problem &p = x.g.p;
        store_rows(x.g.dk, w, this->dk, (float)p.rules.scale, p.head_dim, 64 * warpgroup);
        store_rows(x.g.dv, w, this->dv, 1.f, p.head_dim_v, 64 * warpgroup);
    }
};

#define INSTANCES(label, TILE)                                                             \
    BWD_INSTANCE("flash_attn_bwd_partial_sm90a_bf16_" label, __nv_bfloat16, GK_BF16,       \
                 BwdPartialConsumer, TILE, false, false),                                  \
        BWD_INSTANCE("flash_attn_bwd_partial_sm90a_bf16_" label "_ordered", __nv_bfloat16, \
                     GK_BF16, BwdPartialConsumer, TILE, false, true)

const gk_cuda_instance instances[] = {INSTANCES("d64", BwdHopper64),
                                      INSTANCES("d128", BwdHopper128)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_partial_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
