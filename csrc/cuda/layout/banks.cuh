// SPDX-License-Identifier: BSD-3-Clause
// banks: swizzles, the bank conflicts of a warp's access, and tiles in shared memory whose
// accesses have none.
//
//   swizzle      the xor that spreads rows over banks
//   ways         how many passes one access of a warp needs, 1 being best. Kernels prove by
//                static_assert that their accesses are free of conflicts.
//   smem_box     the layout of rows in shared memory with its swizzle, as one value, from which
//                tensor maps are made (tma_box.cuh)
//   smem_tile    rows of 16-byte chunks in shared memory, swizzled
#ifndef GPUKERN_LAYOUT_BANKS_CUH
#define GPUKERN_LAYOUT_BANKS_CUH

#include "layout.cuh"

// ---- swizzle ------------------------------------------------------------------------------------

// Xors BITS bits of an offset, from bit BASE + SHIFT on, into the bits from BASE on. It is its
// own inverse. TMA's 32, 64 and 128-byte modes are swizzle<1, 4, 3>, <2, 4, 3> and <3, 4, 3> of
// byte addresses.
template <int BITS, int BASE, int SHIFT> struct swizzle {
    static_assert(BITS >= 0 && BASE >= 0 && SHIFT >= BITS,
                  "source and target bits must not overlap");
    static constexpr GK_HD int apply(int offset) {
        return offset ^ (((offset >> (BASE + SHIFT)) & ((1 << BITS) - 1)) << BASE);
    }
};

// ---- bank conflicts -----------------------------------------------------------------------------

// Passes that shared memory needs for lanes first to first + count - 1: the largest number of
// different 4-byte words in one of the 32 banks. Lanes that access the same word share it.
constexpr GK_HD int ways_of_phase(const int *bytes, int first, int count, int access_bytes) {
    int words[32] = {}, num_words = 0, words_of_bank[32] = {}, most = 0;
    for (int lane = first; lane < first + count; ++lane) {
        for (int b = 0; b < access_bytes; b += 4) {
            int word = (bytes[lane] + b) / 4, seen = 0;
            for (int i = 0; i < num_words; ++i) seen |= words[i] == word;
            if (seen) continue;
            words[num_words++] = word;
            if (++words_of_bank[word % 32] > most) most = words_of_bank[word % 32];
        }
    }
    return most;
}

// The bank-conflict degree of one access: the worst of its phases; 1 is free of conflicts.
// bytes: the byte address of each lane, a multiple of access_bytes (1 to 16). A phase serves 128
// bytes: 8 lanes of 16 bytes, 16 of 8, or 32 of fewer. An ldmatrix is a 16-byte access by the
// lanes that give it addresses: 8, 16 or 32.
template <int LANES> constexpr GK_HD int ways(const int (&bytes)[LANES], int access_bytes) {
    int lanes = access_bytes > 8 ? 8 : access_bytes > 4 ? 16 : 32, most = 0;
    for (int first = 0; first < LANES; first += lanes) {
        int degree = ways_of_phase(bytes, first, first + lanes < LANES ? lanes : LANES - first,
                                   access_bytes);
        if (degree > most) most = degree;
    }
    return most;
}

// ---- a tile in shared memory --------------------------------------------------------------------

// Number of bits of the chunk's index that a tile xors. Wider rows need more, since more of them
// start in the same bank.
constexpr GK_HD int smem_xor_bits(int row_bytes) {
    return row_bytes % 128 == 0 ? 3 : row_bytes % 64 == 0 ? 2 : row_bytes % 32 == 0 ? 1 : 0;
}

constexpr GK_HD int smem_offset(int row_bytes, int row, int chunk) {
    int bits = smem_xor_bits(row_bytes);
    return row * row_bytes + (chunk ^ ((row >> (3 - bits)) & ((1 << bits) - 1))) * 16;
}

