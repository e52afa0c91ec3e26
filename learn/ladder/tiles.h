/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: tile sizes of the ladder. They are chosen to be read, not tuned; the tuned ones are in
 * csrc/cuda/product/gemm/tiles.h. */
#ifndef GPUKERN_CUDA_LADDER_TILES_H
#define GPUKERN_CUDA_LADDER_TILES_H

/* Rungs 1 to 3: a block is a square of 1024 threads, the largest block, with one element each. */
constexpr int LADDER_SQUARE = 32;

/* rungs 4 and 5 */
struct LadderRegisters {
    /* 8 warps of 64 x 32 with 8 x 8 sums a thread: 64 multiply-adds for 16 values read. 128
     * registers a thread let two blocks share an SM. */
    static constexpr int BM = 128, BN = 128, BK = 16, WM = 64, WN = 32, EACH = 8, THREADS = 256;
};

/* rung 14 */
struct LadderColumn {
    /* 16 warps of 8 x 32 with 8 sums of one column a thread. 4 blocks of 512 threads share an SM,
     * with 16 KiB of shared memory each. */
    static constexpr int BM = 64, BN = 64, BK = 32, EACH = 8, THREADS = 512;
};

/* rung 15 */
struct LadderWarpTile {
    /* 4 warps of 64 x 64 with 8 x 16 sums a thread. A value of a serves 16 multiply-adds instead of
     * the 8 of rung 5. */
    static constexpr int BM = 128, BN = 128, BK = 16, WM = 64, WN = 64, EACH_M = 8, EACH_N = 16,
                         THREADS = 128;
};

/* rung 16 */
struct LadderWmma {
    /* 8 warps of 64 x 32 with 64 sums a thread; two blocks share an SM. */
    static constexpr int BM = 128, BN = 128, BK = 32, WM = 64, WN = 32, THREADS = 256;
};

/* rungs 6 and 17 */
struct LadderMma {
    /* 4 warps of 64 x 64, the most that a warp's registers hold. Two blocks share an SM: one copies
     * while the other multiplies. */
    static constexpr int BM = 128, BN = 128, BK = 64, WM = 64, WN = 64, THREADS = 128;
};

struct LadderDoubleBuffer {
    /* one stage is read while the other is filled */
    static constexpr int STAGES = 2;
};

/* rungs 8 to 12 and 18 */
struct LadderWgmma {
    /* Two consumer warpgroups of 64 x 256, the widest wgmma, and a producer warpgroup (rung 18 has
     * none). Four stages of 48 KiB are the most that fits. */
    static constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4, WGS = 2, WARPGROUP = 128,
                         THREADS = 3 * WARPGROUP;
    /* rungs 11 and 12: a warp has 2 panels of 16 rows x 64 columns, one filled, one stored */
    static constexpr int PANELS = 2;
    /* rung 12: rows of cluster tiles in a group; the tiles in flight cover 2048 x 2112 of out */
    static constexpr int GROUP = 8;
};

#endif
