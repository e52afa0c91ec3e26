/* SPDX-License-Identifier: BSD-3-Clause */
/* quantize: turns a matrix, silu(gate) * up, or an RMSNorm into 8-bit codes and scales.
 * dequantize: codes back to floats. Compiled once per ISA.
 *
 *  scale = max(amax / q, 2^-126)   codes = saturate(round-even(x / scale))
 *  for each block of gk_granularity; q is the largest finite value of the codes
 *
 * x [..., M, K] is float32, bfloat16 or float16 with any strides; codes [..., M, K] and scale
 * are contiguous. A task is a range of rows, or one row of 128 x 128 blocks. With one scale for
 * the whole tensor there are two passes: every task stores its amax, then every task writes
 * codes. A row is computed in float32 in the worker's buffer, from which amax and codes are
 * taken. If amax spans several rows, rows are computed twice instead of being stored.
 *
 * amax is a maximum of bit patterns: infinities and NaN have the largest, so they reach the
 * scale. Workspace: an amax for each task; for each worker a row, and an amax for each block of
 * columns. Not served: float64 (ref/). */
#include "../../formats/scales.h"
#include "../kernels.h"
#include "codes_vec.h"
#include "vec_math.h"

enum {
    TASK_ELEMENTS = 32 << 10, /* some 10 us of work, much more than starting a task costs */
    SUM_COLUMNS = 1024 /* squares that are summed in float32 before they are added to the double */
};

typedef struct quantize_plan {
    int64_t batch, m, k, rows, col_block, col_blocks, each, worker_floats;
} quantize_plan;
GK_PLAN_HOLDS(quantize_plan);

typedef struct job {
    const gk_quantize_args *a;
    quantize_plan p;
    uint32_t *task_amax; /* GK_PER_TENSOR */
    float *workers;
    uint32_t amax; /* of the tensor, in the second pass */
    bool second;
} job;

/* ---- 1. a row as float32 --------------------------------------------------------------------- */
/* NULL if the tensor has no elements */
static char *row_of(const gk_tensor *t, int64_t row) {
    return gk_at(t->data, gk_offset_of(t, t->ndim - 1, row) * (int64_t)gk_dtype_bytes(t->dtype));
}

/* Loads a row of any stride as float32; columns up to a whole vector are 0. */
static void load_row(const gk_tensor *t, int64_t row, int64_t n, float *to) {
    const char *from = row_of(t, row);
    const int64_t step = t->stride[t->ndim - 1];
    if (step != 1 && n > 1) {
        for (int64_t i = 0; i < n; ++i) to[i] = (float)gk_load(from, t->dtype, i * step);
        for (int64_t i = n; i % W; ++i) to[i] = 0;
        return;
    }
    switch (t->dtype) { /* constant dtypes give one copy of the loop per dtype */
#define LOOP(dtype)                                                                                \
    case dtype:                                                                                    \
        for (int64_t i = 0; i < n; i += W) vf_store(to + i, vf_load_dtype(from, dtype, i, n - i)); \
        break;
        LOOP(GK_BF16)
        LOOP(GK_F16)
        LOOP(GK_F32)
#undef LOOP
    default: break; /* the check accepts no other dtype */
    }
}

static void normalize(const gk_quantize_args *a, int64_t n, float *v) {
    double squares = 0;
    for (int64_t begin = 0; begin < n; begin += SUM_COLUMNS) {
        vf s = vf_set1(0);
        for (int64_t i = begin; i < gk_min_i64(n, begin + SUM_COLUMNS); i += W)
            s = vf_fma(vf_load(v + i), vf_load(v + i), s);
        for (int i = 0; i < W; ++i) squares += s[i];
    }
    const float rstd = (float)(1 / sqrt(squares / (double)n + a->eps));
    if (!a->weight) {
        for (int64_t i = 0; i < n; i += W) vf_store(v + i, vf_load(v + i) * rstd);
        return;
    }
    const gk_tensor *w = a->weight;
    for (int64_t i = 0; i < n; ++i)
        v[i] = v[i] * rstd * (float)gk_load(w->data, w->dtype, i * w->stride[0]);
}

