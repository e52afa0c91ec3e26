/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: the tuned numbers of the attention kernels, each with its reason.
 *
 * Register counts are per thread. Speeds are TFLOP/s. Tile sizes of the paged kernels for Hopper
 * are in paged/paged_tiles.h and paged/prefill_tiles.h, those of FP8 in forward/fp8_tiles.h. */
#ifndef GPUKERN_CUDA_ATTN_TILES_H
#define GPUKERN_CUDA_ATTN_TILES_H

/* ======== forward ======== */
/* flash_attn_fwd_sm80. HEAD_DIM is the bucket: head_dim and head_dim_v are at most that. STAGES is
 * the number of K and V tiles in shared memory, CTAS the number of blocks on an SM.
 *
 * A warp owns BQ / WARPS rows. With 32 rows each fragment of K and V is used in four products, so
 * shared memory keeps up with the tensor cores. If the accumulators of 32 rows do not fit, a warp
 * owns 16. */
template <int HEAD_DIM_> struct FlashFwdTile;
template <int HEAD_DIM_> struct FlashFwdScoreTile; /* for scores with softcap or ALiBi */

template <> struct FlashFwdTile<32> {
    static constexpr int HEAD_DIM = 32;
    static constexpr int BQ = 128, BKV = 128;             /* S 128 and O 32 registers */
    static constexpr int WARPS = 4, STAGES = 2, CTAS = 2; /* 40 KiB; registers set the limit */
    static constexpr bool Q_IN_REGISTERS = true;
};
template <> struct FlashFwdTile<64> {
    static constexpr int HEAD_DIM = 64;
    /* S 128 and O 64 registers; fewer steps than with 64 keys */
    static constexpr int BQ = 128, BKV = 128;
    /* 80 KiB: two blocks, so that one computes while the other waits */
    static constexpr int WARPS = 4, STAGES = 2, CTAS = 2;
    static constexpr bool Q_IN_REGISTERS = false;
};
template <> struct FlashFwdTile<96> {
    static constexpr int HEAD_DIM = 96;
    static constexpr int BQ = 128, BKV = 64;              /* S 64 and O 96 registers */
    static constexpr int WARPS = 4, STAGES = 2, CTAS = 2; /* 72 KiB */
    static constexpr bool Q_IN_REGISTERS = false;
};
template <> struct FlashFwdTile<128> {
    static constexpr int HEAD_DIM = 128;
    static constexpr int BQ = 128, BKV = 64;              /* S 64 and O 128 registers */
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
    /* 96 KiB; a second stage would leave one block on an SM */
    static constexpr int WARPS = 4, STAGES = 1, CTAS = 2;
    static constexpr bool Q_IN_REGISTERS = false;
};

/* Softcap and ALiBi need registers, so the tiles that have none left get fewer keys. */
template <int HEAD_DIM_> struct FlashFwdScoreTile : FlashFwdTile<HEAD_DIM_> {};
template <> struct FlashFwdScoreTile<32> : FlashFwdTile<32> {
    static constexpr int BKV = 64; /* S 64 registers; 128 keys spilled 12 bytes */
};
template <> struct FlashFwdScoreTile<64> : FlashFwdTile<64> {
    static constexpr int BKV = 64; /* S 64 registers; 128 keys spilled 108 bytes */
};
template <> struct FlashFwdScoreTile<128> : FlashFwdTile<128> {
    static constexpr int BKV = 32; /* S 32 registers; 64 keys spilled 40 bytes */
};

/* Float32 on CUDA cores. Products of q k and of dO v are added up in runs of this length, then
 * the runs are added: one chain of 256 would round worse than PyTorch does. Forward and backward
 * use the same order, so that a score is the same float in both. */
constexpr int SIMT_PART = 32;

