/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn: the checks and the costs of gk_flash_attn_fwd, gk_flash_attn_bwd and
 * gk_flash_attn_fp8. */
#include "../core/attn_mask.h"
#include "../formats/attn_scales.h"
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "gpukern.h"

/* ---- checks ---------------------------------------------------------------------------------- */
/* The order of dimensions in dense calls and in packed ones: how many there are, which one
 * counts tokens, and their names. */
typedef struct form {
    int ndim, tokens;
    const char *q, *k, *v;
} form;
static const form dense = {4, 2, "[B, Hq, Sq, D]", "[B, Hkv, Sk, D]", "[B, Hkv, Sk, Dv]"};
static const form packed = {3, 0, "[Tq, Hq, D]", "[Tk, Hkv, D]", "[Tk, Hkv, Dv]"};

static const form *form_of(const gk_flash_attn_args *f) {
    return f->cu_seqlens_q ? &packed : &dense;
}

static int64_t batch_of(const gk_flash_attn_args *f) {
    return f->cu_seqlens_q ? f->cu_seqlens_q->shape[0] - 1 : f->q.shape[0];
}

/* is_fp8: q, k and v are e4m3 codes */
static gk_status check_qkv(const gk_context *ctx, const gk_flash_attn_args *f, gk_io *io,
                           bool is_fp8) {
    const form *x = form_of(f);
    const gk_tensor *q = &f->q, *k = &f->k, *v = &f->v;
    const int last = x->ndim - 1;
    GK_TRY(gk_take(io, "q", q, GK_DENSE_LAST));
    GK_TRY(is_fp8 ? gk_check_dtype(io, "q", q, GK_E4M3) : gk_check_float(io, "q", q));
    GK_TRY(gk_check_dims("q", q, x->ndim, x->q));
    GK_TRY(gk_check_head_dim("q", ctx->device, q, q->shape[last]));
    GK_TRY(gk_take(io, "k", k, GK_DENSE_LAST));
    GK_TRY(gk_check_same_dtype(io, "k", k, "q", q));
    GK_TRY(gk_check_dims("k", k, x->ndim, x->k));
    if (x == &dense) GK_TRY(gk_check_same("k", "batch size", k->shape[0], "q", q->shape[0]));
    GK_TRY(gk_check_heads(q->shape[1], "k", k->shape[1]));
    GK_TRY(gk_check_same("k", "head_dim", k->shape[last], "q", q->shape[last]));
    GK_TRY(gk_take(io, "v", v, GK_DENSE_LAST));
    GK_TRY(gk_check_same_dtype(io, "v", v, "q", q));
    GK_TRY(gk_check_dims("v", v, x->ndim, x->v));
    if (x == &dense) GK_TRY(gk_check_same("v", "batch size", v->shape[0], "k", k->shape[0]));
    GK_TRY(gk_check_same("v", "heads", v->shape[1], "k", k->shape[1]));
    GK_TRY(gk_check_same("v", "length", v->shape[x->tokens], "k", k->shape[x->tokens]));
    GK_TRY(gk_check_head_dim("v", ctx->device, v, v->shape[last]));
    GK_TRY(gk_check_tokens("q", ctx, q->shape[x->tokens]));
    return gk_check_tokens("k", ctx, k->shape[x->tokens]);
}

static gk_status check_lengths(const gk_flash_attn_args *f, gk_io *io) {
    GK_REQUIRE(f->cu_seqlens_k, "cu_seqlens_k is missing");
    GK_TRY(gk_take(io, "cu_seqlens_q", f->cu_seqlens_q, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "cu_seqlens_q", f->cu_seqlens_q, GK_I32));
    GK_TRY(gk_check_dims("cu_seqlens_q", f->cu_seqlens_q, 1, "[B+1]"));
    GK_REQUIRE(f->cu_seqlens_q->shape[0] > 0, "cu_seqlens_q must have at least 1 element, got 0");
    GK_TRY(gk_take_index(io, "cu_seqlens_k", f->cu_seqlens_k, f->cu_seqlens_q->shape[0]));
    GK_TRY(gk_check_not_negative("max_seqlen_q", f->max_seqlen_q));
    return gk_check_not_negative("max_seqlen_k", f->max_seqlen_k);
}

