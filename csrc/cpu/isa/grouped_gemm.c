/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_gemm: products of groups of rows or of groups of k, one after the other by
 * quant_product.h, or by int8_product.h for int8. Compiled once per ISA. a [M, K], and b [G, K, N]
 * or [K, N], are float32, bfloat16, float16, or 8-bit floats or int8 with scales. Group ends are
 * read from offs when the call runs. */
#include "int8_product.h"

typedef struct grouped_plan {
    quant_product p; /* of a group that covers all of a */
    bool by_rows;
} grouped_plan;
GK_PLAN_HOLDS(grouped_plan);

typedef struct grouped_job {
    const quant_product *p;
    char *workspace;
    size_t worker_bytes;
} grouped_job;

static void grouped_task(void *arg, int64_t t, int64_t worker) {
    const grouped_job *jb = arg;
    char *memory = jb->workspace + (size_t)worker * jb->worker_bytes;
    if (jb->p->int8)
        int8_task(jb->p, t, memory);
    else
        quant_task(jb->p, t, memory);
}

/* Enough memory for every group. A group with more rows needs no less, but the block of k follows
 * from M in three ranges: b is read in place, small M, and larger M. */
static size_t most_bytes(const quant_product *planned) {
    const int64_t rows[3] = {INT8_DOT_ROWS, INT8_SMALL_M, INT8_MB};
    size_t most = 0;
    if (!planned->int8) return quant_most_bytes(planned);
    for (int i = 0; i < 3; ++i) {
        quant_product p = *planned;
        p.m = gk_min_i64(p.m, rows[i]);
        int8_tasks(&p, 0);
        most = p.worker_bytes > most ? p.worker_bytes : most;
    }
    return most;
}

static bool plan_of(const gk_int8_isa *int8, const gk_context *ctx, const void *args,
                    gk_plan *plan) {
    const gk_grouped_gemm_args *g = args;
    grouped_plan *x = GK_OWN(grouped_plan, plan);
    quant_product *p = &x->p;
    memset(x, 0, sizeof *x);
    const int nd = g->b.ndim;
    x->by_rows = nd == 3;
    p->m = g->a.shape[0];
    p->k = g->a.shape[1];
    p->n = g->b.shape[nd - 1];
    p->a_dtype = g->a.dtype;
    p->a_m = g->a.stride[0];
    p->a_k = g->a.stride[1];
    p->b_dtype = g->b.dtype;
    p->b_k = g->b.stride[nd - 2];
    p->b_n = g->b.stride[nd - 1];
    p->b_by_k = p->b_k != 1 && p->b_n == 1;
    p->read_b = read_matrix;
    if (g->scale_a) p->scale_a = gk_scales_of(g->scale_a, p->m, p->k, false);
    if (g->scale_b) p->scale_b = gk_scales_of(g->scale_b, p->k, p->n, true);
    quant_results(p, g->activation, &g->out, g->bias);
    p->e.out_row = p->n;
    if (g->a.dtype == GK_I8) {
        p->int8 = int8;
        p->exact = !scaled_along_k(p);
        int8_plan(p, ctx, plan);
    } else {
        quant_plan(p, ctx, plan);
    }
    plan->chunks = g->offs.shape[0];
    plan->workspace_bytes = (size_t)gk_num_workers(ctx, GK_MAX_THREADS) * most_bytes(p);
    return true;
}

static bool plan_grouped(const gk_context *ctx, const void *args, gk_plan *plan) {
    return plan_of(&SYM(gk_int8_pairs), ctx, args, plan);
}

static const char *at(const void *data, int64_t bytes) {
    return data ? (const char *)data + bytes : NULL;
} /* K may be 0 */

static void run_grouped(const gk_context *ctx, const void *args, const gk_plan *plan,
                        void *workspace) {
    const gk_grouped_gemm_args *g = args;
    const grouped_plan *x = GK_OWN_CONST(grouped_plan, plan);
    const int64_t groups = g->offs.shape[0], a_bytes = (int64_t)gk_dtype_bytes(g->a.dtype),
                  n = x->p.n;
    const int64_t b_bytes = (int64_t)gk_dtype_bytes(g->b.dtype),
                  out_bytes = (int64_t)gk_dtype_bytes(g->out.dtype);
    const size_t worker_bytes = most_bytes(&x->p);
    int64_t begin = 0;
    if (gk_numel(&g->out) == 0) return;
    for (int64_t i = 0; i < groups; ++i) {
        const int64_t end = gk_i32_at(&g->offs, i);
        quant_product p = x->p;
        if (g->scale_a) p.scale_a.data = g->scale_a->data;
        if (g->scale_b) p.scale_b.data = g->scale_b->data;
        p.a = at(g->a.data, a_bytes * begin * (x->by_rows ? p.a_m : p.a_k));
        if (g->bias)
            p.e.bias =
                (const char *)g->bias->data + (int64_t)gk_dtype_bytes(g->bias->dtype) *
                                                  (g->bias->ndim == 2 ? i * g->bias->stride[0] : 0);
        if (x->by_rows) {
            p.m = end - begin;
            p.row0 = begin;
            p.b = at(g->b.data, b_bytes * i * g->b.stride[0]);
            if (g->scale_b && g->scale_b->ndim == 3)
                p.scale_b.data =
                    (const char *)g->scale_b->data +
                    (int64_t)gk_dtype_bytes(g->scale_b->dtype) * i * g->scale_b->stride[0];
            p.e.out = (char *)g->out.data + out_bytes * begin * n;
        } else {
            p.k = end - begin;
            if (p.k == 0) { /* an empty sum is 0, also where a scale is NaN */
                p.scale_a.data = NULL;
                p.scale_b.data = NULL;
            }
            p.b = at(g->b.data, b_bytes * begin * p.b_k);
            p.e.out = (char *)g->out.data + out_bytes * i * p.m * n;
        }
        begin = end;
        grouped_job jb = {&p, workspace, worker_bytes};
        const int64_t tasks =
            p.int8 ? int8_tasks(&p, 2 * gk_num_threads(ctx)) : quant_tasks(&p, ctx);
        gk_parallel(ctx, tasks, grouped_task, &jb);
    }
    if (x->by_rows && begin < x->p.m)
        memset((char *)g->out.data + out_bytes * begin * n, 0,
               (size_t)(out_bytes * (x->p.m - begin) * n));
}
const gk_cpu_kernel SYM(gk_grouped_gemm) = {plan_grouped, run_grouped};

/* serves int8 if the machine multiplies quads */
static bool plan_vnni(const gk_context *ctx, const void *args, gk_plan *plan) {
    return HAS_QUADS && plan_of(INT8_QUADS, ctx, args, plan);
}
const gk_cpu_kernel SYM(gk_grouped_gemm_vnni) = {plan_vnni, run_grouped};
