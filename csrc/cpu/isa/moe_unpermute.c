/* SPDX-License-Identifier: BSD-3-Clause */
/* moe_unpermute: each token's weighted sum of rows and its gradients, compiled once per ISA.
 *
 *  out[t] = sum_j weight[t, j] rows[place[t, j]]        a place below 0 adds nothing
 *  drows[r] = sum of weight[t, j] grad_out[t] over the (t, j) with place[t, j] = r
 *  dweight[t, j] = grad_out[t] . rows[place[t, j]]
 *
 * rows, drows [R, H], out, grad_out [T, H] float32, bfloat16 or float16, whose last dimension is
 * dense; place [T, J] int32 or int64, weight [T, J] float32 or the rows' dtype; dweight [T, J]
 * float32. Sums are float32, in the order of t and j, and are rounded once.
 *
 * A task of the forward pass is a run of tokens. In the backward one pass over the choices (t, j),
 * which is not parallel, finds the first and the last choice of each row. A task is then a run of
 * rows, and only choices between those two are searched. So if each row has one choice, none is.
 * Workspace of the backward: 16 bytes for each row. Not here: float64 (ref/). */
#include "gpukern_moe.h"
#include "rows.h"

enum {
    VECTORS = 4 /* of a row, whose sums stay in registers */
};

INLINE int64_t place_at(const gk_tensor *place, int64_t t, int64_t j) {
    const int64_t at = t * place->stride[0] + j * place->stride[1];
    return place->dtype == GK_I64 ? ((const int64_t *)place->data)[at]
                                  : ((const int32_t *)place->data)[at];
}
INLINE float weight_at(const gk_tensor *weight, int64_t t, int64_t j) {
    return (float)gk_load(weight->data, weight->dtype,
                          t * weight->stride[0] + j * weight->stride[1]);
}

/* ---- forward --------------------------------------------------------------------------------- */
typedef struct job {
    const gk_moe_unpermute_args *a;
    int64_t tokens, each; /* tokens of the call and of a task */
} job;
GK_PLAN_HOLDS(job);

/* sum[v] += by x[i + v W ..) for `count` vectors, of which the last one has `rest` elements. */
INLINE void add_times(vf *sum, float by, const char *x, gk_dtype dtype, int64_t i, int count,
                      int64_t rest) {
    for (int v = 0; v < count; ++v)
        sum[v] = vf_fma(vf_set1(by), vf_load_dtype(x, dtype, i + v * W, v + 1 < count ? W : rest),
                        sum[v]);
}

INLINE void sum_of_token(const gk_moe_unpermute_args *a, int64_t t, int64_t i, int count,
                         int64_t rest, gk_dtype dtype) {
    vf sum[VECTORS];
    for (int v = 0; v < count; ++v) sum[v] = vf_set1(0);
    for (int64_t j = 0; j < a->place.shape[1]; ++j) {
        const int64_t at = place_at(&a->place, t, j);
        if (at < 0) continue;
        add_times(sum, weight_at(&a->weight, t, j), row_at(&a->rows, at), dtype, i, count, rest);
    }
    char *out = row_at(&a->out, t);
    for (int v = 0; v < count; ++v)
        vf_store_dtype(out, dtype, i + v * W, sum[v], v + 1 < count ? W : rest);
}

INLINE void sums_of_task(const job *j, int64_t task, gk_dtype dtype) {
    const int64_t end = gk_min_i64((task + 1) * j->each, j->tokens), n = j->a->rows.shape[1];
    for (int64_t t = task * j->each; t < end; ++t) {
        int64_t i = 0;
        for (; i + VECTORS * W <= n; i += VECTORS * W) sum_of_token(j->a, t, i, VECTORS, W, dtype);
        for (; i < n; i += W) sum_of_token(j->a, t, i, 1, n - i, dtype);
    }
}

static void task_of(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *j = arg;
#define SUMS(dtype, wide) sums_of_task(j, task, dtype)
    ROW_DTYPES(j->a->rows.dtype, false, SUMS)
#undef SUMS
}

static bool fwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_moe_unpermute_args *a = args;
    job *j = GK_OWN(job, plan);
    *j = (job){.tokens = a->place.shape[0]};
    j->each = rows_per_task(a->rows.shape[1] * gk_max_i64(1, a->place.shape[1]));
    plan->tasks = gk_ceil_div(j->tokens, j->each);
    return true;
}
static void fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    (void)workspace;
    job j = *GK_OWN_CONST(job, plan);
    j.a = args;
    gk_parallel(ctx, plan->tasks, task_of, &j);
}
const gk_cpu_kernel SYM(gk_moe_unpermute) = {fwd_plan, fwd_run};

