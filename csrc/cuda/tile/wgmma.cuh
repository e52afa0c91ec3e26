// wgmma: how operand tiles lie in shared memory for tma and wgmma, and the descriptors that say so.
//
// A tile is panels of 128-byte rows, 8 rows making a block of 1024 bytes in which 16-byte chunk c of row r lies at chunk
// c ^ r % 8 (swizzle<3, 4, 3>); panels start on multiples of 1024. 16-bit elements, 64 a row:
//   along k    rows are m or n, a panel has 64 of k        [x][64 k]
//   along x    rows are k, a panel has 64 of m or n        [64 k][64 x], one panel behind the other
#ifndef GPUKERN_TILE_WGMMA_CUH
#define GPUKERN_TILE_WGMMA_CUH

#include <stdint.h>

#include "layout.cuh"

enum {
    WGMMA_ROW_BYTES = 128,
    WGMMA_BLOCK_BYTES = 1024 // 8 rows
};

// Bits 0-13 address, 16-29 leading offset, 32-45 stride offset, each over 16; bits 62-63: 1 is the 128-byte swizzle.
// stride: from 8 rows to the next 8. leading: rows of k along x only, from a panel to the next.
constexpr GK_HD uint64_t wgmma_descriptor(uint32_t address, int leading_bytes, int stride_bytes) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 |
           (uint64_t)(stride_bytes >> 4) << 32 | (uint64_t)1 << 62;
}

// An operand of BX rows of a or columns of b and 64 of k.
template <int BX, bool ALONG_X> struct wgmma_tile {
    static constexpr int panels = ALONG_X ? (BX + 63) / 64 : 1, rows = ALONG_X ? 64 : BX;
    static constexpr int panel_bytes = rows * WGMMA_ROW_BYTES, bytes = panels * panel_bytes;
    static constexpr int k16_bytes = ALONG_X ? 16 * WGMMA_ROW_BYTES : 32; // from 16 of k to the next 16
    static_assert(panel_bytes % WGMMA_BLOCK_BYTES == 0, "panels are whole blocks");

    // Where x begins, a multiple of 64 along x, of 8 along k.
    static constexpr GK_HD int offset(int x) { return ALONG_X ? x / 64 * panel_bytes : x * WGMMA_ROW_BYTES; }
    static constexpr GK_HD uint64_t descriptor(uint32_t address) {
        return wgmma_descriptor(address, ALONG_X ? panel_bytes : 16, WGMMA_BLOCK_BYTES);
    }
    // The byte of element (x, k).
    static constexpr GK_HD int offset_of(int x, int k) {
        const int row = ALONG_X ? k : x, col = ALONG_X ? x % 64 : k;
        return (ALONG_X ? x / 64 * panel_bytes : 0) + swizzle<3, 4, 3>::apply(row * WGMMA_ROW_BYTES + col * 2);
    }
};

// What one of PARTS blocks that share such an operand copies of it: `boxes` boxes of 64 elements x `box_rows`; whole panels
// or rows of x, or where there are too few panels some k of each.
template <int BX, bool ALONG_X, int PARTS> struct wgmma_part {
    typedef wgmma_tile<BX, ALONG_X> tile;
    static constexpr bool of_k = ALONG_X && tile::panels % PARTS != 0;
    static constexpr int boxes = of_k ? tile::panels : ALONG_X ? tile::panels / PARTS : 1;
    static constexpr int box_rows = of_k ? 64 / PARTS : ALONG_X ? 64 : BX / PARTS;
    static constexpr int bytes = boxes * box_rows * WGMMA_ROW_BYTES;
    static_assert(BX % PARTS == 0 && box_rows % 8 == 0 && bytes * PARTS == tile::bytes, "parts are whole blocks");

    // Where box i of a part begins: in x, in k, and as a byte of the tile.
    static constexpr GK_HD int x(int part, int i) {
        return of_k ? i * 64 : ALONG_X ? (part * boxes + i) * 64 : part * box_rows;
    }
    static constexpr GK_HD int k(int part) { return of_k ? part * box_rows : 0; }
    static constexpr GK_HD int offset(int part, int i) { return tile::offset(x(part, i)) + k(part) * WGMMA_ROW_BYTES; }
};

// Element (row, column) of d[e] of wgmma in a lane of warp 0 to 3.
constexpr GK_HD coord wgmma_d(int warp, int lane, int e) {
    return {16 * warp + (lane >> 2) + 8 * (e >> 1 & 1), 8 * (e >> 2) + 2 * (lane & 3) + (e & 1)};
}

#endif
