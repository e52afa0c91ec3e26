/* SPDX-License-Identifier: BSD-3-Clause */
/* prices.h: the numbers by which the planners of gemm choose: times, limits and sizes, with the
 * measurement behind each one. The instances and their percentages of the peak are in
 * instances.def. It is C, because every build plans, also one without nvcc. */
#ifndef GPUKERN_CUDA_GEMM_PRICES_H
#define GPUKERN_CUDA_GEMM_PRICES_H

#include <stdbool.h>
#include <stdint.h>

/* ---- gemm_sm80, and split-K through memory --------------------------------------------------- */
/* Percent of the dense peak that an instance of gemm_sm80 reaches on full SMs. Hopper's plan
 * compares its own estimates with these. Measured at 4096 cubed on one H200. */
enum {
    PERCENT_128x128 = 36, /* 378 TFLOP/s */
    PERCENT_ANY = 10,     /* 104 TFLOP/s */
    PERCENT_TF32 = 33,    /* 175 TFLOP/s of half the peak */
    /* 42 TFLOP/s of half the peak: tf32 outside Hopper's tensor-core instances. */
    PERCENT_PLAIN = 8,
    /* Time of a block that has its SM to itself, in percent of the time on a full SM: no other
     * block hides its waits (measured at 1024 cubed). */
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
/* Cost of the second kernel of split-K: its launch in us, and the bytes per us at which partials
 * move through L2. */
static const double REDUCE_US = 2.5, REDUCE_BYTES_PER_US = 3e6;
/* Start and end of a block in us: prologue latency and stores. */
static const double BLOCK_US = 1.5;

/* ---- Hopper's gemm --------------------------------------------------------------------------- */
/* Whether the tiles of the last wave may be halved along k. With both operands MN-major, the
 * producer of the largest tile has no register left for the extra copies. */
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
 * as many columns, narrow tiles stream a past them. Calls with k below SM90_SWAPAB_K use ordinary
 * tiles, since one of two splits of k would have nothing to do. */
enum {
    SM90_SWAPAB_ROWS = 64,
    SM90_SWAPAB_K = 512
};
/* Largest result M x N for which swap-AB is considered beyond small M. It saves 2.4 % of random
 * products' time (geometric mean); a limit of 320 rows saved 1.1 %. */
static const int64_t SM90_SWAPPED_RESULTS = 8 << 20;
/* Results of small M up to this many bytes (a sixth of L2) are kept in L2 until they are read.
 * Writing them back in the middle of the stream of weights cost 5 of 62 us at 64 x 28672 x 4096. */
static const int64_t KEEP_BYTES = 8 << 20;
/* A call that needs at least a quarter of the SMs gets a block on every SM. The blocks that
 * start last have no tile, so the next kernel does not wait for them: 512 cubed from 3.27 to
 * 3.14 us, 1024 cubed from 6.0 to 5.9 us. */
enum {
    LEAST_IDLE = 4
};
/* Time of a swap-AB product of small M: a constant, and its bytes. 10.9 us for 16 x 4096 x 4096. */
static const double SWAPAB_US = 1.5, SWAPAB_BYTES_PER_US = 4.0e6;
/* Times that nothing hides, in us: LAUNCH_US of a launch, LAST_US of the last results, TILE_US of a
 * tile, STORE_US of a tile's results. LAST_US and STORE_US are for a tile of 128 x 256 and scale
 * with its size.
 *
 * These, the next constants and the percentages of instances.def are fitted to measured times on
 * one H100. The sample: all instances on some 1200 random products (benchmarks/gemm_instances.py),
 * and on 140 squares, products of models and slow cases. The chosen instance takes 2.1 % more time
 * than the best one on random products, and 0.2 to 0.8 % more on squares and models. */
static const double LAUNCH_US = 1.74, LAST_US = 0.07, TILE_US = 0.01, STORE_US = 1.93;
/* Bytes per us that all SMs read from L2, and that one SM receives. */
static const double L2_BYTES_PER_US = 9.3e6, SM_BYTES_PER_US = 0.215e6;
/* EXCHANGE_US, EXCHANGE4_US: adding the sums of split-K by two and by four, for a tile of 128 x
 * 256. HALVES_US, HALVES_SUM_US: the additional time of tiles that are halved along k, as a
 * constant and for adding the two sums of a tile of 128 x 256. */
static const double EXCHANGE_US = 2.6, EXCHANGE4_US = 2.73, HALVES_US = 1.7, HALVES_SUM_US = 2.1;
/* gemm_sm80's estimate is too low by SM80_US for calls of some 10 us. tf32 calls shorter than
 * FEW_TILES_US are compared with it. */
static const double SM80_US = 1.0, FEW_TILES_US = 40;
/* Ping-pong: a tile whose products take less than PING_PONG_US waits until the previous tile is
 * stored. Only one warpgroup works on the last tile of a block, which costs ALONE_US. */
static const double PING_PONG_US = 8.0, ALONE_US = 2.6;
/* Time of an activation of many instructions for 128 x 256 results on an SM. The four waves of 4096
 * cubed take 25 us. */
static const double CURVE_US = 6.0;

/* ---- aligned copies -------------------------------------------------------------------------- */
/* The planner's estimate of a copy: a launch that overlaps its neighbours, bytes per us read and
 * written, and the slower rate for bytes after the first 16 MB. Fitted to one and two operands
 * of 512, 1024, 1536, 2048 and 4096 squared on one H200. */
static const double REALIGN_US = 0.9, REALIGN_BYTES_PER_US = 9.0e6, REALIGN_FAST_BYTES = 16e6,
                    REALIGN_MANY_PER_US = 8.0e6;
/* An N-major b of at most this many columns is copied to K-major. TMA would ask L2 for every row
 * of 16 bytes by itself, and all blocks for the same ones: 4096 x 8 x 4096 takes 19.8 us in
 * place, 15.7 with the copy, and 13.4 if b is already K-major. */
enum {
    REALIGN_ROW = 8
};
/* Largest copy of the weights for small M, in bytes. Weights without a dimension of stride 1 are
 * copied at 128 MB in 0.1 ms. */
static const int64_t REALIGN_FEW_BYTES = 128 << 20;

/* ---- gemm_plain ------------------------------------------------------------------------------ */
/* PLAIN_UNALIGNED_PERCENT: percent of the peak of multiply-adds that the large tile reaches with
 * misaligned rows, instead of its own percentage. PLAIN_ALONE_PERCENT: time of an SM's last few
 * tiles, in percent of the time of as many as it runs at once. PLAIN_ROUND_US: time of one such
 * round that nothing hides. Fitted to the times of the three tiles on 36 shapes on one H200. The
 * chosen tile takes 1.5 % more time than the best one. */
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
    /* The most weights of a tile. 28672 weights are four tiles of 56 on each of 128 SMs, and 4096
     * weights are one tile of 32. */
    SKINNY_ROWS = 64,
    /* Warps, which split k. 8 warps keep more copies in flight than registers could hold. */
    SKINNY_WARPS = 8,
    /* Elements of k that all warps of a block multiply in a step. */
    SKINNY_BLOCK_STEP = SKINNY_WARPS * 32,
    /* Largest M. At 64 tokens gemm_sm80, whose warps share tokens, takes 15.3 us, where this kernel
     * took 20.8. */
    SKINNY_MAX_TOKENS = 16,
    /* With fewer misaligned weights than this, gemm_sm80 is used, because it splits k over all SMs.
     * 1024 weights with k = 4096 take equally long in both kernels. Here 32 SMs then have a tile of
     * 32. */
    SKINNY_MISALIGNED_LEAST = 1024
};

#endif
