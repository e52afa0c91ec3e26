/* check_skew: csrc/cuda/gemm/skew.cuh on the host: random matrices through the functions that gemm_skinny_odd is made
 * of: rows go into streams and pieces chunk by chunk, and the lanes' fragments come out of them. Every element of a
 * fragment must be the right one, what lies behind the end of a row zero, and every byte that is read one of the
 * matrix. Exits with 1 on a failure. */
#include "check_model.h"
#include "cuda/gemm/skew.cuh"

#include <string.h>

alignas(128) static uint16_t memory[1 << 17];
static const uint16_t STALE = 0xffff; /* what a tile holds before */

/* One chunk of a row, as the kernel copies it. */
static void copy_chunk(uint16_t *to, const uint16_t *at, int bytes, const uint16_t *first, const uint16_t *end) {
    check((uintptr_t)at % 16 == 0 && bytes >= 0 && bytes <= 16 && bytes % 2 == 0, "a chunk", 0, bytes);
    for (int e = 0; e < SKEW_EACH; ++e) {
        const bool copied = e * 2 < bytes && at + e >= first;
        if (copied) check(at + e < end, "a read inside the matrix", e, bytes);
        to[e] = copied ? at[e] : 0;
    }
}

/* Rows dense along k, two tiles one after the other through a ring: steps go in AHEAD of the one that is read, as in
 * the kernel, line by line as memory has them; each lane's share of a step comes out of the shift. */
template <int ROWS, int SLOTS> static void check_streams() {
    typedef skew_stream<ROWS, SLOTS> Stream;
    enum {
        AHEAD = SLOTS - 2,
        STEP = SKEW_STEP * SKEW_EACH
    };
    static uint16_t ring[Stream::bytes / 2];
    const int cols = 1 + (int)below(3 * STEP), rows_valid = 1 + (int)below(ROWS);
    const int steps = (cols + STEP - 1) / STEP + 1; /* the last one holds ends */
    const int64_t stride = cols + below(20), origin = 4000 + below(80);
    const uint16_t *rows_g = memory + origin, *end = rows_g + (rows_valid - 1) * stride + cols;
    for (uint16_t &x : ring) x = STALE;
    const auto copy =
        [&](int count) { /* the count'th step of both tiles together */
                         const int slot = count % SLOTS, step = count % steps;
                         for (int row = 0; row < rows_valid; ++row) {
                             const uintptr_t row_g = (uintptr_t)(rows_g + row * stride);
                             const int skew = skew_of(row_g), early = skew_early(row_g);
                             for (int c = 0; c < SKEW_STEP; ++c) {
                                 const int chunk = c - early, index = step * SKEW_STEP + chunk;
                                 const uint16_t *at = (const uint16_t *)(row_g - skew * 2) + index * SKEW_EACH;
                                 check((uintptr_t)(at - c * SKEW_EACH) % (SKEW_LINE * 16) == 0, "whole lines", row, c);
                                 if (index < 0) continue;
                                 const int bytes = skew_bytes(index, skew, cols);
                                 uint16_t *const row_s = ring + row * Stream::row_bytes / 2;
                                 const int position = skew_position(Stream::chunks, slot * SKEW_STEP, chunk);
                                 copy_chunk(row_s + position * SKEW_EACH, at, bytes, rows_g, end);
                                 if (slot == 0 && chunk == 0)
                                     copy_chunk(row_s + Stream::chunks * SKEW_EACH, at, bytes, rows_g, end);
                             }
                         }
        };
    for (int i = 0; i < AHEAD; ++i) copy(i);
    for (int count = 0; count < 2 * steps; ++count) {
        copy(count + AHEAD);
        if (count % steps == 0) continue;
        const int slot = (count - 1) % SLOTS, first = (count % steps - 1) * STEP;
        for (int warp = 0; warp < STEP / 32; ++warp)
            for (int lane = 0; lane < 32; ++lane)
                for (int down = 0; down < ROWS; down += 8) {
                    const int row = down + skew_row(lane / 4), share = warp * 4 + lane % 4;
                    if (row >= rows_valid) continue;
                    uint32_t words[8];
                    memcpy(words, ring + row * Stream::row_bytes / 2 + (slot * SKEW_STEP + share) * SKEW_EACH, 32);
                    skew_shift(words, skew_of((uintptr_t)(rows_g + (row - down) * stride))); /* as 8 rows before */
                    for (int e = 0; e < SKEW_EACH; ++e) {
                        const int col = first + share * SKEW_EACH + e;
                        const uint16_t want = col < cols ? rows_g[row * stride + col] : 0;
                        check((uint16_t)(words[e / 2] >> e % 2 * 16) == want, "an element along k", row, col);
                    }
                }
    }
}

