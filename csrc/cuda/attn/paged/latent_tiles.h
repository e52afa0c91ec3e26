/* SPDX-License-Identifier: BSD-3-Clause */
/* latent_tiles.h: the tuned numbers of paged_latent_sm90a, each with its reason. */
#ifndef GPUKERN_CUDA_LATENT_TILES_H
#define GPUKERN_CUDA_LATENT_TILES_H

struct latent_tiles {
    /* Registers of a thread. In a consumer O takes 128, S 32, and P of both warpgroups 32. */
    static constexpr int consumer_registers = 232, producer_registers = 40;
    /* Cost of a tile beside its chunks (loading Q, the first loads, the result), in chunks of 64
     * keys. */
    static constexpr int tile_cost = 3;
    /* A worker may take this many chunks more than an equal share if then no tile is split. If
     * nearly every tile is split, the splits cost 60 of 300 us (128 sequences of 4k, 128 heads). */
    static constexpr int slack = 6;
    /* a boundary of shares moves to a tile's end that is at most this many chunks away */
    static constexpr int snap = 2;
    /* The smallest share, in chunks. The merge of smaller ones would take longer than their
     * products. */
    static constexpr int least = 4;
    /* If a tile has more splits than this, the 16 warps of a merge block divide the splits of a
     * quarter of a row. Otherwise each warp adds all splits of its columns. */
    static constexpr int many_splits = 8;
    /* blocks of the merge on each SM */
    static constexpr int merge_blocks = 2;
};

#endif
