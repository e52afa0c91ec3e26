/* SPDX-License-Identifier: BSD-3-Clause */
/* check_plan: planning a call and running the plan (plan.h) gives the same bits as the entry
 * point of gpukern.h. There is one plan for a call; the entry point makes one check more than
 * the plan. */
#include "check.h"

#include "core/dispatch.h"
#include "core/op.h"
#include "core/plan.h"

/* Counts the checks and plans of a piece of code. */
static gk_call_counts counts_before;

static void count_from_here(void) { gk_count_calls(&counts_before); }

static void check_counts(int64_t checks, int64_t calls, const char *what) {
    gk_call_counts now;
    gk_count_calls(&now);
    check_result(now.checks - counts_before.checks == checks,
                 "%s checked %lld times, expected %lld", what,
                 (long long)(now.checks - counts_before.checks), (long long)checks);
    check_result(now.plans - counts_before.plans == calls, "%s planned %lld times, expected %lld",
                 what, (long long)(now.plans - counts_before.plans), (long long)calls);
    check_result(now.kernel_plans - counts_before.kernel_plans == calls,
                 "%s took %lld kernels' plans, expected %lld", what,
                 (long long)(now.kernel_plans - counts_before.kernel_plans), (long long)calls);
}

/* One call through the entry point, then as plan and run, into two outputs. Also every way in
 * which the workspace may be wrong. */
