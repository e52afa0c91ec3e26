/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_attn: the checks and the costs of gk_paged_attn, gk_kv_cache_write and gk_rope_kv_write,
 * and gk_kv_cache_write_latent, which is a kv_cache_write of two parts of each row. */
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "../core/latent.h"
#include "../core/paged.h"

/* ---- checks ---------------------------------------------------------------------------------- */
/* Writes into the cache accept the head_dims that paged_attn reads on the CPU, on every device. On
 * CUDA paged_attn accepts multiples of 8 only. */
static const gk_device WRITES = GK_CPU;

/* A cache has the dtype of `first` or an 8-bit dtype. If k_cache is 8-bit, v_cache must have the
 * same dtype. */
static gk_status check_cache_dtype(gk_io *io, const char *name, const gk_tensor *cache,
                                   const char *first_name, const gk_tensor *first,
                                   const gk_tensor *k_cache) {
    const gk_dtype dtype = cache->dtype;
    if (gk_is_code(k_cache->dtype) && k_cache != cache)
        return gk_check_same_dtype(io, name, cache, "k_cache", k_cache);
    const bool latent =
        dtype == GK_U8 && cache->ndim > 0 && cache->shape[cache->ndim - 1] == GK_LATENT_BYTES;
    GK_REQUIRE(dtype != GK_U8,
               "%s has dtype uint8, expected %s, float8_e4m3fn, float8_e5m2 or int8%s", name,
               io->dtype_name(first->dtype),
               latent ? "; latents in rows of 656 bytes are read with latent_format=\"fp8_656\" of "
                        "paged_attn and written by kv_cache_write_latent"
                      : gk_bytes_hint(dtype));
    if (k_cache != cache || (dtype != GK_E4M3 && dtype != GK_E5M2 && dtype != GK_I8))
        return gk_check_same_dtype(io, name, cache, first_name, first);
    return GK_OK;
}

/* Checks the caches of an op. The op's argument `name`, [T, H, D], sets dtype and head_dim. */
static gk_status check_caches(const gk_context *ctx, gk_io *io, const char *name,
                              const gk_tensor *first, const gk_tensor *k_cache,
                              const gk_tensor *v_cache, bool written) {
    const gk_strides strides = written ? GK_ANY_STRIDES : GK_DENSE_LAST;
    GK_TRY(gk_take(io, "k_cache", k_cache, strides));
    if (written) gk_taken_is_written(io);
    GK_TRY(check_cache_dtype(io, "k_cache", k_cache, name, first, k_cache));
    GK_TRY(gk_check_dims("k_cache", k_cache, 4, "[num_blocks, block_size, Hkv, D]"));
    GK_TRY(gk_check_same("k_cache", "head_dim", k_cache->shape[3], name, first->shape[2]));
    GK_REQUIRE(k_cache->shape[1] > 0, "k_cache has block_size 0; it must be 1 or more");
    GK_TRY(gk_take(io, "v_cache", v_cache, strides));
    if (written) gk_taken_is_written(io);
    GK_TRY(check_cache_dtype(io, "v_cache", v_cache, name, first, k_cache));
    GK_TRY(gk_check_dims("v_cache", v_cache, 4, "[num_blocks, block_size, Hkv, Dv]"));
    GK_TRY(gk_check_same("v_cache", "num_blocks", v_cache->shape[0], "k_cache", k_cache->shape[0]));
    GK_TRY(gk_check_same("v_cache", "block_size", v_cache->shape[1], "k_cache", k_cache->shape[1]));
    GK_TRY(gk_check_same("v_cache", "heads", v_cache->shape[2], "k_cache", k_cache->shape[2]));
    return gk_check_cache_head_dim("v_cache", written ? WRITES : ctx->device, v_cache->shape[3]);
}

