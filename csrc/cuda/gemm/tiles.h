/* tiles.h: every tuned number of the gemm kernels, with its reason. */
#ifndef GPUKERN_CUDA_GEMM_TILES_H
#define GPUKERN_CUDA_GEMM_TILES_H

/* ---- gemm_sm80: BM x BN x BK (elements) through a ring of STAGES, in warp tiles of WM x WN ------------------- */
template <int M, int N, int K, int S, int WARP_M, int WARP_N, int BLOCKS> struct SmTile {
    static constexpr int BM = M, BN = N, BK = K, STAGES = S, WM = WARP_M, WN = WARP_N;
    static constexpr int THREADS = M / WARP_M * (N / WARP_N) * 32;
    static constexpr int PER_SM = BLOCKS; /* blocks that registers let an SM hold */
};

/* 8 warps of 64 x 64, the most an mma.sync warp can reuse from registers: least shared and L2 traffic a FLOP */
typedef SmTile<256, 128, 64, 3, 64, 64, 1> Tile16_256x128;
/* two blocks an SM: one computes while the other stores or waits at its barrier; better waves at 1024 to 2048 */
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

/* what a row reaches of the dense peak on full SMs, in percent: the chooser's weights, from 4096 cubed on one H200 */
enum {
    PERCENT_256x128 = 37,    /* 395 TFLOP/s */
    PERCENT_128x128 = 36,    /* 378 */
    PERCENT_64x128 = 28,     /* 305 */
    PERCENT_64x64 = 23,      /* 250 */
    PERCENT_ANY = 10,        /* 104 */
    PERCENT_TF32 = 33,       /* 175 of half the peak */
    PERCENT_TF32_64x64 = 20, /* 107 */
    PERCENT_PLAIN = 8,       /* 42 of half the peak: tf32 that no tensor core row but Hopper's takes */
    PERCENT_ALONE = 115      /* time of blocks that do not fill their SM: nothing hides their waits; 1024 cubed */
};

/* rows of tiles walked together: 8 x 128 rows of a and as many columns of b are under way in a wave of 132 */
constexpr int GROUP_ROWS = 8;
/* parts that k may be cut into: past that the sum of partials costs more than the waves it fills */
constexpr int MAX_SPLITS = 32;
/* cost of the second pass of a split: its launch in us, and the bytes a us its partials move at through L2 */
constexpr double REDUCE_US = 2.5, REDUCE_BYTES_PER_US = 3e6;
/* a block's start and end, in us: prologue latency and stores */
constexpr double BLOCK_US = 1.5;

/* ---- gemm_sm90a: BM x BN x 64 through a ring of S slots, G warpgroups of BM / G rows, clusters of TILES or of CK parts -- */
template <int M, int N, int S, int L, int G, int SIDE_BY_SIDE, int P, int SPLIT = 1, bool TURN = false, int KB = 1,
          bool TURNS = false>
struct Sm90Tile {
    static constexpr bool IN_TURNS = TURNS; /* each warpgroup has whole tiles, stores one while the other multiplies */
    static constexpr int K64 = KB;          /* 64s of k in a slot */
    static constexpr int CK = SPLIT;        /* parts of k, added across the cluster: 1 or 2 */
    static constexpr bool TURNED = TURN;    /* for few rows: the product is computed as out^T = b^T a^T */
    static constexpr int BM = M, BN = N, STAGES = S, WGS = G, TILES = SIDE_BY_SIDE, THREADS = (G + 1) * 128;
    static constexpr int CLUSTER = TILES * CK; /* blocks */
    static constexpr int PANELS = L;           /* of 16 rows x 64 columns a warp, through which results leave */
    static constexpr int PERCENT = P;          /* of the dense peak, on full SMs; the chooser's weight */
    /* two warpgroups that multiply start with 168 registers a thread; the third gives up what 224 of them need */
    static constexpr int COPY_REGS = TURNS ? 40 : 56, SUM_REGS = TURNS ? 232 : 224;
    static_assert(G == 1 || COPY_REGS + G * SUM_REGS <= (G + 1) * 168, "setmaxnreg.inc would wait for ever");
};
/* 80 bytes of shared memory a clock, a quarter of L2's bytes of single tiles; 4096: 0.99 of cuBLAS. Three slots and panels
 * for the whole tile gave the same, clusters of 2 x 2 twice the time: only 30 of them find four SMs side by side */
