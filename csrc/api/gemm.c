/* gemm: what a call of gk_gemm or gk_gemm_act_bwd means: its checks, bytes and FLOPs, its entry points. gemm_prefer.c has those
 * that choose a kernel. */
#include "gemm.h"

gk_status gk_check_gemm(const gk_context *ctx, const gk_gemm_args *g) {
    const char *op = "gk_gemm";
    GK_REQUIRE(g, "%s: args is NULL", op);
    GK_TRY(gk_check_context(op, ctx, g->size, sizeof *g));
    GK_REQUIRE(gk_is_float(g->a.dtype), "%s: a is %s, expected a floating dtype", op, gk_dtype_name(g->a.dtype));
    GK_TRY(gk_check_tensor(op, "a", &g->a, g->a.dtype, 2, GK_MAX_DIMS));
    GK_TRY(gk_check_tensor(op, "b", &g->b, g->a.dtype, 2, GK_MAX_DIMS));
    GK_REQUIRE(g->out.dtype == g->a.dtype || (g->out.dtype == GK_F32 && g->a.dtype != GK_F64),
               "%s: out is %s, expected %s or float32", op, gk_dtype_name(g->out.dtype), gk_dtype_name(g->a.dtype));
    GK_TRY(gk_check_tensor(op, "out", &g->out, g->out.dtype, 2, GK_MAX_DIMS));
    const int nd = g->out.ndim;
    const int64_t k = g->a.shape[g->a.ndim - 1];
    GK_TRY(gk_check_size(op, "b", &g->b, g->b.ndim - 2, k));
    GK_TRY(gk_check_size(op, "out", &g->out, nd - 2, g->a.shape[g->a.ndim - 2]));
    GK_TRY(gk_check_size(op, "out", &g->out, nd - 1, g->b.shape[g->b.ndim - 1]));
    GK_TRY(gk_check_dense_last(op, "out", &g->out));
    const gk_tensor *in[3] = {&g->a, &g->b, g->c};
    const char *const names[3] = {"a", "b", "c"};
    for (int x = 0; x < 3; ++x) {
        if (!in[x]) continue;
        GK_REQUIRE(in[x]->ndim <= nd, "%s: %s has %d dimensions, out has %d", op, names[x], (int)in[x]->ndim, nd);
        for (int i = 0; i < in[x]->ndim - (x < 2 ? 2 : 0); ++i) {
            int64_t size = in[x]->shape[i], want = g->out.shape[i + nd - in[x]->ndim];
            GK_REQUIRE(size == want || size == 1, "%s: %s has size %lld in dimension %d, expected %lld or 1", op,
                       names[x], (long long)size, i, (long long)want);
        }
    }
    if (g->bias) {
        GK_REQUIRE(g->bias->dtype == g->a.dtype || g->bias->dtype == g->out.dtype, "%s: bias is %s, expected %s or %s",
                   op, gk_dtype_name(g->bias->dtype), gk_dtype_name(g->a.dtype), gk_dtype_name(g->out.dtype));
        GK_TRY(gk_check_tensor(op, "bias", g->bias, g->bias->dtype, 1, 1));
        GK_TRY(gk_check_size(op, "bias", g->bias, 0, g->out.shape[nd - 1]));
    }
    if (g->c) {
        GK_REQUIRE(g->c->dtype == g->a.dtype || g->c->dtype == g->out.dtype, "%s: c is %s, expected %s or %s", op,
                   gk_dtype_name(g->c->dtype), gk_dtype_name(g->a.dtype), gk_dtype_name(g->out.dtype));
        /* with beta 0 its data is not read and may be missing */
        GK_TRY(g->beta != 0 ? gk_check_tensor(op, "c", g->c, g->c->dtype, 0, nd)
                            : gk_check_layout(op, "c", g->c, g->c->dtype, 0, nd));
    }
    if (g->preact) {
        GK_TRY(gk_check_tensor(op, "preact", g->preact, g->out.dtype, nd, nd));
        for (int d = 0; d < nd; ++d) GK_TRY(gk_check_size(op, "preact", g->preact, d, g->out.shape[d]));
        GK_TRY(gk_check_dense_last(op, "preact", g->preact));
    }
    GK_REQUIRE((unsigned)g->activation <= GK_ACT_SILU, "%s: activation is %d", op, (int)g->activation);
    GK_REQUIRE((unsigned)g->fp32_precision <= GK_TF32, "%s: fp32_precision is %d", op, (int)g->fp32_precision);
    GK_REQUIRE(gk_holds(g->a.dtype, g->alpha), "%s: alpha is %g, expected a number that float32 holds", op, g->alpha);
    GK_REQUIRE(gk_holds(g->a.dtype, g->beta), "%s: beta is %g, expected a number that float32 holds", op, g->beta);
    return GK_OK;
}

