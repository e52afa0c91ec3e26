/* SPDX-License-Identifier: BSD-3-Clause */
/* cross_entropy: the loss of each row and its gradient by their equations (gpukern.h), in double. A
 * task is one row. */
#include "gpukern_train.h"
#include "rows.h"

typedef struct terms {
    int64_t n, target;
    double lse, own, weights; /* own: (1 - e) w[t]; weights: the sum of w */
} terms;

static double z_of(const gk_cross_entropy_args *a, double x) {
    return a->softcap > 0 ? a->softcap * tanh(a->logit_scale * x / a->softcap) : a->logit_scale * x;
}
static double w_of(const gk_cross_entropy_args *a, int64_t i) {
    return a->weight ? ref_vector_at(a->weight, i) : 1;
}

/* The terms of a row. lse is computed, over the columns at hand, only if with_lse. */
static terms terms_of(const gk_cross_entropy_args *a, int64_t row, int64_t classes, bool with_lse) {
    terms t = {.n = last_size(&a->logits),
               .target = ((const int64_t *)a->target.data)[ref_row_offset(&a->target, row, 0)]};
    if (t.target == a->ignore_index) return t;
    double peak = -INFINITY, sum = 0;
    for (int64_t i = 0; i < classes; ++i) t.weights += w_of(a, i);
    for (int64_t i = 0; with_lse && i < t.n; ++i)
        peak = fmax(peak, z_of(a, ref_at(&a->logits, row, i)));
    const double base = peak == -INFINITY ? 0 : peak; /* -inf - -inf would be NaN */
    for (int64_t i = 0; with_lse && i < t.n; ++i)
        sum += exp(z_of(a, ref_at(&a->logits, row, i)) - base);
    t.lse = peak + log(sum);
    t.own = (1 - a->label_smoothing) * w_of(a, t.target);
    return t;
}

/* Writes a row of dlogits for the gradient g of its loss. */
static void put_gradient(const gk_cross_entropy_args *a, const gk_loss_more *more, int64_t row,
                         const terms *t, double g) {
    const double e = a->label_smoothing / (double)more->num_classes;
    const int64_t first = more->first_class;
    for (int64_t i = 0; i < t->n; ++i) {
        const double z = z_of(a, ref_at(&a->logits, row, i));
        double d = exp(z - t->lse) * (t->own + e * t->weights + 2 * more->z_loss * t->lse);
        d -= (first + i == t->target ? t->own : 0) + e * w_of(a, first + i);
        if (a->softcap > 0) d *= 1 - z / a->softcap * (z / a->softcap);
        ref_put(more->dlogits, row, i, t->target == a->ignore_index ? 0 : g * d * a->logit_scale);
    }
}

typedef struct fwd_call {
    gk_cross_entropy_args a;
    gk_loss_more more;
} fwd_call;

static void fwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const fwd_call *call = arg;
    const gk_cross_entropy_args *a = &call->a;
    const terms t = terms_of(a, row, last_size(&a->logits), true);
    double loss = 0;
    if (t.target != a->ignore_index) {
        loss = t.own * (t.lse - z_of(a, ref_at(&a->logits, row, t.target))) +
               call->more.z_loss * t.lse * t.lse;
        for (int64_t i = 0; a->label_smoothing != 0 && i < t.n; ++i)
            loss += a->label_smoothing / (double)t.n * w_of(a, i) *
                    (t.lse - z_of(a, ref_at(&a->logits, row, i)));
    }
    gk_store(a->loss.data, a->loss.dtype, row, loss);
    gk_store(a->lse.data, a->lse.dtype, row, t.lse);
    if (call->more.dlogits) put_gradient(a, &call->more, row, &t, 1);
}

void gk_ref_cross_entropy_fwd(const gk_context *ctx, const gk_cross_entropy_args *args) {
    fwd_call call = {*args, gk_more_of_fwd(args)};
    gk_parallel(ctx, num_rows(&args->logits), fwd_row, &call);
}

typedef struct bwd_call {
    gk_cross_entropy_bwd_args b;
    gk_loss_more more;
} bwd_call;

static void bwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const bwd_call *call = arg;
    const gk_cross_entropy_bwd_args *bwd = &call->b;
    const gk_cross_entropy_args *a = &bwd->fwd;
    const bool whole = call->more.num_classes == last_size(&a->logits);
    terms t = terms_of(a, row, call->more.num_classes, whole);
    const gk_tensor *grad = &bwd->grad_loss;
    /* logits are a slice of the vocabulary: take the lse over all of it from the caller */
    if (!whole) t.lse = gk_load(a->lse.data, a->lse.dtype, row);
    const double g = gk_load(grad->data, grad->dtype, ref_row_offset(grad, row, 0));
    put_gradient(a, &call->more, row, &t, g);
}

void gk_ref_cross_entropy_bwd(const gk_context *ctx, const gk_cross_entropy_bwd_args *args) {
    bwd_call call = {*args, gk_more_of_bwd(args)};
    gk_parallel(ctx, num_rows(&args->fwd.logits), bwd_row, &call);
}
