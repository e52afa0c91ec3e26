/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: every tuned number of the gemm kernels, with the measurement behind it. */
#ifndef GPUKERN_CUDA_GEMM_TILES_H
#define GPUKERN_CUDA_GEMM_TILES_H

#include <stdint.h>

/* ---- gemm_sm80: BM x BN x BK (elements) through a ring of STAGES, in warp tiles of WM x WN ----
 */
template <int M, int N, int K, int S, int WARP_M, int WARP_N, int BLOCKS> struct SmTile {
    static constexpr int BM = M, BN = N, BK = K, STAGES = S, WM = WARP_M, WN = WARP_N;
    static constexpr int THREADS = M / WARP_M * (N / WARP_N) * 32;
    static constexpr int PER_SM = BLOCKS; /* blocks that registers let an SM hold */
};

/* 8 warps of 64 x 64, the most that an mma.sync warp can reuse from registers: the least
 * shared-memory and L2 traffic per FLOP. */
typedef SmTile<256, 128, 64, 3, 64, 64, 1> Tile16_256x128;
/* Two blocks an SM: one computes while the other stores or waits at its barrier. Fuller waves at
 * 1024 to 2048 cubed. */
typedef SmTile<128, 128, 64, 3, 64, 64, 2> Tile16_128x128;
/* One tile an SM at 1024 cubed, and for 17 to 64 rows. 8 warps of 32 x 32 were 15 % slower. */
typedef SmTile<64, 128, 64, 4, 32, 64, 2> Tile16_64x128;
/* The smallest tile, for 512 cubed and for split-K with 17 to 64 rows. */
typedef SmTile<64, 64, 64, 5, 32, 32, 4> Tile16_64x64;
/* For operands that cp.async cannot copy. Ordinary loads keep chunks of two operands in
 * registers, so a thread has half as many sums as in the other tiles. */
typedef SmTile<128, 128, 32, 3, 64, 32, 1> Tile16_any;
/* tf32: 4 bytes an element, so BK 32 is a row of 128 bytes. */
typedef SmTile<128, 128, 32, 3, 64, 64, 2> Tile32_128x128;
/* tf32 with few tiles. */
typedef SmTile<64, 64, 32, 5, 32, 32, 4> Tile32_64x64;

/* Percent of the dense peak that an instance reaches on full SMs; the planner's weights.
 * Measured at 4096 cubed on one H200. */
enum {
    PERCENT_256x128 = 37,    /* 395 TFLOP/s */
    PERCENT_128x128 = 36,    /* 378 TFLOP/s */
    PERCENT_64x128 = 28,     /* 305 TFLOP/s */
    PERCENT_64x64 = 23,      /* 250 TFLOP/s */
    PERCENT_ANY = 10,        /* 104 TFLOP/s */
    PERCENT_TF32 = 33,       /* 175 TFLOP/s of half the peak */
    PERCENT_TF32_64x64 = 20, /* 107 TFLOP/s */
    /* 42 TFLOP/s of half the peak: tf32 outside Hopper's tensor-core instances. */
    PERCENT_PLAIN = 8,
    /* Time of blocks that do not fill their SM, in percent: no other block hides their waits
     * (1024 cubed). */
    PERCENT_ALONE = 115
};

/* Rows of tiles scheduled together. A wave of 132 tiles then reads 8 x 128 rows of a and about
 * as many columns of b. */
constexpr int GROUP_ROWS = 8;
/* Largest number of splits of k. With more, adding the partials costs more than the fuller waves
 * gain. */
constexpr int MAX_SPLITS = 32;
/* Cost of the second kernel of split-K: its launch in us, and the bytes per us at which partials
 * move through L2. */
constexpr double REDUCE_US = 2.5, REDUCE_BYTES_PER_US = 3e6;
/* Start and end of a block in us: prologue latency and stores. */
constexpr double BLOCK_US = 1.5;

/* ---- Hopper's gemm --------------------------------------------------------------------------- */
/* Tiles of BM x BN. A stage holds 64 K64 elements of k in 16 bits (32 K64 in tf32), and the ring
 * has STAGES stages. WGS consumer warpgroups take BM / WGS rows each, or whole tiles with
 * ping-pong. Each warp has PANELS staging panels of 16 rows x 128 bytes, through which results
 * are stored. Measured ratios are speeds relative to cuBLAS. The defaults: */
