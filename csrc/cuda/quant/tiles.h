/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: every tuned number of the quantised CUDA kernels, each with its reason. */
#ifndef GPUKERN_CUDA_QUANT_TILES_H
#define GPUKERN_CUDA_QUANT_TILES_H

enum {
    SCALED_STAGES_256 = 4, /* of 48 KB: what fits */
    SCALED_STAGES_128 = 6, /* of 32 KB: what fits */
    SCALED_GROUP =
        8, /* rows of tiles that run beside each other, so that they share columns of b in L2; not measured */
    GROUPED_BM = 256,    /* four blocks of 64 rows, two a warpgroup */
    GROUPED_BN = 128,    /* what 64 sums a thread and block hold */
    GROUPED_STAGES = 4,  /* of 48 KB: what fits beside the staging tiles */
    GROUPED_MOST = 1024, /* groups whose ends fit there, too */
    GROUPED_ROWS = 8,    /* of tiles of a group that run beside each other, as SCALED_GROUP */
    GROUPED_PAIRS = 8,   /* from so many tiles across on, clusters of two, though the last of an odd number idles */
    PLAIN_TILE = 64,     /* the plain product: 4 x 4 sums a thread of 256 */
    PLAIN_K = 16         /* no block of scales is shorter */
};

#endif
