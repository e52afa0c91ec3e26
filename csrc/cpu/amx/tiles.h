/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: the register tile of AMX, C[m][n] (+)= sum_k A[m][k] B[k][n], for bfloat16
 * (gemm_amx.c) and int8 (int8_amx.c). A cell is 32 bits of values that are neighbours along k:
 * two of bfloat16, four of int8.
 *
 *  a  rows [m][step] of cells   16 rows x 16 cells load as one tile
 *  b  panel [cells][32]         16 cells x 16 columns load as one tile
 *  c  [m][ldc] float32 or int32, m <= 32, 16 or 32 columns
 *
 * Tiles 0 1 | 2 3 hold 32 x 32 of C, tiles 4 5 hold A, tiles 6 7 hold B. A step of 16 cells
 * loads four tiles for four products: 64 cycles and 64 lines of 64 bytes. Both operands are
 * padded to whole tiles of cells. The padding is 0 in a; in an int8 b it may hold anything. */
#ifndef GPUKERN_AMX_TILES_H
#define GPUKERN_AMX_TILES_H

#include "../kernels.h"
#include "tile_amx.h"

#ifndef GK_ISA
#error "compile with -DGK_ISA=amx or amx_emulated"
#endif
#define CAT_(a, b) a##_##b
#define CAT(a, b) CAT_(a, b)
#define SYM(name) CAT(name, GK_ISA)

enum {
    ROWS = 16,         /* rows of a tile */
    CELLS = 16,        /* cells of a tile's row */
    STRIP = 2 * ROWS,  /* rows of C in a full register tile */
    PANEL = 2 * CELLS, /* columns of C in a full register tile */
    TILE_STEP = 64,    /* bytes of a tile's row */
    /* With this many cells or more, a strip of a and its panel of b together overflow the L1.
     * Loads of a then bypass the L1, and b stays there. Measured cycles for a step (64 at best),
     * 256 cells: 89 with a through the L1, 64 past it; with C in the L2 104 and 84. */
    LONG_CELLS = 192
};

/* int8_amx.c: true if a test product of int8 has the right values */
bool SYM(gk_tiles_multiply_int8)(void);

/* Rows of C that the thread's tiles are configured for, 0 without a configuration. It belongs to
 * the products of one file; a task does not mix them. A task configures the tiles when its
 * number of rows changes and releases them at its end, so that the caller's threads are left as
 * they were. */
static _Thread_local int configured;

static void configure(int m) {
    if (m % ROWS == 0) m = STRIP; /* with 16 rows the lower tiles are not used */
    if (configured == m) return;
    const uint8_t upper = (uint8_t)(m < ROWS ? m : ROWS),
                  lower = (uint8_t)(m < ROWS ? 0 : m - ROWS);
    amx_config config = {.palette = 1};
    const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, CELLS, CELLS};
    for (int t = 0; t < 8; ++t) {
        config.rows[t] = rows[t];
        config.row_bytes[t] = rows[t] ? TILE_STEP : 0;
    }
    amx_configure(&config);
    configured = m;
}

static void release_tiles(void) {
    if (configured) amx_release();
    configured = 0;
}

/* lower: C has more than 16 rows. wide: C has more than 16 columns. */
static inline __attribute__((always_inline)) void
tiles(const bool int8, const bool lower, const bool wide, int64_t cells, const uint32_t *a,
      int64_t step, const uint32_t *b, int64_t ldb, uint32_t *c, int64_t ldc, bool accumulate) {
#define LOAD_A(to, from)                       \
    do {                                       \
        if (once)                              \
            amx_load_once(to, from, 4 * step); \
        else                                   \
            amx_load(to, from, 4 * step);      \
    } while (0)
#define DOT(to, x, y)               \
    do {                            \
        if (int8)                   \
            amx_dot_int8(to, x, y); \
        else                        \
            amx_dot(to, x, y);      \
    } while (0)
    const bool once = cells >= LONG_CELLS;
    uint32_t *c_lower = c + ROWS * ldc;
    const uint32_t *a_lower = a + ROWS * step;
    if (accumulate) {
        amx_load(0, c, 4 * ldc);
        if (wide) amx_load(1, c + CELLS, 4 * ldc);
        if (lower) amx_load(2, c_lower, 4 * ldc);
        if (lower && wide) amx_load(3, c_lower + CELLS, 4 * ldc);
    } else {
        amx_zero(0);
        if (wide) amx_zero(1);
        if (lower) amx_zero(2);
        if (lower && wide) amx_zero(3);
    }
    for (int64_t k = 0; k < cells; k += CELLS) {
        amx_load(6, b + k * ldb, 4 * ldb);
        LOAD_A(4, a + k);
        if (wide) amx_load(7, b + k * ldb + CELLS, 4 * ldb);
        DOT(0, 4, 6);
        if (lower) LOAD_A(5, a_lower + k);
        if (wide) DOT(1, 4, 7);
        if (lower) DOT(2, 5, 6);
        if (lower && wide) DOT(3, 5, 7);
    }
    amx_store(0, c, 4 * ldc);
    if (wide) amx_store(1, c + CELLS, 4 * ldc);
    if (lower) amx_store(2, c_lower, 4 * ldc);
    if (lower && wide) amx_store(3, c_lower + CELLS, 4 * ldc);
#undef DOT
#undef LOAD_A
}

static inline __attribute__((always_inline)) void
register_tile(const bool int8, int m, bool wide, int64_t cells, const void *a, int64_t step,
              const void *b, int64_t ldb, void *c, int64_t ldc, bool accumulate) {
    configure(m);
    if (m > ROWS && wide)
        tiles(int8, true, true, cells, a, step, b, ldb, c, ldc, accumulate);
    else if (m > ROWS)
        tiles(int8, true, false, cells, a, step, b, ldb, c, ldc, accumulate);
    else if (wide)
        tiles(int8, false, true, cells, a, step, b, ldb, c, ldc, accumulate);
    else
        tiles(int8, false, false, cells, a, step, b, ldb, c, ldc, accumulate);
}

#endif
