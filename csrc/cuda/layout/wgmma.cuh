// SPDX-License-Identifier: BSD-3-Clause
// wgmma: the layout of operand tiles in shared memory for TMA and WGMMA, and the descriptors for
// it.
//
// A tile consists of panels with rows of 128 bytes. 8 rows form a block of 1024 bytes, in which
// 16-byte chunk c of row r lies at chunk c ^ r % 8 (swizzle<3, 4, 3>). Panels start at multiples
// of 1024 bytes. A row has EACH elements: 64 of 16 bits or 32 of tf32.
//   along k (K-major)    rows are m or n, a panel has EACH of k        [x][EACH k]
//   along x (MN-major)   rows are k, a panel has EACH of m or n        [EACH k][EACH x]
// WGMMA reads tf32 K-major only. For MN-major tf32, the lanes load fragments and WGMMA takes
// them from registers (load_tf32).
#ifndef GPUKERN_LAYOUT_WGMMA_CUH
#define GPUKERN_LAYOUT_WGMMA_CUH

#include <stdint.h>

#include "banks.cuh"

enum {
    WGMMA_ROW_BYTES = 128,
    WGMMA_BLOCK_BYTES = 1024 // 8 rows
};

// Bits 0-13 address, 16-29 leading offset, 32-45 stride offset, each divided by 16; bits 62-63:
// 1 is the 128-byte swizzle. stride: distance from 8 rows to the next 8. leading: distance
// between panels, only used for MN-major tiles.
constexpr GK_HD uint64_t wgmma_descriptor(uint32_t address, int leading_bytes, int stride_bytes) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(leading_bytes >> 4) << 16 |
           (uint64_t)(stride_bytes >> 4) << 32 | (uint64_t)1 << 62;
}

// The descriptor of K-major 8 x 8 matrices of 128 bytes each, without swizzle. leading: distance
// from a matrix to the next one along K. stride: distance to the matrix of the next 8 rows; 0 reads
// the same rows again.
constexpr GK_HD uint64_t wgmma_plain_descriptor(uint32_t address, int leading_bytes,
                                                int stride_bytes) {
    return wgmma_descriptor(address, leading_bytes, stride_bytes) & ~((uint64_t)3 << 62);
}

// The descriptor of the same tile, `bytes` further on. bytes is a multiple of 16. It costs one
// addition per product. The address field can hold the end of shared memory, so nothing carries.
constexpr GK_HD uint64_t wgmma_descriptor_add(uint64_t descriptor, int bytes) {
    return descriptor >> 32 << 32 | (uint64_t)((uint32_t)descriptor + (uint32_t)(bytes >> 4));
}

// A panel's rows, or some of them: the box of one TMA copy. planes: consecutive panels in one
// copy.
constexpr GK_HD smem_box wgmma_box(int elem_bytes, int rows, int planes = 1) {
    return smem_rows(elem_bytes, WGMMA_ROW_BYTES, rows, planes);
}

// An operand tile of BX rows of a, or BX columns of b, and EACH elements of k.
template <int BX, bool ALONG_X, int EACH = 64> struct wgmma_tile {
    static constexpr int panels = ALONG_X ? (BX + EACH - 1) / EACH : 1, rows = ALONG_X ? EACH : BX;
    static constexpr int panel_bytes = rows * WGMMA_ROW_BYTES, bytes = panels * panel_bytes;
    // Distance along k between the parts that consecutive instructions read: 16 of 16 bits, 8 of
    // tf32.
    static constexpr int step_bytes = ALONG_X ? EACH / 4 * WGMMA_ROW_BYTES : 32;
    static_assert(panel_bytes % WGMMA_BLOCK_BYTES == 0, "panels are whole blocks");

    // Offset of x: a multiple of EACH for MN-major, of 8 for K-major.
    static constexpr GK_HD int offset(int x) {
        return ALONG_X ? x / EACH * panel_bytes : x * WGMMA_ROW_BYTES;
    }
    static constexpr GK_HD uint64_t descriptor(uint32_t address) {
        return wgmma_descriptor(address, ALONG_X ? panel_bytes : 16, WGMMA_BLOCK_BYTES);
    }
    // Byte offset of element (x, k).
    static constexpr GK_HD int offset_of(int x, int k) {
        const int row = ALONG_X ? k : x, col = ALONG_X ? x % EACH : k;
        return (ALONG_X ? x / EACH * panel_bytes : 0) +
               swizzle<3, 4, 3>::apply(row * WGMMA_ROW_BYTES + col * (WGMMA_ROW_BYTES / EACH));
    }
};

