/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm: the product of two quantised matrices by quant_product.h, or by int8_product.h
 * for int8. Compiled once per ISA. a [M, K] and b [K, N] are e4m3 or e5m2 in any mix, or both
 * int8; any strides, any mix of scales. `accumulate` makes no difference here, because every sum
 * is float32 or int32. */
#include "int8_product.h"

typedef struct scaled_plan {
    quant_product p;
} scaled_plan;
GK_PLAN_HOLDS(scaled_plan);

typedef struct scaled_job {
    const quant_product *p;
    char *workspace;
} scaled_job;

static void scaled_task(void *arg, int64_t t, int64_t worker) {
    const scaled_job *jb = arg;
    char *memory = jb->workspace + (size_t)worker * jb->p->worker_bytes;
    if (jb->p->int8)
        int8_task(jb->p, t, memory);
    else
        quant_task(jb->p, t, memory);
}

bool SYM(gk_plan_scaled_gemm)(const gk_int8_isa *int8, const gk_context *ctx, const void *args,
                              gk_plan *plan); /* int8_amx.c */
bool SYM(gk_plan_scaled_gemm)(const gk_int8_isa *int8, const gk_context *ctx, const void *args,
                              gk_plan *plan) {
    const gk_scaled_gemm_args *g = args;
    quant_product *p = &GK_OWN(scaled_plan, plan)->p;
    memset(p, 0, sizeof *p);
    p->m = g->a.shape[0];
    p->k = g->a.shape[1];
    p->n = g->b.shape[1];
    p->a_dtype = g->a.dtype;
    p->a_m = g->a.stride[0];
    p->a_k = g->a.stride[1];
    p->b_dtype = g->b.dtype;
    p->b_k = g->b.stride[0];
    p->b_n = g->b.stride[1];
    p->b_by_k = p->b_k != 1 && p->b_n == 1;
    p->read_b = read_matrix;
    p->scale_a = gk_scales_of(&g->scale_a, p->m, p->k, false);
    p->scale_b = gk_scales_of(&g->scale_b, p->k, p->n, true);
    p->exact = g->a.dtype == GK_I8 && !scaled_along_k(p);
    quant_results(p, g->activation, &g->out, g->bias);
    p->e.beta = (float)g->beta;
    p->e.out_row = g->out.stride[0];
    if (g->c && g->beta != 0) {
        p->e.c_dtype = g->c->dtype;
        p->e.c_row = gk_broadcast_stride(g->c, 2, 0);
        p->e.c_col = gk_broadcast_stride(g->c, 2, 1);
    }
    if (g->a.dtype == GK_I8) {
        p->int8 = int8;
        int8_plan(p, ctx, plan);
    } else {
        quant_plan(p, ctx, plan);
    }
    return true;
}

static bool plan_scaled(const gk_context *ctx, const void *args, gk_plan *plan) {
    return SYM(gk_plan_scaled_gemm)(&SYM(gk_int8_pairs), ctx, args, plan);
}

static void run_scaled(const gk_context *ctx, const void *args, const gk_plan *plan,
                       void *workspace) {
    const gk_scaled_gemm_args *g = args;
    quant_product p = GK_OWN_CONST(scaled_plan, plan)->p;
    p.a = g->a.data;
    p.b = g->b.data;
    p.scale_a.data = g->scale_a.data;
    p.scale_b.data = g->scale_b.data;
    p.e.out = g->out.data;
    p.e.bias = g->bias ? g->bias->data : NULL;
    p.e.c = g->c && g->beta != 0 ? g->c->data : NULL;
    if (g->out_scale) p.out_scale = *(const float *)g->out_scale->const_data;
    scaled_job jb = {&p, workspace};
    gk_parallel(ctx, plan->tasks, scaled_task, &jb);
}
const gk_cpu_kernel SYM(gk_scaled_gemm) = {plan_scaled, run_scaled};

/* serves int8 if the machine multiplies quads */
static bool plan_vnni(const gk_context *ctx, const void *args, gk_plan *plan) {
    return HAS_QUADS && SYM(gk_plan_scaled_gemm)(INT8_QUADS, ctx, args, plan);
}
const gk_cpu_kernel SYM(gk_scaled_gemm_vnni) = {plan_vnni, run_scaled};
