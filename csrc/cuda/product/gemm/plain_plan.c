/* SPDX-License-Identifier: BSD-3-Clause */
/* plain_plan.c: the table of gemm_plain (float32 and float64 without tensor cores), and its plan.
 * The plan chooses the tile of the least estimated time, and the number of splits of k. A
 * batch-invariant float32 call uses the small tile, whose sums are the most accurate, and does not
 * split k. It refuses dtypes other than float32 and float64. */
#include "plain_plan.h"
#include "../../../core/invariant.h"
#include "split.h"
#include "tables.h"

GK_PLAN_HOLDS(PlainPlan);

enum { /* key of an instance */
    KEY_BM,
    KEY_BN,
    KEY_BK,
    KEY_PER_SM,
    KEY_PERCENT /* of the peak of multiply-adds */
};

static int64_t magnitude(int64_t stride) { return stride < 0 ? -stride : stride; }

/* The problem, and how its operands are loaded: lanes run along the dimension with the smaller
 * stride. A broadcast dimension has stride 0, which counts as dense. */
static PlainPlan call_of(const gk_gemm_args *args) {
    const gk_dtype dtype = args->a.dtype;
    PlainPlan x = {0};
    GemmProblem *const p = &x.p;
    *p = gemm_problem_of(args);
    if (p->m == 1 && p->n > 1) *p = gemm_swapped(p); /* treat a row as a column */
    x.a_along_k = magnitude(p->a_k) < magnitude(p->a_m) || p->m == 1;
    x.b_along_k = magnitude(p->b_k) < magnitude(p->b_n) || p->n == 1;
    x.a_vectors = p->a_m == 1 && gemm_aligned(p->a, dtype, p->a_k, p->a_batch, p->ndim);
    x.b_vectors = p->b_n == 1 && gemm_aligned(p->b, dtype, p->b_k, p->b_batch, p->ndim);
    return x;
}

static int64_t tiles_of(const gk_cuda_instance *instance, const GemmProblem *p) {
    return gk_max_i64(1, gk_ceil_div(p->m, instance->key[KEY_BM]) *
                             gk_ceil_div(p->n, instance->key[KEY_BN]) * p->batch);
}

/* The number of splits of k that fills the SMs once. */
static int64_t splits_of(const gk_cuda_instance *instance, const GemmProblem *p, int64_t sms) {
    if (gk_batch_invariant()) return 1;
    const int64_t most =
        gk_clamp_i64(p->k / (PLAIN_SPLIT_STEPS * instance->key[KEY_BK]), 1, MAX_SPLITS);
    return gk_clamp_i64(sms * instance->key[KEY_PER_SM] / tiles_of(instance, p), 1, most);
}

static void plan_tiles(const gk_cuda_instance *instance, const gk_context *ctx,
                       const PlainPlan *call, gk_plan *to) {
    PlainPlan *const own = GK_OWN(PlainPlan, to);
    *own = *call;
    GemmProblem *const p = &own->p;
    p->tiles_m = (int)gk_ceil_div(p->m, instance->key[KEY_BM]);
    p->tiles_n = (int)gk_ceil_div(p->n, instance->key[KEY_BN]);
    p->group = GROUP_ROWS;
    p->splits = (int)splits_of(instance, p, gk_gpu_of(ctx->index)->num_sms);
    p->split_k = gk_round_up(gk_ceil_div(gk_max_i64(p->k, 1), p->splits), instance->key[KEY_BK]);
    p->splits = (int)gk_max_i64(1, gk_ceil_div(p->k, p->split_k));
    to->kernel = instance;
    to->tile[0] = instance->key[KEY_BM];
    to->tile[1] = instance->key[KEY_BN];
    to->tile[2] = instance->key[KEY_BK];
    to->tasks = (int64_t)p->tiles_m * p->tiles_n * p->splits * p->batch;
    to->chunks = p->splits;
    to->workspace_bytes = partials_bytes(p, p->splits, (size_t)gk_bits_of(instance->dtype) / 8);
}

/* Expected time in us: the tiles of the busiest SM, which runs PER_SM at once, and the kernel that
 * adds the partial sums of split-K. */