/* dtype: of q, or of the result if q is e4m3 */
static gk_status check_rules(const gk_flash_attn_args *f, gk_io *io, gk_dtype dtype) {
    const gk_attn_rules *r = &f->rules;
    const int64_t batch = batch_of(f), heads = f->q.shape[1];
    const gk_tensor q = {.dtype = dtype};
    GK_TRY(gk_check_rules(io, r, &q, batch, heads));
    if (form_of(f) == &packed) {
        GK_REQUIRE(!r->kv_start && !r->kv_end && !r->q_start,
                   "kv_start, kv_end and q_start must be missing in packed calls");
        return gk_check_product("sequences, heads and the longest sequence of q", batch, heads,
                                gk_min_i64(f->max_seqlen_q, f->q.shape[0]));
    }
    GK_TRY(gk_take_index(io, "kv_start", r->kv_start, batch));
    GK_TRY(gk_take_index(io, "kv_end", r->kv_end, batch));
    GK_TRY(gk_take_index(io, "q_start", r->q_start, batch));
    GK_REQUIRE(!r->q_start || r->diagonal == 0,
               "diagonal must be 0 where q_start is given, got %lld", (long long)r->diagonal);
    return GK_OK;
}

/* [B or 1, Hq or 1, Sq or 1, Sk or 1] */
static gk_status check_bias(const gk_flash_attn_args *f, const gk_tensor *t, gk_io *io) {
    const int64_t all[4] = {f->q.shape[0], f->q.shape[1], f->q.shape[2], f->k.shape[2]};
    GK_TRY(gk_take(io, "bias", t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, "bias", t, f->q.dtype, GK_F32));
    bool fits = t->ndim == 4;
    for (int d = 0; fits && d < 4; ++d) fits = t->shape[d] == 1 || t->shape[d] == all[d];
    GK_REQUIRE(fits, "bias must have 4 dimensions that broadcast to %s, got %s",
               gk_text_of(4, all).text, gk_text_of(t->ndim, t->shape).text);
    return GK_OK;
}

static gk_status check_mask(const gk_flash_attn_args *f, const gk_attn_scores *x, gk_io *io) {
    const gk_tensor *t = x->mask;
    const int64_t seq_q = f->q.shape[2], seq_k = f->k.shape[2];
    GK_TRY(gk_take(io, "attn_mask", t, GK_CONTIGUOUS));
    GK_TRY(gk_check_dtype(io, "attn_mask", t, GK_I32));
    GK_TRY(gk_check_dims("attn_mask", t, 3, "[B, H, n]"));
    GK_REQUIRE(
        x->mask_seq_q == seq_q && x->mask_seq_k == seq_k,
        "attn_mask is for %lld queries and %lld keys, q and k have %lld and %lld; they must match",
        (long long)x->mask_seq_q, (long long)x->mask_seq_k, (long long)seq_q, (long long)seq_k);
    GK_REQUIRE(t->shape[0] == 1 || t->shape[0] == f->q.shape[0],
               "attn_mask has batch size %lld, expected 1 or %lld", (long long)t->shape[0],
               (long long)f->q.shape[0]);
    GK_REQUIRE(t->shape[1] == 1 || t->shape[1] == f->q.shape[1],
               "attn_mask has %lld heads, expected 1 or %lld, the heads of q",
               (long long)t->shape[1], (long long)f->q.shape[1]);
    GK_REQUIRE(x->store >= GK_MASK_DENSE && x->store <= GK_MASK_COLUMNS,
               "attn_mask has store %d, expected a gk_mask_store", (int)x->store);
    const int64_t plain = gk_attn_mask_ints(x->store, seq_q, seq_k, 0),
                  transposed = gk_attn_mask_ints(x->store, seq_q, seq_k, 1);
    GK_REQUIRE(t->shape[2] == plain || t->shape[2] == transposed,
               "attn_mask must have %lld or %lld int32 a head, got %lld; make it with gk_attn_mask",
               (long long)plain, (long long)transposed, (long long)t->shape[2]);
    return GK_OK;
}

