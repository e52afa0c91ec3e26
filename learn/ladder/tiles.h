/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: the tiles of the ladder. Chosen to be read, not tuned: the tuned ones are
 * gemm/tiles.h. */
#ifndef GPUKERN_CUDA_LADDER_TILES_H
#define GPUKERN_CUDA_LADDER_TILES_H

/* rungs 1 to 3: a block of 1024 threads, the most there is, as a square of one element each */
constexpr int LADDER_SQUARE = 32;

/* rungs 4 and 5 */
struct LadderRegisters {
    /* 8 warps of 64 x 32, 8 x 8 sums a thread: 64 multiply-adds for 16 values read; 128 registers
     * leave two blocks on an SM */
    static constexpr int BM = 128, BN = 128, BK = 16, WM = 64, WN = 32, EACH = 8, THREADS = 256;
};

/* rung 14 */
struct LadderColumn {
    /* 16 warps of 8 x 32, 8 sums a thread, which is what one dimension gives; 16 KiB leave 4 blocks
     * on an SM */
    static constexpr int BM = 64, BN = 64, BK = 32, EACH = 8, THREADS = 512;
};

/* rung 15 */
struct LadderWarpTile {
    /* 4 warps of 64 x 64, 8 x 16 sums a thread: half as many reads a multiply-add as 8 x 8 would
     * need of b */
    static constexpr int BM = 128, BN = 128, BK = 16, WM = 64, WN = 64, EACH_M = 8, EACH_N = 16,
                         THREADS = 128;
};

/* rung 16 */
struct LadderWmma {
    /* 8 warps of 64 x 32, 64 sums a thread; two blocks an SM */
    static constexpr int BM = 128, BN = 128, BK = 32, WM = 64, WN = 32, THREADS = 256;
};

/* rung 6, and 17 */
struct LadderMma {
    /* 4 warps of 64 x 64, the most that a warp's registers hold; two blocks an SM, one copies while
     * the other multiplies */
    static constexpr int BM = 128, BN = 128, BK = 64, WM = 64, WN = 64, THREADS = 128;
};

struct LadderDoubleBuffer {
    /* one stage is read, one filled: what the name says */
    static constexpr int STAGES = 2;
};

/* rungs 8 to 12 */
struct LadderWgmma {
    /* two warpgroups of 64 x 256, the widest wgmma, and one that copies; four stages of 48 KiB are
     * what fits */
    static constexpr int BM = 128, BN = 256, BK = 64, STAGES = 4, WGS = 2, WARPGROUP = 128,
                         THREADS = 3 * WARPGROUP;
    /* rung 11: of 16 rows x 64 columns a warp; one is filled while the other is stored */
    static constexpr int PANELS = 2;
    /* rung 12: rows of clusters' tiles walked together: 2048 x 2112 of out under way */
    static constexpr int GROUP = 8;
};

#endif
