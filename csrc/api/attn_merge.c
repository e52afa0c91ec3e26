/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_merge: the check and the cost of gk_attn_merge. */
#include "../core/checks.h"
#include "../core/dispatch.h"

gk_status gk_check_attn_merge(const gk_context *ctx, const gk_attn_merge_args *m, gk_io *io) {
    (void)ctx;
    const gk_tensor *first = &m->out_a;
    GK_TRY(gk_take(io, "out_a", first, GK_ANY_STRIDES));
    GK_TRY(gk_check_float(io, "out_a", first));
    GK_TRY(gk_check_least_dims("out_a", first, 1));
    const int rows = first->ndim - 1;
    const gk_dtype stats = gk_stats_dtype(first->dtype);
    GK_TRY(gk_take(io, "lse_a", &m->lse_a, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "lse_a", &m->lse_a, stats));
    GK_TRY(gk_check_shape("lse_a", &m->lse_a, rows, first->shape));
    GK_TRY(gk_take(io, "out_b", &m->out_b, GK_ANY_STRIDES));
    GK_TRY(gk_check_same_dtype(io, "out_b", &m->out_b, "out_a", first));
    GK_TRY(gk_check_shape("out_b", &m->out_b, first->ndim, first->shape));
    GK_TRY(gk_take(io, "lse_b", &m->lse_b, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "lse_b", &m->lse_b, stats));
    GK_TRY(gk_check_shape("lse_b", &m->lse_b, rows, first->shape));
    gk_give(io, "out", &m->out, first->dtype, first->ndim, first->shape, GK_CONTIGUOUS)->in_place =
        true;
    gk_give(io, "lse", &m->lse, stats, rows, first->shape, GK_CONTIGUOUS)->in_place = true;
    return GK_OK;
}

void gk_cost_attn_merge(const gk_context *ctx, const gk_attn_merge_args *m, gk_explanation *out) {
    (void)ctx;
    out->bytes = 3 * (gk_tensor_bytes(&m->out) + gk_tensor_bytes(&m->lse));
    out->flops = 3.0 * (double)gk_numel(&m->out);
}
