/* SPDX-License-Identifier: BSD-3-Clause */
/* prices.h: the times, limits and sizes by which the planners of gemm choose, with the measurement
 * behind each one. The planners are *_plan.c. The instances and their percentages of the peak are
 * in instances.def. This header is C, because every build plans, also one without nvcc. */
#ifndef GPUKERN_CUDA_GEMM_PRICES_H
#define GPUKERN_CUDA_GEMM_PRICES_H

#include <stdbool.h>
#include <stdint.h>

/* ---- gemm_sm80, and split-K through memory --------------------------------------------------- */
/* Percent of the dense peak that an instance of gemm_sm80 reaches on full SMs. The plan of Hopper's
 * gemm compares its own estimates with times from these. (Measured: 4096 cubed, one H200.) */
enum {
    PERCENT_128x128 = 36, /* 378 TFLOP/s */
    PERCENT_ANY = 10,     /* 104 TFLOP/s */
    PERCENT_TF32 = 33,    /* 175 TFLOP/s of half the peak */
    /* 42 TFLOP/s of half the peak: gemm_plain, for tf32 operands without aligned rows. */
    PERCENT_PLAIN = 8,
    /* Time of a block that has its SM to itself, in percent of the time on a full SM. It is longer,
     * because no other block hides its waits. (Measured: 1024 cubed.) */
    PERCENT_ALONE = 115
};
enum {
    /* Rows of tiles scheduled together. A wave of 132 tiles then reads 8 x 128 rows of a and about
     * as many columns of b. */
    GROUP_ROWS = 8,
    /* Largest number of splits of k. With more, adding the partials costs more than the fuller
     * waves gain. */
    MAX_SPLITS = 32
};
/* Cost of the kernel that adds the partial sums of split-K: its launch in us, and the bytes per us
 * at which partial sums move through L2. */
static const double REDUCE_US = 2.5, REDUCE_BYTES_PER_US = 3e6;
/* Time of the prologue and the stores of a block, in us. */
static const double BLOCK_US = 1.5;

/* ---- Hopper's gemm --------------------------------------------------------------------------- */
/* True if the tiles of the last wave may be halved along k. If both operands are MN-major
 * (mn_major), the producer of the largest tile has no register left for the extra copies. */
#ifdef __cplusplus
constexpr
#else
static inline
#endif
    bool may_halve(int bm, int bn, bool mn_major) {
    return !mn_major || bm * bn < 128 * 256;
}
/* Rows of a whose tiles are scheduled together. With 128 x 256 tiles, a wave reads about as many
 * columns of b. */
enum {
    GROUP_HEIGHT_SM90 = 2048
};
/* If a has at most SM90_SWAPAB_ROWS rows, swap-AB streams the weights b past them. If b has at most
 * that many columns, narrow tiles stream a past them. Calls with k below SM90_SWAPAB_K use ordinary
 * tiles, because one of two splits of k would have nothing to do. */
enum {
    SM90_SWAPAB_ROWS = 64,
    SM90_SWAPAB_K = 512
};
/* Largest number of results M x N for which swap-AB is considered beyond small M. This saves 2.4 %
 * of the time of random products (geometric mean). A limit of 320 rows saved 1.1 %. */
static const int64_t SM90_SWAPPED_RESULTS = 8 << 20;
/* With small M, results of up to this many bytes (a sixth of L2) are stored with a policy that
 * keeps them in L2. Writing them back in the middle of the stream of weights cost 5 of 62 us at
 * 64 x 28672 x 4096. */
static const int64_t KEEP_BYTES = 8 << 20;
/* A call that needs at least 1 / LEAST_IDLE of the SMs launches a block on every SM. The blocks
 * that start last have no tile, so the next kernel does not wait for them. (Measured: 512 cubed
 * 3.14 us instead of 3.27, 1024 cubed 5.9 us instead of 6.0.) */
enum {
    LEAST_IDLE = 4
};
/* Time of a swap-AB product of small M: SWAPAB_US and the time of its bytes. For 16 x 4096 x 4096
 * that is 10.9 us. */
static const double SWAPAB_US = 1.5, SWAPAB_BYTES_PER_US = 4.0e6;
/* Times in us that nothing hides: LAUNCH_US for a launch, LAST_US for storing the last results,
 * TILE_US for a tile, STORE_US for storing a tile's results. LAST_US and STORE_US are for a tile of
 * 128 x 256 and scale with the tile's size.
 *
 * These constants, the next ones and the percentages of instances.def are fitted to times measured
 * on one H100. The sample is all instances on some 1200 random products
 * (benchmarks/gemm_instances.py), and on 140 squares, products of models and slow cases. The chosen
 * instance takes 2.1 % more time than the best one on random products, and 0.2 to 0.8 % more on
 * squares and models. */
