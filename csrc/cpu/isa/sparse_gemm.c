/* SPDX-License-Identifier: BSD-3-Clause */
/* sparse_gemm: a times a 2:4 sparse weight by quant_product.h, or by int8_product.h for int8.
 * Compiled once per ISA. A task expands the values of its columns to dense rows block by block,
 * so the gain is in reading the weight, not in multiplications. */
#include "int8_product.h"

typedef struct sparse_plan {
    quant_product p;
    int64_t meta_row; /* bytes */
} sparse_plan;
GK_PLAN_HOLDS(sparse_plan);

typedef struct sparse_source {
    const gk_sparse_gemm_args *g;
    int64_t k;
} sparse_source;

typedef struct sparse_job {
    const quant_product *p;
    char *workspace;
} sparse_job;

/* Expands rows of the weight at [k0, k0 + kn) to dense values with zeros. */
static void read_sparse(const quant_product *p, elem *to, int64_t ld, int64_t col, int64_t cols,
                        int64_t k0, int64_t kn) {
    const sparse_source *s = p->b;
    const gk_tensor *values = &s->g->values, *meta = &s->g->meta;
    const int64_t bytes = (int64_t)gk_dtype_bytes(values->dtype);
    elem two[KB * 2 + 2 * W * PAIR]; /* the stored values of a row, decoded */
    for (int64_t j = 0; j < cols; ++j) {
        const uint8_t *places = (const uint8_t *)meta->data + (col + j) * meta->stride[0];
        decode(two, 0,
               (const char *)values->data + bytes * ((col + j) * values->stride[0] + k0 / 2),
               values->dtype, 0, 1, 1, kn / 2);
        elem *row = to + j * ld;
        memset(row, 0, (size_t)gk_round_up(kn, W * PAIR) * sizeof *row);
        for (int64_t q = 0; q < kn / 4; ++q) { /* k is a multiple of 4 */
            const int64_t group = k0 / 4 + q;
            const int four = places[group / 2] >> 4 * (group % 2) & 15;
            row[4 * q + (four & 3)] = two[2 * q];
            row[4 * q + (four >> 2)] = two[2 * q + 1];
        }
    }
}

static void read_sparse_codes(const quant_product *p, int8_t *to, int64_t ld, int64_t col,
                              int64_t cols, int64_t k0, int64_t kn) {
    const sparse_source *s = p->b;
    const gk_tensor *values = &s->g->values, *meta = &s->g->meta;
    for (int64_t j = 0; j < cols; ++j) {
        const uint8_t *places = (const uint8_t *)meta->data + (col + j) * meta->stride[0];
        const int8_t *two = (const int8_t *)values->data + (col + j) * values->stride[0] + k0 / 2;
        int8_t *row = to + j * ld;
        memset(row, 0, (size_t)kn);
        for (int64_t q = 0; q < kn / 4; ++q) { /* k is a multiple of 4 */
            const int64_t group = k0 / 4 + q;
            const int four = places[group / 2] >> 4 * (group % 2) & 15;
            row[4 * q + (four & 3)] = two[2 * q];
            row[4 * q + (four >> 2)] = two[2 * q + 1];
        }
    }
}

static void sparse_task(void *arg, int64_t t, int64_t worker) {
    const sparse_job *jb = arg;
    char *memory = jb->workspace + (size_t)worker * jb->p->worker_bytes;
    if (jb->p->int8)
        int8_task(jb->p, t, memory);
    else
        quant_task(jb->p, t, memory);
}

bool SYM(gk_plan_sparse_gemm)(const gk_int8_isa *int8, const gk_context *ctx, const void *args,
                              gk_plan *plan); /* int8_amx.c */
bool SYM(gk_plan_sparse_gemm)(const gk_int8_isa *int8, const gk_context *ctx, const void *args,
                              gk_plan *plan) {
    const gk_sparse_gemm_args *g = args;
    quant_product *p = &GK_OWN(sparse_plan, plan)->p;
    memset(p, 0, sizeof *p);
    p->m = g->a.shape[0];
    p->k = g->a.shape[1];
    p->n = g->values.shape[0];
    p->a_dtype = g->a.dtype;
    p->a_m = g->a.stride[0];
    p->a_k = g->a.stride[1];
    p->read_b = read_sparse;
    if (g->scale_a) p->scale_a = gk_scales_of(g->scale_a, p->m, p->k, false);
    if (g->scale_b) p->scale_b = gk_scales_of(g->scale_b, p->k, p->n, true);
    p->exact = g->a.dtype == GK_I8;
    quant_results(p, g->activation, &g->out, g->bias);
    p->e.out_row = p->n;
    if (p->exact) {
        p->int8 = int8;
        p->read_codes = read_sparse_codes;
        int8_plan(p, ctx, plan);
    } else {
        quant_plan(p, ctx, plan);
    }
    return true;
}

static bool plan_sparse(const gk_context *ctx, const void *args, gk_plan *plan) {
    return SYM(gk_plan_sparse_gemm)(&SYM(gk_int8_pairs), ctx, args, plan);
}

static void run_sparse(const gk_context *ctx, const void *args, const gk_plan *plan,
                       void *workspace) {
    const gk_sparse_gemm_args *g = args;
    quant_product p = GK_OWN_CONST(sparse_plan, plan)->p;
    const sparse_source source = {g, p.k};
    p.a = g->a.data;
    p.b = &source;
    if (g->scale_a) p.scale_a.data = g->scale_a->data;
    if (g->scale_b) p.scale_b.data = g->scale_b->data;
    p.e.out = g->out.data;
    p.e.bias = g->bias ? g->bias->data : NULL;
    sparse_job jb = {&p, workspace};
    gk_parallel(ctx, plan->tasks, sparse_task, &jb);
}
const gk_cpu_kernel SYM(gk_sparse_gemm) = {plan_sparse, run_sparse};

/* serves int8 if the machine multiplies quads */
static bool plan_vnni(const gk_context *ctx, const void *args, gk_plan *plan) {
    return HAS_QUADS && SYM(gk_plan_sparse_gemm)(INT8_QUADS, ctx, args, plan);
}
const gk_cpu_kernel SYM(gk_sparse_gemm_vnni) = {plan_vnni, run_sparse};
