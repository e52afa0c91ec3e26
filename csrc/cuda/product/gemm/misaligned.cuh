/* SPDX-License-Identifier: BSD-3-Clause */
/* misaligned.cuh: copies misaligned rows of 16-bit elements into a tile in shared memory, for
 * gemm_skinny. First it copies the aligned 16-byte chunks that contain a row. These are one more
 * than a row of the tile has. Then it shifts the row's elements into the tile.
 *
 *   memory   . . x0 x1 x2 .. | .. x13 x14 0
 *   tile     x0 x1 x2 .. x7  | x8 .. x14 0
 *
 * `before` elements precede the row in its first chunk and are dropped. Zeros follow the last valid
 * element.
 *
 * The arithmetic is plain C++, so that the tests run the same functions. */
#ifndef GPUKERN_CUDA_GEMM_MISALIGNED_CUH
#define GPUKERN_CUDA_GEMM_MISALIGNED_CUH

#include "realign.cuh"
#ifdef __CUDACC__
#include "../../ptx/cp_async.cuh"
#include "../../ptx/smem.cuh"
#endif

/* The raw chunks of a tile's rows, row after row. */
template <class Tile> struct raw_rows {
    static constexpr int chunks = Tile::chunks + 1, count = Tile::rows * chunks, bytes = count * 16;
};

/* Number of elements between the previous multiple of 16 bytes and this address. */
GK_HD inline int elements_before(uintptr_t address) { return (int)(address / 2 % REALIGN_EACH); }

/* The bytes to copy of chunk `chunk`, up to the end of the row's `valid` elements. 0 for a row
 * without valid elements. */
GK_HD inline int raw_bytes(int chunk, int before, int valid) {
    const int bytes = (before + valid) * 2 - chunk * 16;
    return valid <= 0 || bytes <= 0 ? 0 : bytes < 16 ? bytes : 16;
}

#ifdef __CUDACC__
/* A warp copies the raw chunks of a tile's rows. Chunks of rows and columns that are not valid
 * become zeros. first: the lowest address of the tensor. Nothing before this address and nothing
 * behind a row's end is read. So the chunk that contains `first` is copied element by element. */
template <class Tile, class T>
__device__ __forceinline__ void copy_raw_rows(smem_addr raw_s, const T *from_g, int64_t row_stride,
                                              int rows_valid, int cols_valid, uintptr_t first,
                                              int lane) {
    typedef raw_rows<Tile> Raw;
#pragma unroll
    for (int i = 0; i < Raw::count; i += 32) {
        const int row = (i + lane) / Raw::chunks, chunk = (i + lane) % Raw::chunks;
        if (Raw::count % 32 != 0 && row >= Tile::rows) break;
        const T *row_g = from_g + row * row_stride;
        const int before = elements_before((uintptr_t)row_g);
        const char *at_g = (const char *)(row_g - before) + chunk * 16;
        const int bytes = row < rows_valid ? raw_bytes(chunk, before, cols_valid) : 0;
        const smem_addr to_s = raw_s + (i + lane) * 16;
        if (bytes > 0 && (uintptr_t)at_g < first) {
#pragma unroll 1
            for (int b = 0; b < 16; b += 2) {
                const bool inside = (uintptr_t)at_g + b >= first && b < bytes;
                st_shared_16(to_s + b, inside ? *(const uint16_t *)(at_g + b) : (uint16_t)0);
            }
        } else {
            cp_async_cg_16_l2_128b(to_s, at_g, bytes);
        }
    }
}

/* A warp shifts the raw chunks into the tile. from_g and row_stride give the rows' addresses in
 * memory, which determine the shifts. Only the addresses modulo 16 bytes matter. */
template <class Tile, class T>
__device__ __forceinline__ void shift_rows(smem_addr tile_s, smem_addr raw_s, const T *from_g,
                                           int64_t row_stride, int lane) {
    static_assert(Tile::rows * Tile::chunks % 32 == 0, "whole passes");
#pragma unroll
    for (int i = 0; i < Tile::rows * Tile::chunks; i += 32) {
        const int row = (i + lane) / Tile::chunks, chunk = (i + lane) % Tile::chunks;
        const smem_addr at_s = raw_s + (row * raw_rows<Tile>::chunks + chunk) * 16;
        const uint4 low = ld_shared_128(at_s), high = ld_shared_128(at_s + 16);
        uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        realign_shift(words, elements_before((uintptr_t)(from_g + row * row_stride)));
        st_shared_128(tile_s + Tile::offset(row, chunk),
                      make_uint4(words[0], words[1], words[2], words[3]));
    }
}
#endif

#endif
