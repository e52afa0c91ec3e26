/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: every tuned number of the attention kernels, each with its reason. */
#ifndef GPUKERN_CUDA_ATTN_TILES_H
#define GPUKERN_CUDA_ATTN_TILES_H

/* ======== forward
 * ======================================================================================== */
/* flash_attn_fwd_sm80: HEAD_DIM is the bucket (head_dim and head_dim_v at most that), STAGES the
 * tiles of K and of V in shared memory, CTAS the blocks that share an SM. A warp owns BQ / WARPS
 * rows: with 32 of them each fragment of K and V feeds four products, and shared memory keeps up
 * with the tensor cores; 16 where the accumulators of 32 do not fit. */
template <int HEAD_DIM_> struct FlashFwdTile;
template <int HEAD_DIM_> struct FlashFwdScoreTile; /* for scores with softcap or ALiBi */

template <> struct FlashFwdTile<32> {
    static constexpr int HEAD_DIM = 32;
    static constexpr int BQ = 128, BKV = 128;             /* S 128 and O 32 registers a thread */
    static constexpr int WARPS = 4, STAGES = 2, CTAS = 2; /* 40 KiB; registers decide */
    static constexpr bool Q_IN_REGISTERS = true;
};
template <> struct FlashFwdTile<64> {
    static constexpr int HEAD_DIM = 64;
    /* S 128 and O 64 registers a thread; fewer steps than 64 keys */
    static constexpr int BQ = 128, BKV = 128;
    /* 80 KiB: two blocks, one computes while the other waits */
    static constexpr int WARPS = 4, STAGES = 2, CTAS = 2;
    static constexpr bool Q_IN_REGISTERS = false;
};
template <> struct FlashFwdTile<96> {
    static constexpr int HEAD_DIM = 96;
    static constexpr int BQ = 128, BKV = 64;              /* S 64 and O 96 registers a thread */
    static constexpr int WARPS = 4, STAGES = 2, CTAS = 2; /* 72 KiB */
    static constexpr bool Q_IN_REGISTERS = false;
};
template <> struct FlashFwdTile<128> {
    static constexpr int HEAD_DIM = 128;
    static constexpr int BQ = 128, BKV = 64;              /* S 64 and O 128 registers a thread */
    static constexpr int WARPS = 4, STAGES = 2, CTAS = 2; /* 96 KiB */
    static constexpr bool Q_IN_REGISTERS = false;
};
template <> struct FlashFwdTile<192> {
    static constexpr int HEAD_DIM = 192;
    /* 16 rows a warp: O 96 registers; 32 rows would need 192 */
    static constexpr int BQ = 64, BKV = 64;
    static constexpr int WARPS = 4, STAGES = 1, CTAS = 2; /* 72 KiB */
    static constexpr bool Q_IN_REGISTERS = true;
};
template <> struct FlashFwdTile<256> {
    static constexpr int HEAD_DIM = 256;
    static constexpr int BQ = 64, BKV = 64; /* 16 rows a warp: O 128 registers */
    /* 96 KiB; a second stage would leave one block an SM */
    static constexpr int WARPS = 4, STAGES = 1, CTAS = 2;
    static constexpr bool Q_IN_REGISTERS = false;
};

/* Softcap and ALiBi take registers: tiles of fewer keys where the plain body has none left. */
template <int HEAD_DIM_> struct FlashFwdScoreTile : FlashFwdTile<HEAD_DIM_> {};
template <> struct FlashFwdScoreTile<32> : FlashFwdTile<32> {
    static constexpr int BKV = 64; /* S 64 registers a thread; 128 keys spilled 12 bytes */
};
template <> struct FlashFwdScoreTile<64> : FlashFwdTile<64> {
    static constexpr int BKV = 64; /* S 64 registers a thread; 128 keys spilled 108 bytes */
};
template <> struct FlashFwdScoreTile<128> : FlashFwdTile<128> {
    static constexpr int BKV = 32; /* S 32 registers a thread; 64 keys spilled 40 bytes */
};

