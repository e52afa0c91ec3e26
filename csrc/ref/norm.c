/* SPDX-License-Identifier: BSD-3-Clause */
/* norm: RMSNorm and LayerNorm by their equations, in double. A forward task is one row. A backward
 * task is one row of dx, or COLUMNS columns of dweight and dbias. */
#include "rows.h"

typedef struct stats {
    double mean, rstd;
} stats;

/* The mean (0 for RMSNorm) and 1 / sqrt(variance + eps) of a row of h. */
static stats stats_of(const gk_tensor *h, int64_t row, gk_norm_kind kind, double eps) {
    const int64_t n = last_size(h);
    double sum = 0, squares = 0;
    if (kind == GK_LAYER_NORM)
        for (int64_t i = 0; i < n; ++i) sum += ref_at(h, row, i);
    const double mean = sum / (double)n;
    for (int64_t i = 0; i < n; ++i) {
        const double d = ref_at(h, row, i) - mean;
        squares += d * d;
    }
    return (stats){mean, 1 / sqrt(squares / (double)n + eps)};
}

static double weight_at(const gk_tensor *weight, double offset, int64_t i) {
    return weight ? ref_vector_at(weight, i) + offset : 1;
}

static void fwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_norm_args *a = arg;
    const int64_t n = last_size(&a->x);
    const gk_tensor *h = &a->x;
    if (a->residual) {
        for (int64_t i = 0; i < n; ++i)
            ref_put(a->sum, row, i, ref_at(&a->x, row, i) + ref_at(a->residual, row, i));
        h = a->sum;
    }
    const stats s = stats_of(h, row, a->kind, a->eps);
    for (int64_t i = 0; i < n; ++i)
        ref_put(&a->out, row, i,
                (ref_at(h, row, i) - s.mean) * s.rstd * weight_at(a->weight, a->weight_offset, i) +
                    (a->bias ? ref_vector_at(a->bias, i) : 0));
}

void gk_ref_norm_fwd(const gk_context *ctx, const gk_norm_args *args) {
    gk_norm_args a = *args;
    gk_parallel(ctx, num_rows(&a.x), fwd_row, &a);
}

static void bwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_norm_bwd_args *a = arg;
    const int64_t n = last_size(&a->h);
    const stats s = stats_of(&a->h, row, a->kind, a->eps);
    double c1 = 0, c2 = 0; /* the means of gw (LayerNorm) and of gw xhat, where gw = g weight */
    for (int64_t i = 0; i < n; ++i) {
        const double gw = ref_at(&a->grad_out, row, i) * weight_at(a->weight, a->weight_offset, i);
        c1 += gw;
        c2 += gw * (ref_at(&a->h, row, i) - s.mean) * s.rstd;
    }
    c1 = a->kind == GK_LAYER_NORM ? c1 / (double)n : 0;
    c2 /= (double)n;
    for (int64_t i = 0; i < n; ++i) {
        const double gw = ref_at(&a->grad_out, row, i) * weight_at(a->weight, a->weight_offset, i);
        const double xhat = (ref_at(&a->h, row, i) - s.mean) * s.rstd;
        ref_put(&a->dx, row, i,
                s.rstd * (gw - c1 - xhat * c2) + (a->grad_sum ? ref_at(a->grad_sum, row, i) : 0));
    }
}

enum {
    COLUMNS = 64
};

static void bwd_columns(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const gk_norm_bwd_args *a = arg;
    const int64_t rows = num_rows(&a->h), begin = task * COLUMNS;
    const int64_t count = gk_min_i64(COLUMNS, last_size(&a->h) - begin);
    double dw[COLUMNS] = {0}, db[COLUMNS] = {0};
    for (int64_t row = 0; row < rows; ++row) {
        const stats s = stats_of(&a->h, row, a->kind, a->eps);
        for (int64_t i = 0; i < count; ++i) {
            const double g = ref_at(&a->grad_out, row, begin + i);
            dw[i] += g * (ref_at(&a->h, row, begin + i) - s.mean) * s.rstd;
            db[i] += g;
        }
    }
    for (int64_t i = 0; i < count; ++i) {
        if (a->dweight) ref_vector_put(a->dweight, begin + i, dw[i]);
        if (a->dbias) ref_vector_put(a->dbias, begin + i, db[i]);
    }
}

void gk_ref_norm_bwd(const gk_context *ctx, const gk_norm_bwd_args *args) {
    gk_norm_bwd_args a = *args;
    gk_parallel(ctx, num_rows(&a.h), bwd_row, &a);
    if (a.dweight || a.dbias)
        gk_parallel(ctx, gk_ceil_div(last_size(&a.h), COLUMNS), bwd_columns, &a);
}
