/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_mask.h: the memory layout of a stored attention mask, shared by its builders and the
 * attention kernels of every device.
 *
 * The mask of one head is cut into blocks of 128 queries x 128 keys. There are nq tiles of
 * queries and nk tiles of keys. The parts follow each other in this order; each is a whole
 * number of 128-byte lines, and offsets count int32:
 *
 *   flags    [nq][nk] uint8    kind of the block | 4 slot
 *   tiles    [nq][4]           {blocks in the list, full ones among them, tile, 0},
 *                              sorted by the length of the list, longest first
 *   lists    [nq][nk] uint16   4 block | kind, for the non-empty blocks of a tile, ascending
 *   words    [slots][512]      bits of the partial blocks
 *   source   [Sq or Sk][4]     ranges: query i sees keys [x, y) and [z, w);
 *                              columns: rows [x, y) and [z, w) do not see key j
 *   tiles_t  [nk][4]           with transposed tables only: the same three by tiles of keys,
 *   lists_t  [nk][nq] uint16   with lists of query tiles
 *   words_t  [slots][512]
 *
 * A block's words are in the order in which the threads of a warpgroup hold the accumulator of a
 * 128 x 128 product. Row r, column c is bit 2 (c / 8) + c % 2 of a word of thread 32 (r / 16) +
 * 4 (r % 8) + c % 8 / 2. Each thread has two words: the first if r % 16 < 8, else the second. In
 * words_t a row is a key and a column is a query.
 *
 * A dense store has one slot for each block: tile nk + block (words_t: block nq + tile). The
 * other stores keep words only for the first GK_MASK_KEPT partial blocks of each tile, in slots
 * GK_MASK_KEPT tile + slot; kernels make the remaining words from `source`. A mask of 131,072
 * tokens therefore takes 20 MB with transposed tables, whatever its ranges are. Bits outside Sq
 * x Sk are 0. */
#ifndef GPUKERN_ATTN_MASK_H
#define GPUKERN_ATTN_MASK_H

#include "gpukern.h"

#include <stdbool.h>

#if defined(__CUDACC__)
#define GK_MASK_FN __host__ __device__ static inline
#else
#define GK_MASK_FN static inline
#endif

enum {
    GK_MASK_TILE = 128,
    GK_MASK_BLOCK_INTS = 512,
    GK_MASK_LINE = 32, /* int32 of 128 bytes */
    /* enough for a window's edge, its diagonal and some keys that all queries see */
    GK_MASK_KEPT = 3,
    GK_MASK_MAX_TILES = 1 << 14
};

/* Kinds of blocks. A partial block is WORDS if its words are stored and MADE if kernels make
 * them from `source`. */
enum {
    GK_BLOCK_EMPTY = 0,
    GK_BLOCK_FULL = 1,
    GK_BLOCK_WORDS = 2,
    GK_BLOCK_MADE = 3
};

GK_MASK_FN gk_mask_store gk_mask_store_of(gk_mask_source source) {
    return source == GK_MASK_OF_RANGES    ? GK_MASK_RANGES
           : source == GK_MASK_OF_COLUMNS ? GK_MASK_COLUMNS
                                          : GK_MASK_DENSE;
}

typedef struct gk_mask_layout {
    int64_t tiles_q, tiles_k;
    /* offsets in int32 */
    int64_t flags, tiles, lists, words, source, tiles_t, lists_t, words_t, total;
} gk_mask_layout;

GK_MASK_FN int64_t gk_mask_lines(int64_t ints) {
    return (ints + GK_MASK_LINE - 1) / GK_MASK_LINE * GK_MASK_LINE;
}

