/* SPDX-License-Identifier: BSD-3-Clause */
/* kl_div: the divergence of each row of student's and teacher's logits, and its gradient by the
 * student's, compiled once per ISA. gpukern_distill.h has the equations. With s, t = logits /
 * temperature, S and T their softmax, and E[x] = sum of S x:
 *   beta 0    loss = sum T (t - s) - (lse_t - lse_s)         ds = S - T
 *   beta 1    loss = E[s - t] + (lse_t - lse_s)              ds = S (s - t - E[s - t])
 *   between   u = log S - log M,  v = log T - log M
 *             loss = beta sum T v + (1 - beta) E[u]          ds = (1 - beta) S (u - E[u])
 * logits, dlogits [M, V] of one dtype (float32, bfloat16, float16), or dlogits of 16 bits beside
 * float32 logits; mask [M] uint8, loss [M] float32. A task is a run of rows. A row is read once for
 * maxima and sums, for a beta between 0 and 1 a second time for the sums of u and v, and once more
 * for dlogits, from a cache. Sums of ROW_BLOCK columns meet in double. No workspace. Not here:
 * float64 (ref/). */
#include "gpukern_distill.h"
#include "rows.h"
#include "vec_math.h"

enum {
    FORWARD, /* beta 0 */
    REVERSE, /* beta 1 */
    MIXED
};

typedef struct job {
    const gk_kl_div_args *a;
    int64_t rows, n, each;
} job;
GK_PLAN_HOLDS(job);

typedef struct pair {
    const char *s, *t;    /* the rows of logits */
    float scale;          /* 1 / temperature */
    float peak_s, peak_t; /* of a block of columns, later of the row */
    float inv_s, inv_t;   /* 1 / sum of exp(z - peak) */
    float lse;            /* lse_t - lse_s */
    float beta;
    gk_dtype dtype;
    int kind;
} pair;

INLINE vf load_s(const pair *r, int64_t i, int64_t n) {
    return vf_load_dtype(r->s, r->dtype, i, n) * r->scale;
}
INLINE vf load_t(const pair *r, int64_t i, int64_t n) {
    return vf_load_dtype(r->t, r->dtype, i, n) * r->scale;
}

/* weight x, which is 0 if weight is 0, also if x is infinite. */
INLINE vf times(vf weight, vf x) {
    return vf_select(vf_lt(vf_set1(0), weight), weight * x, vf_set1(0));
}

/* log x for normal x > 0. log x = e log 2 + 2 artanh((m - 1) / (m + 1)) with x = m 2^e and m
 * between sqrt(1/2) and sqrt(2); |(m - 1) / (m + 1)| < 0.172. Absolute error near 1 below 1e-8,
 * elsewhere some 1e-7 of the result. */
INLINE vf log_of(vf x) {
    const vi above = (vi)x - 0x3f3504f3; /* sqrt(1/2) */
    const vi e = above >> 23;
    const vf m = (vf)((vi)x - (e << 23));
    const vf t = (m - 1.0f) / (m + 1.0f), t2 = t * t;
    vf p = vf_fma(t2, vf_set1(0.2222222222f), vf_set1(0.2857142857f));
    p = vf_fma(p, t2, vf_set1(0.4f));
    p = vf_fma(p, t2, vf_set1(0.6666666667f));
    p = vf_fma(p * t2, t, 2.0f * t);
    const vf whole = (vf)(e + 0x4b400000) - 0x1.8p23f;
    return vf_fma(whole, vf_set1(0.69314718056f), p);
}

/* log T - log S of some columns. It is clamped to what log_of and exp serve; S or T is 0 there, as
 * it is where both logits are -inf and the difference is NaN. */
INLINE vf log_ratio(const pair *r, vf s, vf t) {
    const vf w = (t - s) - r->lse;
    return vf_min(vf_set1(87.0f), vf_max(w, vf_set1(-87.0f)));
}
/* u = log S - log M from w = log T - log S. */
INLINE vf against_middle(const pair *r, vf w) {
    return -log_of(vf_fma(vf_exp_near(w), vf_set1(r->beta), vf_set1(1 - r->beta)));
}

