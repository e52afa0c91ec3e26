/* SPDX-License-Identifier: BSD-3-Clause */
/* softmax: softmax and log_softmax by their equations, in double. A task is one row. */
#include "rows.h"

static int64_t length_of(const gk_tensor *lengths, int64_t row, int64_t n) {
    if (!lengths) return n;
    return gk_clamp_i64(((const int32_t *)lengths->data)[ref_row_offset(lengths, row, 0)], 0, n);
}

static void fwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_softmax_args *a = arg;
    const int64_t n = last_size(&a->x), length = length_of(a->lengths, row, n);
    double peak = -INFINITY, sum = 0;
    for (int64_t i = 0; i < length; ++i) peak = fmax(peak, a->scale * ref_at(&a->x, row, i));
    for (int64_t i = 0; i < length; ++i) sum += exp(a->scale * ref_at(&a->x, row, i) - peak);
    for (int64_t i = 0; i < n; ++i) {
        const double s = a->scale * ref_at(&a->x, row, i) - peak;
        ref_put(&a->out, row, i, i >= length ? 0 : a->log ? s - log(sum) : exp(s) / sum);
    }
}

void gk_ref_softmax_fwd(const gk_context *ctx, const gk_softmax_args *args) {
    gk_softmax_args a = *args;
    gk_parallel(ctx, num_rows(&a.x), fwd_row, &a);
}

static void bwd_row(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_softmax_bwd_args *a = arg;
    const int64_t n = last_size(&a->out), length = length_of(a->lengths, row, n);
    double sum = 0;
    for (int64_t i = 0; i < length; ++i)
        sum += ref_at(&a->grad_out, row, i) * (a->log ? 1 : ref_at(&a->out, row, i));
    for (int64_t i = 0; i < n; ++i) {
        const double g = ref_at(&a->grad_out, row, i), y = ref_at(&a->out, row, i);
        ref_put(&a->dx, row, i,
                i >= length ? 0 : a->scale * (a->log ? g - exp(y) * sum : y * (g - sum)));
    }
}

void gk_ref_softmax_bwd(const gk_context *ctx, const gk_softmax_bwd_args *args) {
    gk_softmax_bwd_args a = *args;
    gk_parallel(ctx, num_rows(&a.out), bwd_row, &a);
}