/* Float32 on CUDA cores: products of q k and dO v are added up so many at a time, then those sums:
 * a chain of 256 would round worse than PyTorch does. Forward and backward alike, so that a score
 * is the same float in both. */
constexpr int SIMT_PART = 32;

/* flash_attn_fwd_simt: float32 on CUDA cores; BQ / ROWS x 16 threads. */
template <int HEAD_DIM_> struct FlashFwdSimtTile {
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int BQ = 64, BKV = 64; /* 208 KiB at head_dim 256: nothing larger fits */
    /* x 4 keys of a thread: 12 loads of 16 bytes feed 128 multiply-adds; at 256, 4 rows, or O would
     * not fit */
    static constexpr int ROWS = HEAD_DIM_ == 256 ? 4 : 8;
};

/* flash_attn_fwd_sm90a: a consumer warpgroup owns 64 rows of queries. Registers of its threads: S
 * and the weights in float32 BKV / 2 each, P BKV / 4, O HEAD_DIM_V / 2. STAGES of K and of V,
 * Q_BUFFERS of Q. OVERLAP: the softmax of a block runs under the product of the block before with
 * V; without it the weights need no registers of their own. Figures: TFLOP/s, bfloat16, 16k tokens,
 * one H100 where cuDNN has 583 (d128). */
struct FwdHopper64 { /* three warpgroups fill each other's gaps: 590 at 8k; two with OVERLAP 470;
                        three with OVERLAP and 96 keys 540, not in turn 487; 4 stages 594 */
    static constexpr int HEAD_DIM = 64, HEAD_DIM_V = 64, WARPGROUPS = 3, BKV = 128, STAGES = 2,
                         Q_BUFFERS = 2;
    static constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 160;
    static constexpr bool OVERLAP = false;
};
/* 192 KiB; 716 at 8k, not in turn the same but for scores of wide range (628 for 697) */
struct FwdHopper128 {
    static constexpr int HEAD_DIM = 128, HEAD_DIM_V = 128, WARPGROUPS = 2, BKV = 128, STAGES = 2,
                         Q_BUFFERS = 2;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool OVERLAP = true;
};
/* 128 rows: causal 215 at 512, where 192 rows have 178; 295 and 285 at 1k */
struct FwdHopper64Short : FwdHopper128 {
    static constexpr int HEAD_DIM = 64, HEAD_DIM_V = 64;
};
/* K and V as wide as at 128 in shared memory, products are not; 564 at 8k */
struct FwdHopper96 : FwdHopper128 {
    static constexpr int HEAD_DIM = 96, HEAD_DIM_V = 96;
};
struct FwdHopper192 { /* 192 KiB, one Q; 732 at 8k, cuDNN 681 */
    static constexpr int HEAD_DIM = 192, HEAD_DIM_V = 192, WARPGROUPS = 2, BKV = 96, STAGES = 2,
                         Q_BUFFERS = 1;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool OVERLAP = true;
};
struct FwdHopper192v128 : FwdHopper192 { /* 128 keys spilled 36 bytes; 726 at 8k, cuDNN 654 */
    static constexpr int HEAD_DIM_V = 128;
};
struct FwdHopper256 { /* 192 KiB, one Q; 741 at 8k */
    static constexpr int HEAD_DIM = 256, HEAD_DIM_V = 256, WARPGROUPS = 2, BKV = 64, STAGES = 2,
                         Q_BUFFERS = 1;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool OVERLAP = true;
};
/* Blocks of keys that a tile has at least where the next tile's first scores are issued behind its
 * last values: 1.06 of not so at 512 full, 1.00 at 8k; with shorter tiles too 0.97 at 512 causal,
 * since the next Q has not come. */
constexpr int FWD_FOLLOWED = 3;
/* Up to so many rows of queries tiles of 192 rows waste more than they gain: measured at 512, 1024
 * and 2048 under a causal rule; without one only a sequence that fits 128 rows. */
constexpr int FWD_SHORT_CAUSAL = 1024, FWD_SHORT = 128;

/* A row's sum is rescaled once its maximum has grown by 2^8 only: weights up to 256 lose no bits in
 * 16-bit formats, and nearly all rescalings of O fall away. */
