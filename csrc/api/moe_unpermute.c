/* SPDX-License-Identifier: BSD-3-Clause */
/* moe_unpermute: the checks and costs of gk_moe_unpermute and gk_moe_unpermute_bwd. */
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "gpukern_moe.h"

/* Checks place and weight, [T, J] each. */
static gk_status take_choices(gk_io *io, const gk_tensor *place, const gk_tensor *weight,
                              const gk_tensor *rows) {
    GK_TRY(gk_take(io, "place", place, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, "place", place, GK_I32, GK_I64));
    GK_TRY(gk_check_dims("place", place, 2, "[T, J]"));
    GK_TRY(gk_take(io, "weight", weight, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, "weight", weight, GK_F32, rows->dtype));
    return gk_check_shape("weight", weight, 2, place->shape);
}

gk_status gk_check_moe_unpermute(const gk_context *ctx, const gk_moe_unpermute_args *a, gk_io *io) {
    GK_TRY(gk_take(io, "rows", &a->rows, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, "rows", &a->rows));
    GK_TRY(gk_check_dims("rows", &a->rows, 2, "[R, H]"));
    GK_TRY(take_choices(io, &a->place, &a->weight, &a->rows));
    const int64_t shape[] = {a->place.shape[0], a->rows.shape[1]};
    gk_give(io, "out", &a->out, a->rows.dtype, 2, shape, GK_DENSE_LAST);
    return gk_reads_contents(io, ctx) ? gk_check_places(&a->place, a->rows.shape[0]) : GK_OK;
}

/* A gradient [shape[0], shape[1]]; [0] if t is NULL. */
static void give_gradient(gk_io *io, const char *name, const gk_tensor *t, gk_dtype dtype,
                          const int64_t *shape) {
    static const int64_t none[] = {0};
    gk_give(io, name, t, dtype, t ? 2 : 1, t ? shape : none, GK_CONTIGUOUS)->optional = true;
}

gk_status gk_check_moe_unpermute_bwd(const gk_context *ctx, const gk_moe_unpermute_bwd_args *a,
                                     gk_io *io) {
    GK_TRY(gk_take(io, "grad_out", &a->grad_out, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, "grad_out", &a->grad_out));
    GK_TRY(gk_check_dims("grad_out", &a->grad_out, 2, "[T, H]"));
    GK_TRY(gk_take(io, "rows", &a->rows, GK_DENSE_LAST));
    GK_TRY(gk_check_same_dtype(io, "rows", &a->rows, "grad_out", &a->grad_out));
    GK_TRY(gk_check_dims("rows", &a->rows, 2, "[R, H]"));
    GK_TRY(gk_check_same("rows", "columns", a->rows.shape[1], "grad_out", a->grad_out.shape[1]));
    GK_TRY(take_choices(io, &a->place, &a->weight, &a->rows));
    GK_TRY(gk_check_same("place", "tokens", a->place.shape[0], "grad_out", a->grad_out.shape[0]));
    give_gradient(io, "drows", a->drows, a->rows.dtype, a->rows.shape);
    give_gradient(io, "dweight", a->dweight, gk_stats_dtype(a->rows.dtype), a->place.shape);
    return gk_reads_contents(io, ctx) ? gk_check_places(&a->place, a->rows.shape[0]) : GK_OK;
}

/* As if every place named a row of its own. */
void gk_cost_moe_unpermute(const gk_context *ctx, const gk_moe_unpermute_args *a,
                           gk_explanation *out) {
    (void)ctx;
    const double values = (double)gk_numel(&a->place) * (double)a->rows.shape[1];
    out->bytes = values * gk_dtype_bytes(a->rows.dtype) + gk_tensor_bytes(&a->place) +
                 gk_tensor_bytes(&a->weight) + gk_tensor_bytes(&a->out);
    out->flops = 2.0 * values;
}

void gk_cost_moe_unpermute_bwd(const gk_context *ctx, const gk_moe_unpermute_bwd_args *a,
                               gk_explanation *out) {
    (void)ctx;
    const double values = (double)gk_numel(&a->place) * (double)a->rows.shape[1];
    out->bytes =
        gk_tensor_bytes(&a->grad_out) + gk_tensor_bytes(&a->place) + gk_tensor_bytes(&a->weight) +
        (a->dweight ? values * gk_dtype_bytes(a->rows.dtype) : 0) +
        (a->dweight ? gk_tensor_bytes(a->dweight) : 0) + (a->drows ? gk_tensor_bytes(a->drows) : 0);
    out->flops = values * ((a->drows ? 1.0 : 0.0) + (a->dweight ? 2.0 : 0.0));
}
