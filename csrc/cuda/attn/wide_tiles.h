/* SPDX-License-Identifier: BSD-3-Clause */
/* wide_tiles.h: the tuned numbers of the kernels for a head_dim above 256, each with its reason.
 * They are not in tiles.h, because every other attention kernel includes that file and would be
 * compiled again. docs/worklog/flash_attn.md and flash_attn_bwd.md have the measurements. */
#ifndef GPUKERN_CUDA_ATTN_WIDE_TILES_H
#define GPUKERN_CUDA_ATTN_WIDE_TILES_H

#include "tiles.h"

#include <stdint.h>

/* flash_attn_fwd_wide_sm90a: a tile of flash_attn_fwd_sm90a with all columns of q and k, and 256
 * columns of v and out, because O of 512 columns would take 256 registers a thread. Q takes 128
 * KiB. The 96 KiB that are left hold one block of 64 keys, loaded in halves (fwd_wide.cuh). STAGES
 * counts the halves.
 *
 * Two blocks of 32 keys fit as well. But a product of 64 x 32 scores takes 24 clocks of shared
 * memory's port, and the tensor cores need only 16: 434 TFLOP/s at 8k instead of 460 (H200). */
struct FwdHopper512 {
    static constexpr int HEAD_DIM = 512, HEAD_DIM_V = 256, WARPGROUPS = 2, BKV = 64, STAGES = 2,
                         Q_BUFFERS = 1;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr bool OVERLAP = true;
};

/* The memory of FwdHopper512's stages: that of a tile of 32 keys in two stages. */
struct Fwd512Memory : FwdHopper512 {
    static constexpr int BKV = FwdHopper512::BKV / 2;
};

/* flash_attn_bwd_gemms: scores, weights and their gradients take at most this many bytes at a time.
 * A head of 8k x 8k pairs takes 0.31 GiB. */
constexpr int64_t BWD_GEMMS_BYTES = INT64_C(1) << 30;
/* Rows of queries of a chunk. Under a causal mask, chunks of 1024 rows compute 0.56 of 8k x 8k
 * pairs, of which 0.5 are needed. Long sequences, whose chunks would take more than
 * BWD_GEMMS_BYTES, use fewer rows, but no fewer than BWD_GEMMS_LEAST_ROWS. */
constexpr int BWD_GEMMS_ROWS = 1024, BWD_GEMMS_LEAST_ROWS = 128;
/* Keys of a block of dK and dV, a multiple of 64. If a kv head has several query heads, a product
 * is of one head, and 1024 keys would give only 16 tiles for 132 SMs. */
constexpr int BWD_GEMMS_KEYS = 2048;
/* Threads of the kernels between the products; a thread takes 4 pairs at a time. */
constexpr int BWD_GEMMS_THREADS = 256;

#endif