gk_status gk_plan_gemm(const gk_context *ctx, const gk_gemm_args *args, gk_plan *plan) {
    GK_TRY(gk_check_gemm(ctx, args));
    return gk_dispatch_plan("gk_gemm", ctx, GK_OP_GEMM, args->a.dtype, args, plan);
}

gk_status gk_run_gemm(const gk_context *ctx, const gk_gemm_args *args, const gk_plan *plan, void *workspace,
                      size_t bytes) {
    return gk_dispatch_run("gk_gemm", ctx, args, plan, workspace, bytes);
}

size_t gk_gemm_workspace_bytes(const gk_context *ctx, const gk_gemm_args *args) {
    if (gk_check_gemm(ctx, args) != GK_OK) return 0;
    return gk_dispatch_workspace_bytes("gk_gemm", ctx, GK_OP_GEMM, args->a.dtype, args);
}

gk_status gk_gemm(const gk_context *ctx, const gk_gemm_args *args) {
    GK_TRY(gk_check_gemm(ctx, args));
    return gk_dispatch_call("gk_gemm", ctx, GK_OP_GEMM, args->a.dtype, args, args->workspace, args->workspace_bytes);
}

gk_status gk_explain_gemm(const gk_context *ctx, const gk_gemm_args *args, gk_explanation *out) {
    GK_TRY(gk_check_gemm(ctx, args));
    GK_TRY(gk_dispatch_explain("gk_explain_gemm", ctx, GK_OP_GEMM, args->a.dtype, args, out));
    out->bytes = gk_tensor_bytes(&args->a) + gk_tensor_bytes(&args->b) + gk_tensor_bytes(&args->out);
    if (args->bias) out->bytes += gk_tensor_bytes(args->bias);
    if (args->c && args->beta != 0) out->bytes += gk_tensor_bytes(args->c);
    if (args->preact) out->bytes += gk_tensor_bytes(args->preact);
    out->flops = 2.0 * (double)gk_numel(&args->out) * (double)args->a.shape[args->a.ndim - 1];
    gk_dispatch_bound(ctx, args->a.dtype, out);
    return GK_OK;
}

gk_status gk_gemm_act_bwd(const gk_context *ctx, const gk_gemm_act_bwd_args *args) {
    const char *op = "gk_gemm_act_bwd";
    GK_REQUIRE(args, "%s: args is NULL", op);
    GK_TRY(gk_check_context(op, ctx, args->size, sizeof *args));
    GK_REQUIRE(gk_is_float(args->grad_out.dtype) && gk_is_float(args->saved.dtype),
               "%s: grad_out and saved must be floating", op);
    GK_TRY(gk_check_converted(op, "saved", args->saved.dtype));
    GK_TRY(gk_check_tensor(op, "grad_out", &args->grad_out, args->grad_out.dtype, 0, GK_MAX_DIMS));
    const int nd = args->grad_out.ndim;
    GK_TRY(gk_check_tensor(op, "saved", &args->saved, args->saved.dtype, nd, nd));
    GK_TRY(gk_check_tensor(op, "grad_in", &args->grad_in, args->grad_out.dtype, nd, nd));
    GK_REQUIRE((args->saved.dtype == GK_F64) == (args->grad_out.dtype == GK_F64), "%s: saved is %s, grad_out is %s", op,
               gk_dtype_name(args->saved.dtype), gk_dtype_name(args->grad_out.dtype));
    for (int d = 0; d < nd; ++d) {
        GK_TRY(gk_check_size(op, "saved", &args->saved, d, args->grad_out.shape[d]));
        GK_TRY(gk_check_size(op, "grad_in", &args->grad_in, d, args->grad_out.shape[d]));
    }
    GK_REQUIRE((unsigned)args->activation <= GK_ACT_SILU, "%s: activation is %d", op, (int)args->activation);
    return gk_dispatch_call(op, ctx, GK_OP_GEMM_ACT_BWD, args->grad_out.dtype, args, NULL, 0);
}
