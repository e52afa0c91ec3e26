/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: every tuned number of the gemm kernels, with its reason. */
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

/* 8 warps of 64 x 64, the most an mma.sync warp can reuse from registers: least shared and L2
 * traffic a FLOP */
typedef SmTile<256, 128, 64, 3, 64, 64, 1> Tile16_256x128;
/* two blocks an SM: one computes while the other stores or waits at its barrier; better waves at
 * 1024 to 2048 */
typedef SmTile<128, 128, 64, 3, 64, 64, 2> Tile16_128x128;
/* one tile an SM at 1024 cubed, and 17 to 64 rows; 8 warps of 32 x 32 were 15% slower */
typedef SmTile<64, 128, 64, 4, 32, 64, 2> Tile16_64x128;
/* least work a tile: 512 cubed, or split along k for 17 to 64 rows */
typedef SmTile<64, 64, 64, 5, 32, 32, 4> Tile16_64x64;
/* plain loads keep two operands' chunks in registers: half the sums a thread of the others */
typedef SmTile<128, 128, 32, 3, 64, 32, 1> Tile16_any;
/* tf32: 4 bytes an element, so that BK 32 is a 128-byte row */
typedef SmTile<128, 128, 32, 3, 64, 64, 2> Tile32_128x128;
/* tf32, few tiles */
typedef SmTile<64, 64, 32, 5, 32, 32, 4> Tile32_64x64;

/* what a row reaches of the dense peak on full SMs, in percent: the chooser's weights, from 4096
 * cubed on one H200 */
enum {
    PERCENT_256x128 = 37,    /* 395 TFLOP/s */
    PERCENT_128x128 = 36,    /* 378 */
    PERCENT_64x128 = 28,     /* 305 */
    PERCENT_64x64 = 23,      /* 250 */
    PERCENT_ANY = 10,        /* 104 */
    PERCENT_TF32 = 33,       /* 175 of half the peak */
    PERCENT_TF32_64x64 = 20, /* 107 */
    PERCENT_PLAIN = 8, /* 42 of half the peak: tf32 that no tensor core row but Hopper's takes */
    PERCENT_ALONE =
        115 /* time of blocks that do not fill their SM: nothing hides their waits; 1024 cubed */
};

/* rows of tiles walked together: 8 x 128 rows of a and as many columns of b are under way in a wave
 * of 132 */
constexpr int GROUP_ROWS = 8;
/* parts that k may be cut into: past that the sum of partials costs more than the waves it fills */
constexpr int MAX_SPLITS = 32;
/* cost of the second pass of a split: its launch in us, and the bytes a us its partials move at
 * through L2 */
constexpr double REDUCE_US = 2.5, REDUCE_BYTES_PER_US = 3e6;
/* a block's start and end, in us: prologue latency and stores */
constexpr double BLOCK_US = 1.5;

/* ---- Hopper's gemm: BM x BN x 64 K64 elements of 16 bits (32 K64 of tf32) through a ring of
 * STAGES ---- */
/* WGS consumer warpgroups of BM / WGS rows, or with ping-pong of whole tiles; PANELS of 16 rows x
 * 128 bytes a warp, through which results leave. What a tile does not say: */
struct HopperTile {
    static constexpr int TILES = 2; /* of a cluster, one a block; they share what both read */
    /* so many of them in a row of tiles; 0: all or one, as suits the call */
    static constexpr int ACROSS = 0;
    static constexpr int SPLITS = 1; /* of k, added across the cluster by DSMEM */
    static constexpr int K64 = 1;
    static constexpr bool SWAP_AB = false; /* the product is computed as out^T = b^T a^T */
    /* a warpgroup stores its tile while the other multiplies */
    static constexpr bool PING_PONG = false;
    static constexpr bool NARROW = false; /* for few columns alone */
};
/* two blocks that split k */
struct HopperSplitTile : HopperTile {
    static constexpr int TILES = 1, SPLITS = 2; /* 2 x 2 blocks are no cluster that finds its SMs */
};
/* whether the last wave's tiles may be halved along k: the producer of the largest one has no
 * register left for its copies where both operands are MN-major */