/* Checks the strides of latents in 8 bits. Kernels read 16 bytes at once. */
static gk_status check_latent_rows(const gk_io *io, const char *name, const gk_tensor *cache) {
    GK_REQUIRE(cache->ndim == 4 && cache->shape[2] == 1 && cache->shape[3] == GK_LATENT_BYTES,
               "%s of uint8 must have shape [num_blocks, block_size, 1, %d], got %s", name,
               GK_LATENT_BYTES, gk_text_of(cache->ndim, cache->shape).text);
    GK_REQUIRE(cache->shape[1] > 0, "%s has block_size 0; it must be 1 or more", name);
    if (gk_numel(cache) == 0) return GK_OK;
    GK_REQUIRE(cache->stride[3] == 1, "%s has stride %lld in its last dimension, expected 1", name,
               (long long)cache->stride[3]);
    bool aligned = io->depth == GK_SHAPES || (uintptr_t)cache->data % 16 == 0;
    for (int d = 0; d < 2; ++d) aligned &= cache->shape[d] == 1 || cache->stride[d] % 16 == 0;
    GK_REQUIRE(aligned, "%s has rows that do not begin at multiples of 16 bytes", name);
    return GK_OK;
}

/* Checks the caches of latents in 8 bits, GK_PAGED_LATENT_FP8. */
static gk_status check_latent_caches(gk_io *io, const gk_paged_attn_args *p) {
    const gk_tensor *q = &p->q, *k_cache = &p->k_cache, *v_cache = &p->v_cache;
    GK_REQUIRE(q->shape[2] == GK_CACHE_HEAD_DIM,
               "q has head_dim %lld, latent_format fp8_656 expects %d", (long long)q->shape[2],
               GK_CACHE_HEAD_DIM);
    GK_TRY(gk_take(io, "k_cache", k_cache, GK_DENSE_LAST));
    GK_REQUIRE(k_cache->dtype == GK_U8, "k_cache has dtype %s, latent_format fp8_656 expects uint8",
               io->dtype_name(k_cache->dtype));
    GK_TRY(check_latent_rows(io, "k_cache", k_cache));
    GK_TRY(gk_take(io, "v_cache", v_cache, GK_DENSE_LAST));
    GK_REQUIRE(v_cache->ndim == 4 && v_cache->shape[3] == GK_LATENT_DIM && gk_is_latent(p),
               "v_cache must be k_cache[..., :%d] with latent_format fp8_656, got %s of dtype %s",
               GK_LATENT_DIM, gk_text_of(v_cache->ndim, v_cache->shape).text,
               io->dtype_name(v_cache->dtype));
    for (int d = 0; d < 3; ++d)
        GK_REQUIRE(v_cache->shape[d] == k_cache->shape[d],
                   "v_cache must be k_cache[..., :%d] with latent_format fp8_656, got %s",
                   GK_LATENT_DIM, gk_text_of(4, v_cache->shape).text);
    GK_REQUIRE(!p->k_scale && !p->v_scale,
               "%s is given with latent_format fp8_656, whose rows hold their scales; leave it out",
               p->k_scale ? "k_scale" : "v_scale");
    return GK_OK;
}

/* A scale is [] or [Hkv]. For 8-bit caches it may be float32 whatever the dtype, and also
 * [num_blocks, Hkv]. */
static gk_status take_scale(gk_io *io, const char *name, const gk_tensor *t, gk_dtype dtype,
                            const gk_tensor *cache) {
    if (!t) return GK_OK;
    const int64_t heads_kv = cache->shape[2], by_page[2] = {cache->shape[0], heads_kv};
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    if (gk_is_code(cache->dtype)) {
        GK_TRY(gk_check_dtypes(io, name, t, GK_F32, gk_stats_dtype(dtype)));
        GK_REQUIRE(t->ndim != 2 || (t->shape[0] == by_page[0] && t->shape[1] == by_page[1]),
                   "%s must have shape [], [Hkv] or [num_blocks, Hkv], here %s, got %s; a scale of "
                   "a sequence is written "
                   "to each of its pages",
                   name, gk_text_of(2, by_page).text, gk_text_of(2, t->shape).text);
        if (t->ndim == 2) return GK_OK;
    } else {
        GK_TRY(gk_check_dtype(io, name, t, gk_stats_dtype(dtype)));
    }
    GK_REQUIRE(t->ndim == 0 || (t->ndim == 1 && t->shape[0] == heads_kv),
               "%s must have shape [] or %s, got %s", name, gk_text_of(1, &heads_kv).text,
               gk_text_of(t->ndim, t->shape).text);
    return GK_OK;
}

