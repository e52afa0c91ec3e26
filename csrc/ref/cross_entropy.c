/* SPDX-License-Identifier: BSD-3-Clause */
/* cross_entropy: the loss of each row and its gradient by their equations (gpukern.h), in double; a task for each row. */
#include "rows.h"

typedef struct terms {
    int64_t n, target;
    double lse, own, weights; /* own: (1 - e) w[t]; weights: the sum of w */
} terms;

static double z_of(const gk_cross_entropy_args *a, double x) {
    return a->softcap > 0 ? a->softcap * tanh(a->logit_scale * x / a->softcap) : a->logit_scale * x;
}
static double w_of(const gk_cross_entropy_args *a, int64_t i) { return a->weight ? ref_vector_at(a->weight, i) : 1; }

static terms terms_of(const gk_cross_entropy_args *a, int64_t row) {
    terms t = {.n = last_size(&a->logits),
               .target = ((const int64_t *)a->target.data)[ref_row_offset(&a->target, row, 0)]};
    if (t.target == a->ignore_index) return t;
    double peak = -INFINITY, sum = 0;
    for (int64_t i = 0; i < t.n; ++i) {
        peak = fmax(peak, z_of(a, ref_at(&a->logits, row, i)));
        t.weights += w_of(a, i);
    }
    for (int64_t i = 0; i < t.n; ++i) sum += exp(z_of(a, ref_at(&a->logits, row, i)) - peak);
    t.lse = peak + log(sum), t.own = (1 - a->label_smoothing) * w_of(a, t.target);
    return t;
}

static void fwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_cross_entropy_args *a = arg;
    const terms t = terms_of(a, row);
    double loss = 0;
    if (t.target != a->ignore_index) {
        loss = t.own * (t.lse - z_of(a, ref_at(&a->logits, row, t.target)));
        for (int64_t i = 0; a->label_smoothing != 0 && i < t.n; ++i)
            loss += a->label_smoothing / (double)t.n * w_of(a, i) * (t.lse - z_of(a, ref_at(&a->logits, row, i)));
    }
    gk_store(a->loss.data, a->loss.dtype, row, loss);
    gk_store(a->lse.data, a->lse.dtype, row, t.lse);
}

void gk_ref_cross_entropy_fwd(const gk_context *ctx, const gk_cross_entropy_args *args) {
    gk_cross_entropy_args a = *args;
    gk_parallel(ctx, num_rows(&a.logits), fwd_row, &a);
}

static void bwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_cross_entropy_bwd_args *bwd = arg;
    const gk_cross_entropy_args *a = &bwd->fwd;
    const terms t = terms_of(a, row);
    const gk_tensor *grad = &bwd->grad_loss;
    const double g = gk_load(grad->data, grad->dtype, ref_row_offset(grad, row, 0)),
                 e = a->label_smoothing / (double)t.n;
    for (int64_t i = 0; i < t.n; ++i) {
        const double z = z_of(a, ref_at(&a->logits, row, i));
        double d = exp(z - t.lse) * (t.own + e * t.weights) - (i == t.target ? t.own : 0) - e * w_of(a, i);
        if (a->softcap > 0) d *= 1 - z / a->softcap * (z / a->softcap);
        ref_put(&bwd->dlogits, row, i, t.target == a->ignore_index ? 0 : g * d * a->logit_scale);
    }
}

void gk_ref_cross_entropy_bwd(const gk_context *ctx, const gk_cross_entropy_bwd_args *args) {
    gk_cross_entropy_bwd_args a = *args;
    gk_parallel(ctx, num_rows(&a.fwd.logits), bwd_row, &a);
}
