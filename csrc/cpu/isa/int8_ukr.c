/* SPDX-License-Identifier: BSD-3-Clause */
/* int8_ukr: the register tile of 8-bit integers, C[m][n] (+)= sum_k A[m][k] B[k][n] exactly, and
 * its packing. Compiled once per ISA: with pairs for every machine, with quads for machines with
 * VNNI (vec_int8.h).
 *
 * a rows [m][ld] cells, b panels [cells][NR], c [m][ldc] as in int8.h. As in gemm_ukr.c, a cell
 * of k takes NV loads of B and M broadcasts of A. With quads B holds code + 128, so C is too
 * large by 128 times the sum of A's row; the reader of C subtracts that (excess). */
#include "../int8.h"
#include "vec_int8.h"

#define PLUS_128 0x80808080u /* xor mask that adds 128 to each code of a quad */

/* ---- 1 the register tile --------------------------------------------------------------------- */
/* Rows of a strip. The largest uses all registers. The sizes are chosen so that a remainder
 * takes at most three strips and few instances are compiled. */
#if ISA_LEVEL >= 3
#define STRIPS(X) X(14) X(7) X(4) X(2) X(1)
#else
#define STRIPS(X) X(6) X(3) X(2) X(1)
#endif

#define TILE(form, target, dot, M)                                                                \
    target static void form##_##M(int64_t cells, const uint32_t *a, int64_t step,                 \
                                  const uint32_t *b, uint32_t *c, int64_t ldc, bool accumulate) { \
        vw acc[M][NV];                                                                            \
        _Pragma("GCC unroll 16") for (int i = 0; i < M; ++i)                                      \
            _Pragma("GCC unroll 2") for (int v = 0; v < NV; ++v) acc[i][v] = vw_set1(0);          \
        /* one pointer per three rows, the others by index register, or the address registers run \
         * out */                                                                                 \
        const uint32_t *row[5] = {a, a + 3 * step, a + 6 * step, a + 9 * step, a + 12 * step};    \
        for (int64_t k = 0; k < cells; ++k, b += NR) {                                            \
            const vw b0 = vw_load(b), b1 = vw_load(b + W);                                        \
            _Pragma("GCC unroll 16") for (int i = 0; i < M; ++i) {                                \
                const vw x = vw_set1(row[i / 3][i % 3 * step]);                                   \
                acc[i][0] = dot(acc[i][0], b0, x);                                                \
                acc[i][1] = dot(acc[i][1], b1, x);                                                \
            }                                                                                     \
            _Pragma("GCC unroll 5") for (int i = 0; i < 5; ++i)++ row[i];                         \
        }                                                                                         \
        _Pragma("GCC unroll 16") for (int i = 0; i < M; ++i)                                      \
            _Pragma("GCC unroll 2") for (int v = 0; v < NV; ++v) {                                \
            uint32_t *to = c + i * ldc + v * W;                                                   \
            vw_store(to, accumulate ? acc[i][v] + vw_load(to) : acc[i][v]);                       \
        }                                                                                         \
    }
#define TAKE(form, M)                                                                   \
    while (m - i >= M) {                                                                \
        form##_##M(cells, a + i * a_ld, a_ld, panel, c + i * ldc + j, ldc, accumulate); \
        i += M;                                                                         \
    }
