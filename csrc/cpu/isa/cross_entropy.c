/* SPDX-License-Identifier: BSD-3-Clause */
/* cross_entropy: the loss of each row of logits and its gradient, compiled once per ISA.
 *   z = softcap tanh(logit_scale logits / softcap), or logit_scale logits;   lse = log sum exp z
 *   loss = (1 - e) w[t] (lse - z[t]) + e / V (W lse - sum w[c] z[c]) + z_loss lse^2,   W = sum w[c]
 *   dz[c] = g (exp(z[c] - lse) ((1 - e) w[t] + e W / V + 2 z_loss lse) - (c = t) (1 - e) w[t] - e
 *   w[c] / V)
 * logits, dlogits [M, V] of one dtype (float32, bfloat16, float16), or dlogits of 16 bits beside
 * float32 logits; target [M] int64, w [V], loss, lse [M] float32. A task is a run of rows. A row is
 * read once forward and once backward: blocks of ROW_BLOCK columns have a maximum of their own, and
 * their sums meet in double; where forward gives dlogits, too, a row's second read is from a cache.
 * Backward may have only some of the columns. No workspace. Not here: float64 (ref/). */
#include "gpukern_train.h"
#include "rows.h"
#include "vec_math.h"

typedef struct job {
    const gk_cross_entropy_args *a;
    const gk_cross_entropy_bwd_args *bwd; /* NULL: the forward pass */
    gk_loss_more more;                    /* of either pass; dlogits NULL: not wanted */
    int64_t rows, n, each;
    double weights; /* W */
} job;
GK_PLAN_HOLDS(job);

typedef struct row_in {
    const char *x;
    const gk_tensor *weight;
    float scale, cap, inverse_cap; /* z = cap tanh(x scale inverse_cap); cap 0: z = scale x */
    float peak;
    gk_dtype dtype;
} row_in;

INLINE vf z_of(const row_in *r, vf x) {
    x *= r->scale;
    return r->cap == 0 ? x : r->cap * vf_tanh(x * r->inverse_cap);
}
INLINE vf load_z(const row_in *r, int64_t i, int64_t n) {
    return z_of(r, vf_load_dtype(r->x, r->dtype, i, n));
}
INLINE float z_at(const row_in *r, int64_t i) {
    return z_of(r, vf_set1((float)gk_load(r->x, r->dtype, i)))[0];
}

INLINE vf load_weights(const gk_tensor *w, int64_t i, int64_t n) {
    if (w->stride[0] == 1) return vf_load_first((const float *)w->data + i, n);
    float t[W] = {0};
    for (int64_t l = 0; l < W && l < n; ++l)
        t[l] = ((const float *)w->data)[(i + l) * w->stride[0]];
    return vf_load(t);
}
INLINE double weight_at(const gk_tensor *w, int64_t i) {
    return w ? ((const float *)w->data)[i * w->stride[0]] : 1;
}

INLINE void add_exp(const void *arg, int64_t i, int64_t n, vf *s) {
    const row_in *r = arg;
    const vf d = load_z(r, i, n) - r->peak;
    /* precise exp: the loss is float32 whatever the dtype of logits */
    s[0] += vf_first(vf_exp_near(d), n);
}
INLINE void add_weighted(const void *arg, int64_t i, int64_t n, vf *s) {
    const row_in *r = arg;
    const vf z = vf_first(load_z(r, i, n), n);
    s[0] += r->weight ? z * load_weights(r->weight, i, n) : z;
}

INLINE float block_peak(const row_in *r, int64_t begin, int64_t end) {
    const vf none = vf_set1(-INFINITY);
    vf peak[2] = {none, none};
    int64_t i = begin;
    for (; i + 2 * W <= end; i += 2 * W) {
        peak[0] = vf_max(peak[0], load_z(r, i, W));
        peak[1] = vf_max(peak[1], load_z(r, i + W, W));
    }
    for (; i < end; i += W)
        peak[0] = vf_max(peak[0], end - i >= W
                                      ? load_z(r, i, W)
                                      : vf_select(vm_first(end - i), load_z(r, i, end - i), none));
    return vf_peak(vf_max(peak[0], peak[1]));
}

/* lse of a row and, if wanted, the sum of w z. */
INLINE double row_lse(row_in *r, int64_t n, bool wanted, double *weighted) {
    double peak = -INFINITY, sum = 0;
    *weighted = 0;
    for (int64_t begin = 0; begin < n; begin += ROW_BLOCK) {
        const int64_t end = gk_min_i64(n, begin + ROW_BLOCK);
        double here, w = 0;
        r->peak = block_peak(r, begin, end);
        if (r->peak == -INFINITY) r->peak = 0; /* all are -inf (sum 0) or one is NaN (sum NaN) */
        block_sums(1, add_exp, r, begin, end, &here);
        if (wanted) block_sums(1, add_weighted, r, begin, end, &w);
        *weighted += w;
        if (here == 0) continue;
        const double top = fmax(peak, r->peak);
        sum = sum * (peak == -INFINITY ? 0 : exp(peak - top)) + here * exp(r->peak - top);
        peak = top;
    }
    return peak + log(sum);
}

INLINE row_in row_of(const gk_cross_entropy_args *a, int64_t row, gk_dtype dtype) {
    return (row_in){.x = row_at(&a->logits, row),
                    .weight = a->weight,
                    .scale = (float)a->logit_scale,
                    .cap = (float)a->softcap,
                    .inverse_cap = a->softcap > 0 ? (float)(1 / a->softcap) : 0,
                    .dtype = dtype};
}

