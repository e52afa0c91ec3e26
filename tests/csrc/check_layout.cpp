/* SPDX-License-Identifier: BSD-3-Clause */
/* check_layout: tests csrc/cuda/layout and gemm/order.cuh on the host.
 *
 *  check_layout         compares fragments with the formulas of the PTX ISA, operands with a
 *                       model of WGMMA, and conflict degrees with cases worked out by hand.
 *                       Exits with 1 on a failure.
 *  check_layout dump    reads lines "what name ..." and prints the position of each element, one
 *                       line each, for tests/layout/test_layout_headers.py. */
#include "cuda/layout/atoms.cuh"
#include "cuda/layout/wgmma.cuh"

// the definitions that order.cuh needs in place of a device's
#define __device__
#define __forceinline__ inline
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
#include "cuda/product/gemm/order.cuh"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

constexpr int one_on[2] = {1, 1};
static_assert(at(layout{2, {4, 8}, {8, 1}}, one_on) == 9, "");
static_assert(smem_tile_ways(128) == 1 && smem_tile<64, 128>::offset(1, 0) == 128 + 16, "");

// Operand descriptors of today's kernels; tests/data/layout.golden has more of each.
static_assert(wgmma_tile<128, false>::descriptor(1024) == 4611686293305360448u, "");
static_assert(wgmma_tile<128, true>::descriptor(1024) == 4611686293338849344u, "");
static_assert(wgmma_tile<128, false>::offset_of(4, 0) == 576 &&
                  wgmma_tile<128, true>::offset_of(4, 8) == 1032,
              "");
static_assert(wgmma_panels<64, 128>::offset_of(4, 64) == 8192 + 576, "");
static_assert(frag_a16(5, 2).row == 9 && frag_a16(5, 2).col == 2 && frag_c(5, 3).row == 9, "");

static long num_passed, num_failed;

static void check(bool good, const char *format, ...) {
    if (good) {
        ++num_passed;
        return;
    }
    if (++num_failed > 40) return; // enough to see a pattern
    va_list list;
    va_start(list, format);
    printf("FAILED ");
    vprintf(format, list);
    printf("\n");
    va_end(list);
}

// The offset of an index; the first mode is the fastest.
static int at_index(const layout &l, int index) {
    int coordinate[LAYOUT_MAX_MODES] = {};
    for (int m = 0; m < l.modes; index /= l.shape[m++]) coordinate[m] = index % l.shape[m];
    return at(l, coordinate);
}

// ---- positions of elements, for tests/data/layout.golden ---------------------------------------

// Row + rows * column for each element e of each lane l.
template <typename Map> static void print_elements(Map map, int rows, int elements) {
    for (int i = 0; i < 32 * elements; ++i) {
        coord at = map(i % 32, i / 32);
        printf("%d%c", at.row + rows * at.col, i + 1 < 32 * elements ? ' ' : '\n');
    }
}

static coord transposed(coord at) { return {at.col, at.row}; }

static int dump_fragments(const char *name) {
    if (strcmp(name, "c") == 0)
        print_elements(frag_c, 16, 4);
    else if (strcmp(name, "a16") == 0)
        print_elements(frag_a16, 16, 8);
    else if (strcmp(name, "b16") == 0) // by n + 8 k
        print_elements([](int lane, int e) { return transposed(frag_b16(lane, e)); }, 8, 4);
    else if (strcmp(name, "a32") == 0)
        print_elements(frag_a32, 16, 4);
    else if (strcmp(name, "b32") == 0)
        print_elements([](int lane, int e) { return transposed(frag_b32(lane, e)); }, 8, 2);
    else if (strcmp(name, "ldmatrix") == 0)
        print_elements([](int lane, int half) { return ldmatrix_element(lane, half, false); }, 8,
                       2);
    else if (strcmp(name, "ldmatrix.trans") == 0)
        print_elements([](int lane, int half) { return ldmatrix_element(lane, half, true); }, 8, 2);
    else if (strcmp(name, "movmatrix") == 0)
        print_elements(movmatrix_element, 8, 2);
    else
        return 2;
    return 0;
}