static gk_status check_scores(const gk_flash_attn_args *f, const gk_attn_scores *x, gk_io *io) {
    if (!x) return GK_OK;
    GK_REQUIRE(form_of(f) == &dense,
               "attn_mask, bias and distance_bias must be missing in packed calls");
    if (x->mask) GK_TRY(check_mask(f, x, io));
    if (x->bias) GK_TRY(check_bias(f, x->bias, io));
    if (x->distance_bias) {
        const gk_tensor *t = x->distance_bias;
        const int64_t expected[2] = {f->q.shape[1],
                                     gk_max_i64(0, f->q.shape[2] + f->k.shape[2] - 1)};
        GK_TRY(gk_take(io, "distance_bias", t, GK_ANY_STRIDES));
        GK_TRY(gk_check_dtype(io, "distance_bias", t, gk_stats_dtype(f->q.dtype)));
        GK_REQUIRE(t->ndim == 2 && (t->shape[0] == 1 || t->shape[0] == expected[0]) &&
                       t->shape[1] == expected[1],
                   "distance_bias must have shape %s or [1, %lld], got %s",
                   gk_text_of(2, expected).text, (long long)expected[1],
                   gk_text_of(t->ndim, t->shape).text);
        GK_REQUIRE(
            !f->rules.q_start,
            "distance_bias must be missing where q_start is given: its entries count from query 0");
    }
    return GK_OK;
}

static gk_status check_dropout(const gk_flash_attn_args *f, gk_io *io) {
    GK_REQUIRE(f->dropout_p >= 0 && f->dropout_p <= 1, "dropout_p must be between 0 and 1, got %g",
               f->dropout_p);
    if (f->dropout_seed) {
        GK_TRY(gk_take(io, "dropout_seed", f->dropout_seed, GK_ANY_STRIDES));
        GK_TRY(gk_check_dtype(io, "dropout_seed", f->dropout_seed, GK_I64));
        return gk_check_length_of("dropout_seed", f->dropout_seed, 2);
    }
    GK_REQUIRE(f->dropout_p == 0, "dropout_seed is missing where dropout_p is %g", f->dropout_p);
    return GK_OK;
}

static gk_status check_contents(const gk_context *ctx, const gk_flash_attn_args *f,
                                const gk_io *io) {
    if (form_of(f) == &dense || !gk_reads_contents(io, ctx)) return GK_OK;
    GK_TRY(gk_check_cu_seqlens("cu_seqlens_q", f->cu_seqlens_q, f->q.shape[0], f->max_seqlen_q));
    return gk_check_cu_seqlens("cu_seqlens_k", f->cu_seqlens_k, f->k.shape[0], f->max_seqlen_k);
}

/* shape of the result: q's with v's head_dim in the last dimension */
static void out_shape(const gk_flash_attn_args *f, int64_t *shape) {
    const int last = f->q.ndim - 1;
    for (int d = 0; d < last; ++d) shape[d] = f->q.shape[d];
    shape[last] = f->v.shape[last];
}

/* A result has q's dtype, or float32 if q has 16 bits: results that will be merged with others
 * are not rounded first. */
static gk_status check_result_dtype(gk_io *io, const char *name, const gk_tensor *q,
                                    gk_dtype dtype) {
    const bool wide = gk_type_of(q->dtype)->bits < 32;
    GK_REQUIRE(dtype == q->dtype || (wide && dtype == GK_F32), "%s must be %s (as q)%s, got %s",
               name, gk_dtype_name(q->dtype), wide ? " or float32" : "", io->dtype_name(dtype));
    return GK_OK;
}

/* The result accumulates: out and lse are read, too. */
static gk_status check_accumulates(const gk_flash_attn_args *f, gk_io *io) {
    const gk_dtype dtype = gk_stats_dtype(f->q.dtype);
    GK_REQUIRE(form_of(f) == &dense, "results accumulate in dense calls only, got a packed call");
    GK_REQUIRE(f->dropout_p == 0, "dropout_p must be 0 where results accumulate, got %g",
               f->dropout_p);
    GK_REQUIRE(f->out.dtype == dtype, "out must be %s where q is %s, got %s", gk_dtype_name(dtype),
               gk_dtype_name(f->q.dtype), io->dtype_name(f->out.dtype));
    return GK_OK;
}

gk_status gk_check_flash_attn_fwd(const gk_context *ctx, const gk_flash_attn_args *f, gk_io *io) {
    GK_TRY(check_qkv(ctx, f, io, false));
    if (form_of(f) == &packed) GK_TRY(check_lengths(f, io));
    GK_TRY(check_rules(f, io, f->q.dtype));
    GK_TRY(check_dropout(f, io));
    GK_TRY(check_scores(f, gk_scores_of(f), io));
    GK_REQUIRE(!gk_scores_of(f) || !gk_accumulates(f),
               "attn_mask, bias and distance_bias must be missing where results accumulate");
    GK_TRY(check_contents(ctx, f, io));
    GK_TRY(gk_accumulates(f) ? check_accumulates(f, io)
                             : check_result_dtype(io, "out_dtype", &f->q, f->out.dtype));
    int64_t shape[GK_MAX_DIMS];
    out_shape(f, shape);
    gk_give(io, "out", &f->out, f->out.dtype, f->q.ndim, shape, GK_DENSE_LAST);
    gk_give(io, "lse", &f->lse, gk_stats_dtype(f->q.dtype), f->q.ndim - 1, shape, GK_CONTIGUOUS)
        ->optional = !gk_accumulates(f);
    return GK_OK;
}

