/* SPDX-License-Identifier: BSD-3-Clause */
/* prefill_tiles.h: the tuned numbers of prefill over pages, each with its reason. PREFILL_TOKENS
 * is in paged_tiles.h. */
#ifndef GPUKERN_CUDA_PREFILL_TILES_H
#define GPUKERN_CUDA_PREFILL_TILES_H

/* The largest number of keys in a box if a tile may begin inside a page. The tile then begins at
 * a box boundary, and the keys before its first visible one are loaded in vain. */
constexpr int PREFILL_LATE_BOX = 32;

/* The largest number of keys in a box: a whole tile. */
constexpr int PREFILL_LONGEST_BOX = 128;

/* paged_prefill_decoded_sm90a. paged_attn_sm90a reads a key once for 16 rows, 1 byte a column, and
 * computes some 7 times as long as the forward. Decoded pages cost 5 bytes a column, once. Both
 * take the same time at 94 rows of a kv head. */
struct prefill_decoded {
    /* query tokens x heads of a group, averaged over the sequences */
    static constexpr int least_rows = 128;
    /* Bytes of decoded pages: kv heads are processed in rounds of about round_bytes. If one head
     * alone needs more than most_bytes, other kernels serve. */
    static constexpr double round_bytes = 256 << 20, most_bytes = 1 << 30;
    static constexpr int blocks_per_sm = 8; /* all threads of an SM, 64 KiB in flight */
};

#endif
