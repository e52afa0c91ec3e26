/* SPDX-License-Identifier: BSD-3-Clause */
/* rope: rotary embedding (Su et al. 2021, arXiv:2104.09864) of q [B, Hq, S, D] and k [B, Hkv, S,
 * D], compiled once per ISA.
 *
 *  (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
 *
 * x1 and x2 are neighbours (interleaved) or half of the rotated columns apart. cos and sin [P, R
 * / 2] are float32; q and k are float32, bfloat16 or float16, computed in float32 and rounded
 * once. A task is a range of tokens with all their heads, which share a row of cos and sin. No
 * workspace. Not served: float64 (ref/). */
#include "rows.h"

typedef struct job {
    const gk_rope_args *a;
    gk_tensor q, k, out_q, out_k; /* [B, H, S, D] */
    int64_t seq, tokens, each, half;
} job;
GK_PLAN_HOLDS(job);

static int64_t position_of(const gk_rope_args *a, int64_t b, int64_t s) {
    const gk_tensor *p = a->positions;
    if (!p) return s;
    const int64_t at = p->ndim == 2 ? b * p->stride[0] + s * p->stride[1] : s * p->stride[0];
    return p->dtype == GK_I64 ? ((const int64_t *)p->data)[at] : ((const int32_t *)p->data)[at];
}

/* Loads 2 W values separated by even and odd index; the store below reverses it. Lanes beyond n
 * / 2 are 0. */
INLINE void load_pairs(const char *p, gk_dtype dtype, int64_t i, int64_t n, vf *even, vf *odd) {
    float t[2 * W], x[2][W];
    vf_store(t, vf_load_dtype(p, dtype, i, n));
    vf_store(t + W, n > W ? vf_load_dtype(p, dtype, i + W, n - W) : vf_set1(0));
    for (int l = 0; l < W; ++l) {
        x[0][l] = t[2 * l];
        x[1][l] = t[2 * l + 1];
    }
    *even = vf_load(x[0]);
    *odd = vf_load(x[1]);
}
INLINE void store_pairs(char *p, gk_dtype dtype, int64_t i, int64_t n, vf even, vf odd) {
    float t[2 * W], x[2][W];
    vf_store(x[0], even);
    vf_store(x[1], odd);
    for (int l = 0; l < W; ++l) {
        t[2 * l] = x[0][l];
        t[2 * l + 1] = x[1][l];
    }
    vf_store_dtype(p, dtype, i, vf_load(t), n);
    if (n > W) vf_store_dtype(p, dtype, i + W, vf_load(t + W), n - W);
}

INLINE void rotate_row(const char *x, char *y, const float *cos, const float *sin, float sign,
                       int64_t half, int64_t d, bool interleaved, gk_dtype dtype) {
    for (int64_t i = 0; i < half; i += W) {
        const vf c = vf_load_first(cos + i, half - i), s = vf_load_first(sin + i, half - i) * sign;
        vf x1, x2;
        if (interleaved) {
            load_pairs(x, dtype, 2 * i, 2 * (half - i), &x1, &x2);
            store_pairs(y, dtype, 2 * i, 2 * (half - i), x1 * c - x2 * s, x2 * c + x1 * s);
        } else {
            x1 = vf_load_dtype(x, dtype, i, half - i);
            x2 = vf_load_dtype(x, dtype, half + i, half - i);
            vf_store_dtype(y, dtype, i, x1 * c - x2 * s, half - i);
            vf_store_dtype(y, dtype, half + i, x2 * c + x1 * s, half - i);
        }
    }
    const int64_t bytes = gk_type_of(dtype)->bits / 8;
    if (x != y && 2 * half < d)
        memcpy(y + 2 * half * bytes, x + 2 * half * bytes, (size_t)((d - 2 * half) * bytes));
}

INLINE void rotate_heads(const gk_tensor *x, const gk_tensor *y, int64_t b, int64_t s,
                         const float *cos, const float *sin, float sign, int64_t half,
                         bool interleaved, gk_dtype dtype) {
    const int64_t bytes = gk_type_of(dtype)->bits / 8;
    for (int64_t h = 0; h < x->shape[1]; ++h)
        rotate_row((const char *)x->data +
                       bytes * (b * x->stride[0] + h * x->stride[1] + s * x->stride[2]),
                   (char *)y->data +
                       bytes * (b * y->stride[0] + h * y->stride[1] + s * y->stride[2]),
                   cos, sin, sign, half, x->shape[3], interleaved, dtype);
}

INLINE void rotate_tokens(const job *j, int64_t task, gk_dtype dtype, bool interleaved) {
    const gk_rope_args *a = j->a;
    const float sign = a->inverse ? -1 : 1;
    const int64_t end = gk_min_i64((task + 1) * j->each, j->tokens);
    for (int64_t t = task * j->each; t < end; ++t) {
        const int64_t b = t / j->seq, s = t % j->seq, at = position_of(a, b, s);
        const float *cos = NULL, *sin = NULL; /* without columns they may have no data */
        if (j->half > 0) {
            cos = (const float *)a->cos.data + at * a->cos.stride[0];
            sin = (const float *)a->sin.data + at * a->sin.stride[0];
        }
        rotate_heads(&j->q, &j->out_q, b, s, cos, sin, sign, j->half, interleaved, dtype);
        if (a->k) rotate_heads(&j->k, &j->out_k, b, s, cos, sin, sign, j->half, interleaved, dtype);
    }
}

static void rope_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *j = arg;
#define TOKENS(dtype, interleaved) rotate_tokens(j, task, dtype, interleaved)
    if (j->a->q.dtype == GK_F32 && !j->a->interleaved)
        TOKENS(GK_F32, false);
    else
        ROW_DTYPES(j->a->q.dtype, j->a->interleaved != 0, TOKENS)
#undef TOKENS
}

static bool rope_plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_rope_args *a = args;
    job *j = GK_OWN(job, plan);
    *j = (job){.q = gk_heads_of(&a->q), .half = a->cos.shape[1]};
    if (a->k) j->k = gk_heads_of(a->k);
    j->seq = j->q.shape[2];
    j->tokens = j->q.shape[3] > 0 ? j->q.shape[0] * j->seq : 0;
    j->each = rows_per_task((j->q.shape[1] + j->k.shape[1]) * j->q.shape[3]);
    plan->tasks = gk_ceil_div(j->tokens, j->each);
    return true;
}

static void rope_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                     void *workspace) {
    (void)workspace;
    job j = *GK_OWN_CONST(job, plan);
    j.a = args;
    j.out_q = gk_heads_of(&j.a->out_q);
    if (j.a->k) j.out_k = gk_heads_of(j.a->out_k);
    gk_parallel(ctx, plan->tasks, rope_task, &j);
}

const gk_cpu_kernel SYM(gk_rope) = {rope_plan, rope_run};
