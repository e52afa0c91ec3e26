/* SPDX-License-Identifier: BSD-3-Clause */
/* norm: RMSNorm and LayerNorm over rows, forward and backward, compiled once per ISA. Ba, Kiros
 * and Hinton 2016, arXiv:1607.06450 (layer); Zhang and Sennrich 2019, arXiv:1910.07467 (rms).
 *
 *  h = x + residual, rounded to x's dtype;   xhat = (h - mean) rstd
 *  out = xhat w + b,   w = weight + weight_offset
 *  dx = rstd (g w - c1 - xhat c2) + grad_sum
 *  c1 = mean(g w) (layer only),   c2 = mean(g w xhat)
 *  dweight = sum over rows of g xhat,   dbias = sum over rows of g
 *
 * x, residual, g [M, N] have one dtype (float32, bfloat16, float16) and any row strides; weight
 * and bias [N] have that dtype or float32.
 *
 * Forward: a task is a range of rows. A row is read from memory once for its statistics, and
 * from the cache for its results. Backward: a task is a chunk of rows. It handles GROUP rows at
 * a time, so that a column of dweight and dbias is loaded and stored once for GROUP rows. The
 * chunks depend only on M and N. Their sums are added in order afterwards by tasks of COLUMNS
 * columns.
 *
 * Workspace: w and b as float32, [2, N], if they are strided or of two dtypes; backward also the
 * chunks' sums, [chunks, 2, N] float32. Not served: float64 (ref/). */
#include "rows.h"

enum {
    /* rows whose g and h of a block are in the L1 together; 4 and 8 take the same time, 1 takes
     * 1.3 times as long */
    GROUP = 4,
    COLUMNS = 1024,   /* of a task that adds up chunks */
    CHUNK_ROWS = 32,  /* at least; smaller chunks would write more sums than they read rows */
    MOST_CHUNKS = 64, /* enough tasks for 32 threads */
    CHUNK_ELEMENTS =
        4 << 20 /* of all chunks' sums: at most 32 MB of workspace, except for a single chunk */
};

typedef struct norm_plan {
    int64_t rows, n, ld; /* ld: N rounded up to whole cache lines */
    int64_t each;        /* rows of a task */
    int64_t chunks;      /* backward with dweight or dbias, else 0 */
} norm_plan;
GK_PLAN_HOLDS(norm_plan);

static norm_plan plan_rows(const gk_tensor *x, bool sums) {
    norm_plan p = {.rows = rows_of(x), .n = x->shape[x->ndim - 1]};
    p.ld = gk_round_up(p.n, 16);
    p.each = rows_per_task(p.n);
    if (sums) {
        const int64_t most = gk_clamp_i64(CHUNK_ELEMENTS / p.ld, 1, MOST_CHUNKS);
        p.chunks = gk_clamp_i64(gk_ceil_div(p.rows, CHUNK_ROWS), 1, most);
        p.each = gk_max_i64(1, gk_ceil_div(p.rows, p.chunks));
        p.chunks = gk_max_i64(1, gk_ceil_div(p.rows, p.each));
    }
    return p;
}

/* ---- 1. statistics --------------------------------------------------------------------------- */
typedef struct row_in {
    const char *h, *g;
    row_vector w; /* none: 1 */
    gk_dtype dtype;
    bool wide;
    float mean;
} row_in;

INLINE void add_values(const void *arg, int64_t i, int64_t n, vf *s) {
    const row_in *r = arg;
    s[0] += vf_first(vf_load_dtype(r->h, r->dtype, i, n) - r->mean, n);
}
INLINE void add_squares(const void *arg, int64_t i, int64_t n, vf *s) {
    const row_in *r = arg;
    const vf d = vf_first(vf_load_dtype(r->h, r->dtype, i, n) - r->mean, n);
    s[0] = vf_fma(d, d, s[0]);
}
/* the squares, g w and g w (h - mean) */
INLINE void add_products(const void *arg, int64_t i, int64_t n, vf *s) {
    const row_in *r = arg;
    const vf d = vf_first(vf_load_dtype(r->h, r->dtype, i, n) - r->mean, n);
    vf g = vf_load_dtype(r->g, r->dtype, i, n);
    if (r->w.data) g *= row_vector_at(&r->w, r->dtype, r->wide, i, n);
    s[0] = vf_fma(d, d, s[0]);
    s[1] += g;
    s[2] = vf_fma(g, d, s[2]);
}

