/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_drop_sm80: the gradients of attention with dropout in bfloat16 and float16 on
 * the tensor cores, every modifier. The kernels are in bwd_sm80.cuh. Not handled: float32,
 * float64 and unaligned rows (flash_attn_bwd_plain). */
#include "bwd_sm80_run.cuh"

namespace {

#define INSTANCE(NAME, DTYPE, T, TILE, DQ_TILE) \
    {NAME,                                      \
     DTYPE,                                     \
     plan<TILE, DQ_TILE>,                       \
     run<T, TILE, DQ_TILE, true>,               \
     {TILE::head_dim, TILE::bq, TILE::bkv},     \
     NULL}

const gk_cuda_instance table[] = {
    INSTANCE("flash_attn_bwd_drop_sm80_bf16_d64", GK_BF16, __nv_bfloat16, Bwd64Drop, BwdDq64),
    INSTANCE("flash_attn_bwd_drop_sm80_f16_d64", GK_F16, __half, Bwd64Drop, BwdDq64),
    INSTANCE("flash_attn_bwd_drop_sm80_bf16_d128", GK_BF16, __nv_bfloat16, Bwd128Drop,
             BwdDq128Drop),
    INSTANCE("flash_attn_bwd_drop_sm80_f16_d128", GK_F16, __half, Bwd128Drop, BwdDq128Drop),
    INSTANCE("flash_attn_bwd_drop_sm80_bf16_d256", GK_BF16, __nv_bfloat16, Bwd256Drop, BwdDq256),
    INSTANCE("flash_attn_bwd_drop_sm80_f16_d256", GK_F16, __half, Bwd256Drop, BwdDq256),
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_drop_sm80_table = {
    table, sizeof table / sizeof table[0], 80, NULL};
