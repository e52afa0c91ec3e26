/* SPDX-License-Identifier: BSD-3-Clause */
/* int8.h: the interface between the int8 products (int8_product.h) and their register tiles:
 * int8_ukr.c for each instruction set, int8_amx.c on AMX tiles. A cell is 32 bits and holds
 * `per` codes that are neighbours along k.
 *
 *  a rows   [m][ld] cells, k contiguous, zeros up to a whole vector
 *  b panel  [ceil(n / (2 w))][cells, padded to k_cells][2 w], columns contiguous; cells beyond n
 *           and k may hold anything, because a is 0 there
 *  c        [m][ldc] uint32, sums modulo 2^32; ldc is a multiple of 2 w */
#ifndef GPUKERN_CPU_INT8_H
#define GPUKERN_CPU_INT8_H

#include "kernels.h"

typedef struct gk_int8_isa {
    int per;     /* codes in a cell, 2 or 4 */
    int mr;      /* rows of a strip */
    int k_cells; /* b's panels are padded to a multiple of this many cells: 1, or a tile's row */
    uint32_t flipped; /* xor mask for the cells of b; with VPDPBUSD it adds 128 to each code, which
                         makes b unsigned */
    /* C (+)= A B for any m and n */
    void (*product)(int64_t m, int64_t n, int64_t cells, const uint32_t *a, int64_t a_ld,
                    const uint32_t *b, uint32_t *c, int64_t ldc, bool accumulate);
    /* packs the bytes src[lane * s_lane + i * s_k] */
    void (*pack_panels)(uint32_t *dst, const int8_t *src, int64_t s_lane, int64_t s_k,
                        int64_t lanes, int64_t k, uint32_t flipped);
    void (*pack_rows)(uint32_t *dst, int64_t ld, const int8_t *src, int64_t s_row, int64_t s_k,
                      int64_t rows, int64_t k);
    /* C = A B for small M and a b whose k is contiguous; b[j * b_n + k] is read in place */
    void (*dots)(int64_t m, int64_t n, int64_t k, const uint32_t *a, int64_t a_ld, const int8_t *b,
                 int64_t b_n, uint32_t *c, int64_t ldc);
    /* excess[i] (+)= the amount by which row i of c is too large: 128 times the sum of a's row
     * if b is flipped, else 0 */
    void (*excess)(uint32_t *excess, const uint32_t *a, int64_t a_ld, int64_t rows, int64_t cells,
                   bool accumulate);
    /* called at the end of each task, on its thread; NULL except on AMX tiles */
    void (*end_task)(void);
} gk_int8_isa;

#endif