/* Computes row `row` of the values to quantise; `more` has room for another row. */
static void make_row(const gk_quantize_args *a, int64_t row, int64_t n, float *v, float *more) {
    load_row(&a->x, row, n, v);
    if (a->what == GK_QUANTIZE_SILU_MUL) {
        load_row(a->up, row, n, more);
        for (int64_t i = 0; i < n; i += W) {
            const vf gate = vf_load(v + i);
            vf_store(v + i, gate * vf_sigmoid(gate) * vf_load(more + i));
        }
    } else if (a->what == GK_QUANTIZE_RMS_NORM) {
        if (a->residual) {
            const gk_dtype dtype = a->x.dtype;
            load_row(a->residual, row, n, more);
            for (int64_t i = 0; i < n; i += W) vf_store(v + i, vf_load(v + i) + vf_load(more + i));
            /* rounded to the dtype in which sum is stored */
            for (int64_t i = 0; dtype != GK_F32 && i < n; ++i)
                v[i] = dtype == GK_BF16 ? gk_bf16_to_f32(gk_f32_to_bf16(v[i]))
                                        : gk_f16_to_f32(gk_f32_to_f16(v[i]));
            if (a->sum) {
                char *sum = row_of(a->sum, row);
                for (int64_t i = 0; i < n; ++i) gk_store(sum, dtype, i, v[i]);
            }
        }
        normalize(a, n, v);
    }
}

/* ---- 2. amax and scale ----------------------------------------------------------------------- */
/* The bits of the largest absolute value among v[0 .. n). */
INLINE uint32_t amax_of(const float *v, int64_t n) {
    vi most = vi_set1(0);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        const vi size = vi_load((const int32_t *)(const void *)(v + i)) & 0x7fffffff;
        most = vi_select(size > most, size, most);
    }
    const vi size = (vi)vf_load_first(v + i, n - i) & 0x7fffffff;
    most = vi_select(size > most, size, most);
    int32_t one = 0;
    for (int l = 0; l < W; ++l) one = most[l] > one ? most[l] : one;
    return (uint32_t)one;
}

static float largest_of(gk_dtype dtype) {
    return dtype == GK_E4M3 ? GK_E4M3_MAX : dtype == GK_E5M2 ? GK_E5M2_MAX : 127.0f;
}

static float scale_of(const gk_quantize_args *a, uint32_t bits) {
    float amax;
    memcpy(&amax, &bits, 4);
    if (bits >= 0x7f800000u) return NAN;
    if (a->scale_ub) amax = fminf(amax, *(const float *)a->scale_ub->const_data);
    const float scale = fmaxf(amax / largest_of(a->codes.dtype), 0x1p-126f);
    return a->granularity == GK_PER_1X32 ? gk_e8m0_to_f32(gk_f32_to_e8m0(scale)) : scale;
}

/* The scale of block number `block`: computed from amax and stored, or the given one. */
static float scale_at(const gk_quantize_args *a, int64_t block, uint32_t amax) {
    if (a->given) return (float)gk_load(a->given->data, a->given->dtype, block);
    const float scale = scale_of(a, amax);
    gk_store(a->scale.data, a->scale.dtype, block, scale);
    return scale;
}

INLINE void store_codes_as(uint8_t *to, gk_dtype dtype, const float *v, int64_t n, float scale) {
    const vf s = vf_set1(scale);
    for (int64_t i = 0; i < n; i += W)
        vf_store_code(to, dtype, i, vf_load_first(v + i, n - i) / s, n - i);
}

static void store_codes(uint8_t *to, gk_dtype dtype, const float *v, int64_t n, float scale) {
    switch (dtype) {
    case GK_E4M3: store_codes_as(to, GK_E4M3, v, n, scale); break;
    case GK_E5M2: store_codes_as(to, GK_E5M2, v, n, scale); break;
    case GK_I8: store_codes_as(to, GK_I8, v, n, scale); break;
    default: break; /* the check accepts no other dtype */
    }
}

/* ---- 3. tasks -------------------------------------------------------------------------------- */
static float *row_buffer(const job *jb, int64_t worker) {
    return jb->workers + worker * jb->p.worker_floats;
}

/* One scale or more for each row. */
static void rows_task(const job *jb, int64_t task, float *v) {
    const quantize_plan *p = &jb->p;
    const gk_quantize_args *a = jb->a;
    for (int64_t row = task * p->each; row < gk_min_i64(p->rows, (task + 1) * p->each); ++row) {
        make_row(a, row, p->k, v, v + gk_round_up(p->k, W));
        for (int64_t c = 0; c < p->col_blocks; ++c) {
            const int64_t begin = c * p->col_block, n = gk_min_i64(p->col_block, p->k - begin);
            const float scale =
                scale_at(a, row * p->col_blocks + c, a->given ? 0 : amax_of(v + begin, n));
            store_codes((uint8_t *)a->codes.data + row * p->k + begin, a->codes.dtype, v + begin, n,
                        scale);
        }
    }
}

