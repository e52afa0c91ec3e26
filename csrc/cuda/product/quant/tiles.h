/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: the tuned numbers of the quantised CUDA kernels, with their reasons. tiles_sm80.h has
 * the tiles of the kernels that use mainloop_sm80.cuh. */
#ifndef GPUKERN_CUDA_QUANT_TILES_H
#define GPUKERN_CUDA_QUANT_TILES_H

enum {
    /* Rows of tiles scheduled together, so that they share columns of b in L2 (not measured). */
    SCALED_GROUP = 8,
    SCALED_RING = 192 * 1024, /* bytes of the ring: 4 stages of 48 KB, 6 of 32 KB or 8 of 24 KB */
    SPARSE_SMEM = 227 * 1024, /* bytes of shared memory of a block on Hopper */
    /* With more columns of tiles than this, clusters have two blocks. If their number is odd, one
     * block of the last cluster is idle. */
    SPARSE_PAIRS = 8,
    SPARSE_GROUP = 8,        /* tiles of 256 tokens scheduled together; twice as many of 128 */
    SPARSE_STAGES = 12,      /* most stages: 60 KB of weights in flight with tiles of 64 x 64 */
    SPARSE_TILE_NS = 1500,   /* time of a tile's prologue and epilogue */
    WEIGHT_DECODE_WARPS = 8, /* 46 us for 8192 x 8192 of 4 bits, as fast as a copy (H200) */
    WEIGHT_WARPS = 8,        /* warps of a block; two blocks fit an SM (16 warps: not measured) */
    /* Elements of k in a stage for 8 tokens. Each warp has four tiles in a stage, which share its
     * overhead. */
    WEIGHT_CHUNK = 1024,
    WEIGHT_STAGES = 3, /* stages of 16 KB of codes: two blocks of an SM keep 64 KB in flight */
    /* With fewer blocks than this, a block takes fewer weight rows. Measured on an H100, 16
     * tokens, blocks of 16, 32 and 64 rows: N = 4096 takes 14.6, 14.4, 19.2 us; 8192 takes 49,
     * 31, 34; 28672 takes 90, 58, 48. */
    WEIGHT_BLOCKS_PER_2_SMS = 3,
    GROUPED_BM = 256,    /* four times 64 rows; each warpgroup takes two of the four */
    GROUPED_BN = 128,    /* a thread has 64 accumulators for each 64 rows */
    GROUPED_STAGES = 4,  /* stages of 48 KB: as many as fit beside the staging tiles */
    GROUPED_MOST = 1024, /* most groups: their ends must fit in shared memory, too */
    GROUPED_ROWS = 8,    /* rows of tiles of a group scheduled together, as SCALED_GROUP */
    /* With more columns of tiles than this, clusters have two blocks, as SPARSE_PAIRS. */
    GROUPED_PAIRS = 8,
    PLAIN_TILE = 64, /* rows and columns of plain.cuh's tile: 4 x 4 for each of 256 threads */
    PLAIN_K = 16     /* k of a step of plain.cuh; no block of scales is shorter */
};

#endif
