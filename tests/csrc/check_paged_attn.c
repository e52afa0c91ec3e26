/* SPDX-License-Identifier: BSD-3-Clause */
/* check_paged_attn: compares gk_paged_attn, gk_kv_cache_write and gk_attn_merge of every
 * instruction set with csrc/ref. Every page and every row of a page that no query reads is NaN;
 * table entries that are not read are -7.
 *
 * size of out: sum_j p_j |v_j|
 * loss, as in check_flash_attn: the logits have the error u(float32) (8 + 2 sqrt D) max |logit|,
 * which changes p by twice that; u(dtype) for probabilities in 16 bits; u(float32) (32 + 2
 * sqrt(keys)) for sums. */
#include "check.h"

static int num_isas;
static const gk_dtype dtypes[] = {GK_F32, GK_BF16, GK_F16, GK_F64};

enum {
    MAX_BATCH = 8
};

typedef struct paged_case {
    gk_dtype dtype;
    int64_t batch, heads_q, heads_kv, head_dim, head_dim_v, block_size;
    int64_t seq_q[MAX_BATCH], seq_lens[MAX_BATCH];
    bool ragged;      /* cu_seqlens_q is given; otherwise seq_q[0] tokens each */
    bool heads_first; /* the cache is stored as [num_blocks, Hkv, block_size, D] */
    bool shared;      /* sequences share their first pages */
    /* own_sinks: in dtype; kv_start: those of start_of */
    bool not_causal, sinks, own_sinks, kv_start;
    /* 0 none, 1 per head ([] for scales), 2 [B, Hq] ([Hkv] for scales) */
    int alibi, k_scale, v_scale;
    int64_t window_left, window_right; /* window_right is only read if flags say so */
    uint32_t flags;
    double softcap, sharpness; /* sharpness: scale in units of 1 / sqrt(head_dim) */
} paged_case;

/* ---- inputs ---------------------------------------------------------------------------------- */
/* kv_start: in front of the keys, among them, among the queries, behind them. */
static int64_t start_of(const paged_case *x, int64_t b) {
    const int64_t starts[] = {-3, x->seq_lens[b] / 2, x->seq_lens[b] - 1, x->seq_lens[b] + 1, 17};
    return x->kv_start ? starts[(b + x->seq_q[0]) % CHECK_COUNT(starts)] : 0;
}

static int64_t first_key(const paged_case *x, int64_t b) {
    const int64_t start = gk_clamp_i64(start_of(x, b), 0, x->seq_lens[b]);
    if (x->window_left < 0) return start;
    return gk_max_i64(start, x->seq_lens[b] - x->seq_q[b] - x->window_left);
}

static bool in_use(const paged_case *x, int64_t b) { return x->seq_q[b] > 0 && x->seq_lens[b] > 0; }

static check_tensor make_cache(const paged_case *x, int64_t num_blocks, int64_t dim) {
    static const int heads_first[4] = {0, 2, 1, 3};
    int64_t shape[4] = {num_blocks, x->block_size, x->heads_kv, dim};
    return check_tensor_make(x->dtype, 4, shape, x->heads_first ? heads_first : NULL, 1, 3);
}

/* Draws one row of keys or values of a page, unless an earlier sequence has drawn it. */
static void fill_row(const check_tensor *cache, int64_t page, int64_t row) {
    const gk_tensor *t = &cache->t;
    for (int64_t h = 0; h < t->shape[2]; ++h) {
        int64_t at = page * t->stride[0] + row * t->stride[1] + h * t->stride[2];
        if (!isnan(gk_load(t->data, t->dtype, at))) continue;
        for (int64_t e = 0; e < t->shape[3]; ++e)
            gk_store(t->data, t->dtype, at + e, check_normal());
    }
}

/* Pages are in random order. With `shared` the entries before the shortest sequence's last page
 * are the same pages for all sequences. */
static void fill_pages(const paged_case *x, const check_tensor *table, const check_tensor *k,
                       const check_tensor *v) {
    int64_t num_blocks = k->t.shape[0], max_blocks = table->t.shape[1], shortest = INT64_MAX,
            next = 0;
    int64_t *pages = check_alloc((size_t)num_blocks * sizeof(int64_t));
    for (int64_t p = 0; p < num_blocks; ++p) pages[p] = p;
    for (int64_t p = num_blocks - 1; p > 0; --p) {
        int64_t q = check_below(p + 1), t = pages[p];
        pages[p] = pages[q];
        pages[q] = t;
    }
    for (int64_t b = 0; b < x->batch; ++b) {
        if (in_use(x, b)) shortest = gk_min_i64(shortest, (x->seq_lens[b] - 1) / x->block_size);
    }
    for (int64_t b = 0; b < x->batch; ++b) {
        for (int64_t e = 0; e < max_blocks; ++e) {
            bool common = x->shared && e < shortest && shortest != INT64_MAX;
            int64_t page = common ? pages[e] : pages[max_blocks + next++];
            bool read = in_use(x, b) && e >= first_key(x, b) / x->block_size &&
                        e * x->block_size < x->seq_lens[b];
            check_set(&table->t, b * max_blocks + e, read ? (double)page : -7);
            for (int64_t r = 0; read && r < x->block_size; ++r) {
                int64_t key = e * x->block_size + r;
                if (key < first_key(x, b) || key >= x->seq_lens[b]) continue;
                fill_row(k, page, r);
                fill_row(v, page, r);
            }
        }
    }
}