constexpr bool may_halve(int bm, int bn, bool mn_major) { return !mn_major || bm * bn < 128 * 256; }
/* registers of a producer's thread and of a consumer's: three warpgroups start with 168 a thread */
constexpr int producer_regs(bool ping_pong) { return ping_pong ? 40 : 56; }
constexpr int consumer_regs(bool ping_pong) { return ping_pong ? 232 : 224; }
static_assert(producer_regs(false) + 2 * consumer_regs(false) <= 3 * 168 &&
                  producer_regs(true) + 2 * consumer_regs(true) <= 3 * 168,
              "setmaxnreg.inc would wait for ever");

struct Coop128x256 : HopperTile {
    /* 80 bytes of shared memory a clock, a quarter of L2's bytes of single tiles; 4096: 0.99 of
     * cuBLAS. Three stages and panels for the whole tile gave the same, clusters of 2 x 2 twice the
     * time: only 30 of them find four SMs side by side */
    static constexpr int BM = 128, BN = 256, STAGES = 4, WGS = 2, PANELS = 2;
};
struct PingPong128x176 : HopperTile {
    /* ping-pong: 512 x 4096 x 28672 in 4.9 waves 0.99 of cuBLAS, 0.96 by 128 x 224; 8192 cubed
     * 1.06, 1.03 by 128 x 256 */
    static constexpr int BM = 128, BN = 176, STAGES = 5, WGS = 2, PANELS = 2;
    static constexpr bool PING_PONG = true;
};
struct Coop128x224 : HopperTile {
    /* 512 x 28672 in 3.9 waves instead of 3.4 */
    static constexpr int BM = 128, BN = 224, STAGES = 4, WGS = 2, PANELS = 2;
};
struct Coop128x192 : HopperTile {
    /* other waves than the two above */
    static constexpr int BM = 128, BN = 192, STAGES = 4, WGS = 2, PANELS = 2;
};
struct Coop128x128 : HopperTile {
    /* 512 rows of 4096: one tile an SM, 0.98 */
    static constexpr int BM = 128, BN = 128, STAGES = 6, WGS = 2, PANELS = 2;
};
struct Coop64x128 : HopperTile {
    /* 1024 cubed: one tile an SM; one block alone, pairs along n and 128 x 64 took up to 8 %
     * more */
    static constexpr int BM = 64, BN = 128, STAGES = 8, WGS = 1, PANELS = 2;
};
struct Coop64x192 : HopperTile {
    /* little M, or some columns past 128: 184 x 5600 x 2600 17.2 us, 18.9 by 64 x 128. 64 x 256
     * with split-K by two was the fastest of 4 of 400 random products, by 10 % at most */
    static constexpr int BM = 64, BN = 192, STAGES = 6, WGS = 1, PANELS = 1;
};
/* four tiles that share b, or a: for a long operand beside a narrow one, all of which every tile
 * reads. L2 is asked for the narrow one once in 256 rows; widths that fit waste few products */
struct HopperFourTiles : HopperTile {
    static constexpr int TILES = 4;
};
struct Coop64x96Four : HopperFourTiles {
    /* 65 to 96 columns: 5176 x 96 x 584 5.6 to 4.5 us, 4752 x 72 x 2672 12.0 to 9.5; b along n is
     * copied as 128 columns */
    static constexpr int BM = 64, BN = 96, STAGES = 9, WGS = 1, PANELS = 2;
};
struct Coop64x160Four : HopperFourTiles {
    /* 129 to 160 columns: 6400 x 152 x 2768 18.9 to 14.5 us, 5968 x 136 x 1632 14.5 to 10.3; whole
     * panels overlap, so three of them */
    static constexpr int BM = 64, BN = 160, STAGES = 6, WGS = 1, PANELS = 3;
};
struct Coop64x224Four : HopperFourTiles {
    /* 193 to 224 columns, or twice as many: 7032 x 200 x 2776 26 to 19.5 us, 3752 x 416 x 2920 22.7
     * to 17.4 */
    static constexpr int BM = 64, BN = 224, STAGES = 5, WGS = 1, PANELS = 2;
};
struct Coop64x256Four : HopperFourTiles {
    /* 225 to 256 columns, or twice as many: 5272 x 232 x 1712 15.6 to 13.7 us, 3688 x 440 x 7920 68
     * to 56 */
    static constexpr int BM = 64, BN = 256, STAGES = 4, WGS = 1, PANELS = 1;
};
/* 4 x 2 tiles: those of a row share a, those of a column b. Up to 15 such clusters find their SMs
 * at once */
