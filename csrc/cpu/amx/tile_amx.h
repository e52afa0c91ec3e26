/* SPDX-License-Identifier: BSD-3-Clause */
/* tile_amx.h: AMX's tile instructions under our own names, as instructions (AMX_TILES 1) or in
 * plain C (AMX_TILES 0). The C version keeps eight tiles for each thread and gives the same bits
 * as the manual, so that the kernels build and run on a machine without AMX. Reference: Intel,
 * Software Developer's Manual, volume 2: TDPBF16PS, TDPBSSD, LDTILECFG, TILELOADD, TILESTORED.
 *
 * There are eight tiles of up to 16 rows of up to 64 bytes.
 *
 *  tdpbssd    C[m][n] += sum over k and i < 4 of A[m][4k + i] B[k][4n + i]
 *             with signed bytes and sums in int32 modulo 2^32
 *  tdpbf16ps  C[m][n] += sum over k of A[m][2k] B[k][2n] + A[m][2k+1] B[k][2n+1]
 *             Even and odd products are summed separately from 0. The two sums are added to each
 *             other and then to C. Subnormal inputs count as 0, subnormal results become 0. */
#ifndef GPUKERN_TILE_AMX_H
#define GPUKERN_TILE_AMX_H

#include "../../core/internal.h"

#include <float.h>
#if AMX_TILES
#include <immintrin.h>
#endif

/* What LDTILECFG reads: palette 1, and bytes of a row and rows of each tile. */
typedef struct amx_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_config;
_Static_assert(sizeof(amx_config) == 64, "as LDTILECFG reads it");

#if AMX_TILES
#define amx_configure(config) _tile_loadconfig(config)
#define amx_release() _tile_release()
#define amx_zero(tile) _tile_zero(tile)
#define amx_load(tile, from, step_bytes) _tile_loadd(tile, from, (size_t)(step_bytes))
#define amx_load_once(tile, from, step_bytes) \
    _tile_stream_loadd(tile, from, (size_t)(step_bytes)) /* bypasses the L1 */
#define amx_store(tile, to, step_bytes) _tile_stored(tile, to, (size_t)(step_bytes))
#define amx_dot(c, a, b) _tile_dpbf16ps(c, a, b)
#define amx_dot_int8(c, a, b) _tile_dpbssd(c, a, b)
#else
enum {
    AMX_NUM_TILES = 8,
    AMX_ROWS = 16,
    AMX_LANES = 16 /* floats of a row */
};
static _Thread_local amx_config amx_now;
static _Thread_local uint32_t amx_tiles[AMX_NUM_TILES][AMX_ROWS][AMX_LANES];

static inline void amx_configure(const amx_config *config) {
    amx_now = *config;
    memset(amx_tiles, 0, sizeof amx_tiles);
}
static inline void amx_release(void) { memset(&amx_now, 0, sizeof amx_now); }
static inline void amx_zero(int tile) { memset(amx_tiles[tile], 0, sizeof amx_tiles[tile]); }
static inline void amx_load(int tile, const void *from, int64_t step_bytes) {
    amx_zero(tile);
    for (int r = 0; r < amx_now.rows[tile]; ++r)
        memcpy(amx_tiles[tile][r], (const char *)from + r * step_bytes, amx_now.row_bytes[tile]);
}
#define amx_load_once amx_load
static inline void amx_store(int tile, void *to, int64_t step_bytes) {
    for (int r = 0; r < amx_now.rows[tile]; ++r)
        memcpy((char *)to + r * step_bytes, amx_tiles[tile][r], amx_now.row_bytes[tile]);
}
static inline float amx_flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }
static inline float amx_half(uint32_t pair, int odd) {
    return amx_flushed(gk_bf16_to_f32((uint16_t)(odd ? pair >> 16 : pair & 0xffff)));
}
static inline void amx_dot(int c, int a, int b) {
    for (int m = 0; m < amx_now.rows[c]; ++m) {
        float sum[2][AMX_LANES] = {{0}};
        for (int k = 0; k < amx_now.row_bytes[a] / 4; ++k)
            for (int odd = 0; odd < 2; ++odd) {
                const float x = amx_half(amx_tiles[a][m][k], odd);
                for (int n = 0; n < amx_now.row_bytes[c] / 4; ++n)
                    sum[odd][n] = amx_flushed(sum[odd][n] + x * amx_half(amx_tiles[b][k][n], odd));
            }
        for (int n = 0; n < amx_now.row_bytes[c] / 4; ++n) {
            float old;
            memcpy(&old, &amx_tiles[c][m][n], 4);
            const float sums = amx_flushed(sum[0][n] + sum[1][n]),
                        x = amx_flushed(amx_flushed(old) + sums);
            memcpy(&amx_tiles[c][m][n], &x, 4);
        }
    }
}
static inline int32_t amx_quarter(uint32_t quad, int i) {
    return (int32_t)(int8_t)(quad >> 8 * i & 0xff);
}
static inline void amx_dot_int8(int c, int a, int b) {
    for (int m = 0; m < amx_now.rows[c]; ++m)
        for (int k = 0; k < amx_now.row_bytes[a] / 4; ++k)
            for (int i = 0; i < 4; ++i) {
                const int32_t x = amx_quarter(amx_tiles[a][m][k], i);
                for (int n = 0; n < amx_now.row_bytes[c] / 4; ++n)
                    amx_tiles[c][m][n] += (uint32_t)(x * amx_quarter(amx_tiles[b][k][n], i));
            }
}
#endif

#endif
