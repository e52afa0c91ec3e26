/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles_sm80.h: the tiles of the quantised kernels on mainloop_sm80.cuh, each with its reason. */
#ifndef GPUKERN_CUDA_QUANT_TILES_SM80_H
#define GPUKERN_CUDA_QUANT_TILES_SM80_H

#include "../gemm/tiles.h"

/* 8 bits, BK counts bytes. Four stages of 16 KB: two blocks an SM on sm_80, one on sm_86 and sm_89,
 * which have 99 KB */
typedef SmTile<128, 128, 64, 4, 64, 64, 2> Tile8_128x128;
/* with scales along k: two sets of sums a thread, so half the columns a warp. 128 x 64, two blocks
 * an SM, took 5 % longer of e4m3 and 40 % of int8 at 4096 on an H100 */
typedef SmTile<128, 128, 64, 4, 64, 32, 1> Tile8_blocks;
/* up to 64 rows, and where large tiles would leave more than half of the SMs idle: b is decoded
 * once for 16 rows */
typedef SmTile<16, 64, 128, 5, 16, 16, 3> Tile8_16x64;
/* 16 bits, in as many bytes */
typedef SmTile<128, 128, 32, 4, 64, 64, 2> TileGroups_128x128;
/* plain loads keep two operands' chunks in registers: half the sums a thread */
typedef SmTile<128, 128, 32, 3, 64, 32, 1> TileGroups_any;

/* sparse: BM weights of half as many bytes, BN tokens; a step's fragments of two k16 of b leave
 * registers for 64 x 32 sums a warp. BYTES: of an element; three stages of 25 KB, of int8 26 */
template <int BYTES> using TileSparse_128x128 = SmTile<128, 128, 128 / BYTES, 3, 64, 32, 1>;
/* up to 32 tokens, and where large tiles would leave more than half of the SMs idle */
template <int BYTES> using TileSparse_64x32 = SmTile<64, 32, 128 / BYTES, 5, 16, 32, 2>;

enum {
    SPARSE_SMALL_M = 32,
    SCALED_SMALL_M = 64 /* rows of a up to which tiles of 16 rows are taken */
};

#endif
