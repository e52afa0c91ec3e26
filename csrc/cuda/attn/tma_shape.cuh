/* SPDX-License-Identifier: BSD-3-Clause */
/* tma_shape.cuh: the tensors of attention as TMA shapes, and the loads of their tiles. All Hopper
 * kernels of attention use it. */
#ifndef GPUKERN_CUDA_TMA_SHAPE_CUH
#define GPUKERN_CUDA_TMA_SHAPE_CUH

#include "../host/tensormap.cuh"
#include "../ptx/tma.cuh"

/* The TMA shape of [batch, heads, rows, columns]: columns, rows, heads, batch. */
inline TensorShape attn_shape(const gk_tensor &t) {
    TensorShape x = {};
    const bool packed = t.ndim == 3;
    const int rows = packed ? 0 : 2, heads = 1, last = t.ndim - 1;
    x.data = t.data;
    x.dtype = t.dtype;
    x.size[0] = t.shape[last];
    x.size[1] = t.shape[rows];
    x.size[2] = t.shape[heads];
    x.size[3] = packed ? 1 : t.shape[0];
    x.size[4] = 1;
    x.stride[1] = t.stride[rows];
    x.stride[2] = t.stride[heads];
    x.stride[3] = packed ? 1 : t.stride[0];
    return x;
}

/* Loads a tile that begins at row `row` and column `col`, with one box of COLUMNS columns for each
 * panel (wgmma_panels). One thread. */
template <class Panels, int COLUMNS = 64>
__device__ __forceinline__ void load_panels(smem_addr tile_s, const CUtensorMap *map, int row,
                                            int head, int b, smem_addr barrier_s, int col = 0) {
#pragma unroll
    for (int c = 0; c < Panels::panels; ++c)
        tma_load_5d(tile_s + c * Panels::panel_bytes, map, {{col + c * COLUMNS, row, head, b, 0}},
                    barrier_s);
}

#endif