static const double LAUNCH_US = 1.74, LAST_US = 0.07, TILE_US = 0.01, STORE_US = 1.93;
/* Bytes per us that all SMs read from L2, and that one SM receives. */
static const double L2_BYTES_PER_US = 9.3e6, SM_BYTES_PER_US = 0.215e6;
/* EXCHANGE_US, EXCHANGE4_US: adding the sums of split-K by two and by four, for a tile of 128 x
 * 256. HALVES_US, HALVES_SUM_US: the additional time of tiles that are halved along k, as a
 * constant and for adding the two sums of a tile of 128 x 256. */
static const double EXCHANGE_US = 2.6, EXCHANGE4_US = 2.73, HALVES_US = 1.7, HALVES_SUM_US = 2.1;
/* The plan of gemm_sm80 underestimates calls of some 10 us by SM80_US. tf32 calls that are expected
 * to take less than FEW_TILES_US are compared with gemm_sm80's estimate. */
static const double SM80_US = 1.0, FEW_TILES_US = 40;
/* Ping-pong: a tile whose products take less than PING_PONG_US waits until the previous tile is
 * stored. Only one warpgroup works on the last tile of a block, which costs ALONE_US. */
static const double PING_PONG_US = 8.0, ALONE_US = 2.6;
/* Time of an activation other than relu for 128 x 256 results on an SM, in us. The four waves of
 * 4096 cubed take 25 us. */
static const double CURVE_US = 6.0;

/* ---- aligned copies -------------------------------------------------------------------------- */
/* Estimated time of the copies: REALIGN_US for a launch that overlaps its neighbours, and the bytes
 * that are read and written at REALIGN_BYTES_PER_US. Bytes after the first REALIGN_FAST_BYTES take
 * additional time, at REALIGN_MANY_PER_US. Fitted to copies of one and two operands of 512, 1024,
 * 1536, 2048 and 4096 squared on one H200. */
static const double REALIGN_US = 0.9, REALIGN_BYTES_PER_US = 9.0e6, REALIGN_FAST_BYTES = 16e6,
                    REALIGN_MANY_PER_US = 8.0e6;
/* An N-major b of at most this many columns is copied to K-major. In place, TMA would request every
 * row of 16 bytes from L2 separately, and all blocks would request the same rows. (Measured:
 * 4096 x 8 x 4096 takes 19.8 us in place, 15.7 with the copy, and 13.4 if b is already K-major.) */
enum {
    REALIGN_ROW = 8
};
/* Largest copy of the weights for small M, in bytes. It takes 0.1 ms for weights without a
 * dimension of stride 1. */
static const int64_t REALIGN_FEW_BYTES = 128 << 20;

/* ---- gemm_plain ------------------------------------------------------------------------------ */
/* A round is as many tiles as an SM runs at once.
 *   PLAIN_UNALIGNED_PERCENT   percent of the peak of multiply-adds that the large tile reaches if
 *                             rows are misaligned; replaces the percentage of instances.def
 *   PLAIN_ALONE_PERCENT       least time of an SM's last, incomplete round, in percent of a whole
 *                             round
 *   PLAIN_ROUND_US            time of a round that nothing hides
 * Fitted to the times of the three tiles on 36 shapes on one H200. The chosen tile takes 1.5 % more
 * time than the best one. */
enum {
    PLAIN_UNALIGNED_PERCENT = 57,
    PLAIN_ALONE_PERCENT = 63
};
static const double PLAIN_ROUND_US = 5;
/* Smallest split of k, in steps of BK. Shorter ones spend their time in the first loads. */
enum {
    PLAIN_SPLIT_STEPS = 8
};

/* ---- gemm_skinny ----------------------------------------------------------------------------- */
enum {
    /* The most weights of a tile. 28672 weights then give each of 128 SMs four tiles of 56, and
     * 4096 weights give it one tile of 32. */
    SKINNY_ROWS = 64,
    /* Warps of a block, which split k. */
    SKINNY_WARPS = 8,
    /* Elements of k that a block multiplies in a step, over all its warps. */
    SKINNY_BLOCK_STEP = SKINNY_WARPS * 32,
    /* Largest M. At 64 tokens gemm_sm80, whose warps share tokens, takes 15.3 us, where this kernel
     * took 20.8. */
    SKINNY_MAX_TOKENS = 16,
    /* With fewer misaligned weights than this, gemm_sm80 is used, because it splits k over all SMs.
     * At 1024 weights and k = 4096 both kernels take equally long. gemm_skinny then uses only 32
     * SMs, each with a tile of 32 weights. */
    SKINNY_MISALIGNED_LEAST = 1024
};

#endif
