/* paged_attn: what a call of gk_paged_attn or gk_kv_cache_write means: its checks, bytes and FLOPs, its entry points. */
#include <string.h>

#include "../checks.h"
#include "../dispatch.h"

static gk_status check_scales(const char *op, const char *name, const gk_tensor *t, gk_dtype dtype, int64_t heads_kv) {
    if (!t) return GK_OK;
    GK_TRY(gk_check_tensor(op, name, t, gk_stats_dtype(dtype), 0, 1));
    if (t->ndim == 1) GK_TRY(gk_check_size(op, name, t, 0, heads_kv));
    return GK_OK;
}

/* args, or a copy with flags 0 of a struct that ends before them. */
static const gk_paged_attn_args *whole(const gk_paged_attn_args *args, gk_paged_attn_args *copy) {
    const size_t before = offsetof(gk_paged_attn_args, flags);
    if (!args || args->size != before) return args;
    memset(copy, 0, sizeof *copy);
    memcpy(copy, args, before);
    copy->size = sizeof *copy;
    return copy;
}

static bool sees_to_the_right(const gk_paged_attn_args *p) {
    return !p->rules.is_causal && !(p->flags & GK_PAGED_WINDOW_RIGHT && p->rules.window_right == 0);
}

static gk_status check_paged(const char *op, const gk_context *ctx, const gk_paged_attn_args *p, bool contents) {
    GK_REQUIRE(p, "%s: args is NULL", op);
    GK_TRY(gk_check_context(op, ctx, p->size, sizeof *p));
    const gk_dtype dtype = p->q.dtype;
    GK_REQUIRE(gk_is_float(dtype), "%s: q is %s, expected a floating dtype", op, gk_dtype_name(dtype));
    GK_TRY(gk_check_tensor(op, "q", &p->q, dtype, 3, 3));
    GK_TRY(gk_check_tensor(op, "k_cache", &p->k_cache, dtype, 4, 4));
    GK_TRY(gk_check_tensor(op, "v_cache", &p->v_cache, dtype, 4, 4));
    GK_TRY(gk_check_tensor(op, "block_table", &p->block_table, GK_I32, 2, 2));
    GK_TRY(gk_check_tensor(op, "seq_lens", &p->seq_lens, GK_I32, 1, 1));
    GK_TRY(gk_check_tensor(op, "out", &p->out, dtype, 3, 3));
    const int64_t tokens = p->q.shape[0], heads_q = p->q.shape[1], heads_kv = p->k_cache.shape[2];
    const int64_t batch = p->seq_lens.shape[0];
    GK_TRY(gk_check_heads(op, heads_q, heads_kv));
    GK_TRY(gk_check_size(op, "k_cache", &p->k_cache, 3, p->q.shape[2]));
    for (int d = 0; d < 3; ++d) GK_TRY(gk_check_size(op, "v_cache", &p->v_cache, d, p->k_cache.shape[d]));
    GK_REQUIRE(p->k_cache.shape[1] > 0 || p->k_cache.shape[0] == 0, "%s: k_cache has block_size 0, expected 1 or more",
               op);
    GK_TRY(gk_check_head_dim(op, "q", ctx, p->q.shape[2]));
    GK_TRY(gk_check_head_dim(op, "v_cache", ctx, p->v_cache.shape[3]));
    GK_TRY(gk_check_size(op, "block_table", &p->block_table, 0, batch));
    GK_TRY(gk_check_size(op, "out", &p->out, 0, tokens));
    GK_TRY(gk_check_size(op, "out", &p->out, 1, heads_q));
    GK_TRY(gk_check_size(op, "out", &p->out, 2, p->v_cache.shape[3]));
    GK_REQUIRE(gk_is_contiguous(&p->out) || gk_numel(&p->out) == 0, "%s: out is not contiguous", op);
    if (p->lse.data) {
        GK_TRY(gk_check_tensor(op, "lse", &p->lse, gk_stats_dtype(dtype), 2, 2));
        GK_TRY(gk_check_size(op, "lse", &p->lse, 0, tokens));
        GK_TRY(gk_check_size(op, "lse", &p->lse, 1, heads_q));
        GK_REQUIRE(gk_is_contiguous(&p->lse) || gk_numel(&p->lse) == 0, "%s: lse is not contiguous", op);
    }
    GK_TRY(gk_check_dense_last(op, "q", &p->q));
    GK_TRY(gk_check_dense_last(op, "k_cache", &p->k_cache));
    GK_TRY(gk_check_dense_last(op, "v_cache", &p->v_cache));
    if (p->cu_seqlens_q) {
        GK_TRY(gk_check_tensor(op, "cu_seqlens_q", p->cu_seqlens_q, GK_I32, 1, 1));
        GK_TRY(gk_check_size(op, "cu_seqlens_q", p->cu_seqlens_q, 0, batch + 1));
        GK_REQUIRE(p->max_seqlen_q >= 0, "%s: max_seqlen_q is %lld, expected 0 or more", op,
                   (long long)p->max_seqlen_q);
    } else {
        GK_REQUIRE(batch ? tokens % batch == 0 : tokens == 0,
                   "%s: q has %lld tokens, expected a multiple of the %lld sequences", op, (long long)tokens,
                   (long long)batch);
    }
    GK_REQUIRE(p->flags <= (GK_PAGED_WINDOW_RIGHT | GK_PAGED_ALLOW_SHORT), "%s: flags is %u, expected gk_paged_flags",
               op, (unsigned)p->flags);
    GK_REQUIRE(!(p->flags & GK_PAGED_ALLOW_SHORT) || ctx->device == GK_CPU || !sees_to_the_right(p),
               "%s: on CUDA allow_short is served with is_causal or a window_right of 0", op);
    GK_TRY(gk_check_rules(op, &p->rules, dtype, batch, heads_q));
    GK_TRY(gk_check_of_sequences(op, "kv_start", p->rules.kv_start, batch));
    GK_TRY(check_scales(op, "k_scale", p->k_scale, dtype, heads_kv));
    GK_TRY(check_scales(op, "v_scale", p->v_scale, dtype, heads_kv));
    GK_TRY(gk_check_length(op, "q", ctx, tokens));
    GK_TRY(gk_check_product(op, "sequences, heads and tokens", batch, heads_q,
                            p->cu_seqlens_q ? gk_min_i64(p->max_seqlen_q, tokens) : 1));
    GK_TRY(gk_check_product(op, "sequences, columns of block_table and block_size", batch, p->block_table.shape[1],
                            p->k_cache.shape[1]));
    GK_TRY(gk_check_length(op, "block_table", ctx, p->block_table.shape[1] * p->k_cache.shape[1]));
    if (contents && ctx->device == GK_CPU) GK_TRY(gk_check_paged_contents(p));
    return GK_OK;
}