static check_tensor make_scale(gk_dtype stats, int kind, int64_t heads_kv) {
    check_tensor scale = check_tensor_make(stats, kind == 2 ? 1 : 0, &heads_kv, NULL, 2, 0);
    for (int64_t i = 0; i < gk_numel(&scale.t); ++i) check_set(&scale.t, i, check_uniform(0.5, 2));
    return scale;
}

/* ---- one case -------------------------------------------------------------------------------- */
static void run_paged(const char *isa, int32_t num_threads, gk_paged_attn_args *args) {
    gk_context ctx = check_context(isa, num_threads);
    int mark = check_num_owned;
    check_workspace w = check_workspace_make(gk_paged_attn_workspace_bytes(&ctx, args));
    args->workspace = w.data;
    args->workspace_bytes = w.bytes;
    gk_status status = gk_paged_attn(&ctx, args);
    check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
    check_workspace_end(&w);
    gk_explanation e = {.size = sizeof e};
    if (gk_explain_paged_attn(&ctx, args, &e) == GK_OK) check_see(&e, w.bytes);
    check_free(mark);
}

static void describe(const paged_case *x) {
    char lengths[160] = "";
    for (int64_t b = 0; b < x->batch; ++b) {
        size_t used = strlen(lengths);
        snprintf(lengths + used, sizeof lengths - used, " %lld/%lld", (long long)x->seq_q[b],
                 (long long)x->seq_lens[b]);
    }
    snprintf(check_case, sizeof check_case,
             "paged_attn %s H %lld/%lld D %lld/%lld page %lld ragged %d heads_first %d shared %d "
             "causal %d window %lld cap %g sharpness %g"
             " alibi %d sinks %d own_sinks %d kv_start %d scales %d,%d rows/keys%s",
             gk_dtype_name(x->dtype), (long long)x->heads_q, (long long)x->heads_kv,
             (long long)x->head_dim, (long long)x->head_dim_v, (long long)x->block_size, x->ragged,
             x->heads_first, x->shared, !x->not_causal, (long long)x->window_left, x->softcap,
             x->sharpness, x->alibi, x->sinks, x->own_sinks, x->kv_start, x->k_scale, x->v_scale,
             lengths);
}

