/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles_sm80.h: the tiles of the quantised kernels that use mainloop_sm80.cuh, with their
 * reasons. */
#ifndef GPUKERN_CUDA_QUANT_TILES_SM80_H
#define GPUKERN_CUDA_QUANT_TILES_SM80_H

#include "../gemm/tiles.h"

/* 8-bit operands; BK counts bytes. With four stages of 16 KB, an SM of sm_80 holds two blocks.
 * SMs of sm_86 and sm_89 hold one, because they have 99 KB. */
typedef SmTile<128, 128, 64, 4, 64, 64, 2> Tile8_128x128;
/* 8-bit operands with scales along k. A thread has two sets of sums, so a warp has half the
 * columns. Tiles of 128 x 64 with two blocks on an SM took 5 % longer for e4m3 and 40 % for int8
 * (4096 cubed, H100). */
typedef SmTile<128, 128, 64, 4, 64, 32, 1> Tile8_blocks;
/* For up to 64 rows of a, and for calls whose large tiles would leave more than half of the SMs
 * idle. b is decoded once for every 16 rows. */
typedef SmTile<16, 64, 128, 5, 16, 16, 3> Tile8_16x64;
/* grouped_gemm with 16-bit operands. A row of a stage has as many bytes as with 8 bits. */
typedef SmTile<128, 128, 32, 4, 64, 64, 2> TileGroups_128x128;
/* The same for operands of any alignment. Ordinary loads keep chunks of both operands in registers,
 * so a thread has half as many sums. */
typedef SmTile<128, 128, 32, 3, 64, 32, 1> TileGroups_any;

/* sparse_gemm: BM weight rows, with half as many bytes as dense ones, and BN tokens. A step's
 * fragments of b cover two k16, which leaves a warp registers for 64 x 32 sums. BYTES: bytes of an
 * element. There are three stages of 25 KB (int8: 26 KB). */
template <int BYTES> using TileSparse_128x128 = SmTile<128, 128, 128 / BYTES, 3, 64, 32, 1>;
/* For up to 32 tokens, and for calls whose large tiles would leave more than half of the SMs
 * idle. */
template <int BYTES> using TileSparse_64x32 = SmTile<64, 32, 128 / BYTES, 5, 16, 32, 2>;

enum {
    SPARSE_SMALL_M = 32,
    SCALED_SMALL_M = 64 /* up to this many rows of a, tiles of 16 rows are used */
};

#endif