INLINE void add_first(const void *arg, int64_t i, int64_t n, vf *sums) {
    const pair *r = arg;
    const vf s = load_s(r, i, n), t = load_t(r, i, n);
    const vf of_s = vf_first(vf_exp_near(s - r->peak_s), n);
    const vf of_t = vf_first(vf_exp_near(t - r->peak_t), n);
    sums[0] += of_s;
    sums[1] += of_t;
    if (r->kind == FORWARD) sums[2] += times(of_t, t - s);
    if (r->kind == REVERSE) sums[2] += times(of_s, s - t);
}

INLINE void add_mixed(const void *arg, int64_t i, int64_t n, vf *sums) {
    const pair *r = arg;
    const vf s = load_s(r, i, n), t = load_t(r, i, n), w = log_ratio(r, s, t);
    const vf u = against_middle(r, w);
    sums[0] += vf_first(vf_exp_near(s - r->peak_s) * u, n);
    sums[1] += vf_first(vf_exp_near(t - r->peak_t) * (w + u), n);
}

INLINE float peak_of(vf x, int64_t n) {
    return vf_peak(n >= W ? x : vf_select(vm_first(n), x, vf_set1(-INFINITY)));
}

INLINE void block_peaks(pair *r, int64_t begin, int64_t end) {
    vf s = vf_set1(-INFINITY), t = s;
    int64_t i = begin;
    for (; i + W <= end; i += W) {
        s = vf_max(s, load_s(r, i, W));
        t = vf_max(t, load_t(r, i, W));
    }
    r->peak_s = vf_peak(s);
    r->peak_t = vf_peak(t);
    if (i == end) return;
    r->peak_s = fmaxf(r->peak_s, peak_of(load_s(r, i, end - i), end - i));
    r->peak_t = fmaxf(r->peak_t, peak_of(load_t(r, i, end - i), end - i));
}

/* e^(from - to) of two maxima; 0 if there was nothing yet. */
INLINE double rescale(double from, double to) { return from == -INFINITY ? 0 : exp(from - to); }

/* Finds peak, inv and lse of a row, and the mean: of t - s under T (beta 0), of s - t under S. */
INLINE double first_pass(pair *r, int64_t n) {
    double peak_s = -INFINITY, peak_t = -INFINITY, sums[3] = {0, 0, 0};
    for (int64_t begin = 0; begin < n; begin += ROW_BLOCK) {
        const int64_t end = gk_min_i64(n, begin + ROW_BLOCK);
        double here[3];
        block_peaks(r, begin, end);
        /* all are -inf (the sum is 0), or one is NaN (the sum is NaN) */
        if (r->peak_s == -INFINITY) r->peak_s = 0;
        if (r->peak_t == -INFINITY) r->peak_t = 0;
        block_sums(3, add_first, r, begin, end, here);
        const double top_s = here[0] == 0 ? peak_s : fmax(peak_s, r->peak_s);
        const double top_t = here[1] == 0 ? peak_t : fmax(peak_t, r->peak_t);
        const double old_s = rescale(peak_s, top_s), old_t = rescale(peak_t, top_t);
        const double new_s = here[0] == 0 ? 0 : exp(r->peak_s - top_s);
        const double new_t = here[1] == 0 ? 0 : exp(r->peak_t - top_t);
        sums[0] = sums[0] * old_s + here[0] * new_s;
        sums[1] = sums[1] * old_t + here[1] * new_t;
        /* a mean of weight 0 counts nothing, also if it is infinite */
        const double old = r->kind == FORWARD ? old_t : old_s,
                     new = r->kind == FORWARD ? new_t : new_s;
        sums[2] = (old == 0 ? 0 : sums[2] * old) + (new == 0 ? 0 : here[2] * new);
        peak_s = top_s;
        peak_t = top_t;
    }
    r->peak_s = (float)peak_s;
    r->peak_t = (float)peak_t;
    r->inv_s = (float)(1 / sums[0]);
    r->inv_t = (float)(1 / sums[1]);
    r->lse = (float)(peak_t - peak_s + log(sums[1] / sums[0]));
    return sums[2] / (r->kind == FORWARD ? sums[1] : sums[0]);
}