/* Returns the mean of a row. total gets the sums about that mean: total[0] of add_squares, or
 * total[0 .. 2] of add_products. The sums of a block are taken about its own mean while it is in
 * the L1, and are then shifted to the mean of all columns so far (Chan, Golub and LeVeque 1979).
 * A row thus comes from the L2 once, and a large mean costs no precision. A block's mean is
 * computed as a sum about a nearby number: if all values are equal, the mean is exactly that
 * value and xhat is 0. */
INLINE double row_moments(gk_norm_kind kind, bool products, row_in *r, int64_t n, double *total) {
    const int k = products ? 3 : 1;
    if (kind == GK_RMS_NORM) {
        r->mean = 0;
        row_sums(k, products ? add_products : add_squares, r, n, total);
        return 0;
    }
    double mean =
        n > 0 ? vf_total(vf_load_dtype(r->h, r->dtype, 0, n) * (1.0f / (float)gk_min_i64(n, W)))
              : 0;
    for (int j = 0; j < k; ++j) total[j] = 0;
    for (int64_t begin = 0; begin < n; begin += ROW_BLOCK) {
        const int64_t end = gk_min_i64(n, begin + ROW_BLOCK);
        const double here = (double)(end - begin), before = (double)begin, all = (double)end;
        double sum, s[3];
        r->mean = (float)mean;
        block_sums(1, add_values, r, begin, end, &sum);
        const double exact = r->mean + sum / here;
        r->mean = (float)exact;
        block_sums(k, products ? add_products : add_squares, r, begin, end, s);
        const double about = r->mean, delta = exact - mean, next = mean + delta * (here / all);
        total[0] +=
            s[0] - here * (exact - about) * (exact - about) + delta * delta * (before * here / all);
        if (products) {
            total[2] += (mean - next) * total[1] + s[2] + (about - next) * s[1];
            total[1] += s[1];
        }
        mean = next;
    }
    return mean;
}

INLINE float row_rstd(double squares, int64_t n, double eps) {
    return (float)(1 / sqrt(squares / (double)n + eps));
}

/* ---- 2. forward ------------------------------------------------------------------------------ */
typedef struct fwd_job {
    const gk_norm_args *a;
    norm_plan p;
    row_vector w, b; /* none: 1, 0 */
} fwd_job;

INLINE void fwd_row(const fwd_job *job, int64_t row, gk_dtype dtype, bool wide) {
    const gk_norm_args *a = job->a;
    const int64_t n = job->p.n;
    row_in r = {.h = row_at(&a->x, row), .dtype = dtype};
    if (a->residual) {
        const char *x = r.h, *residual = row_at(a->residual, row);
        char *sum = row_at(a->sum, row);
        for (int64_t i = 0; i < n; i += W)
            vf_store_dtype(sum, dtype, i,
                           vf_load_dtype(x, dtype, i, n - i) +
                               vf_load_dtype(residual, dtype, i, n - i),
                           n - i);
        r.h = sum;
    }
    double squares;
    r.mean = (float)row_moments(a->kind, false, &r, n, &squares);
    const float rstd = row_rstd(squares, n, a->eps);
    char *out = row_at(&a->out, row);
    const row_vector w = job->w, b = job->b;
    for (int64_t i = 0; i < n; i += W) {
        vf y = (vf_load_dtype(r.h, dtype, i, n - i) - r.mean) * rstd;
        if (w.data) y *= row_vector_at(&w, dtype, wide, i, n - i);
        if (b.data) y += row_vector_at(&b, dtype, wide, i, n - i);
        vf_store_dtype(out, dtype, i, y, n - i);
    }
}

static void fwd_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const fwd_job *job = arg;
    const int64_t end = gk_min_i64((task + 1) * job->p.each, job->p.rows);