/* 128 rows of one matrix. */
static void blocks_task(const job *jb, int64_t task, float *v) {
    const quantize_plan *p = &jb->p;
    const gk_quantize_args *a = jb->a;
    const int64_t tall = gk_ceil_div(p->m, GK_SCALE_BLOCK), first = task / tall * p->m;
    const int64_t begin = first + task % tall * GK_SCALE_BLOCK,
                  end = gk_min_i64(begin + GK_SCALE_BLOCK, first + p->m);
    float *more = v + gk_round_up(p->k, W);
    uint32_t *amax = (uint32_t *)(void *)(more + gk_round_up(p->k, W));
    memset(amax, 0, (size_t)p->col_blocks * sizeof *amax);
    for (int64_t row = begin; row < end && !a->given; ++row) {
        make_row(a, row, p->k, v, more);
        for (int64_t c = 0; c < p->col_blocks; ++c) {
            const int64_t at = c * p->col_block;
            const uint32_t most = amax_of(v + at, gk_min_i64(p->col_block, p->k - at));
            if (most > amax[c]) amax[c] = most;
        }
    }
    float *scale = (float *)(void *)amax;
    for (int64_t c = 0; c < p->col_blocks; ++c)
        scale[c] = scale_at(a, task * p->col_blocks + c, amax[c]);
    for (int64_t row = begin; row < end; ++row) {
        make_row(a, row, p->k, v, more);
        for (int64_t c = 0; c < p->col_blocks; ++c) {
            const int64_t at = c * p->col_block;
            store_codes((uint8_t *)a->codes.data + row * p->k + at, a->codes.dtype, v + at,
                        gk_min_i64(p->col_block, p->k - at), scale[c]);
        }
    }
}

/* Rows of a tensor with one scale: amax in the first pass, codes in the second. */
static void tensor_task(const job *jb, int64_t task, float *v) {
    const quantize_plan *p = &jb->p;
    const gk_quantize_args *a = jb->a;
    const float scale = a->given     ? (float)gk_load(a->given->data, a->given->dtype, 0)
                        : jb->second ? scale_of(a, jb->amax)
                                     : 0;
    uint32_t most = 0;
    for (int64_t row = task * p->each; row < gk_min_i64(p->rows, (task + 1) * p->each); ++row) {
        make_row(a, row, p->k, v, v + gk_round_up(p->k, W));
        if (jb->second) {
            store_codes((uint8_t *)a->codes.data + row * p->k, a->codes.dtype, v, p->k, scale);
        } else {
            const uint32_t here = amax_of(v, p->k);
            most = here > most ? here : most;
        }
    }
    if (!jb->second) jb->task_amax[task] = most;
}

static void task(void *arg, int64_t task, int64_t worker) {
    const job *jb = arg;
    float *v = row_buffer(jb, worker);
    switch (jb->a->granularity) {
    case GK_PER_TENSOR: tensor_task(jb, task, v); break;
    case GK_PER_128X128: blocks_task(jb, task, v); break;
    default: rows_task(jb, task, v);
    }
}

static bool plan_quantize(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_quantize_args *a = args;
    quantize_plan *p = GK_OWN(quantize_plan, plan);
    const int nd = a->x.ndim;
    memset(p, 0, sizeof *p);
    p->k = nd ? a->x.shape[nd - 1] : 1;
    p->m = nd > 1 ? a->x.shape[nd - 2] : 1;
    p->batch = 1;
    for (int d = 0; d < nd - 2; ++d) p->batch *= a->x.shape[d];
    p->rows = p->batch * p->m;
    p->col_block = a->granularity == GK_PER_1X128 || a->granularity == GK_PER_128X128
                       ? GK_SCALE_BLOCK
                   : a->granularity == GK_PER_1X32 ? GK_MX_BLOCK
                                                   : gk_max_i64(1, p->k);
    p->col_blocks = a->granularity == GK_PER_ROW || a->granularity == GK_PER_TENSOR
                        ? 1
                        : gk_ceil_div(p->k, p->col_block);
    p->each = gk_max_i64(1, TASK_ELEMENTS / gk_max_i64(1, p->k));
    plan->tasks = a->granularity == GK_PER_128X128 ? p->batch * gk_ceil_div(p->m, GK_SCALE_BLOCK)
                                                   : gk_ceil_div(p->rows, p->each);
    p->worker_floats = gk_round_up(2 * gk_round_up(p->k, W) + p->col_blocks, 16);
    plan->tile[0] = p->each;
    plan->tile[1] = p->col_block;
    plan->workspace_bytes = (size_t)(4 * (gk_round_up(plan->tasks, 16) +
                                          gk_num_workers(ctx, plan->tasks) * p->worker_floats));
    return true;
}