constexpr float SOFTMAX_SLACK_LOG2 = 8;

/* Splitting the keys: at most so many parts (the merge reads each once), each of at least so many
 * tiles (two
 * parts of two tiles took 14.3 us where FlashAttention-2 took 12.8 without: the merge costs more
 * than it saves). */
constexpr int SPLIT_MOST = 32, SPLIT_TILES = 4;
/* Keys are split while blocks fill less than this share of the GPU; of the counts that fill it
 * nearly as well (0.85 of the best) the least is taken: FlashAttention-2's rule. */
constexpr double SPLIT_BELOW = 0.8, SPLIT_NEAR = 0.85;

/* Blocks walk through as many kv heads together as this part of L2 holds K and V of: longest rows
 * first among them, each head's keys out of DRAM once. The rest is for Q, O and the heads that
 * begin and end. */
constexpr double FWD_L2_SHARE = 0.4;
/* ======== end of forward
 * ================================================================================= */

/* ---- backward -------------------------------------------------------------------------------- */
constexpr int BWD_PRE_THREADS = 256; /* 32 rows at a time: a tile in one or two passes */
constexpr int BWD_SINK_THREADS =
    1024; /* one block a head: as many rows at a time as a block can hold */
constexpr int BWD_PLAIN_WARPS =
    4; /* a warp a row; double rows of q and dO of four warps are 16 KiB */
constexpr int BWD_PLAIN_ROWS = 64; /* rows of a tile of stats; nothing else depends on it */

/* HEAD_DIM is the padded one. WARPS_KV groups of warps share the tile's keys; warps of one group
 * share its rows in S and dP and its columns in dK and dV. DQ_WARPS warps share the rows of dQ, the
 * others its columns. BLOCKS run on an SM. */
template <int HEAD_DIM, int BQ_, int BKV_, int WARPS_, int WARPS_KV_, int DQ_WARPS_, int BLOCKS_>
struct BwdTile {
    static constexpr int head_dim = HEAD_DIM, bq = BQ_, bkv = BKV_, warps = WARPS_,
                         warps_kv = WARPS_KV_, dq_warps = DQ_WARPS_, blocks = BLOCKS_, stages = 2;
};
/* 32 keys a warp: every operand of dO and Q loaded serves two products. A small tile, so that S and
 * dP (64 registers) fit beside dK and dV (128), and two blocks an SM, so that one multiplies while
 * the other waits: 326 TFLOP/s at 8k, against 252 with 64 rows, 16 keys a warp and one block, 280
 * with 32 rows and 256 keys, 262 with 64 rows and pairs of warps */
typedef BwdTile<64, 32, 128, 4, 4, 2, 2> Bwd64;
/* 32 keys a warp need pairs of warps here: 338 at 8k, against 300 with 16 keys a warp, 267 with
 * tiles of 32 x 64 and two blocks an SM; dQ in one or four groups of rows 2 % less */
typedef BwdTile<128, 64, 128, 8, 4, 2, 1> Bwd128;
/* likewise, four warps share 32 keys: 275 at 8k, against 245 with two and 16; dQ in one or four
 * groups 266, 251 */
typedef BwdTile<256, 64, 64, 8, 2, 2, 1> Bwd256;
/* Where those do not fit: 72 KiB for the 99 of compute capability 8.6, 8.9 and 12.0; 137 KiB for
 * the 163 of 8.0 and 8.7. One block an SM there, so 8 warps rather than 32 keys a warp. 256 in 99
 * KiB: not even 32 x 32 */
typedef BwdTile<128, 32, 64, 8, 4, 2, 1> Bwd128Small;
typedef BwdTile<256, 32, 64, 8, 4, 2, 1> Bwd256Small;
/* With dropout, whose random words take registers: 16 keys a warp. With the tiles above 8 to 56
 * bytes spill. */
typedef BwdTile<64, 32, 64, 4, 4, 2, 2> Bwd64Drop;
typedef Bwd128Small Bwd128Drop;
typedef Bwd256Small Bwd256Drop;

