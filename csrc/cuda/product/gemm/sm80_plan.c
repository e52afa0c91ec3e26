/* SPDX-License-Identifier: BSD-3-Clause */
/* sm80_plan.c: the table of gemm_sm80, and its plan. The plan estimates the time of every instance
 * with every number of splits of k, and uses the fastest combination. A batch-invariant call does
 * not split k, so that all tiles add k in the same order.
 *
 * Refuses: float64, float32 without tf32, and tf32 with operands of any alignment or with one row
 * or column. */
#include "sm80_plan.h"
#include "../../../core/invariant.h"
#include "split.h"
#include "tables.h"

#include <stdlib.h>

GK_PLAN_HOLDS(Sm80Plan);

enum { /* key of an instance */
    KEY_BM,
    KEY_BN,
    KEY_BK,
    KEY_PER_SM,
    KEY_PERCENT, /* of the dense peak */
    KEY_SMEM,    /* bytes of a block, in the mode that needs most */
    KEY_ANY      /* ANY in the instances that serve every alignment, else 0 */
};

/* The layout of both operands. It contains ANY if rows of either are not whole 16-byte chunks. */
static int mode_of(const GemmProblem *p, gk_dtype dtype) {
    const bool a_k = p->a_k == 1 && gemm_aligned(p->a, dtype, p->a_m, p->a_batch, p->ndim);
    const bool a_m = p->a_m == 1 && gemm_aligned(p->a, dtype, p->a_k, p->a_batch, p->ndim);
    const bool b_k = p->b_k == 1 && gemm_aligned(p->b, dtype, p->b_n, p->b_batch, p->ndim);
    const bool b_n = p->b_n == 1 && gemm_aligned(p->b, dtype, p->b_k, p->b_batch, p->ndim);
    if ((a_k || a_m) && (b_k || b_n)) return (a_k ? 0 : A_ALONG_M) | (b_k ? 0 : B_ALONG_N);
    return ANY | (llabs(p->a_m) < llabs(p->a_k) && p->m > 1 ? A_ALONG_M : 0) |
           (llabs(p->b_n) < llabs(p->b_k) && p->n > 1 ? B_ALONG_N : 0);
}

typedef struct Splits {
    int splits;
    int64_t split_k;
    double us;
} Splits;

static const double FOREVER_US = 1e30;

/* Finds the number of splits of k with the least estimated time of an instance. The estimate is the
 * time of the busiest SM's blocks, of which PER_SM run at once, and of the kernel that adds the
 * partial sums. If no time is below `below`, us is `below`. */
static Splits splits_of(const gk_cuda_instance *instance, const gk_gpu *gpu, const GemmProblem *p,
                        double below) {
    const int32_t *key = instance->key;
    const int64_t bm = key[KEY_BM], bn = key[KEY_BN], bk = key[KEY_BK], per_sm = key[KEY_PER_SM];
    const int64_t tiles = gk_ceil_div(p->m, bm) * gk_ceil_div(p->n, bn) * p->batch;
    const int64_t steps = gk_max_i64(1, gk_ceil_div(p->k, bk));
    const double peak = (gpu->arch == 90 ? 4096 : 2048) / (instance->dtype == GK_F32 ? 2.0 : 1.0) *
                        gpu->clock_khz * 1e-3;
    const double step_us = 2.0 * (double)(bm * bn * bk) / (peak * key[KEY_PERCENT] * 0.01);
    Splits best = {1, steps * bk, below};
    const int64_t most = gk_batch_invariant() ? 1 : gk_clamp_i64(steps / 4, 1, MAX_SPLITS);
    int64_t each = 0;
    for (int64_t s = 1; s <= most; ++s) {
        const int64_t before = each;
        each = gk_ceil_div(steps, s);
        if (each == before) continue; /* the same splits as before */
        const int64_t parts = gk_ceil_div(steps, each);
        const double reduce = reduce_us(p, parts);
        if (parts > 1 && BLOCK_US + reduce >= best.us) break; /* reduce only grows with s */
        const int64_t busiest = gk_ceil_div(tiles * parts, gpu->num_sms);
        /* With few blocks on an SM, nothing hides their waits. */
        const double alone = busiest < per_sm ? PERCENT_ALONE * 0.01 : 1;
        const double us = (double)(busiest * each) * step_us * alone +
                          BLOCK_US * (double)gk_ceil_div(busiest, per_sm) + reduce;
        if (us < best.us) {
            best.splits = (int)parts;
            best.split_k = each * bk;
            best.us = us;
        }
    }
    return best;
}