/* ---- backward -------------------------------------------------------------------------------- */
/* The first and the last choice that names a row, t J + j; the last one is -1 if there is none. */
typedef struct named {
    int64_t first, last;
} named;

typedef struct bwd_job {
    const gk_moe_unpermute_bwd_args *a;
    const named *of_row;
    int64_t rows, each; /* rows of the call and of a task */
} bwd_job;
GK_PLAN_HOLDS(bwd_job);

typedef struct two_rows {
    const char *x, *y;
    gk_dtype dtype;
} two_rows;

INLINE void add_products(const void *arg, int64_t i, int64_t n, vf *sums) {
    const two_rows *r = arg; /* lanes from n on are loaded as 0 */
    sums[0] =
        vf_fma(vf_load_dtype(r->x, r->dtype, i, n), vf_load_dtype(r->y, r->dtype, i, n), sums[0]);
}

INLINE void drows_of_row(const gk_moe_unpermute_bwd_args *a, int64_t row, named at, int64_t i,
                         int count, int64_t rest, gk_dtype dtype) {
    const int64_t each = a->place.shape[1];
    vf sum[VECTORS];
    for (int v = 0; v < count; ++v) sum[v] = vf_set1(0);
    for (int64_t choice = at.first; choice <= at.last; ++choice) {
        const int64_t t = choice / each, j = choice % each;
        if (place_at(&a->place, t, j) != row) continue;
        add_times(sum, weight_at(&a->weight, t, j), row_at(&a->grad_out, t), dtype, i, count, rest);
    }
    char *to = row_at(a->drows, row);
    for (int v = 0; v < count; ++v)
        vf_store_dtype(to, dtype, i + v * W, sum[v], v + 1 < count ? W : rest);
}

INLINE void of_row(const bwd_job *b, int64_t row, gk_dtype dtype) {
    const gk_moe_unpermute_bwd_args *a = b->a;
    const named at = b->of_row[row];
    const int64_t n = a->rows.shape[1], each = a->place.shape[1];
    for (int64_t choice = at.first; a->dweight && choice <= at.last; ++choice) {
        const int64_t t = choice / each;
        if (place_at(&a->place, t, choice % each) != row) continue;
        const two_rows r = {row_at(&a->grad_out, t), row_at(&a->rows, row), dtype};
        double sum;
        row_sums(1, add_products, &r, n, &sum);
        ((float *)a->dweight->data)[choice] = (float)sum;
    }
    if (!a->drows) return;
    int64_t i = 0;
    for (; i + VECTORS * W <= n; i += VECTORS * W) drows_of_row(a, row, at, i, VECTORS, W, dtype);
    for (; i < n; i += W) drows_of_row(a, row, at, i, 1, n - i, dtype);
}

INLINE void rows_of_task(const bwd_job *b, int64_t task, gk_dtype dtype) {
    const int64_t end = gk_min_i64((task + 1) * b->each, b->rows);
    for (int64_t row = task * b->each; row < end; ++row) of_row(b, row, dtype);
}

static void bwd_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const bwd_job *b = arg;
#define ROWS(dtype, wide) rows_of_task(b, task, dtype)
    ROW_DTYPES(b->a->rows.dtype, false, ROWS)
#undef ROWS
}

static bool bwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_moe_unpermute_bwd_args *a = args;
    bwd_job *b = GK_OWN(bwd_job, plan);
    *b = (bwd_job){.rows = a->rows.shape[0], .each = rows_per_task(a->rows.shape[1])};
    plan->tasks = gk_ceil_div(b->rows, b->each);
    plan->workspace_bytes = (size_t)b->rows * sizeof(named);
    return true;
}

static void bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_moe_unpermute_bwd_args *a = args;
    bwd_job b = *GK_OWN_CONST(bwd_job, plan);
    named *of_row = workspace;
    for (int64_t row = 0; row < b.rows; ++row) of_row[row] = (named){0, -1};
    const int64_t each = a->place.shape[1];
    for (int64_t choice = 0; choice < gk_numel(&a->place); ++choice) {
        const int64_t row = place_at(&a->place, choice / each, choice % each);
        if (row < 0) {
            if (a->dweight) ((float *)a->dweight->data)[choice] = 0;
            continue;
        }
        if (of_row[row].last < 0) of_row[row].first = choice;
        of_row[row].last = choice;
    }
    b.a = a;
    b.of_row = of_row;
    gk_parallel(ctx, plan->tasks, bwd_task, &b);
}
const gk_cpu_kernel SYM(gk_moe_unpermute_bwd) = {bwd_plan, bwd_run};