/* flash_attn_fwd_simt: float32 on CUDA cores. A block has BQ / ROWS x 16 threads. */
template <int HEAD_DIM_> struct FlashFwdSimtTile {
    static constexpr int HEAD_DIM = HEAD_DIM_;
    static constexpr int BQ = 64, BKV = 64; /* 208 KiB at head_dim 256: nothing larger fits */
    /* A thread owns ROWS rows x 4 keys: 12 loads of 16 bytes feed 128 multiply-adds. At 256 it
     * owns 4 rows, because O of 8 would not fit. */
    static constexpr int ROWS = HEAD_DIM_ == 256 ? 4 : 8;
};

/* flash_attn_fwd_sm90a. A consumer warpgroup owns 64 rows of queries. Registers: S and the float32
 * weights BKV / 2 each, P BKV / 4, O HEAD_DIM_V / 2. STAGES is the number of K stages and of V
 * stages, Q_BUFFERS that of Q. OVERLAP: the softmax of a block runs while the previous block is
 * multiplied by V. Without OVERLAP the weights use the registers of S.
 *
 * Figures: TFLOP/s, bfloat16, 16k tokens, one H100 on which cuDNN reaches 583 (head_dim 128). */
/* Three warpgroups: while one waits, the others compute. 590 at 8k. Two with OVERLAP reach 470;
 * three with OVERLAP and 96 keys 540, or 487 without the fixed issue order. Four stages reach
 * 594. */
struct FwdHopper64 {
    static constexpr int HEAD_DIM = 64, HEAD_DIM_V = 64, WARPGROUPS = 3, BKV = 128, STAGES = 2,
                         Q_BUFFERS = 2;
    static constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 160;
    static constexpr bool OVERLAP = false;
};
/* 192 KiB; 716 at 8k. Without the fixed issue order the same, except for scores of wide range
 * (628 instead of 697). */
struct FwdHopper128 {
    static constexpr int HEAD_DIM = 128, HEAD_DIM_V = 128, WARPGROUPS = 2, BKV = 128, STAGES = 2,
                         Q_BUFFERS = 2;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool OVERLAP = true;
};
/* A tile of flash_attn_fwd_masked_sm90a: Base with a mask (MASK 1), a bias [.., Sq, Sk] (BIAS 1) or
 * both, or with a bias of keys (BIAS 2) or by distance (BIAS 3). */
template <class Base, int MASK_, int BIAS_> struct FwdMasked : Base {
    static constexpr int MASK = MASK_, BIAS = BIAS_;
};
/* MASK and BIAS of any tile. */
template <class Tile> struct ScoresOf {
    static constexpr int MASK = 0, BIAS = 0;
};
template <class Base, int MASK_, int BIAS_> struct ScoresOf<FwdMasked<Base, MASK_, BIAS_>> {
    static constexpr int MASK = MASK_, BIAS = BIAS_;
};
/* Heads with a mask are scheduled in groups whose K and V together are about as large as L2.
 * Measured (causal as a mask, 8k tokens, one H200): 773 TFLOP/s with 16 heads, 750 with 6, 748 with
 * 32, 649 head by head. */
constexpr double FWD_MASK_L2_SHARE = 1.1;
/* The largest number of blocks of keys of a masked tile: 131,072 keys. Shared memory has one bit
 * for each of them (FwdMarks). */
