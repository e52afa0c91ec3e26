/* SPDX-License-Identifier: BSD-3-Clause */
/* elementwise: kv_cache_write and attn_merge, compiled once per ISA. Both are bound by memory.
 *
 * kv_cache_write: k [T, Hkv, D] and v [T, Hkv, Dv] go to row s % block_size of page s /
 * block_size of the caches, s = slots[t]. 8-bit caches hold codes of k / k_scale and v /
 * v_scale. A task is one head of k or of v. It takes the tokens in order, so that the last of
 * two tokens with one slot stays. Caches of GK_U8 are the two parts of latents in 8 bits
 * (core/latent.h).
 *
 * attn_merge: lse = logaddexp(lse_a, lse_b), out = out_a exp(lse_a - lse) + out_b exp(lse_b -
 * lse). A task is a range of rows. A side that saw no key (lse -inf) is not read, and the other
 * side is copied.
 *
 * Not served: float64 (ref/). */
#include "../../formats/latent_row.h"
#include "../kernels.h"
#include "codes_vec.h"

enum {
    MERGE_ROWS = 64
}; /* about 100 KB of traffic at Dv 128: far more than handing out a task costs */

/* ---- kv_cache_write -------------------------------------------------------------------------- */
typedef struct write_job {
    const gk_tensor *from, *cache, *slots; /* those of k or of v */
    const gk_tensor *scale;
} write_job;

/* Writes the codes of from[d] / scale. */
static void write_codes(const char *from, int64_t from_stride, gk_dtype dtype, char *to,
                        int64_t to_stride, gk_dtype code, int64_t n, float scale) {
    if (from_stride == 1 && to_stride == 1) {
        for (int64_t d = 0; d < n; d += W)
            vf_store_code(to, code, d, vf_load_dtype(from, dtype, d, n - d) / scale, n - d);
        return;
    }
    for (int64_t d = 0; d < n; ++d)
        gk_store(to, code, d * to_stride, (float)gk_load(from, dtype, d * from_stride) / scale);
}

/* to[d] = saturate(from[d] / scale); strides in elements. */
static void write_row(const char *from, int64_t from_stride, char *to, int64_t to_stride,
                      gk_dtype dtype, int64_t n, const float *scale) {
    const float limit = (float)gk_type_of(dtype)->largest;
    if (from_stride == 1 && to_stride == 1) {
        if (!scale) {
            /* without elements `to` is NULL */
            if (n > 0) memcpy(to, from, (size_t)gk_bytes_of(dtype, n));
            return;
        }
        for (int64_t d = 0; d < n; d += W) {
            vf x = vf_load_dtype(from, dtype, d, n - d) / *scale;
            x = vf_max(vf_set1(-limit), vf_min(vf_set1(limit), x)); /* NaN stays NaN */
            vf_store_dtype(to, dtype, d, x, n - d);
        }
        return;
    }
    for (int64_t d = 0; d < n; ++d) {
        float x = (float)gk_load(from, dtype, d * from_stride);
        if (scale) {
            x /= *scale;
            x = x > limit ? limit : x < -limit ? -limit : x;
        }
        gk_store(to, dtype, d * to_stride, x);
    }
}

/* Writes a part of a row of latents: n is 512 for the codes and scales, 64 for the rotary part. */
static void write_latent(const char *from, int64_t from_stride, gk_dtype dtype, char *to,
                         int64_t n) {
    if (n == GK_LATENT_ROPE) {
        for (int64_t d = 0; d < n; ++d)
            gk_store(to, GK_BF16, d, gk_load(from, dtype, d * from_stride));
        return;
    }
    for (int64_t begin = 0; begin < GK_LATENT_DIM; begin += GK_LATENT_BLOCK) {
        float x[GK_LATENT_BLOCK];
        for (int64_t d = 0; d < GK_LATENT_BLOCK; d += W) {
            if (from_stride == 1)
                vf_store(x + d, vf_load_dtype(from, dtype, begin + d, W));
            else
                for (int64_t i = d; i < d + W; ++i)
                    x[i] = (float)gk_load(from, dtype, (begin + i) * from_stride);
        }
        const float scale = gk_latent_scale(x);
        for (int64_t d = 0; d < GK_LATENT_BLOCK; d += W)
            vf_store_code(to + begin, GK_E4M3, d, vf_load(x + d) / scale, W);
        memcpy(to + GK_LATENT_SCALES_AT + begin / GK_LATENT_BLOCK * 4, &scale, 4);
    }
}