/* With a mask over new tokens, CUDA serves short sequences whatever the windows are. */
static bool sees_to_the_right(const gk_paged_attn_args *p) {
    return !gk_paged_mask_of(p) && !p->rules.is_causal &&
           !(p->flags & GK_PAGED_WINDOW_RIGHT && p->rules.window_right == 0);
}

/* Checks a mask over new tokens, [T, S] or [B, S, S]. */
static gk_status take_new_mask(const gk_context *ctx, gk_io *io, const gk_paged_attn_args *p,
                               int64_t tokens, int64_t batch) {
    const gk_tensor *mask = gk_paged_mask_of(p);
    if (!mask) return GK_OK;
    GK_TRY(gk_take(io, "attn_mask", mask, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "attn_mask", mask, GK_U8));
    GK_REQUIRE(mask->ndim == 2 || mask->ndim == 3,
               "attn_mask must have shape [T, S] or [B, S, S], got %s",
               gk_text_of(mask->ndim, mask->shape).text);
    const int64_t columns = mask->shape[mask->ndim - 1];
    if (mask->ndim == 2)
        GK_REQUIRE(mask->shape[0] == tokens, "attn_mask must be [T, S] with T = %lld, got %s",
                   (long long)tokens, gk_text_of(2, mask->shape).text);
    else
        GK_REQUIRE(mask->shape[0] == batch && mask->shape[1] == columns,
                   "attn_mask must be [B, S, S] with B = %lld, got %s", (long long)batch,
                   gk_text_of(3, mask->shape).text);
    /* tokens is a multiple of batch here */
    const int64_t each = batch ? tokens / batch : 0;
    if (p->cu_seqlens_q)
        GK_REQUIRE(columns >= p->max_seqlen_q,
                   "attn_mask has %lld columns, max_seqlen_q is %lld; it needs a column for each "
                   "new token of a sequence",
                   (long long)columns, (long long)p->max_seqlen_q);
    else
        GK_REQUIRE(mask->ndim == 2 ? columns >= each : columns == each,
                   "attn_mask has %lld columns, the %lld sequences have %lld tokens; [T, S] needs "
                   "at least a column for each new token of a sequence, and [B, S, S] as many",
                   (long long)columns, (long long)batch, (long long)tokens);
    GK_REQUIRE(!p->rules.is_causal, "is_causal is 1 with attn_mask, which replaces it; set 0");
    GK_REQUIRE(ctx->device == GK_CPU || !p->rules.alibi_slopes,
               "alibi_slopes is given with attn_mask on CUDA, where no kernel serves both");
    return GK_OK;
}

