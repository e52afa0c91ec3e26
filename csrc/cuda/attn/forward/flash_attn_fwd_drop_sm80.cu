/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_drop_sm80: attention with dropout on tensor cores, 16-bit, dense and packed, every
 * modifier. The kernel is in fwd_sm80.cuh. Every head_dim uses one of three tiles, to save compile
 * time. Not handled: float32, unaligned rows (flash_attn_fwd_plain). */
#include "fwd_sm80.cuh"

namespace {

#define INSTANCE(D, name, T, dtype)                      \
    {name,                                               \
     dtype,                                              \
     plan<FlashFwdScoreTile<D>>,                         \
     run<T, FlashFwdScoreTile<D>, true, true>,           \
     {D, true, Smem<FlashFwdScoreTile<D>>::BYTES, true}, \
     NULL}
#define INSTANCES(D)                                                           \
    INSTANCE(D, "flash_attn_fwd_drop_sm80_bf16_d" #D, __nv_bfloat16, GK_BF16), \
        INSTANCE(D, "flash_attn_fwd_drop_sm80_f16_d" #D, __half, GK_F16)

const gk_cuda_instance instances[] = {INSTANCES(64), INSTANCES(128), INSTANCES(256)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_drop_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