struct HopperTile {
    static constexpr int TILES = 2; /* tiles of a cluster, one a block; they share an operand */
    /* Tiles of a cluster that lie in a row; 0: the plan chooses all or one for each call. */
    static constexpr int ACROSS = 0;
    static constexpr int SPLITS = 1; /* splits of k, added across the cluster through DSMEM */
    static constexpr int K64 = 1;
    static constexpr bool SWAP_AB = false; /* computes out^T = b^T a^T */
    /* One warpgroup stores its tile while the other multiplies. */
    static constexpr bool PING_PONG = false;
    static constexpr bool NARROW = false; /* for small N only */
};
/* Two blocks that split k. */
struct HopperSplitTile : HopperTile {
    static constexpr int TILES = 1, SPLITS = 2; /* few 2 x 2 clusters find four free SMs */
};
/* Whether the tiles of the last wave may be halved along k. With both operands MN-major, the
 * producer of the largest tile has no register left for the extra copies. */
constexpr bool may_halve(int bm, int bn, bool mn_major) { return !mn_major || bm * bn < 128 * 256; }
/* Registers a thread of the producer and of the consumers. Three warpgroups start with 168 each. */
constexpr int producer_regs(bool ping_pong) { return ping_pong ? 40 : 56; }
constexpr int consumer_regs(bool ping_pong) { return ping_pong ? 232 : 224; }
static_assert(producer_regs(false) + 2 * consumer_regs(false) <= 3 * 168 &&
                  producer_regs(true) + 2 * consumer_regs(true) <= 3 * 168,
              "setmaxnreg.inc would wait for ever");

struct Coop128x256 : HopperTile {
    /* Uses 80 bytes of shared memory a clock and a quarter of L2's bytes of single tiles. 0.99
     * at 4096 cubed. Three stages with panels for the whole tile gave the same. Clusters of 2 x
     * 2 took twice the time: only 30 of them find four SMs side by side. */
    static constexpr int BM = 128, BN = 256, STAGES = 4, WGS = 2, PANELS = 2;
};
struct PingPong128x176 : HopperTile {
    /* Ping-pong. 512 x 4096 x 28672 runs in 4.9 waves at 0.99 (0.96 with 128 x 224). 8192 cubed:
     * 1.06 (1.03 with 128 x 256). */
    static constexpr int BM = 128, BN = 176, STAGES = 5, WGS = 2, PANELS = 2;
    static constexpr bool PING_PONG = true;
};
struct Coop128x224 : HopperTile {
    /* 512 x 28672 in 3.9 waves instead of 3.4. */
    static constexpr int BM = 128, BN = 224, STAGES = 4, WGS = 2, PANELS = 2;
};
struct Coop128x192 : HopperTile {
    /* Other wave counts than the two tiles above. */
    static constexpr int BM = 128, BN = 192, STAGES = 4, WGS = 2, PANELS = 2;
};
struct Coop128x128 : HopperTile {
    /* 512 rows of 4096: one tile an SM, 0.98. */
    static constexpr int BM = 128, BN = 128, STAGES = 6, WGS = 2, PANELS = 2;
};
struct Coop64x128 : HopperTile {
    /* 1024 cubed: one tile an SM. One block alone, pairs along n, and 128 x 64 took up to 8 %
     * more. */
    static constexpr int BM = 64, BN = 128, STAGES = 8, WGS = 1, PANELS = 2;
};
struct Coop64x192 : HopperTile {
    /* Small M, or some columns more than 128: 184 x 5600 x 2600 takes 17.2 us (18.9 with 64 x
     * 128). 64 x 256 with split-K by two was the fastest for 4 of 400 random products, by at
     * most 10 %. */
    static constexpr int BM = 64, BN = 192, STAGES = 6, WGS = 1, PANELS = 1;
};
/* Four tiles that share b, or a: for a long operand beside a narrow one, which every tile reads
 * whole. L2 is asked for the narrow operand once for every 256 rows. A tile width close to the
 * narrow operand's wastes few products. */
