/* SPDX-License-Identifier: BSD-3-Clause */
/* wide_tiles.h: the tuned numbers of the kernels for a head_dim above 256, each with its reason.
 * They stand apart from tiles.h, which every other attention kernel includes.
 * docs/worklog/flash_attn.md and flash_attn_bwd.md have the measurements. */
#ifndef GPUKERN_CUDA_ATTN_WIDE_TILES_H
#define GPUKERN_CUDA_ATTN_WIDE_TILES_H

#include "tiles.h"

#include <stdint.h>

/* flash_attn_fwd_wide_sm90a: a tile of flash_attn_fwd_sm90a with all columns of q and k, and 256
 * columns of v and out, because O of 512 columns would take 256 registers a thread. Q takes 128
 * KiB. The 96 KiB that are left hold one block of 64 keys, loaded in halves (fwd_wide.cuh); STAGES
 * counts the halves. Two blocks of 32 keys fit as well, but their products of 64 x 32 scores take
 * 24 clocks of shared memory's port where the tensor cores need 16: 434 TFLOP/s at 8k where this
 * tile has 460 (H200). */
struct FwdHopper512 {
    static constexpr int HEAD_DIM = 512, HEAD_DIM_V = 256, WARPGROUPS = 2, BKV = 64, STAGES = 2,
                         Q_BUFFERS = 1;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool OVERLAP = true;
};

/* Where FwdHopper512 keeps its stages: the memory of a tile of 32 keys in two stages. */
struct Fwd512Memory : FwdHopper512 {
    static constexpr int BKV = FwdHopper512::BKV / 2;
};

/* flash_attn_bwd_gemms: the largest number of bytes of scores, weights and their gradients that are
 * in memory at a time. A head of 8k x 8k pairs takes 0.31 GiB. */
constexpr int64_t BWD_GEMMS_BYTES = INT64_C(1) << 30;
/* Rows of queries of a chunk. Under a causal mask, 0.56 of 8k x 8k pairs are computed, and 0.5 are
 * needed. The least number serves long sequences, whose chunks would otherwise take more than
 * BWD_GEMMS_BYTES. */
constexpr int BWD_GEMMS_ROWS = 1024, BWD_GEMMS_LEAST_ROWS = 128;
/* Keys of a block of dK and dV, a multiple of 64. If a kv head has several query heads, these
 * products are of one head: 1024 keys would be 16 tiles for 132 SMs. */
constexpr int BWD_GEMMS_KEYS = 2048;
/* Threads of the kernels between the products; a thread takes 4 pairs at a time. */
constexpr int BWD_GEMMS_THREADS = 256;

#endif
