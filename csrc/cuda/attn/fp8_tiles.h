/* SPDX-License-Identifier: BSD-3-Clause */
/* fp8_tiles.h: every tuned number of the kernels of flash_attn_fp8, each with its reason. */
#ifndef GPUKERN_CUDA_ATTN_FP8_TILES_H
#define GPUKERN_CUDA_ATTN_FP8_TILES_H

/* flash_attn_fp8_sm80, every head_dim: a warp owns 16 rows, so that O of 256 columns is 128 registers. */
struct fp8_any_gpu {
    static constexpr int rows = 64, keys = 64, warps = 4; /* 24, 48 and 96 KiB: two blocks an SM */
};

#endif
