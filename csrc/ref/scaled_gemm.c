/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm by its definition (gpukern_quant.h), one element of the result at a time, in double.
 * A task is one row. */
#include "../core/internal.h"
#include "../formats/scales.h"
#include "activation.h"

typedef struct job {
    const gk_scaled_gemm_args *x;
    gk_scales sa, sb;
} job;

static double scale(const gk_scales *s, int64_t row, int64_t col) {
    return gk_load(s->data, s->dtype,
                   (row >> s->row_log2) * s->row + (col >> s->col_log2) * s->col);
}

/* An element of c or bias; dimensions of size 1 broadcast. */
static double addend(const gk_tensor *t, int64_t row, int64_t col) {
    int64_t at = 0;
    if (t->ndim > 1 && t->shape[t->ndim - 2] > 1) at += row * t->stride[t->ndim - 2];
    if (t->ndim > 0 && t->shape[t->ndim - 1] > 1) at += col * t->stride[t->ndim - 1];
    return gk_load(t->data, t->dtype, at);
}

static void row_task(void *arg, int64_t i, int64_t worker) {
    (void)worker;
    const job *jb = arg;
    const gk_scaled_gemm_args *x = jb->x;
    for (int64_t j = 0; j < x->out.shape[1]; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < x->a.shape[1]; ++k)
            sum += gk_load(x->a.data, x->a.dtype, i * x->a.stride[0] + k * x->a.stride[1]) *
                   scale(&jb->sa, i, k) *
                   gk_load(x->b.data, x->b.dtype, k * x->b.stride[0] + j * x->b.stride[1]) *
                   scale(&jb->sb, k, j);
        if (x->c && x->beta != 0) sum += x->beta * addend(x->c, i, j);
        if (x->bias) sum += addend(x->bias, 0, j);
        double y = act(x->activation, sum);
        if (x->out_scale) y /= *(const float *)x->out_scale->const_data;
        gk_store(x->out.data, x->out.dtype, i * x->out.stride[0] + j * x->out.stride[1], y);
    }
}

void gk_ref_scaled_gemm(const gk_context *ctx, const gk_scaled_gemm_args *args) {
    job jb = {args, gk_scales_of(&args->scale_a, args->a.shape[0], args->a.shape[1], false),
              gk_scales_of(&args->scale_b, args->b.shape[0], args->b.shape[1], true)};
    gk_parallel(ctx, args->out.shape[0], row_task, &jb);
}