struct HopperFourTiles : HopperTile {
    static constexpr int TILES = 4;
};
struct Coop64x96Four : HopperFourTiles {
    /* 65 to 96 columns: 5176 x 96 x 584 from 5.6 to 4.5 us, 4752 x 72 x 2672 from 12.0 to 9.5
     * us. An N-major b is copied as 128 columns. */
    static constexpr int BM = 64, BN = 96, STAGES = 9, WGS = 1, PANELS = 2;
};
struct Coop64x160Four : HopperFourTiles {
    /* 129 to 160 columns: 6400 x 152 x 2768 from 18.9 to 14.5 us, 5968 x 136 x 1632 from 14.5 to
     * 10.3 us. Three panels, which overlap because 160 is no multiple of 64. */
    static constexpr int BM = 64, BN = 160, STAGES = 6, WGS = 1, PANELS = 3;
};
struct Coop64x224Four : HopperFourTiles {
    /* 193 to 224 columns, or twice as many: 7032 x 200 x 2776 from 26 to 19.5 us, 3752 x 416 x
     * 2920 from 22.7 to 17.4 us. */
    static constexpr int BM = 64, BN = 224, STAGES = 5, WGS = 1, PANELS = 2;
};
struct Coop64x256Four : HopperFourTiles {
    /* 225 to 256 columns, or twice as many: 5272 x 232 x 1712 from 15.6 to 13.7 us, 3688 x 440 x
     * 7920 from 68 to 56 us. */
    static constexpr int BM = 64, BN = 256, STAGES = 4, WGS = 1, PANELS = 1;
};
/* 4 x 2 tiles: those of a row share a, those of a column share b. Up to 15 such clusters run at
 * once. */
