/* SPDX-License-Identifier: BSD-3-Clause */
/* kl_div: the check and the cost of gk_kl_div. */
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "gpukern_distill.h"

/* The dtype of dlogits: that of logits, or a 16-bit one beside float32 logits. */
static gk_dtype gradient_dtype(gk_dtype logits, gk_dtype own) {
    return logits == GK_F32 && (own == GK_BF16 || own == GK_F16) ? own : logits;
}

gk_status gk_check_kl_div(const gk_context *ctx, const gk_kl_div_args *a, gk_io *io) {
    (void)ctx;
    const gk_tensor *logits = &a->logits, *teacher = &a->teacher_logits;
    GK_TRY(gk_take(io, "logits", logits, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, "logits", logits));
    GK_TRY(gk_check_least_dims("logits", logits, 1));
    GK_REQUIRE(logits->shape[logits->ndim - 1] >= 1,
               "logits must have a last dimension of at least 1, got 0");
    GK_TRY(gk_take(io, "teacher_logits", teacher, GK_DENSE_LAST));
    GK_TRY(gk_check_same_dtype(io, "teacher_logits", teacher, "logits", logits));
    GK_TRY(gk_check_shape("teacher_logits", teacher, logits->ndim, logits->shape));
    if (a->mask) {
        GK_TRY(gk_take(io, "mask", a->mask, GK_ANY_STRIDES));
        GK_TRY(gk_check_dtype(io, "mask", a->mask, GK_U8));
        GK_TRY(gk_check_shape("mask", a->mask, logits->ndim - 1, logits->shape));
    }
    GK_REQUIRE(a->beta >= 0 && a->beta <= 1, "beta must be between 0 and 1, got %g", a->beta);
    GK_REQUIRE(isfinite(a->temperature) && a->temperature > 0,
               "temperature must be positive and finite, got %g", a->temperature);
    gk_give(io, "loss", &a->loss, gk_stats_dtype(logits->dtype), logits->ndim - 1, logits->shape,
            GK_CONTIGUOUS);
    const gk_dtype own = a->dlogits ? a->dlogits->dtype : logits->dtype;
    gk_result *r = gk_give(io, "dlogits", a->dlogits, gradient_dtype(logits->dtype, own),
                           logits->ndim, logits->shape, GK_DENSE_LAST);
    r->in_place = r->optional = true;
    return GK_OK;
}

void gk_cost_kl_div(const gk_context *ctx, const gk_kl_div_args *a, gk_explanation *out) {
    (void)ctx;
    const bool mixed = a->beta > 0 && a->beta < 1;
    out->bytes = gk_tensor_bytes(&a->logits) + gk_tensor_bytes(&a->teacher_logits) +
                 (a->mask ? gk_tensor_bytes(a->mask) : 0) +
                 (a->dlogits ? gk_tensor_bytes(a->dlogits) : 0);
    out->flops = ((mixed ? 22.0 : 9.0) + (a->dlogits ? (mixed ? 12.0 : 7.0) : 0.0)) *
                 (double)gk_numel(&a->logits);
}
