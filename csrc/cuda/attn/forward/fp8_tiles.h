/* SPDX-License-Identifier: BSD-3-Clause */
/* fp8_tiles.h: every tuned number of the kernels of flash_attn_fp8, each with its reason. */
#ifndef GPUKERN_CUDA_ATTN_FP8_TILES_H
#define GPUKERN_CUDA_ATTN_FP8_TILES_H

/* flash_attn_fp8_sm80, every head_dim: a warp owns 16 rows, so that O of 256 columns is 128
 * registers. */
struct fp8_any_gpu {
    static constexpr int rows = 64, keys = 64, warps = 4; /* 24, 48 and 96 KiB: two blocks an SM */
};

/* flash_attn_fp8_relay. Its passes cost five launches and 3 bytes an element; flash_attn_fp8_sm80
 * has a tenth of the rate of what comes between them: at 384 x 384 and 16k tokens (d128) 1147 us
 * against some 290. */
struct fp8_relay {
    static constexpr int least_keys = 129,
                         least_rows =
                             1; /* up to 128 keys, two tiles, a launch more is half the time */
};

/* flash_attn_fp8_sm90a: a consumer warpgroup owns 64 rows of queries. Registers of its threads: S
 * BKV / 2, O HEAD_DIM_V / 2, weights as codes BKV / 8, twice. STAGES of K and of V transposed,
 * RAW_STAGES of V as it comes, Q_BUFFERS of Q. Figures: TFLOP/s at 7.7k full, one H100 where
 * FlashAttention-3's 8-bit forward has 868 (d128) and 597 (d64). */
struct Fp8Hopper128 { /* 192 KiB; 849; a tile of keys is a block of scales; 128 rows waste less */
    static constexpr int HEAD_DIM = 128, HEAD_DIM_V = 128, WARPGROUPS = 2, BKV = 128, Q_BUFFERS = 2;
    static constexpr int RAW_STAGES = 2, STAGES = 4, PRODUCER_REGISTERS = 40,
                         CONSUMER_REGISTERS = 232;
    static constexpr int TILE_STAGES = 4;
    /* for rows that take the block again; else it is multiplied again */
    static constexpr bool KEEPS_SCORES = true;
};
/* 186 KiB; 970: three fill each other's gaps; 128 keys have no registers */
struct Fp8Hopper128Wide : Fp8Hopper128 {
    static constexpr int WARPGROUPS = 3, BKV = 96, PRODUCER_REGISTERS = 32,
                         CONSUMER_REGISTERS = 160;
};
/* 209 KiB; 620; rows in shared memory are as wide as at 128, products are not */
struct Fp8Hopper64 : Fp8Hopper128 {
    static constexpr int HEAD_DIM = 64, HEAD_DIM_V = 64, WARPGROUPS = 3;
    static constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 160;
};
struct Fp8Hopper192 : Fp8Hopper128 { /* 212 KiB; 1021, FlashAttention-3 983 */
    static constexpr int HEAD_DIM = 192, HEAD_DIM_V = 192, Q_BUFFERS = 1, STAGES = 2;
};
/* 227 KiB; 1077, FlashAttention-3 1083; 232 registers spilled 92 bytes */
struct Fp8Hopper256 : Fp8Hopper128 {
    static constexpr int HEAD_DIM = 256, HEAD_DIM_V = 256, Q_BUFFERS = 1, STAGES = 2,
                         TILE_STAGES = 2;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool KEEPS_SCORES = false;
};
/* The time of a tile of Fp8Hopper128Wide in those of Fp8Hopper128. Waves of either, times this,
 * tell which is faster: measured 0.97 at 512 and 0.98 at 1024 where this says 0.98; 1.17 at 128
 * rows, where it says 1.31. */
constexpr double FP8_WIDE_TILE = 1.31;

/* A row's reference is so many powers of two below the largest score of its first block, whose
 * weight is 32 then: weights down to 2^-11 of it keep three bits, those below 2^-15 vanish, and
 * later ones may be 14 times as large before codes end, at 448. With 64, 7 times, rows of normal
 * data take blocks again: 0.94 of FlashAttention-3 at 1.5k where 32 has 1.07. */
constexpr float FP8_WEIGHT_LOG2 = 5;

#endif