#define PRODUCT(form)                                                                     \
    static void form##_product(int64_t m, int64_t n, int64_t cells, const uint32_t *a,    \
                               int64_t a_ld, const uint32_t *b, uint32_t *c, int64_t ldc, \
                               bool accumulate) {                                         \
        for (int64_t j = 0; j < n; j += NR) {                                             \
            const uint32_t *panel = b + j * cells;                                        \
            int64_t i = 0;                                                                \
            STRIPS(TAKE_##form)                                                           \
        }                                                                                 \
    }
#define PAIRS_TILE(M) TILE(pairs, , vw_dot_pairs, M)
#define TAKE_pairs(M) TAKE(pairs, M)
STRIPS(PAIRS_TILE)
PRODUCT(pairs)
#if QUADS
#define QUADS_TILE(M) TILE(quads, QUADS_TARGET, vw_dot_quads, M)
#define TAKE_quads(M) TAKE(quads, M)
STRIPS(QUADS_TILE)
PRODUCT(quads)
#endif

/* ---- 2 packing ------------------------------------------------------------------------------- */
/* One cell of each of W lanes. `left` lanes exist with k codes each; the rest is 0. */
INLINE vw code_of(const int per, const uint8_t *lanes, const int i) {
    const vw code = (vw)vi_from_bytes(lanes);
    return per == 4 ? code << (8 * i) : ((vw)((vi)(code << 24) >> 24) & 0xffff) << (16 * i);
}

INLINE vw cell_across(const int per, const int8_t *src, int64_t s_lane, int64_t s_k, int64_t left,
                      int64_t k) {
    vw cell = vw_set1(0);
    if (s_lane == 1 && left >= W && k >= per) {
#pragma GCC unroll 4
        for (int i = 0; i < per; ++i) cell |= code_of(per, (const uint8_t *)src + i * s_k, i);
        return cell;
    }
    for (int i = 0; i < per && i < k; ++i) {
        uint8_t some[W] = {0};
        for (int64_t l = 0; l < W && l < left; ++l) some[l] = (uint8_t)src[i * s_k + l * s_lane];
        cell |= code_of(per, some, i);
    }
    return cell;
}

/* W cells of one lane with k codes; the rest is 0. */
INLINE vw cells_along(const int per, const int8_t *src, int64_t k) {
    int8_t some[4 * W] = {0};
    if (k < per * W) {
        if (k > 0) memcpy(some, src, (size_t)k);
        src = some;
    }
    if (per == 4) return (vw)vi_load_bytes((const uint8_t *)src);
    return vw_pairs_of(src);
}

INLINE void transpose(vw r[W]) {
    vc t[W];
    for (int i = 0; i < W; ++i) t[i] = (vc)r[i];
    vc_transpose(t);
    for (int i = 0; i < W; ++i) r[i] = (vw)t[i];
}

INLINE void panels(const int per, uint32_t flipped, uint32_t *dst, const int8_t *src,
                   int64_t s_lane, int64_t s_k, int64_t lanes, int64_t k) {
    const int64_t cells = gk_ceil_div(k, per);
    /* row by row across all panels, in the order that the hardware prefetcher follows */
    if (s_k != 1) {
        const int64_t whole = s_lane == 1 ? lanes / NR * NR : 0;
        for (int64_t c = 0; c < cells; ++c) {
            const bool all = (c + 1) * per <= k;
            uint32_t *to = dst + c * NR;
            for (int64_t l = 0; all && l < whole; l += NR, to += NR * cells)
                for (int v = 0; v < NV; ++v)
                    vw_store(to + v * W,
                             cell_across(per, src + c * per * s_k + l + v * W, 1, s_k, W, per) ^
                                 flipped);
            for (int64_t l = all ? whole : 0; l < lanes; l += W) {
                const vw x = cell_across(per, src + c * per * s_k + l * s_lane, s_lane, s_k,
                                         lanes - l, k - c * per);
                vw_store(dst + l / NR * NR * cells + c * NR + l % NR, x ^ flipped);
            }
        }
        return;
    }
    for (int64_t l = 0; l < lanes; l += W)
        for (int64_t c = 0; c < cells; c += W) {
            vw r[W];
            for (int64_t i = 0; i < W; ++i)
                r[i] = l + i < lanes
                           ? cells_along(per, src + (l + i) * s_lane + c * per, k - c * per)
                           : vw_set1(0);
            transpose(r);
            uint32_t *to = dst + l / NR * NR * cells + c * NR + l % NR;
            for (int64_t i = 0; i < gk_min_i64(W, cells - c); ++i)
                vw_store(to + i * NR, r[i] ^ flipped);
        }
}

INLINE void rows(const int per, uint32_t *dst, int64_t ld, const int8_t *src, int64_t s_row,
                 int64_t s_k, int64_t rows, int64_t k) {
    const int64_t cells = gk_ceil_div(k, per);
    if (s_k == 1) {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t c = 0; c < cells; c += W)
                vw_store(dst + i * ld + c,
                         cells_along(per, src + i * s_row + c * per, k - c * per));
        return;
    }
    for (int64_t i = 0; i < rows; i += W)
        for (int64_t c = 0; c < cells; c += W) {
            vw r[W];
            for (int64_t j = 0; j < W; ++j)
                r[j] = cell_across(per, src + i * s_row + (c + j) * per * s_k, s_row, s_k, rows - i,
                                   k - (c + j) * per);
            transpose(r);
            for (int64_t j = 0; j < gk_min_i64(W, rows - i); ++j)
                vw_store(dst + (i + j) * ld + c, r[j]);
        }
}

/* ---- 3 small M, b contiguous along k: dot products that read b in place ---------------------- */
/* Each column prefetches the next one, because the hardware prefetcher starts anew at every
 * page. */
