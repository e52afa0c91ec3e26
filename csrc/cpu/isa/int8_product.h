/* SPDX-License-Identifier: BSD-3-Clause */
/* int8_product.h: a quant_product whose 8-bit integers are multiplied directly, by the register
 * tile of int8_ukr.c or int8_amx.c. scaled_gemm.c, sparse_gemm.c and grouped_gemm.c use it.
 *
 *  out = activation(scale_a scale_b (A B) + beta c + bias)
 *
 * With several scales along k the scaled product is summed over blocks of k. Sums within a block
 * are exact int32. With one scale along k the int32 sum runs over all of k, and blocks are only
 * as long as the caches allow. The bits of a result therefore do not depend on the instruction
 * set. Workspace per worker: rows of a, panels of b, sums, a block's product, the scales of b,
 * the excess of each row (int8.h), b as read. */
#ifndef GPUKERN_CPU_INT8_PRODUCT_H
#define GPUKERN_CPU_INT8_PRODUCT_H

#include "../int8.h"
#include "quant_product.h"
#include "vec_int8.h"

extern const gk_int8_isa SYM(gk_int8_pairs);
#if QUADS
extern const gk_int8_isa SYM(gk_int8_quads);
#define INT8_QUADS (&SYM(gk_int8_quads))
#define HAS_QUADS gk_cpu_multiplies_quads(ISA_LEVEL >= 3)
#else
#define INT8_QUADS NULL
#define HAS_QUADS false
#endif

/* Xeon of model 207, one core. int8 GOP/s at 1024 cubed: 256 x 256 453, 280 x 512 460. Small M
 * at 4096 squared: 11.8 GB/s of b if it is contiguous along n, 19 if it is read in place (packed
 * 13). Plain reading reaches 27. */
enum {
    INT8_MB = 280, /* rows and columns of a task: operands and sums take 1 MiB */
    INT8_NB = 512,
    INT8_KB = 512,     /* of k: a panel of b takes 16 KiB */
    INT8_DOT_ROWS = 4, /* up to this many rows, a b that is contiguous along k is read in place */
    /* up to this M the time goes into reading b, so longer ranges of b are read, along n or k */
    INT8_SMALL_M = 32,
    INT8_FEW_NB = 1024,
    INT8_FEW_KB = 128,
    INT8_FEW_NB_ALONG = 64,
    INT8_FEW_KB_ALONG = 2048
};

/* True if b is read in place. A block is then all of k, or the part that shares one scale. */
static bool int8_in_place(const quant_product *p) {
    return p->m <= INT8_DOT_ROWS && !p->read_codes && p->b_k == 1;
}

/* The buffers of a worker. */
typedef struct int8_memory {
    uint32_t *a, *panels, *sums, *excess;
    float *part, *scales;
    int8_t *codes;
    size_t bytes;
} int8_memory;

static int8_memory int8_memory_of(const quant_product *p, char *base) {
    const int64_t cells = gk_round_up(gk_ceil_div(p->block, p->int8->per), p->int8->k_cells),
                  mn = p->mb * p->nb;
    int8_memory x;
    int64_t at = 0;
    x.a = gk_at(base, at);
    at += gk_round_up(4 * p->mb * p->a_ld, 64);
    x.panels = gk_at(base, at);
    at += gk_round_up(int8_in_place(p) ? 0 : 4 * p->nb * cells, 64);
    x.sums = gk_at(base, at);
    at += gk_round_up(4 * mn, 64);
    x.part = gk_at(base, at);
    at += gk_round_up(scaled_along_k(p) || gk_is_code(p->out_dtype) ? 4 * mn : 0, 64);
    x.scales = gk_at(base, at);
    at += gk_round_up(4 * (p->nb + W), 64);
    x.excess = gk_at(base, at);
    at += gk_round_up(4 * p->mb, 64);
    x.codes = gk_at(base, at);
    at += gk_round_up(p->read_codes ? p->nb * p->block : 0, 64);
    x.bytes = (size_t)at;
    return x;
}

/* Chooses the size of tasks: tasks of fewer columns if there would be fewer than `least`. Returns
 * their number. */
