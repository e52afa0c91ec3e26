/* SPDX-License-Identifier: BSD-3-Clause */
/* scores_tiles.h: the tiles of flash_attn_fwd_scores_sm80, attention with masks and biases. */
#ifndef GPUKERN_CUDA_SCORES_TILES_H
#define GPUKERN_CUDA_SCORES_TILES_H

#include "../tiles.h"

/* Those with softcap and ALiBi; a mask and biases need a few registers more. */
template <int HEAD_DIM_> struct FwdScoresTile : FlashFwdScoreTile<HEAD_DIM_> {};
template <> struct FwdScoresTile<64> : FlashFwdScoreTile<64> {
    static constexpr int BKV = 32; /* 64 keys spilled 8 bytes */
};

#endif
