/* flash_attn: what a call of gk_flash_attn_fwd or gk_flash_attn_bwd means: its checks, bytes and FLOPs, its entry points. */
#include "../checks.h"
#include "../dispatch.h"

/* All but the context. lse may have no data, which only forward allows. contents: of index tensors, too, on the CPU. */
static gk_status check_forward(const char *op, const gk_context *ctx, const gk_flash_attn_args *f, bool contents) {
    const bool packed = f->cu_seqlens_q != NULL;
    const int nd = packed ? 3 : 4, last = nd - 1, row = packed ? 0 : 2;
    const gk_dtype dtype = f->q.dtype;
    GK_REQUIRE(gk_is_float(dtype), "%s: q is %s, expected a floating dtype", op, gk_dtype_name(dtype));
    GK_TRY(gk_check_tensor(op, "q", &f->q, dtype, nd, nd));
    GK_TRY(gk_check_tensor(op, "k", &f->k, dtype, nd, nd));
    GK_TRY(gk_check_tensor(op, "v", &f->v, dtype, nd, nd));
    GK_TRY(gk_check_tensor(op, "out", &f->out, dtype, nd, nd));
    GK_TRY(gk_check_layout(op, "lse", &f->lse, gk_stats_dtype(dtype), nd - 1, nd - 1));
    GK_TRY(gk_check_size(op, "k", &f->k, last, f->q.shape[last]));
    GK_TRY(gk_check_head_dim(op, "q", ctx, f->q.shape[last]));
    GK_TRY(gk_check_head_dim(op, "v", ctx, f->v.shape[last]));
    GK_TRY(gk_check_size(op, "v", &f->v, 1, f->k.shape[1]));
    GK_TRY(gk_check_size(op, "v", &f->v, row, f->k.shape[row]));
    GK_TRY(gk_check_heads(op, f->q.shape[1], f->k.shape[1]));
    for (int d = 0; d < last; ++d) {
        GK_TRY(gk_check_size(op, "out", &f->out, d, f->q.shape[d]));
        GK_TRY(gk_check_size(op, "lse", &f->lse, d, f->q.shape[d]));
    }
    GK_TRY(gk_check_size(op, "out", &f->out, last, f->v.shape[last]));
    GK_REQUIRE(gk_is_contiguous(&f->lse) || gk_numel(&f->lse) == 0, "%s: lse is not contiguous", op);
    const gk_tensor *dense[4] = {&f->q, &f->k, &f->v, &f->out};
    const char *const names[4] = {"q", "k", "v", "out"};
    for (int i = 0; i < 4; ++i) GK_TRY(gk_check_dense_last(op, names[i], dense[i]));
    int64_t batch = f->q.shape[0];
    if (packed) {
        GK_REQUIRE(f->cu_seqlens_k, "%s: cu_seqlens_k is missing", op);
        GK_TRY(gk_check_tensor(op, "cu_seqlens_q", f->cu_seqlens_q, GK_I32, 1, 1));
        GK_TRY(gk_check_tensor(op, "cu_seqlens_k", f->cu_seqlens_k, GK_I32, 1, 1));
        batch = f->cu_seqlens_q->shape[0] - 1;
        GK_REQUIRE(batch >= 0, "%s: cu_seqlens_q is empty, expected batch + 1 entries", op);
        GK_TRY(gk_check_size(op, "cu_seqlens_k", f->cu_seqlens_k, 0, batch + 1));
        GK_REQUIRE(f->max_seqlen_q >= 0, "%s: max_seqlen_q is %lld, expected 0 or more", op,
                   (long long)f->max_seqlen_q);
        GK_REQUIRE(f->max_seqlen_k >= 0, "%s: max_seqlen_k is %lld, expected 0 or more", op,
                   (long long)f->max_seqlen_k);
        GK_TRY(gk_check_product(op, "sequences, heads and the longest sequence of q", batch, f->q.shape[1],
                                gk_min_i64(f->max_seqlen_q, f->q.shape[0])));
        GK_REQUIRE(!f->rules.kv_start && !f->rules.kv_end && !f->rules.q_start,
                   "%s: kv_start, kv_end and q_start are for dense calls", op);
    } else {
        GK_TRY(gk_check_size(op, "k", &f->k, 0, batch));
        GK_TRY(gk_check_size(op, "v", &f->v, 0, batch));
        GK_TRY(gk_check_of_sequences(op, "kv_start", f->rules.kv_start, batch));
        GK_TRY(gk_check_of_sequences(op, "kv_end", f->rules.kv_end, batch));
        GK_TRY(gk_check_of_sequences(op, "q_start", f->rules.q_start, batch));
        GK_REQUIRE(!f->rules.q_start || f->rules.diagonal == 0,
                   "%s: diagonal is %lld where q_start is given, expected 0: only one of them places the queries", op,
                   (long long)f->rules.diagonal);
    }
    GK_TRY(gk_check_rules(op, &f->rules, dtype, batch, f->q.shape[1]));
    GK_TRY(gk_check_length(op, "q", ctx, f->q.shape[row]));
    GK_TRY(gk_check_length(op, "k", ctx, f->k.shape[row]));
    if (packed && contents && ctx->device == GK_CPU) {
        GK_TRY(gk_check_cu_seqlens(op, "cu_seqlens_q", f->cu_seqlens_q, f->q.shape[0], f->max_seqlen_q));
        GK_TRY(gk_check_cu_seqlens(op, "cu_seqlens_k", f->cu_seqlens_k, f->k.shape[0], f->max_seqlen_k));
    }
    return GK_OK;
}