/* True if some instance serves the call. */
static bool serves(const gk_gemm_args *args, const GemmProblem *p) {
    if (args->a.dtype == GK_F64) return false;
    if (args->a.dtype != GK_F32) return true;
    if (args->fp32_precision != GK_TF32 || mode_of(p, GK_F32) & ANY) return false;
    /* A matrix times a vector is bound by memory. gemm_plain computes it in full float32 at the
     * same speed. */
    return (p->m > 1 || gk_batch_invariant()) && p->n > 1;
}

static void plan_instance(const gk_cuda_instance *instance, const GemmProblem *problem, int mode,
                          const Splits *best, gk_plan *to) {
    Sm80Plan *const own = GK_OWN(Sm80Plan, to);
    GemmProblem *const p = &own->p;
    *p = *problem;
    own->mode = mode;
    p->tiles_m = (int)gk_ceil_div(p->m, instance->key[KEY_BM]);
    p->tiles_n = (int)gk_ceil_div(p->n, instance->key[KEY_BN]);
    p->group = GROUP_ROWS;
    p->splits = best->splits;
    p->split_k = best->split_k;
    to->kernel = instance;
    to->us = best->us;
    to->tile[0] = instance->key[KEY_BM];
    to->tile[1] = instance->key[KEY_BN];
    to->tile[2] = instance->key[KEY_BK];
    to->tasks = (int64_t)p->tiles_m * p->tiles_n * p->splits * p->batch;
    to->chunks = p->splits;
    to->workspace_bytes = partials_bytes(p, p->splits, sizeof(float));
}

static bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *arguments,
                 gk_plan *to) {
    const gk_gemm_args *args = arguments;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const GemmProblem p = gemm_problem_of(args);
    const int mode = mode_of(&p, instance->dtype);
    if (!serves(args, &p) || instance->key[KEY_ANY] != (mode & ANY) ||
        gpu->smem_per_block < instance->key[KEY_SMEM])
        return false;
    const Splits best = splits_of(instance, gpu, &p, FOREVER_US);
    plan_instance(instance, &p, mode, &best, to);
    return true;
}

/* Plans the call with the fastest instance among those that fit the GPU and serve the mode. */
static bool plan_best(const gk_context *ctx, const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = arguments;
    const GemmProblem p = gemm_problem_of(args);
    if (!serves(args, &p)) return false;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const int mode = mode_of(&p, args->a.dtype);
    const gk_cuda_instance *best = NULL;
    Splits best_splits = {1, 0, FOREVER_US};
    for (int i = 0; i < gk_gemm_sm80_table.num_instances; ++i) {
        const gk_cuda_instance *const instance = &gk_gemm_sm80_table.instances[i];
        if (instance->dtype != args->a.dtype || instance->key[KEY_ANY] != (mode & ANY) ||
            instance->key[KEY_SMEM] > gpu->smem_per_block)
            continue;
        const Splits found = splits_of(instance, gpu, &p, best_splits.us);
        if (!best || found.us < best_splits.us) {
            best = instance;
            best_splits = found;
        }
    }
    if (!best) return false;
    plan_instance(best, &p, mode, &best_splits, to);
    return true;
}

/* ---- the table ------------------------------------------------------------------------------- */
#define DECLARE(id)       \
    GK_DECLARE_LAUNCH(id) \
    GK_DECLARE_BLOCKS(id)
#define SM80_16(type, ...)         \
    DECLARE(gemm_sm80_bf16_##type) \
    DECLARE(gemm_sm80_f16_##type)
#define SM80_TF32(type, ...) DECLARE(gemm_sm80_tf32_##type)
#include "instances.def"

#define ANY_0 "gemm_sm80_"
#define ANY_1 "gemm_sm80_any_"
#define INSTANCE(short, dtype, type, name, bm, bn, bk, stages, wm, wn, per_sm, any, percent, \
                 bytes)                                                                      \
    {ANY_##any #short "_" #name,                                                             \
     dtype,                                                                                  \
     plan,                                                                                   \
     GK_LAUNCH(gemm_sm80_##short##_##type),                                                  \
     {bm, bn, bk, per_sm, percent, bytes, any ? ANY : 0},                                    \
     GK_BLOCKS(gemm_sm80_##short##_##type)},

static const gk_cuda_instance instances[] = {
#define SM80_16(...) INSTANCE(bf16, GK_BF16, __VA_ARGS__)
#include "instances.def"
#define SM80_16(...) INSTANCE(f16, GK_F16, __VA_ARGS__)
#include "instances.def"
#define SM80_TF32(...) INSTANCE(tf32, GK_F32, __VA_ARGS__)
#include "instances.def"
};

const gk_cuda_table gk_gemm_sm80_table = {instances, sizeof instances / sizeof *instances, 80,
                                          plan_best};