#define ROWS(dtype, wide) \
    for (int64_t row = task * job->p.each; row < end; ++row) fwd_row(job, row, dtype, wide)
    ROW_DTYPES(job->a->x.dtype, job->w.wide, ROWS)
#undef ROWS
}

static bool fwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_norm_args *a = args;
    norm_plan *p = GK_OWN(norm_plan, plan);
    *p = plan_rows(&a->x, false);
    plan->tasks = gk_ceil_div(p->rows, p->each);
    plan->workspace_bytes = (size_t)(2 * p->ld) * sizeof(float);
    return true;
}

static void fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_norm_args *a = args;
    fwd_job job = {.a = a, .p = *GK_OWN_CONST(norm_plan, plan)};
    float *w = workspace, *b = w + job.p.ld;
    job.w = row_vector_of(a->weight, (float)a->weight_offset, a->x.dtype, w);
    job.b = row_vector_of(a->bias, 0, a->x.dtype, b);
    if (job.w.data && job.b.data && job.w.wide != job.b.wide) { /* one loop for both */
        row_vector *narrow = job.w.wide ? &job.b : &job.w;
        row_widen(narrow, a->x.dtype, job.p.n, job.w.wide ? b : w);
    }
    if (!job.w.data) job.w.wide = job.b.wide;
    gk_parallel(ctx, plan->tasks, fwd_task, &job);
}

const gk_cpu_kernel SYM(gk_norm_fwd) = {fwd_plan, fwd_run};

/* ---- 3. backward ----------------------------------------------------------------------------- */
typedef struct bwd_job {
    const gk_norm_bwd_args *a;
    norm_plan p;
    row_vector w;
    float *sums; /* [chunks, 2, ld] */
} bwd_job;

typedef struct bwd_row {
    row_in in;
    const char *grad_sum; /* or NULL */
    char *dx;
    float rstd, c1, c2; /* c2 includes the factor rstd */
} bwd_row;

INLINE bwd_row bwd_stats(const bwd_job *job, int64_t row, gk_dtype dtype, bool wide) {
    const gk_norm_bwd_args *a = job->a;
    const int64_t n = job->p.n;
    bwd_row r = {.in = {.h = row_at(&a->h, row),
                        .g = row_at(&a->grad_out, row),
                        .w = job->w,
                        .dtype = dtype,
                        .wide = wide}};
    r.grad_sum = a->grad_sum ? row_at(a->grad_sum, row) : NULL;
    r.dx = row_at(&a->dx, row);
    double s[3];
    r.in.mean = (float)row_moments(a->kind, true, &r.in, n, s);
    r.rstd = row_rstd(s[0], n, a->eps);
    r.c1 = a->kind == GK_LAYER_NORM ? (float)(s[1] / (double)n) : 0;
    r.c2 = (float)(s[2] / (double)n * r.rstd * r.rstd);
    return r;
}

/* dx of `rows` rows, and their contribution to dweight and dbias. */
INLINE void bwd_rows(const bwd_row *r, int rows, float *dw, float *db, int64_t n, gk_dtype dtype,
                     bool wide) {
    const row_vector w = r->in.w;
    for (int64_t i = 0; i < n; i += W) {
        const vf weight = w.data ? row_vector_at(&w, dtype, wide, i, n - i) : vf_set1(1);
        /* adds the rows of the group first: fewer steps, less rounding */
        vf sum_w = vf_set1(0), sum_b = vf_set1(0);
#pragma GCC unroll 4
        for (int k = 0; k < rows; ++k) {
            const vf g = vf_load_dtype(r[k].in.g, dtype, i, n - i);
            const vf d = vf_load_dtype(r[k].in.h, dtype, i, n - i) - r[k].in.mean;
            vf dx = (vf_fma(g, weight, -vf_set1(r[k].c1)) - d * r[k].c2) * r[k].rstd;
            if (r[k].grad_sum) dx += vf_load_dtype(r[k].grad_sum, dtype, i, n - i);
            vf_store_dtype(r[k].dx, dtype, i, dx, n - i);
            sum_w = vf_fma(g, d * r[k].rstd, sum_w);
            sum_b += g;
        }
        if (dw) vf_store(dw + i, vf_load(dw + i) + sum_w);
        if (db) vf_store(db + i, vf_load(db + i) + sum_b);
    }
}