static void check_paged_case(paged_case *x) {
    /* 1. inputs */
    gk_dtype stats = gk_stats_dtype(x->dtype);
    int64_t tokens = x->ragged ? check_below(3) : 0, longest = 0, longest_q = 0,
            cu_shape = x->batch + 1;
    check_tensor cu = check_tensor_make(GK_I32, 1, &cu_shape, NULL, 2, 0);
    check_tensor seq_lens = check_tensor_make(GK_I32, 1, &x->batch, NULL, 2, 0);
    check_tensor kv_start = check_tensor_make(GK_I32, 1, &x->batch, NULL, 2, 0);
    int64_t start = 0;
    for (int64_t b = 0; b < x->batch; ++b) {
        if (!x->ragged) x->seq_q[b] = x->seq_q[0];
        if (x->seq_lens[b] > 0) x->seq_lens[b] = gk_max_i64(x->seq_lens[b], x->seq_q[b]);
        check_set(&cu.t, b, (double)start);
        check_set(&seq_lens.t, b, (double)x->seq_lens[b]);
        check_set(&kv_start.t, b, (double)start_of(x, b));
        start += x->seq_q[b];
        tokens += x->seq_q[b];
        longest = gk_max_i64(longest, x->seq_lens[b]);
        longest_q = gk_max_i64(longest_q, x->seq_q[b]);
    }
    check_set(&cu.t, x->batch, (double)start);
    describe(x);
    int64_t max_blocks = gk_ceil_div(longest, x->block_size) + check_below(2),
            num_blocks = (x->batch + 1) * max_blocks + 1;
    int64_t table_shape[2] = {x->batch, max_blocks}, q_shape[3] = {tokens, x->heads_q, x->head_dim};
    check_tensor table = check_tensor_make(GK_I32, 2, table_shape, NULL, 1, 2);
    check_tensor k = make_cache(x, num_blocks, x->head_dim),
                 v = make_cache(x, num_blocks, x->head_dim_v);
    check_tensor q = check_tensor_make(x->dtype, 3, q_shape, NULL, 1, 5);
    for (int64_t i = 0; i < start * x->heads_q * x->head_dim; ++i)
        check_set(&q.t, i, check_normal()); /* the rest stays NaN */
    fill_pages(x, &table, &k, &v);

    int64_t slopes_shape[2] = {x->batch, x->heads_q};
    check_tensor slopes = check_tensor_make(
        stats, x->alibi == 2 ? 2 : 1, x->alibi == 2 ? slopes_shape : slopes_shape + 1, NULL, 1, 1);
    check_tensor sinks = check_dense(x->own_sinks ? x->dtype : stats, 1, &x->heads_q);
    for (int64_t i = 0; i < gk_numel(&slopes.t); ++i)
        check_set(&slopes.t, i, check_uniform(0, 0.1));
    /* Some calls have sinks far below every score: the first times log2(e) overflows float32;
     * the rounding error of the second is above 2^127. */
    const double far[2] = {-3.3e38, -1e30};
    const bool sinks_far = check_below(8) == 0;
    for (int64_t h = 0; h < x->heads_q; ++h) {
        const double near = check_below(4) ? check_uniform(-3, 3) : -INFINITY;
        check_set(&sinks.t, h, sinks_far ? far[h % 2] : near);
    }
    check_tensor k_scale = make_scale(stats, x->k_scale, x->heads_kv),
                 v_scale = make_scale(stats, x->v_scale, x->heads_kv);
    gk_paged_attn_args args = {
        .size = sizeof args,
        .q = q.t,
        .k_cache = k.t,
        .v_cache = v.t,
        .block_table = table.t,
        .seq_lens = seq_lens.t,
        .cu_seqlens_q = x->ragged ? &cu.t : NULL,
        .max_seqlen_q = longest_q,
        .k_scale = x->k_scale ? &k_scale.t : NULL,
        .v_scale = x->v_scale ? &v_scale.t : NULL,
        .flags = x->flags,
        .rules = {.scale = x->sharpness / sqrt((double)x->head_dim),
                  .softcap = x->softcap,
                  .is_causal = !x->not_causal,
                  .diagonal = 77,
                  .window_left = x->window_left,
                  .window_right = x->window_right, /* neither is read unless flags say so */
                  .alibi_slopes = x->alibi ? &slopes.t : NULL,
                  .sinks = x->sinks ? &sinks.t : NULL,
                  .kv_start = x->kv_start ? &kv_start.t : NULL}};

    /* 2. exact result and sizes */
    gk_context serial = check_context(NULL, 1);
    int64_t out_shape[3] = {tokens, x->heads_q, x->head_dim_v};
    check_tensor exact = check_dense(GK_F64, 3, out_shape),
                 size = check_dense(GK_F64, 3, out_shape);
    check_tensor lse = check_dense(GK_F64, 2, out_shape),
                 lse_size = check_dense(GK_F64, 2, out_shape);
    check_tensor abs_v = check_map(&v, fabs);
    args.v_cache = abs_v.t;
    args.out = size.t;
    args.lse = lse.t;
    gk_ref_paged_attn(&serial, &args);
    args.v_cache = v.t;
    args.out = exact.t;
    gk_ref_paged_attn(&serial, &args);
    double max_logit = 1 + args.rules.scale * (x->k_scale ? 2 : 1) * check_longest_row(&q.t) *
                               check_longest_row(&k.t);
    if (x->alibi) max_logit += 0.1 * (double)longest;
    check_fill(&lse_size, max_logit);
    bool half = x->dtype == GK_BF16 || x->dtype == GK_F16;
    double u = check_acc_unit(x->dtype),
           logit_loss = u * (8 + 2 * sqrt((double)x->head_dim)) * max_logit;
    double loss = 2 * logit_loss + u * (32 + 2 * sqrt((double)longest)) +
                  (half ? 1.25 * check_unit(x->dtype) : 0);
    double lse_loss = (2 * logit_loss + 32 * u + (x->dtype == GK_BF16 ? 0x1p-17 : 0)) / max_logit;

    /* 3. the kernels */
    for (int i = 0; i < num_isas; ++i) {
        if (check_repeats(check_isa_names[i], x->dtype)) continue;
        int mark = check_num_owned;
        check_isa = check_isa_names[i];
        check_tensor out[2], got_lse[2];
        for (int w = 0; w < 2; ++w) {
            out[w] = check_dense(x->dtype, 3, out_shape);
            got_lse[w] = check_dense(stats, 2, out_shape);
            check_remember(&out[w]);
            check_remember(&got_lse[w]);
            args.out = out[w].t;
            args.lse = got_lse[w].t;
            run_paged(check_isa_names[i], w == 0 ? 1 : CHECK_WORKERS, &args);
            check_untouched(&out[w], "out");
            check_untouched(&got_lse[w], "lse");
        }
        check_close("out", &out[0].t, &exact.t, &size.t, loss);
        check_close("lse", &got_lse[0].t, &lse.t, &lse_size.t, lse_loss);
        check_result(check_same_bits(&out[0].t, &out[1].t) &&
                         check_same_bits(&got_lse[0].t, &got_lse[1].t),
                     "1 and %d workers differ", CHECK_WORKERS);
        check_free(mark);
    }

    /* 4. a mask over new tokens that says what the call without it sees */
    const int64_t mask_shape[2] = {tokens, longest_q + check_below(3)};
    check_tensor mask = check_tensor_make(GK_U8, 2, mask_shape, NULL, 1 + check_below(2), 1),
                 out = check_dense(x->dtype, 3, out_shape),
                 got_lse = check_dense(stats, 2, out_shape);
    for (int64_t b = 0, token = 0; b < x->batch; ++b)
        for (int64_t i = 0; i < x->seq_q[b]; ++i, ++token)
            for (int64_t j = 0; j < mask_shape[1]; ++j)
                check_set(&mask.t, token * mask_shape[1] + j, x->not_causal || j <= i);
    gk_paged_attn_masked_args masked = {.fwd = args, .attn_mask = &mask.t};
    masked.fwd.size = sizeof masked;
    masked.fwd.rules.is_causal = 0;
    masked.fwd.out = out.t;
    masked.fwd.lse = got_lse.t;
    check_isa = "masked";
    run_paged(check_isa_names[0], CHECK_WORKERS, &masked.fwd);
    check_close("out", &out.t, &exact.t, &size.t, loss);
    check_close("lse", &got_lse.t, &lse.t, &lse_size.t, lse_loss);
    check_free(0);
}