static gk_status check_flash(const char *op, const gk_context *ctx, const gk_flash_attn_args *f, bool contents) {
    GK_REQUIRE(f, "%s: args is NULL", op);
    GK_TRY(gk_check_context(op, ctx, f->size, sizeof *f));
    return check_forward(op, ctx, f, contents);
}

/* args, or where the softcap is none that the kernels can take, a copy with one that they can. */
static const gk_flash_attn_args *held(const gk_flash_attn_args *args, gk_flash_attn_args *copy) {
    const double softcap = gk_held_softcap(&args->rules, args->q.dtype);
    if (softcap == args->rules.softcap) return args;
    *copy = *args, copy->rules.softcap = softcap;
    return copy;
}

static const gk_flash_attn_bwd_args *held_bwd(const gk_flash_attn_bwd_args *args, gk_flash_attn_bwd_args *copy) {
    const double softcap = gk_held_softcap(&args->fwd.rules, args->fwd.q.dtype);
    if (softcap == args->fwd.rules.softcap) return args;
    *copy = *args, copy->fwd.rules.softcap = softcap;
    return copy;
}

/* Keys that each row sees, summed over rows and sequences; contents of packed calls must have been checked. Index tensors on
 * a GPU are not read: kv_start, kv_end and q_start then count as 0, Sk and Sk - Sq, and every packed sequence as one of equal
 * share. */
static double visible_pairs(const gk_context *ctx, const gk_flash_attn_args *f) {
    const bool packed = f->cu_seqlens_q != NULL, readable = ctx->device == GK_CPU;
    const int64_t batch = packed ? f->cu_seqlens_q->shape[0] - 1 : f->q.shape[0];
    double pairs = 0;
    for (int64_t b = 0; b < batch; ++b) {
        int64_t seq_q = packed ? 0 : f->q.shape[2], seq_k = packed ? 0 : f->k.shape[2], diagonal = f->rules.diagonal;
        if (packed && !readable) {
            seq_q = gk_ceil_div(f->q.shape[0], batch), seq_k = gk_ceil_div(f->k.shape[0], batch);
            diagonal = seq_k - seq_q;
        } else if (packed) {
            const int32_t *cq = f->cu_seqlens_q->data, *ck = f->cu_seqlens_k->data;
            const int64_t sq = f->cu_seqlens_q->stride[0], sk = f->cu_seqlens_k->stride[0];
            seq_q = cq[(b + 1) * sq] - cq[b * sq], seq_k = ck[(b + 1) * sk] - ck[b * sk];
            diagonal = seq_k - seq_q;
        } else if (f->rules.q_start) {
            diagonal = readable ? gk_i32_at(f->rules.q_start, b) : seq_k - seq_q;
        }
        gk_span span = gk_span_make(&f->rules, seq_k, diagonal);
        if (readable) gk_span_cut(&span, &f->rules, b);
        for (int64_t i = 0; i < seq_q; ++i) pairs += (double)gk_max_i64(0, gk_span_hi(&span, i) - gk_span_lo(&span, i));
    }
    return pairs;
}

