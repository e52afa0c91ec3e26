/* SPDX-License-Identifier: BSD-3-Clause */
/* scores_tiles.h: the tiles of flash_attn_fwd_scores_sm80 and flash_attn_bwd_scores_sm80, attention
 * with masks and biases. Tiles lie in one 128 x 128 block of a stored mask. */
#ifndef GPUKERN_CUDA_SCORES_TILES_H
#define GPUKERN_CUDA_SCORES_TILES_H

#include "tiles.h"

/* Those with softcap and ALiBi; a mask and biases need a few registers more. */
template <int HEAD_DIM_> struct FwdScoresTile : FlashFwdScoreTile<HEAD_DIM_> {};
template <> struct FwdScoresTile<64> : FlashFwdScoreTile<64> {
    static constexpr int BKV = 32; /* 64 keys spilled 8 bytes */
};

/* Backward. 16 keys a warp, as with dropout: with 32 keys a warp 28 to 80 bytes spilled. A step has
 * twice the rows of the tiles with dropout, so that a fragment of K or V serves twice as many. */
typedef BwdTile<64, 64, 64, 4, 4, 2, 2> BwdScores64;   /* 234 registers, two blocks an SM */
typedef BwdTile<128, 64, 64, 8, 4, 2, 1> BwdScores128; /* 187 registers */
typedef Bwd256Drop BwdScores256;                       /* 231 registers */

#endif