gk_status gk_check_paged_attn(const gk_context *ctx, const gk_paged_attn_args *p, gk_io *io) {
    const gk_tensor *q = &p->q;
    GK_TRY(gk_take(io, "q", q, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, "q", q));
    GK_TRY(gk_check_dims("q", q, 3, "[T, Hq, D]"));
    GK_TRY(gk_check_cache_head_dim("q", ctx->device, q->shape[2]));
    if (p->flags & GK_PAGED_LATENT_FP8)
        GK_TRY(check_latent_caches(io, p));
    else
        GK_TRY(check_caches(ctx, io, "q", q, &p->k_cache, &p->v_cache, false));
    const int64_t tokens = q->shape[0], heads_q = q->shape[1], heads_kv = p->k_cache.shape[2];
    GK_TRY(gk_check_heads(heads_q, "k_cache", heads_kv));
    GK_TRY(gk_take(io, "block_table", &p->block_table, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "block_table", &p->block_table, GK_I32));
    GK_TRY(gk_check_dims("block_table", &p->block_table, 2, "[B, max_blocks]"));
    const int64_t batch = p->block_table.shape[0], columns = p->block_table.shape[1],
                  block_size = p->k_cache.shape[1];
    GK_TRY(gk_take_index(io, "seq_lens", &p->seq_lens, batch));
    GK_TRY(gk_take_index(io, "cu_seqlens_q", p->cu_seqlens_q, batch + 1));
    if (p->cu_seqlens_q) {
        GK_TRY(gk_check_not_negative("max_seqlen_q", p->max_seqlen_q));
    } else {
        GK_REQUIRE(batch ? tokens % batch == 0 : tokens == 0,
                   "q has %lld tokens, block_table has %lld sequences; without cu_seqlens_q the "
                   "tokens must be a "
                   "multiple of them",
                   (long long)tokens, (long long)batch);
    }
    GK_REQUIRE(p->flags <= (GK_PAGED_WINDOW_RIGHT | GK_PAGED_ALLOW_SHORT |
                            GK_PAGED_BATCH_INVARIANT | GK_PAGED_LATENT_FP8),
               "flags is %u, expected gk_paged_flags", (unsigned)p->flags);
    GK_REQUIRE(!(p->flags & GK_PAGED_ALLOW_SHORT) || ctx->device == GK_CPU || !sees_to_the_right(p),
               "allow_short on CUDA needs is_causal or window_right=0");
    GK_TRY(gk_check_rules(io, &p->rules, q, batch, heads_q));
    GK_TRY(take_scale(io, "k_scale", p->k_scale, q->dtype, &p->k_cache));
    GK_TRY(take_scale(io, "v_scale", p->v_scale, q->dtype, &p->k_cache));
    GK_TRY(gk_take_index(io, "kv_start", p->rules.kv_start, batch));
    GK_TRY(take_new_mask(ctx, io, p, tokens, batch));
    GK_TRY(gk_check_tokens("q", ctx, tokens));
    GK_TRY(gk_check_product("sequences, heads and tokens", batch, heads_q,
                            p->cu_seqlens_q ? gk_min_i64(p->max_seqlen_q, tokens) : 1));
    GK_TRY(gk_check_product("sequences, columns of block_table and block_size", batch, columns,
                            block_size));
    GK_TRY(gk_check_tokens("block_table", ctx, columns * block_size));
    if (gk_reads_contents(io, ctx)) GK_TRY(gk_check_paged_contents(p));
    const int64_t shape[3] = {tokens, heads_q, p->v_cache.shape[3]};
    gk_give(io, "out", &p->out, q->dtype, 3, shape, GK_CONTIGUOUS);
    gk_give(io, "lse", &p->lse, gk_stats_dtype(q->dtype), 2, shape, GK_CONTIGUOUS)->optional = true;
    return GK_OK;
}

/* Refuses caches whose elements overlap each other or an input that is read. The first `behind`
 * inputs (k and v among them) are exempt: they may overlap the caches. The caller must copy them
 * if a written row is part of them. */
static gk_status check_written(const gk_io *io, int behind) {
    if (io->depth == GK_SHAPES) return GK_OK;
    for (int i = 0; i < io->num_inputs; ++i) {
        const gk_input *cache = &io->input[i];
        if (!cache->written) continue;
        for (int d = 0; d < cache->tensor->ndim; ++d)
            GK_REQUIRE(cache->tensor->shape[d] <= 1 || cache->tensor->stride[d] != 0,
                       "%s has stride 0 in dimension %d; its elements must not share memory",
                       cache->name, d);
        for (int n = behind; n < io->num_inputs; ++n) {
            if (n == i || !gk_shares_memory(io->input[n].tensor, cache->tensor)) continue;
            GK_REQUIRE(!io->input[n].written, "v_cache overlaps k_cache; they may be views of one "
                                              "tensor but must not share memory");
            return gk_fail(GK_ERR_ARGUMENT,
                           "%s shares memory with %s; it must not, since %s is written",
                           io->input[n].name, cache->name, cache->name);
        }
    }
    return GK_OK;
}