#define CHECK_CALL(OP, args, out_of_args, first, second)                                      \
    do {                                                                                      \
        check_workspace w = check_workspace_make(gk_##OP##_workspace_bytes(&ctx, &(args)));   \
        (args).workspace = w.data, (args).workspace_bytes = w.bytes;                          \
        count_from_here();                                                                    \
        check_result(gk_##OP(&ctx, &(args)) == GK_OK, "gk_" #OP ": %s", gk_last_error());     \
        check_counts(1, 1, "gk_" #OP);                                                        \
        (args).out_of_args = (second).t, (args).workspace = NULL, (args).workspace_bytes = 0; \
        gk_plan plan;                                                                         \
        count_from_here();                                                                    \
        check_result(gk_plan_##OP(&ctx, &(args), &plan) == GK_OK, "gk_plan_" #OP ": %s",      \
                     gk_last_error());                                                        \
        check_result(plan.workspace_bytes == w.bytes,                                         \
                     "gk_plan_" #OP " asks for %zu bytes of workspace, not %zu",              \
                     plan.workspace_bytes, w.bytes);                                          \
        if (w.bytes > 0) {                                                                    \
            check_refused(gk_run_##OP(&ctx, &(args), &plan, w.data, w.bytes - 1),             \
                          GK_ERR_WORKSPACE, "workspace");                                     \
            check_refused(gk_run_##OP(&ctx, &(args), &plan, w.data + 4, w.bytes),             \
                          GK_ERR_WORKSPACE, "workspace");                                     \
            check_refused(gk_run_##OP(&ctx, &(args), &plan, NULL, w.bytes), GK_ERR_WORKSPACE, \
                          "workspace");                                                       \
        }                                                                                     \
        for (int again = 0; again < 2; ++again)                                               \
            check_result(gk_run_##OP(&ctx, &(args), &plan, w.data, w.bytes) == GK_OK,         \
                         "gk_run_" #OP ": %s", gk_last_error());                              \
        check_counts(0, 1, "a plan that is run twice");                                       \
        check_result(check_same_bits(&(first).t, &(second).t),                                \
                     #OP ": plan and run give other bits than the call");                     \
        check_workspace_end(&w);                                                              \
    } while (0)

static void check_gemm(gk_dtype dtype, int64_t m, int32_t threads) {
    snprintf(check_case, sizeof check_case, "gemm %s of %lld rows, %d threads",
             gk_dtype_name(dtype), (long long)m, (int)threads);
    const int64_t a_shape[2] = {m, 70}, b_shape[2] = {70, 90}, out_shape[2] = {m, 90};
    check_tensor a = check_dense(dtype, 2, a_shape), b = check_dense(dtype, 2, b_shape);
    check_tensor x = check_dense(dtype, 2, out_shape), y = check_dense(dtype, 2, out_shape);
    check_fill_normal(&a, 1);
    check_fill_normal(&b, 1);
    gk_context ctx = check_context(NULL, threads);
    gk_gemm_args args = {
        .size = sizeof args, .a = a.t, .b = b.t, .out = x.t, .alpha = 1, .activation = GK_ACT_GELU};
    CHECK_CALL(gemm, args, out, x, y);

    args.b.shape[0] = 71;
    check_refused(gk_gemm(&ctx, &args), GK_ERR_ARGUMENT,
                  "gk_gemm: b has 71 rows, a has 70 columns");
    check_result(strcmp(gk_last_detail(), "b has 71 rows, a has 70 columns; they must match") == 0,
                 "detail: %s", gk_last_detail());
    gk_io io;
    gk_io_begin(&io, GK_SHAPES);
    check_result(gk_check_gemm(&ctx, &args, &io) == GK_ERR_ARGUMENT &&
                     strcmp(gk_last_error(), gk_last_detail()) == 0,
                 "a check that no entry point made: %s", gk_last_error());
    check_free(0);
}

/* softcap: a softcap that no score comes near runs as none, from a copy of the arguments that
 * exists only during the call. */
static void check_flash(gk_dtype dtype, double softcap, int32_t threads) {
    snprintf(check_case, sizeof check_case, "flash_attn %s softcap %g, %d threads",
             gk_dtype_name(dtype), softcap, (int)threads);
    const int64_t shape[4] = {2, 3, 70, 32}, lse_shape[3] = {2, 3, 70};
    check_tensor q = check_dense(dtype, 4, shape), k = check_dense(dtype, 4, shape),
                 v = check_dense(dtype, 4, shape);
    check_tensor x = check_dense(dtype, 4, shape), y = check_dense(dtype, 4, shape);
    check_tensor lse = check_dense(gk_stats_dtype(dtype), 3, lse_shape);
    check_fill_normal(&q, 1);
    check_fill_normal(&k, 1);
    check_fill_normal(&v, 1);
    gk_context ctx = check_context(NULL, threads);
    gk_flash_attn_args args = GK_FLASH_ATTN_ARGS_INIT;
    args.q = q.t;
    args.k = k.t;
    args.v = v.t;
    args.out = x.t;
    args.lse = lse.t;
    args.rules.scale = 0.2;
    args.rules.softcap = softcap;
    args.rules.is_causal = 1;
    CHECK_CALL(flash_attn_fwd, args, out, x, y);

    check_tensor dk = check_dense(dtype, 4, shape), dv = check_dense(dtype, 4, shape);
    check_tensor dx = check_dense(dtype, 4, shape), dy = check_dense(dtype, 4, shape);
    gk_flash_attn_bwd_args backward = GK_FLASH_ATTN_BWD_ARGS_INIT;
    backward.fwd = args;
    backward.grad_out = v.t;
    backward.dq = dx.t;
    backward.dk = dk.t;
    backward.dv = dv.t;
    CHECK_CALL(flash_attn_bwd, backward, dq, dx, dy);
    check_free(0);
}

static void check_paged(gk_dtype dtype, double softcap, int32_t threads) {
    snprintf(check_case, sizeof check_case, "paged_attn %s softcap %g, %d threads",
             gk_dtype_name(dtype), softcap, (int)threads);
    const int64_t q_shape[3] = {2, 4, 32}, cache_shape[4] = {8, 16, 2, 32}, table_shape[2] = {2, 4},
                  batch[1] = {2};
    check_tensor q = check_dense(dtype, 3, q_shape), k = check_dense(dtype, 4, cache_shape);
    check_tensor v = check_dense(dtype, 4, cache_shape),
                 table = check_dense(GK_I32, 2, table_shape);
    check_tensor lens = check_dense(GK_I32, 1, batch), x = check_dense(dtype, 3, q_shape),
                 y = check_dense(dtype, 3, q_shape);
    check_fill_normal(&q, 1);
    check_fill_normal(&k, 1);
    check_fill_normal(&v, 1);
    for (int64_t i = 0; i < 8; ++i) check_set(&table.t, i, (double)(7 - i));
    check_set(&lens.t, 0, 60);
    check_set(&lens.t, 1, 33);
    gk_context ctx = check_context(NULL, threads);
    gk_paged_attn_args args = GK_PAGED_ATTN_ARGS_INIT;
    args.q = q.t;
    args.k_cache = k.t;
    args.v_cache = v.t;
    args.block_table = table.t;
    args.seq_lens = lens.t;
    args.out = x.t;
    args.rules.scale = 0.2;
    args.rules.softcap = softcap;
    CHECK_CALL(paged_attn, args, out, x, y);

    check_set(&lens.t, 1, 65);
    check_refused(gk_paged_attn(&ctx, &args), GK_ERR_INDEX, "got seq_lens[1] = 65");
    check_free(0);
}

/* Number of gemm's tables that are asked on Hopper. The planner's table serves most products and
 * plans for the three tables behind it, which refuse by themselves. Then come gemm_skinny,
 * gemm_sm80 and gemm_plain. */
static void check_asked(void) {
    static const struct {
        int64_t m, n, k, tables;
        gk_dtype dtype;
        gk_precision precision;
    } products[] = {{4096, 4096, 4096, 1, GK_BF16, GK_IEEE}, {16, 4096, 4096, 1, GK_F16, GK_IEEE},
                    {4096, 4096, 4096, 1, GK_F32, GK_TF32},  {16, 4096, 256, 5, GK_BF16, GK_IEEE},
                    {72, 4024, 1008, 6, GK_F32, GK_TF32},    {512, 512, 512, 7, GK_F32, GK_IEEE},
                    {512, 512, 512, 7, GK_F64, GK_IEEE}};
    gk_context ctx = check_context(NULL, 1);
    ctx.device = GK_CUDA;
    if (gk_cuda_arch("sm_90", &ctx.index) != GK_OK) return; /* built without CUDA */
    for (int i = 0; i < CHECK_COUNT(products); ++i) {
        const int64_t m = products[i].m, n = products[i].n, k = products[i].k;
        snprintf(check_case, sizeof check_case, "tables asked for gemm %s %lld x %lld x %lld",
                 gk_dtype_name(products[i].dtype), (long long)m, (long long)n, (long long)k);
        void *nowhere = (void *)(uintptr_t)4096; /* a plan reads no memory */
        const gk_dtype dtype = products[i].dtype;
        const bool along_m = products[i].precision == GK_TF32;
        gk_gemm_args args = GK_GEMM_ARGS_INIT;
        args.a = (gk_tensor){.data = nowhere,
                             .dtype = dtype,
                             .ndim = 2,
                             .shape = {m, k},
                             .stride = {along_m ? 1 : k, along_m ? m : 1}};
        args.b = (gk_tensor){
            .data = nowhere, .dtype = dtype, .ndim = 2, .shape = {k, n}, .stride = {1, k}};
        args.out = (gk_tensor){.data = (char *)nowhere + (1 << 30),
                               .dtype = dtype,
                               .ndim = 2,
                               .shape = {m, n},
                               .stride = {n, 1}};
        args.fp32_precision = products[i].precision;
        const int64_t before = gk_count_asked();
        gk_plan plan;
        check_result(gk_plan_gemm(&ctx, &args, &plan) == GK_OK, "%s", gk_last_error());
        check_result(gk_count_asked() - before == products[i].tables, "%lld, expected %lld",
                     (long long)(gk_count_asked() - before), (long long)products[i].tables);
    }
}

int main(void) {
    const gk_dtype dtypes[] = {GK_F32, GK_BF16, GK_F64};
    const double softcaps[] = {
        0, 5, 1e38, 1e-40}; /* the last two are run as none, and as the least that float32 holds */
    check_seed = 7;
    for (int d = 0; d < CHECK_COUNT(dtypes); ++d)
        for (int32_t threads = 1; threads <= 3; threads += 2) {
            const int64_t rows[] = {1, 5, 64};
            for (int r = 0; r < CHECK_COUNT(rows); ++r) check_gemm(dtypes[d], rows[r], threads);
            for (int s = 0; s < CHECK_COUNT(softcaps); ++s) {
                check_flash(dtypes[d], softcaps[s], threads);
                check_paged(dtypes[d], softcaps[s], threads);
            }
        }
    check_asked();
    return check_end();
}
