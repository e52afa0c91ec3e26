/* SPDX-License-Identifier: BSD-3-Clause */
/* softmax: softmax and log_softmax over rows, forward and backward, compiled once per ISA.
 *
 *  s = scale x for columns below the row's length;   p = exp(s - max s) / sum exp(s - max s)
 *  out = p, 0 from the length on;   log: out = s - max s - log sum exp(s - max s)
 *  dx = scale out (g - sum g out);   log: dx = scale (g - exp(out) sum g)
 *
 * x, out, g, dx [M, N] have one dtype (float32, bfloat16, float16). A task is a range of rows. A
 * row is read for its maximum and then for its exponentials. The exponentials stay in float32
 * until their sum is known: in out if it is float32, else in the worker's part of the workspace,
 * [workers, N] float32. log_softmax does not store them. Not served: float64 (ref/). */
#include "rows.h"

typedef struct softmax_plan {
    int64_t rows, n, ld, each;
} softmax_plan;
GK_PLAN_HOLDS(softmax_plan);

static softmax_plan plan_rows(const gk_tensor *x) {
    softmax_plan p = {.rows = rows_of(x), .n = x->shape[x->ndim - 1]};
    p.ld = gk_round_up(p.n, 16);
    p.each = rows_per_task(p.n);
    return p;
}

INLINE int64_t row_length(const gk_tensor *lengths, int64_t row, int64_t n) {
    if (!lengths) return n;
    return gk_clamp_i64(*(const int32_t *)row_element(lengths, row), 0, n);
}

INLINE void zero_from(char *row, gk_dtype dtype, int64_t from, int64_t n) {
    const int64_t bytes = gk_type_of(dtype)->bits / 8;
    if (from < n) memset(row + from * bytes, 0, (size_t)((n - from) * bytes));
}

/* ---- 1. forward ------------------------------------------------------------------------------ */
typedef struct fwd_job {
    const gk_softmax_args *a;
    softmax_plan p;
    float *kept; /* [workers, ld] */
} fwd_job;

typedef struct row_in {
    const char *x;
    float *kept; /* NULL: exponentials are not stored */
    gk_dtype dtype;
    float scale, peak;
} row_in;

INLINE vf exp_of(vf x, gk_dtype dtype) { return dtype == GK_F32 ? vf_exp_near(x) : vf_exp(x); }

INLINE void add_exp(const void *arg, int64_t i, int64_t n, vf *s) {
    const row_in *r = arg;
    const vf e =
        vf_first(exp_of(vf_load_dtype(r->x, r->dtype, i, n) * r->scale - r->peak, r->dtype), n);
    if (r->kept) vf_store_dtype(r->kept, GK_F32, i, e, n);
    s[0] += e;
}

INLINE float row_peak(const row_in *r, int64_t n) {
    const vf none = vf_set1(-INFINITY);
    vf peak[4] = {none, none, none, none};
    int64_t i = 0;
    for (; i + 4 * W <= n; i += 4 * W) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
            peak[v] = vf_max(peak[v], vf_load_dtype(r->x, r->dtype, i + v * W, W) * r->scale);
    }
    for (; i < n; i += W) {
        const vf s = vf_load_dtype(r->x, r->dtype, i, n - i) * r->scale;
        peak[0] = vf_max(peak[0], n - i >= W ? s : vf_select(vm_first(n - i), s, none));
    }
    return vf_peak(vf_max(vf_max(peak[0], peak[1]), vf_max(peak[2], peak[3])));
}

INLINE void fwd_row(const fwd_job *job, int64_t row, int64_t worker, gk_dtype dtype) {
    const gk_softmax_args *a = job->a;
    const int64_t n = row_length(a->lengths, row, job->p.n);
    char *out = row_at(&a->out, row);
    zero_from(out, dtype, n, job->p.n);
    if (n == 0) return;
    row_in r = {.x = row_at(&a->x, row), .dtype = dtype, .scale = (float)a->scale};
    if (!a->log) r.kept = dtype == GK_F32 ? (float *)out : job->kept + worker * job->p.ld;
    r.peak = row_peak(&r, n);
    double sum;
    row_sums(1, add_exp, &r, n, &sum);
    if (a->log) {
        const float log_sum = (float)log(sum);
        for (int64_t i = 0; i < n; i += W)
            vf_store_dtype(out, dtype, i,
                           vf_load_dtype(r.x, dtype, i, n - i) * r.scale - r.peak - log_sum, n - i);
    } else {
        const float inverse = (float)(1 / sum);
        for (int64_t i = 0; i < n; i += W)
            vf_store_dtype(out, dtype, i, vf_load_dtype(r.kept, GK_F32, i, n - i) * inverse, n - i);
    }
}

