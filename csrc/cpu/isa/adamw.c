/* SPDX-License-Identifier: BSD-3-Clause */
/* adamw: one step of AdamW over a list of tensors, compiled once per ISA (equations in
 * gpukern_train.h). Parameters and gradients are float32, bfloat16 or float16; m and v have that
 * dtype or float32. A task is a range of elements of one tensor. No workspace. The time goes
 * into memory traffic: 28 bytes per float32 element. Not served: float64 (ref/). */
#include "gpukern_train.h"
#include "philox_vec.h"
#include "rows.h"

typedef struct adamw_job {
    const gk_adamw_args *a;
    float lr, times; /* times: the factor of gradients */
} adamw_job;

static float scalar(const gk_tensor *t, float none) { return t ? *(const float *)t->data : none; }

INLINE vf vf_root(vf x) {
    for (int i = 0; i < W; ++i) x[i] = sqrtf(x[i]);
    return x;
}

/* The larger of two values; NaN if either is NaN. */
INLINE vf vf_larger(vf a, vf b) {
    const vi take_a = (vi)(a > b) | (vi)(a != a);
    return (vf)(((vi)a & take_a) | ((vi)b & ~take_a));
}

/* Stores elements [i, i + n), n <= W, as bfloat16, rounded stochastically by their Philox words. */
INLINE void store_stochastic(const gk_adamw_args *a, int64_t t, int64_t i, vf x, int64_t n) {
    uint16_t *to = a->params[t].data;
    uint32_t word[4] = {0};
    for (int j = 0; j < gk_min_i64(n, W); ++j) {
        if (j == 0 || (i + j) % 4 == 0)
            gk_philox(gk_seed_word(a->seed, 0), gk_seed_word(a->seed, 1),
                      gk_adamw_counter(t, (i + j) / 4), word);
        to[i + j] = gk_f32_to_bf16_stochastic(x[j], word[(i + j) % 4]);
    }
}

INLINE void adamw_run(const adamw_job *job, int64_t t, int64_t from, int64_t to, gk_dtype dtype,
                      gk_dtype state) {
    const gk_adamw_args *a = job->a;
    void *w = a->params[t].data, *m = a->exp_avgs[t].data, *v = a->exp_avg_sqs[t].data;
    void *most = a->max_exp_avg_sqs ? a->max_exp_avg_sqs[t].data : NULL,
         *master = a->masters ? a->masters[t].data : NULL;
    const double step = (double)scalar(&a->steps[t], 1);
    /* 1 - beta^step without cancellation */
    const vf rate = vf_set1((float)(job->lr / -expm1(step * log(a->beta1))));
    const vf root = vf_set1((float)(1 / sqrt(-expm1(step * log(a->beta2)))));
    const float beta1 = (float)a->beta1, beta2 = (float)a->beta2, other1 = (float)(1 - a->beta1);
    const float other2 = (float)(1 - a->beta2), decay = (float)(1 - job->lr * a->weight_decay),
                eps = (float)a->eps;
    for (int64_t i = from; i < to; i += W) {
        const int64_t n = to - i;
        const vf g = job->times * vf_load_dtype(a->grads[t].data, dtype, i, n);
        vf x =
            decay * (master ? vf_load_dtype(master, GK_F32, i, n) : vf_load_dtype(w, dtype, i, n));
        const vf first = beta1 * vf_load_dtype(m, state, i, n) + other1 * g;
        vf second = beta2 * vf_load_dtype(v, state, i, n) + other2 * (g * g);
        vf_store_dtype(m, state, i, first, n);
        vf_store_dtype(v, state, i, second, n);
        if (most) {
            second = vf_larger(vf_load_dtype(most, state, i, n), second);
            vf_store_dtype(most, state, i, second, n);
        }
        x -= rate * first / (vf_root(second) * root + eps);
        if (master) vf_store_dtype(master, GK_F32, i, x, n);
        if (a->seed)
            store_stochastic(a, t, i, x, n);
        else
            vf_store_dtype(w, dtype, i, x, n);
    }
}

static int64_t tasks_of(const gk_tensor *t) { return gk_ceil_div(gk_numel(t), ROW_TASK); }

static void adamw_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const adamw_job *job = arg;
    const gk_adamw_args *a = job->a;
    int64_t t = 0;
    while (task >= tasks_of(&a->params[t])) task -= tasks_of(&a->params[t++]);
    const int64_t from = task * ROW_TASK, to = gk_min_i64(from + ROW_TASK, gk_numel(&a->params[t]));
#define RUN(dtype, wide) adamw_run(job, t, from, to, dtype, wide ? GK_F32 : dtype)
    ROW_DTYPES(a->params[0].dtype, a->exp_avgs[0].dtype == GK_F32, RUN)
#undef RUN
}

static bool plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    const gk_adamw_args *a = args;
    for (int64_t t = 0; t < a->num; ++t) plan->tasks += tasks_of(&a->params[t]);
    return true;
}

static void run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    (void)workspace;
    const gk_adamw_args *a = args;
    if (scalar(a->found_inf, 0) != 0) return;
    adamw_job job = {a, scalar(a->lr_tensor, (float)a->lr),
                     scalar(a->clip, 1) / scalar(a->grad_scale, 1)};
    if (a->maximize) job.times = -job.times;
    gk_parallel(ctx, plan->tasks, adamw_task, &job);
}

const gk_cpu_kernel SYM(gk_adamw) = {plan, run};
