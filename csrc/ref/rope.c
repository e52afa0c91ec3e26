/* SPDX-License-Identifier: BSD-3-Clause */
/* rope: rotary embedding by its equation (gpukern.h), in double. A task is one token. */
#include "rows.h"

static void rotate(const gk_rope_args *a, const gk_tensor *from_x, const gk_tensor *to_y, int64_t b,
                   int64_t s, int64_t position) {
    const gk_tensor of_x = gk_heads_of(from_x), of_y = gk_heads_of(to_y), *x = &of_x, *y = &of_y;
    const int64_t half = a->cos.shape[1], d = x->shape[3];
    for (int64_t h = 0; h < x->shape[1]; ++h) {
        const int64_t from = b * x->stride[0] + h * x->stride[1] + s * x->stride[2];
        const int64_t to = b * y->stride[0] + h * y->stride[1] + s * y->stride[2];
        for (int64_t i = 0; i < half; ++i) {
            const int64_t i1 = a->interleaved ? 2 * i : i,
                          i2 = a->interleaved ? 2 * i + 1 : i + half;
            const double c = gk_load(a->cos.data, a->cos.dtype,
                                     position * a->cos.stride[0] + i * a->cos.stride[1]);
            const double n = gk_load(a->sin.data, a->sin.dtype,
                                     position * a->sin.stride[0] + i * a->sin.stride[1]);
            const double sine = a->inverse ? -n : n;
            const double x1 = gk_load(x->data, x->dtype, from + i1 * x->stride[3]);
            const double x2 = gk_load(x->data, x->dtype, from + i2 * x->stride[3]);
            gk_store(y->data, y->dtype, to + i1 * y->stride[3], x1 * c - x2 * sine);
            gk_store(y->data, y->dtype, to + i2 * y->stride[3], x2 * c + x1 * sine);
        }
        for (int64_t i = 2 * half; i < d; ++i)
            gk_store(y->data, y->dtype, to + i * y->stride[3],
                     gk_load(x->data, x->dtype, from + i * x->stride[3]));
    }
}

static void token(void *arg, int64_t t, int64_t worker) {
    (void)worker;
    const gk_rope_args *a = arg;
    const int64_t seq = gk_heads_of(&a->q).shape[2], b = t / seq, s = t % seq;
    const gk_tensor *p = a->positions;
    int64_t position = s;
    if (p) {
        const int64_t at = p->ndim == 2 ? b * p->stride[0] + s * p->stride[1] : s * p->stride[0];
        position =
            p->dtype == GK_I64 ? ((const int64_t *)p->data)[at] : ((const int32_t *)p->data)[at];
    }
    rotate(a, &a->q, &a->out_q, b, s, position);
    if (a->k) rotate(a, a->k, a->out_k, b, s, position);
}

void gk_ref_rope(const gk_context *ctx, const gk_rope_args *args) {
    gk_rope_args a = *args;
    const gk_tensor q = gk_heads_of(&a.q);
    gk_parallel(ctx, q.shape[0] * q.shape[2], token, &a);
}