gk_status gk_check_flash_attn_bwd(const gk_context *ctx, const gk_flash_attn_bwd_args *g,
                                  gk_io *io) {
    const gk_flash_attn_args *f = &g->fwd;
    const gk_dtype stats = gk_stats_dtype(f->q.dtype);
    int64_t shape[GK_MAX_DIMS];
    GK_TRY(gk_check_args_size(f->size, sizeof *f));
    GK_TRY(gk_take(io, "grad_out", &g->grad_out, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, "grad_out", &g->grad_out));
    GK_TRY(check_qkv(ctx, f, io, false));
    out_shape(f, shape);
    const int ndim = f->q.ndim;
    GK_TRY(gk_check_same_dtype(io, "grad_out", &g->grad_out, "q", &f->q));
    GK_TRY(gk_check_shape("grad_out", &g->grad_out, ndim, shape));
    GK_TRY(gk_take(io, "out", &f->out, GK_DENSE_LAST));
    GK_TRY(gk_check_dtype(io, "out", &f->out, f->q.dtype));
    GK_TRY(gk_check_shape("out", &f->out, ndim, shape));
    GK_TRY(gk_take(io, "lse", &f->lse, GK_CONTIGUOUS));
    GK_TRY(gk_check_dtype(io, "lse", &f->lse, stats));
    GK_TRY(gk_check_shape("lse", &f->lse, ndim - 1, shape));
    if (form_of(f) == &packed) GK_TRY(check_lengths(f, io));
    if (g->grad_lse) {
        GK_TRY(gk_take(io, "grad_lse", g->grad_lse, GK_ANY_STRIDES));
        GK_TRY(gk_check_dtype(io, "grad_lse", g->grad_lse, stats));
        GK_TRY(gk_check_shape("grad_lse", g->grad_lse, ndim - 1, shape));
    }
    GK_TRY(check_rules(f, io, f->q.dtype));
    GK_TRY(check_dropout(f, io));
    const gk_attn_scores *scores = gk_scores_of_bwd(g);
    GK_TRY(check_scores(f, scores, io));
    if (scores && scores->mask && ctx->device == GK_CUDA) {
        const gk_tensor *mask = scores->mask;
        const int64_t ints =
            gk_attn_mask_ints(scores->store, scores->mask_seq_q, scores->mask_seq_k, 1);
        GK_REQUIRE(
            mask->shape[2] == ints,
            "attn_mask must have %lld int32 a head on CUDA, with tables by keys, got %lld: a "
            "mask that was made on the CPU has none; make it on q's device",
            (long long)ints, (long long)mask->shape[2]);
    }
    GK_TRY(check_contents(ctx, f, io));
    GK_REQUIRE(!scores || !g->is_part,
               "attn_mask, bias and distance_bias must be missing where is_part is true");
    const gk_tensor *sinks = f->rules.sinks;
    GK_REQUIRE(sinks || !g->dsinks, "dsinks is given but sinks is not");
    GK_REQUIRE(
        !g->is_part || !sinks || ctx->device == GK_CPU,
        "sinks must be missing where is_part is true, because their gradient needs all keys");
    GK_REQUIRE(
        !g->is_part || f->dropout_p == 0,
        "dropout_p must be 0 where is_part is true, because the dropout mask depends on a key's "
        "index among all keys");
    GK_TRY(check_result_dtype(io, "grad_dtype", &f->q, g->dq.dtype));
    const int64_t none = 0;
    gk_give(io, "dq", &g->dq, g->dq.dtype, ndim, f->q.shape, GK_DENSE_LAST);
    gk_give(io, "dk", &g->dk, g->dq.dtype, ndim, f->k.shape, GK_DENSE_LAST);
    gk_give(io, "dv", &g->dv, g->dq.dtype, ndim, f->v.shape, GK_DENSE_LAST);
    gk_give(io, "dsinks", g->dsinks, sinks ? sinks->dtype : stats, 1, sinks ? sinks->shape : &none,
            GK_ANY_STRIDES)
        ->optional = true;
    if (!scores) return GK_OK;
    const gk_tensor *bias = scores->bias, *distance = scores->distance_bias;
    GK_REQUIRE(bias || !gk_dbias_of(g), "dbias is given but bias is not");
    GK_REQUIRE(distance || !gk_ddistance_of(g), "ddistance_bias is given but distance_bias is not");
    if (!gk_dbias_of(g)) bias = NULL;
    if (!gk_ddistance_of(g)) distance = NULL;
    gk_give(io, "dbias", gk_dbias_of(g), bias ? bias->dtype : stats, bias ? 4 : 1,
            bias ? bias->shape : &none, GK_CONTIGUOUS)
        ->optional = true;
    gk_give(io, "ddistance_bias", gk_ddistance_of(g), stats, distance ? 2 : 1,
            distance ? distance->shape : &none, GK_CONTIGUOUS)
        ->optional = true;
    return GK_OK;
}