struct HopperEightTiles : HopperTile {
    static constexpr int TILES = 8, ACROSS = 2;
};
struct Coop128x128Eight : HopperEightTiles {
    /* the fastest of 22 of 218 random products, by up to 20 %: 2712 x 424 x 3096 22.7 to 18.3 us,
     * 5272 x 232 x 1712 13.7 to 11.3 */
    static constexpr int BM = 128, BN = 128, STAGES = 6, WGS = 2, PANELS = 2;
};
struct Coop128x96Eight : HopperEightTiles {
    /* 2464 x 552 x 4744 33 to 22.5 us, 5968 x 136 x 1632 10.4 to 9.0 */
    static constexpr int BM = 128, BN = 96, STAGES = 6, WGS = 2, PANELS = 2;
};
struct Coop64x64 : HopperTile {
    /* 512 cubed in 32 pairs: 2.65 us; 128 tiles of 64 x 32 took 0.4 more */
    static constexpr int BM = 64, BN = 64, STAGES = 12, WGS = 1, PANELS = 1;
};
struct Coop64x64Split : HopperSplitTile {
    /* the same tiles on twice the SMs, for longer k: 512 x 512 x 1024 4.1 us, 4.5 by the row
     * above */
    static constexpr int BM = 64, BN = 64, STAGES = 8, WGS = 1, PANELS = 1;
};
/* four blocks that split k: twice as many find no SMs side by side */
struct HopperSplitBy4Tile : HopperTile {
    static constexpr int TILES = 1, SPLITS = 4;
};
struct Coop128x128By4 : HopperSplitBy4Tile {
    /* a few tiles of long k: 712 x 248 x 5784 13.4 us, 17.3 with split-K by two */
    static constexpr int BM = 128, BN = 128, STAGES = 5, WGS = 2, PANELS = 1;
};
struct Coop64x128By4 : HopperSplitBy4Tile {
    /* likewise: the fastest of 33 of 400 random products; 168 x 368 x 4520 7.2 us, 9.1 with split-K
     * by two */
    static constexpr int BM = 64, BN = 128, STAGES = 7, WGS = 1, PANELS = 1;
};
struct Narrow64x64 : HopperSplitTile {
    /* few columns, whose product reads a at memory's speed: 4096 x 64 x 4096 9.3 to 9.8 us, of
     * gemm_sm80 up to 32; tiles of 32 columns gained 0.2 us at 32 and fewer. 128 of k a stage as
     * below */
    static constexpr int BM = 64, BN = 64, STAGES = 6, WGS = 1, PANELS = 1, K64 = 2;
    static constexpr bool NARROW = true;
};
struct SwapAB64x16 : HopperSplitTile {
    /* small M, by weights: stages of 256 of k, since every step of a warpgroup costs some 0.2 us:
     * at 16 rows 11.5, 11.1 and 10.9 us with 64, 128 and 256; split-K by two, so that 4096 weights
     * keep 128 SMs busy: 14.0 us without */
    static constexpr int BM = 64, BN = 16, STAGES = 4, WGS = 1, PANELS = 1, K64 = 4;
    static constexpr bool SWAP_AB = true;
};
struct SwapAB64x32 : HopperSplitTile {
    /* 128 of k a stage: 64 rows 11.9 us with 64, 11.65 with 128 and 256; three large stages lose at
     * 28672 weights */
    static constexpr int BM = 64, BN = 32, STAGES = 7, WGS = 1, PANELS = 1, K64 = 2;
    static constexpr bool SWAP_AB = true;
};
struct SwapAB64x64 : HopperSplitTile {
    /* likewise */
    static constexpr int BM = 64, BN = 64, STAGES = 6, WGS = 1, PANELS = 1, K64 = 2;
    static constexpr bool SWAP_AB = true;
};
struct SwapAB64x96Four : HopperFourTiles {
    /* M of 65 to 96, of which tiles of 64 rows waste up to half: 72 x 7280 x 2328 17.2 to 11.4
     * us */
    static constexpr int BM = 64, BN = 96, STAGES = 8, WGS = 1, PANELS = 1;
    static constexpr bool SWAP_AB = true;
};
struct SwapAB64x160Four : HopperFourTiles {
    /* likewise of 129 to 160: 152 x 7184 x 4528 37.5 to 30.8 us */
    static constexpr int BM = 64, BN = 160, STAGES = 5, WGS = 1, PANELS = 1;
    static constexpr bool SWAP_AB = true;
};
struct Tf32_128x256 : HopperTile {
    /* tf32: a stage's rows hold 32 of k; half of bf16's FLOP a clock, so that copies and results
     * hide better. 4096: 1.01 of cuBLAS */
    static constexpr int BM = 128, BN = 256, STAGES = 4, WGS = 2, PANELS = 2;
};
struct Tf32_128x192 : HopperTile {
    /* 4096 x 768 x 4096 in one wave, 1.32; 8192 cubed 1.01 */
    static constexpr int BM = 128, BN = 192, STAGES = 4, WGS = 2, PANELS = 3;
};
struct Tf32_128x128 : HopperTile {
    /* 512 x 4096 x 4096: one tile an SM, 1.02 */
    static constexpr int BM = 128, BN = 128, STAGES = 6, WGS = 2, PANELS = 2;
};
struct Tf32_64x128 : HopperTile {
    /* 1024 cubed: one tile an SM, 1.15 */
    static constexpr int BM = 64, BN = 128, STAGES = 8, WGS = 1, PANELS = 2;
};
struct Tf32_64x64Split : HopperSplitTile {
    /* 512 cubed 1.11, 0.88 by 64 x 128 */
    static constexpr int BM = 64, BN = 64, STAGES = 8, WGS = 1, PANELS = 1;
};
struct Tf32_128x128Split : HopperSplitTile {
    /* 512 x 2048 x 4096 1.21, 1.04 by 64 x 128; 64 x 128 with split-K by two, and 64 x 256, were
     * never the fastest */
    static constexpr int BM = 128, BN = 128, STAGES = 5, WGS = 2, PANELS = 1;
};
struct Tf32SwapAB256x128 : HopperTile {
    /* swap-AB: 128 columns of the result a warpgroup, since a load of 16 bytes brings two products'
     * fragments; pairs share b. 4096: 0.97 to 0.99 of cuBLAS; pairs that share a 0.96, three stages
     * and more panels 0.82 */
    static constexpr int BM = 256, BN = 128, STAGES = 4, WGS = 2, PANELS = 2;
    static constexpr bool SWAP_AB = true;
};
struct Tf32SwapAB128x128 : HopperTile {
    /* 512 x 4096 x 4096 0.92 to 0.94, 0.81 with split-K by two; one warpgroup alone, 256 x 64 with
     * two 0.83 */
    static constexpr int BM = 128, BN = 128, STAGES = 6, WGS = 1, PANELS = 2;
    static constexpr bool SWAP_AB = true;
};
struct Tf32SwapAB128x128Split : HopperSplitTile {
    /* 1024 cubed 1.07, 0.96 by 128 x 64 without splits of k */
    static constexpr int BM = 128, BN = 128, STAGES = 5, WGS = 1, PANELS = 1;
    static constexpr bool SWAP_AB = true;
};
struct Tf32SwapAB128x64Split : HopperSplitTile {
    /* 512 cubed 1.12, 128 x 4096 x 4096 1.02 */
    static constexpr int BM = 128, BN = 64, STAGES = 7, WGS = 1, PANELS = 1;
    static constexpr bool SWAP_AB = true;
};
/* what a kernel's products alone reach of the dense peak, in percent: the chooser's weights.
 * Retuning one changes no kernel's name */
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