static void run_quantize(const gk_context *ctx, const void *args, const gk_plan *plan,
                         void *workspace) {
    job jb = {.a = args, .p = *GK_OWN_CONST(quantize_plan, plan), .task_amax = workspace};
    jb.workers = (float *)workspace + gk_round_up(plan->tasks, 16);
    if (jb.a->granularity == GK_PER_TENSOR) {
        if (!jb.a->given) {
            gk_parallel(ctx, plan->tasks, task, &jb);
            for (int64_t i = 0; i < plan->tasks; ++i)
                jb.amax = jb.task_amax[i] > jb.amax ? jb.task_amax[i] : jb.amax;
            scale_at(jb.a, 0, jb.amax);
        }
        jb.second = true;
    }
    gk_parallel(ctx, plan->tasks, task, &jb);
}
const gk_cpu_kernel SYM(gk_quantize) = {plan_quantize, run_quantize};

/* ---- 4. dequantize --------------------------------------------------------------------------- */
typedef struct dequantize_job {
    const gk_dequantize_args *a;
    int64_t m, k, rows, each;
} dequantize_job;
GK_PLAN_HOLDS(dequantize_job);

static void dequantize_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const dequantize_job *jb = arg;
    const gk_dequantize_args *a = jb->a;
    const gk_scales s = gk_scales_of(&a->scale, jb->m, jb->k, false);
    const int nd = a->codes.ndim;
    const int64_t step = nd ? a->codes.stride[nd - 1] : 1;
    const int64_t run =
        s.col_log2 == GK_WHOLE_LOG2 ? gk_max_i64(1, jb->k) : INT64_C(1) << s.col_log2;
    for (int64_t row = task * jb->each; row < gk_min_i64(jb->rows, (task + 1) * jb->each); ++row) {
        const char *from = row_of(&a->codes, row);
        char *to = (char *)a->out.data + row * jb->k * (int64_t)gk_dtype_bytes(a->out.dtype);
        int64_t at = (row % gk_max_i64(1, jb->m) >> s.row_log2) * s.row,
                lead = row / gk_max_i64(1, jb->m);
        for (int d = nd - 3; d >= 0 && a->scale.ndim == nd; --d) {
            at += lead % a->codes.shape[d] * a->scale.stride[d];
            lead /= a->codes.shape[d];
        }
        for (int64_t begin = 0; begin < jb->k; begin += run) {
            const float scale = (float)gk_load(s.data, s.dtype, at + (begin >> s.col_log2) * s.col);
            for (int64_t i = begin; i < gk_min_i64(jb->k, begin + run); i += W) {
                const int64_t n = gk_min_i64(W, gk_min_i64(jb->k, begin + run) - i);
                vf v = vf_set1(0);
                if (step == 1) {
                    switch (a->codes.dtype) {
                    case GK_E4M3: v = vf_load_code(from, GK_E4M3, i, n); break;
                    case GK_E5M2: v = vf_load_code(from, GK_E5M2, i, n); break;
                    default: v = vf_load_code(from, GK_I8, i, n);
                    }
                } else {
                    for (int64_t l = 0; l < n; ++l)
                        v[l] = (float)gk_load(from, a->codes.dtype, (i + l) * step);
                }
                vf_store_dtype(to, a->out.dtype, i, v * scale, n);
            }
        }
    }
}

static bool plan_dequantize(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_dequantize_args *a = args;
    dequantize_job *p = GK_OWN(dequantize_job, plan);
    const int nd = a->codes.ndim;
    if (a->out.dtype == GK_F64) return false;
    p->k = nd ? a->codes.shape[nd - 1] : 1;
    p->m = nd > 1 ? a->codes.shape[nd - 2] : 1;
    p->rows = p->m;
    for (int d = 0; d < nd - 2; ++d) p->rows *= a->codes.shape[d];
    p->each = gk_max_i64(1, TASK_ELEMENTS / gk_max_i64(1, p->k));
    plan->tasks = gk_ceil_div(p->rows, p->each);
    return true;
}

static void run_dequantize(const gk_context *ctx, const void *args, const gk_plan *plan,
                           void *workspace) {
    (void)workspace;
    dequantize_job jb = *GK_OWN_CONST(dequantize_job, plan);
    jb.a = args;
    gk_parallel(ctx, plan->tasks, dequantize_task, &jb);
}
const gk_cpu_kernel SYM(gk_dequantize) = {plan_dequantize, run_dequantize};