/* ---- grids ----------------------------------------------------------------------------------- */
static const int64_t page_sizes[] = {1, 3, 16, 64};

static paged_case decode(gk_dtype dtype, int64_t block_size) {
    return (paged_case){.dtype = dtype,
                        .batch = 1,
                        .heads_q = 2,
                        .heads_kv = 1,
                        .head_dim = 32,
                        .head_dim_v = 32,
                        .block_size = block_size,
                        .seq_q = {1},
                        .window_left = -1,
                        .sharpness = 1};
}

/* Keys of a context chunk, as explain reports them. */
static int64_t chunk_span(gk_dtype dtype) {
    int64_t shape[4] = {128, 64, 1, 32}, q_shape[3] = {1, 1, 32}, table_shape[2] = {1, 128},
            one = 1;
    check_tensor cache = check_dense(dtype, 4, shape), q = check_dense(dtype, 3, q_shape),
                 lse = check_dense(GK_F32, 2, q_shape);
    check_tensor table = check_dense(GK_I32, 2, table_shape),
                 seq_lens = check_dense(GK_I32, 1, &one);
    for (int64_t i = 0; i < 128; ++i) check_set(&table.t, i, (double)i);
    check_set(&seq_lens.t, 0, 128 * 64);
    gk_context ctx = check_context(NULL, 1);
    gk_explanation e = {.size = sizeof e};
    gk_paged_attn_args args = {
        .size = sizeof args,
        .q = q.t,
        .k_cache = cache.t,
        .v_cache = cache.t,
        .block_table = table.t,
        .seq_lens = seq_lens.t,
        .out = q.t,
        .lse = lse.t,
        .rules = {.scale = 1, .is_causal = 1, .window_left = -1, .window_right = -1}};
    if (dtype == GK_F64) args.lse.dtype = GK_F64; /* explained, not run */
    gk_status status = gk_explain_paged_attn(&ctx, &args, &e);
    check_result(status == GK_OK, "explain: %s", gk_last_error());
    check_free(0);
    return e.tile[2] > 0 ? e.tile[2] : 512;
}

/* Context lengths around pages, tiles and chunks with one query token and pages of every size. */
static void check_lengths(gk_dtype dtype) {
    snprintf(check_case, sizeof check_case, "paged_attn chunks of %s", gk_dtype_name(dtype));
    int64_t c = chunk_span(dtype);
    int64_t lengths[] = {0,  1,     2, 15,    16,    17,        63,       64,
                         65, c - 1, c, c + 1, 2 * c, 2 * c + 1, 3 * c - 1};
    for (int i = 0; i < CHECK_COUNT(lengths); i += check_small() ? 2 : 1) {
        for (int p = 0; p < CHECK_COUNT(page_sizes); p += check_small() ? 3 : 1) {
            check_seed = (uint64_t)(i * 8 + p) * 64 + dtype;
            paged_case x = decode(dtype, page_sizes[p]);
            x.seq_lens[0] = lengths[i];
            x.heads_first = (i + p) & 1;
            check_paged_case(&x);
            x.batch = 3; /* neighbours of other lengths; several query tokens across a boundary */
            x.seq_q[0] = 1 + check_below(5);
            x.seq_lens[1] = check_below(40);
            x.seq_lens[2] = lengths[(i + 4) % CHECK_COUNT(lengths)];
            check_paged_case(&x);
        }
    }
}

/* Keys to the right of a query, with and without a bound, and sequences with fewer keys than
 * query tokens. */
static void check_right(gk_dtype dtype) {
    static const int64_t rights[] = {-1, 0, 1, 7, INT64_C(1) << 40};
    for (int i = 0; i < CHECK_COUNT(rights) * 4; i += check_small() ? 3 : 1) {
        check_seed = (uint64_t)i * 64 + dtype;
        paged_case x = decode(dtype, page_sizes[i % CHECK_COUNT(page_sizes)]);
        x.batch = 4;
        x.ragged = true;
        x.heads_q = 4;
        x.not_causal = i % 4 != 3;
        x.flags = GK_PAGED_WINDOW_RIGHT | (i & 1 ? GK_PAGED_ALLOW_SHORT : 0);
        x.window_right = rights[i / 4];
        x.window_left = i & 2 ? 3 : -1;
        const int64_t few[] = {3, 5, 1, 2}, many[] = {40, 17, 33, 1};
        for (int b = 0; b < 4; ++b) {
            x.seq_q[b] = i % 3 ? few[b] : many[b];
            x.seq_lens[b] = b == 2 ? 0 : i & 1 ? x.seq_q[b] / 2 + b : x.seq_q[b] + 9 * b;
        }
        check_paged_case(&x);
    }
}