INLINE void bwd_chunk(const bwd_job *job, int64_t task, gk_dtype dtype, bool wide) {
    const norm_plan *p = &job->p;
    const int64_t end = gk_min_i64((task + 1) * p->each, p->rows);
    float *dw = NULL, *db = NULL;
    if (p->chunks) {
        if (job->a->dweight) dw = job->sums + 2 * task * p->ld;
        if (job->a->dbias) db = job->sums + (2 * task + 1) * p->ld;
        if (dw) memset(dw, 0, (size_t)p->ld * sizeof *dw);
        if (db) memset(db, 0, (size_t)p->ld * sizeof *db);
    }
    int64_t row = task * p->each;
    for (; row + GROUP <= end; row += GROUP) {
        bwd_row r[GROUP];
        for (int k = 0; k < GROUP; ++k) r[k] = bwd_stats(job, row + k, dtype, wide);
        bwd_rows(r, GROUP, dw, db, p->n, dtype, wide);
    }
    for (; row < end; ++row) {
        const bwd_row r = bwd_stats(job, row, dtype, wide);
        bwd_rows(&r, 1, dw, db, p->n, dtype, wide);
    }
}

static void bwd_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const bwd_job *job = arg;
#define CHUNK(dtype, wide) bwd_chunk(job, task, dtype, wide)
    ROW_DTYPES(job->a->h.dtype, job->w.wide, CHUNK)
#undef CHUNK
}

static void add_chunks(const bwd_job *job, const gk_tensor *to, int64_t which, int64_t begin) {
    const int64_t ld = job->p.ld, end = gk_min_i64(begin + COLUMNS, job->p.n);
    for (int64_t i = begin; i < end; i += W) {
        vf sum = vf_set1(0);
        /* eight chunks at a time, for less rounding */
        for (int64_t first = 0; first < job->p.chunks; first += 8) {
            vf some = vf_set1(0);
            for (int64_t c = first; c < gk_min_i64(first + 8, job->p.chunks); ++c)
                some += vf_load(job->sums + (2 * c + which) * ld + i);
            sum += some;
        }
        if (to->stride[0] == 1) {
            vf_store_dtype(to->data, to->dtype, i, sum, end - i);
            continue;
        }
        for (int64_t j = 0; j < gk_min_i64(W, end - i); ++j)
            gk_store(to->data, to->dtype, (i + j) * to->stride[0], (double)sum[j]);
    }
}

static void sums_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const bwd_job *job = arg;
    if (job->a->dweight) add_chunks(job, job->a->dweight, 0, task * COLUMNS);
    if (job->a->dbias) add_chunks(job, job->a->dbias, 1, task * COLUMNS);
}

static bool bwd_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_norm_bwd_args *a = args;
    norm_plan *p = GK_OWN(norm_plan, plan);
    *p = plan_rows(&a->h, a->dweight || a->dbias);
    plan->tasks = gk_ceil_div(p->rows, p->each);
    plan->workspace_bytes = (size_t)(p->ld * (1 + 2 * p->chunks)) * sizeof(float);
    return true;
}

static void bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_norm_bwd_args *a = args;
    bwd_job job = {.a = a, .p = *GK_OWN_CONST(norm_plan, plan)};
    float *w = workspace;
    job.sums = w + job.p.ld;
    job.w = row_vector_of(a->weight, (float)a->weight_offset, a->h.dtype, w);
    if (job.p.chunks && job.p.rows == 0)
        memset(job.sums, 0, (size_t)(2 * job.p.ld) * sizeof(float));
    gk_parallel(ctx, plan->tasks, bwd_task, &job);
    if (job.p.chunks) gk_parallel(ctx, gk_ceil_div(job.p.n, COLUMNS), sums_task, &job);
}

const gk_cpu_kernel SYM(gk_norm_bwd) = {bwd_plan, bwd_run};
