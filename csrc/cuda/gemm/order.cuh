/* order.cuh: which tile a block takes. Blocks that run at once should share rows of a and columns of b in L2: they walk
 * `group` rows of tiles together, column by column.
 *
 *   group 2, 4 x 3 tiles:    0  2  4
 *                            1  3  5
 *                            6  8 10
 *                            7  9 11 */
#ifndef GPUKERN_CUDA_GEMM_ORDER_CUH
#define GPUKERN_CUDA_GEMM_ORDER_CUH

struct TilePlace {
    int row, col; /* counted in tiles */
};

__device__ __forceinline__ TilePlace tile_place(unsigned tile, int tiles_m, int tiles_n, int group) {
    const unsigned in_group = (unsigned)group * tiles_n, first = tile / in_group * group, rest = tile % in_group;
    const unsigned rows = min((unsigned)group, tiles_m - first); /* the last group may be lower */
    return {(int)(first + rest % rows), (int)(rest / rows)};
}

#endif
