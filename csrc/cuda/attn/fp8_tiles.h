/* SPDX-License-Identifier: BSD-3-Clause */
/* fp8_tiles.h: every tuned number of the kernels of flash_attn_fp8, each with its reason. */
#ifndef GPUKERN_CUDA_ATTN_FP8_TILES_H
#define GPUKERN_CUDA_ATTN_FP8_TILES_H

/* flash_attn_fp8_sm80, every head_dim: a warp owns 16 rows, so that O of 256 columns is 128 registers. */
struct fp8_any_gpu {
    static constexpr int rows = 64, keys = 64, warps = 4; /* 24, 48 and 96 KiB: two blocks an SM */
};

/* flash_attn_fp8_relay. Its passes cost five launches and 3 bytes an element; flash_attn_fp8_sm80 has a tenth of the rate of what comes
 * between them: at 384 x 384 and 16k tokens (d128) 1147 us against some 290. */
struct fp8_relay {
    static constexpr int least_keys = 129,
                         least_rows = 1; /* up to 128 keys, two tiles, a launch more is half the time */
};

#endif