/* dQ alone, for calls that must repeat bit for bit: WARPS_ warps share the rows of a block. */
template <int HEAD_DIM, int BQ_, int BKV_, int WARPS_, int BLOCKS_> struct BwdDqTile {
    static constexpr int head_dim = HEAD_DIM, bq = BQ_, bkv = BKV_, warps = WARPS_,
                         blocks = BLOCKS_;
    /* Q, dO; two stages of K, V */
    static constexpr int smem_bytes = (2 * BQ_ + 2 * 2 * BKV_) * HEAD_DIM * 2;
};
/* 32 rows a warp, as keys above; two blocks an SM. With dK and dV 247 TFLOP/s at 8k */
typedef BwdDqTile<64, 128, 32, 4, 2> BwdDq64;
/* dQ 128 registers, S and dP 64; 274 */
typedef BwdDqTile<128, 128, 32, 4, 2> BwdDq128;
/* dQ 128 registers with 16 rows a warp; 192 KiB of shared memory; 218 */
typedef BwdDqTile<256, 128, 32, 8, 1> BwdDq256;
/* 128 KiB, beside Bwd256Small; BwdDq128's 96 KiB fit beside Bwd128Small */
typedef BwdDqTile<256, 64, 32, 4, 1> BwdDq256Small;
/* With dropout 32 rows a warp spill 8 bytes. */
typedef BwdDqTile<128, 64, 32, 4, 2> BwdDq128Drop;

/* flash_attn_bwd_sm90a: two warpgroups of 64 keys each, BQ rows a step. Registers of a consumer:
 * dK, dV, S, dP of HEAD_DIM, HEAD_DIM_V, BQ, BQ over 2 each. STAGES of Q and of dO. DV_FIRST: rows
 * of dV that are multiplied before dQ. K_REGISTERS: K is an operand of S from registers, which
 * spares shared memory's port. TASK_TILES: tiles of a block that makes stats or rounds dQ. Figures:
 * TFLOP/s at 8k full on one H100. */
struct BwdHopper128 { /* 573; 560 with 64 rows; more rows left after dQ, or K from registers, does
                         not fit */
    static constexpr int HEAD_DIM = 128, HEAD_DIM_V = 128, BQ = 80, BKV = 128, STAGES = 2,
                         O_STAGES = 2, DV_FIRST = 64, TASK_TILES = 8;
    static constexpr bool PAIR = false, K_REGISTERS = false;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
};
/* has registers left: less of dV before dQ, more under its additions */
struct BwdHopper96 : BwdHopper128 {
    static constexpr int HEAD_DIM = 96, HEAD_DIM_V = 96, DV_FIRST = 32;
};
struct BwdHopper64 : BwdHopper128 { /* 524; K from registers 4.5 % fewer clocks */
    static constexpr int HEAD_DIM = 64, HEAD_DIM_V = 64, BQ = 128, DV_FIRST = 64;
    static constexpr bool K_REGISTERS = true;
};

/* Softcap and ALiBi take registers: fewer rows a step, or the plain tile's rows spilled 28 to 172
 * bytes. */
struct BwdHopper128Score : BwdHopper128 { /* 48 rows of dV before dQ spilled 8 bytes */
    static constexpr int BQ = 64, DV_FIRST = 32;
};
struct BwdHopper96Score : BwdHopper96 { /* as d128 */
    static constexpr int BQ = 64;
};
struct BwdHopper64Score : BwdHopper64 { /* as d128 */
    static constexpr int BQ = 64, DV_FIRST = 32;
};

/* Turns take a register more. */
struct BwdHopper128ScoreOrdered : BwdHopper128Score { /* 64 rows spilled 12 bytes */
    static constexpr int BQ = 48, DV_FIRST = 32;
};
typedef BwdHopper96Score BwdHopper96ScoreOrdered;
typedef BwdHopper64Score BwdHopper64ScoreOrdered;

/* flash_attn_bwd_wide_sm90a: dK and dV of 64 keys, one a warpgroup: HEAD_DIM / 2 registers; S or dP
 * and dQ BQ / 2 each. dK and dV of 128 keys would take 256 registers. PAIR: two blocks exchange dS,
 * and each adds half of dQ. O_STAGES of dO, STAGES of Q. */