static void attn_cost(const gk_context *ctx, const gk_flash_attn_args *f, double products, gk_explanation *out) {
    const int last = f->q.ndim - 1;
    out->bytes = gk_tensor_bytes(&f->q) + gk_tensor_bytes(&f->k) + gk_tensor_bytes(&f->v) + gk_tensor_bytes(&f->out) +
                 gk_tensor_bytes(&f->lse);
    out->flops =
        products * visible_pairs(ctx, f) * (double)f->q.shape[1] * (double)(f->q.shape[last] + f->v.shape[last]);
}

gk_status gk_plan_flash_attn_fwd(const gk_context *ctx, const gk_flash_attn_args *args, gk_plan *plan) {
    gk_flash_attn_args copy;
    GK_TRY(check_flash("gk_flash_attn_fwd", ctx, args, true));
    return gk_dispatch_plan("gk_flash_attn_fwd", ctx, GK_OP_FLASH_ATTN_FWD, args->q.dtype, held(args, &copy), plan);
}

gk_status gk_run_flash_attn_fwd(const gk_context *ctx, const gk_flash_attn_args *args, const gk_plan *plan,
                                void *workspace, size_t bytes) {
    gk_flash_attn_args copy;
    return gk_dispatch_run("gk_flash_attn_fwd", ctx, held(args, &copy), plan, workspace, bytes);
}

size_t gk_flash_attn_fwd_workspace_bytes(const gk_context *ctx, const gk_flash_attn_args *args) {
    gk_flash_attn_args copy;
    if (check_flash("gk_flash_attn_fwd", ctx, args, false) != GK_OK) return 0;
    return gk_dispatch_workspace_bytes("gk_flash_attn_fwd", ctx, GK_OP_FLASH_ATTN_FWD, args->q.dtype,
                                       held(args, &copy));
}

gk_status gk_flash_attn_fwd(const gk_context *ctx, const gk_flash_attn_args *args) {
    gk_flash_attn_args copy;
    GK_TRY(check_flash("gk_flash_attn_fwd", ctx, args, true));
    return gk_dispatch_call("gk_flash_attn_fwd", ctx, GK_OP_FLASH_ATTN_FWD, args->q.dtype, held(args, &copy),
                            args->workspace, args->workspace_bytes);
}

gk_status gk_explain_flash_attn_fwd(const gk_context *ctx, const gk_flash_attn_args *args, gk_explanation *out) {
    gk_flash_attn_args copy;
    GK_TRY(check_flash("gk_explain_flash_attn_fwd", ctx, args, true));
    GK_TRY(gk_dispatch_explain("gk_explain_flash_attn_fwd", ctx, GK_OP_FLASH_ATTN_FWD, args->q.dtype, held(args, &copy),
                               out));
    attn_cost(ctx, args, 2, out);
    gk_dispatch_bound(ctx, args->q.dtype, out);
    return GK_OK;
}