#define DOTS(form, target, dot, per, flipped, M)                                                 \
    target static void form##_dots_##M(int64_t n, int64_t k, const uint32_t *a, int64_t a_ld,    \
                                       const int8_t *b, int64_t b_n, uint32_t *c, int64_t ldc) { \
        const int64_t cells = gk_ceil_div(k, per), whole = k / (2 * W * per) * 2 * W;            \
        for (int64_t j = 0; j < n; j += W) {                                                     \
            vw sums[M][W];                                                                       \
            for (int64_t l = 0; l < W; ++l) {                                                    \
                const int8_t *from = b + gk_min_i64(j + l, n - 1) * b_n;                         \
                vw acc[M][2];                                                                    \
                for (int i = 0; i < M; ++i) acc[i][0] = acc[i][1] = vw_set1(0);                  \
                int64_t x = 0;                                                                   \
                for (; x < whole; x += 2 * W) {                                                  \
                    __builtin_prefetch(from + b_n + x * per),                                    \
                        __builtin_prefetch(from + b_n + (x + W) * per);                          \
                    const vw b0 = cells_along(per, from + x * per, per * W) ^ flipped;           \
                    const vw b1 = cells_along(per, from + (x + W) * per, per * W) ^ flipped;     \
                    _Pragma("GCC unroll 4") for (int i = 0; i < M; ++i) {                        \
                        acc[i][0] = dot(acc[i][0], b0, vw_load(a + i * a_ld + x));               \
                        acc[i][1] = dot(acc[i][1], b1, vw_load(a + i * a_ld + x + W));           \
                    }                                                                            \
                }                                                                                \
                for (; x < cells; x += W) {                                                      \
                    const vw b0 = cells_along(per, from + x * per, k - x * per) ^ flipped;       \
                    for (int i = 0; i < M; ++i)                                                  \
                        acc[i][0] = dot(acc[i][0], b0, vw_load(a + i * a_ld + x));               \
                }                                                                                \
                for (int i = 0; i < M; ++i) sums[i][l] = acc[i][0] + acc[i][1];                  \
            }                                                                                    \
            for (int i = 0; i < M; ++i) {                                                        \
                vw sum = vw_set1(0);                                                             \
                transpose(sums[i]);                                                              \
                for (int l = 0; l < W; ++l) sum += sums[i][l];                                   \
                vw_store(c + i * ldc + j, sum);                                                  \
            }                                                                                    \
        }                                                                                        \
    }
#define TAKE_DOTS(form, M)                                                   \
    while (m - i >= M) {                                                     \
        form##_dots_##M(n, k, a + i * a_ld, a_ld, b, b_n, c + i * ldc, ldc); \
        i += M;                                                              \
    }
#define DOT_ROWS(form, target, dot, per, flipped)                                             \
    DOTS(form, target, dot, per, flipped, 4)                                                  \
    DOTS(form, target, dot, per, flipped, 2)                                                  \
    DOTS(form, target, dot, per, flipped, 1)                                                  \
    static void form##_dots(int64_t m, int64_t n, int64_t k, const uint32_t *a, int64_t a_ld, \
                            const int8_t *b, int64_t b_n, uint32_t *c, int64_t ldc) {         \
        int64_t i = 0;                                                                        \
        TAKE_DOTS(form, 4) TAKE_DOTS(form, 2) TAKE_DOTS(form, 1)                              \
    }
DOT_ROWS(pairs, , vw_dot_pairs, 2, 0)
#if QUADS
DOT_ROWS(quads, QUADS_TARGET, vw_dot_quads, 4, PLUS_128)
#endif

/* ---- 4 the interface of int8.h --------------------------------------------------------------- */
#define PACKING(form, per)                                                                   \
    static void form##_panels(uint32_t *dst, const int8_t *src, int64_t s_lane, int64_t s_k, \
                              int64_t lanes, int64_t k, uint32_t flipped) {                  \
        if (s_k != 1 && s_lane == 1)                                                         \
            panels(per, flipped, dst, src, 1, s_k, lanes, k);                                \
        else                                                                                 \
            panels(per, flipped, dst, src, s_lane, s_k, lanes, k);                           \
    }                                                                                        \
    static void form##_rows(uint32_t *dst, int64_t ld, const int8_t *src, int64_t s_row,     \
                            int64_t s_k, int64_t m, int64_t k) {                             \
        rows(per, dst, ld, src, s_row, s_k, m, k);                                           \
    }

PACKING(pairs, 2)
static void pairs_excess(uint32_t *excess, const uint32_t *a, int64_t a_ld, int64_t rows,
                         int64_t cells, bool accumulate) {
    (void)a, (void)a_ld, (void)cells;
    if (!accumulate) memset(excess, 0, sizeof *excess * (size_t)rows);
}
const gk_int8_isa SYM(gk_int8_pairs) = {
    2, MR, 1, 0, pairs_product, pairs_panels, pairs_rows, pairs_dots, pairs_excess, NULL};

#if QUADS
PACKING(quads, 4)
QUADS_TARGET static void quads_excess(uint32_t *excess, const uint32_t *a, int64_t a_ld,
                                      int64_t rows, int64_t cells, bool accumulate) {
    for (int64_t i = 0; i < rows; ++i) {
        vw sums = vw_set1(0);
        uint32_t sum = 0;
        for (int64_t c = 0; c < cells; c += W)
            sums = vw_dot_quads(sums, vw_set1(0x01010101), vw_load(a + i * a_ld + c));
        for (int l = 0; l < W; ++l) sum += sums[l];
        excess[i] = 128 * sum + (accumulate ? excess[i] : 0);
    }
}
const gk_int8_isa SYM(gk_int8_quads) = {
    4, MR, 1, PLUS_128, quads_product, quads_panels, quads_rows, quads_dots, quads_excess, NULL};
#endif