struct HopperEightTiles : HopperTile {
    static constexpr int TILES = 8, ACROSS = 2;
};
struct Coop128x128Eight : HopperEightTiles {
    /* The fastest for 22 of 218 random products, by up to 20 %: 2712 x 424 x 3096 from 22.7 to
     * 18.3 us, 5272 x 232 x 1712 from 13.7 to 11.3 us. */
    static constexpr int BM = 128, BN = 128, STAGES = 6, WGS = 2, PANELS = 2;
};
struct Coop128x96Eight : HopperEightTiles {
    /* 2464 x 552 x 4744 from 33 to 22.5 us, 5968 x 136 x 1632 from 10.4 to 9.0 us. */
    static constexpr int BM = 128, BN = 96, STAGES = 6, WGS = 2, PANELS = 2;
};
struct Coop64x64 : HopperTile {
    /* 512 cubed in 32 pairs: 2.65 us. 128 tiles of 64 x 32 took 0.4 us more. */
    static constexpr int BM = 64, BN = 64, STAGES = 12, WGS = 1, PANELS = 1;
};
struct Coop64x64Split : HopperSplitTile {
    /* The same tiles on twice the SMs, for longer k: 512 x 512 x 1024 takes 4.1 us (4.5 with
     * Coop64x64). */
    static constexpr int BM = 64, BN = 64, STAGES = 8, WGS = 1, PANELS = 1;
};
/* Four blocks that split k. Clusters of eight find too few free SMs side by side. */
struct HopperSplitBy4Tile : HopperTile {
    static constexpr int TILES = 1, SPLITS = 4;
};
struct Coop128x128By4 : HopperSplitBy4Tile {
    /* Few tiles of long k: 712 x 248 x 5784 takes 13.4 us (17.3 with split-K by two). */
    static constexpr int BM = 128, BN = 128, STAGES = 5, WGS = 2, PANELS = 1;
};
struct Coop64x128By4 : HopperSplitBy4Tile {
    /* The same for small M: the fastest for 33 of 400 random products. 168 x 368 x 4520 takes
     * 7.2 us (9.1 with split-K by two). */
    static constexpr int BM = 64, BN = 128, STAGES = 7, WGS = 1, PANELS = 1;
};
struct Narrow64x64 : HopperSplitTile {
    /* Small N, where reading a bounds the time: 4096 x 64 x 4096 takes 9.3 to 9.8 us (gemm_sm80:
     * up to 32). Tiles of 32 columns gained 0.2 us for N <= 32. A stage has 128 of k, as in
     * SwapAB64x32. */
    static constexpr int BM = 64, BN = 64, STAGES = 6, WGS = 1, PANELS = 1, K64 = 2;
    static constexpr bool NARROW = true;
};
struct SwapAB64x16 : HopperSplitTile {
    /* Small M. A stage has 256 of k, because each step costs a warpgroup some 0.2 us: 16 rows
     * take 11.5, 11.1 and 10.9 us with 64, 128 and 256. Split-K by two lets 4096 weights keep
     * 128 SMs busy; without it 14.0 us. */
    static constexpr int BM = 64, BN = 16, STAGES = 4, WGS = 1, PANELS = 1, K64 = 4;
    static constexpr bool SWAP_AB = true;
};
struct SwapAB64x32 : HopperSplitTile {
    /* 64 rows take 11.9 us with stages of 64 of k, and 11.65 with 128 and 256. Three stages of
     * 256 are slower for 28672 weights. */
    static constexpr int BM = 64, BN = 32, STAGES = 7, WGS = 1, PANELS = 1, K64 = 2;
    static constexpr bool SWAP_AB = true;
};
struct SwapAB64x64 : HopperSplitTile {
    /* As above. */
    static constexpr int BM = 64, BN = 64, STAGES = 6, WGS = 1, PANELS = 1, K64 = 2;
    static constexpr bool SWAP_AB = true;
};
struct SwapAB64x96Four : HopperFourTiles {
    /* M of 65 to 96, for which tiles of 64 rows waste up to half: 72 x 7280 x 2328 from 17.2 to
     * 11.4 us. */
    static constexpr int BM = 64, BN = 96, STAGES = 8, WGS = 1, PANELS = 1;
    static constexpr bool SWAP_AB = true;
};
struct SwapAB64x160Four : HopperFourTiles {
    /* M of 129 to 160: 152 x 7184 x 4528 from 37.5 to 30.8 us. */
    static constexpr int BM = 64, BN = 160, STAGES = 5, WGS = 1, PANELS = 1;
    static constexpr bool SWAP_AB = true;
};
struct Tf32_128x256 : HopperTile {
    /* tf32: a stage holds 32 of k. Half of bf16's FLOP a clock, so copies and results hide
     * better. 1.01 at 4096 cubed. */
    static constexpr int BM = 128, BN = 256, STAGES = 4, WGS = 2, PANELS = 2;
};
struct Tf32_128x192 : HopperTile {
    /* 4096 x 768 x 4096 in one wave: 1.32. 8192 cubed: 1.01. */
    static constexpr int BM = 128, BN = 192, STAGES = 4, WGS = 2, PANELS = 3;
};
struct Tf32_128x128 : HopperTile {
    /* 512 x 4096 x 4096: one tile an SM, 1.02. */
    static constexpr int BM = 128, BN = 128, STAGES = 6, WGS = 2, PANELS = 2;
};
struct Tf32_64x128 : HopperTile {
    /* 1024 cubed: one tile an SM, 1.15. */
    static constexpr int BM = 64, BN = 128, STAGES = 8, WGS = 1, PANELS = 2;
};
struct Tf32_64x64Split : HopperSplitTile {
    /* 512 cubed: 1.11 (0.88 with 64 x 128). */
    static constexpr int BM = 64, BN = 64, STAGES = 8, WGS = 1, PANELS = 1;
};
struct Tf32_128x128Split : HopperSplitTile {
    /* 512 x 2048 x 4096: 1.21 (1.04 with 64 x 128). 64 x 128 with split-K by two, and 64 x 256,
     * were never the fastest. */
    static constexpr int BM = 128, BN = 128, STAGES = 5, WGS = 2, PANELS = 1;
};
struct Tf32SwapAB256x128 : HopperTile {
    /* Swap-AB. A warpgroup takes 128 columns of the result, because one 16-byte load brings
     * fragments of two products. Pairs share b. 0.97 to 0.99 at 4096 cubed. Pairs that share a
     * reached 0.96, three stages with more panels 0.82. */
    static constexpr int BM = 256, BN = 128, STAGES = 4, WGS = 2, PANELS = 2;
    static constexpr bool SWAP_AB = true;
};
struct Tf32SwapAB128x128 : HopperTile {
    /* One warpgroup. 512 x 4096 x 4096: 0.92 to 0.94 (0.81 with split-K by two; 0.83 with two
     * warpgroups of 256 x 64). */
    static constexpr int BM = 128, BN = 128, STAGES = 6, WGS = 1, PANELS = 2;
    static constexpr bool SWAP_AB = true;
};
struct Tf32SwapAB128x128Split : HopperSplitTile {
    /* 1024 cubed: 1.07 (0.96 with 128 x 64 and no split of k). */
    static constexpr int BM = 128, BN = 128, STAGES = 5, WGS = 1, PANELS = 1;
    static constexpr bool SWAP_AB = true;
};
struct Tf32SwapAB128x64Split : HopperSplitTile {
    /* 512 cubed: 1.12. 128 x 4096 x 4096: 1.02. */
    static constexpr int BM = 128, BN = 64, STAGES = 7, WGS = 1, PANELS = 1;
    static constexpr bool SWAP_AB = true;
};
/* Percent of the dense peak that a kernel's products alone reach; the planner's weights.
 * Retuning one changes no kernel's name. */
