/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: every tuned number of the quantised CUDA kernels, with its reason. */
#ifndef GPUKERN_CUDA_QUANT_TILES_H
#define GPUKERN_CUDA_QUANT_TILES_H

enum {
    /* Rows of tiles scheduled together, so that they share columns of b in L2 (not measured). */
    SCALED_GROUP = 8,
    SCALED_RING = 192 * 1024, /* bytes: 4 stages of 48 KB, 6 of 32 or 8 of 24 */
    SPARSE_SMEM = 227 * 1024, /* of a block on Hopper */
    SPARSE_PAIRS = 8,   /* with more tiles across, clusters of two, even if the last one of an odd
                           number idles */
    SPARSE_GROUP = 8,   /* tiles of 256 tokens scheduled together, twice as many of 128 */
    SPARSE_STAGES = 12, /* at most; 60 KB of weights in flight with tiles of 64 x 64 */
    SPARSE_TILE_NS = 1500,   /* prologue and epilogue of a tile */
    WEIGHT_DECODE_WARPS = 8, /* 46 us for 8192 x 8192 of 4 bits, as fast as a copy (H200) */
    WEIGHT_WARPS = 8,        /* of a block; two blocks an SM have 16 (16 a block: not measured) */
    /* Of k in a stage for 8 tokens: four tiles a warp share a stage's overhead. */
    WEIGHT_CHUNK = 1024,
    WEIGHT_STAGES = 3, /* of 16 KB of codes: two blocks an SM keep 64 KB in flight */
    /* With fewer blocks than this, a block takes fewer weight rows. Measured on an H100, 16
     * tokens, blocks of 16, 32 and 64 rows: N = 4096 takes 14.6, 14.4, 19.2 us; 8192 takes 49,
     * 31, 34; 28672 takes 90, 58, 48. */
    WEIGHT_BLOCKS_PER_2_SMS = 3,
    GROUPED_BM = 256,    /* four blocks of 64 rows, two a warpgroup */
    GROUPED_BN = 128,    /* 64 sums a thread for each block of 64 rows */
    GROUPED_STAGES = 4,  /* of 48 KB: what fits beside the staging tiles */
    GROUPED_MOST = 1024, /* most groups: their ends must fit in shared memory, too */
    GROUPED_ROWS = 8,    /* tiles of a group scheduled together, as SCALED_GROUP */
    GROUPED_PAIRS = 8,   /* with more tiles across, clusters of two, even if the last one of an odd
                            number idles */
    PLAIN_TILE = 64,     /* the plain product: 4 x 4 sums for each of 256 threads */
    PLAIN_K = 16         /* no block of scales is shorter */
};

#endif
