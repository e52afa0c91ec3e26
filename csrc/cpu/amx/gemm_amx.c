/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_amx: products of bfloat16 on AMX tiles: the packing for the register tile (tiles.h) and
 * the kernel of tables.c. Blocks, tasks and epilogue are gemm.c's. It is compiled with the
 * instructions (GK_ISA amx) and with their emulation (amx_emulated).
 *
 * One instruction sums 16 even and 16 odd products from 0 and adds both sums to C. The chain of
 * additions to C is k / 32 long and is not split further. Subnormal inputs and sums count as 0.
 * Not served: M <= 4, or M <= 6 if b is contiguous along k (gemm_skinny), float32 and float16. */
#include "../blocks.h"
#include "tiles.h"

/* Packing for a whole number of tiles, and the epilogue, are those of the avx512bf16 kernels. */
extern const gk_gemm_isa gk_gemm_isa_avx512bf16;

/* ---- 1 the register tile --------------------------------------------------------------------- */
void SYM(gk_release_tiles)(void); /* tile.h */
void SYM(gk_release_tiles)(void) { release_tiles(); }

#define INSTANCE(wide, m)                                                                    \
    static void tile_##wide##_##m(int64_t cells, const void *a, int64_t step, const void *b, \
                                  int64_t ldb, float *c, int64_t ldc, bool accumulate) {     \
        register_tile(false, m, wide, cells, a, step, b, ldb, c, ldc, accumulate);           \
    }