constexpr int FWD_MASK_BLOCKS = 1024;
/* 128 rows: causal 215 at 512, where 192 rows reach 178; 295 and 285 at 1k */
struct FwdHopper64Short : FwdHopper128 {
    static constexpr int HEAD_DIM = 64, HEAD_DIM_V = 64;
};
/* K and V take as much shared memory as at 128, the products are narrower; 564 at 8k */
struct FwdHopper96 : FwdHopper128 {
    static constexpr int HEAD_DIM = 96, HEAD_DIM_V = 96;
};
struct FwdHopper192 { /* 192 KiB, one Q buffer; 732 at 8k, cuDNN 681 */
    static constexpr int HEAD_DIM = 192, HEAD_DIM_V = 192, WARPGROUPS = 2, BKV = 96, STAGES = 2,
                         Q_BUFFERS = 1;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool OVERLAP = true;
};
struct FwdHopper192v128 : FwdHopper192 { /* 128 keys spilled 36 bytes; 726 at 8k, cuDNN 654 */
    static constexpr int HEAD_DIM_V = 128;
};
struct FwdHopper256 { /* 192 KiB, one Q buffer; 741 at 8k */
    static constexpr int HEAD_DIM = 256, HEAD_DIM_V = 256, WARPGROUPS = 2, BKV = 64, STAGES = 2,
                         Q_BUFFERS = 1;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool OVERLAP = true;
};
/* The last P V of a tile with at least this many key blocks is followed directly by the next tile's
 * first S. Speed relative to never doing so: 1.06 at 512 full, 1.00 at 8k. With shorter tiles as
 * well, it was 0.97 at 512 causal, since the next Q has not arrived by then. */
constexpr int FWD_FOLLOWED = 3;
/* Up to this many rows of queries, tiles of 192 rows waste more than they gain. Measured at 512,
 * 1024 and 2048 with a causal mask. Without one, only a sequence that fits in 128 rows. */
constexpr int FWD_SHORT_CAUSAL = 1024, FWD_SHORT = 128;

/* A row's sum is rescaled only when its maximum has grown by 2^8. Weights up to 256 lose no bits
 * in 16-bit formats, and nearly all rescalings of O disappear. */
constexpr float SOFTMAX_SLACK_LOG2 = 8;

/* Splitting the keys: the largest number of parts (the merge reads each once), and the smallest
 * number of key tiles of a part. Two parts of two tiles took 14.3 us, where FlashAttention-2 took
 * 12.8 us without splits: the merge costs more than it saves. */
constexpr int SPLIT_MOST = 32, SPLIT_TILES = 4;
/* Keys are split if the blocks fill less than SPLIT_BELOW of the GPU. The smallest number of
 * parts that reaches SPLIT_NEAR of the best fill is taken, which is FlashAttention-2's rule. */
constexpr double SPLIT_BELOW = 0.8, SPLIT_NEAR = 0.85;

/* Blocks process kv heads in groups whose K and V take this share of L2. Within a group, the
 * rows with the most keys come first. Each head's keys then come from DRAM once. The rest of L2
 * is for Q, O and the heads of the neighbouring groups. */
constexpr double FWD_L2_SHARE = 0.4;
/* ======== end of forward ======== */

/* ---- backward -------------------------------------------------------------------------------- */
constexpr int BWD_PRE_THREADS = 256; /* 32 rows at a time: a tile in one or two passes */
/* one block for each head, with as many rows at a time as a block can hold */
constexpr int BWD_SINK_THREADS = 1024;
/* a warp for each row; float64 rows of q and dO of four warps take 16 KiB */
constexpr int BWD_PLAIN_WARPS = 4;
constexpr int BWD_PLAIN_ROWS = 64; /* rows of a tile of stats; nothing else depends on it */

/* HEAD_DIM is the padded head_dim. The warps form WARPS_KV groups, and each group owns a part of
 * the tile's keys. The warps of one group divide its rows in S and dP and its columns in dK and dV.
 * DQ_WARPS warps divide the rows of dQ, and the rest its columns. BLOCKS blocks run on an SM. */
template <int HEAD_DIM, int BQ_, int BKV_, int WARPS_, int WARPS_KV_, int DQ_WARPS_, int BLOCKS_>
struct BwdTile {
    static constexpr int head_dim = HEAD_DIM, bq = BQ_, bkv = BKV_, warps = WARPS_,
                         warps_kv = WARPS_KV_, dq_warps = DQ_WARPS_, blocks = BLOCKS_, stages = 2;
};
/* 32 keys a warp: every operand of dO and Q that is loaded is used in two products. The tile is
 * small, so that S and dP (64 registers) fit in addition to dK and dV (128). Two blocks run on an
 * SM, so that one multiplies while the other waits.
 *
 * 326 TFLOP/s at 8k. Others: 252 with 64 rows, 16 keys a warp and one block; 280 with 32 rows and
 * 256 keys; 262 with 64 rows and pairs of warps. */