gk_status gk_check_kv_cache_write(const gk_context *ctx, const gk_kv_cache_write_args *w,
                                  gk_io *io) {
    const gk_tensor *k = &w->k, *v = &w->v;
    GK_TRY(gk_take(io, "k", k, GK_ANY_STRIDES));
    GK_TRY(gk_check_float(io, "k", k));
    GK_TRY(gk_check_dims("k", k, 3, "[T, Hkv, D]"));
    const int64_t tokens = k->shape[0], heads_kv = k->shape[1];
    GK_TRY(gk_check_cache_head_dim("k", WRITES, k->shape[2]));
    GK_TRY(gk_take(io, "v", v, GK_ANY_STRIDES));
    GK_TRY(gk_check_same_dtype(io, "v", v, "k", k));
    GK_TRY(gk_check_dims("v", v, 3, "[T, Hkv, Dv]"));
    GK_TRY(gk_check_same("v", "tokens", v->shape[0], "k", tokens));
    GK_TRY(gk_check_same("v", "heads", v->shape[1], "k", heads_kv));
    GK_TRY(check_caches(ctx, io, "k", k, &w->k_cache, &w->v_cache, true));
    GK_TRY(gk_check_same("k_cache", "heads", w->k_cache.shape[2], "k", heads_kv));
    GK_TRY(gk_check_same("v_cache", "head_dim", w->v_cache.shape[3], "v", v->shape[2]));
    GK_TRY(gk_take(io, "slots", &w->slots, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, "slots", &w->slots, GK_I64, GK_I32));
    GK_TRY(gk_check_length_of("slots", &w->slots, tokens));
    GK_TRY(take_scale(io, "k_scale", w->k_scale, k->dtype, &w->k_cache));
    GK_TRY(take_scale(io, "v_scale", w->v_scale, k->dtype, &w->k_cache));
    GK_TRY(check_written(io, 2));
    return gk_reads_contents(io, ctx) ? gk_check_slots(w) : GK_OK;
}

gk_status gk_check_kv_cache_write_latent(const gk_context *ctx, const gk_kv_cache_write_args *w,
                                         gk_io *io) {
    const gk_tensor *c = &w->k, *k_pe = &w->v, *cache = &w->k_cache;
    GK_TRY(gk_take(io, "c", c, GK_ANY_STRIDES));
    GK_TRY(gk_check_float(io, "c", c));
    GK_TRY(gk_check_dims("c", c, 3, "[T, 1, 512]"));
    const int64_t tokens = c->shape[0], c_shape[3] = {tokens, 1, GK_LATENT_DIM},
                  k_pe_shape[3] = {tokens, 1, GK_LATENT_ROPE};
    GK_TRY(gk_check_shape("c", c, 3, c_shape));
    GK_TRY(gk_take(io, "k_pe", k_pe, GK_ANY_STRIDES));
    GK_TRY(gk_check_same_dtype(io, "k_pe", k_pe, "c", c));
    GK_TRY(gk_check_shape("k_pe", k_pe, 3, k_pe_shape));
    GK_TRY(gk_take(io, "cache", cache, GK_ANY_STRIDES));
    gk_taken_is_written(io);
    if (cache->dtype == GK_U8) {
        GK_REQUIRE(c->dtype != GK_F64,
                   "c must be float32, bfloat16 or float16 for a cache of uint8, got float64");
        GK_TRY(check_latent_rows(io, "cache", cache));
    } else {
        GK_REQUIRE(cache->dtype == c->dtype,
                   "cache has dtype %s, expected %s, or uint8 for latents "
                   "in rows of 656 bytes",
                   io->dtype_name(cache->dtype), io->dtype_name(c->dtype));
        GK_REQUIRE(cache->ndim == 4 && cache->shape[2] == 1 && cache->shape[3] == GK_CACHE_HEAD_DIM,
                   "cache must have shape [num_blocks, block_size, 1, %d], got %s",
                   GK_CACHE_HEAD_DIM, gk_text_of(cache->ndim, cache->shape).text);
        GK_REQUIRE(cache->shape[1] > 0, "cache has block_size 0; it must be 1 or more");
    }
    GK_TRY(gk_take(io, "slots", &w->slots, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, "slots", &w->slots, GK_I64, GK_I32));
    GK_TRY(gk_check_length_of("slots", &w->slots, tokens));
    GK_TRY(check_written(io, 2));
    if (!gk_reads_contents(io, ctx)) return GK_OK;
    gk_kv_cache_write_args parts = *w;
    gk_latent_parts(&parts);
    return gk_check_slots(&parts);
}

