/* check_skew: csrc/cuda/gemm/skew.cuh on the host: random matrices through the functions that the kernel is made of: pieces of
 * rows go into a tile chunk by chunk, and the lanes' fragments come out of it. Every element of a fragment must be the
 * right one, what lies behind the end of a row zero, and every byte that is read one of the matrix. Exits with 1 on a failure. */
#include "cuda/gemm/skew.cuh"

#include <stdio.h>
#include <string.h>

static long num_passed, num_failed;

static void check(bool good, const char *what, long a, long b) {
    ++(good ? num_passed : num_failed);
    if (!good && num_failed < 40) printf("FAILED %s %ld %ld\n", what, a, b);
}

static uint64_t state = 1;
static int64_t below(int64_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int64_t)((state >> 33) % (uint64_t)n);
}

alignas(16) static uint16_t memory[1 << 16];
static const uint16_t STALE = 0xffff; /* what a tile holds before */

/* ROWS rows of `cols` elements from piece on, of which rows_valid are there. */
template <class Tile>
static void fill(uint16_t *tile, const uint16_t *piece, int64_t row_stride, int rows_valid, int cols,
                 const uint16_t *first, const uint16_t *end) {
    for (int i = 0; i < Tile::bytes / 2; ++i) tile[i] = STALE;
    for (int row = 0; row < Tile::rows; ++row) {
        const uint16_t *row_g = piece + row * row_stride;
        const int skew = skew_of((uintptr_t)row_g);
        for (int chunk = 0; chunk < Tile::chunks; ++chunk) {
            const int bytes = row < rows_valid ? skew_bytes(chunk, Tile::chunks, skew, cols) : 0;
            const uint16_t *at = row_g - skew + chunk * SKEW_EACH;
            check((uintptr_t)at % 16 == 0 && bytes >= 0 && bytes <= 16 && bytes % 2 == 0, "a chunk", chunk, bytes);
            for (int e = 0; e < SKEW_EACH; ++e) {
                const bool copied = e * 2 < bytes && at + e >= first;
                if (copied) check(at + e < end, "a read inside the matrix", row, chunk);
                tile[row * Tile::row_bytes / 2 + chunk * SKEW_EACH + e] = copied ? at[e] : 0;
            }
        }
    }
}

/* Rows dense along k: each lane's share, as its words come out of the shift. */
template <int ROWS, int COLS> static void check_along_k() {
    typedef skew_tile<ROWS, COLS> Tile;
    enum {
        WORDS = COLS / 8,
        SHARE = COLS / 4
    };
    const int64_t stride = COLS + below(40) - 20, origin = 4000 + below(16);
    const int cols = 1 + (int)below(COLS + 20), rows_valid = 1 + (int)below(ROWS);
    const uint16_t *piece = memory + origin, *end = piece + (rows_valid - 1) * stride + cols;
    alignas(16) static uint16_t tile[Tile::bytes / 2];
    fill<Tile>(tile, piece, stride, rows_valid, cols, piece, end);
    int taken[8] = {};
    for (int slot = 0; slot < 8; ++slot) ++taken[skew_row(Tile::chunks, slot)];
    for (int i = 0; i < 8; ++i) check(taken[i] == 1, "each row once", i, taken[i]);
    for (int lane = 0; lane < 32; ++lane)
        for (int down = 0; down < ROWS; down += 8) {
            const int q = lane % 4, row = down + skew_row(Tile::chunks, lane / 4);
            uint32_t words[WORDS + 4];
            memcpy(words, tile + row * Tile::row_bytes / 2 + skew_share(Tile::chunks, q) * SKEW_EACH, sizeof words);
            skew_shift(words, skew_of((uintptr_t)(piece + (row - down) * stride))); /* rows 8 apart have one skew */
            for (int e = 0; e < SHARE; ++e) {
                const int col = q * SHARE + e;
                const uint16_t want = row < rows_valid && col < cols ? piece[row * stride + col] : 0;
                check((uint16_t)(words[e / 2] >> e % 2 * 16) == want, "an element along k", row, col);
            }
        }
}

/* Rows of k dense along n: the elements that a lane reads one by one. */
template <int STEP, int ROWS> static void check_along_n() {
    typedef skew_tile<STEP, ROWS> Tile;
    const int64_t stride = ROWS + below(40), origin = 4000 + below(16);
    const int cols = 1 + (int)below(ROWS + 20), rows_valid = 1 + (int)below(STEP);
    const uint16_t *piece = memory + origin, *end = piece + (rows_valid - 1) * stride + cols;
    alignas(16) static uint16_t tile[Tile::bytes / 2];
    fill<Tile>(tile, piece, stride, rows_valid, cols, piece, end);
    for (int lane = 0; lane < 32; ++lane)
        for (int odd = 0; odd < 2; ++odd) {
            const int k0 = lane % 4 * 2 + odd, skew = skew_of((uintptr_t)(piece + k0 * stride));
            const int at = skew_element(Tile::chunks, lane, odd, skew);
            for (int k = 0; k < STEP; k += 8)
                for (int n = 0; n < ROWS; n += 8) {
                    const uint16_t want =
                        k0 + k < rows_valid && lane / 4 + n < cols ? piece[(k0 + k) * stride + lane / 4 + n] : 0;
                    check(tile[(at + k * Tile::row_bytes) / 2 + n] == want, "an element along n", k0 + k, lane / 4 + n);
                }
        }
}

int main() {
    for (size_t i = 0; i < sizeof memory / 2; ++i) memory[i] = (uint16_t)(1 + i * 40503u % 65534);
    for (int i = 0; i < 400; ++i) {
        check_along_k<32, 64>(), check_along_k<16, 64>(), check_along_k<64, 32>(), check_along_k<8, 32>();
        check_along_n<32, 32>(), check_along_n<32, 64>();
    }
    for (int skew = 0; skew < SKEW_EACH; ++skew)
        for (int step = 0; step < SKEW_EACH; ++step)
            for (int odd = 0; odd < 2; ++odd)
                check(skew_element_ways(5, odd, skew, step) == 1 && skew_element_ways(9, odd, skew, step) == 1,
                      "no bank conflict", skew, step);
    check(skew_share_ways(5) == 1 && skew_share_ways(9) == 1, "no bank conflict", 5, 9);
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