/* rows of a whose tiles are walked together: with 128 x 256 tiles as many columns of b are under
 * way */
constexpr int GROUP_HEIGHT_SM90 = 2048;
/* up to as many rows the weights stream past the tokens, swap-AB; as few columns, rows past them;
 * of shorter k, which gives one of two parts nothing to do, tiles */
constexpr int SM90_SWAPAB_ROWS = 64, SM90_SWAPAB_K = 512;
/* rows of results up to so many may be WGMMA's columns: 2.4 % of random products' time (geomean);
 * 1.1 % for up to 320 rows alone */
constexpr int64_t SM90_SWAPPED_RESULTS = 8 << 20;
/* bytes of the ring at most: 227 KiB less the panels and what split-K exchanges */
constexpr int MOST_RING = 4 * 48 * 1024;
/* results of small M up to so many bytes, a sixth of L2, should stay there until they are read:
 * written back amid the weights they cost 5 of 62 us at 64 x 28672 x 4096 */
constexpr int64_t KEEP_BYTES = 8 << 20;
/* from a quarter of the GPU's SMs on all get a block: those that begin last have no tile, and the
 * next kernel waits for none of them: 512 cubed 3.27 to 3.14 us, 1024 6.0 to 5.9 */
constexpr int LEAST_IDLE = 4;
/* what a swap-AB product takes beside its bytes: 10.9 us for 16 x 4096 x 4096 */
constexpr double SWAPAB_US = 1.5, SWAPAB_BYTES_PER_US = 4.0e6;
/* what nothing hides: of a launch and its last results, of a tile and its results; results by 128 x
 * 256 of them. These, the next ones and the percents above are fitted to the times of all rows of
 * some 1200 random products (benchmarks/gemm_instances.py) and of 140 squares, products of models
 * and weak ones, on one H100. The row they choose takes 2.1 % more than the best one, and 0.2 to
 * 0.8 % on squares and models */