/* args, or where the softcap is none that the kernels can take, a copy with one that they can. */
static const gk_paged_attn_args *held(const gk_paged_attn_args *args, gk_paged_attn_args *copy) {
    const double softcap = gk_held_softcap(&args->rules, args->q.dtype);
    if (softcap == args->rules.softcap) return args;
    *copy = *args, copy->rules.softcap = softcap;
    return copy;
}

gk_status gk_plan_paged_attn(const gk_context *ctx, const gk_paged_attn_args *args, gk_plan *plan) {
    gk_paged_attn_args full, copy;
    args = whole(args, &full);
    GK_TRY(check_paged("gk_paged_attn", ctx, args, true));
    return gk_dispatch_plan("gk_paged_attn", ctx, GK_OP_PAGED_ATTN, args->q.dtype, held(args, &copy), plan);
}

gk_status gk_run_paged_attn(const gk_context *ctx, const gk_paged_attn_args *args, const gk_plan *plan, void *workspace,
                            size_t bytes) {
    gk_paged_attn_args full, copy;
    args = whole(args, &full);
    return gk_dispatch_run("gk_paged_attn", ctx, held(args, &copy), plan, workspace, bytes);
}

size_t gk_paged_attn_workspace_bytes(const gk_context *ctx, const gk_paged_attn_args *args) {
    gk_paged_attn_args full, copy;
    args = whole(args, &full);
    if (check_paged("gk_paged_attn", ctx, args, false) != GK_OK) return 0;
    return gk_dispatch_workspace_bytes("gk_paged_attn", ctx, GK_OP_PAGED_ATTN, args->q.dtype, held(args, &copy));
}

gk_status gk_paged_attn(const gk_context *ctx, const gk_paged_attn_args *args) {
    gk_paged_attn_args full, copy;
    args = whole(args, &full);
    GK_TRY(check_paged("gk_paged_attn", ctx, args, true));
    return gk_dispatch_call("gk_paged_attn", ctx, GK_OP_PAGED_ATTN, args->q.dtype, held(args, &copy), args->workspace,
                            args->workspace_bytes);
}

