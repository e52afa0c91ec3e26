/* SPDX-License-Identifier: BSD-3-Clause */
/* tile.h: tiles of cells, the product of tiles, and the packing of operands of any dtype and
 * stride into tiles. Attention and the skinny products use it; gemm_ukr.c exports its packing to
 * gemm.c.
 *
 *  panel  [ceil(k / PAIR)][width]   lanes contiguous: operand B, or a packed A
 *  rows   [rows][ceil(k / PAIR)]    k contiguous: an A in row-major order
 *
 * The product of the register tile is C[m][n] (+)= sum_k A[m][k] B[k][n] with m <= MR rows and
 * nv <= NV vectors of columns, C in float32. Cells of A are broadcast in both forms, so a
 * row-major A needs no transposition. On AMX tiles (TILED) A must be in rows, and the cells of
 * both operands are padded with zeros to whole tiles (whole_cells). */
#ifndef GPUKERN_TILE_H
#define GPUKERN_TILE_H

#include "../kernels.h"
#include "vec.h"

extern const gk_ukr_fn SYM(gk_ukr_panel)[NV][MR]; /* [nv - 1][m - 1] */
extern const gk_ukr_fn SYM(gk_ukr_rows)[NV][MR];

extern const gk_gemm_isa SYM(gk_gemm_isa);

INLINE int64_t cells_of(int64_t k) { return (k + PAIR - 1) / PAIR; }
INLINE int64_t whole_cells(int64_t k) { return gk_round_up(cells_of(k), K_CELLS); }

/* A sum runs over SUM_CELLS cells at a time; then the parts are added. That halves the rounding
 * error at head_dim 512 and costs 1.5 % of the time. With few float32 queries a gradient depends
 * on few scores, and PyTorch sums those in short parts, so SUM_CELLS_FEW is used there: at 3
 * queries and head_dim 80 the error of dk and dv falls from 1.5 times PyTorch's to 1.0. */
enum {
    SUM_CELLS = 128,
    SUM_CELLS_FEW = 32
};

/* C[m][n] (+)= A B for any m and n. n is rounded up to whole vectors, so B and C must have that
 * many columns. A sum runs over sum_cells cells at a time. */
#if TILED
/* All strips but the last are whole. Sums are not split: one instruction sums 16 cells and adds
 * two sums to C. */
INLINE void tile_product(int64_t sum_cells, bool a_is_rows, int64_t m, int64_t n, int64_t cells,
                         const cell *a, int64_t step, const cell *b, int64_t ldb, float *c,
                         int64_t ldc, bool accumulate) {
    (void)sum_cells, (void)a_is_rows;
    for (int64_t j = 0; j < n; j += NR)
        for (int64_t i = 0; i < m; i += MR) SYM(gk_ukr_rows)
    [n - j > W][gk_min_i64(MR, m - i) - 1](gk_round_up(cells, K_CELLS), a + i * step, step, b + j,
                                           ldb, c + i * ldc + j, ldc, accumulate);
}

/* Every task ends with it, so that the caller's thread is left without tile state. */
extern void SYM(gk_release_tiles)(void);
INLINE void release_tiles(void) { SYM(gk_release_tiles)(); }

/* dst[dim][ld] = rows[k][dim] with k contiguous, zeros up to whole tiles: transposes contiguous
 * rows into an A. */
INLINE void pack_columns(cell *dst, int64_t ld, const char *const *rows, int64_t k, gk_dtype dtype,
                         int64_t dim) {
    for (int64_t c = 0; c < whole_cells(k); c += W)
        for (int64_t d = 0; d < dim; d += W) {
            vc r[W];
            for (int64_t i = 0, j = PAIR * c; i < W; ++i, j += PAIR)
                r[i] = j < k ? vc_load_across_k(rows[j], j + 1 < k ? rows[j + 1] : NULL, dtype, d,
                                                dim - d)
                             : vc_set1(0);
            vc_transpose(r);
            for (int64_t i = 0; i < gk_min_i64(W, dim - d); ++i)
                vc_store(dst + (d + i) * ld + c, r[i]);
        }
}
#else
INLINE void release_tiles(void) {}
INLINE void tile_product(int64_t sum_cells, bool a_is_rows, int64_t m, int64_t n, int64_t cells,
                         const cell *a, int64_t step, const cell *b, int64_t ldb, float *c,
                         int64_t ldc, bool accumulate) {
    const gk_ukr_fn(*ukr)[MR] = a_is_rows ? SYM(gk_ukr_rows) : SYM(gk_ukr_panel);
    /* strips are even: 64 rows are 13 13 13 13 12 */
    int64_t strips = gk_ceil_div(m, MR), base = m / strips, longer = m % strips;
    for (int64_t k = 0; k == 0 || k < cells; k += sum_cells) {
        const int64_t part = gk_min_i64(sum_cells, cells - k);
        const cell *ak = a + (a_is_rows ? k : k * step), *bk = b + k * ldb;
        for (int64_t j = 0; j < n; j += NR) {
            int nv = n - j > W ? NV : 1;
            for (int64_t s = 0, i = 0; s < strips; ++s) {
                int64_t rows = base + (s < longer);
                ukr[nv - 1][rows - 1](part, ak + (a_is_rows ? i * step : i), step, bk + j, ldb,
                                      c + i * ldc + j, ldc, accumulate || k > 0);
                i += rows;
            }
        }
    }
}
#endif