static void check_head_dims(gk_dtype dtype) {
    static const int64_t dims[] = {1, 7, 8, 64, 80, 96, 128, 256, 511, 512, 575, 576};
    for (int i = 0; i < CHECK_COUNT(dims); i += check_small() ? 4 : 1) {
        check_seed = (uint64_t)i * 64 + dtype;
        paged_case x = decode(dtype, page_sizes[i % 4]);
        x.head_dim = dims[i];
        x.head_dim_v = dims[i % 2 ? (i + 3) % CHECK_COUNT(dims) : i];
        x.heads_q = 6;
        x.heads_kv = i % 3 == 0 ? 6 : i % 3;
        x.batch = 2;
        x.seq_lens[0] = 45;
        x.seq_lens[1] = 19;
        check_paged_case(&x);
    }
}

/* Sets option i alone (i < NUM_MODIFIERS), or several. */
static void apply(paged_case *x, int i) {
    switch (i) {
    case 0: x->not_causal = true; break;
    case 1: x->window_left = 9; break;
    case 2: x->window_left = 0; break;
    case 3: x->softcap = 1.5; break;
    case 4: x->alibi = 1; break;
    case 5: x->alibi = 2; break;
    case 6: x->sinks = true; break;
    case 7: x->k_scale = 1; break;
    case 8: x->k_scale = 2; break;
    case 9: x->v_scale = 1; break;
    case 10: x->v_scale = 2; break;
    case 11: x->shared = true; break;
    case 12: x->heads_first = true; break;
    case 13: x->window_left = 100; break;
    case 14: x->sharpness = 40; break; /* nearly one-hot: the running maximum jumps */
    case 15: x->kv_start = true; break;
    case 16: x->sinks = x->own_sinks = true; break;
    default: x->window_left = INT64_MAX; break;
    }
}
enum {
    NUM_MODIFIERS = 18
};

static void check_modifiers(gk_dtype dtype) {
    static const int64_t heads[][2] = {{1, 1}, {3, 3}, {8, 2}, {5, 1}, {32, 8}};
    int combined = check_small() ? 20 : dtype == GK_F64 ? 40 : 150;
    for (int i = 0; i < 2 * NUM_MODIFIERS + combined; ++i) {
        check_seed = (uint64_t)i * 64 + dtype;
        paged_case x = decode(dtype, page_sizes[check_below(4)]);
        x.batch = 3;
        x.heads_q = 4;
        x.heads_kv = 2;
        x.ragged = i % 2;
        for (int b = 0; b < MAX_BATCH; ++b) {
            x.seq_q[b] = x.ragged ? check_below(6) : 2;
            x.seq_lens[b] = check_below(5) ? 1 + check_below(150) : check_below(2) * 700;
        }
        if (i < 2 * NUM_MODIFIERS) {
            apply(&x, i / 2);
        } else {
            int h = (int)check_below(CHECK_COUNT(heads));
            x.heads_q = heads[h][0];
            x.heads_kv = heads[h][1];
            x.batch = 1 + check_below(MAX_BATCH);
            x.head_dim = 1 + check_below(70);
            x.head_dim_v = 1 + check_below(70);
            if (!x.ragged) x.seq_q[0] = 1 + check_below(20);
            if (x.ragged && check_below(4) == 0) x.seq_q[0] = 70;
            for (int m = 2 + (int)check_below(4); m > 0; --m)
                apply(&x, (int)check_below(NUM_MODIFIERS));
        }
        check_paged_case(&x);
    }
}

static void check_no_sequences(gk_dtype dtype) {
    paged_case x = decode(dtype, 16);
    x.batch = 0;
    check_paged_case(&x);
    x.ragged = true;
    check_paged_case(&x);
}

