/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_mend.cuh: the second kernel of flash_attn_fwd_masked_sm90a and flash_attn_fwd_scores_sm80.
 *
 * A key that is hidden from a row by a mask or a bias may hold NaN or inf. The tile product P V
 * carries such a value into the row, because 0 times NaN is NaN. The first kernel therefore marks
 * every tile whose result is not finite. This kernel computes the rows of marked tiles that are not
 * finite again, pair by pair, as flash_attn_fwd_plain does (the code is in
 * flash_attn_fwd_plain.cu). If no tile is marked, it only reads one byte a tile. */
#ifndef GPUKERN_CUDA_FWD_MEND_CUH
#define GPUKERN_CUDA_FWD_MEND_CUH

#include "gpukern.h"
#include "../../host/launch.cuh"

/* spoilt [B, Hq, ceil(Sq / tile_rows)]: 0 if the tile's result is finite. q is of bfloat16 or
 * float16. */
gk_status fwd_mend(const gk_context *ctx, const gk_flash_attn_args *a, const uint8_t *spoilt,
                   int tile_rows);

#endif