static void write_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const write_job *job = (const write_job *)arg + task % 2;
    const gk_tensor *x = job->from, *cache = job->cache;
    const int64_t h = task / 2, block_size = cache->shape[1],
                  bytes = (int64_t)gk_dtype_bytes(x->dtype);
    const int64_t cache_bytes = (int64_t)gk_dtype_bytes(cache->dtype);
    const float *scale = job->scale ? job->scale->data : NULL;
    if (scale && job->scale->ndim) scale += h * job->scale->stride[job->scale->ndim - 1];
    const int64_t page_scale = scale && job->scale->ndim == 2 ? job->scale->stride[0] : 0;
    for (int64_t t = 0; t < job->slots->shape[0]; ++t) {
        const int64_t i = t * job->slots->stride[0];
        const int64_t slot = job->slots->dtype == GK_I64 ? ((const int64_t *)job->slots->data)[i]
                                                         : ((const int32_t *)job->slots->data)[i];
        if (slot < 0) continue;
        const int64_t from = t * x->stride[0] + h * x->stride[1];
        const int64_t to = slot / block_size * cache->stride[0] +
                           slot % block_size * cache->stride[1] + h * cache->stride[2];
        const char *row = gk_at(x->data, bytes * from);
        char *at = gk_at(cache->data, cache_bytes * to);
        if (cache->dtype == GK_U8)
            write_latent(row, x->stride[2], x->dtype, at, x->shape[2]);
        else if (gk_is_code(cache->dtype))
            write_codes(row, x->stride[2], x->dtype, at, cache->stride[3], cache->dtype,
                        x->shape[2], scale ? scale[slot / block_size * page_scale] : 1);
        else
            write_row(row, x->stride[2], at, cache->stride[3], x->dtype, x->shape[2], scale);
    }
}

static bool write_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    plan->tasks = 2 * ((const gk_kv_cache_write_args *)args)->k.shape[1];
    return true;
}

static void write_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                      void *workspace) {
    (void)workspace;
    const gk_kv_cache_write_args *a = args;
    write_job jobs[2] = {{&a->k, &a->k_cache, &a->slots, a->k_scale},
                         {&a->v, &a->v_cache, &a->slots, a->v_scale}};
    gk_parallel(ctx, plan->tasks, write_task, jobs);
}

const gk_cpu_kernel SYM(gk_kv_cache_write) = {write_plan, write_run};

/* ---- attn_merge ------------------------------------------------------------------------------ */
static void copy_row(const gk_tensor *x, int64_t from, const gk_tensor *out, int64_t to,
                     int64_t n) {
    const int64_t stride = x->stride[x->ndim - 1], bytes = (int64_t)gk_dtype_bytes(x->dtype);
    for (int64_t d = 0; d < n; ++d)
        memcpy((char *)out->data + bytes * (to + d),
               (const char *)x->data + bytes * (from + d * stride), (size_t)bytes);
}

/* n values of a row whose elements are `stride` apart. */
INLINE vf load_strided(const gk_tensor *t, int64_t at, int64_t stride, int64_t n) {
    if (stride == 1) return vf_load_dtype(t->data, t->dtype, at, n);
    float x[W] = {0};
    for (int64_t i = 0; i < gk_min_i64(W, n); ++i)
        x[i] = (float)gk_load(t->data, t->dtype, at + i * stride);
    return vf_load(x);
}

static void merge_row(const gk_attn_merge_args *x, int64_t row) {
    const int ndim = x->lse.ndim;
    const int64_t n = x->out.shape[ndim];
    const float lse_a = ((const float *)x->lse_a.data)[gk_offset_of(&x->lse_a, ndim, row)];
    const float lse_b = ((const float *)x->lse_b.data)[gk_offset_of(&x->lse_b, ndim, row)];
    const int64_t a_at = gk_offset_of(&x->out_a, ndim, row),
                  b_at = gk_offset_of(&x->out_b, ndim, row);
    char *out = gk_at(x->out.data, gk_bytes_of(x->out.dtype, row * n)); /* NULL if n is 0 */
    float *lse = (float *)x->lse.data + row;
    if (lse_a == -INFINITY && lse_b == -INFINITY) {
        if (n > 0) memset(out, 0, (size_t)gk_bytes_of(x->out.dtype, n));
        *lse = -INFINITY;
    } else if (lse_b == -INFINITY) {
        copy_row(&x->out_a, a_at, &x->out, row * n, n);
        *lse = lse_a;
    } else if (lse_a == -INFINITY) {
        copy_row(&x->out_b, b_at, &x->out, row * n, n);
        *lse = lse_b;
    } else {
        const float peak = lse_a > lse_b ? lse_a : lse_b;
        const float e_a = expf(lse_a - peak), e_b = expf(lse_b - peak);
        const float weight_a = e_a / (e_a + e_b), weight_b = e_b / (e_a + e_b);
        const int64_t a_stride = x->out_a.stride[ndim], b_stride = x->out_b.stride[ndim];
        *lse = peak + logf(e_a + e_b);
        for (int64_t d = 0; d < n; d += W) {
            vf a = load_strided(&x->out_a, a_at + d * a_stride, a_stride, n - d);
            vf b = load_strided(&x->out_b, b_at + d * b_stride, b_stride, n - d);
            vf_store_dtype(out, x->out.dtype, d, vf_fma(a, vf_set1(weight_a), b * weight_b), n - d);
        }
    }
}

static void merge_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const gk_attn_merge_args *x = arg;
    const int64_t end = gk_min_i64((task + 1) * MERGE_ROWS, gk_numel(&x->lse));
    for (int64_t row = task * MERGE_ROWS; row < end; ++row) merge_row(x, row);
}

static bool merge_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    plan->tasks = gk_ceil_div(gk_numel(&((const gk_attn_merge_args *)args)->lse), MERGE_ROWS);
    return true;
}

static void merge_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                      void *workspace) {
    (void)workspace;
    gk_attn_merge_args x = *(const gk_attn_merge_args *)args;
    gk_parallel(ctx, plan->tasks, merge_task, &x);
}

const gk_cpu_kernel SYM(gk_attn_merge) = {merge_plan, merge_run};