/* The loss of a row, and in *mean what its gradient subtracts. */
INLINE double loss_of(pair *r, int64_t n, float *mean) {
    const double first = first_pass(r, n);
    *mean = (float)first;
    if (r->kind == FORWARD) return first - r->lse;
    if (r->kind == REVERSE) return first + r->lse;
    double sums[2];
    row_sums(2, add_mixed, r, n, sums);
    const double of_s = sums[0] * r->inv_s, of_t = sums[1] * r->inv_t;
    *mean = (float)(of_s + 0 * of_t); /* NaN if T has a NaN */
    return r->beta * of_t + (1 - r->beta) * of_s;
}

/* given: the dtype of dlogits */
INLINE void put_gradient(const pair *r, int64_t n, float mean, char *dx, gk_dtype given) {
    const float of_s = r->scale * r->inv_s, of_t = r->scale * r->inv_t;
    for (int64_t i = 0; i < n; i += W) {
        const vf s = load_s(r, i, n - i), t = load_t(r, i, n - i);
        const vf e = vf_exp_near(s - r->peak_s);
        vf d;
        if (r->kind == FORWARD) {
            d = e * of_s - vf_exp_near(t - r->peak_t) * of_t;
        } else if (r->kind == REVERSE) {
            /* a NaN in e comes through the mean */
            d = times(e * of_s, (s - t) - mean) + vf_set1(mean) * 0.0f;
        } else {
            d = e * (of_s * (1 - r->beta)) * (against_middle(r, log_ratio(r, s, t)) - mean);
        }
        vf_store_dtype(dx, given, i, d, n - i);
    }
}

INLINE void of_row(const job *j, int64_t row, gk_dtype dtype, gk_dtype given, int kind) {
    const gk_kl_div_args *a = j->a;
    float *loss = (float *)a->loss.data + row, mean = 0;
    char *dx = a->dlogits ? row_at(a->dlogits, row) : NULL;
    if (a->mask && *(const uint8_t *)row_element(a->mask, row) == 0) {
        *loss = 0;
        if (dx) memset(dx, 0, (size_t)(j->n * (gk_type_of(given)->bits / 8)));
        return;
    }
    pair r = {.s = row_at(&a->logits, row),
              .t = row_at(&a->teacher_logits, row),
              .scale = (float)(1 / a->temperature),
              .beta = (float)a->beta,
              .dtype = dtype,
              .kind = kind};
    *loss = (float)loss_of(&r, j->n, &mean);
    if (dx) put_gradient(&r, j->n, mean, dx, given);
}

INLINE void rows_of_task(const job *j, int64_t task, gk_dtype dtype, gk_dtype given) {
    const int64_t end = gk_min_i64((task + 1) * j->each, j->rows);
    const double beta = j->a->beta;
    for (int64_t row = task * j->each; row < end; ++row) {
        if (beta == 0) {
            of_row(j, row, dtype, given, FORWARD);
        } else if (beta == 1) {
            of_row(j, row, dtype, given, REVERSE);
        } else {
            of_row(j, row, dtype, given, MIXED);
        }
    }
}

static void task_of(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *j = arg;
#define SAME(dtype, wide) rows_of_task(j, task, dtype, dtype)
#define NARROW(given, wide) rows_of_task(j, task, GK_F32, given)
    const gk_dtype dtype = j->a->logits.dtype;
    if (!j->a->dlogits || j->a->dlogits->dtype == dtype)
        ROW_DTYPES(dtype, false, SAME)
    else
        ROW_DTYPES(j->a->dlogits->dtype, false, NARROW)
#undef SAME
#undef NARROW
}

static bool kl_div_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_tensor *logits = &((const gk_kl_div_args *)args)->logits;
    job *j = GK_OWN(job, plan);
    *j = (job){.rows = rows_of(logits), .n = logits->shape[logits->ndim - 1]};
    j->each = rows_per_task(j->n);
    plan->tasks = gk_ceil_div(j->rows, j->each);
    return true;
}
static void kl_div_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                       void *workspace) {
    (void)workspace;
    job j = *GK_OWN_CONST(job, plan);
    j.a = args;
    gk_parallel(ctx, plan->tasks, task_of, &j);
}
const gk_cpu_kernel SYM(gk_kl_div) = {kl_div_plan, kl_div_run};