typedef BwdTile<64, 32, 128, 4, 4, 2, 2> Bwd64;
/* For 32 keys a warp, two warps must divide each group of keys here: 338 at 8k. Others: 300 with 16
 * keys a warp; 267 with tiles of 32 x 64 and two blocks an SM. dQ in one or four groups of rows is
 * 2 % slower. */
typedef BwdTile<128, 64, 128, 8, 4, 2, 1> Bwd128;
/* Four warps divide the work for 32 keys: 275 at 8k; 245 with two warps and 16 keys. dQ in one or
 * four groups: 266, 251. */
typedef BwdTile<256, 64, 64, 8, 2, 2, 1> Bwd256;
/* Smaller tiles for GPUs with less shared memory: 72 KiB of the 99 KiB of compute capability 8.6,
 * 8.9 and 12.0, and 137 KiB of the 163 KiB of 8.0 and 8.7. Only one block fits on an SM, so it has
 * 8 warps and no 32 keys a warp. At 256 not even 32 x 32 fits in 99 KiB. */
typedef BwdTile<128, 32, 64, 8, 4, 2, 1> Bwd128Small;
typedef BwdTile<256, 32, 64, 8, 4, 2, 1> Bwd256Small;
/* With dropout, whose random words take registers: 16 keys a warp. The tiles above spill 8 to 56
 * bytes. */
typedef BwdTile<64, 32, 64, 4, 4, 2, 2> Bwd64Drop;
typedef Bwd128Small Bwd128Drop;
typedef Bwd256Small Bwd256Drop;

/* dQ alone, for deterministic calls. WARPS_ warps divide the rows of a block. */
template <int HEAD_DIM, int BQ_, int BKV_, int WARPS_, int BLOCKS_> struct BwdDqTile {
    static constexpr int head_dim = HEAD_DIM, bq = BQ_, bkv = BKV_, warps = WARPS_,
                         blocks = BLOCKS_;
    /* Q, dO; two stages of K and of V */
    static constexpr int smem_bytes = (2 * BQ_ + 2 * 2 * BKV_) * HEAD_DIM * 2;
};
/* 32 rows a warp, for the same reason as 32 keys above; two blocks an SM. 247 TFLOP/s at 8k, dK
 * and dV included */
typedef BwdDqTile<64, 128, 32, 4, 2> BwdDq64;
/* dQ 128 registers, S and dP 64; 274 TFLOP/s */
typedef BwdDqTile<128, 128, 32, 4, 2> BwdDq128;
/* dQ 128 registers with 16 rows a warp; 192 KiB of shared memory; 218 TFLOP/s */
typedef BwdDqTile<256, 128, 32, 8, 1> BwdDq256;
/* 128 KiB, used with Bwd256Small; BwdDq128's 96 KiB fit where Bwd128Small does */
typedef BwdDqTile<256, 64, 32, 4, 1> BwdDq256Small;
/* With dropout 32 rows a warp spill 8 bytes. */
typedef BwdDqTile<128, 64, 32, 4, 2> BwdDq128Drop;

/* flash_attn_bwd_sm90a: two consumer warpgroups of 64 keys each, BQ rows a step. Registers of a
 * consumer: dK HEAD_DIM / 2, dV HEAD_DIM_V / 2, S and dP BQ / 2 each. STAGES of Q, O_STAGES of dO.
 * DV_FIRST: the rows of the dV product that are issued before dQ. K_REGISTERS: K is the register
 * operand of S, so that shared memory is read less. TASK_TILES: tiles of rows of one rows or
 * rounding task.
 *
 * Figures: TFLOP/s at 8k full on one H100. */