GK_MASK_FN gk_mask_layout gk_mask_layout_of(gk_mask_store store, int64_t seq_q, int64_t seq_k,
                                            bool transposed) {
    gk_mask_layout x;
    const int64_t nq = (seq_q + GK_MASK_TILE - 1) / GK_MASK_TILE,
                  nk = (seq_k + GK_MASK_TILE - 1) / GK_MASK_TILE;
    const int64_t list_ints = gk_mask_lines((nq * nk + 1) / 2);
    const bool dense = store == GK_MASK_DENSE;
    x.tiles_q = nq;
    x.tiles_k = nk;
    x.flags = 0;
    x.tiles = x.flags + gk_mask_lines((nq * nk + 3) / 4);
    x.lists = x.tiles + gk_mask_lines(4 * nq);
    x.words = x.lists + list_ints;
    x.source = x.words + GK_MASK_BLOCK_INTS * nq * (dense ? nk : (int64_t)GK_MASK_KEPT);
    x.tiles_t =
        x.source + (dense ? 0 : gk_mask_lines(4 * (store == GK_MASK_RANGES ? seq_q : seq_k)));
    x.lists_t = x.tiles_t + (transposed ? gk_mask_lines(4 * nk) : 0);
    x.words_t = x.lists_t + (transposed ? list_ints : 0);
    x.total = x.words_t +
              (transposed ? GK_MASK_BLOCK_INTS * nk * (dense ? nq : (int64_t)GK_MASK_KEPT) : 0);
    return x;
}

/* Where the words of the partial block (major, minor) with this flag lie; n: the blocks of a
 * tile. */
GK_MASK_FN int64_t gk_mask_words_of(gk_mask_store store, int64_t major, int64_t minor, int64_t n,
                                    int flag) {
    return store == GK_MASK_DENSE ? major * n + minor : major * GK_MASK_KEPT + (flag >> 2);
}

/* Index of the first of the four words of row r of a block. The others follow at steps of 2.
 * Word q holds the columns c with c % 8 / 2 = q. */
GK_MASK_FN int gk_mask_word_of(int r) { return 2 * (32 * (r / 16) + 4 * (r % 8)) + r % 16 / 8; }

/* The lowest `to` bits of a word, clamped to 0 .. 32. */
GK_MASK_FN uint32_t gk_mask_below(int64_t to) {
    return to <= 0 ? 0u : to >= 32 ? 0xffffffffu : ((uint32_t)1 << to) - 1;
}
/* Sets the bits of columns [from, to); bits[w] holds columns 32 w .. 32 w + 31. */
GK_MASK_FN void gk_mask_set_range(uint32_t bits[4], int64_t from, int64_t to) {
    for (int w = 0; w < 4; ++w)
        bits[w] |= gk_mask_below(to - 32 * w) & ~gk_mask_below(from - 32 * w);
}

/* Word q of a row in the stored order (see the head of this file), from the row's bits in column
 * order. */
GK_MASK_FN uint32_t gk_mask_word(const uint32_t bits[4], int q) {
    uint32_t word = 0;
    for (int w = 0; w < 4; ++w)
        word |= ((bits[w] >> 2 * q & 0x03030303u) * 0x01041040u >> 24) << 8 * w;
    return word;
}

/* True if row i is hidden from a key. c holds the key's two ranges of hidden rows. */
GK_MASK_FN bool gk_mask_hides(const int32_t c[4], int64_t i) {
    return (i >= c[0] && i < c[1]) || (i >= c[2] && i < c[3]);
}

/* Converts the n numbers that FlashMask has for a key to two ranges of rows that do not see it. */
GK_MASK_FN void gk_mask_column(const int32_t *given, int64_t step, int n, bool is_causal,
                               int64_t key, int32_t c[4]) {
    const int32_t c0 = given[0], c1 = n > 1 ? given[step] : 0;
    const int32_t key_or_most = key > 0x7fffffff ? 0x7fffffff : (int32_t)key;
    if (is_causal) {
        c[0] = c0;
        c[1] = n > 1 ? c1 : 0x7fffffff;
        c[2] = 0;
        c[3] = key_or_most;
    } else if (n == 2) {
        c[0] = c0;
        c[1] = 0x7fffffff;
        c[2] = 0;
        c[3] = c1;
    } else {
        c[0] = c0;
        c[1] = c1;
        c[2] = given[2 * step];
        c[3] = given[3 * step];
    }
}

