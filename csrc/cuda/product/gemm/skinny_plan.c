/* SPDX-License-Identifier: BSD-3-Clause */
/* skinny_plan.c: the table of gemm_skinny (up to 16 rows of a or columns of b), and its plan. The
 * plan chooses the number of weights of a tile, so that every SM gets equally many tiles, and then
 * the smallest instance that holds such a tile.
 *
 * Refuses: dtypes other than bfloat16 and float16, operands that `fits` does not accept, few
 * misaligned weights (SKINNY_MISALIGNED_LEAST), and batch-invariant calls. The kernel serves small
 * M only and its warps split k, so its bits differ from those of the kernels for larger M. */
#include "skinny_plan.h"
#include "../../../core/invariant.h"
#include "prices.h"
#include "tables.h"

GK_PLAN_HOLDS(SkinnyPlan);

enum {             /* key of an instance */
    KEY_TOKENS,    /* most rows of a */
    KEY_ROWS,      /* most weights of a tile */
    KEY_SMEM,      /* bytes of shared memory */
    KEY_MISALIGNED /* 1 if the instance takes misaligned rows */
};

static bool is_aligned(const GemmProblem *p, gk_dtype dtype) {
    if (p->k % 8 != 0 || !gemm_aligned(p->a, dtype, p->a_m, p->a_batch, p->ndim)) return false;
    if (p->b_k == 1) return gemm_aligned(p->b, dtype, p->b_n, p->b_batch, p->ndim);
    return p->n % 8 == 0 && gemm_aligned(p->b, dtype, p->b_k, p->b_batch, p->ndim);
}

/* True if the kernel can compute the problem. If k is shorter than a step of the block, some warps
 * would have no work, and kernels with small tiles are faster. */
static bool fits(const GemmProblem *p, gk_dtype dtype, bool misaligned) {
    if (p->m > SKINNY_MAX_TOKENS || p->m == 0 || p->k < SKINNY_BLOCK_STEP) return false;
    return p->a_k == 1 && (p->b_k == 1 || p->b_n == 1) && is_aligned(p, dtype) != misaligned;
}

/* Finds the problem or its transpose, whichever fits and has fewer tokens. */
static bool find_problem(const gk_gemm_args *args, bool misaligned, GemmProblem *p) {
    const gk_dtype dtype = args->a.dtype;
    *p = gemm_problem_of(args);
    bool good = fits(p, dtype, misaligned);
    if (p->n <= SKINNY_MAX_TOKENS && (!good || p->n < p->m)) {
        const GemmProblem swapped = gemm_swapped(p);
        if (fits(&swapped, dtype, misaligned)) {
            *p = swapped;
            good = true;
        }
    }
    return good;
}

/* Finds the problem, and chooses the number of weights of a tile (p->group) so that every SM gets
 * equally many tiles. Returns false if the kernel cannot compute it. */
static bool plan_problem(const gk_context *ctx, const gk_gemm_args *args, bool misaligned,
                         GemmProblem *p) {
    if (!find_problem(args, misaligned, p)) return false;
    const int64_t sms = gk_gpu_of(ctx->index)->num_sms, rows = gk_max_i64(1, p->n * p->batch);
    if (p->b_k == 1) {
        const int64_t rounds = gk_ceil_div(rows, SKINNY_ROWS * sms);
        p->group = (int)gk_round_up(gk_ceil_div(rows, rounds * sms), 8);
    } else { /* MN-major: a tile must be whole sectors of 32 bytes */
        int64_t least = INT64_MAX;
        for (int r = 16; r <= SKINNY_ROWS; r *= 2)
            if (gk_ceil_div(rows, r * sms) * r <= least) {
                least = gk_ceil_div(rows, r * sms) * r;
                p->group = r;
            }
    }
    p->tiles_m = 1;
    p->tiles_n = (int)gk_ceil_div(p->n, p->group);
    p->splits = 1;
    p->split_k = gk_round_up(p->k, SKINNY_BLOCK_STEP);
    return true;
}

static bool serves(const gk_cuda_instance *instance, const gk_context *ctx, const GemmProblem *p) {
    return p->m <= instance->key[KEY_TOKENS] && p->group <= instance->key[KEY_ROWS] &&
           gk_gpu_of(ctx->index)->smem_per_block >= instance->key[KEY_SMEM];
}