constexpr double LAUNCH_US = 1.74, LAST_US = 0.07, TILE_US = 0.01, STORE_US = 1.93;
/* bytes a us that all SMs read out of L2, and that one of them takes */
constexpr double L2_BYTES_PER_US = 9.3e6, SM_BYTES_PER_US = 0.215e6;
/* what the sum of split-K by two and by four costs, by 128 x 256; and what halved tiles take beside
 * their halves, with and without */
constexpr double EXCHANGE_US = 2.6, EXCHANGE4_US = 2.73, HALVES_US = 1.7, HALVES_SUM_US = 2.1;
/* gemm_sm80's estimate is so much too low where it takes some 10 us; calls of tf32 that may be
 * shorter by it */
constexpr double SM80_US = 1.0, FEW_TILES_US = 40;
/* ping-pong: a tile of shorter products waits for the results of the one before; the last one has
 * one warpgroup alone */
constexpr double PING_PONG_US = 8.0, ALONE_US = 2.6;
/* an activation of many instructions, on 128 x 256 results: 25 us of four waves at 4096 cubed */
constexpr double CURVE_US = 6.0;

/* ---- gemm_realign_sm90a ---------------------------------------------------------------------- */
/* 32 registers: 2048 threads of an SM keep 32 KB of its loads under way */
constexpr int REALIGN_THREADS = 256, REALIGN_PER_SM = 8;
/* transposed tiles of 32 bits: 64 rows of 256 bytes are read and 64 written; 16 KiB of shared
 * memory, 16 loads a thread under way */
constexpr int REALIGN_TRANSPOSE = 64;
/* expected, the chooser's weights: a launch that overlaps its neighbours, and bytes a us that are
 * read and written; what those past the first 16 MB take more. Fitted to one and two operands of
 * 512, 1024, 1536, 2048 and
 * 4096 squared on one H200 */
constexpr double REALIGN_US = 0.9, REALIGN_BYTES_PER_US = 9.0e6, REALIGN_FAST_BYTES = 16e6,
                 REALIGN_MANY_PER_US = 8.0e6;
/* an MN-major b of as many columns, or fewer, is copied to K-major: TMA asks L2 for each row of 16
 * bytes by itself, all blocks for the same ones; 4096 x 8 x 4096 19.8 us, 15.7 with the copy, 13.4
 * where b is K-major */