/* ---- kv_cache_write -------------------------------------------------------------------------- */
static void check_write(gk_dtype dtype, gk_dtype slots_dtype, int64_t tokens, int64_t block_size,
                        int64_t head_dim, int scale, bool heads_first) {
    paged_case x = decode(dtype, block_size);
    x.heads_kv = 3;
    x.heads_first = heads_first;
    static const int transposed[3] = {1, 0, 2};
    int64_t num_blocks = gk_ceil_div(2 * tokens + 1, block_size), slots_shape = tokens;
    int64_t k_shape[3] = {tokens, 3, head_dim}, v_shape[3] = {tokens, 3, head_dim + 5};
    check_tensor k = check_tensor_make(dtype, 3, k_shape, transposed, 1, 1),
                 v = check_tensor_make(dtype, 3, v_shape, NULL, 2, 0);
    check_tensor slots = check_tensor_make(slots_dtype, 1, &slots_shape, NULL, 2, 0);
    check_fill_normal(&k, 3);
    check_fill_normal(&v, 3);
    if (tokens > 0) { /* values that a scale makes too large, and NaN */
        check_set(&k.t, 0, dtype == GK_F16 ? 60000 : 3e38);
        check_set(&k.t, 1, dtype == GK_F16 ? -60000 : -3e38);
        check_set(&v.t, 0, NAN);
        check_set(&v.t, 1, INFINITY);
    }
    /* every second slot in mirrored order; some are skipped, one is given twice */
    for (int64_t t = 0; t < tokens; ++t) {
        check_set(&slots.t, t,
                  check_below(5) == 0 ? -1 - (double)check_below(9)
                                      : (double)(2 * (tokens - 1 - t)));
    }
    if (tokens > 3) check_set(&slots.t, 3, check_get(&slots.t, 1));
    const gk_dtype stats = gk_stats_dtype(dtype);
    check_tensor k_scale = make_scale(stats, scale, 3), v_scale = make_scale(stats, scale, 3);
    check_set(&k_scale.t, 0, 0.25);
    gk_kv_cache_write_args args = {.size = sizeof args,
                                   .k = k.t,
                                   .v = v.t,
                                   .slots = slots.t,
                                   .k_scale = scale ? &k_scale.t : NULL,
                                   .v_scale = scale ? &v_scale.t : NULL};
    snprintf(check_case, sizeof check_case,
             "kv_cache_write %s slots %s tokens %lld page %lld D %lld scale %d heads_first %d",
             gk_dtype_name(dtype), gk_dtype_name(slots_dtype), (long long)tokens,
             (long long)block_size, (long long)head_dim, scale, heads_first);
    check_tensor expected[2] = {make_cache(&x, num_blocks, head_dim),
                                make_cache(&x, num_blocks, head_dim + 5)};
    args.k_cache = expected[0].t;
    args.v_cache = expected[1].t;
    gk_context serial = check_context(NULL, 1);
    gk_ref_kv_cache_write(&serial, &args);
    for (int i = 0; i < num_isas; ++i) {
        for (int w = 0; w < 2; ++w) {
            int mark = check_num_owned;
            check_isa = check_isa_names[i];
            check_pass = w ? "3 workers" : "1 worker";
            check_tensor got[2] = {make_cache(&x, num_blocks, head_dim),
                                   make_cache(&x, num_blocks, head_dim + 5)};
            for (int t = 0; t < 2; ++t) check_remember(&got[t]);
            args.k_cache = got[0].t;
            args.v_cache = got[1].t;
            gk_context ctx = check_context(check_isa_names[i], w ? CHECK_WORKERS : 1);
            gk_status status = gk_kv_cache_write(&ctx, &args);
            check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
            for (int t = 0; t < 2; ++t) {
                check_untouched(&got[t], t ? "v_cache" : "k_cache");
                check_equal(t ? "v_cache" : "k_cache", &got[t].t, &expected[t].t);
            }
            check_free(mark);
        }
    }
    check_free(0);
}

static void check_writes(gk_dtype dtype) {
    static const int64_t tokens[] = {0, 1, 5, 37};
    for (int t = 0; t < CHECK_COUNT(tokens); ++t) {
        for (int p = 0; p < CHECK_COUNT(page_sizes); ++p) {
            for (int scale = 0; scale < 3; ++scale) {
                check_seed = (uint64_t)(t * 16 + p * 4 + scale) * 64 + dtype;
                check_write(dtype, (t + p) & 1 ? GK_I32 : GK_I64, tokens[t], page_sizes[p],
                            1 + 13 * p, scale, (t + scale) & 1);
            }
        }
    }
}

