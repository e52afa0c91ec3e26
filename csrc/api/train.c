/* SPDX-License-Identifier: BSD-3-Clause */
/* train: the checks and the costs of dropout and adamw. */
#include "../core/checks.h"
#include "../core/dispatch.h"

#include <stdio.h>

static double bytes_of(const gk_tensor *t) { return t ? gk_tensor_bytes(t) : 0; }

static gk_status take_seed(gk_io *io, const gk_tensor *seed) {
    GK_TRY(gk_take(io, "seed", seed, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "seed", seed, GK_I64));
    return gk_check_length_of("seed", seed, 2);
}

/* ---- dropout --------------------------------------------------------------------------------- */
static gk_status take_like(gk_io *io, const char *name, const gk_tensor *t, const gk_tensor *x) {
    if (!t) return GK_OK;
    GK_TRY(gk_take(io, name, t, GK_DENSE_LAST));
    GK_TRY(gk_check_same_dtype(io, name, t, "x", x));
    return gk_check_shape(name, t, x->ndim, x->shape);
}

gk_status gk_check_dropout(const gk_context *ctx, const gk_dropout_args *a, gk_io *io) {
    (void)ctx;
    const gk_tensor *x = &a->x;
    GK_TRY(gk_take(io, "x", x, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, "x", x));
    GK_TRY(gk_check_least_dims("x", x, 1));
    if (a->bias) {
        GK_TRY(gk_take(io, "bias", a->bias, GK_CONTIGUOUS));
        GK_TRY(gk_check_same_dtype(io, "bias", a->bias, "x", x));
        GK_TRY(gk_check_length_of("bias", a->bias, x->shape[x->ndim - 1]));
    }
    GK_TRY(take_like(io, "residual", a->residual, x));
    GK_TRY(take_like(io, "grad_out", a->grad_out, x));
    GK_TRY(take_seed(io, &a->seed));
    GK_REQUIRE(a->p >= 0 && a->p <= 1, "p must be between 0 and 1, got %g", a->p);
    GK_REQUIRE(!a->residual || !a->grad_out, "residual has no part in a gradient");
    GK_REQUIRE(a->activation == GK_ACT_NONE || a->activation == GK_ACT_GELU ||
                   a->activation == GK_ACT_GELU_TANH,
               "activation is %d, expected GK_ACT_NONE, GK_ACT_GELU or GK_ACT_GELU_TANH",
               (int)a->activation);
    gk_give(io, "out", &a->out, x->dtype, x->ndim, x->shape, GK_DENSE_LAST)->in_place = true;
    return GK_OK;
}

void gk_cost_dropout(const gk_context *ctx, const gk_dropout_args *a, gk_explanation *out) {
    (void)ctx;
    out->bytes = 2 * gk_tensor_bytes(&a->x) + bytes_of(a->bias) + bytes_of(a->residual) +
                 bytes_of(a->grad_out);
    out->flops = (a->activation == GK_ACT_NONE ? 1.0 : 8.0) * (double)gk_numel(&a->x);
}

/* ---- AdamW ----------------------------------------------------------------------------------- */
/* True if the elements of a tensor fill a range of memory, in any order of dimensions. */
static bool is_dense(const gk_tensor *t) {
    int64_t span = 1;
    bool used[GK_MAX_DIMS] = {false};
    for (int n = 0; n < t->ndim; ++n) {
        int next = -1;
        for (int d = 0; d < t->ndim; ++d)
            if (!used[d] && (t->shape[d] == 1 || t->stride[d] == span) &&
                (next < 0 || t->shape[d] == 1))
                next = d;
        if (next < 0) return false;
        used[next] = true;
        span *= t->shape[next];
    }
    return true;
}

static bool has_strides_of(const gk_tensor *x, const gk_tensor *y) {
    for (int d = 0; d < x->ndim; ++d)
        if (x->shape[d] > 1 && x->stride[d] != y->stride[d]) return false;
    return true;
}

/* Tensor i of a list, of this dtype and, if `like` is given, of its shape and strides. io does
 * not record it: the lists are longer than io's arrays. */
static gk_status take_of_list(gk_io *io, const char *list, int64_t i, const gk_tensor *t,
                              gk_dtype dtype, const gk_tensor *like) {
    char name[64];
    snprintf(name, sizeof name, "%s[%lld]", list, (long long)i);
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    --io->num_inputs;
    GK_TRY(gk_check_dtype(io, name, t, dtype));
    if (!like) {
        GK_REQUIRE(gk_numel(t) == 0 || is_dense(t),
                   "%s must be dense: its elements side by side in memory", name);
        return GK_OK;
    }
    GK_TRY(gk_check_shape(name, t, like->ndim, like->shape));
    GK_REQUIRE(gk_numel(t) == 0 || has_strides_of(like, t),
               "%s must have the strides of params[%lld]", name, (long long)i);
    return GK_OK;
}

