/* SPDX-License-Identifier: BSD-3-Clause */
/* hopper.cuh: what rungs 8 to 12 and 18 share: the operands' tiles in shared memory, their tensor
 * maps, and a store of the results directly from registers. */
#ifndef GPUKERN_CUDA_LADDER_HOPPER_CUH
#define GPUKERN_CUDA_LADDER_HOPPER_CUH

#include "cuda/host/tensormap.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/tma_ring.cuh"
#include "cuda/layout/wgmma.cuh"
#include "rungs.cuh"
#include "tiles.h"

/* Shared memory, in order: STAGES stages of a [128 m][64 k] and b [4 panels][64 k][64 n], what a
 * rung adds, the barriers. */
struct HopperSmem {
    typedef LadderWgmma Tile;
    typedef wgmma_tile<Tile::BM, false> A;
    typedef wgmma_tile<Tile::BN, true> B;
    static constexpr int STAGE_BYTES = A::bytes + B::bytes, RING = Tile::STAGES * STAGE_BYTES;
    static constexpr int BARRIERS = tma_ring<Tile::STAGES>::bytes;
    static constexpr int bytes(int more) {
        return RING + more + BARRIERS + WGMMA_BLOCK_BYTES;
    } /* the last term leaves room to align the ring */
};

struct HopperParams {
    /* TMA boxes: a [128 m][64 k], b [64 k][64 n], out [16 m][64 n] */
    CUtensorMap a, b, out;
    Product p;
    int tiles_m, tiles_n, group;
};

inline TensorShape ladder_matrix(const bf16 *data, int rows, int cols) {
    return {data, GK_BF16, {cols, rows, 1, 1, 1}, {1, cols, 0, 0, 0}};
}

inline gk_status hopper_params(const Product &p, int rows_of_cluster, int group, HopperParams *x) {
    x->p = p;
    x->group = group;
    x->tiles_m = (int)gk_ceil_div(p.m, rows_of_cluster);
    x->tiles_n = (int)gk_ceil_div(p.n, LadderWgmma::BN);
    const char *const op = "gk_ladder_gemm";
    gk_status status =
        make_tensor_map(op, ladder_matrix(p.a, p.m, p.k), wgmma_box(2, LadderWgmma::BM), &x->a);
    if (status == GK_OK)
        status =
            make_tensor_map(op, ladder_matrix(p.b, p.k, p.n), wgmma_box(2, LadderWgmma::BK), &x->b);
    if (status == GK_OK)
        status = make_tensor_map(op, ladder_matrix(p.out, p.m, p.n), wgmma_box(2, 16), &x->out);
    return status;
}

/* Stores a warp's 16 rows, which start at `row`, as the pairs that wgmma leaves in registers. One
 * instruction of the warp writes 8 rows of 16 bytes. */
__device__ __forceinline__ void
store_pairs(const Product &p, const float (&sum)[LadderWgmma::BN / 2], int row, int col, int lane) {
#pragma unroll
    for (int i = 0; i < LadderWgmma::BN / 2; i += 2) {
        const coord d = wgmma_d(0, lane, i);
        if (row + d.row < p.m && col + d.col < p.n)
            *(uint32_t *)(p.out + (int64_t)(row + d.row) * p.n + col + d.col) =
                pack2<bf16>(sum[i], sum[i + 1]);
    }
}

#endif