struct BwdHopper256 { /* 226 KiB: a second stage of dO does not fit */
    static constexpr int HEAD_DIM = 256, HEAD_DIM_V = 256, BQ = 64, BKV = 64, STAGES = 2,
                         O_STAGES = 1, TASK_TILES = 4;
    static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
    static constexpr bool PAIR = true;
};
struct BwdHopper192 : BwdHopper256 {
    static constexpr int HEAD_DIM = 192, HEAD_DIM_V = 192, O_STAGES = 2;
};

/* float32: 16 PER_STAY rows stay, 16 PER_PASS pass, 8 warps: a thread multiplies PER_STAY x
 * PER_PASS for each sum of both that it loads. */
template <int HEAD_DIM, int PER_STAY, int PER_PASS, int BLOCKS_> struct BwdSimtTile {
    static constexpr int head_dim = HEAD_DIM, per_stay = PER_STAY, per_pass = PER_PASS,
                         stay = 16 * PER_STAY, pass = 16 * PER_PASS, blocks = BLOCKS_;
};
/* 174 KiB; 20.9 TFLOP/s at 2k, 4 x 4 twice an SM the same but spills */
typedef BwdSimtTile<64, 8, 4, 1> BwdSimt64;
typedef BwdSimtTile<128, 4, 4, 1> BwdSimt128; /* 170 KiB; 21.0 */
typedef BwdSimtTile<256, 4, 2, 1>
    BwdSimt256; /* 217 KiB; 16.9, 2 x 2 13.7, 4 x 4 would need 301 KiB */

/* paged */

/* A stage of a warp's ring holds 16 keys of K and V: 64 x head_dim bytes. */
template <int HEAD_DIM, int LANES> struct paged_tile;
template <> struct paged_tile<64, 8> {
    /* 2 x 8 x 3 x 4 KiB = 192 KiB in flight an SM */
    static constexpr int warps = 8, stages = 3, blocks = 2;
};
template <> struct paged_tile<64, 16> {
    /* as many bytes; 16 warps an SM would spill */
    static constexpr int warps = 4, stages = 4, blocks = 3;
};
template <int LANES> struct paged_tile<128, LANES> {
    /* 2 x 4 x 3 x 8 KiB; one block streams while one merges */
    static constexpr int warps = 4, stages = 3, blocks = 2;
};
template <int LANES> struct paged_tile<256, LANES> {
    /* 4 x 3 x 16 KiB; two blocks lack registers */
    static constexpr int warps = 4, stages = 3, blocks = 1;
};

template <int HEAD_DIM> struct paged_f32_tile;
template <> struct paged_f32_tile<64> {
    static constexpr int warps = 8, stages = 3; /* 8 x 3 x 8 KiB = 192 KiB in flight an SM */
};
template <> struct paged_f32_tile<128> {
    static constexpr int warps = 4, stages = 3; /* 4 x 3 x 16 KiB */
};

struct paged_plan {
    static constexpr int keys = 16; /* of a step of a warp: the m of mma m16n8k16 */
    /* of a tile, about, before its kv heads go to blocks of their own */
    static constexpr int splits = 16;
    /* what beginning a sequence costs, in steps of the block */
    static constexpr int tile_cost = 2;
    static constexpr int combine_warps = 8; /* of a block; each of a tile's splits brings one */
    /* whose loads a warp has in flight: 8 warps x 6, more than 1 x 8k has */
    static constexpr int combine_splits = 6;
    /* they share a row's keys; 16 blocks of 4 fill an SM at any head_dim */
    static constexpr int plain_warps = 4;
};

struct kv_write_tile {
    /* a token of 8 heads x 128 in 16 bits is 512 pieces: two blocks */
    static constexpr int threads = 256;
    static constexpr int tokens = 4;        /* of a block: 16-byte loads of a thread in flight */
    static constexpr int blocks_per_sm = 4; /* fewer tokens a block until every SM has so many */
};

#endif