template <class Tile> constexpr int PERCENT = 0;
template <> constexpr int PERCENT<Coop128x256> = 85;
template <> constexpr int PERCENT<PingPong128x176> = 74;
template <> constexpr int PERCENT<Coop128x224> = 86;
template <> constexpr int PERCENT<Coop128x192> = 88;
template <> constexpr int PERCENT<Coop128x128> = 78;
template <> constexpr int PERCENT<Coop64x128> = 57;
template <> constexpr int PERCENT<Coop64x96Four> = 52;
template <> constexpr int PERCENT<Coop64x160Four> = 77;
template <> constexpr int PERCENT<Coop64x224Four> = 75;
template <> constexpr int PERCENT<Coop64x256Four> = 76;
template <> constexpr int PERCENT<Coop128x128Eight> = 85;
template <> constexpr int PERCENT<Coop128x96Eight> = 76;
template <> constexpr int PERCENT<Coop64x64> = 53;
template <> constexpr int PERCENT<Coop64x64Split> = 36;
template <> constexpr int PERCENT<Coop64x192> = 69;
template <> constexpr int PERCENT<Coop128x128By4> = 78;
template <> constexpr int PERCENT<Coop64x128By4> = 50;
template <> constexpr int PERCENT<Narrow64x64> = 31;
template <> constexpr int PERCENT<SwapAB64x16> = 31;
template <> constexpr int PERCENT<SwapAB64x32> = 31;
template <> constexpr int PERCENT<SwapAB64x64> = 31;
template <> constexpr int PERCENT<SwapAB64x96Four> = 49;
template <> constexpr int PERCENT<SwapAB64x160Four> = 58;
template <> constexpr int PERCENT<Tf32_128x256> = 77;
template <> constexpr int PERCENT<Tf32_128x192> = 74;
template <> constexpr int PERCENT<Tf32_128x128> = 70;
template <> constexpr int PERCENT<Tf32_64x128> = 45;
template <> constexpr int PERCENT<Tf32_64x64Split> = 31;
template <> constexpr int PERCENT<Tf32_128x128Split> = 64;
template <> constexpr int PERCENT<Tf32SwapAB256x128> = 62;
template <> constexpr int PERCENT<Tf32SwapAB128x128> = 65;
template <> constexpr int PERCENT<Tf32SwapAB128x128Split> = 68;
template <> constexpr int PERCENT<Tf32SwapAB128x64Split> = 40;

/* Rows of a whose tiles are scheduled together. With 128 x 256 tiles, a wave reads about as many
 * columns of b. */
constexpr int GROUP_HEIGHT_SM90 = 2048;
/* Up to SM90_SWAPAB_ROWS rows of a, the weights are streamed past the tokens with swap-AB; up to
 * as many columns of b, narrow tiles stream a. Calls with k below SM90_SWAPAB_K use ordinary
 * tiles, since one of two splits of k would have nothing to do. */
constexpr int SM90_SWAPAB_ROWS = 64, SM90_SWAPAB_K = 512;
/* Largest result M x N for which swap-AB is considered beyond small M. It saves 2.4 % of random
 * products' time (geometric mean); a limit of 320 rows saved 1.1 %. */