// The worst conflict degree of two access patterns: ldmatrix, transposed or not (8 rows, one
// chunk), and 16-byte accesses along rows (cp.async, ld, st). The pattern repeats after 8 rows.
constexpr GK_HD int smem_tile_ways(int row_bytes) {
    int chunks = row_bytes / 16, most = 0;
    for (int c = 0; c < chunks; ++c) {
        int down[8] = {}, along[8] = {};
        for (int i = 0; i < 8; ++i) {
            int linear = 8 * c + i;
            down[i] = smem_offset(row_bytes, i, c);
            along[i] = smem_offset(row_bytes, linear / chunks, linear % chunks);
        }
        int degree = ways(down, 16) > ways(along, 16) ? ways(down, 16) : ways(along, 16);
        if (degree > most) most = degree;
    }
    return most;
}

// The layout of rows in shared memory as one value. The element at coordinate (column, row,
// plane) has the offset that `lies` gives, whose byte address is then swizzled by
// swizzle<swizzle_bits, 4, 3>.
struct smem_box {
    layout lies;
    int elem_bytes, swizzle_bits;
};

// Consecutive rows of row_bytes, in consecutive planes. Rows of 64 and 128 bytes are swizzled.
constexpr GK_HD smem_box smem_rows(int elem_bytes, int row_bytes, int rows, int planes = 1) {
    const int cols = row_bytes / elem_bytes;
    return {{3, {cols, rows, planes}, {1, cols, cols * rows}},
            elem_bytes,
            row_bytes == 128 || row_bytes == 64 ? smem_xor_bits(row_bytes) : 0};
}

// ROWS consecutive rows of ROW_BYTES (a multiple of 16). The 16-byte chunks of a row are
// swizzled so that ldmatrix and 16-byte accesses along rows have no bank conflicts. Rows of 32,
// 64 and 128 bytes have TMA's layout.
//
// The swizzle depends only on row % 8. So a lane computes one address and steps from it:
//   down(at, rows)     rows is a multiple of 8. Costs one addition, or nothing if rows is a
//                      constant, which becomes an immediate of the load.
//   along(at, chunks)  Costs one xor of a constant, and an immediate. The low 3 bits of chunks
//                      and of the chunk of `at` must have no bit in common, which holds for even
//                      steps from chunk 0 or 1.
template <int ROWS, int ROW_BYTES> struct smem_tile {
    static_assert(ROWS > 0 && ROW_BYTES > 0 && ROW_BYTES % 16 == 0,
                  "rows are whole chunks of 16 bytes");
    static_assert(smem_tile_ways(ROW_BYTES) == 1,
                  "ldmatrix, cp.async and row accesses must be free of conflicts");
    static constexpr int rows = ROWS, row_bytes = ROW_BYTES, chunks = ROW_BYTES / 16,
                         bytes = ROWS * ROW_BYTES;
    static constexpr int align_bytes = 128; // of the tile's first byte, so that a xor never carries
    static constexpr int xor_mask = (1 << smem_xor_bits(ROW_BYTES)) - 1;

    static constexpr GK_HD int offset(int row, int chunk) {
        return smem_offset(ROW_BYTES, row, chunk);
    }
    // The byte offset of an element of elem_bytes (at most 16).
    static constexpr GK_HD int offset_of(int row, int col, int elem_bytes) {
        return offset(row, col * elem_bytes / 16) + col * elem_bytes % 16;
    }
    // The address of a chunk of the row whose chunk 0 lies at `row`.
    static constexpr GK_HD unsigned chunk(unsigned row, int chunk) {
        static_assert(ROW_BYTES == 64 || ROW_BYTES == 128,
                      "the swizzle moves chunks within the row");
        return row ^ chunk * 16;
    }
    static constexpr GK_HD smem_box box(int elem_bytes) {
        static_assert(ROW_BYTES == 64 || ROW_BYTES == 128, "rows that TMA lays so, in one box");
        return smem_rows(elem_bytes, ROW_BYTES, ROWS);
    }
    static constexpr GK_HD unsigned down(unsigned at, int rows_down) {
        return at + rows_down * ROW_BYTES;
    }
    static constexpr GK_HD unsigned along(unsigned at, int chunks_along) {
        return (at ^ ((chunks_along & xor_mask) * 16)) + (chunks_along & ~xor_mask) * 16;
    }
};

#endif