// The descriptor of the operand at byte 1024, then the byte of each element (x, k), for 16 of x and
// every 16th byte of k.
template <typename Tile> static void print_operand(int each_chunk, int k) {
    printf("%llu", (unsigned long long)Tile::descriptor(1024));
    for (int x = 0; x < 16; ++x) {
        for (int i = 0; i < k; i += each_chunk) printf(" %d", Tile::offset_of(x * 4, i));
    }
    printf("\n");
}

static int dump_operand(const char *name) {
    if (strcmp(name, "k64") == 0)
        print_operand<wgmma_tile<64, false>>(8, 64);
    else if (strcmp(name, "k128") == 0)
        print_operand<wgmma_tile<128, false>>(8, 64);
    else if (strcmp(name, "mn128") == 0)
        print_operand<wgmma_tile<128, true>>(8, 64);
    else if (strcmp(name, "tf32") == 0)
        print_operand<wgmma_tile<64, false, 32>>(4, 32);
    else
        return 2;
    return 0;
}

// The conflict degree of lanes that access access_bytes each, `stride` bytes apart.
static int strided_ways(int access_bytes, int stride) {
    int bytes[32];
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = lane * stride;
    return ways(bytes, access_bytes);
}

static int dump_place(const char *name, const char *what, const char *more) {
    if (strcmp(name, "fragment") == 0) return dump_fragments(what);
    if (strcmp(name, "operand") == 0) return dump_operand(what);
    if (strcmp(name, "ways") == 0) return printf("%d\n", strided_ways(atoi(what), atoi(more))) < 0;
    if (strcmp(name, "tile") != 0) return 2;
    for (int i = 0, chunks = atoi(what) / 16; i < 16 * chunks; ++i)
        printf("%d%c", smem_offset(atoi(what), i / chunks, i % chunks),
               i + 1 < 16 * chunks ? ' ' : '\n');
    return 0;
}

static int dump() {
    char name[32], first[256], second[256], line[600];
    while (fgets(line, sizeof line, stdin)) {
        const int n = sscanf(line, "%31s %255s %255s", name, first, second);
        if (n < 2 || (strcmp(name, "ways") == 0 && n != 3) || dump_place(name, first, second))
            return 2;
    }
    return 0;
}

// ---- swizzles and banks -------------------------------------------------------------------------

template <int BITS, int BASE, int SHIFT> static void check_swizzle() {
    typedef swizzle<BITS, BASE, SHIFT> S;
    static bool hit[4096];
    memset(hit, 0, sizeof hit);
    bool good = true;
    for (int i = 0; i < 4096; ++i) {
        int j = S::apply(i);
        good = good && j >= 0 && j < 4096 && !hit[j] && S::apply(j) == i &&
               (j >> (BASE + SHIFT)) == (i >> (BASE + SHIFT));
        if (j >= 0 && j < 4096) hit[j] = true;
    }
    check(good, "swizzle<%d, %d, %d> is no bijection", BITS, BASE, SHIFT);
}

// Conflict degree of 32 lanes (8 for 16-byte accesses) that read `column` of rows of row_bytes.
// xored computes the swizzle.
static int ways_of_column(int row_bytes, int access_bytes, int (*xored)(int row, int byte),
                          int column) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) {
        bytes[lane] =
            lane * row_bytes + (xored ? xored(lane, column * access_bytes) : column * access_bytes);
    }
    return ways(bytes, access_bytes);
}

static int xor_row_by_32(int row, int byte) { return byte ^ ((row >> 5 & 7) * 4); }
static int xor_row(int row, int byte) { return byte ^ (row % 32 * 4); }
static int xor_chunk_row(int row, int byte) { return byte ^ ((row & 7) * 16); }
static int xor_chunk_row_by_8(int row, int byte) { return byte ^ ((row >> 3 & 7) * 16); }
static int swizzle_333_of_128(int row, int byte) {
    return 2 * swizzle<3, 3, 3>::apply(row * 128 + byte / 2) - row * 256;
}
static int swizzle_334_of_128(int row, int byte) {
    return 2 * swizzle<3, 3, 4>::apply(row * 128 + byte / 2) - row * 256;
}
static int swizzle_333_of_64(int row, int byte) {
    return 2 * swizzle<3, 3, 3>::apply(row * 64 + byte / 2) - row * 128;
}

