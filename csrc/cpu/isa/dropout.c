/* SPDX-License-Identifier: BSD-3-Clause */
/* dropout: out = keep / (1 - p) act(x + bias) + residual, and its gradient, compiled once per
 * ISA (gpukern_train.h has the equations and the rule for keep). Rows [M, N] of float32,
 * bfloat16 or float16. A task is a range of rows, or a range of columns if rows are long. No
 * workspace. Not served: float64 (ref/). */
#include "gpukern_train.h"
#include "activation.h"
#include "philox_vec.h"
#include "rows.h"

typedef struct dropout_job {
    const gk_dropout_args *a;
    const row_cuts *cuts;
    uint64_t seed, offset;
    /* A word below this is kept. The top bit of both is flipped, so that a signed comparison
     * gives the unsigned order. */
    vi below;
    bool all; /* p = 0 */
    float scale;
} dropout_job;

/* Columns [from, to) of a row. The random words come in blocks that begin at a multiple of four
 * elements of x, so the first `skip` words of a block may belong to columns before `begin`. */
INLINE void dropout_columns(const dropout_job *job, int64_t row, int64_t from, int64_t to,
                            gk_dtype dtype, gk_activation activation, bool backward) {
    const gk_dropout_args *a = job->a;
    const char *x = row_at(&a->x, row);
    const gk_tensor *other = backward ? a->grad_out : a->residual; /* backward is a constant */
    const char *other_row = other ? row_at(other, row) : NULL;
    char *out = row_at(&a->out, row);
    uint32_t word[PHILOX_BLOCK + W];
    for (int64_t begin = from; begin < to;) {
        const int64_t at = row * job->cuts->n + begin, skip = at % 4;
        const int64_t end = gk_min_i64(to, begin + PHILOX_BLOCK - skip);
        philox_block(job->seed, job->offset, (uint64_t)at / 4, word);
        for (int64_t i = begin; i < end; i += W) {
            const int64_t n = end - i;
            vf y = vf_load_dtype(x, dtype, i, n);
            if (a->bias) y += vf_load_dtype(a->bias->data, dtype, i, n);
            const vf z = other_row ? vf_load_dtype(other_row, dtype, i, n) : vf_set1(0);
            y = backward ? z * activation_slope(y, activation) : activate(y, activation);
            const vi w = vi_load((const int32_t *)word + skip + (i - begin)) ^ vi_set1(INT32_MIN);
            y = job->all ? y : vf_select(vi_lt(w, job->below), y * job->scale, vf_set1(0));
            vf_store_dtype(out, dtype, i, backward ? y : y + z, n);
        }
        begin = end;
    }
}

/* Calls RUN(dtype, activation, backward) with constants, so that each combination is compiled
 * separately. */
#define FORMS(dtype, wide)                                               \
    if (job->a->activation == GK_ACT_NONE && !job->a->grad_out) {        \
        RUN(dtype, GK_ACT_NONE, false)                                   \
    } else if (job->a->activation == GK_ACT_NONE) {                      \
        RUN(dtype, GK_ACT_NONE, true)                                    \
    } else if (job->a->activation == GK_ACT_GELU && !job->a->grad_out) { \
        RUN(dtype, GK_ACT_GELU, false)                                   \
    } else if (job->a->activation == GK_ACT_GELU) {                      \
        RUN(dtype, GK_ACT_GELU, true)                                    \
    } else if (!job->a->grad_out) {                                      \
        RUN(dtype, GK_ACT_GELU_TANH, false)                              \
    } else {                                                             \
        RUN(dtype, GK_ACT_GELU_TANH, true)                               \
    }

static void dropout_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const dropout_job *job = arg;
    const row_span s = span_of(job->cuts, task);
#define RUN(dtype, activation, backward)          \
    for (int64_t row = s.row; row < s.end; ++row) \
        dropout_columns(job, row, s.from, s.to, dtype, activation, backward);
    ROW_DTYPES(job->a->x.dtype, false, FORMS)
#undef RUN
}

static bool plan(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx;
    plan_row_cuts(&((const gk_dropout_args *)args)->x, plan);
    return true;
}

static void run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    (void)workspace;
    const gk_dropout_args *a = args;
    const uint64_t keep = gk_keep_below(a->p);
    dropout_job job = {
        .a = a, .cuts = GK_OWN_CONST(row_cuts, plan), .scale = (float)gk_keep_scale(a->p)};
    job.seed = gk_seed_word(&a->seed, 0);
    job.offset = gk_seed_word(&a->seed, 1);
    job.all = keep > UINT32_MAX;
    job.below = vi_set1((int32_t)((uint32_t)keep ^ 0x80000000u));
    gk_parallel(ctx, plan->tasks, dropout_task, &job);
}

const gk_cpu_kernel SYM(gk_dropout) = {plan, run};
