/* skew.cuh: rows of 16-bit elements that begin anywhere, in shared memory as the aligned chunks of 16 bytes that they
 * lie in.
 *
 * A row begins `skew` elements past a multiple of 16 bytes; its element i is element (skew + i) % 8 of its chunk
 * (skew + i) / 8. Rows 8 apart have one skew, whatever their stride. What lies before a row in its first chunk may be
 * anything and is never used; what lies behind its end is zero.
 * Two ways to keep rows, in a ring of steps:
 *   skew_stream  a row is a ring of its own: chunk after chunk, SKEW_STEP a step; read as pieces of neighbours. Copied
 *                in whole lines of 128 bytes as they lie in memory, so that a step's last one ends up to 7 chunks
 *                early: a piece is there when the step after its own is.
 *   skew_tile    short pieces of many rows: one chunk more than an aligned piece would take
 * Plain C++, so that the tests walk the same functions. */
#ifndef GPUKERN_CUDA_GEMM_SKEW_CUH
#define GPUKERN_CUDA_GEMM_SKEW_CUH

#include "../tile/layout.cuh"

#include <stdint.h>

constexpr int SKEW_EACH = 8; /* elements of a chunk */

GK_HD inline int skew_of(uintptr_t address) { return (int)(address / 2 % SKEW_EACH); }

/* Words that begin `skew` elements late, moved to their front; the last four are used up. */
template <int WORDS> GK_HD inline void skew_shift(uint32_t (&words)[WORDS], int skew) {
    for (int i = 0; i < WORDS - 2; ++i) words[i] = skew & 4 ? words[i + 2] : words[i];
    for (int i = 0; i < WORDS - 3; ++i) words[i] = skew & 2 ? words[i + 1] : words[i];
    for (int i = 0; i < WORDS - 4; ++i)
        words[i] = (uint32_t)((((uint64_t)words[i + 1] << 32) | words[i]) >> (skew & 1) * 16);
}

/* ---- rows dense along k: streams --------------------------------------------------------------------------------- */
constexpr int SKEW_STEP = 32, SKEW_LINE = 8; /* chunks of a row in a step; in 128 bytes */

template <int ROWS, int SLOTS> struct skew_stream {
    /* the ring's first chunk once more behind its last one: a piece and the chunk after it are always neighbours; and
     * rows one chunk more than a multiple of 128 bytes apart fall into different banks */
    static constexpr int rows = ROWS, chunks = SLOTS * SKEW_STEP, row_bytes = (chunks + 1) * 16,
                         bytes = ROWS * row_bytes;
};

/* How many chunks of its first line lie before a row. */
GK_HD inline int skew_early(uintptr_t address) { return (int)(address / 16 % SKEW_LINE); }

/* Where a step's chunk lies in the ring of `chunks`, by the first of its slot; chunk >= -7. */
GK_HD inline int skew_position(int chunks, int first, int chunk) {
    return first + chunk < 0 ? first + chunk + chunks : first + chunk;
}

/* Bytes of chunk `chunk` of a row of cols elements that are copied; the rest of its 16 become zeros. */
GK_HD inline int skew_bytes(int64_t chunk, int skew, int64_t cols) {
    const int64_t bytes = (skew + cols - chunk * SKEW_EACH) * 2;
    return bytes <= 0 ? 0 : bytes < 16 ? (int)bytes : 16;
}

/* Which row of 8 the lanes 4 slot .. 4 slot + 3 take, a chunk and the next each: eight lanes read two rows at once, and
 * rows four apart fall into different banks. */
constexpr GK_HD int skew_row(int slot) { return (slot >> 1) + (slot & 1) * 4; }

constexpr GK_HD int skew_row_ways(int row_bytes) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane) bytes[lane] = skew_row(lane >> 2) * row_bytes + (lane & 3) * 16;
    return ways(bytes, 16);
}

/* ---- rows dense along n: pieces -------------------------------------------------------------------------------- */
template <int ROWS, int COLS> struct skew_tile {
    static_assert(COLS % SKEW_EACH == 0, "whole chunks");
    static constexpr int rows = ROWS, cols = COLS, chunks = COLS / SKEW_EACH + 1, row_bytes = chunks * 16,
                         bytes = ROWS * row_bytes;
};

/* A lane reads the elements of its fragments one by one. Where the one lies that has row (of k) 2 q + odd and the
 * lane's column; skew: of that row. Further rows are 8 apart, further columns multiples of 8. */
constexpr GK_HD int skew_element(int chunks, int lane, int odd, int skew) {
    return ((lane & 3) * 2 + odd) * chunks * 16 + ((lane >> 2) + skew) * 2;
}

/* With rows `step` elements apart, the first of them at skew `skew`. */
constexpr GK_HD int skew_element_ways(int chunks, int odd, int skew, int step) {
    int bytes[32] = {};
    for (int lane = 0; lane < 32; ++lane)
        bytes[lane] = skew_element(chunks, lane, odd, (skew + (lane % 4 * 2 + odd) * step) % SKEW_EACH);
    return ways(bytes, 2);
}

#endif