static gk_status take_scalar(gk_io *io, const char *name, const gk_tensor *t) {
    if (!t) return GK_OK;
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, name, t, GK_F32));
    return gk_check_shape(name, t, 0, NULL);
}

static gk_status check_beta(const char *name, double x) {
    GK_REQUIRE(x >= 0 && x < 1, "%s must be at least 0 and less than 1, got %g", name, x);
    return GK_OK;
}

gk_status gk_check_adamw(const gk_context *ctx, const gk_adamw_args *a, gk_io *io) {
    (void)ctx;
    GK_REQUIRE(a->num >= 1 && a->params && a->grads && a->exp_avgs && a->exp_avg_sqs && a->steps,
               "expected at least one tensor in params, grads, exp_avgs, exp_avg_sqs and steps");
    const gk_tensor *first = &a->params[0];
    GK_TRY(gk_take(io, "params", first, GK_ANY_STRIDES));
    gk_taken_is_written(io);
    GK_TRY(gk_check_float(io, "params", first));
    const gk_dtype dtype = first->dtype, wide = gk_stats_dtype(dtype);
    GK_TRY(gk_check_dtypes(io, "exp_avgs[0]", &a->exp_avgs[0], dtype, wide));
    const gk_dtype state = a->masters || a->seed ? wide : a->exp_avgs[0].dtype;
    GK_REQUIRE(!a->masters || dtype != wide, "masters are for bfloat16 and float16 params, got %s",
               io->dtype_name(dtype));
    for (int64_t i = 0; i < a->num; ++i) {
        const gk_tensor *w = &a->params[i];
        GK_TRY(take_of_list(io, "params", i, w, dtype, NULL));
        GK_TRY(take_of_list(io, "grads", i, &a->grads[i], dtype, w));
        GK_TRY(take_of_list(io, "exp_avgs", i, &a->exp_avgs[i], state, w));
        GK_TRY(take_of_list(io, "exp_avg_sqs", i, &a->exp_avg_sqs[i], state, w));
        if (a->max_exp_avg_sqs)
            GK_TRY(take_of_list(io, "max_exp_avg_sqs", i, &a->max_exp_avg_sqs[i], state, w));
        if (a->masters) GK_TRY(take_of_list(io, "masters", i, &a->masters[i], GK_F32, w));
        char name[64];
        snprintf(name, sizeof name, "steps[%lld]", (long long)i);
        GK_TRY(take_scalar(io, name, &a->steps[i]));
        --io->num_inputs;
    }
    GK_TRY(take_scalar(io, "lr_tensor", a->lr_tensor));
    GK_TRY(take_scalar(io, "grad_scale", a->grad_scale));
    GK_TRY(take_scalar(io, "clip", a->clip));
    GK_TRY(take_scalar(io, "found_inf", a->found_inf));
    if (a->seed) {
        GK_TRY(take_seed(io, a->seed));
        GK_REQUIRE(dtype == GK_BF16,
                   "seed is for bfloat16 params, which are rounded stochastically, got %s",
                   io->dtype_name(dtype));
        GK_REQUIRE(!a->masters, "seed has no use beside masters, whose rounding the params are");
    }
    GK_REQUIRE(isfinite(a->lr) && a->lr >= 0, "lr must be a finite number of at least 0, got %g",
               a->lr);
    GK_TRY(check_beta("beta1", a->beta1));
    GK_TRY(check_beta("beta2", a->beta2));
    GK_REQUIRE(isfinite(a->eps) && a->eps >= 0, "eps must be a finite number of at least 0, got %g",
               a->eps);
    GK_REQUIRE(isfinite(a->weight_decay) && a->weight_decay >= 0,
               "weight_decay must be a finite number of at least 0, got %g", a->weight_decay);
    return GK_OK;
}

void gk_cost_adamw(const gk_context *ctx, const gk_adamw_args *a, gk_explanation *out) {
    (void)ctx;
    for (int64_t i = 0; i < a->num; ++i) {
        const double w = gk_tensor_bytes(&a->params[i]), m = gk_tensor_bytes(&a->exp_avgs[i]);
        const double master = a->masters ? gk_tensor_bytes(&a->masters[i]) : 0;
        /* with a master the parameter is only written */
        out->bytes += (a->masters ? 1 : 2) * w + w + 2 * master + (a->max_exp_avg_sqs ? 6 : 4) * m;
        out->flops += 14.0 * (double)gk_numel(&a->params[i]);
    }
}