static gk_status write_latent(const gk_context *ctx, const gk_kv_cache_write_args *args) {
    gk_io io;
    gk_io_begin(&io, GK_CONTENTS);
    GK_REQUIRE(args, "args is NULL");
    GK_TRY(gk_check_context(ctx, args->size, sizeof *args));
    GK_TRY(gk_check_kv_cache_write_latent(ctx, args, &io));
    gk_kv_cache_write_args parts = *args;
    gk_latent_parts(&parts);
    return gk_dispatch_call(ctx, GK_OP_KV_CACHE_WRITE, parts.k.dtype, &parts, NULL, 0);
}

gk_status gk_kv_cache_write_latent(const gk_context *ctx, const gk_kv_cache_write_args *args) {
    return gk_named("gk_kv_cache_write_latent", write_latent(ctx, args));
}

gk_status gk_check_rope_kv_write(const gk_context *ctx, const gk_rope_kv_write_args *a, gk_io *io) {
    const gk_tensor *q = &a->q, *k = &a->k, *v = &a->v;
    GK_TRY(gk_take(io, "q", q, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, "q", q));
    GK_TRY(gk_check_dims("q", q, 3, "[T, Hq, D]"));
    const int64_t tokens = q->shape[0], head_dim = q->shape[2];
    GK_TRY(gk_check_cache_head_dim("q", WRITES, head_dim));
    GK_TRY(gk_take(io, "k", k, GK_DENSE_LAST));
    GK_TRY(gk_check_same_dtype(io, "k", k, "q", q));
    GK_TRY(gk_check_dims("k", k, 3, "[T, Hkv, D]"));
    GK_TRY(gk_check_same("k", "tokens", k->shape[0], "q", tokens));
    GK_TRY(gk_check_same("k", "head_dim", k->shape[2], "q", head_dim));
    GK_TRY(gk_take(io, "v", v, GK_DENSE_LAST));
    GK_TRY(gk_check_same_dtype(io, "v", v, "q", q));
    GK_TRY(gk_check_dims("v", v, 3, "[T, Hkv, Dv]"));
    GK_TRY(gk_check_same("v", "tokens", v->shape[0], "q", tokens));
    GK_TRY(gk_check_same("v", "heads", v->shape[1], "k", k->shape[1]));
    GK_TRY(gk_take_cos_sin(io, &a->cos, &a->sin, q->dtype, head_dim));
    GK_TRY(gk_take(io, "positions", &a->positions, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, "positions", &a->positions, GK_I64, GK_I32));
    GK_TRY(gk_check_length_of("positions", &a->positions, tokens));
    GK_REQUIRE(a->cos.shape[0] > 0 || tokens == 0, "cos has no rows");
    GK_TRY(check_caches(ctx, io, "k", k, &a->k_cache, &a->v_cache, true));
    GK_TRY(gk_check_same("k_cache", "heads", a->k_cache.shape[2], "k", k->shape[1]));
    GK_TRY(gk_check_same("v_cache", "head_dim", a->v_cache.shape[3], "v", v->shape[2]));
    GK_TRY(gk_take(io, "slots", &a->slots, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, "slots", &a->slots, GK_I64, GK_I32));
    GK_TRY(gk_check_length_of("slots", &a->slots, tokens));
    GK_TRY(gk_take_vector(io, "q_weight", a->q_weight, q));
    GK_TRY(gk_take_vector(io, "k_weight", a->k_weight, k));
    GK_REQUIRE(isfinite(a->eps) && a->eps >= 0, "eps must be a finite number of at least 0, got %g",
               a->eps);
    GK_TRY(take_scale(io, "k_scale", a->k_scale, q->dtype, &a->k_cache));
    GK_TRY(take_scale(io, "v_scale", a->v_scale, q->dtype, &a->k_cache));
    GK_TRY(check_written(io, 3));
    gk_give(io, "out_q", &a->out_q, q->dtype, 3, q->shape, GK_DENSE_LAST);
    if (!gk_reads_contents(io, ctx)) return GK_OK;
    const gk_rope_args angles = {.cos = a->cos, .positions = &a->positions};
    const gk_kv_cache_write_args write = {
        .k_cache = a->k_cache, .slots = a->slots, .k_scale = a->k_scale, .v_scale = a->v_scale};
    GK_TRY(gk_check_positions(&angles));
    return gk_check_slots(&write);
}