gk_status gk_explain_paged_attn(const gk_context *ctx, const gk_paged_attn_args *args, gk_explanation *out) {
    gk_paged_attn_args full, copy;
    args = whole(args, &full);
    GK_TRY(check_paged("gk_explain_paged_attn", ctx, args, true));
    GK_TRY(gk_dispatch_explain("gk_explain_paged_attn", ctx, GK_OP_PAGED_ATTN, args->q.dtype, held(args, &copy), out));
    const int64_t batch = args->seq_lens.shape[0], heads_kv = args->k_cache.shape[2];
    const double dims = (double)(args->q.shape[2] + args->v_cache.shape[3]);
    double keys = 0, pairs = 0;
    for (int64_t b = 0; b < batch; ++b) {
        /* on a GPU lengths are not read: every sequence then counts with all that its table row holds */
        const bool readable = ctx->device == GK_CPU;
        const int64_t len = readable ? ((const int32_t *)args->seq_lens.data)[b * args->seq_lens.stride[0]]
                                     : args->block_table.shape[1] * args->k_cache.shape[1];
        int64_t n = batch ? args->q.shape[0] / batch : 0;
        if (args->cu_seqlens_q && readable) {
            const int32_t *cu = args->cu_seqlens_q->data;
            const int64_t s = args->cu_seqlens_q->stride[0];
            n = cu[(b + 1) * s] - cu[b * s];
        }
        gk_paged_attn_args read = *args;
        if (!readable) read.rules.kv_start = NULL; /* counts as 0 */
        gk_span span = gk_span_paged(&read, b, n, len);
        if (n == 0 || len == 0) continue;
        keys += (double)(gk_span_hi(&span, n - 1) - gk_span_lo(&span, 0));
        for (int64_t i = 0; i < n; ++i) pairs += (double)gk_max_i64(0, gk_span_hi(&span, i) - gk_span_lo(&span, i));
    }
    out->bytes = keys * (double)heads_kv * dims * (double)gk_dtype_bytes(args->q.dtype) + gk_tensor_bytes(&args->q) +
                 gk_tensor_bytes(&args->out) + gk_tensor_bytes(&args->lse);
    out->flops = 2 * pairs * (double)args->q.shape[1] * dims;
    gk_dispatch_bound(ctx, args->q.dtype, out);
    return GK_OK;
}

gk_status gk_kv_cache_write(const gk_context *ctx, const gk_kv_cache_write_args *args) {
    const char *op = "gk_kv_cache_write";
    GK_REQUIRE(args, "%s: args is NULL", op);
    GK_TRY(gk_check_context(op, ctx, args->size, sizeof *args));
    const gk_dtype dtype = args->k.dtype;
    GK_REQUIRE(gk_is_float(dtype), "%s: k is %s, expected a floating dtype", op, gk_dtype_name(dtype));
    GK_TRY(gk_check_tensor(op, "k", &args->k, dtype, 3, 3));
    GK_TRY(gk_check_tensor(op, "v", &args->v, dtype, 3, 3));
    GK_TRY(gk_check_tensor(op, "k_cache", &args->k_cache, dtype, 4, 4));
    GK_TRY(gk_check_tensor(op, "v_cache", &args->v_cache, dtype, 4, 4));
    GK_REQUIRE(args->slots.dtype == GK_I32 || args->slots.dtype == GK_I64, "%s: slots is %s, expected int64 or int32",
               op, gk_dtype_name(args->slots.dtype));
    GK_TRY(gk_check_tensor(op, "slots", &args->slots, args->slots.dtype, 1, 1));
    const int64_t tokens = args->k.shape[0], heads_kv = args->k.shape[1];
    GK_TRY(gk_check_size(op, "v", &args->v, 0, tokens));
    GK_TRY(gk_check_size(op, "v", &args->v, 1, heads_kv));
    GK_TRY(gk_check_size(op, "k_cache", &args->k_cache, 2, heads_kv));
    GK_TRY(gk_check_size(op, "k_cache", &args->k_cache, 3, args->k.shape[2]));
    for (int d = 0; d < 3; ++d) GK_TRY(gk_check_size(op, "v_cache", &args->v_cache, d, args->k_cache.shape[d]));
    GK_TRY(gk_check_size(op, "v_cache", &args->v_cache, 3, args->v.shape[2]));
    GK_TRY(gk_check_size(op, "slots", &args->slots, 0, tokens));
    GK_TRY(check_scales(op, "k_scale", args->k_scale, dtype, heads_kv));
    GK_TRY(check_scales(op, "v_scale", args->v_scale, dtype, heads_kv));
    if (ctx->device == GK_CPU) GK_TRY(gk_check_slots(args));
    return gk_dispatch_call(op, ctx, GK_OP_KV_CACHE_WRITE, dtype, args, NULL, 0);
}