/* A scale: [], [H], [B, H], or one for each 128 tokens, [B, H, blocks]. */
static gk_status take_scale(gk_io *io, const char *name, const gk_tensor *t, int64_t batch,
                            int64_t heads, int64_t tokens) {
    if (!t) return GK_OK;
    const int64_t all[3] = {batch, heads, gk_ceil_div(tokens, GK_ATTN_SCALE_TOKENS)};
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, name, t, GK_F32));
    bool fits = t->ndim == 0 || (t->ndim == 1 && (t->shape[0] == heads || t->shape[0] == 1));
    if (t->ndim == 2 || t->ndim == 3) {
        fits = true;
        for (int d = 0; d < t->ndim; ++d) fits = fits && t->shape[d] == all[d];
    }
    GK_REQUIRE(fits, "%s must have shape [], %s, %s or %s, got %s", name,
               gk_text_of(1, all + 1).text, gk_text_of(2, all).text, gk_text_of(3, all).text,
               gk_text_of(t->ndim, t->shape).text);
    return GK_OK;
}

static gk_status take_mean(gk_io *io, const gk_tensor *t, int64_t batch, int64_t heads,
                           int64_t head_dim) {
    if (!t) return GK_OK;
    const int64_t all[3] = {batch, heads, head_dim};
    GK_TRY(gk_take(io, "v_mean", t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "v_mean", t, GK_F32));
    bool fits = t->ndim == 2 || t->ndim == 3;
    for (int d = 0; fits && d < t->ndim; ++d) fits = t->shape[d] == all[3 - t->ndim + d];
    GK_REQUIRE(fits, "v_mean must have shape %s or %s, got %s", gk_text_of(2, all + 1).text,
               gk_text_of(3, all).text, gk_text_of(t->ndim, t->shape).text);
    return GK_OK;
}

gk_status gk_check_flash_attn_fp8(const gk_context *ctx, const gk_flash_attn_fp8_args *a,
                                  gk_io *io) {
    const gk_flash_attn_args *f = &a->fwd;
    const gk_dtype dtype = f->out.dtype;
    /* The longer structs of gk_flash_attn_fwd do not fit into args.fwd. Kernels pass it on to float
     * attention, which would read them. */
    GK_REQUIRE(f->size <= sizeof *f,
               "fwd.size is %zu, expected at most %zu: attn_mask, bias, distance_bias and results "
               "that accumulate are not supported where q is float8_e4m3fn",
               f->size, sizeof *f);
    GK_TRY(check_qkv(ctx, f, io, true));
    const form *x = form_of(f);
    const int64_t batch = batch_of(f), heads_kv = f->k.shape[1];
    if (x == &packed) GK_TRY(check_lengths(f, io));
    GK_REQUIRE(dtype == GK_BF16 || dtype == GK_F16 || dtype == GK_F32,
               "out_dtype must be bfloat16, float16 or float32 where q is float8_e4m3fn, got %s",
               io->dtype_name(dtype));
    GK_TRY(check_rules(f, io, dtype));
    GK_REQUIRE(f->dropout_p == 0, "dropout_p must be 0 where q is float8_e4m3fn, got %g",
               f->dropout_p);
    GK_TRY(check_contents(ctx, f, io));
    const int64_t tokens_q = x == &packed ? f->max_seqlen_q : f->q.shape[2],
                  tokens_k = x == &packed ? f->max_seqlen_k : f->k.shape[2];
    GK_TRY(take_scale(io, "q_scale", a->q_scale, batch, f->q.shape[1], tokens_q));
    GK_TRY(take_scale(io, "k_scale", a->k_scale, batch, heads_kv, tokens_k));
    GK_TRY(take_scale(io, "v_scale", a->v_scale, batch, heads_kv, tokens_k));
    GK_TRY(take_mean(io, a->v_mean, batch, heads_kv, f->v.shape[x->ndim - 1]));
    GK_REQUIRE((int)a->accumulate >= 0 && a->accumulate <= GK_ATTN_PRECISE,
               "accumulate is %d, expected a gk_attn_accumulate", (int)a->accumulate);
    int64_t shape[GK_MAX_DIMS];
    out_shape(f, shape);
    gk_give(io, "out", &f->out, dtype, f->q.ndim, shape, GK_DENSE_LAST);
    gk_give(io, "lse", &f->lse, GK_F32, f->q.ndim - 1, shape, GK_CONTIGUOUS)->optional = true;
    return GK_OK;
}