static void check_ways() {
    struct {
        const char *name;
        int expected, got;
    } cases[] = {
        {"float [32][32], a column", 32, ways_of_column(128, 4, NULL, 3)},
        {"float, col ^ (row >> 5 & 7)", 32, ways_of_column(128, 4, xor_row_by_32, 3)},
        {"float [32][33]", 1, ways_of_column(132, 4, NULL, 3)},
        {"float, col ^ row", 1, ways_of_column(128, 4, xor_row, 3)},
        {"float, every second", 2, ways_of_column(8, 4, NULL, 0)},
        {"float, neighbours", 1, ways_of_column(4, 4, NULL, 0)},
        {"float, all the same", 1, ways_of_column(0, 4, NULL, 0)},
        {"16 bits, neighbours", 1, ways_of_column(2, 2, NULL, 0)},
        {"16 bits, [128][129]", 2, ways_of_column(258, 2, NULL, 0)},
        {"16 bits, [128][130]", 1, ways_of_column(260, 2, NULL, 0)},
        {"8 bytes, neighbours", 1, ways_of_column(8, 8, NULL, 0)},
        {"8 bytes, rows of 128", 16, ways_of_column(128, 8, NULL, 0)},
        {"8 bytes, rows of 136", 1, ways_of_column(136, 8, NULL, 0)},
        {"16 bytes, neighbours", 1, ways_of_column(16, 16, NULL, 0)},
        {"16 bytes, every second", 2, ways_of_column(32, 16, NULL, 0)},
        {"ldmatrix, rows of 128 bytes", 8, ways_of_column(128, 16, NULL, 1)},
        {"ldmatrix, chunk ^ (row & 7)", 1, ways_of_column(128, 16, xor_chunk_row, 1)},
        {"ldmatrix, chunk ^ (row >> 3)", 8, ways_of_column(128, 16, xor_chunk_row_by_8, 1)},
        {"ldmatrix, rows of 144 bytes", 1, ways_of_column(144, 16, NULL, 1)},
        {"ldmatrix, swizzle<3,3,3> of 128 columns", 2,
         ways_of_column(256, 16, swizzle_333_of_128, 5)},
        {"ldmatrix, swizzle<3,3,4> of 128 columns", 1,
         ways_of_column(256, 16, swizzle_334_of_128, 5)},
        {"ldmatrix, swizzle<3,3,3> of 64 columns", 1,
         ways_of_column(128, 16, swizzle_333_of_64, 5)},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        check(cases[i].got == cases[i].expected, "%s: %d ways, expected %d", cases[i].name,
              cases[i].got, cases[i].expected);
    }
}

// ---- tiles --------------------------------------------------------------------------------------

