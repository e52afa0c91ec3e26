/* SPDX-License-Identifier: BSD-3-Clause */
/* fp8_tiles.h: the tuned numbers of the kernels of flash_attn_fp8, each with its reason. */
#ifndef GPUKERN_CUDA_ATTN_FP8_TILES_H
#define GPUKERN_CUDA_ATTN_FP8_TILES_H

/* flash_attn_fp8_sm80, every head_dim. A warp owns 16 rows, so that O of 256 columns takes 128
 * registers. */
struct fp8_any_gpu {
    /* 24, 48 and 96 KiB: two blocks on an SM */
    static constexpr int rows = 64, keys = 64, warps = 4;
};

/* flash_attn_fp8_decoded. Its passes cost five launches and 3 bytes an element. They pay because
 * flash_attn_fp8_sm80 has a tenth of the rate of the float16 forward: 1147 us instead of about 290
 * us (384 x 384, 16k tokens, head_dim 128). */
struct fp8_decoded {
    /* with up to 128 keys, which are two tiles, one more launch takes half of the time */
    static constexpr int least_keys = 129, least_rows = 1;
};

/* flash_attn_fp8_sm90a. A consumer warpgroup owns 64 rows of queries. Registers: S BKV / 2, O
 * HEAD_DIM_V / 2, weights as codes BKV / 8, twice. STAGES of K and of transposed V, RAW_STAGES
 * of V as loaded, Q_BUFFERS of Q. Figures: TFLOP/s at 7.7k full, one H100 on which
 * FlashAttention-3's 8-bit forward reaches 868 (head_dim 128) and 597 (head_dim 64). */
/* 192 KiB; 849. A key block is one block of scales; 128 rows waste less than 192. */
struct Fp8Hopper128 {
    static constexpr int HEAD_DIM = 128, HEAD_DIM_V = 128, WARPGROUPS = 2, BKV = 128, Q_BUFFERS = 2;
    static constexpr int RAW_STAGES = 2, STAGES = 4, PRODUCER_REGISTERS = 40,
                         CONSUMER_REGISTERS = 232;
    static constexpr int TILE_STAGES = 4;
    /* scores stay in registers for a redo; if false, a redo multiplies Q K^T again */
    static constexpr bool KEEPS_SCORES = true;
};
/* 186 KiB; 970: while one warpgroup waits, the others compute. For 128 keys there are no
 * registers. */
struct Fp8Hopper128Wide : Fp8Hopper128 {
    static constexpr int WARPGROUPS = 3, BKV = 96, PRODUCER_REGISTERS = 32,
                         CONSUMER_REGISTERS = 160;
};
/* 209 KiB; 620. Rows in shared memory are as wide as at 128, but the products are narrower. */
struct Fp8Hopper64 : Fp8Hopper128 {
    static constexpr int HEAD_DIM = 64, HEAD_DIM_V = 64, WARPGROUPS = 3;
    static constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 160;
};
struct Fp8Hopper192 : Fp8Hopper128 { /* 212 KiB; 1021; FlashAttention-3 983 */
    static constexpr int HEAD_DIM = 192, HEAD_DIM_V = 192, Q_BUFFERS = 1, STAGES = 2;
};
/* 227 KiB; 1077; FlashAttention-3 1083; with 232 registers it spilled 92 bytes */
struct Fp8Hopper256 : Fp8Hopper128 {
    static constexpr int HEAD_DIM = 256, HEAD_DIM_V = 256, Q_BUFFERS = 1, STAGES = 2,
                         TILE_STAGES = 2;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool KEEPS_SCORES = false;
};
/* The time of a tile of Fp8Hopper128Wide relative to one of Fp8Hopper128. The number of waves
 * times this decides between them. Measured against predicted: 0.97 at 512 and 0.98 at 1024
 * (predicted 0.98); 1.17 at 128 rows (predicted 1.31). */
constexpr double FP8_WIDE_TILE = 1.31;

/* The reference of a row is this many powers of two below the largest score of its first block, so
 * the largest weight there is 32. Weights down to 2^-11 of the largest keep three bits, and weights
 * below 2^-15 of it vanish. Later weights may be 14 times as large before the codes end at 448.
 *
 * With a largest weight of 64 this margin is 7, and rows of normal data redo blocks: 0.94 of
 * FlashAttention-3 at 1.5k, where 32 reaches 1.07. */
constexpr float FP8_WEIGHT_LOG2 = 5;

#endif
