/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_mend.cuh: the second kernel of the forward with a mask or a bias, which repairs rows that NaN
 * of hidden keys has reached. flash_attn_fwd_masked_sm90a, flash_attn_fwd_masked_wide_sm90a and
 * flash_attn_fwd_scores_sm80 launch it.
 *
 * A key that is hidden from a row by a mask or a bias may hold NaN or inf. The tile product P V
 * carries such a value into the row, because 0 times NaN is NaN. The first kernel therefore sets a
 * byte, `spoilt`, for every tile whose result is not finite. In these tiles, this kernel computes
 * the rows that are not finite again, pair by pair, as flash_attn_fwd_plain does. Its code is in
 * flash_attn_fwd_plain.cu. If no byte is set, it only reads one byte a tile. */
#ifndef GPUKERN_CUDA_FWD_MEND_CUH
#define GPUKERN_CUDA_FWD_MEND_CUH

#include "gpukern.h"
#include "../../host/launch.cuh"

/* spoilt [B, Hq, ceil(Sq / tile_rows)]: not 0 if the tile's result is not finite. q is bfloat16 or
 * float16. */
gk_status fwd_mend(const gk_context *ctx, const gk_flash_attn_args *a, const uint8_t *spoilt,
                   int tile_rows);

#endif
