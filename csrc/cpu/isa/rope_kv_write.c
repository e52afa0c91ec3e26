/* SPDX-License-Identifier: BSD-3-Clause */
/* rope_kv_write: QK norm, rotary embedding and the write into a paged cache in one pass,
 * compiled once per ISA.
 *
 *  out_q = rotate(norm(q))
 *  k_cache[slot] = rotate(norm(k)) / k_scale,   v_cache[slot] = v / v_scale
 *
 * q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv] are float32, bfloat16 or float16. The caches
 * have that dtype or an 8-bit one. Values are computed in float32 and rounded once. A task is a
 * range of heads, where the heads of q, k and v are numbered consecutively. It takes the tokens
 * in order, so that the last of two tokens with one slot stays. No workspace. Not served:
 * float64 (ref/). */
#include "../../core/paged.h"
#include "codes_vec.h"
#include "rows.h"

enum {
    MOST_COLUMNS = GK_CACHE_HEAD_DIM
};

typedef struct job {
    const gk_rope_kv_write_args *a;
    int64_t heads;      /* of q, k and v together */
    int64_t task_heads; /* heads of a task */
} job;
GK_PLAN_HOLDS(job);

INLINE int64_t index_of(const gk_tensor *t, int64_t i) {
    i *= t->stride[0];
    return t->dtype == GK_I64 ? ((const int64_t *)t->data)[i] : ((const int32_t *)t->data)[i];
}

INLINE const char *row_of(const gk_tensor *x, int64_t t, int64_t h) {
    return gk_at(x->data, (t * x->stride[0] + h * x->stride[1]) * (gk_type_of(x->dtype)->bits / 8));
}

/* Lanes beyond the row are set to 0. */
INLINE void load_row(float *x, const char *from, gk_dtype dtype, int64_t n) {
    for (int64_t i = 0; i < n; i += W) vf_store(x + i, vf_load_dtype(from, dtype, i, n - i));
}

static void norm_row(float *x, int64_t n, const gk_tensor *weight, double eps) {
    vf sum = vf_set1(0);
    for (int64_t i = 0; i < n; i += W) sum = vf_fma(vf_load(x + i), vf_load(x + i), sum);
    const float rstd = (float)(1 / sqrt((double)vf_total(sum) / (double)n + eps));
    if (weight->stride[0] == 1) {
        for (int64_t i = 0; i < n; i += W)
            vf_store(x + i,
                     vf_load(x + i) * rstd * vf_load_dtype(weight->data, weight->dtype, i, n - i));
        return;
    }
    for (int64_t i = 0; i < n; ++i)
        x[i] *= rstd * (float)gk_load(weight->data, weight->dtype, i * weight->stride[0]);
}

static void rotate_row(float *x, const float *cos, const float *sin, int64_t half,
                       bool interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < half; ++i) {
            const float x1 = x[2 * i], x2 = x[2 * i + 1];
            x[2 * i] = x1 * cos[i] - x2 * sin[i];
            x[2 * i + 1] = x2 * cos[i] + x1 * sin[i];
        }
        return;
    }
    for (int64_t i = 0; i < half; i += W) {
        const int64_t n = half - i;
        const vf c = vf_load_first(cos + i, n), s = vf_load_first(sin + i, n);
        const vf x1 = vf_load_first(x + i, n), x2 = vf_load_first(x + half + i, n);
        vf_store_first(x + i, x1 * c - x2 * s, n);
        vf_store_first(x + half + i, x2 * c + x1 * s, n);
    }
}

/* to[i step] = saturate(x[i] / scale), or x[i] if scale is NULL. */
static void store_row(const float *x, char *to, int64_t step, gk_dtype dtype, int64_t n,
                      const float *scale) {
    const bool code = gk_is_code(dtype);
    const float divisor = scale ? *scale : 1;
    /* vf_store_code saturates by itself */
    const float limit = scale && !code ? (float)gk_type_of(dtype)->largest : INFINITY;
    for (int64_t i = 0; i < n; i += W) {
        vf y = vf_load(x + i);
        if (scale) /* NaN stays NaN */
            y = vf_max(vf_set1(-limit), vf_min(vf_set1(limit), y / divisor));
        if (step != 1) {
            float lane[W];
            vf_store(lane, y);
            for (int64_t l = 0; l < W && i + l < n; ++l)
                gk_store(to, dtype, (i + l) * step, lane[l]);
        } else if (code) {
            vf_store_code(to, dtype, i, y, n - i);
        } else {
            vf_store_dtype(to, dtype, i, y, n - i);
        }
    }
}