/* ---- a stored mask --------------------------------------------------------------------------- */
/* The mask of one head of one sequence. */
typedef struct gk_mask {
    const uint8_t *flags;
    const int32_t *words, *source;
    gk_mask_store store;
    int64_t seq_q, seq_k, tiles_k;
} gk_mask;

GK_MASK_FN gk_mask gk_mask_at(const int32_t *data, const gk_mask_layout *x, gk_mask_store store,
                              int64_t seq_q, int64_t seq_k) {
    gk_mask m;
    m.flags = (const uint8_t *)(data + x->flags);
    m.words = data + x->words;
    m.source = data + x->source;
    m.store = store;
    m.seq_q = seq_q;
    m.seq_k = seq_k;
    m.tiles_k = x->tiles_k;
    return m;
}

GK_MASK_FN int gk_mask_flag(const gk_mask *m, int64_t row, int64_t block) {
    return m->flags[row / GK_MASK_TILE * m->tiles_k + block];
}

/* The four words of a row and a partial block. */
GK_MASK_FN void gk_mask_row(const gk_mask *m, int64_t row, int64_t block, int flag,
                            uint32_t word[4]) {
    if ((flag & 3) == GK_BLOCK_WORDS) {
        const int64_t at_words =
            gk_mask_words_of(m->store, row / GK_MASK_TILE, block, m->tiles_k, flag);
        const int32_t *at =
            m->words + at_words * GK_MASK_BLOCK_INTS + gk_mask_word_of((int)(row % GK_MASK_TILE));
        for (int q = 0; q < 4; ++q) word[q] = (uint32_t)at[2 * q];
        return;
    }
    uint32_t bits[4] = {0, 0, 0, 0};
    const int64_t first = block * GK_MASK_TILE;
    if (m->store == GK_MASK_RANGES) {
        const int32_t *r = m->source + 4 * row;
        gk_mask_set_range(bits, r[0] - first, r[1] - first);
        gk_mask_set_range(bits, r[2] - first, r[3] - first);
    } else {
        const int64_t left = m->seq_k - first,
                      n = left < GK_MASK_TILE ? left : (int64_t)GK_MASK_TILE;
        for (int64_t c = 0; c < n; ++c)
            bits[c / 32] |= (uint32_t)!gk_mask_hides(m->source + 4 * (first + c), row) << c % 32;
    }
    for (int q = 0; q < 4; ++q) word[q] = gk_mask_word(bits, q);
}

/* Whether a row sees one key: the same answer as the bit of the row's words, without making them.
 */
GK_MASK_FN bool gk_mask_sees(const gk_mask *m, int64_t row, int64_t key) {
    const int64_t block = key / GK_MASK_TILE;
    const int flag = gk_mask_flag(m, row, block), column = (int)(key % GK_MASK_TILE);
    if ((flag & 3) <= GK_BLOCK_FULL) return (flag & 3) == GK_BLOCK_FULL;
    if ((flag & 3) == GK_BLOCK_WORDS) {
        const int64_t at_words =
            gk_mask_words_of(m->store, row / GK_MASK_TILE, block, m->tiles_k, flag);
        const int word = gk_mask_word_of((int)(row % GK_MASK_TILE)) + 2 * (column % 8 / 2);
        const uint32_t bits = (uint32_t)m->words[at_words * GK_MASK_BLOCK_INTS + word];
        return bits >> (2 * (column / 8) + column % 2) & 1;
    }
    if (m->store != GK_MASK_RANGES) return !gk_mask_hides(m->source + 4 * key, row);
    const int32_t *r = m->source + 4 * row;
    return (key >= r[0] && key < r[1]) || (key >= r[2] && key < r[3]);
}

#endif