typedef Sm90Tile<128, 256, 4, 2, 2, 2, 81> Tile90_128x256;
/* in turns: 512 x 4096 x 28672 in 4.9 waves 0.99 of cuBLAS, 0.96 by 128 x 224; 8192 cubed 1.06, 1.03 by 128 x 256 */
typedef Sm90Tile<128, 176, 5, 2, 2, 2, 80, 1, false, 1, true> Tile90_128x176;
/* 512 x 28672 in 3.9 waves instead of 3.4 */
typedef Sm90Tile<128, 224, 4, 2, 2, 2, 78> Tile90_128x224;
/* other waves than the two above */
typedef Sm90Tile<128, 192, 4, 2, 2, 2, 78> Tile90_128x192;
/* 512 rows of 4096: one tile an SM, 0.98 */
typedef Sm90Tile<128, 128, 6, 2, 2, 2, 79> Tile90_128x128;
/* yet other waves: 856 x 4792 x 6704 in 95 us, 104 by 128 x 176; b along n is copied as 128 columns */
typedef Sm90Tile<128, 96, 6, 2, 2, 2, 54> Tile90_128x96;
/* 1024 cubed: one tile an SM; one block alone, pairs along n and 128 x 64 took up to 8 % more */
typedef Sm90Tile<64, 128, 8, 2, 1, 2, 55> Tile90_64x128;
/* 512 cubed in 32 pairs: 2.65 us; 128 tiles of 64 x 32 took 0.4 more */
typedef Sm90Tile<64, 64, 12, 1, 1, 2, 40> Tile90_64x64;
/* the same tiles on twice the SMs, for longer k: 512 x 512 x 1024 4.1 us, 4.5 by the row above */
typedef Sm90Tile<64, 64, 8, 1, 1, 1, 28, 2> Tile90_64x64_k2;
/* the same for long k: 512 x 2048 x 4096 in 14.6 us, 16.0 by 64 x 128 */
typedef Sm90Tile<128, 128, 5, 1, 2, 1, 65, 2> Tile90_128x128_k2;
/* few rows, by weights: slots of 256 of k, since every step of a warpgroup costs some 0.2 us: at 16 rows 11.5, 11.1 and 10.9 us
 * with 64, 128 and 256; two parts of k, so that 4096 weights keep 128 SMs busy: 14.0 us without */
typedef Sm90Tile<64, 16, 4, 1, 1, 1, 31, 2, true, 4> Tile90_turned_16;
/* 128 of k a slot: 64 rows 11.9 us with 64, 11.65 with 128 and 256; three large slots lose at 28672 weights */
typedef Sm90Tile<64, 32, 7, 1, 1, 1, 31, 2, true, 2> Tile90_turned_32;
typedef Sm90Tile<64, 64, 6, 1, 1, 1, 31, 2, true, 2> Tile90_turned_64;
/* tf32: a slot's rows hold 32 of k; half of bf16's FLOP a clock, so that copies and results hide better. 4096: 1.01 of cuBLAS */
typedef Sm90Tile<128, 256, 4, 2, 2, 2, 74> Tile90_tf32_128x256;
/* 4096 x 768 x 4096 in one wave, 1.32; 8192 cubed 1.01 */
typedef Sm90Tile<128, 192, 4, 3, 2, 2, 74> Tile90_tf32_128x192;
/* 512 x 4096 x 4096: one tile an SM, 1.02 */
typedef Sm90Tile<128, 128, 6, 2, 2, 2, 71> Tile90_tf32_128x128;
/* 1024 cubed: one tile an SM, 1.15 */
typedef Sm90Tile<64, 128, 8, 2, 1, 2, 54> Tile90_tf32_64x128;
/* 512 cubed 1.11, 0.88 by 64 x 128 */
typedef Sm90Tile<64, 64, 8, 1, 1, 1, 31, 2> Tile90_tf32_64x64_k2;
/* 512 x 2048 x 4096 1.21, 1.04 by 64 x 128; 64 x 128 in two parts of k, and 64 x 256, were never the fastest */
typedef Sm90Tile<128, 128, 5, 1, 2, 1, 65, 2> Tile90_tf32_128x128_k2;
/* turned: 128 columns of the result a warpgroup, since a load of 16 bytes brings two products' fragments; pairs share b.
 * 4096: 0.97 to 0.99 of cuBLAS; pairs that share a 0.96, three slots and more panels 0.82 */