constexpr int64_t REALIGN_ROW = 8;
/* the largest copy that a small M asks memory for: of weights that are dense nowhere, 128 MB of
 * whose elements take 0.1 ms */
constexpr int64_t REALIGN_FEW_BYTES = 128 << 20;

/* ---- gemm_plain: BM x BN x BK through a ring of STAGES, WARPS_M x WARPS_N warps, PER_SM blocks an
 * SM ---- */
struct PlainF32 {
    /* 8 x 16 sums a thread: 128 multiply-adds for six 16-byte loads; 4096 cubed NN 0.90 of cuBLAS,
     * NT 0.86; by 8 x 8, two blocks an SM, 0.88 and 0.81, by 16 x 8 0.85. Steps of 8 and 32 take 3
     * to 6 % more, four stages as long */
    static constexpr int BM = 128, BN = 256, BK = 16, STAGES = 3, WARPS_M = 4, WARPS_N = 2,
                         PER_SM = 1, PERCENT = 69;
    static constexpr bool TWO_SUMS = false;
};
struct PlainF32Middle {
    /* other waves, and misaligned rows, whose waits two blocks an SM hide: 3072 x 3072 x 1024 in
     * 524 us, 615 by the large tile, 561 by the small one; 4095 x 4097 x 4099 in 3220 us, 3720 and
     * 3360. Steps of 16 take longer along k */
    static constexpr int BM = 128, BN = 128, BK = 8, STAGES = 4, WARPS_M = 4, WARPS_N = 2,
                         PER_SM = 2, PERCENT = 69;
    static constexpr bool TWO_SUMS = false;
};
struct PlainF32Small {
    /* for fewer of the middle tiles than SMs; each step's sums are added to the total, for a
     * quarter of the error */
    static constexpr int BM = 64, BN = 64, BK = 16, STAGES = 3, WARPS_M = 2, WARPS_N = 1,
                         PER_SM = 4, PERCENT = 59;
    static constexpr bool TWO_SUMS = true;
};
struct PlainF64 {
    /* 4 x 4 doubles a thread: as many registers as 8 x 8 floats */
    static constexpr int BM = 64, BN = 64, BK = 16, STAGES = 3, WARPS_M = 4, WARPS_N = 2,
                         PER_SM = 2;
    static constexpr bool TWO_SUMS = false;
};
/* PERCENT of the multiply-adds' peak, on full SMs; of the large tile where rows are misaligned;
 * what the last few tiles of an SM take, of as many as it runs at once; and what nothing hides of
 * those. Fitted to the times of the three tiles on 36 shapes, on one H200: the one that they choose
 * takes 1.5 % more than the best */
constexpr int PLAIN_UNALIGNED_PERCENT = 57, PLAIN_ALONE_PERCENT = 63;
constexpr double PLAIN_ROUND_US = 5;
/* k of a split at least, in steps: shorter ones spend their time in the first loads */
constexpr int PLAIN_SPLIT_STEPS = 8;

/* ---- gemm_skinny: at most ROWS weights a tile, WARPS split k --------------------------------- */
/* 28672 are four tiles of 56 on 128 SMs, 4096 one of 32; 8 warps hold more copies under way than
 * registers could */
constexpr int SKINNY_ROWS = 64, SKINNY_WARPS = 8;
/* at 64 tokens the tiles of gemm_sm80, which share tokens between warps, take 15.3 us where this
 * took 20.8 */
constexpr int SKINNY_MAX_TOKENS = 16;
/* 100 KB under way on every SM hide memory's latency at 4.2 TB/s; past 8 stages nothing is left to
 * hide */
constexpr int stages_in(int bytes, int stage_bytes, int most) {
    return bytes / stage_bytes < most ? bytes / stage_bytes : most;
}
constexpr int skinny_stages(int stage_bytes, int other_bytes) {
    return stages_in(200 * 1024 - other_bytes, stage_bytes, 8);
}
/* misaligned weights fewer than this are left to gemm_sm80, which splits k over all SMs: 32 SMs
 * with a tile of 32 take as long for 1024 weights of 4096 */
constexpr int SKINNY_MISALIGNED_LEAST = 1024;

#endif
