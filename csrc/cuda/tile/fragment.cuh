// SPDX-License-Identifier: BSD-3-Clause
// fragment: loads operands of mma from swizzled tiles, and turns accumulators into operands.
//
// A lane computes the address of its ldmatrix row once per operand (frag_*_base) and then steps
// from it: Tile::along(base, 2 kk) to the kk-th 16 columns, Tile::down(base, 16 i) to the i-th
// 16 rows. Tiles hold 16-bit elements. Tiles [m][k] and [n][k] of float32 work too; a step is
// then 8 elements of k.
#ifndef GPUKERN_TILE_FRAGMENT_CUH
#define GPUKERN_TILE_FRAGMENT_CUH

#include "../layout/atoms.cuh"
#include "../ptx/ldmatrix.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/movmatrix.cuh"
#include "convert.cuh"

// Row and column of c[r] inside an m16n8 accumulator, r < 4.
constexpr GK_HD int frag_row(int lane, int r) { return frag_c(lane, r).row; }
constexpr GK_HD int frag_col(int lane, int r) { return frag_c(lane, r).col; }

// ---- addresses ----------------------------------------------------------------------------------
// tile_s: the tile's first byte, a multiple of Tile::align_bytes. row: a multiple of 8. chunk:
// even. The block is 16 rows and 2 chunks.

template <typename Tile>
static __device__ __forceinline__ smem_addr frag_down_base(smem_addr tile_s, int lane, int row,
                                                           int chunk) {
    coord c = ldmatrix_down_first(lane);
    return tile_s + Tile::offset(row + c.row, chunk + c.col);
}

template <typename Tile>
static __device__ __forceinline__ smem_addr frag_along_base(smem_addr tile_s, int lane, int row,
                                                            int chunk) {
    coord c = ldmatrix_along_first(lane);
    return tile_s + Tile::offset(row + c.row, chunk + c.col);
}

// A [16 m][16 k] from a tile [m][k]
template <typename Tile>
static __device__ __forceinline__ smem_addr frag_a_base(smem_addr tile_s, int lane, int row = 0,
                                                        int chunk = 0) {
    return frag_down_base<Tile>(tile_s, lane, row, chunk);
}
// A [16 m][16 k] from a tile [k][m]
template <typename Tile>
static __device__ __forceinline__ smem_addr frag_a_trans_base(smem_addr tile_s, int lane,
                                                              int row = 0, int chunk = 0) {
    return frag_along_base<Tile>(tile_s, lane, row, chunk);
}
// B [16 k][16 n] from a tile [n][k]
template <typename Tile>
static __device__ __forceinline__ smem_addr frag_b_base(smem_addr tile_s, int lane, int row = 0,
                                                        int chunk = 0) {
    return frag_along_base<Tile>(tile_s, lane, row, chunk);
}
// B [16 k][16 n] from a tile [k][n]
template <typename Tile>
static __device__ __forceinline__ smem_addr frag_b_trans_base(smem_addr tile_s, int lane,
                                                              int row = 0, int chunk = 0) {
    return frag_down_base<Tile>(tile_s, lane, row, chunk);
}

// ---- loads --------------------------------------------------------------------------------------
// a[0..3] is one A. b[0..1] is the B of n 0 to 7, b[2..3] that of n 8 to 15.

static __device__ __forceinline__ void load_frag_a(uint32_t *a, smem_addr at_s) {
    ldmatrix_x4(a, at_s);
}
static __device__ __forceinline__ void load_frag_a_trans(uint32_t *a, smem_addr at_s) {
    ldmatrix_x4_trans(a, at_s);
}
static __device__ __forceinline__ void load_frag_b(uint32_t *b, smem_addr at_s) {
    ldmatrix_x4(b, at_s);
}
static __device__ __forceinline__ void load_frag_b_trans(uint32_t *b, smem_addr at_s) {
    ldmatrix_x4_trans(b, at_s);
}

// ---- c += a b -----------------------------------------------------------------------------------
// c [16][8]; a [16][16], b [16][8]. With float (tf32): a [16][8], b [8][8].

template <typename T>
static __device__ __forceinline__ void mma_add(float *c, const uint32_t *a,
                                               const uint32_t *b) = delete;
template <>
__device__ __forceinline__ void mma_add<__nv_bfloat16>(float *c, const uint32_t *a,
                                                       const uint32_t *b) {
    mma_m16n8k16_bf16(c, a, b);
}
template <>
__device__ __forceinline__ void mma_add<__half>(float *c, const uint32_t *a, const uint32_t *b) {
    mma_m16n8k16_f16(c, a, b);
}
template <>
__device__ __forceinline__ void mma_add<float>(float *c, const uint32_t *a, const uint32_t *b) {
    mma_m16n8k8_tf32(c, a, b);
}

// ---- accumulators as operands -------------------------------------------------------------------

// Accumulators [16][8] of columns 0 to 7 and 8 to 15 become the A operand [16][16] of the next
// product, without moving between lanes.
template <typename T>
static __device__ __forceinline__ void acc_to_a(uint32_t *a, const float *left,
                                                const float *right) {
    a[0] = pack2<T>(left[0], left[1]);
    a[1] = pack2<T>(left[2], left[3]);
    a[2] = pack2<T>(right[0], right[1]);
    a[3] = pack2<T>(right[2], right[3]);
}

// One accumulator [16][8] becomes the B operand [16 k][8 n] of the next product. Its two 8x8
// halves are transposed.
template <typename T> static __device__ __forceinline__ void acc_to_b(uint32_t *b, const float *c) {
    b[0] = movmatrix_trans(pack2<T>(c[0], c[1]));
    b[1] = movmatrix_trans(pack2<T>(c[2], c[3]));
}

#endif
