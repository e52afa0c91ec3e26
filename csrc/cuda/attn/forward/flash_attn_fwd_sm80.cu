/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_sm80: attention on tensor cores by mma.sync, 16-bit, dense and packed, every
 * modifier. The kernel is in fwd_sm80.cuh. Not handled: dropout (flash_attn_fwd_drop_sm80),
 * float32 (flash_attn_fwd_simt), unaligned rows (flash_attn_fwd_plain). */
#include "fwd_sm80.cuh"

namespace {

#define ROW(D, name, T, dtype, TILE, MODIFIED)                                                   \
    {name, dtype, plan<TILE<D>>, run<T, TILE<D>, MODIFIED>, {D, MODIFIED, Smem<TILE<D>>::BYTES}, \
     NULL}
#define ROWS(D)                                                                           \
    ROW(D, "flash_attn_fwd_sm80_bf16_d" #D, __nv_bfloat16, GK_BF16, FlashFwdTile, false), \
        ROW(D, "flash_attn_fwd_sm80_f16_d" #D, __half, GK_F16, FlashFwdTile, false),      \
        ROW(D, "flash_attn_fwd_sm80_bf16_d" #D "_score", __nv_bfloat16, GK_BF16,          \
            FlashFwdScoreTile, true),                                                     \
        ROW(D, "flash_attn_fwd_sm80_f16_d" #D "_score", __half, GK_F16, FlashFwdScoreTile, true)

const gk_cuda_instance instances[] = {ROWS(32),  ROWS(64),  ROWS(96),
                                      ROWS(128), ROWS(192), ROWS(256)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
