/* SPDX-License-Identifier: BSD-3-Clause */
/* blocks.h: tuned numbers of the Hopper backward: which sequence lengths each tile serves, and the
 * order of key blocks. The other tuned numbers are in tiles.h. Measured in clocks on one H100,
 * bfloat16, 16k tokens, hidden size 2048. */
#ifndef GPUKERN_CUDA_ATTN_BLOCKS_H
#define GPUKERN_CUDA_ATTN_BLOCKS_H

#include "tiles.h"

#include <stdint.h>

/* A step of 64 rows wastes less at the ends of sequences and at the diagonal. Speed relative to 80
 * rows: 1.10 at length 512, causal 1.10 at 512, 1.01 at 1k and 2k, 0.95 at 8k. */
struct BwdHopper128Short : BwdHopper128 {
    static constexpr int BQ = 64; /* a step of 64 rows ends where a block of 128 keys does */
};

/* The largest number of queries of a sequence that a tile serves, without and with a causal mask.
 * With GQA the limit is half as large. A block has more steps then, and the cost of a step matters
 * more (0.97 at 2k with groups of four heads). */
template <class Tile> struct BwdRange {
    static constexpr int MOST_ROWS = INT32_MAX, MOST_ROWS_CAUSAL = INT32_MAX;
};
template <> struct BwdRange<BwdHopper128Short> {
    static constexpr int MOST_ROWS = 512, MOST_ROWS_CAUSAL = 2048;
};

/* Under a causal mask, kv heads of at least this many key blocks are scheduled in sets of one wave,
 * the longest blocks first. Speed relative to one head after the other: 1.03 at 4k and 8k, 1.00 at
 * 2k, 0.93 at 1k. */
constexpr int BWD_SET_KEYS = 16;

#endif
