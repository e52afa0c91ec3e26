/* SPDX-License-Identifier: BSD-3-Clause */
/* rope_kv_write: QK norm, rotation and the write into a paged cache by their equations, in double.
 * A task is one head. It takes the tokens in order, so that the last of two tokens with one slot
 * stays. */
#include "../core/internal.h"
#include "../core/op.h"
#include "../core/paged.h"

enum {
    MOST_COLUMNS = GK_CACHE_HEAD_DIM
};

static int64_t index_of(const gk_tensor *t, int64_t i) {
    i *= t->stride[0];
    return t->dtype == GK_I64 ? ((const int64_t *)t->data)[i] : ((const int32_t *)t->data)[i];
}

/* Loads a head's row of q or k into x, normalises it if there is a weight, and rotates it. */
static void normalise_and_rotate(const gk_rope_kv_write_args *a, const gk_tensor *t, int64_t at,
                                 const gk_tensor *weight, int64_t position, double *x) {
    const int64_t d = t->shape[2], half = a->cos.shape[1];
    double squares = 0;
    for (int64_t i = 0; i < d; ++i) {
        x[i] = gk_load(t->data, t->dtype, at + i * t->stride[2]);
        squares += x[i] * x[i];
    }
    for (int64_t i = 0; weight && i < d; ++i)
        x[i] = x[i] / sqrt(squares / (double)d + a->eps) *
               gk_load(weight->data, weight->dtype, i * weight->stride[0]);
    for (int64_t i = 0; i < half; ++i) {
        const int64_t i1 = a->interleaved ? 2 * i : i, i2 = a->interleaved ? 2 * i + 1 : i + half;
        const double c =
            gk_load(a->cos.data, a->cos.dtype, position * a->cos.stride[0] + i * a->cos.stride[1]);
        const double s =
            gk_load(a->sin.data, a->sin.dtype, position * a->sin.stride[0] + i * a->sin.stride[1]);
        const double x1 = x[i1], x2 = x[i2];
        x[i1] = x1 * c - x2 * s;
        x[i2] = x2 * c + x1 * s;
    }
}

/* Divides x by the scale and writes it to row `slot` of the cache. Values that are too large
 * saturate. */
static void write(const gk_tensor *cache, const gk_tensor *scale, int64_t h, int64_t slot,
                  const double *x) {
    const int64_t page = slot / cache->shape[1], row = slot % cache->shape[1];
    const int64_t to = page * cache->stride[0] + row * cache->stride[1] + h * cache->stride[2];
    const double limit =
        scale && !gk_is_code(cache->dtype) ? gk_type_of(cache->dtype)->largest : INFINITY;
    double divisor = 1;
    if (scale)
        divisor = gk_load(scale->data, scale->dtype,
                          scale->ndim == 2   ? page * scale->stride[0] + h * scale->stride[1]
                          : scale->ndim == 1 ? h * scale->stride[0]
                                             : 0);
    for (int64_t d = 0; d < cache->shape[3]; ++d) {
        const double y = x[d] / divisor;
        gk_store(cache->data, cache->dtype, to + d * cache->stride[3],
                 y > limit    ? limit
                 : y < -limit ? -limit
                              : y);
    }
}

/* Tasks are numbered: first the heads of q, then those of k, then those of v. */
static void head(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const gk_rope_kv_write_args *a = arg;
    const int64_t heads_q = a->q.shape[1], heads = a->k.shape[1];
    double x[MOST_COLUMNS];
    for (int64_t t = 0; t < a->q.shape[0]; ++t) {
        const int64_t slot = index_of(&a->slots, t), position = index_of(&a->positions, t);
        if (task < heads_q) {
            const gk_tensor *to = &a->out_q;
            normalise_and_rotate(a, &a->q, t * a->q.stride[0] + task * a->q.stride[1], a->q_weight,
                                 position, x);
            for (int64_t d = 0; d < to->shape[2]; ++d)
                gk_store(to->data, to->dtype,
                         t * to->stride[0] + task * to->stride[1] + d * to->stride[2], x[d]);
        } else if (slot >= 0 && task < heads_q + heads) {
            const int64_t h = task - heads_q;
            normalise_and_rotate(a, &a->k, t * a->k.stride[0] + h * a->k.stride[1], a->k_weight,
                                 position, x);
            write(&a->k_cache, a->k_scale, h, slot, x);
        } else if (slot >= 0) {
            const int64_t h = task - heads_q - heads, at = t * a->v.stride[0] + h * a->v.stride[1];
            for (int64_t d = 0; d < a->v.shape[2]; ++d)
                x[d] = gk_load(a->v.data, a->v.dtype, at + d * a->v.stride[2]);
            write(&a->v_cache, a->v_scale, h, slot, x);
        }
    }
}

void gk_ref_rope_kv_write(const gk_context *ctx, const gk_rope_kv_write_args *args) {
    gk_rope_kv_write_args a = *args;
    gk_parallel(ctx, a.q.shape[1] + 2 * a.k.shape[1], head, &a);
}