/* ---- cost ------------------------------------------------------------------------------------ */
/* Number of keys that each row sees, summed over rows and sequences. Contents of packed calls
 * must have been checked. Index tensors on a GPU are not read: kv_start then counts as 0, kv_end
 * as Sk and q_start as Sk - Sq, and packed sequences count as equally long. */
static double visible_pairs(const gk_context *ctx, const gk_flash_attn_args *f) {
    const bool is_packed = f->cu_seqlens_q != NULL, readable = ctx->device == GK_CPU;
    const int64_t batch = batch_of(f);
    double pairs = 0;
    for (int64_t b = 0; b < batch; ++b) {
        int64_t seq_q = is_packed ? 0 : f->q.shape[2], seq_k = is_packed ? 0 : f->k.shape[2],
                diagonal = f->rules.diagonal;
        if (is_packed && !readable) {
            seq_q = gk_ceil_div(f->q.shape[0], batch);
            seq_k = gk_ceil_div(f->k.shape[0], batch);
            diagonal = seq_k - seq_q;
        } else if (is_packed) {
            const int32_t *cq = f->cu_seqlens_q->data, *ck = f->cu_seqlens_k->data;
            const int64_t sq = f->cu_seqlens_q->stride[0], sk = f->cu_seqlens_k->stride[0];
            seq_q = cq[(b + 1) * sq] - cq[b * sq];
            seq_k = ck[(b + 1) * sk] - ck[b * sk];
            diagonal = seq_k - seq_q;
        } else if (f->rules.q_start) {
            diagonal = readable ? gk_i32_at(f->rules.q_start, b) : seq_k - seq_q;
        }
        gk_span span = gk_span_make(&f->rules, seq_k, diagonal);
        if (readable) gk_span_cut(&span, &f->rules, b);
        for (int64_t i = 0; i < seq_q; ++i)
            pairs += (double)gk_max_i64(0, gk_span_hi(&span, i) - gk_span_lo(&span, i));
    }
    return pairs;
}

/* Each pair of a query and a key that meet costs `q_flops` FLOPs a column of q and `v_flops` a
 * column of v. */
static void attn_cost(const gk_context *ctx, const gk_flash_attn_args *f, double q_flops,
                      double v_flops, gk_explanation *out) {
    const int last = f->q.ndim - 1;
    out->bytes = gk_tensor_bytes(&f->q) + gk_tensor_bytes(&f->k) + gk_tensor_bytes(&f->v) +
                 gk_tensor_bytes(&f->out) + gk_tensor_bytes(&f->lse);
    out->flops = visible_pairs(ctx, f) * (double)f->q.shape[1] *
                 (q_flops * (double)f->q.shape[last] + v_flops * (double)f->v.shape[last]);
}

void gk_cost_flash_attn_fwd(const gk_context *ctx, const gk_flash_attn_args *args,
                            gk_explanation *out) {
    attn_cost(ctx, args, 2, 2, out);
}

void gk_cost_flash_attn_fp8(const gk_context *ctx, const gk_flash_attn_fp8_args *args,
                            gk_explanation *out) {
    attn_cost(ctx, &args->fwd, 2, 2, out);
}

void gk_cost_flash_attn_bwd(const gk_context *ctx, const gk_flash_attn_bwd_args *args,
                            gk_explanation *out) {
    /* scores, dq and dk have q's columns; dp and dv have v's */
    attn_cost(ctx, &args->fwd, 6, 4, out);
    out->bytes += gk_tensor_bytes(&args->grad_out) + gk_tensor_bytes(&args->dq) +
                  gk_tensor_bytes(&args->dk) + gk_tensor_bytes(&args->dv);
}