// A tile of ROWS rows of COLS 16-bit elements as TMA copies it: consecutive panels [ROWS][64] of
// 64 columns. One product may read its columns as k (K-major), and another as m or n (MN-major,
// rows are k).
template <int ROWS, int COLS> struct wgmma_panels {
    static constexpr int rows = ROWS, cols = COLS, panels = (COLS + 63) / 64;
    static constexpr int panel_bytes = ROWS * WGMMA_ROW_BYTES, bytes = panels * panel_bytes;
    static_assert(ROWS % 8 == 0, "panels are whole blocks");

    // The box of one panel.
    static constexpr GK_HD smem_box box() { return wgmma_box(2, ROWS); }
    // Byte offset of row `row`, a multiple of 8, and column `col`, a multiple of 16.
    static constexpr GK_HD int offset(int row, int col) {
        return col / 64 * panel_bytes + row * WGMMA_ROW_BYTES + col % 64 * 2;
    }
    // Byte offset of element (row, col).
    static constexpr GK_HD int offset_of(int row, int col) {
        return col / 64 * panel_bytes +
               swizzle<3, 4, 3>::apply(row * WGMMA_ROW_BYTES + col % 64 * 2);
    }
    // Steps from chunk 0 or 1 of a row by `chunks` 16-byte chunks, an even number.
    static constexpr GK_HD unsigned along(unsigned at, int chunks) {
        return (at ^ chunks % 8 * 16) + chunks / 8 * panel_bytes;
    }
    // Descriptor of 16 of k from column `col` on, for the rows from `row` on.
    static constexpr GK_HD uint64_t k_major(uint32_t tile_s, int row, int col) {
        return wgmma_descriptor_add(wgmma_descriptor(tile_s, 16, WGMMA_BLOCK_BYTES),
                                    offset(row, col));
    }
    // Descriptor of 16 of k from row `row` on, a multiple of 16, and all columns.
    static constexpr GK_HD uint64_t mn_major(uint32_t tile_s, int row) {
        return wgmma_descriptor_add(wgmma_descriptor(tile_s, panel_bytes, WGMMA_BLOCK_BYTES),
                                    offset(row, 0));
    }
};

// The part of such an operand that one of PARTS blocks copies when the blocks share the operand:
// `boxes` boxes of EACH elements x `box_rows`. A part is whole panels, or rows of x. If there are
// too few panels for that, it is some k of every panel.
template <int BX, bool ALONG_X, int PARTS, int EACH = 64> struct wgmma_part {
    typedef wgmma_tile<BX, ALONG_X, EACH> tile;
    static constexpr bool of_k = ALONG_X && tile::panels % PARTS != 0;
    static constexpr int boxes = of_k ? tile::panels : ALONG_X ? tile::panels / PARTS : 1;
    static constexpr int box_rows = of_k ? EACH / PARTS : ALONG_X ? EACH : BX / PARTS;
    static constexpr int bytes = boxes * box_rows * WGMMA_ROW_BYTES;
    static_assert(BX % PARTS == 0 && box_rows % 8 == 0 && bytes * PARTS == tile::bytes,
                  "parts are whole blocks");

    // Where box i of a part begins: in x, in k, and as a byte offset in the tile.
    static constexpr GK_HD int x(int part, int i) {
        return of_k ? i * EACH : ALONG_X ? (part * boxes + i) * EACH : part * box_rows;
    }
    static constexpr GK_HD int k(int part) { return of_k ? part * box_rows : 0; }
    static constexpr GK_HD int offset(int part, int i) {
        return tile::offset(x(part, i)) + k(part) * WGMMA_ROW_BYTES;
    }

    // These take `left`, the number of x from the tile's start to the matrix's edge, which may be 0
    // or more than BX.
    //   boxes_of   how many boxes of a part lie inside the matrix, at least partly
    //   ends       whether one of them crosses the edge and needs the map with the lower box
    //   bytes_of   bytes that the boxes of all parts bring
    static constexpr GK_HD int left_of(int part, int left) {
        return left > x(part, 0) ? left - x(part, 0) : 0;
    }
    static constexpr GK_HD int boxes_of(int part, int left) {
        const int mine = left_of(part, left), have = ALONG_X ? (mine + EACH - 1) / EACH : mine > 0;
        return have < boxes ? have : boxes;
    }
    static constexpr GK_HD bool ends(int part, int left) {
        return !ALONG_X && left_of(part, left) < box_rows;
    }
    static constexpr GK_HD int bytes_of(int left) {
        const int rows = left_of(0, left), have = ALONG_X ? (rows + EACH - 1) / EACH : rows;
        return ALONG_X ? (have < tile::panels ? have : tile::panels) * tile::panel_bytes
                       : (have < BX ? have : BX) * WGMMA_ROW_BYTES;
    }
};

// The (row, column) of d[e] of WGMMA, for a lane of warp 0 to 3.
constexpr GK_HD coord wgmma_d(int warp, int lane, int e) {
    return {16 * warp + (lane >> 2) + 8 * (e >> 1 & 1), 8 * (e >> 2) + 2 * (lane & 3) + (e & 1)};
}

// Bank conflicts of the lanes' stores of d transposed: columns of d become rows of `ld` floats.
constexpr GK_HD int wgmma_transposed_ways(int ld) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane)
        bytes[lane] = (wgmma_d(0, lane, 0).col * ld + wgmma_d(0, lane, 0).row) * 4;
    return ways(bytes, 4);
}

// MN-major tf32 as operand A from registers. A's rows may stand for any x, as long as the rows of d
// mean the same x. Row 16 warp + lane / 4 + 8 h of product m (0 or 1) is x = 32 warp + 4
// tf32_chunk(lane) + 2 m + h. So the four values of a lane are adjacent in the warp's panel, for
// any k. The order of the chunks avoids bank conflicts both in these loads and in stores of d's
// rows.
constexpr GK_HD int tf32_chunk(int lane) { return (lane >> 3) ^ (lane >> 2 & 1) * 5; }

// Byte offset of those four values in the warp's panel.
constexpr GK_HD int tf32_offset(int lane, int k) {
    return swizzle<3, 4, 3>::apply(k * WGMMA_ROW_BYTES + tf32_chunk(lane) * 16);
}

#endif