/* ---- attn_merge ------------------------------------------------------------------------------ */
/* size |a| w_a + |b| w_b. If one side's lse is -inf, the other side must come back bit for bit. */
static void check_merge(gk_dtype dtype, int64_t heads, int64_t rows, int64_t head_dim,
                        bool transposed) {
    static const int by_row[4] = {0, 2, 1, 3};
    gk_dtype stats = gk_stats_dtype(dtype);
    int64_t shape[4] = {2, heads, rows, head_dim};
    check_tensor a = check_tensor_make(dtype, 4, shape, transposed ? by_row : NULL, 1, 3);
    check_tensor b = check_tensor_make(dtype, 4, shape, NULL, transposed ? 2 : 1, 1);
    check_tensor lse_a = check_tensor_make(stats, 3, shape, NULL, 1, 2),
                 lse_b = check_tensor_make(stats, 3, shape, NULL, 2, 0);
    check_fill_normal(&a, 1);
    check_fill_normal(&b, 1);
    int64_t num_rows = 2 * heads * rows;
    /* NaN beside an lse of -inf, because such a side must not be read */
    for (int64_t i = 0; i < num_rows; ++i) {
        int64_t kind = check_below(6);
        check_set(&lse_a.t, i, kind == 0 || kind == 2 ? -INFINITY : 30 * check_normal());
        check_set(&lse_b.t, i,
                  kind == 1 || kind == 2 ? -INFINITY : check_get(&lse_a.t, i) + 3 * check_normal());
        if (kind == 0) check_set(&lse_b.t, i, check_normal());
        if (kind == 0 || kind == 2) check_set(&a.t, i * head_dim, NAN);
        if (kind == 1 || kind == 2) check_set(&b.t, i * head_dim, NAN);
    }
    check_tensor exact = check_dense(GK_F64, 4, shape), lse = check_dense(GK_F64, 3, shape);
    check_tensor lse_size = check_dense(GK_F64, 3, shape);
    for (int64_t i = 0; i < num_rows; ++i) {
        double x = fabs(check_get(&lse_a.t, i)), y = fabs(check_get(&lse_b.t, i));
        check_set(&lse_size.t, i, 1 + (isfinite(x) ? x : 0) + (isfinite(y) ? y : 0));
    }
    check_tensor size = check_dense(GK_F64, 4, shape), abs_a = check_map(&a, fabs),
                 abs_b = check_map(&b, fabs);
    gk_attn_merge_args args = {sizeof args, abs_a.t, abs_b.t, lse_a.t, lse_b.t, size.t, lse.t};
    gk_context serial = check_context(NULL, 1);
    gk_ref_attn_merge(&serial, &args);
    args.out_a = a.t;
    args.out_b = b.t;
    args.out = exact.t;
    gk_ref_attn_merge(&serial, &args);
    snprintf(check_case, sizeof check_case, "attn_merge %s H %lld S %lld D %lld transposed %d",
             gk_dtype_name(dtype), (long long)heads, (long long)rows, (long long)head_dim,
             transposed);
    for (int i = 0; i < num_isas; ++i) {
        int mark = check_num_owned;
        check_isa = check_isa_names[i];
        check_tensor out[2], got_lse[2];
        for (int w = 0; w < 2; ++w) {
            out[w] = check_dense(dtype, 4, shape);
            got_lse[w] = check_dense(stats, 3, shape);
            check_remember(&out[w]);
            args.out = out[w].t;
            args.lse = got_lse[w].t;
            gk_context ctx = check_context(check_isa_names[i], w ? CHECK_WORKERS : 1);
            gk_status status = gk_attn_merge(&ctx, &args);
            check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
            check_untouched(&out[w], "out");
        }
        /* error of lse: exp(lse_x - lse) has an error of about |lse| u */
        double u = check_acc_unit(dtype), widest = 200;
        check_close("out", &out[0].t, &exact.t, &size.t, (32 + widest) * u);
        check_close("lse", &got_lse[0].t, &lse.t, &lse_size.t, 8 * u);
        bool same = true;
        for (int64_t e = 0; e < num_rows * head_dim; ++e) {
            bool no_a = check_get(&lse_a.t, e / head_dim) == -INFINITY,
                 no_b = check_get(&lse_b.t, e / head_dim) == -INFINITY;
            double got = check_get(&out[0].t, e);
            if (no_a && no_b)
                same = same && got == 0;
            else if (no_a)
                same = same && got == check_get(&b.t, e);
            else if (no_b)
                same = same && got == check_get(&a.t, e);
        }
        check_result(same, "a side without keys changed the other one");
        check_result(check_same_bits(&out[0].t, &out[1].t), "1 and %d workers differ",
                     CHECK_WORKERS);
        check_free(mark);
    }
    check_free(0);
}

static void check_merges(gk_dtype dtype) {
    static const int64_t dims[] = {1, 7, 16, 31, 64, 130};
    for (int i = 0; i < CHECK_COUNT(dims); ++i) {
        for (int transposed = 0; transposed < 2; ++transposed) {
            check_seed = (uint64_t)(2 * i + transposed) * 64 + dtype;
            check_merge(dtype, 3, i == 2 ? 0 : 29, dims[i], transposed);
        }
    }
}

