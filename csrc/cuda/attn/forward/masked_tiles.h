/* SPDX-License-Identifier: BSD-3-Clause */
/* masked_tiles.h: the tiles of flash_attn_fwd_masked_wide_sm90a that flash_attn_fwd_sm90a does not
 * have. They are not in ../tiles.h, because every other attention kernel includes that file and
 * would be compiled again. */
#ifndef GPUKERN_CUDA_FWD_MASKED_TILES_H
#define GPUKERN_CUDA_FWD_MASKED_TILES_H

#include "../tiles.h"

/* FwdHopper192 has steps of 96 keys, which do not divide a mask's block of 128. Steps of 64 keys
 * leave room for a second Q (192 KiB with it), so that the next tile begins while this one ends.
 * With 24 registers, the loader of a list spilled 12 bytes. */
struct FwdHopper192Masked : FwdHopper192 {
    static constexpr int Q_BUFFERS = 2, BKV = 64;
    static constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
};
struct FwdHopper192v128Masked : FwdHopper192Masked {
    static constexpr int HEAD_DIM_V = 128;
};

#endif