#define NAME(wide, m) tile_##wide##_##m,
#define EIGHT(X, wide, x) \
    X(wide, x##1)         \
    X(wide, x##2)         \
    X(wide, x##3) X(wide, x##4) X(wide, x##5) X(wide, x##6) X(wide, x##7) X(wide, x##8)
#define TO_32(X, wide) \
    EIGHT(X, wide, )   \
    X(wide, 9)         \
    X(wide, 10)        \
    EIGHT(X, wide, 1)  \
    X(wide, 19) X(wide, 20) EIGHT(X, wide, 2) X(wide, 29) X(wide, 30) X(wide, 31) X(wide, 32)
TO_32(INSTANCE, 0)
TO_32(INSTANCE, 1)
extern const gk_ukr_fn SYM(gk_ukr_rows)[2][STRIP]; /* tile.h */
const gk_ukr_fn SYM(gk_ukr_rows)[2][STRIP] = {{TO_32(NAME, 0)}, {TO_32(NAME, 1)}};

/* ---- 2 packing ------------------------------------------------------------------------------- */
/* dst[ceil(lanes / 32)][cells, padded to whole tiles][32]: consecutive panels. */
static void pack_panels(void *dst, const void *src, gk_dtype dtype, int64_t s_lane, int64_t s_k,
                        int64_t lanes, int64_t k) {
    const int64_t cells = gk_ceil_div(k, 2), padded = gk_round_up(cells, CELLS);
    if (padded == cells) {
        gk_gemm_isa_avx512bf16.pack_panels(dst, src, dtype, s_lane, s_k, lanes, k);
        return;
    }
    for (int64_t l = 0; l < lanes; l += PANEL) {
        uint32_t *panel = (uint32_t *)dst + l * padded;
        gk_gemm_isa_avx512bf16.pack_panel(panel, PANEL, gk_at(src, 2 * l * s_lane), dtype, s_lane,
                                          s_k, gk_min_i64(PANEL, lanes - l), k);
        memset(panel + cells * PANEL, 0, 4 * (size_t)((padded - cells) * PANEL));
    }
}

/* dst[rows][ld] for any strides: k contiguous, zeros up to a whole tile. 16 rows at a time are
 * packed into a panel and then transposed into rows. */
static void pack_rows_any(void *dst, int64_t ld, const void *src, gk_dtype dtype, int64_t s_row,
                          int64_t s_k, int64_t rows, int64_t k) {
    if (s_k == 1) {
        gk_gemm_isa_avx512bf16.pack_rows(dst, ld, src, dtype, s_row, rows, k);
        return;
    }
    for (int64_t r = 0; r < rows; r += ROWS)
        for (int64_t k0 = 0; k0 < k; k0 += 2 * CELLS) {
            uint32_t panel[CELLS + 1][ROWS] = {
                {0}}; /* one row more, because pack_panel may write past the end */
            const int64_t n = gk_min_i64(ROWS, rows - r);
            gk_gemm_isa_avx512bf16.pack_panel(panel, ROWS, gk_at(src, 2 * (r * s_row + k0 * s_k)),
                                              dtype, s_row, s_k, n, gk_min_i64(2 * CELLS, k - k0));
            uint32_t *to = (uint32_t *)dst + r * ld + k0 / 2;
            const int64_t filled = gk_ceil_div(gk_min_i64(2 * CELLS, k - k0), 2);
            for (int64_t i = 0; i < n; ++i)
                for (int64_t c = 0; c < CELLS; ++c) to[i * ld + c] = c < filled ? panel[c][i] : 0;
        }
}

static void store(const gk_gemm_epilogue *e, const float *acc, int64_t ld, int64_t rows,
                  int64_t cols) {
    gk_gemm_isa_avx512bf16.store(e, acc, ld, rows, cols);
}

/* ---- 3 the kernel of tables.c ---------------------------------------------------------------- */
static const gk_gemm_isa amx_isa = {.w = CELLS,
                                    .mr = STRIP,
                                    .pair = 2,
                                    .ukr_panel = NULL,
                                    .ukr_rows = SYM(gk_ukr_rows)[0],
                                    .pack_panel = NULL,
                                    .pack_panels = pack_panels,
                                    .pack_rows = NULL,
                                    .store = store,
                                    .blocks = &gk_gemm_blocks_amx,
                                    .pack_rows_any = pack_rows_any,
                                    .end_task = SYM(gk_release_tiles),
                                    .k_cells = CELLS};

static bool make_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_gemm_problem p = gk_cpu_gemm_problem(args);
    if (gk_gemm_is_skinny(&p) &&
        p.m <= (p.b_n == 1 ? GK_SKINNY_ROWS_AMX_ACROSS : GK_SKINNY_ROWS_AMX_ALONG))
        return false;
    return gk_gemm_packed_plan(ctx, args, &amx_isa, plan);
}
static void run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    gk_gemm_packed_run(ctx, args, &amx_isa, plan, workspace);
}
const gk_cpu_kernel SYM(gk_gemm_packed) = {make_plan, run};

/* ---- test products: do the tiles of this machine compute what the kernels expect? ------------ */
/* A product of `rows` x `pairs` and `pairs` x `cols` tiles of small integers. Every order of
 * summation gives the same bits. */
static bool multiplies(int rows, int pairs, int cols) {
    uint32_t a[ROWS][CELLS], b[ROWS][CELLS];
    float c[ROWS][CELLS], got[ROWS][CELLS];
    amx_config config = {.palette = 1};
    const uint8_t rows_of[] = {(uint8_t)rows, (uint8_t)rows, (uint8_t)pairs};
    const int cells_of[] = {cols, pairs, cols};
    for (int t = 0; t < 3; ++t) {
        config.rows[t] = rows_of[t];
        config.row_bytes[t] = (uint16_t)(4 * cells_of[t]);
    }
    int x[ROWS][2 * CELLS], y[2 * ROWS][CELLS];
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < CELLS; ++j) {
            c[i][j] = (float)(i - 3 * j);
            got[i][j] = -1;
            a[i][j] = b[i][j] = 0;
            for (int odd = 0; odd < 2; ++odd) {
                x[i][2 * j + odd] = (7 * i + 3 * j + 5 * odd) % 11 - 4;
                y[2 * i + odd][j] = (5 * i + 2 * j + 3 * odd) % 13 - 7;
                a[i][j] |= (uint32_t)gk_f32_to_bf16((float)x[i][2 * j + odd]) << 16 * odd;
                b[i][j] |= (uint32_t)gk_f32_to_bf16((float)y[2 * i + odd][j]) << 16 * odd;
            }
        }
    amx_configure(&config);
    amx_load(0, c, TILE_STEP);
    amx_load(1, a, TILE_STEP);
    amx_load(2, b, TILE_STEP);
    amx_dot(0, 1, 2);
    amx_store(0, got, TILE_STEP);
    amx_release();
    bool good = true;
    for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < CELLS; ++j) {
            int want = i - 3 * j;
            for (int k = 0; k < 2 * pairs; ++k) want += x[i][k] * y[k][j];
            good = good && got[i][j] == (i < rows && j < cols ? (float)want : -1.0f);
        }
    return good;
}

bool SYM(gk_tiles_multiply)(void) {
    return multiplies(ROWS, CELLS, CELLS) && multiplies(5, 3, 7) && multiplies(1, 16, 16) &&
           SYM(gk_tiles_multiply_int8)();
}