/* 573; 560 with 64 rows. Neither fewer rows of dV before dQ nor K in registers fits. */
struct BwdHopper128 {
    static constexpr int HEAD_DIM = 128, HEAD_DIM_V = 128, BQ = 80, BKV = 128, STAGES = 2,
                         O_STAGES = 2, DV_FIRST = 64, TASK_TILES = 8;
    static constexpr bool PAIR = false, K_REGISTERS = false;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
};
/* has registers left, so fewer rows of dV come before dQ, and more run while dQ is added to
 * memory */
struct BwdHopper96 : BwdHopper128 {
    static constexpr int HEAD_DIM = 96, HEAD_DIM_V = 96, DV_FIRST = 32;
};
struct BwdHopper64 : BwdHopper128 { /* 524; K in registers saves 4.5 % of the clocks */
    static constexpr int HEAD_DIM = 64, HEAD_DIM_V = 64, BQ = 128, DV_FIRST = 64;
    static constexpr bool K_REGISTERS = true;
};

/* Softcap and ALiBi need registers, so a step has fewer rows: the plain tiles spilled 28 to 172
 * bytes. */
struct BwdHopper128Score : BwdHopper128 { /* 48 rows of dV before dQ spilled 8 bytes */
    static constexpr int BQ = 64, DV_FIRST = 32;
};
struct BwdHopper96Score : BwdHopper96 { /* for the same reason as BwdHopper128Score */
    static constexpr int BQ = 64;
};
struct BwdHopper64Score : BwdHopper64 { /* for the same reason as BwdHopper128Score */
    static constexpr int BQ = 64, DV_FIRST = 32;
};

/* A tile of flash_attn_bwd_masked_sm90a: Base with a mask (MASK 1), a bias [.., Sq, Sk] (BIAS 1) or
 * both. Its rows must divide the 128 of a mask's block. */
template <class Base, int MASK_, int BIAS_> struct BwdMasked : Base {};
template <class Base, int MASK_, int BIAS_> struct ScoresOf<BwdMasked<Base, MASK_, BIAS_>> {
    static constexpr int MASK = MASK_, BIAS = BIAS_;
};
/* True if the tile is one of flash_attn_bwd_masked_sm90a. */
template <class Tile> constexpr bool bwd_masked = ScoresOf<Tile>::MASK || ScoresOf<Tile>::BIAS;
/* Ordered kernels need one register more. */
struct BwdHopper128ScoreOrdered : BwdHopper128Score { /* 64 rows spilled 12 bytes */
    static constexpr int BQ = 48, DV_FIRST = 32;
};
typedef BwdHopper96Score BwdHopper96ScoreOrdered;
typedef BwdHopper64Score BwdHopper64ScoreOrdered;

/* flash_attn_bwd_wide_sm90a: a block has 64 keys; one warpgroup holds dV and the other dK.
 * Registers: HEAD_DIM / 2 for dK or dV; BQ / 2 each for S or dP and for dQ. dK and dV of 128
 * keys would take 256 registers. PAIR: two blocks exchange dS, and each adds half of the columns
 * of dQ. STAGES of Q, O_STAGES of dO. */
struct BwdHopper256 { /* 226 KiB: a second stage of dO does not fit */
    static constexpr int HEAD_DIM = 256, HEAD_DIM_V = 256, BQ = 64, BKV = 64, STAGES = 2,
                         O_STAGES = 1, TASK_TILES = 4;
    static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
    static constexpr bool PAIR = true;
};
struct BwdHopper192 : BwdHopper256 {
    static constexpr int HEAD_DIM = 192, HEAD_DIM_V = 192, O_STAGES = 2;
};

/* float32 on CUDA cores with 8 warps. A block keeps 16 PER_STAY rows in shared memory, and 16
 * PER_PASS rows at a time pass through it. A thread computes PER_STAY x PER_PASS sums from the
 * elements that it loads. */
