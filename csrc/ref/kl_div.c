/* SPDX-License-Identifier: BSD-3-Clause */
/* kl_div: the divergence of each row and its gradient by their equations (gpukern_distill.h), in
 * double. A task is one row. */
#include "gpukern_distill.h"
#include "rows.h"

typedef struct distribution {
    const gk_tensor *logits;
    double scale, lse;
} distribution;

static double z_of(const distribution *d, int64_t row, int64_t i) {
    return d->scale * ref_at(d->logits, row, i);
}

static distribution distribution_of(const gk_tensor *logits, double temperature, int64_t row) {
    distribution d = {logits, 1 / temperature, 0};
    double peak = -INFINITY, sum = 0;
    for (int64_t i = 0; i < last_size(logits); ++i) peak = fmax(peak, z_of(&d, row, i));
    const double base = peak == -INFINITY ? 0 : peak; /* -inf - -inf would be NaN */
    for (int64_t i = 0; i < last_size(logits); ++i) sum += exp(z_of(&d, row, i) - base);
    d.lse = peak + log(sum);
    return d;
}

/* p (log p - log m), which is 0 if p is 0. */
static double term(double p, double log_p, double log_m) {
    return p == 0 ? 0 : p * (log_p - log_m);
}

/* The terms of a column: its share of the loss, and its slope. The gradient by z is
 * p (slope - sum of p slope), or p - q for beta 0, which needs no slope. */
typedef struct column_terms {
    double p, q, loss, slope;
} column_terms;

static column_terms terms_of(const gk_kl_div_args *a, const distribution *s, const distribution *t,
                             int64_t row, int64_t i) {
    const double own = z_of(s, row, i) - s->lse, other = z_of(t, row, i) - t->lse;
    column_terms x = {.p = exp(own), .q = exp(other)};
    if (a->beta == 0) {
        x.loss = term(x.q, other, own);
    } else if (a->beta == 1) {
        x.loss = term(x.p, own, other);
        x.slope = x.p == 0 ? 0 : own - other;
    } else {
        const double middle = log(a->beta * x.q + (1 - a->beta) * x.p);
        x.loss = a->beta * term(x.q, other, middle) + (1 - a->beta) * term(x.p, own, middle);
        x.slope = x.p == 0 ? 0 : (1 - a->beta) * (own - middle);
    }
    return x;
}

static void kl_div_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_kl_div_args *a = arg;
    const int64_t n = last_size(&a->logits);
    const bool counts =
        !a->mask || ((const uint8_t *)a->mask->data)[ref_row_offset(a->mask, row, 0)] != 0;
    double loss = 0, mean = 0;
    distribution s = {0}, t = {0};
    if (counts) {
        s = distribution_of(&a->logits, a->temperature, row);
        t = distribution_of(&a->teacher_logits, a->temperature, row);
        for (int64_t i = 0; i < n; ++i) {
            const column_terms x = terms_of(a, &s, &t, row, i);
            loss += x.loss;
            mean += x.p * x.slope;
        }
    }
    gk_store(a->loss.data, a->loss.dtype, row, loss);
    if (!a->dlogits) return;
    for (int64_t i = 0; i < n; ++i) {
        double d = 0;
        if (counts) {
            const column_terms x = terms_of(a, &s, &t, row, i);
            d = (a->beta == 0 ? x.p - x.q : x.p * (x.slope - mean)) / a->temperature;
        }
        ref_put(a->dlogits, row, i, d);
    }
}

void gk_ref_kl_div(const gk_context *ctx, const gk_kl_div_args *args) {
    gk_kl_div_args a = *args;
    gk_parallel(ctx, num_rows(&a.logits), kl_div_row, &a);
}
