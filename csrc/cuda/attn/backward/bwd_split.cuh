/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_split.cuh: which tiles of keys the masked Hopper backward divides among several blocks, and
 * how it cuts their work. Everything here is a plain function, which
 * tests/csrc/check_attn_sm90a.cpp also runs on the CPU.
 *
 * A block, or for wide heads a pair of blocks, takes all queries that see its 128 keys. If every
 * query sees the same few keys, the block of those keys takes many times as long as any other. So
 * the longest tiles of a unit (one kv head of one batch entry) have several keys tasks each. The
 * host does not read the mask. It gives every unit as many tasks as could be needed, and tasks
 * without work exit at once. */
#ifndef GPUKERN_CUDA_BWD_SPLIT_CUH
#define GPUKERN_CUDA_BWD_SPLIT_CUH

#include "../../layout/layout.cuh"

/* A tile of keys is cut if its lists, over the query heads of a group, have at least FROM blocks of
 * 128 queries. A part has at least LEAST blocks. A part costs 11,000 clocks in addition to its
 * steps, which take about 4,500 clocks each. Its sums also go through memory. */
constexpr int BWD_SPLIT_FROM = 32, BWD_SPLIT_LEAST = 8;
/* The largest number of tiles of a unit that are cut, and of parts of one tile. A task without work
 * costs about 2,000 clocks: 0.5 % of a call of 8,192 tokens. Pairs of blocks cut one tile. Two were
 * 1 to 2 % slower where nothing is cut, and no faster for a window with 64 global keys. */
constexpr int BWD_SPLIT_TILES = 2, BWD_SPLIT_TILES_OF_PAIRS = 1, BWD_SPLIT_PARTS = 8;

/* The first tiles * most keys tasks of a unit are the parts of its `tiles` longest tiles. Each
 * later task is a whole tile. `most` is 1 if nothing is cut. */
struct BwdSplit {
    int tiles, most;

    GK_HD int more_tasks() const { return tiles * (most - 1); }
    /* The rank of a task's tile among the tiles sorted by length, and the task's part of that
     * tile. */
    GK_HD int rank(int task) const {
        return task < tiles * most ? task / most : task - more_tasks();
    }
    GK_HD int part(int task) const { return task < tiles * most ? task % most : 0; }

    /* The number of parts into which a tile is cut. count: the number of blocks in its lists.
     * uncut: that of the longest tile that is not cut, since a part need not be shorter than that
     * tile. */
    GK_HD int parts(int count, int uncut) const {
        if (count < BWD_SPLIT_FROM) return 1;
        const int parts = count / (uncut > BWD_SPLIT_LEAST ? uncut : BWD_SPLIT_LEAST);
        return parts < 1 ? 1 : parts < most ? parts : most;
    }
};

/* longest: the largest number of blocks that the lists of a tile may have. cut: the largest number
 * of tiles that are cut. */
inline BwdSplit bwd_split_of(int64_t longest, int64_t tiles_k, int cut = BWD_SPLIT_TILES) {
    if (longest < BWD_SPLIT_FROM) return {0, 1};
    const int64_t most = longest / BWD_SPLIT_LEAST;
    return {(int)(tiles_k < cut ? tiles_k : cut),
            (int)(most < BWD_SPLIT_PARTS ? most : BWD_SPLIT_PARTS)};
}

/* Joins the lists of a group's heads and cuts the result into `parts` shares of equal length. For
 * each head whose list has entries [first, end) of share `part`, calls take(head, first, end,
 * length). length(head): the length of its list. */
template <class Length, class Take>
GK_HD inline void bwd_take_part(int group, int part, int parts, const Length &length,
                                const Take &take) {
    int total = 0;
    for (int h = 0; h < group; ++h) total += length(h);
    /* the share's bounds, counted from the beginning of head h's list */
    int from = (int)((int64_t)total * part / parts),
        to = (int)((int64_t)total * (part + 1) / parts);
    for (int h = 0; h < group && to > 0; ++h) {
        const int n = length(h), first = from > 0 ? from : 0, end = to < n ? to : n;
        if (first < end) take(h, first, end, n);
        from -= n;
        to -= n;
    }
}

#endif
