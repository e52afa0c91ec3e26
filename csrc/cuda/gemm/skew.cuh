/* skew.cuh: rows of 16-bit elements that begin anywhere, in shared memory as the aligned chunks of 16 bytes they lie in.
 *
 * A tile is some columns (a multiple of 8) of each row: its piece. A piece begins `skew` elements past a multiple of 16 bytes
 * and so lies in one chunk more than it would aligned; its element i is element skew + i of the copy. Steps of 8 columns,
 * and of 8 rows, change no skew. What lies before a piece in its first chunk may be anything and is never used; what
 * lies behind the row's end is zero.
 * Plain C++ but for the copy, so that the tests walk the same functions. */
#ifndef GPUKERN_CUDA_GEMM_SKEW_CUH
#define GPUKERN_CUDA_GEMM_SKEW_CUH

#include "../tile/layout.cuh"

#include <stdint.h>

constexpr int SKEW_EACH = 8; /* elements of a chunk */

template <int ROWS, int COLS> struct skew_tile {
    static_assert(COLS % SKEW_EACH == 0, "whole chunks");
    static constexpr int rows = ROWS, cols = COLS, chunks = COLS / SKEW_EACH + 1, row_bytes = chunks * 16,
                         bytes = ROWS * row_bytes;
};

GK_HD inline int skew_of(uintptr_t address) { return (int)(address / 2 % SKEW_EACH); }

/* Bytes of a piece's chunk that are copied; the rest of its 16 become zeros. cols_left: of the row, from the piece on. The
 * last chunk holds nothing of a piece without skew. */
GK_HD inline int skew_bytes(int chunk, int chunks, int skew, int cols_left) {
    const int bytes = (skew + cols_left - chunk * SKEW_EACH) * 2;
    return bytes <= 0 || (skew == 0 && chunk == chunks - 1) ? 0 : bytes < 16 ? bytes : 16;
}

/* Words that begin `skew` elements late, moved to their front; the last four are used up. */
template <int WORDS> GK_HD inline void skew_shift(uint32_t (&words)[WORDS], int skew) {
    for (int i = 0; i < WORDS - 2; ++i) words[i] = skew & 4 ? words[i + 2] : words[i];
    for (int i = 0; i < WORDS - 3; ++i) words[i] = skew & 2 ? words[i + 1] : words[i];
    for (int i = 0; i < WORDS - 4; ++i)
        words[i] = (uint32_t)((((uint64_t)words[i + 1] << 32) | words[i]) >> (skew & 1) * 16);
}

/* ---- dense along k: a lane reads whole chunks of the row of its fragments -------------------------------------- */
/* Which row of 8 the lanes 4 slot .. 4 slot + 3 take. Eight lanes read two rows at once: with 5 chunks a row, rows 4 apart
 * fall into different banks, with 9 neighbours do. */
constexpr GK_HD int skew_row(int chunks, int slot) { return chunks % 8 == 5 ? (slot >> 1) + (slot & 1) * 4 : slot; }

/* The first chunk that lane q of a row's four reads, of its share of the piece and one more. The share's k are the lane's in
 * all products of the step, in whatever order weights and tokens agree on. */
constexpr GK_HD int skew_share(int chunks, int q) { return (chunks - 1) / 4 * q; }

constexpr GK_HD int skew_share_ways(int chunks) {
    int most = 0;
    for (int c = 0; c <= (chunks - 1) / 4; ++c) {
        int bytes[32] = {};
        for (int lane = 0; lane < 32; ++lane)
            bytes[lane] = (skew_row(chunks, lane / 4) * chunks + skew_share(chunks, lane % 4) + c) * 16;
        const int degree = ways(bytes, 16);
        if (degree > most) most = degree;
    }
    return most;
}

/* ---- dense along n: a lane reads the elements of its fragments one by one -------------------------------------- */
/* Where lane's element lies that has row (of k) 2 q + odd and column slot; skew: of that row. Further rows are 8 apart,
 * further columns multiples of 8. */
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