template <int ROW_BYTES> static void check_tile() {
    typedef smem_tile<40, ROW_BYTES> Tile;
    static int hits[40 * 64];
    memset(hits, 0, sizeof hits);
    bool places = Tile::bytes == 40 * ROW_BYTES, steps = true, tma = true;
    for (int row = 0; row < 40; ++row) {
        for (int chunk = 0; chunk < Tile::chunks; ++chunk) {
            int offset = Tile::offset(row, chunk), plain = row * ROW_BYTES + chunk * 16;
            places = places && offset % 16 == 0 && offset >= row * ROW_BYTES &&
                     offset < (row + 1) * ROW_BYTES && ++hits[offset / 16] == 1 &&
                     Tile::offset_of(row, chunk * 8 + 3, 2) == offset + 6 &&
                     Tile::offset_of(row, chunk * 4 + 1, 4) == offset + 4;
            if (ROW_BYTES == 32) tma = tma && offset == swizzle<1, 4, 3>::apply(plain);
            if (ROW_BYTES == 64) tma = tma && offset == swizzle<2, 4, 3>::apply(plain);
            if (ROW_BYTES == 128) tma = tma && offset == swizzle<3, 4, 3>::apply(plain);
            for (unsigned base = 0; base < 1024; base += Tile::align_bytes) {
                if (row < 32)
                    steps = steps &&
                            Tile::down(base + offset, 8) == base + Tile::offset(row + 8, chunk);
                for (int more = 0; chunk < 2 && chunk + more < Tile::chunks; more += 2) {
                    steps = steps && Tile::along(base + offset, more) ==
                                         base + Tile::offset(row, chunk + more);
                }
            }
        }
    }
    check(places, "rows of %d bytes: chunks collide or lie outside", ROW_BYTES);
    check(steps, "rows of %d bytes: a step and a new offset differ", ROW_BYTES);
    check(tma, "rows of %d bytes do not lie as TMA lays them", ROW_BYTES);
    check(smem_tile_ways(ROW_BYTES) == 1, "rows of %d bytes have conflicts", ROW_BYTES);
    // ldmatrix.x4 in both orders, over all blocks, as one access of 32 lanes
    for (int row = 0; row < 32; row += 8) {
        for (int chunk = 0; chunk + 1 < Tile::chunks && row + 16 <= 40; chunk += 2) {
            int down[32] = {}, along[32] = {};
            for (int lane = 0; lane < 32; ++lane) {
                coord d = ldmatrix_down_first(lane), a = ldmatrix_along_first(lane);
                down[lane] = Tile::offset(row + d.row, chunk + d.col);
                along[lane] = Tile::offset(row + a.row, chunk + a.col);
            }
            check(ways(down, 16) == 1 && ways(along, 16) == 1,
                  "ldmatrix in rows of %d bytes at %d, %d: conflicts", ROW_BYTES, row, chunk);
        }
    }
}

// ---- fragments ----------------------------------------------------------------------------------

static bool equal(coord a, coord b) { return a.row == b.row && a.col == b.col; }

// The PTX ISA's own formulas with groupID and threadID_in_group, and a case for each range of
// registers.
static void check_fragment_formulas() {
    for (int lane = 0; lane < 32; ++lane) {
        int group = lane / 4, in_group = lane % 4;
        for (int i = 0; i < 8; ++i) {
            coord expected = {i < 2 || (i >= 4 && i < 6) ? group : group + 8,
                              i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8};
            check(equal(frag_a16(lane, i), expected), "m16n8k16 A, lane %d, a%d", lane, i);
        }
        for (int i = 0; i < 4; ++i) {
            coord b = {i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8, group};
            coord c = {i < 2 ? group : group + 8, in_group * 2 + (i & 1)};
            coord a = {i == 0 || i == 2 ? group : group + 8, i < 2 ? in_group : in_group + 4};
            check(equal(frag_b16(lane, i), b), "m16n8k16 B, lane %d, b%d", lane, i);
            check(equal(frag_c(lane, i), c), "m16n8 C, lane %d, c%d", lane, i);
            check(equal(frag_a32(lane, i), a), "m16n8k8 tf32 A, lane %d, a%d", lane, i);
        }
        for (int i = 0; i < 2; ++i) {
            coord b = {i == 0 ? in_group : in_group + 4, group};
            check(equal(frag_b32(lane, i), b), "m16n8k8 tf32 B, lane %d, b%d", lane, i);
            check(equal(ldmatrix_element(lane, i, false), coord{group, in_group * 2 + i}),
                  "ldmatrix, lane %d", lane);
            check(equal(ldmatrix_element(lane, i, true), coord{in_group * 2 + i, group}),
                  "ldmatrix.trans, lane %d", lane);
        }
    }
    // The same maps as layouts of (lane, register) in a column-major matrix, as they are usually
    // written.
    layout c = {4, {4, 8, 2, 2}, {32, 1, 16, 8}}, a = {5, {4, 8, 2, 2, 2}, {32, 1, 16, 8, 128}};
    for (int i = 0; i < 32 * 8; ++i) {
        coord in_c = frag_c(i % 32, i / 32), in_a = frag_a16(i % 32, i / 32);
        if (i < 32 * 4)
            check(at_index(c, i) == in_c.row + 16 * in_c.col, "C as a layout, at %d", i);
        check(at_index(a, i) == in_a.row + 16 * in_a.col, "A as a layout, at %d", i);
    }
}

