/* SPDX-License-Identifier: BSD-3-Clause */
/* scores_tiles.h: the tiles of flash_attn_fwd_scores_sm80 and flash_attn_bwd_scores_sm80, the
 * mma.sync kernels of attention with a mask or biases. A tile of scores must lie in one 128 x 128
 * block of a stored mask, so its numbers of rows and keys divide 128. */
#ifndef GPUKERN_CUDA_SCORES_TILES_H
#define GPUKERN_CUDA_SCORES_TILES_H

#include "tiles.h"

/* Forward: the tiles for softcap and ALiBi. A mask and biases need a few more registers. */
template <int HEAD_DIM_> struct FwdScoresTile : FlashFwdScoreTile<HEAD_DIM_> {};
template <> struct FwdScoresTile<64> : FlashFwdScoreTile<64> {
    static constexpr int BKV = 32; /* with 64 keys, 8 bytes spilled */
};

/* Backward: 16 keys a warp, as with dropout. With 32 keys a warp, 28 to 80 bytes spilled. For
 * head_dim 64 and 128 a step has twice the rows of the dropout tiles, so that each fragment of K or
 * V is used for twice as many rows. */
typedef BwdTile<64, 64, 64, 4, 4, 2, 2> BwdScores64;   /* 234 registers, two blocks an SM */
typedef BwdTile<128, 64, 64, 8, 4, 2, 1> BwdScores128; /* 187 registers */
typedef Bwd256Drop BwdScores256;                       /* 231 registers */

#endif