INLINE void fwd_row(const job *j, int64_t row, gk_dtype dtype) {
    const gk_cross_entropy_args *a = j->a;
    float *loss = (float *)a->loss.data + row, *lse = (float *)a->lse.data + row;
    const int64_t target = *(const int64_t *)row_element(&a->target, row);
    *loss = *lse = 0;
    if (target == a->ignore_index) return;
    row_in r = row_of(a, row, dtype);
    const double e = a->label_smoothing;
    double weighted;
    const double all = row_lse(&r, j->n, e != 0, &weighted);
    double sum = (1 - e) * weight_at(a->weight, target) * (all - z_at(&r, target));
    if (e != 0) sum += e / (double)j->n * (j->weights * all - weighted);
    if (j->more.z_loss != 0) sum += j->more.z_loss * all * all;
    *loss = (float)sum;
    *lse = (float)all;
}

/* given: the dtype of dlogits */
INLINE void bwd_row(const job *j, int64_t row, gk_dtype dtype, gk_dtype given) {
    const gk_cross_entropy_args *a = j->a;
    const gk_loss_more *more = &j->more;
    char *dx = row_at(more->dlogits, row);
    const int64_t target = *(const int64_t *)row_element(&a->target, row), n = j->n,
                  here = target - more->first_class;
    if (target == a->ignore_index) {
        memset(dx, 0, (size_t)(n * (gk_type_of(given)->bits / 8)));
        return;
    }
    const row_in r = row_of(a, row, dtype);
    const double e = a->label_smoothing, of_target = (1 - e) * weight_at(a->weight, target);
    const float g = j->bwd ? *(const float *)row_element(&j->bwd->grad_loss, row) : 1.0f;
    const float lse = ((const float *)a->lse.data)[row],
                smooth = g * (float)(e / (double)more->num_classes);
    const float all = g * (float)(of_target + e * j->weights / (double)more->num_classes +
                                  2 * more->z_loss * lse);
    double at_target = 0;
    if (here >= 0 && here < n) {
        const float z = z_at(&r, here);
        const double p = exp((double)z - lse);
        at_target = p * all - (double)g * of_target - smooth * weight_at(a->weight, target);
        if (r.cap != 0) at_target *= 1 - (double)(z * r.inverse_cap) * (z * r.inverse_cap);
    }
    for (int64_t i = 0; i < n; i += W) {
        const vf zi = load_z(&r, i, n - i);
        vf d = (dtype == GK_F32 ? vf_exp_near(zi - lse) : vf_exp(zi - lse)) * all;
        if (e != 0)
            d -= a->weight ? load_weights(a->weight, more->first_class + i, n - i) * smooth
                           : vf_set1(smooth);
        if (r.cap != 0) d *= 1.0f - (zi * r.inverse_cap) * (zi * r.inverse_cap);
        vf_store_dtype(dx, given, i, d * r.scale, n - i);
    }
    if (here >= 0 && here < n) gk_store(dx, given, here, at_target * r.scale);
}

/* Computes what the call asks for in one row. */
INLINE void of_row(const job *j, int64_t row, gk_dtype dtype, gk_dtype given) {
    if (!j->bwd) fwd_row(j, row, dtype);
    if (j->more.dlogits) bwd_row(j, row, dtype, given);
}

static void task_of(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *j = arg;
    const int64_t end = gk_min_i64((task + 1) * j->each, j->rows);
#define SAME(dtype, wide) \
    for (int64_t row = task * j->each; row < end; ++row) of_row(j, row, dtype, dtype)
#define NARROW(given, wide) \
    for (int64_t row = task * j->each; row < end; ++row) of_row(j, row, GK_F32, given)
    if (!j->more.dlogits || j->a->logits.dtype == j->more.dlogits->dtype)
        ROW_DTYPES(j->a->logits.dtype, false, SAME)
    else
        ROW_DTYPES(j->more.dlogits->dtype, false, NARROW)
#undef SAME
#undef NARROW
}

static bool plan_rows(const gk_tensor *logits, gk_plan *plan) {
    job *j = GK_OWN(job, plan);
    *j = (job){.rows = rows_of(logits), .n = logits->shape[logits->ndim - 1]};
    j->each = rows_per_task(j->n);
    plan->tasks = gk_ceil_div(j->rows, j->each);
    return true;
}

static void run_rows(const gk_context *ctx, const gk_cross_entropy_args *a,
                     const gk_cross_entropy_bwd_args *bwd, const gk_plan *plan) {
    job j = *GK_OWN_CONST(job, plan);
    j.a = a;
    j.bwd = bwd;
    j.more = bwd ? gk_more_of_bwd(bwd) : gk_more_of_fwd(a);
    j.weights = (double)j.more.num_classes;
    if (a->weight && a->label_smoothing != 0) {
        j.weights = 0;
        for (int64_t i = 0; i < j.more.num_classes; ++i) j.weights += weight_at(a->weight, i);
    }
    gk_parallel(ctx, plan->tasks, task_of, &j);
}

static bool fwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    return plan_rows(&((const gk_cross_entropy_args *)args)->logits, plan);
}
static void fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    (void)workspace;
    run_rows(ctx, args, NULL, plan);
}
const gk_cpu_kernel SYM(gk_cross_entropy_fwd) = {fwd_plan, fwd_run};

static bool bwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    return plan_rows(&((const gk_cross_entropy_bwd_args *)args)->fwd.logits, plan);
}
static void bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    (void)workspace;
    const gk_cross_entropy_bwd_args *bwd = args;
    run_rows(ctx, &bwd->fwd, bwd, plan);
}
const gk_cpu_kernel SYM(gk_cross_entropy_bwd) = {bwd_plan, bwd_run};