/* Stores row x as head h of a slot of a cache. */
static void store_in_cache(const float *x, const gk_tensor *cache, const gk_tensor *scale,
                           int64_t h, int64_t slot) {
    const int64_t page = slot / cache->shape[1], row = slot % cache->shape[1];
    const int64_t at = page * cache->stride[0] + row * cache->stride[1] + h * cache->stride[2];
    const float *by = scale ? (const float *)scale->data : NULL;
    if (by && scale->ndim)
        by += h * scale->stride[scale->ndim - 1] + (scale->ndim == 2 ? page * scale->stride[0] : 0);
    store_row(x, gk_at(cache->data, at * (gk_type_of(cache->dtype)->bits / 8)), cache->stride[3],
              cache->dtype, cache->shape[3], by);
}

/* Writes one head of one token: a head of q to out_q, a head of k or v to its cache. h counts the
 * heads of q, then those of k, then those of v. A negative slot writes only q. */
static void write_head(const gk_rope_kv_write_args *a, int64_t h, int64_t t) {
    float x[MOST_COLUMNS + 2 * W] __attribute__((aligned(64)));
    const int64_t heads_q = a->q.shape[1], heads_kv = a->k.shape[1], slot = index_of(&a->slots, t);
    if (h >= heads_q && slot < 0) return;
    if (h >= heads_q + heads_kv) {
        h -= heads_q + heads_kv;
        load_row(x, row_of(&a->v, t, h), a->v.dtype, a->v.shape[2]);
        store_in_cache(x, &a->v_cache, a->v_scale, h, slot);
        return;
    }
    const bool of_q = h < heads_q;
    const gk_tensor *from = of_q ? &a->q : &a->k, *weight = of_q ? a->q_weight : a->k_weight;
    const int64_t n = from->shape[2], position = index_of(&a->positions, t);
    if (!of_q) h -= heads_q;
    load_row(x, row_of(from, t, h), from->dtype, n);
    if (weight) norm_row(x, n, weight, a->eps);
    if (a->cos.shape[1] > 0) /* otherwise cos may have no data */
        rotate_row(x, (const float *)a->cos.data + position * a->cos.stride[0],
                   (const float *)a->sin.data + position * a->sin.stride[0], a->cos.shape[1],
                   a->interleaved);
    if (of_q)
        store_row(x, (char *)row_of(&a->out_q, t, h), 1, from->dtype, n, NULL);
    else
        store_in_cache(x, &a->k_cache, a->k_scale, h, slot);
}

static void heads_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *j = arg;
    const int64_t end = gk_min_i64((task + 1) * j->task_heads, j->heads);
    for (int64_t t = 0; t < j->a->q.shape[0]; ++t)
        for (int64_t h = task * j->task_heads; h < end; ++h) write_head(j->a, h, t);
}

static bool rope_kv_write_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_rope_kv_write_args *a = args;
    job *j = GK_OWN(job, plan);
    *j = (job){.heads = a->q.shape[1] + 2 * a->k.shape[1]};
    j->task_heads = rows_per_task(a->q.shape[0] * a->q.shape[2]);
    plan->tasks = gk_ceil_div(j->heads, j->task_heads);
    return true;
}

static void rope_kv_write_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                              void *workspace) {
    (void)workspace;
    job j = *GK_OWN_CONST(job, plan);
    j.a = args;
    gk_parallel(ctx, plan->tasks, heads_task, &j);
}

const gk_cpu_kernel SYM(gk_rope_kv_write) = {rope_kv_write_plan, rope_kv_write_run};