// The element that a lane's register `matrix` holds after an ldmatrix.x4 whose lanes point at
// `order`: (row, column of 16 bits).
static coord loaded(coord (*order)(int), int lane, int matrix, int half, bool trans) {
    coord element = ldmatrix_element(lane, half, trans);
    coord row = order(8 * matrix + element.row);
    return {row.row, row.col * 8 + element.col};
}

static coord flipped(coord c) { return {c.col, c.row}; }

static void check_fragment_loads() {
    coord (*down)(int) = ldmatrix_down_first;
    coord (*along)(int) = ldmatrix_along_first;
    for (int lane = 0; lane < 32; ++lane) {
        check(ldmatrix_matrix(lane) == lane / 8 && ldmatrix_row(lane) == lane % 8,
              "ldmatrix addresses, lane %d", lane);
        for (int e = 0; e < 8; ++e) {
            int n8 = e / 4; // b[0..1] is the B of n 0..7, b[2..3] that of n 8..15
            coord a = frag_a16(lane, e), b = frag_b16(lane, e % 4);
            b.col += 8 * n8;
            check(equal(loaded(down, lane, e / 2, e % 2, false), a), "A from [m][k], lane %d, %d",
                  lane, e);
            check(equal(flipped(loaded(along, lane, e / 2, e % 2, true)), a),
                  "A from [k][m], lane %d, %d", lane, e);
            check(equal(flipped(loaded(along, lane, e / 2, e % 2, false)), b),
                  "B from [n][k], lane %d, %d", lane, e);
            check(equal(loaded(down, lane, e / 2, e % 2, true), b), "B from [k][n], lane %d, %d",
                  lane, e);
        }
        // Two neighbouring accumulators are an A. One accumulator with its halves transposed is a
        // B.
        for (int e = 0; e < 8; ++e) {
            coord c = frag_c(lane, e % 4);
            c.col += 8 * (e / 4);
            check(equal(c, frag_a16(lane, e)), "accumulators as A, lane %d, %d", lane, e);
        }
        for (int e = 0; e < 4; ++e) {
            /* in the 8x8 matrix of rows from 8 (e / 2) on */
            coord source = movmatrix_element(lane, e % 2);
            check(equal(coord{source.row + 8 * (e / 2), source.col}, frag_b16(lane, e)),
                  "accumulator as B, lane %d, %d", lane, e);
        }
        // float32 through the same ldmatrix: a 32-bit element is two columns of 16 bits.
        for (int e = 0; e < 4; ++e) {
            coord a = loaded(down, lane, e, 0, false), b = loaded(along, lane, e, 0, false);
            coord expected_b = frag_b32(lane, e % 2);
            expected_b.col += 8 * (e / 2);
            check(equal(coord{a.row, a.col / 2}, frag_a32(lane, e)),
                  "tf32 A from [m][k], lane %d, %d", lane, e);
            check(equal(coord{b.col / 2, b.row}, expected_b), "tf32 B from [n][k], lane %d, %d",
                  lane, e);
        }
    }
}

// ---- tma and wgmma ------------------------------------------------------------------------------

