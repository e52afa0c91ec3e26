/* SPDX-License-Identifier: BSD-3-Clause */
/* blocks.h: which lengths a tile of the Hopper backward serves, and in which order blocks of keys
 * come: tuned numbers beside those of tiles.h. Measured in clocks on one H100, bfloat16, 16k
 * tokens, hidden size 2048. */
#ifndef GPUKERN_CUDA_ATTN_BLOCKS_H
#define GPUKERN_CUDA_ATTN_BLOCKS_H

#include "tiles.h"

#include <stdint.h>

/* 64 rows waste less at ends and diagonals: 1.10 of 80 rows at 512, causal 1.10 at 512, 1.01 at 1k
 * and 2k; 0.95 at 8k. */
struct BwdHopper128Short : BwdHopper128 {
    static constexpr int BQ = 64; /* 64 rows end where blocks of 128 keys do */
};

/* Queries of a sequence that a tile serves, without and under a causal rule. Half as many where
 * heads form groups, whose blocks have so many more steps that what a step costs decides: 0.97 at
 * 2k of four heads a group. */
template <class Tile> struct BwdRange {
    static constexpr int MOST_ROWS = INT32_MAX, MOST_ROWS_CAUSAL = INT32_MAX;
};
template <> struct BwdRange<BwdHopper128Short> {
    static constexpr int MOST_ROWS = 512, MOST_ROWS_CAUSAL = 2048;
};

/* Under a causal rule units of at least so many blocks of keys go in sets of a wave, the longest
 * first: 1.03 at 4k and 8k, 1.00 at 2k, 0.93 at 1k. */
constexpr int BWD_SET_KEYS = 16;

#endif