template <int HEAD_DIM, int PER_STAY, int PER_PASS, int BLOCKS_> struct BwdSimtTile {
    static constexpr int head_dim = HEAD_DIM, per_stay = PER_STAY, per_pass = PER_PASS,
                         stay = 16 * PER_STAY, pass = 16 * PER_PASS, blocks = BLOCKS_;
};
/* 174 KiB; 20.9 TFLOP/s at 2k. 4 x 4 with two blocks an SM is as fast but spills. */
typedef BwdSimtTile<64, 8, 4, 1> BwdSimt64;
typedef BwdSimtTile<128, 4, 4, 1> BwdSimt128; /* 170 KiB; 21.0 TFLOP/s */
/* 217 KiB; 16.9 TFLOP/s; 2 x 2 reaches 13.7; 4 x 4 would need 301 KiB */
typedef BwdSimtTile<256, 4, 2, 1> BwdSimt256;

/* ---- paged ----------------------------------------------------------------------------------- */

/* A stage of a warp's ring holds 16 keys of K and V: 64 x head_dim bytes. */
template <int HEAD_DIM, int LANES> struct paged_tile;
template <> struct paged_tile<64, 8> {
    /* 2 blocks x 8 warps x 3 stages x 4 KiB = 192 KiB in flight on an SM */
    static constexpr int warps = 8, stages = 3, blocks = 2;
};
template <> struct paged_tile<64, 16> {
    /* 192 KiB in flight, too; 16 warps on an SM would spill */
    static constexpr int warps = 4, stages = 4, blocks = 3;
};
template <int LANES> struct paged_tile<128, LANES> {
    /* 2 x 4 x 3 x 8 KiB = 192 KiB; one block streams while the other merges */
    static constexpr int warps = 4, stages = 3, blocks = 2;
};
template <int LANES> struct paged_tile<256, LANES> {
    /* 4 x 3 x 16 KiB = 192 KiB; two blocks do not have the registers */
    static constexpr int warps = 4, stages = 3, blocks = 1;
};

template <int HEAD_DIM> struct paged_f32_tile;
template <> struct paged_f32_tile<64> {
    static constexpr int warps = 8, stages = 3; /* 8 x 3 x 8 KiB = 192 KiB in flight on an SM */
};
template <> struct paged_f32_tile<128> {
    static constexpr int warps = 4, stages = 3; /* 4 x 3 x 16 KiB = 192 KiB */
};

struct paged_plan {
    static constexpr int keys = 16; /* keys of a warp's step: the m of mma m16n8k16 */
    /* If a tile would have more than about this many splits, its kv heads go to separate blocks. */
    static constexpr int splits = 16;
    /* cost of starting a tile, in chunks */
    static constexpr int tile_cost = 2;
    /* warps of a combine block; each reads one of a tile's splits */
    static constexpr int combine_warps = 8;
    /* splits that a warp loads at once: 8 warps x 6, more than a sequence of 8k keys has */
    static constexpr int combine_splits = 6;
    /* warps that share a row's keys; 16 blocks of 4 warps fill an SM at any head_dim */
    static constexpr int plain_warps = 4;
};

struct paged_tree_plan {
    /* neighbouring warps have neighbouring rows of a kv head, which read the same new keys */
    static constexpr int warps = 4;
    /* columns of V of a warp: 64 accumulators. Wider heads compute Q K^T once for each part */
    static constexpr int part_columns = 128;
    static constexpr int narrow_dim = 256; /* the largest head_dim of narrow instances */
};

struct kv_write_tile {
    /* a token of 8 heads x 128 in 16 bits has 256 vectors of 16 bytes in k and v: one block */
    static constexpr int threads = 256;
    /* tokens of a block: the number of 16-byte loads that a thread has in flight */
    static constexpr int tokens = 4;
    /* a block takes fewer tokens until every SM has this many blocks */
    static constexpr int blocks_per_sm = 4;
};

#endif