static gk_status check_flash_bwd(const char *op, const gk_context *ctx, const gk_flash_attn_bwd_args *g,
                                 bool contents) {
    GK_REQUIRE(g, "%s: args is NULL", op);
    GK_TRY(gk_check_context(op, ctx, g->size, sizeof *g));
    const gk_flash_attn_args *f = &g->fwd;
    GK_TRY(gk_check_args_size(op, f->size, sizeof *f));
    GK_TRY(check_forward(op, ctx, f, contents));
    const int nd = f->q.ndim;
    GK_TRY(gk_check_tensor(op, "lse", &f->lse, f->lse.dtype, nd - 1, nd - 1));
    const gk_tensor *grads[4] = {&g->grad_out, &g->dq, &g->dk, &g->dv}, *like[4] = {&f->out, &f->q, &f->k, &f->v};
    const char *const names[4] = {"grad_out", "dq", "dk", "dv"};
    for (int i = 0; i < 4; ++i) {
        GK_TRY(gk_check_tensor(op, names[i], grads[i], f->q.dtype, nd, nd));
        for (int d = 0; d < nd; ++d) GK_TRY(gk_check_size(op, names[i], grads[i], d, like[i]->shape[d]));
        GK_TRY(gk_check_dense_last(op, names[i], grads[i]));
    }
    if (g->grad_lse) {
        GK_TRY(gk_check_tensor(op, "grad_lse", g->grad_lse, f->lse.dtype, nd - 1, nd - 1));
        for (int d = 0; d < nd - 1; ++d) GK_TRY(gk_check_size(op, "grad_lse", g->grad_lse, d, f->lse.shape[d]));
    }
    if (g->dsinks) {
        GK_REQUIRE(f->rules.sinks, "%s: dsinks is given but sinks is not", op);
        GK_TRY(gk_check_tensor(op, "dsinks", g->dsinks, f->rules.sinks->dtype, 1, 1));
        GK_TRY(gk_check_size(op, "dsinks", g->dsinks, 0, f->q.shape[1]));
    }
    return GK_OK;
}

gk_status gk_plan_flash_attn_bwd(const gk_context *ctx, const gk_flash_attn_bwd_args *args, gk_plan *plan) {
    gk_flash_attn_bwd_args copy;
    GK_TRY(check_flash_bwd("gk_flash_attn_bwd", ctx, args, true));
    return gk_dispatch_plan("gk_flash_attn_bwd", ctx, GK_OP_FLASH_ATTN_BWD, args->fwd.q.dtype, held_bwd(args, &copy),
                            plan);
}

gk_status gk_run_flash_attn_bwd(const gk_context *ctx, const gk_flash_attn_bwd_args *args, const gk_plan *plan,
                                void *workspace, size_t bytes) {
    gk_flash_attn_bwd_args copy;
    return gk_dispatch_run("gk_flash_attn_bwd", ctx, held_bwd(args, &copy), plan, workspace, bytes);
}

size_t gk_flash_attn_bwd_workspace_bytes(const gk_context *ctx, const gk_flash_attn_bwd_args *args) {
    gk_flash_attn_bwd_args copy;
    if (check_flash_bwd("gk_flash_attn_bwd", ctx, args, false) != GK_OK) return 0;
    return gk_dispatch_workspace_bytes("gk_flash_attn_bwd", ctx, GK_OP_FLASH_ATTN_BWD, args->fwd.q.dtype,
                                       held_bwd(args, &copy));
}

gk_status gk_flash_attn_bwd(const gk_context *ctx, const gk_flash_attn_bwd_args *args) {
    gk_flash_attn_bwd_args copy;
    GK_TRY(check_flash_bwd("gk_flash_attn_bwd", ctx, args, true));
    return gk_dispatch_call("gk_flash_attn_bwd", ctx, GK_OP_FLASH_ATTN_BWD, args->fwd.q.dtype, held_bwd(args, &copy),
                            args->workspace, args->workspace_bytes);
}

gk_status gk_explain_flash_attn_bwd(const gk_context *ctx, const gk_flash_attn_bwd_args *args, gk_explanation *out) {
    gk_flash_attn_bwd_args copy;
    GK_TRY(check_flash_bwd("gk_explain_flash_attn_bwd", ctx, args, true));
    GK_TRY(gk_dispatch_explain("gk_explain_flash_attn_bwd", ctx, GK_OP_FLASH_ATTN_BWD, args->fwd.q.dtype,
                               held_bwd(args, &copy), out));
    attn_cost(ctx, &args->fwd, 5,
              out); /* five products, of which three have head_dim and two head_dim_v: 2.5 x forward */
    out->bytes += gk_tensor_bytes(&args->grad_out) + gk_tensor_bytes(&args->dq) + gk_tensor_bytes(&args->dk) +
                  gk_tensor_bytes(&args->dv);
    gk_dispatch_bound(ctx, args->fwd.q.dtype, out);
    return GK_OK;
}
