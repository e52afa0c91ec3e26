/* SPDX-License-Identifier: BSD-3-Clause */
/* latent_tiles.h: the tuned numbers of paged_latent_sm90a, each with its reason. */
#ifndef GPUKERN_CUDA_LATENT_TILES_H
#define GPUKERN_CUDA_LATENT_TILES_H

struct latent_tiles {
    /* Registers a thread: O takes 128, S 32, P of both warpgroups 32. */
    static constexpr int consumer_registers = 232, producer_registers = 40;
    /* cost of beginning a tile (Q, the first chunks, the result), in chunks of 64 keys */
    static constexpr int tile_cost = 3;
    /* A worker may take this many chunks more than its share, if no tile is split then. Splits of
     * nearly every tile cost 60 of 300 us at 128 x 4k, 128 heads. */
    static constexpr int slack = 6;
    /* a boundary this near a tile's end moves there */
    static constexpr int snap = 2;
    /* the least weight of a share: with fewer chunks, the merge would take longer than they do */
    static constexpr int least = 4;
    /* From this many parts of a tile on, four warps of the merge share each row's parts.
     * Otherwise each of them takes a row. */
    static constexpr int many_splits = 8;
    /* blocks of the merge on each SM */
    static constexpr int merge_blocks = 2;
};

#endif