constexpr int64_t SM90_SWAPPED_RESULTS = 8 << 20;
/* Largest ring in bytes: 227 KiB less the panels and split-K's exchange buffers. */
constexpr int MOST_RING = 4 * 48 * 1024;
/* Largest results of small M, in bytes, that are kept in L2 (a sixth of L2) until they are read.
 * Writing them back amid the stream of weights cost 5 of 62 us at 64 x 28672 x 4096. */
constexpr int64_t KEEP_BYTES = 8 << 20;
/* A call that needs at least a quarter of the SMs gets a block on every SM. The blocks that
 * start last have no tile, so the next kernel does not wait for them: 512 cubed from 3.27 to
 * 3.14 us, 1024 cubed from 6.0 to 5.9 us. */
constexpr int LEAST_IDLE = 4;
/* Time of a swap-AB product of small M: a constant, and its bytes. 10.9 us for 16 x 4096 x 4096. */
constexpr double SWAPAB_US = 1.5, SWAPAB_BYTES_PER_US = 4.0e6;
/* Time that nothing hides, in us: of a launch, of its last results, of a tile, and of a tile's
 * results; the latter two scale with the tile's size relative to 128 x 256.
 *
 * These, the next constants and the percentages above are fitted to measured times on one H100:
 * all instances on some 1200 random products (benchmarks/gemm_instances.py), and on 140 squares,
 * products of models and slow cases. The instance they choose takes 2.1 % more than the best one
 * on random products, and 0.2 to 0.8 % more on squares and models. */
constexpr double LAUNCH_US = 1.74, LAST_US = 0.07, TILE_US = 0.01, STORE_US = 1.93;
/* Bytes per us that all SMs read from L2, and that one SM receives. */
constexpr double L2_BYTES_PER_US = 9.3e6, SM_BYTES_PER_US = 0.215e6;
/* Cost of adding the sums of split-K by two and by four, for 128 x 256 results. Cost of halved
 * tiles beside their halves: a constant, and the sum for 128 x 256 results. */
constexpr double EXCHANGE_US = 2.6, EXCHANGE4_US = 2.73, HALVES_US = 1.7, HALVES_SUM_US = 2.1;
/* gemm_sm80's estimate is too low by SM80_US for calls of some 10 us. tf32 calls shorter than
 * FEW_TILES_US are compared with it. */
constexpr double SM80_US = 1.0, FEW_TILES_US = 40;
/* Ping-pong: a tile of fewer products than PING_PONG_US waits until the tile before is stored.
 * The last tile of a block has one warpgroup only, which costs ALONE_US. */
constexpr double PING_PONG_US = 8.0, ALONE_US = 2.6;
/* An activation of many instructions, for 128 x 256 results an SM: 25 us for the four waves of
 * 4096 cubed. */
constexpr double CURVE_US = 6.0;

/* ---- gemm_realign_sm90a ---------------------------------------------------------------------- */
/* With 32 registers an SM holds 2048 threads, which keep 32 KB of loads in flight. */
constexpr int REALIGN_THREADS = 256, REALIGN_PER_SM = 8;
/* Transposed tiles of 32-bit elements: 64 rows of 256 bytes are read and 64 written. 16 KiB of
 * shared memory, 16 loads in flight a thread. */
constexpr int REALIGN_TRANSPOSE = 64;
/* The planner's estimate of a copy: a launch that overlaps its neighbours, bytes per us read and
 * written, and the slower rate for bytes after the first 16 MB. Fitted to one and two operands
 * of 512, 1024, 1536, 2048 and 4096 squared on one H200. */
constexpr double REALIGN_US = 0.9, REALIGN_BYTES_PER_US = 9.0e6, REALIGN_FAST_BYTES = 16e6,
                 REALIGN_MANY_PER_US = 8.0e6;
/* An N-major b of at most this many columns is copied to K-major. TMA would ask L2 for every row
 * of 16 bytes by itself, and all blocks for the same ones: 4096 x 8 x 4096 takes 19.8 us in
 * place, 15.7 with the copy, and 13.4 if b is already K-major. */
constexpr int64_t REALIGN_ROW = 8;
/* Largest copy of the weights for small M, in bytes. Weights without a dimension of stride 1 are
 * copied at 128 MB in 0.1 ms. */
constexpr int64_t REALIGN_FEW_BYTES = 128 << 20;