/* The lowest address of a 16-bit operand [batch][x][k], whose strides may be negative. */
static uintptr_t lowest(const void *data, int64_t x, int64_t k, int64_t x_stride, int64_t k_stride,
                        const GemmProblem *p, const int64_t *batch) {
    int64_t at = gk_min_i64(0, (x - 1) * x_stride) + gk_min_i64(0, (k - 1) * k_stride);
    for (int d = 0; d < p->ndim; ++d) at += gk_min_i64(0, (p->shape[d] - 1) * batch[d]);
    return (uintptr_t)data + (uintptr_t)(at * 2);
}

/* Fills in the rest of the plan. plan_problem has filled in its problem. */
static void plan_instance(const gk_cuda_instance *instance, const gk_context *ctx, gk_plan *to) {
    SkinnyPlan *const own = GK_OWN(SkinnyPlan, to);
    const GemmProblem *const p = &own->p;
    own->first_w = lowest(p->b, p->n, p->k, p->b_n, p->b_k, p, p->b_batch);
    own->first_x = lowest(p->a, p->m, p->k, p->a_m, p->a_k, p, p->a_batch);
    to->kernel = instance;
    to->tile[0] = instance->key[KEY_TOKENS];
    to->tile[1] = p->group;
    to->tile[2] = SKINNY_BLOCK_STEP;
    to->tasks = (int64_t)p->tiles_n * p->batch;
    /* the number of tiles that a block takes one after the other */
    to->waves = (double)gk_ceil_div(to->tasks, skinny_blocks(ctx, p));
}

static bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *to) {
    GemmProblem *const p = &GK_OWN(SkinnyPlan, to)->p;
    if (!plan_problem(ctx, args, instance->key[KEY_MISALIGNED], p) || !serves(instance, ctx, p))
        return false;
    plan_instance(instance, ctx, to);
    return true;
}

static bool plan_best(const gk_context *ctx, const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = arguments;
    const gk_dtype dtype = args->a.dtype;
    if ((dtype != GK_BF16 && dtype != GK_F16) || gk_batch_invariant()) return false;
    GemmProblem *const p = &GK_OWN(SkinnyPlan, to)->p;
    bool misaligned = false;
    if (!plan_problem(ctx, args, false, p)) {
        misaligned = true;
        if (!plan_problem(ctx, args, true, p) || p->n * p->batch < SKINNY_MISALIGNED_LEAST)
            return false;
    }
    for (int i = 0; i < gk_gemm_skinny_table.num_instances; ++i) {
        const gk_cuda_instance *const instance = &gk_gemm_skinny_table.instances[i];
        if (instance->dtype == dtype && instance->key[KEY_MISALIGNED] == misaligned &&
            serves(instance, ctx, p)) {
            plan_instance(instance, ctx, to);
            return true;
        }
    }
    return false;
}

/* ---- the table ------------------------------------------------------------------------------- */
#define SKINNY(name, tokens, rows, misaligned, bytes)         \
    GK_DECLARE_LAUNCH(gemm_skinny_bf16_##name##_##misaligned) \
    GK_DECLARE_LAUNCH(gemm_skinny_f16_##name##_##misaligned)
#include "instances.def"

#define MISALIGNED_0 "gemm_skinny_"
#define MISALIGNED_1 "gemm_skinny_misaligned_"
#define INSTANCE(short, dtype, name, tokens, rows, misaligned, bytes) \
    {MISALIGNED_##misaligned #short "_" #name,                        \
     dtype,                                                           \
     plan,                                                            \
     GK_LAUNCH(gemm_skinny_##short##_##name##_##misaligned),          \
     {tokens, rows, bytes, misaligned},                               \
     NULL},

static const gk_cuda_instance instances[] = {
#define SKINNY(...) INSTANCE(bf16, GK_BF16, __VA_ARGS__)
#include "instances.def"
#define SKINNY(...) INSTANCE(f16, GK_F16, __VA_ARGS__)
#include "instances.def"
};

const gk_cuda_table gk_gemm_skinny_table = {instances, sizeof instances / sizeof *instances, 80,
                                            plan_best};