typedef Sm90Tile<256, 128, 4, 2, 2, 2, 72, 1, true> Tile90_tf32_turned_256x128;
/* 512 x 4096 x 4096 0.92 to 0.94, 0.81 with two parts of k; one warpgroup alone, 256 x 64 with two 0.83 */
typedef Sm90Tile<128, 128, 6, 2, 1, 2, 56, 1, true> Tile90_tf32_turned_128x128;
/* 1024 cubed 1.07, 0.96 by 128 x 64 without parts of k */
typedef Sm90Tile<128, 128, 5, 1, 1, 1, 57, 2, true> Tile90_tf32_turned_128x128_k2;
/* 512 cubed 1.12, 128 x 4096 x 4096 1.02 */
typedef Sm90Tile<128, 64, 7, 1, 1, 1, 36, 2, true> Tile90_tf32_turned_128x64_k2;
/* rows of a whose tiles are walked together: with 128 x 256 tiles as many columns of b are under way */
constexpr int GROUP_HEIGHT_SM90 = 2048;
/* up to as many rows the weights stream past the tokens, turned; as few columns are gemm_sm80's, and so is k that gives
 * one of two parts nothing to do */
constexpr int SM90_TURNED_ROWS = 64, SM90_TURNED_K = 512;
/* bytes of the ring at most: 227 KiB less the panels and what parts of k trade */
constexpr int MOST_RING = 4 * 48 * 1024;
/* results of few rows up to so many bytes, a sixth of L2, should stay there until they are read: written back amid the weights
 * they cost 5 of 62 us at 64 x 28672 x 4096 */
constexpr int64_t KEEP_BYTES = 8 << 20;
/* from a quarter of the GPU's SMs on all get a block: those that begin last have no tile, and the next kernel waits for none of
 * them: 512 cubed 3.27 to 3.14 us, 1024 6.0 to 5.9 */
constexpr int LEAST_IDLE = 4;
/* what a turned product takes beside its bytes: 10.9 us for 16 x 4096 x 4096 */
constexpr double TURNED_US = 1.5, TURNED_BYTES_PER_US = 4.0e6;
/* what nothing hides: of a launch and its last results, of a tile and its results; results by 128 x 256 of them. These and the
 * percents above are fitted to the times of all rows of 150 shapes: the row they choose takes 1 % more than the best one */
constexpr double LAUNCH_US = 0.7, LAST_US = 0.7, TILE_US = 0.6, STORE_US = 0.9;
/* what the sum of two parts of k costs, by 128 x 256 */
constexpr double TRADE_US = 3.0;
/* in turns: a tile of shorter products waits for the results of the one before; the last one has one warpgroup alone */
constexpr double TURN_US = 2.8, ALONE_US = 3.0;
/* an activation of many instructions, on 128 x 256 results: 25 us of four waves at 4096 cubed */
constexpr double CURVE_US = 6.0;

/* ---- gemm_realign_sm90a --------------------------------------------------------------------------------------- */
/* 32 registers: 2048 threads of an SM keep 32 KB of its loads under way */
constexpr int REALIGN_THREADS = 256, REALIGN_PER_SM = 8;
/* transposed tiles of 32 bits: 64 rows of 256 bytes are read and 64 written; 16 KiB of shared memory, 16 loads a thread under way */
constexpr int REALIGN_TRANSPOSE = 64;
/* expected, the chooser's weights: a launch that overlaps its neighbours, and bytes a us that are read and written; what those
 * past the first 16 MB take more. Fitted to one and two operands of 512, 1024, 1536, 2048 and
 * 4096 squared on one H200 */