static int64_t int8_tasks(quant_product *p, int64_t least) {
    const bool few = p->m <= INT8_SMALL_M;
    p->block = scaled_block(p, !few ? INT8_KB : p->b_by_k ? INT8_FEW_KB : INT8_FEW_KB_ALONG);
    if (int8_in_place(p)) p->block = scaled_block(p, p->k);
    p->block = gk_min_i64(p->block, gk_round_up(gk_max_i64(1, p->k), p->int8->per));
    p->row_tasks = gk_ceil_div(p->m, INT8_MB);
    p->mb = p->row_tasks ? gk_ceil_div(p->m, p->row_tasks) : 0;
    if (p->mb > 4 * p->int8->mr) p->mb = gk_round_up(p->mb, p->int8->mr); /* whole strips */
    p->nb = !few ? INT8_NB : p->b_by_k ? INT8_FEW_NB : INT8_FEW_NB_ALONG;
    while (p->nb > NR && p->row_tasks * gk_ceil_div(p->n, p->nb) < least) p->nb /= 2;
    p->col_tasks = gk_ceil_div(p->n, p->nb);
    /* one line more than a multiple of 1 KiB */
    p->a_ld = gk_round_up(gk_ceil_div(p->block, p->int8->per), W) + 16;
    p->worker_bytes = int8_memory_of(p, NULL).bytes;
    return p->row_tasks * p->col_tasks;
}

static void int8_plan(quant_product *p, const gk_context *ctx, gk_plan *plan) {
    plan->tasks = int8_tasks(p, 2 * gk_num_threads(ctx));
    plan->tile[0] = p->mb;
    plan->tile[1] = p->nb;
    plan->tile[2] = p->block;
    plan->tile[3] = p->int8->mr * NR;
    plan->workspace_bytes = (size_t)gk_num_workers(ctx, plan->tasks) * p->worker_bytes;
}

/* sums -= the excess of each row */
static void int8_correct(const quant_product *p, uint32_t *sums, const uint32_t *excess,
                         int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; j += W) {
            uint32_t *to = sums + i * p->nb + j;
            vw_store(to, vw_load(to) - excess[i]);
        }
}

static void int8_task(const quant_product *p, int64_t t, char *memory) {
    const gk_int8_isa *isa = p->int8;
    const int8_memory x = int8_memory_of(p, memory);
    const int64_t row = t / p->col_tasks * p->mb, rows = gk_min_i64(p->mb, p->m - row);
    const int64_t col = t % p->col_tasks * p->nb, cols = gk_min_i64(p->nb, p->n - col);
    const bool along_k = scaled_along_k(p), in_place = int8_in_place(p);
    if (p->k == 0) {
        memset(x.sums, 0, (size_t)(4 * p->mb * p->nb));
        memset(x.excess, 0, (size_t)(4 * p->mb));
    }
    for (int64_t k0 = 0; k0 < p->k; k0 += p->block) {
        const int64_t kn = gk_min_i64(p->block, p->k - k0), cells = gk_ceil_div(kn, isa->per);
        const int8_t *b = p->b;
        isa->pack_rows(x.a, p->a_ld, (const int8_t *)p->a + row * p->a_m + k0 * p->a_k, p->a_m,
                       p->a_k, rows, kn);
        uint32_t *to = along_k ? (uint32_t *)(void *)x.part : x.sums;
        const bool more = k0 > 0 && !along_k;
        if (p->read_codes) {
            p->read_codes(p, x.codes, p->block, col, cols, k0, kn);
            isa->pack_panels(x.panels, x.codes, p->block, 1, cols, kn, isa->flipped);
        } else if (!in_place) {
            isa->pack_panels(x.panels, b + k0 * p->b_k + col * p->b_n, p->b_n, p->b_k, cols, kn,
                             isa->flipped);
        }
        if (in_place)
            isa->dots(rows, cols, kn, x.a, p->a_ld, b + k0 + col * p->b_n, p->b_n, to, p->nb);
        else
            isa->product(rows, cols, cells, x.a, p->a_ld, x.panels, to, p->nb, more);
        isa->excess(x.excess, x.a, p->a_ld, rows, cells, more);
        if (!along_k) continue;
        int8_correct(p, to, x.excess, rows, cols);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < cols; j += W)
                vf_store(x.part + i * p->nb + j, vf_from_vi((vi)vw_load(to + i * p->nb + j)));
        join_scaled(p, (float *)(void *)x.sums, x.part, x.scales, row, rows, col, cols, k0,
                    k0 == 0);
    }
    if (isa->end_task) isa->end_task();
    if (!along_k) scale_sums(p, x.sums, x.excess, x.scales, row, rows, col, cols);
    store_sums(p, (float *)(void *)x.sums, x.part, row, rows, col, cols);
}

#endif