/* Rows of k dense along n, as pieces: the elements that a lane reads one by one. */
template <int STEP, int ROWS> static void check_pieces() {
    typedef skew_tile<STEP, ROWS> Tile;
    const int64_t stride = ROWS + below(40), origin = 4000 + below(16);
    const int cols = 1 + (int)below(ROWS + 20), rows_valid = 1 + (int)below(STEP);
    const uint16_t *piece = memory + origin, *end = piece + (rows_valid - 1) * stride + cols;
    static uint16_t tile[Tile::bytes / 2];
    for (uint16_t &x : tile) x = STALE;
    for (int row = 0; row < STEP; ++row) {
        const uintptr_t row_g = (uintptr_t)(piece + row * stride);
        const int skew = skew_of(row_g);
        for (int chunk = 0; chunk < Tile::chunks; ++chunk) {
            const bool needed = row < rows_valid && (skew > 0 || chunk < Tile::chunks - 1);
            copy_chunk(tile + row * Tile::row_bytes / 2 + chunk * SKEW_EACH,
                       (const uint16_t *)(row_g - skew * 2) + chunk * SKEW_EACH,
                       needed ? skew_bytes(chunk, skew, cols) : 0, piece, end);
        }
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int odd = 0; odd < 2; ++odd) {
            const int k0 = lane % 4 * 2 + odd;
            const int at = skew_element(Tile::chunks, lane, odd, skew_of((uintptr_t)(piece + k0 * stride)));
            for (int k = 0; k < STEP; k += 8)
                for (int n = 0; n < ROWS; n += 8) {
                    const uint16_t want =
                        k0 + k < rows_valid && lane / 4 + n < cols ? piece[(k0 + k) * stride + lane / 4 + n] : 0;
                    check(tile[(at + k * Tile::row_bytes) / 2 + n] == want, "an element along n", k0 + k, lane / 4 + n);
                }
        }
}

static void check_banks() {
    for (int skew = 0; skew < SKEW_EACH; ++skew)
        for (int step = 0; step < SKEW_EACH; ++step)
            for (int odd = 0; odd < 2; ++odd)
                check(skew_element_ways(5, odd, skew, step) == 1 && skew_element_ways(9, odd, skew, step) == 1,
                      "elements without bank conflict", skew, step);
    for (int slots = 3; slots < 10; ++slots)
        check(skew_row_ways((slots * SKEW_STEP + 1) * 16) == 1, "chunks without bank conflict", slots, 0);
    int taken[8] = {};
    for (int slot = 0; slot < 8; ++slot) ++taken[skew_row(slot)];
    for (int i = 0; i < 8; ++i) check(taken[i] == 1, "each row once", i, taken[i]);
}

int main() {
    for (size_t i = 0; i < sizeof memory / 2; ++i) memory[i] = (uint16_t)(1 + i * 40503u % 65534);
    for (int i = 0; i < 100; ++i) {
        check_streams<32, 9>(), check_streams<16, 4>(), check_streams<8, 7>(), check_streams<64, 5>();
        check_pieces<256, 32>(), check_pieces<256, 64>();
    }
    check_banks();
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