// The byte at which TMA's 128-byte mode stores byte `linear` of a box and at which WGMMA reads it:
// bits 4 .. 6 of the address xored with bits 7 .. 9.
static uint32_t swizzled_128(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// All parts of a tile as boxes of EACH elements x rows of 128 bytes, one behind the other.
template <int BX, bool ALONG_X, int PARTS, int EACH> static void check_part() {
    typedef wgmma_part<BX, ALONG_X, PARTS, EACH> Part;
    typedef wgmma_tile<BX, ALONG_X, EACH> Tile;
    constexpr int BYTES = 128 / EACH;
    static int hits[256 * 64];
    memset(hits, 0, sizeof hits);
    bool blocks = true, places = true, inside = true, once = true;
    int x_hits = 0;
    for (int part = 0; part < PARTS; ++part) {
        for (int i = 0; i < Part::boxes; ++i) {
            const int start = Part::offset(part, i);
            blocks = blocks && start % 1024 == 0 && Part::box_rows <= 256;
            for (int row = 0; row < Part::box_rows; ++row) {
                for (int col = 0; col < EACH; ++col) {
                    const int at = (int)swizzled_128(start + row * 128 + col * BYTES);
                    const int x = Part::x(part, i) + (ALONG_X ? col : row),
                              k = Part::k(part) + (ALONG_X ? row : col);
                    inside = inside && at >= 0 && at < Tile::bytes && k < EACH;
                    if (at < Tile::bytes) ++hits[at / BYTES];
                    if (x >= BX) continue; // of the last panel, if BX is no multiple of EACH
                    ++x_hits;
                    places = places && at == Tile::offset_of(x, k);
                }
            }
        }
    }
    for (int i = 0; i < Tile::bytes / BYTES; ++i) once = once && hits[i] == 1;
    check(blocks && inside, "%d parts of %d x %d, %d: a box lies outside or on no block", PARTS, BX,
          EACH, ALONG_X);
    check(places, "%d parts of %d x %d, %d: tma puts an element elsewhere", PARTS, BX, EACH,
          ALONG_X);
    check(once && x_hits == BX * EACH, "%d parts of %d x %d, %d: not every byte once", PARTS, BX,
          EACH, ALONG_X);
}

// Tiles that end outside the matrix. The copied boxes contain everything inside the matrix, smaller
// boxes contain nothing else, and they bring as many bytes as their consumers wait for.
template <int BX, bool ALONG_X, int PARTS, int EACH> static void check_part_ends() {
    typedef wgmma_part<BX, ALONG_X, PARTS, EACH> Part;
    bool bytes = true, all = true, lower = true;
    for (int left = -BX; left <= 2 * BX; ++left) {
        int brought = 0, x_hits = 0;
        for (int part = 0; part < PARTS; ++part) {
            for (int i = 0; i < Part::boxes_of(part, left); ++i) {
                /* The host makes the tensor map of the tile's end from the remaining rows of the
                 * matrix after whole boxes; `left` has the same remainder. */
                const int rows = Part::ends(part, left) ? left % Part::box_rows : Part::box_rows;
                const int first = Part::x(part, i), count = ALONG_X ? EACH : rows;
                brought += rows * WGMMA_ROW_BYTES;
                lower = lower && rows > 0 &&
                        (ALONG_X ? first < left : first + count <= (left < BX ? left : BX));
                if (Part::k(part) > 0) continue; /* the same x as an earlier part */
                for (int x = first; x < first + count && x < BX; ++x) x_hits += x < left;
            }
        }
        bytes = bytes && brought == Part::bytes_of(left);
        all = all && x_hits == (left < 0 ? 0 : left < BX ? left : BX);
    }
    check(bytes, "%d parts of %d x %d, %d: consumers of an ending tile wait for other bytes", PARTS,
          BX, EACH, ALONG_X);
    check(all && lower, "%d parts of %d x %d, %d: an ending tile is copied wrongly", PARTS, BX,
          EACH, ALONG_X);
}

// The byte that WGMMA reads for element (x, k16) of the operand of a descriptor, with elements of
// `bytes`. x counts from the descriptor's start.
static uint32_t wgmma_reads(uint64_t descriptor, bool along_x, int x, int k, int bytes) {
    const uint32_t start = (uint32_t)(descriptor & 0x3fff) << 4,
                   leading = (uint32_t)(descriptor >> 16 & 0x3fff) << 4,
                   stride = (uint32_t)(descriptor >> 32 & 0x3fff) << 4;
    if (along_x)
        return swizzled_128(start + x / 64 * leading + k / 8 * stride + k % 8 * 128 + x % 64 * 2);
    return swizzled_128(start + x / 8 * stride + x % 8 * 128 + k * bytes);
}

// Every position at which a product can start: 64 rows of a, or all of b.
template <int BX, bool ALONG_X, int EACH> static void check_descriptor() {
    typedef wgmma_tile<BX, ALONG_X, EACH> Tile;
    bool fields = true, reads = true;
    for (uint32_t base = 0; base < 3 * 65536; base += 13 * 1024) {
        for (int first = 0; first < BX; first += 64) {
            for (int k = 0; k < EACH; k += EACH / 4) {
                const uint64_t d = Tile::descriptor(base + Tile::offset(first) +
                                                    k / (EACH / 4) * Tile::step_bytes);
                fields =
                    fields && d >> 62 == 1 && (d >> 46 & 0xffff) == 0 && (d & 0xc000c000c000) == 0;
                for (int x = 0; first + x < BX; ++x)
                    for (int e = 0; e < EACH / 4; ++e)
                        reads = reads && wgmma_reads(d, ALONG_X, x, e, 128 / EACH) ==
                                             base + Tile::offset_of(first + x, k + e);
            }
        }
    }
    check(fields, "descriptor of %d x %d, %d: wrong mode, or bits where none belong", BX, EACH,
          ALONG_X);
    check(reads, "descriptor of %d x %d, %d: wgmma reads another byte", BX, EACH, ALONG_X);
}

template <int BX, bool ALONG_X, int EACH> static void check_parts() {
    check_part<BX, ALONG_X, 1, EACH>(), check_part_ends<BX, ALONG_X, 1, EACH>();
    if constexpr (BX % 64 == 0 || BX == 224)
        check_part<BX, ALONG_X, 2, EACH>(), check_part_ends<BX, ALONG_X, 2, EACH>();
    if constexpr (BX % 64 == 0)
        check_part<BX, ALONG_X, 4, EACH>(), check_part_ends<BX, ALONG_X, 4, EACH>();
}

template <int BX> static void check_operand() {
    check_descriptor<BX, false, 64>(), check_descriptor<BX, true, 64>();
    check_parts<BX, false, 64>(), check_parts<BX, true, 64>();
}

// tf32: WGMMA reads only operands that are contiguous along k. Along x the lanes' loads must read
// every element of a warpgroup's 128 x 8 once, where the ISA expects A's, with four consecutive
// values of a row from 16 bytes.
template <int BX> static void check_operand_tf32() {
    typedef wgmma_tile<BX, true, 32> Tile;
    check_descriptor<BX, false, 32>(), check_parts<BX, false, 32>();
    if constexpr (BX % 128 == 0) {
        static int hits[BX * 32];
        memset(hits, 0, sizeof hits);
        bool good = true;
        for (int thread = 0; thread < BX; ++thread) { // of BX / 128 warpgroups
            const int warp = thread / 32, lane = thread % 32,
                      first = warp * 32 + 4 * tf32_chunk(lane);
            for (int k8 = 0; k8 < 32; k8 += 8) {
                for (int e = 0; e < 2; ++e) { // frag_a32: the lane's k of a row
                    const int k = k8 + frag_a32(lane, 2 * e).col;
                    const int at = Tile::offset(warp * 32) + tf32_offset(lane, k);
                    for (int i = 0; i < 4; ++i)
                        good = good && at + 4 * i == Tile::offset_of(first + i, k) &&
                               ++hits[(first + i) * 32 + k] == 1;
                }
            }
        }
        for (int i = 0; i < BX * 32; ++i) good = good && hits[i] == 1;
        check(good, "tf32 from registers, %d rows: not every element once", BX);
        check_parts<BX, true, 32>();
    }
}

// Each of 64 x N once, by the ISA's formula: D0 .. D(N / 2 - 1) of warp, groupID and
// threadID_in_group.
static void check_wgmma_d(int n) {
    static int hits[64 * 256];
    memset(hits, 0, sizeof hits);
    bool good = true;
    for (int thread = 0; thread < 128; ++thread) {
        for (int e = 0; e < n / 2; ++e) {
            const coord d = wgmma_d(thread / 32, thread % 32, e);
            const int row = thread / 32 * 16 + thread % 32 / 4 + (e % 4 >= 2 ? 8 : 0);
            good = good && equal(d, coord{row, e / 4 * 8 + thread % 4 * 2 + e % 2}) &&
                   ++hits[d.row * n + d.col] == 1;
        }
    }
    for (int i = 0; i < 64 * n; ++i) good = good && hits[i] == 1;
    check(good, "wgmma_d of %d columns", n);
}

// ---- which cluster takes which tile -------------------------------------------------------------

// The persistent loop of gemm_sm90a: cluster c of `clusters` takes c, c + clusters, ..; each tile
// of each batch entry must come once.
static void check_schedule(int tiles_m, int tiles_n, int group, int batch, int clusters) {
    static int hits[4096];
    memset(hits, 0, sizeof hits);
    const unsigned tiles = (unsigned)tiles_m * tiles_n, all = tiles * batch;
    bool good = all <= 4096;
    const TileOrder order = tile_order(tiles_m, tiles_n, group);
    int most = 0;
    for (int c = 0; c < clusters; ++c) {
        int load = 0;
        for (unsigned t = c; t < all; t += clusters, ++load) {
            const TilePlace at = tile_place(t % tiles, tiles_m, tiles_n, group);
            const unsigned entry = order.tiles.into(t);
            const TilePlace same = tile_place(t - entry * tiles, order);
            good = good && entry == t / tiles && same.row == at.row && same.col == at.col;
            const bool inside = at.row >= 0 && at.row < tiles_m && at.col >= 0 && at.col < tiles_n;
            good = good && inside;
            if (inside) ++hits[(t / tiles * tiles_m + at.row) * tiles_n + at.col];
        }
        most = load > most ? load : most;
    }
    for (unsigned i = 0; i < all; ++i) good = good && hits[i] == 1;
    good = good && most == (int)((all + clusters - 1) / clusters);
    check(good, "%d x %d tiles in groups of %d, %d times, on %d clusters", tiles_m, tiles_n, group,
          batch, clusters);
}

static void check_schedules() {
    const int clusters[5] = {1, 2, 7, 66, 132};
    for (int m = 1; m <= 19; ++m)
        for (int n = 1; n <= 13; ++n)
            for (int group = 1; group <= 9; ++group)
                for (int c = 0; c < 5; ++c) check_schedule(m, n, group, 1 + m % 3, clusters[c]);
    for (int batch = 1; batch <= 5; ++batch) check_schedule(33, 17, 8, batch, 66);
    // the picture in order.cuh
    const int rows[12] = {0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3},
              cols[12] = {0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2};
    for (int t = 0; t < 12; ++t) {
        const TilePlace at = tile_place(t, 4, 3, 2);
        check(at.row == rows[t] && at.col == cols[t], "tile %d of 4 x 3 in groups of 2: %d, %d", t,
              at.row, at.col);
    }
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "dump") == 0) return dump();
    check_swizzle<1, 4, 3>(), check_swizzle<2, 4, 3>(), check_swizzle<3, 4, 3>(),
        check_swizzle<3, 3, 3>();
    check_swizzle<3, 3, 4>(), check_swizzle<2, 0, 5>(), check_swizzle<0, 4, 0>();
    check_ways();
    check_tile<16>(), check_tile<32>(), check_tile<48>(), check_tile<64>(), check_tile<80>(),
        check_tile<96>();
    check_tile<128>(), check_tile<160>(), check_tile<192>(), check_tile<224>(), check_tile<256>(),
        check_tile<320>();
    check_tile<384>(), check_tile<512>(), check_tile<640>(), check_tile<768>(), check_tile<1024>();
    check_fragment_formulas();
    check_fragment_loads();
    check_operand<64>(), check_operand<128>(), check_operand<192>(), check_operand<256>();
    check_operand<8>(), check_operand<16>(), check_operand<32>(), check_operand<96>(),
        check_operand<224>();
    check_operand_tf32<64>(), check_operand_tf32<128>(), check_operand_tf32<192>(),
        check_operand_tf32<256>();
    for (int n = 8; n <= 256; n += 8) check_wgmma_d(n);
    check_schedules();
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