/* ---- refusals: contents ---------------------------------------------------------------------- */
static void check_refusals(void) {
    snprintf(check_case, sizeof check_case, "paged_attn refusals");
    int64_t cache_shape[4] = {6, 4, 1, 8}, q_shape[3] = {4, 1, 8}, table_shape[2] = {2, 3}, two = 2,
            three = 3, four = 4;
    check_tensor cache = check_dense(GK_F32, 4, cache_shape), q = check_dense(GK_F32, 3, q_shape);
    check_tensor out = check_dense(GK_F32, 3, q_shape), lse = check_dense(GK_F32, 2, q_shape);
    check_tensor table = check_dense(GK_I32, 2, table_shape),
                 seq_lens = check_dense(GK_I32, 1, &two);
    check_tensor cu = check_dense(GK_I32, 1, &three), slots = check_dense(GK_I64, 1, &four);
    check_fill_normal(&cache, 1);
    check_fill_normal(&q, 1);
    for (int64_t i = 0; i < 6; ++i) check_set(&table.t, i, (double)i);
    for (int64_t b = 0; b < 2; ++b) check_set(&seq_lens.t, b, 10);
    for (int64_t b = 0; b < 3; ++b) check_set(&cu.t, b, (double)(2 * b));
    check_remember(&out);
    check_remember(&lse);
    gk_context ctx = check_context(NULL, 1);
    gk_paged_attn_args args = {
        .size = sizeof args,
        .q = q.t,
        .k_cache = cache.t,
        .v_cache = cache.t,
        .block_table = table.t,
        .seq_lens = seq_lens.t,
        .cu_seqlens_q = &cu.t,
        .max_seqlen_q = 2,
        .out = out.t,
        .lse = lse.t,
        .rules = {.scale = 1, .is_causal = 1, .window_left = -1, .window_right = -1}};
    check_workspace w = check_workspace_make(gk_paged_attn_workspace_bytes(&ctx, &args));
    args.workspace = w.data;
    args.workspace_bytes = w.bytes;
    struct {
        const check_tensor *t;
        int64_t i, bad;
        const char *words;
    } cases[] = {
        {&seq_lens, 1, -1, "expected not to be negative, got seq_lens[1] = -1"},
        {&seq_lens, 1, 13, "(12 keys), got seq_lens[1] = 13"},
        {&seq_lens, 0, 1, "(2 in sequence 0), got seq_lens[0] = 1"},
        {&table, 0, -1, "pages in [0, 6), got block_table[0, 0] = -1"},
        {&table, 5, 6, "got block_table[1, 2] = 6"},
        {&cu, 0, 1, "start at 0, got cu_seqlens_q[0] = 1"},
        {&cu, 1, 5, "at most max_seqlen 2 tokens, got 5 in sequence 0"},
        {&cu, 1, -1, "not to decrease, got cu_seqlens_q[1] = -1 after 0"},
    };
    for (int i = 0; i < CHECK_COUNT(cases); ++i) {
        double good = check_get(&cases[i].t->t, cases[i].i);
        check_set(&cases[i].t->t, cases[i].i, (double)cases[i].bad);
        check_refused(gk_paged_attn(&ctx, &args), GK_ERR_INDEX, cases[i].words);
        check_set(&cases[i].t->t, cases[i].i, good);
    }
    gk_paged_attn_args wrong = args;
    wrong.out.data = (float *)q.t.data + 1;
    check_refused(gk_paged_attn(&ctx, &wrong), GK_ERR_ARGUMENT,
                  "gk_paged_attn: out shares memory with q");
    args.max_seqlen_q = -1;
    check_refused(gk_paged_attn(&ctx, &args), GK_ERR_ARGUMENT,
                  "max_seqlen_q must be 0 or more, got -1");
    args.max_seqlen_q = 2;
    args.block_table.shape[1] = INT64_C(1) << 45;
    check_refused(gk_paged_attn(&ctx, &args), GK_ERR_ARGUMENT, "expected at most 2^44");
    args.block_table.shape[1] = 3;
    args.max_seqlen_q = 5;
    check_set(&cu.t, 2, 5);
    check_refused(gk_paged_attn(&ctx, &args), GK_ERR_INDEX,
                  "the 4 tokens there are, got cu_seqlens_q[2] = 5");
    check_set(&cu.t, 2, 4);
    args.max_seqlen_q = 2;
    check_unchanged(&out, "out of a refused call");
    check_unchanged(&lse, "lse of a refused call");
    check_set(&seq_lens.t, 0, 0); /* inactive: its table is not read */
    check_set(&table.t, 0, -9);
    gk_status status = gk_paged_attn(&ctx, &args);
    check_result(status == GK_OK && check_get(&lse.t, 0) == -INFINITY, "seq_lens 0: %s",
                 gk_last_error());

    snprintf(check_case, sizeof check_case, "kv_cache_write refusals");
    check_fill(&slots, 0);
    check_set(&slots.t, 2, 24);
    check_remember(&cache);
    check_tensor values = check_dense(GK_F32, 4, cache.t.shape);
    gk_kv_cache_write_args write = {.size = sizeof write,
                                    .k = q.t,
                                    .v = q.t,
                                    .k_cache = cache.t,
                                    .v_cache = values.t,
                                    .slots = slots.t};
    check_refused(gk_kv_cache_write(&ctx, &write), GK_ERR_INDEX,
                  "slots below 24 (num_blocks * block_size), got slots[2] = 24");
    check_set(&slots.t, 2, 0);
    write.v_cache = cache.t;
    check_refused(gk_kv_cache_write(&ctx, &write), GK_ERR_ARGUMENT, "v_cache overlaps k_cache");
    write.v_cache = values.t;
    write.k_cache.stride[0] = 0;
    check_refused(gk_kv_cache_write(&ctx, &write), GK_ERR_ARGUMENT,
                  "k_cache has stride 0 in dimension 0");
    check_unchanged(&cache, "the cache of a refused call");
    check_free(0);
}

int main(void) {
    num_isas = check_isas();
    for (int d = 0; d < CHECK_COUNT(dtypes); ++d) {
        check_lengths(dtypes[d]);
        check_right(dtypes[d]);
        check_head_dims(dtypes[d]);
        check_modifiers(dtypes[d]);
        check_no_sequences(dtypes[d]);
        check_writes(dtypes[d]);
        check_merges(dtypes[d]);
    }
    check_refusals();
    check_every_instance_seen(GK_OP_PAGED_ATTN);
    return check_end();
}
