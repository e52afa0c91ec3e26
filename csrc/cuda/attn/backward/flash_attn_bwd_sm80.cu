/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_sm80: the gradients of attention in bfloat16 and float16 on the tensor cores
 * (mma.sync). The kernels are in bwd_sm80.cuh. Not handled: dropout (flash_attn_bwd_drop_sm80),
 * float32 (flash_attn_bwd_simt), float64 and unaligned rows (flash_attn_bwd_plain). */
#include "bwd_sm80_run.cuh"

namespace {

#define INSTANCE(NAME, DTYPE, T, TILE, DQ_TILE) \
    {NAME,                                      \
     DTYPE,                                     \
     plan<TILE, DQ_TILE>,                       \
     run<T, TILE, DQ_TILE, false>,              \
     {TILE::head_dim, TILE::bq, TILE::bkv},     \
     NULL}

const gk_cuda_instance table[] = {
    INSTANCE("flash_attn_bwd_sm80_bf16_d64", GK_BF16, __nv_bfloat16, Bwd64, BwdDq64),
    INSTANCE("flash_attn_bwd_sm80_f16_d64", GK_F16, __half, Bwd64, BwdDq64),
    INSTANCE("flash_attn_bwd_sm80_bf16_d128", GK_BF16, __nv_bfloat16, Bwd128, BwdDq128),
    INSTANCE("flash_attn_bwd_sm80_f16_d128", GK_F16, __half, Bwd128, BwdDq128),
    INSTANCE("flash_attn_bwd_sm80_bf16_d128_small", GK_BF16, __nv_bfloat16, Bwd128Small, BwdDq128),
    INSTANCE("flash_attn_bwd_sm80_f16_d128_small", GK_F16, __half, Bwd128Small, BwdDq128),
    INSTANCE("flash_attn_bwd_sm80_bf16_d256", GK_BF16, __nv_bfloat16, Bwd256, BwdDq256),
    INSTANCE("flash_attn_bwd_sm80_f16_d256", GK_F16, __half, Bwd256, BwdDq256),
    INSTANCE("flash_attn_bwd_sm80_bf16_d256_small", GK_BF16, __nv_bfloat16, Bwd256Small,
             BwdDq256Small),
    INSTANCE("flash_attn_bwd_sm80_f16_d256_small", GK_F16, __half, Bwd256Small, BwdDq256Small),
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_sm80_table = {
    table, sizeof table / sizeof table[0], 80, NULL};
