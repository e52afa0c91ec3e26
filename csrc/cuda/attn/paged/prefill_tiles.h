/* SPDX-License-Identifier: BSD-3-Clause */
/* prefill_tiles.h: the tuned numbers of prefill over pages, each with its reason; PREFILL_TOKENS
 * stands in paged_tiles.h. */
#ifndef GPUKERN_CUDA_PREFILL_TILES_H
#define GPUKERN_CUDA_PREFILL_TILES_H

/* Keys of a box at most, where a tile may begin amid a page: it begins where a box does, and what
 * it has before its first key is lost. */
constexpr int PREFILL_LATE_BOX = 32;

/* Keys of a box at most: a tile's. */
constexpr int PREFILL_LONGEST_BOX = 128;

/* paged_prefill_relay_sm90a. paged_attn_sm90a reads a key of 1 byte a column once for 16 rows, and
 * computes some 7 times as long as the forward does. Decoded pages cost 5 bytes a column, once. At
 * 94 rows of a kv head both take the same. */
struct prefill_relay {
    /* query tokens times heads of a group, of a sequence on the average */
    static constexpr int least_rows = 128;
    /* Of decoded pages: heads go in rounds of about that; and where one head takes more than the
     * second, other kernels serve. */
    static constexpr double round_bytes = 256 << 20, most_bytes = 1 << 30;
    static constexpr int blocks_per_sm = 8; /* all the threads of an SM, 64 KiB in flight */
};

#endif
