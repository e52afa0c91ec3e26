/* attn_merge: what a call of gk_attn_merge means: its checks, its entry point. */
#include "../checks.h"
#include "../dispatch.h"

gk_status gk_attn_merge(const gk_context *ctx, const gk_attn_merge_args *args) {
    const char *op = "gk_attn_merge";
    GK_REQUIRE(args, "%s: args is NULL", op);
    GK_TRY(gk_check_context(op, ctx, args->size, sizeof *args));
    const gk_dtype dtype = args->out_a.dtype;
    GK_REQUIRE(gk_is_float(dtype), "%s: out_a is %s, expected a floating dtype", op, gk_dtype_name(dtype));
    GK_TRY(gk_check_tensor(op, "out_a", &args->out_a, dtype, 1, GK_MAX_DIMS));
    const int nd = args->out_a.ndim;
    GK_TRY(gk_check_tensor(op, "out_b", &args->out_b, dtype, nd, nd));
    GK_TRY(gk_check_tensor(op, "out", &args->out, dtype, nd, nd));
    GK_TRY(gk_check_tensor(op, "lse_a", &args->lse_a, gk_stats_dtype(dtype), nd - 1, nd - 1));
    GK_TRY(gk_check_tensor(op, "lse_b", &args->lse_b, gk_stats_dtype(dtype), nd - 1, nd - 1));
    GK_TRY(gk_check_tensor(op, "lse", &args->lse, gk_stats_dtype(dtype), nd - 1, nd - 1));
    for (int d = 0; d < nd; ++d) {
        GK_TRY(gk_check_size(op, "out_b", &args->out_b, d, args->out_a.shape[d]));
        GK_TRY(gk_check_size(op, "out", &args->out, d, args->out_a.shape[d]));
        if (d == nd - 1) break;
        GK_TRY(gk_check_size(op, "lse_a", &args->lse_a, d, args->out_a.shape[d]));
        GK_TRY(gk_check_size(op, "lse_b", &args->lse_b, d, args->out_a.shape[d]));
        GK_TRY(gk_check_size(op, "lse", &args->lse, d, args->out_a.shape[d]));
    }
    GK_REQUIRE((gk_is_contiguous(&args->out) && gk_is_contiguous(&args->lse)) || gk_numel(&args->out) == 0,
               "%s: out and lse must be contiguous", op);
    return gk_dispatch_call(op, ctx, GK_OP_ATTN_MERGE, dtype, args, NULL, 0);
}
