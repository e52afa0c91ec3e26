/* SPDX-License-Identifier: BSD-3-Clause */
/* order.cuh: the order in which blocks take the tiles of a result. Blocks that run at once should
 * share rows of a and columns of b in L2. So tiles are numbered in groups of `group` rows of tiles,
 * column by column within a group.
 *
 *   group 2, 4 x 3 tiles:    0  2  4
 *                            1  3  5
 *                            6  8 10
 *                            7  9 11 */
#ifndef GPUKERN_CUDA_GEMM_ORDER_CUH
#define GPUKERN_CUDA_GEMM_ORDER_CUH

#include "../../tile/divisor.h"

struct TilePlace {
    int row, col; /* counted in tiles */
};

__device__ __forceinline__ TilePlace tile_place(unsigned tile, int tiles_m, int tiles_n,
                                                int group) {
    const unsigned in_group = (unsigned)group * tiles_n, first = tile / in_group * group,
                   rest = tile % in_group;
    const unsigned rows = min((unsigned)group, tiles_m - first); /* the last group may have fewer */
    return {(int)(first + rest % rows), (int)(rest / rows)};
}

/* The same order with precomputed divisors. Kernels use it if a block's first copies wait for the
 * place of its first tile. */
struct TileOrder {
    /* The number of tiles of a batch entry, of tiles of a group, of rows of a group, and of rows of
     * the last group. */
    Divisor tiles, in_group, rows, last_rows;
    int tiles_m;
};

inline TileOrder tile_order(int tiles_m, int tiles_n, int group) {
    const unsigned last = tiles_m % group;
    return {divisor_of((unsigned)tiles_m * tiles_n), divisor_of((unsigned)group * tiles_n),
            divisor_of(group), divisor_of(last ? last : group), tiles_m};
}

/* tile: index of the tile within its batch entry. */
__device__ __forceinline__ TilePlace tile_place(unsigned tile, const TileOrder &o) {
    const unsigned group = o.in_group.into(tile), rest = tile - group * o.in_group.by,
                   first = group * o.rows.by;
    const Divisor rows = first + o.rows.by > (unsigned)o.tiles_m ? o.last_rows : o.rows;
    const unsigned col = rows.into(rest);
    return {(int)(first + rest - col * rows.by), (int)col};
}

#endif
