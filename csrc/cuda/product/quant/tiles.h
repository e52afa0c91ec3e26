/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: every tuned number of the quantised CUDA kernels, each with its reason. */
#ifndef GPUKERN_CUDA_QUANT_TILES_H
#define GPUKERN_CUDA_QUANT_TILES_H

enum {
    /* rows of tiles that run beside each other, so that they share columns of b in L2; not
     * measured */
    SCALED_GROUP = 8,
    SCALED_RING = 192 * 1024, /* what fits: 4 stages of 48 KB, 6 of 32, 8 of 24 */
    SPARSE_SMEM = 227 * 1024, /* of a block on Hopper */
    SPARSE_PAIRS = 8, /* from so many tiles across on, clusters of two, though the last of an odd
                         number idles */
    SPARSE_GROUP = 8, /* tiles of tokens side by side; not measured */
    WEIGHT_DECODE_WARPS = 8, /* 46 us for 8192 x 8192 of 4 bits (H200), a copy's speed */
    WEIGHT_WARPS = 8,        /* two blocks an SM make 16; 16 a block not measured */
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