constexpr double REALIGN_US = 0.9, REALIGN_BYTES_PER_US = 9.0e6, REALIGN_FAST_BYTES = 16e6, REALIGN_MANY_PER_US = 8.0e6;
/* the largest copy that few rows ask memory for: of weights that are dense nowhere, 128 MB of whose elements take 0.1 ms */
constexpr int64_t REALIGN_FEW_BYTES = 128 << 20;

/* ---- gemm_plain: BM x BN x BK through a ring of STAGES, WARPS_M x WARPS_N warps, PER_SM blocks an SM --------- */
struct PlainF32 {
    /* 8 x 16 sums a thread: 128 multiply-adds for six 16-byte loads; 4096 cubed NN 0.90 of cuBLAS, NT 0.86; by 8 x 8, two blocks
     * an SM, 0.88 and 0.81, by 16 x 8 0.85. Steps of 8 and 32 take 3 to 6 % more, four stages as long */
    static constexpr int BM = 128, BN = 256, BK = 16, STAGES = 3, WARPS_M = 4, WARPS_N = 2, PER_SM = 1, PERCENT = 69;
    static constexpr bool TWO_SUMS = false;
};
struct PlainF32Middle {
    /* other waves, and rows that begin anywhere, whose waits two blocks an SM hide: 3072 x 3072 x 1024 in 524 us, 615 by the
     * large tile, 561 by the small one; 4095 x 4097 x 4099 in 3220 us, 3720 and 3360. Steps of 16 take longer along k */
    static constexpr int BM = 128, BN = 128, BK = 8, STAGES = 4, WARPS_M = 4, WARPS_N = 2, PER_SM = 2, PERCENT = 69;
    static constexpr bool TWO_SUMS = false;
};
struct PlainF32Small {
    /* for fewer of the middle tiles than SMs; each step's sums are added to the total, for a quarter of the error */
    static constexpr int BM = 64, BN = 64, BK = 16, STAGES = 3, WARPS_M = 2, WARPS_N = 1, PER_SM = 4, PERCENT = 59;
    static constexpr bool TWO_SUMS = true;
};
struct PlainF64 {
    /* 4 x 4 doubles a thread: as many registers as 8 x 8 floats */
    static constexpr int BM = 64, BN = 64, BK = 16, STAGES = 3, WARPS_M = 4, WARPS_N = 2, PER_SM = 2;
    static constexpr bool TWO_SUMS = false;
};
/* PERCENT of the multiply-adds' peak, on full SMs; of the large tile where rows begin anywhere; what the last few tiles of an SM
 * take, of as many as it runs at once; and what nothing hides of those. Fitted to the times of the three tiles on 36 shapes, on
 * one H200: the one that they choose takes 1.5 % more than the best */
constexpr int PLAIN_UNALIGNED_PERCENT = 57, PLAIN_ALONE_PERCENT = 63;
constexpr double PLAIN_ROUND_US = 5;
/* k of a split at least, in steps: shorter ones spend their time in the first loads */
constexpr int PLAIN_SPLIT_STEPS = 8;

/* ---- gemm_skinny: at most ROWS weights a tile, WARPS split k -------------------------------------------------- */
/* 28672 are four tiles of 56 on 128 SMs, 4096 one of 32; 8 warps hold more copies under way than registers could */
constexpr int SKINNY_ROWS = 64, SKINNY_WARPS = 8;
/* at 64 tokens the tiles of gemm_sm80, which share tokens between warps, take 15.3 us where this took 20.8 */
constexpr int SKINNY_MAX_TOKENS = 16;
/* 100 KB under way on every SM hide memory's latency at 4.2 TB/s; past 8 stages nothing is left to hide */
constexpr int slots_in(int bytes, int slot_bytes, int most) {
    return bytes / slot_bytes < most ? bytes / slot_bytes : most;
}
constexpr int skinny_stages(int stage_bytes, int other_bytes) {
    return slots_in(200 * 1024 - other_bytes, stage_bytes, 8);
}
/* misaligned weights fewer than this are left to gemm_sm80, which splits k over all SMs: 32 SMs with a tile of 32 take as long for
 * 1024 weights of 4096 */
constexpr int SKINNY_MISALIGNED_LEAST = 1024;

#endif