static double us_of(const gk_cuda_instance *instance, const GemmProblem *p, const gk_gpu *gpu,
                    int percent) {
    const int64_t per_sm = instance->key[KEY_PER_SM], splits = splits_of(instance, p, gpu->num_sms);
    const int64_t busiest = gk_ceil_div(tiles_of(instance, p) * splits, gpu->num_sms),
                  last = busiest % per_sm;
    /* An incomplete last round takes at least this long, because nothing hides the waits of a few
     * tiles. */
    const double least = PLAIN_ALONE_PERCENT * 0.01 * (double)per_sm;
    const double tiles = (double)(busiest - last) + (last == 0              ? 0
                                                     : (double)last > least ? (double)last
                                                                            : least);
    const double flops =
        2.0 * tiles * instance->key[KEY_BM] * instance->key[KEY_BN] * (double)p->k / (double)splits;
    return flops / (256 * gpu->clock_khz * 1e-3 * percent * 0.01) +
           PLAIN_ROUND_US * (double)gk_ceil_div(busiest, per_sm) + reduce_us(p, splits);
}

static bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *to) {
    const PlainPlan call = call_of(args);
    plan_tiles(instance, ctx, &call, to);
    return true;
}

/* ---- the table ------------------------------------------------------------------------------- */
#define PLAIN(type, ...)                 \
    GK_DECLARE_LAUNCH(gemm_plain_##type) \
    GK_DECLARE_BLOCKS(gemm_plain_##type)
#include "instances.def"

static const gk_cuda_instance instances[] = {
#define PLAIN(type, name, dtype, T, bm, bn, bk, stages, warps_m, warps_n, per_sm, two_sums, \
              percent)                                                                      \
    {"gemm_plain_" #name,                                                                   \
     dtype,                                                                                 \
     plan,                                                                                  \
     GK_LAUNCH(gemm_plain_##type),                                                          \
     {bm, bn, bk, per_sm, percent},                                                         \
     GK_BLOCKS(gemm_plain_##type)},
#include "instances.def"
};

enum { /* places in `instances` */
#define PLAIN(type, ...) type,
#include "instances.def"
};

/* Plans the call with the tile of the least expected time. */
static bool plan_best(const gk_context *ctx, const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = arguments;
    const gk_dtype dtype = args->a.dtype;
    if (dtype != GK_F32 && dtype != GK_F64) return false;
    const PlainPlan x = call_of(args);
    const GemmProblem *const p = &x.p;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const gk_cuda_instance *const large = &instances[PlainF32];
    const gk_cuda_instance *const middle = &instances[PlainF32Middle];
    const gk_cuda_instance *const small = &instances[PlainF32Small];
    if (dtype == GK_F64) {
        plan_tiles(&instances[PlainF64], ctx, &x, to);
        return true;
    }
    /* With few tiles, use the small tile. It sums k in two levels, which keeps the error small: a
     * single chain of sums has more than twice the error of a split of k. This also spares small
     * calls the host time of the estimates. */
    if (gk_batch_invariant() || tiles_of(middle, p) < gpu->num_sms) {
        plan_tiles(small, ctx, &x, to);
        return true;
    }
    const bool aligned =
        gemm_aligned(p->a, GK_F32, x.a_along_k ? p->a_m : p->a_k, p->a_batch, p->ndim) &&
        gemm_aligned(p->b, GK_F32, x.b_along_k ? p->b_n : p->b_k, p->b_batch, p->ndim);
    const gk_cuda_instance *best = large;
    double us = us_of(large, p, gpu, aligned ? large->key[KEY_PERCENT] : PLAIN_UNALIGNED_PERCENT);
    const gk_cuda_instance *const others[] = {middle, small};
    for (int i = 0; i < 2; ++i) {
        const double other_us = us_of(others[i], p, gpu, others[i]->key[KEY_PERCENT]);
        if (other_us >= us) continue;
        best = others[i];
        us = other_us;
    }
    plan_tiles(best, ctx, &x, to);
    to->us = us;
    return true;
}

const gk_cuda_table gk_gemm_plain_table = {instances, sizeof instances / sizeof *instances, 80,
                                           plan_best};
