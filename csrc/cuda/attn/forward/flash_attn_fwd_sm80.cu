/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_sm80: attention on tensor cores by mma.sync, 16-bit, dense and packed, every
 * modifier. The kernel is in fwd_sm80.cuh. Not handled: dropout (flash_attn_fwd_drop_sm80),
 * float32 (flash_attn_fwd_simt), unaligned rows (flash_attn_fwd_plain). */
#include "fwd_sm80.cuh"

namespace {

#define INSTANCE(D, name, T, dtype, TILE, MODIFIED)                                              \
    {name, dtype, plan<TILE<D>>, run<T, TILE<D>, MODIFIED>, {D, MODIFIED, Smem<TILE<D>>::BYTES}, \
     NULL}
#define INSTANCES(D)                                                                            \
    INSTANCE(D, "flash_attn_fwd_sm80_bf16_d" #D, __nv_bfloat16, GK_BF16, FlashFwdTile, false),  \
        INSTANCE(D, "flash_attn_fwd_sm80_f16_d" #D, __half, GK_F16, FlashFwdTile, false),       \
        INSTANCE(D, "flash_attn_fwd_sm80_bf16_d" #D "_score", __nv_bfloat16, GK_BF16,           \
                 FlashFwdScoreTile, true),                                                      \
        INSTANCE(D, "flash_attn_fwd_sm80_f16_d" #D "_score", __half, GK_F16, FlashFwdScoreTile, \
                 true)

const gk_cuda_instance instances[] = {INSTANCES(32),  INSTANCES(64),  INSTANCES(96),
                                      INSTANCES(128), INSTANCES(192), INSTANCES(256)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
