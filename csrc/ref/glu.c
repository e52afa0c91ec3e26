/* SPDX-License-Identifier: BSD-3-Clause */
/* glu: gated linear units by their equations, in double. A task is one row. */
#include "activation.h"
#include "rows.h"

static void fwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_glu_args *a = arg;
    const gk_tensor gate = gk_glu_half(&a->gate, a->up, 0), up = gk_glu_half(&a->gate, a->up, 1);
    for (int64_t i = 0; i < last_size(&a->out); ++i)
        ref_put(&a->out, row, i, act(a->activation, ref_at(&gate, row, i)) * ref_at(&up, row, i));
}

void gk_ref_glu_fwd(const gk_context *ctx, const gk_glu_args *args) {
    gk_glu_args a = *args;
    gk_parallel(ctx, num_rows(&a.out), fwd_row, &a);
}

static void bwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_glu_bwd_args *a = arg;
    const gk_tensor gate = gk_glu_half(&a->gate, a->up, 0), up = gk_glu_half(&a->gate, a->up, 1);
    const gk_tensor dgate = gk_glu_half(&a->dgate, a->dup, 0),
                    dup = gk_glu_half(&a->dgate, a->dup, 1);
    for (int64_t i = 0; i < last_size(&a->grad_out); ++i) {
        const double g = ref_at(&a->grad_out, row, i), x = ref_at(&gate, row, i),
                     u = ref_at(&up, row, i);
        ref_put(&dgate, row, i, g * u * act_derivative(a->activation, x));
        ref_put(&dup, row, i, g * act(a->activation, x));
    }
}

void gk_ref_glu_bwd(const gk_context *ctx, const gk_glu_bwd_args *args) {
    gk_glu_bwd_args a = *args;
    gk_parallel(ctx, num_rows(&a.grad_out), bwd_row, &a);
}
