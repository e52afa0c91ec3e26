/* SPDX-License-Identifier: BSD-3-Clause */
/* int8.h: the register tile of 8-bit integers and the packing that it wants, as int8_ukr.c has them
 * for an instruction set and int8_amx.c on tiles.
 *
 *   a rows   [m][ld] cells, k side by side, zeros up to a whole vector
 *   b panel  [ceil(n / (2 w))][cells, padded to k_cells][2 w], columns side by side; what is past n
 *   and k counts as anything, since a is 0 there
 *   c        [m][ldc] uint32, sums modulo 2^32; ldc is a multiple of 2 w */
#ifndef GPUKERN_CPU_INT8_H
#define GPUKERN_CPU_INT8_H

#include "kernels.h"

typedef struct gk_int8_isa {
    int per;          /* codes of a cell, 2 or 4 */
    int mr;           /* rows of a strip */
    int k_cells;      /* b's panels are padded to multiples of so many cells: 1, or a tile's row */
    uint32_t flipped; /* what is xored to cells of b: of VPDPBUSD's quads each code + 128, so that
                         it is unsigned */
    /* C (+)= A B, m and n any */
    void (*product)(int64_t m, int64_t n, int64_t cells, const uint32_t *a, int64_t a_ld,
                    const uint32_t *b, uint32_t *c, int64_t ldc, bool accumulate);
    /* src[lane * s_lane + i * s_k], bytes */
    void (*pack_panels)(uint32_t *dst, const int8_t *src, int64_t s_lane, int64_t s_k,
                        int64_t lanes, int64_t k, uint32_t flipped);
    void (*pack_rows)(uint32_t *dst, int64_t ld, const int8_t *src, int64_t s_row, int64_t s_k,
                      int64_t rows, int64_t k);
    /* C = A B of small M, where b's k lies side by side: b[j * b_n + k] is read in place */
    void (*dots)(int64_t m, int64_t n, int64_t k, const uint32_t *a, int64_t a_ld, const int8_t *b,
                 int64_t b_n, uint32_t *c, int64_t ldc);
    /* excess[i] (+)= what c's row i holds too much: 128 times the sum of a's row where b is
     * flipped, else 0 */
    void (*excess)(uint32_t *excess, const uint32_t *a, int64_t a_ld, int64_t rows, int64_t cells,
                   bool accumulate);
    void (*end_task)(void); /* at the end of each task, on its thread; NULL but on tiles */
} gk_int8_isa;

#endif
