/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_mend.cuh: the second kernel of flash_attn_fwd_masked_sm90a. A key that a mask or a bias hides
 * from a row may hold NaN or inf, and a product of tiles carries it into the row: 0 times NaN is
 * NaN. The first kernel notes tiles whose result is not finite; this one computes their rows that
 * are not finite once more, pair by pair, as flash_attn_fwd_plain does. In all other calls it reads
 * a byte a tile. */
#ifndef GPUKERN_CUDA_FWD_MEND_CUH
#define GPUKERN_CUDA_FWD_MEND_CUH

#include "gpukern.h"
#include "../../host/launch.cuh"

/* spoilt [B, Hq, ceil(Sq / tile_rows)]: 0 = the tile is finite. T: __nv_bfloat16 or __half. */
template <class T>
gk_status fwd_mend(const gk_context *ctx, const gk_flash_attn_args *a, const uint8_t *spoilt,
                   int tile_rows);

#endif