/* ---- cost ------------------------------------------------------------------------------------ */
void gk_cost_paged_attn(const gk_context *ctx, const gk_paged_attn_args *args,
                        gk_explanation *out) {
    const int64_t batch = args->seq_lens.shape[0], heads_kv = args->k_cache.shape[2];
    const double dims = (double)(args->q.shape[2] + args->v_cache.shape[3]);
    /* a latent cache holds the values within the keys */
    const double row = gk_is_latent(args) ? (double)args->k_cache.shape[3] : dims;
    double keys = 0, pairs = 0;
    for (int64_t b = 0; b < batch; ++b) {
        /* lengths on a GPU are not read; every sequence then counts with all keys of its row of
         * block_table */
        const bool readable = ctx->device == GK_CPU;
        const int64_t len =
            readable ? ((const int32_t *)args->seq_lens.data)[b * args->seq_lens.stride[0]]
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
        for (int64_t i = 0; i < n; ++i)
            pairs += (double)gk_max_i64(0, gk_span_hi(&span, i) - gk_span_lo(&span, i));
    }
    out->bytes = keys * (double)heads_kv * row * (double)gk_dtype_bytes(args->k_cache.dtype) +
                 gk_tensor_bytes(&args->q) + gk_tensor_bytes(&args->out) +
                 gk_tensor_bytes(&args->lse);
    out->flops = 2 * pairs * (double)args->q.shape[1] * dims;
}

void gk_cost_kv_cache_write(const gk_context *ctx, const gk_kv_cache_write_args *args,
                            gk_explanation *out) {
    (void)ctx;
    const double read = gk_tensor_bytes(&args->k) + gk_tensor_bytes(&args->v);
    const double written =
        (double)gk_dtype_bytes(args->k_cache.dtype) / (double)gk_dtype_bytes(args->k.dtype);
    out->bytes = read * (1 + written) + gk_tensor_bytes(&args->slots);
    out->flops = 0;
}

void gk_cost_rope_kv_write(const gk_context *ctx, const gk_rope_kv_write_args *a,
                           gk_explanation *out) {
    (void)ctx;
    const double written =
        (double)gk_dtype_bytes(a->k_cache.dtype) / (double)gk_dtype_bytes(a->k.dtype);
    out->bytes = 2 * gk_tensor_bytes(&a->q) +
                 (1 + written) * (gk_tensor_bytes(&a->k) + gk_tensor_bytes(&a->v)) +
                 gk_tensor_bytes(&a->positions) + gk_tensor_bytes(&a->slots);
    const double heads = (double)a->q.shape[0] * (double)(a->q.shape[1] + a->k.shape[1]);
    out->flops = 6 * heads * (double)a->cos.shape[1];
}
