/* SPDX-License-Identifier: BSD-3-Clause */
/* int8_amx: products of 8-bit integers on AMX tiles, C[m][n] (+)= sum_k A[m][k] B[k][n] in
 * int32: the register tile for int8_product.h (interface in int8.h) and the kernels of tables.c.
 * Blocks, tasks, scales and packing are those of avx512bf16. It is compiled with the
 * instructions (GK_ISA amx) and with their emulation (amx_emulated).
 *
 * TDPBSSD takes signed codes on both sides, so b is not flipped and no row needs a correction.
 * Sums wrap modulo 2^32 as in every other instruction set, so the bits are the same. Small M is
 * left to the kernel of avx512bf16, which reads b once and in place (GK_SKINNY_ROWS_AMX). */
#include "../blocks.h"
#include "../int8.h"
#include "tiles.h"

extern const gk_int8_isa gk_int8_quads_avx512bf16;

/* ---- 1 the product --------------------------------------------------------------------------- */
/* Rows [first, m) of C. A panel of b stays in L1 while all strips of a are multiplied by it. */
static void strips(int64_t first, int64_t m, int64_t n, int64_t cells, const uint32_t *a,
                   int64_t a_ld, const uint32_t *b, uint32_t *c, int64_t ldc, bool accumulate) {
    for (int64_t j = 0; j < n; j += PANEL)
        for (int64_t r = first; r < m; r += STRIP)
            register_tile(true, (int)gk_min_i64(STRIP, m - r), n - j > CELLS, cells, a + r * a_ld,
                          a_ld, b + j * cells, PANEL, c + r * ldc + j, ldc, accumulate);
}

/* Whole strips come first, so that the tiles are configured at most twice. */
static void product(int64_t m, int64_t n, int64_t cells, const uint32_t *a, int64_t a_ld,
                    const uint32_t *b, uint32_t *c, int64_t ldc, bool accumulate) {
    const int64_t whole = m / STRIP * STRIP, padded = gk_round_up(cells, CELLS);
    strips(0, whole, n, padded, a, a_ld, b, c, ldc, accumulate);
    strips(whole, m, n, padded, a, a_ld, b, c, ldc, accumulate);
}

/* ---- 2 packing ------------------------------------------------------------------------------- */
/* Packs b into panels, padded with zeros to whole tiles of cells. */
static void pack_panels(uint32_t *dst, const int8_t *src, int64_t s_lane, int64_t s_k,
                        int64_t lanes, int64_t k, uint32_t flipped) {
    const gk_int8_isa *quads = &gk_int8_quads_avx512bf16;
    const int64_t cells = gk_ceil_div(k, quads->per), padded = gk_round_up(cells, CELLS);
    if (padded == cells) {
        quads->pack_panels(dst, src, s_lane, s_k, lanes, k, flipped);
        return;
    }
    for (int64_t l = 0; l < lanes; l += PANEL) {
        uint32_t *panel = dst + l * padded;
        quads->pack_panels(panel, src + l * s_lane, s_lane, s_k, gk_min_i64(PANEL, lanes - l), k,
                           flipped);
        memset(panel + cells * PANEL, 0, 4 * (size_t)((padded - cells) * PANEL));
    }
}

static void pack_rows(uint32_t *dst, int64_t ld, const int8_t *src, int64_t s_row, int64_t s_k,
                      int64_t rows, int64_t k) {
    gk_int8_quads_avx512bf16.pack_rows(dst, ld, src, s_row, s_k, rows, k);
}

/* b is not flipped, so no row of c is too large. */
static void no_excess(uint32_t *excess, const uint32_t *a, int64_t a_ld, int64_t rows,
                      int64_t cells, bool accumulate) {
    (void)a, (void)a_ld, (void)cells, (void)accumulate;
    memset(excess, 0, sizeof *excess * (size_t)rows);
}

static const gk_int8_isa on_tiles = {.per = 4,
                                     .mr = STRIP,
                                     .k_cells = CELLS,
                                     .flipped = 0,
                                     .product = product,
                                     .pack_panels = pack_panels,
                                     .pack_rows = pack_rows,
                                     .dots = NULL, /* small M is not planned here */
                                     .excess = no_excess,
                                     .end_task = release_tiles};

/* ---- 3 the kernels of tables.c --------------------------------------------------------------- */
#define KERNEL(op)                                                                     \
    bool gk_plan_##op##_avx512bf16(const gk_int8_isa *int8, const gk_context *ctx,     \
                                   const void *args, gk_plan *plan);                   \
    extern const gk_cpu_kernel gk_##op##_avx512bf16;                                   \
    static bool plan_##op(const gk_context *ctx, const void *args, gk_plan *plan) {    \
        return ((const gk_##op##_args *)args)->a.shape[0] > GK_SKINNY_ROWS_AMX &&      \
               gk_plan_##op##_avx512bf16(&on_tiles, ctx, args, plan);                  \
    }                                                                                  \
    static void run_##op(const gk_context *ctx, const void *args, const gk_plan *plan, \
                         void *workspace) {                                            \
        gk_##op##_avx512bf16.run(ctx, args, plan, workspace);                          \
    }                                                                                  \
    extern const gk_cpu_kernel SYM(gk_##op);                                           \
    const gk_cpu_kernel SYM(gk_##op) = {plan_##op, run_##op};
KERNEL(scaled_gemm)
KERNEL(sparse_gemm)

/* ---- test products: do the tiles of this machine compute what the kernels expect? ------------ */
bool SYM(gk_tiles_multiply_int8)(void) {
    int8_t a[ROWS][4 * CELLS], b[CELLS][4 * CELLS]; /* b[k / 4][4 n + k % 4] */
    int32_t c[ROWS][CELLS], want[ROWS][CELLS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < 4 * CELLS; ++j) {
            a[i][j] = (int8_t)((37 * i + 11 * j) % 256 - 128);
            b[i][j] = (int8_t)((53 * i + 29 * j) % 256 - 128);
            /* row 0 of both: the sum of four products is as large as it can be */
            if (i == 0) a[i][j] = b[i][j] = -128;
        }
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < CELLS; ++j) {
            want[i][j] = c[i][j] = i - 3 * j;
            for (int k = 0; k < 4 * CELLS; ++k) want[i][j] += a[i][k] * b[k / 4][4 * j + k % 4];
        }
    configure(ROWS);
    amx_load(0, c, TILE_STEP);
    amx_load(4, a, TILE_STEP);
    amx_load(6, b, TILE_STEP);
    amx_dot_int8(0, 4, 6);
    amx_store(0, c, TILE_STEP);
    release_tiles();
    return memcmp(c, want, sizeof c) == 0;
}
