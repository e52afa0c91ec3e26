/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_tile.h: the memory layout of a packed weight's codes.
 *
 * A tile is 64 rows (of N) x 64 columns (of K) in the fragment order of mma.m16n8k16's first
 * operand. Row r = 16 w + g + 8 h and column k = 16 s + 8 j + 2 t + i belong to thread 4 g + t
 * of warp w in step s of 16 along k:
 *
 *   4 bits: word [w][4 g + t][s], nibble h + 2 j + 4 i
 *   8 bits: word [s / 2][w][4 g + t][s % 2][j], byte 2 h + i
 *
 * With 4 bits the two nibbles of a pair (i = 0, 1) are 16 bits apart, so that one mask reads both.
 *
 * A thread's codes of a tile are 16 consecutive bytes with 4 bits, and twice 16 bytes with 8
 * bits. */
#ifndef GPUKERN_WEIGHT_TILE_H
#define GPUKERN_WEIGHT_TILE_H

#include "gpukern_quant.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

static inline bool gk_is_4_bit(gk_weight_format f) { return f != GK_INT8 && f != GK_W_E4M3; }
static inline int64_t gk_tile_bytes(gk_weight_format f) {
    return gk_is_4_bit(f) ? GK_TILE_BYTES_4 : GK_TILE_BYTES_8;
}

/* dtype of a format's codes in q, the unpacked weight */
static inline gk_dtype gk_code_dtype(gk_weight_format f) {
    return f == GK_W_E4M3 ? GK_E4M3 : f == GK_INT4 || f == GK_INT8 ? GK_I8 : GK_U8;
}

/* The first bit, within a tile, of the code of row r and column k (both of 64). */
static inline int gk_tile_bit(bool is_4_bit, int r, int k) {
    const int w = r >> 4, g = r & 7, h = r >> 3 & 1, s = k >> 4, j = k >> 3 & 1, t = k >> 1 & 3,
              i = k & 1;
    const int thread = 32 * w + 4 * g + t;
    if (is_4_bit) return 32 * (4 * thread + s) + 4 * (h + 2 * j + 4 * i);
    return 32 * (4 * (128 * (s >> 1) + thread) + 2 * (s & 1) + j) + 8 * (2 * h + i);
}

/* log2 of the number of columns of k that share a scale. 62 if one group covers all of k, -1 if
 * no group size gives `groups`. */
static inline int gk_group_log2(int64_t k, int64_t groups) {
    if (groups == 1) return 62;
    for (int log2 = 8; log2 >= 4; --log2)
        if (groups == (k + (INT64_C(1) << log2) - 1) >> log2) return log2;
    return groups == 0 && k == 0 ? 62 : -1;
}

/* The value of a code before its zero point and scale. */
static inline float gk_e2m1_to_f32(int code) {
    const int size = code & 7;
    const float x = size < 4    ? 0.5f * (float)size
                    : size == 4 ? 2.0f
                    : size == 5 ? 3.0f
                    : size == 6 ? 4.0f
                                : 6.0f;
    return code & 8 ? -x : x;
}

#ifdef __cplusplus
}
#endif
#endif
