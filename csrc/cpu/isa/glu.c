/* SPDX-License-Identifier: BSD-3-Clause */
/* glu: gated linear units over rows, forward and backward (Shazeer 2020, arXiv:2002.05202),
 * compiled once per ISA.
 *
 *  out = act(gate) up;   dgate = g up act'(gate),   dup = g act(gate)
 *
 * gate, up, out, g, dgate, dup [M, N] have one dtype (float32, bfloat16, float16). A task is a
 * range of rows, or a range of columns if rows are long. No workspace. Not served: float64
 * (ref/). */
#include "activation.h"
#include "rows.h"

/* Calls body(dtype, activation) with constants, so that each pair is compiled separately. */
#define ACTIVATIONS(dtype, body)                                 \
    switch (job->a->activation) {                                \
    case GK_ACT_SILU: body(dtype, GK_ACT_SILU); break;           \
    case GK_ACT_GELU: body(dtype, GK_ACT_GELU); break;           \
    case GK_ACT_GELU_TANH: body(dtype, GK_ACT_GELU_TANH); break; \
    case GK_ACT_NONE:                                            \
    case GK_ACT_RELU: break; /* refused by the check */          \
    }

/* ---- forward --------------------------------------------------------------------------------- */
typedef struct fwd_job {
    const gk_glu_args *a;
    const row_cuts *p;
    gk_tensor gate, up;
} fwd_job;

INLINE void fwd_rows(const fwd_job *job, row_span s, gk_dtype dtype, gk_activation activation) {
    for (int64_t row = s.row; row < s.end; ++row) {
        const char *gate = row_at(&job->gate, row), *up = row_at(&job->up, row);
        char *out = row_at(&job->a->out, row);
        for (int64_t i = s.from; i < s.to; i += W) {
            const vf y = activate(vf_load_dtype(gate, dtype, i, s.to - i), activation);
            vf_store_dtype(out, dtype, i, y * vf_load_dtype(up, dtype, i, s.to - i), s.to - i);
        }
    }
}

static void fwd_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const fwd_job *job = arg;
    const row_span s = span_of(job->p, task);
#define RUN(dtype, activation) fwd_rows(job, s, dtype, activation)
#define OF_DTYPE(dtype, wide) ACTIVATIONS(dtype, RUN)
    ROW_DTYPES(job->a->gate.dtype, false, OF_DTYPE)
#undef RUN
}

static bool fwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    plan_row_cuts(&((const gk_glu_args *)args)->out, plan);
    return true;
}

static void fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    (void)workspace;
    const gk_glu_args *a = args;
    fwd_job job = {a, GK_OWN_CONST(row_cuts, plan), gk_glu_half(&a->gate, a->up, 0),
                   gk_glu_half(&a->gate, a->up, 1)};
    gk_parallel(ctx, plan->tasks, fwd_task, &job);
}

const gk_cpu_kernel SYM(gk_glu_fwd) = {fwd_plan, fwd_run};

/* ---- backward -------------------------------------------------------------------------------- */
typedef struct bwd_job {
    const gk_glu_bwd_args *a;
    const row_cuts *p;
    gk_tensor gate, up, dgate, dup;
} bwd_job;

INLINE void bwd_rows(const bwd_job *job, row_span s, gk_dtype dtype, gk_activation activation) {
    for (int64_t row = s.row; row < s.end; ++row) {
        const char *grad = row_at(&job->a->grad_out, row), *gate = row_at(&job->gate, row),
                   *up = row_at(&job->up, row);
        char *dgate = row_at(&job->dgate, row), *dup = row_at(&job->dup, row);
        for (int64_t i = s.from; i < s.to; i += W) {
            const int64_t n = s.to - i;
            const vf g = vf_load_dtype(grad, dtype, i, n), x = vf_load_dtype(gate, dtype, i, n);
            const vf u = vf_load_dtype(up, dtype, i, n);
            vf_store_dtype(dgate, dtype, i, g * u * activation_slope(x, activation), n);
            vf_store_dtype(dup, dtype, i, g * activate(x, activation), n);
        }
    }
}

static void bwd_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const bwd_job *job = arg;
    const row_span s = span_of(job->p, task);
#define RUN(dtype, activation) bwd_rows(job, s, dtype, activation)
    ROW_DTYPES(job->a->gate.dtype, false, OF_DTYPE)
#undef RUN
}

static bool bwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    plan_row_cuts(&((const gk_glu_bwd_args *)args)->grad_out, plan);
    return true;
}

static void bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    (void)workspace;
    const gk_glu_bwd_args *a = args;
    bwd_job job = {a,
                   GK_OWN_CONST(row_cuts, plan),
                   gk_glu_half(&a->gate, a->up, 0),
                   gk_glu_half(&a->gate, a->up, 1),
                   gk_glu_half(&a->dgate, a->dup, 0),
                   gk_glu_half(&a->dgate, a->dup, 1)};
    gk_parallel(ctx, plan->tasks, bwd_task, &job);
}

const gk_cpu_kernel SYM(gk_glu_bwd) = {bwd_plan, bwd_run};