static void fwd_task(void *arg, int64_t task, int64_t worker) {
    const fwd_job *job = arg;
    const int64_t end = gk_min_i64((task + 1) * job->p.each, job->p.rows);
#define ROWS(dtype, wide) \
    for (int64_t row = task * job->p.each; row < end; ++row) fwd_row(job, row, worker, dtype)
    ROW_DTYPES(job->a->x.dtype, false, ROWS)
#undef ROWS
}

static bool fwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_softmax_args *a = args;
    softmax_plan *p = GK_OWN(softmax_plan, plan);
    *p = plan_rows(&a->x);
    plan->tasks = gk_ceil_div(p->rows, p->each);
    if (!a->log && a->x.dtype != GK_F32)
        plan->workspace_bytes = (size_t)(gk_num_workers(ctx, plan->tasks) * p->ld) * sizeof(float);
    return true;
}

static void fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    fwd_job job = {.a = args, .p = *GK_OWN_CONST(softmax_plan, plan), .kept = workspace};
    gk_parallel(ctx, plan->tasks, fwd_task, &job);
}

const gk_cpu_kernel SYM(gk_softmax_fwd) = {fwd_plan, fwd_run};

/* ---- 2. backward ----------------------------------------------------------------------------- */
typedef struct bwd_job {
    const gk_softmax_bwd_args *a;
    softmax_plan p;
} bwd_job;

typedef struct bwd_in {
    const char *g, *y;
    gk_dtype dtype;
    bool log;
} bwd_in;

INLINE void add_slopes(const void *arg, int64_t i, int64_t n, vf *s) {
    const bwd_in *r = arg;
    const vf g = vf_load_dtype(r->g, r->dtype, i, n);
    s[0] += r->log ? g : g * vf_load_dtype(r->y, r->dtype, i, n);
}

INLINE void bwd_row(const bwd_job *job, int64_t row, gk_dtype dtype, bool is_log) {
    const gk_softmax_bwd_args *a = job->a;
    const int64_t n = row_length(a->lengths, row, job->p.n);
    char *dx = row_at(&a->dx, row);
    const bwd_in r = {row_at(&a->grad_out, row), row_at(&a->out, row), dtype, is_log};
    double total;
    row_sums(1, add_slopes, &r, n, &total);
    const float sum = (float)total, scale = (float)a->scale;
    for (int64_t i = 0; i < n; i += W) {
        const vf g = vf_load_dtype(r.g, dtype, i, n - i), y = vf_load_dtype(r.y, dtype, i, n - i);
        vf_store_dtype(dx, dtype, i, (is_log ? g - exp_of(y, dtype) * sum : y * (g - sum)) * scale,
                       n - i);
    }
    zero_from(dx, dtype, n, job->p.n);
}

static void bwd_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const bwd_job *job = arg;
    const int64_t end = gk_min_i64((task + 1) * job->p.each, job->p.rows);
#define ROWS(dtype, is_log)                                  \
    for (int64_t row = task * job->p.each; row < end; ++row) \
    bwd_row(job, row, dtype, job->a->log != 0)
    ROW_DTYPES(job->a->out.dtype, false, ROWS)
#undef ROWS
}

static bool bwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_softmax_bwd_args *a = args;
    softmax_plan *p = GK_OWN(softmax_plan, plan);
    *p = plan_rows(&a->out);
    plan->tasks = gk_ceil_div(p->rows, p->each);
    return true;
}

static void bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    (void)workspace;
    bwd_job job = {args, *GK_OWN_CONST(softmax_plan, plan)};
    gk_parallel(ctx, plan->tasks, bwd_task, &job);
}

const gk_cpu_kernel SYM(gk_softmax_bwd) = {bwd_plan, bwd_run};