/* dst[cells_of(k)][width] = src[lane][k]. Lanes beyond `lanes` and values beyond k are 0. May
 * write W cells past the end of dst. src is addressed in elements: src[lane * s_lane + i * s_k]. */
INLINE void pack_panel(cell *dst, int64_t width, const void *src, gk_dtype dtype, int64_t s_lane,
                       int64_t s_k, int64_t lanes, int64_t k) {
    const int64_t es = dtype == GK_F32 ? 4 : 2; /* signed: strides may be negative */
    const char *p = src;
    const int64_t kc = cells_of(k);
    if (s_lane == 1 || lanes == 1) { /* lanes are contiguous: copy rows of k, or pair two of them */
        for (int64_t c = 0; c < kc; ++c) {
            const char *row0 = p + es * (c * PAIR * s_k), *row1 = NULL;
            if (PAIR == 2 && c * PAIR + 1 < k) row1 = row0 + es * s_k;
#if PAIR == 2
            if (width == NR && lanes >= NR && row1) {
                vc two[2];
                vc_zip_two((const uint16_t *)row0, (const uint16_t *)row1, two);
                vc_store(dst + c * width, two[0]);
                vc_store(dst + c * width + W, two[1]);
                continue;
            }
#endif
            for (int64_t l = 0; l < width; l += W) {
                vc v = vc_load_across_k(row0, row1, dtype, l, lanes - l);
                /* in a narrow panel the next row overwrites what is written too far */
                if (l + W <= width || l == 0)
                    vc_store(dst + c * width + l, v);
                else
                    vc_store_first(dst + c * width + l, v, width - l);
            }
        }
    } else if (s_k == 1) { /* k is contiguous: transpose W lanes by W cells */
        for (int64_t l = 0; l < width; l += W) {
            const int64_t here = gk_clamp_i64(lanes - l, 0, W);
            for (int64_t c = 0; c < kc; c += W) {
                vc r[W];
                for (int i = 0; i < W; ++i) {
                    if (i < here)
                        r[i] = vc_load_along_k(p + es * ((l + i) * s_lane), dtype, c * PAIR,
                                               k - c * PAIR);
                    else
                        r[i] = vc_set1(0);
                }
                vc_transpose(r);
                for (int64_t j = 0; j < gk_min_i64(W, kc - c); ++j) {
                    if (l + W <= width || l == 0)
                        vc_store(dst + (c + j) * width + l, r[j]);
                    else
                        vc_store_first(dst + (c + j) * width + l, r[j], width - l);
                }
            }
        }
    } else { /* neither: one value at a time */
        for (int64_t c = 0; c < kc; ++c)
            for (int64_t l = 0; l < width; ++l) {
#if PAIR == 2
                const uint16_t *q = (const uint16_t *)p + l * s_lane + 2 * c * s_k;
                dst[c * width + l] =
                    l >= lanes ? 0 : cell_from_bits(q[0], 2 * c + 1 < k ? q[s_k] : (uint16_t)0);
#else
                dst[c * width + l] =
                    l >= lanes ? 0.0f : (float)gk_load(p, dtype, l * s_lane + c * s_k);
#endif
            }
    }
}

/* Consecutive panels of NR lanes, [ceil(lanes / NR)][cells_of(k)][NR]. The result is that of
 * pack_panel for each panel. Contiguous lanes are read row by row across all panels, in the
 * order that the hardware prefetcher follows. */
INLINE void pack_panels(cell *dst, const void *src, gk_dtype dtype, int64_t s_lane, int64_t s_k,
                        int64_t lanes, int64_t k) {
    const int64_t es = dtype == GK_F32 ? 4 : 2, kc = cells_of(k), panel = kc * NR;
    int64_t whole = s_lane == 1 ? lanes / NR : 0;
    for (int64_t c = 0; c < kc && whole; ++c) {
        const char *row0 = (const char *)src + es * (c * PAIR * s_k);
        const char *row1 = PAIR == 2 && c * PAIR + 1 < k ? row0 + es * s_k : NULL;
        for (int64_t p = 0; p < whole; ++p) {
            cell *d = dst + p * panel + c * NR;
#if PAIR == 2
            if (row1) {
                vc two[2];
                vc_zip_two((const uint16_t *)row0 + p * NR, (const uint16_t *)row1 + p * NR, two);
                vc_store(d, two[0]);
                vc_store(d + W, two[1]);
                continue;
            }
#endif
            for (int v = 0; v < NV; ++v)
                vc_store(d + v * W, vc_load_across_k(row0, row1, dtype, p * NR + v * W, W));
        }
    }
    for (int64_t p = whole; p * NR < lanes; ++p)
        pack_panel(dst + p * panel, NR, gk_at(src, es * (p * NR * s_lane)), dtype, s_lane, s_k,
                   gk_min_i64(NR, lanes - p * NR), k);
}

/* dst[rows][ld] = src[row][k] with k contiguous, zeros up to the next whole vector. ld is a
 * multiple of W and has room for it. */
INLINE void pack_rows(cell *dst, int64_t ld, const void *src, gk_dtype dtype, int64_t row_stride,
                      int64_t rows, int64_t k) {
    const int64_t es = dtype == GK_F32 ? 4 : 2; /* signed: strides may be negative */
    const int64_t kc = cells_of(k);
    for (int64_t i = 0; i < rows; ++i) {
        const char *row = gk_at(src, es * (i * row_stride));
        for (int64_t c = 0; c < kc; c += W)
            vc_store(dst + i * ld + c, vc_load_along_k(row, dtype, c * PAIR, k - c * PAIR));
    }
}

#endif
