/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_dot: out = activation(alpha a b + beta c + bias) for one row and one column, a dot product.
 * Compiled once per ISA.
 *
 * a [batch..., 1, K] and b [batch..., K, 1] are float32, bfloat16 or float16 and contiguous along
 * k; out is [batch..., 1, 1].
 *
 * A task is one product. It keeps SUMS independent vector sums, because an addition takes several
 * clocks. They are added at the end in an order that depends on K alone, so results repeat bit for
 * bit. Bound by memory: a multiply-add needs two loads, in float32 8 K bytes in all. No workspace.
 *
 * Refused: more rows or columns (gemm_skinny and gemm_packed serve them), other strides, float64
 * (ref). */
#include "tile.h"

/* ---- 1 the problem --------------------------------------------------------------------------- */
typedef struct plan {
    gk_gemm_problem p;
} plan;
GK_PLAN_HOLDS(plan);

typedef struct job {
    const gk_gemm_args *args;
    const plan *x;
} job;

/* ---- 2 the kernel ---------------------------------------------------------------------------- */
enum {
    SUMS = 4 /* a multiply-add has a latency of 4 clocks, and one starts each clock */
};

/* The sum over i of a[i] b[i]. Lanes beyond k are loaded as zeros. */
INLINE float dot(const char *a, const char *b, gk_dtype dtype, int64_t k) {
    vf sum[SUMS];
    for (int s = 0; s < SUMS; ++s) sum[s] = vf_set1(0);
    for (int64_t i = 0; i < k; i += SUMS * W)
        for (int s = 0; s < SUMS; ++s) {
            const int64_t at = i + s * W;
            if (at >= k) break;
            sum[s] = vf_fma(vf_load_dtype(a, dtype, at, k - at),
                            vf_load_dtype(b, dtype, at, k - at), sum[s]);
        }
    const vf all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float total = 0;
    for (int lane = 0; lane < W; ++lane) total += all[lane];
    return total;
}

static void task(void *arg, int64_t i, int64_t worker) {
    (void)worker;
    const job *jb = arg;
    const char *a, *b;
    gk_gemm_epilogue e;
    gk_gemm_at(&jb->x->p, jb->args->a.dtype, i, &a, &b, &e);
    float sum = 0;
    switch (jb->args->a.dtype) { /* one copy of the loop per dtype */
    case GK_BF16: sum = dot(a, b, GK_BF16, jb->x->p.k); break;
    case GK_F16: sum = dot(a, b, GK_F16, jb->x->p.k); break;
    case GK_F32: sum = dot(a, b, GK_F32, jb->x->p.k); break;
    default: gk_no_case("gemm_dot", jb->args->a.dtype); /* the table has only these three dtypes */
    }
    /* alpha, c, bias, activation and the one rounding, as for every gemm */
    SYM(gk_gemm_isa).store(&e, &sum, 1, 1, 1);
}

/* ---- 3 the entry of tables.c ----------------------------------------------------------------- */

static bool dot_plan(const gk_context *ctx, const void *args, gk_plan *to) {
    (void)ctx;
    plan *x = GK_OWN(plan, to);
    x->p = gk_cpu_gemm_problem(args);
    if (x->p.m != 1 || x->p.n != 1 || (x->p.k > 1 && (x->p.a_k != 1 || x->p.b_k != 1)))
        return false;
    to->tile[0] = to->tile[1] = 1;
    to->tile[2] = SUMS * W;
    to->tasks = x->p.batch;
    return true;
}

static void dot_run(const gk_context *ctx, const void *args, const gk_plan *planned,
                    void *workspace) {
    (void)workspace;
    job jb = {args, GK_OWN_CONST(plan, planned)};
    gk_parallel(ctx, planned->tasks, task, &jb);
}

const gk_cpu_kernel SYM(gk_gemm_dot) = {dot_plan, dot_run};