/* ---- gemm_plain ------------------------------------------------------------------------------ */
/* Tiles of BM x BN x BK, a ring of STAGES, WARPS_M x WARPS_N warps, PER_SM blocks an SM. */
struct PlainF32 {
    /* 8 x 16 sums a thread: 128 multiply-adds for six 16-byte loads. 4096 cubed NN: 0.90 of
     * cuBLAS, NT: 0.86. 8 x 8 sums with two blocks an SM reached 0.88 and 0.81, 16 x 8 sums
     * 0.85. BK of 8 and 32 takes 3 to 6 % more; four stages take equally long. */
    static constexpr int BM = 128, BN = 256, BK = 16, STAGES = 3, WARPS_M = 4, WARPS_N = 2,
                         PER_SM = 1, PERCENT = 69;
    static constexpr bool TWO_SUMS = false;
};
struct PlainF32Middle {
    /* For other wave counts, and for misaligned rows, whose waits two blocks an SM hide. 3072 x
     * 3072 x 1024 takes 524 us (615 with the large tile, 561 with the small one). 4095 x 4097 x
     * 4099 takes 3220 us (3720 and 3360). BK of 16 is slower if rows lie along k. */
    static constexpr int BM = 128, BN = 128, BK = 8, STAGES = 4, WARPS_M = 4, WARPS_N = 2,
                         PER_SM = 2, PERCENT = 69;
    static constexpr bool TWO_SUMS = false;
};
struct PlainF32Small {
    /* If there are fewer middle tiles than SMs. Each step's sums are added to a total, which
     * quarters the error. */
    static constexpr int BM = 64, BN = 64, BK = 16, STAGES = 3, WARPS_M = 2, WARPS_N = 1,
                         PER_SM = 4, PERCENT = 59;
    static constexpr bool TWO_SUMS = true;
};
struct PlainF64 {
    /* 4 x 4 doubles a thread take as many registers as 8 x 8 floats. */
    static constexpr int BM = 64, BN = 64, BK = 16, STAGES = 3, WARPS_M = 4, WARPS_N = 2,
                         PER_SM = 2;
    static constexpr bool TWO_SUMS = false;
};
/* PERCENT is of the peak of multiply-adds on full SMs. PLAIN_UNALIGNED_PERCENT replaces it for
 * the large tile with misaligned rows. PLAIN_ALONE_PERCENT: time of an SM's last few tiles,
 * relative to as many as it runs at once. PLAIN_ROUND_US: what nothing hides of such a round.
 * Fitted to the three tiles' times on 36 shapes on one H200: the chosen tile takes 1.5 % more
 * than the best. */
constexpr int PLAIN_UNALIGNED_PERCENT = 57, PLAIN_ALONE_PERCENT = 63;
constexpr double PLAIN_ROUND_US = 5;
/* Smallest split of k, in steps of BK. Shorter ones spend their time in the first loads. */
constexpr int PLAIN_SPLIT_STEPS = 8;

/* ---- gemm_skinny: at most SKINNY_ROWS weights a tile; SKINNY_WARPS warps split k
 * ----------------- */
/* 28672 weights are four tiles of 56 on each of 128 SMs, 4096 are one of 32. 8 warps keep more
 * copies in flight than registers could hold. */
constexpr int SKINNY_ROWS = 64, SKINNY_WARPS = 8;
/* Largest M. At 64 tokens gemm_sm80, whose warps share tokens, takes 15.3 us, where this kernel
 * took 20.8. */
constexpr int SKINNY_MAX_TOKENS = 16;
/* 100 KB in flight on every SM hide memory's latency at 4.2 TB/s. More than 8 stages hide
 * nothing more. */
constexpr int stages_in(int bytes, int stage_bytes, int most) {
    return bytes / stage_bytes < most ? bytes / stage_bytes : most;
}
constexpr int skinny_stages(int stage_bytes, int other_bytes) {
    return stages_in(200 * 1024 - other_bytes, stage_bytes, 8);
}
/* With fewer misaligned weights than this, gemm_sm80 is used, which splits k over all SMs. 1024
 * weights of 4096 take equally long with both: here 32 SMs have a tile of 32. */
constexpr int SKINNY_MISALIGNED_LEAST = 1024;

#endif
