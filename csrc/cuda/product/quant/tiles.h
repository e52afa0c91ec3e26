/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: every tuned number of the quantised CUDA kernels, each with its reason. */
#ifndef GPUKERN_CUDA_QUANT_TILES_H
#define GPUKERN_CUDA_QUANT_TILES_H

enum {
    SCALED_STAGES_256 = 4, /* of 48 KB: what fits */
    SCALED_STAGES_128 = 6, /* of 32 KB: what fits */
    SCALED_GROUP = 8, /* rows of tiles that run beside each other, so that they share columns of b
                         in L2; not measured */
    SCALED_SMEM = 227 * 1024, /* of an SM's blocks of up to 64 rows of a */
    SCALED_SPLITS =
        8, /* of k: blocks of a cluster that every GPU has. On an H100 clusters of four or more fill
              three fourths of it at once: 4096 x 14336 took 27 us by four, 23 by two */
    SCALED_SPLIT_16 = 16, /* steps of 256 k of a split up to 32 rows: 16 x 4096 x 4096 takes 9.1 us
                             by one, 11.1 by two */
    SCALED_SPLIT_64 = 8,  /* up to 64: 12.6 and 11.7 us */
    SPARSE_SMEM = 227 * 1024, /* of a block on Hopper */
    SPARSE_PAIRS = 8,    /* from so many tiles across on, clusters of two, though the last of an odd
                            number idles */
    SPARSE_GROUP = 8,    /* tiles of tokens side by side; not measured */
    WEIGHT_WARPS = 8,    /* two blocks an SM make 16; 16 a block not measured */
    WEIGHT_CHUNK = 1024, /* of k in a stage for 8 tokens: four tiles a warp, over which a stage's
                            own work is spread */
    WEIGHT_STAGES = 3,   /* of 16 KB of codes: two blocks an SM keep 64 KB under way */
    WEIGHT_BLOCKS_PER_2_SMS =
        3,            /* fewer rows a block below it: of 4096 rows, 16 tokens, blocks of 16, 32, 64
                         take 14.6, 14.4, 19.2 us on an H100; of 8192 49, 31, 34; of 28672 90, 58, 48 */
    GROUPED_BM = 256, /* four blocks of 64 rows, two a warpgroup */
    GROUPED_BN = 128, /* what 64 sums a thread and block hold */
    GROUPED_STAGES = 4,  /* of 48 KB: what fits beside the staging tiles */
    GROUPED_MOST = 1024, /* groups whose ends fit there, too */
    GROUPED_ROWS = 8,    /* of tiles of a group that run beside each other, as SCALED_GROUP */
    GROUPED_PAIRS = 8,   /* from so many tiles across on, clusters of two, though the last of an odd
                            number idles */
    PLAIN_TILE = 64,     /* the plain product: 4 x 4 sums a thread of 256 */
    PLAIN_K = 16         /* no block of scales is shorter */
};

#endif
