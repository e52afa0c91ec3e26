/* SPDX-License-Identifier: BSD-3-Clause */
/* check_flash_attn: compares gk_flash_attn_fwd and _bwd of every instruction set with csrc/ref,
 * with every option. Every key that no row sees and every token that belongs to no sequence is
 * NaN.
 *
 * sizes (every term positive, p_ij the exact probabilities):
 *  out   sum_j p_ij |v_j|        dq_i  scale sum_j w_ij |k_j|   dk_j  scale sum_i w_ij |q_i|
 *  dv_j  sum_i p_ij |dout_i|     dsink sum_i p_i,sink d_i
 *  with w_ij = p_ij (|dout_i| |v_j| + d_i) and d_i = |dout_i| |out_i| + |dlse_i|
 * loss: the logits have the error e = u(float32) (8 + 2 sqrt D) max |logit|, which changes every
 * p by 2 e. In 16 bits p and ds are rounded to the inputs' dtype. Sums add u(float32) (32 + 2
 * sqrt(number of terms)). */
#include "check.h"

#include "core/attn_mask.h"

static int num_isas;

typedef struct flash_case {
    gk_dtype dtype;
    int64_t batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v;
    bool packed, tokens_first; /* tokens_first: dense, stored as [B, S, H, D] */
    /* own_sinks: in dtype */
    bool is_causal, sinks, own_sinks, kv_start, kv_end, q_start, backward, grad_lse;
    int alibi; /* 0 none, 1 [Hq], 2 [B, Hq] */
    int64_t diagonal, window_left, window_right;
    double scale, softcap, dropout;
    bool mask, bias; /* dense only: random blocks, and a bias with all dimensions */
} flash_case;

/* All tensors of a case. */
typedef struct flash_data {
    check_tensor q, k, v, dout, dlse, slopes, sinks, kv_start, kv_end, q_start, cu_q, cu_k;
    int64_t out_shape[4], lse_shape[3], ndim;
    int64_t seed[2];
    gk_tensor seed_t;
    gk_flash_attn_args args;
    double max_logit;
    check_tensor bias;
    gk_tensor mask;        /* stored, [1, Hq, n] */
    gk_attn_scores scores; /* if the case has a mask or a bias */
} flash_data;

/* ---- inputs ---------------------------------------------------------------------------------- */
/* [B, H, S, D] or [T, H, D] with gaps between rows. */
static check_tensor make_heads(const flash_case *x, int64_t tokens, int64_t heads, int64_t seq,
                               int64_t dim, gk_dtype dtype, int64_t pad) {
    static const int by_token[4] = {0, 2, 1, 3};
    int64_t dense[4] = {x->batch, heads, seq, dim}, packed[3] = {tokens, heads, dim};
    if (x->packed) return check_tensor_make(dtype, 3, packed, NULL, 1, pad);
    return check_tensor_make(dtype, 4, dense, x->tokens_first ? by_token : NULL, 1, pad);
}

/* cu_seqlens of random lengths up to `longest`, at least one of them equal to it. *end becomes
 * the number of tokens. */
static check_tensor make_cu_seqlens(int64_t batch, int64_t longest, int64_t *end) {
    int64_t shape = batch + 1, at = 0;
    check_tensor cu = check_tensor_make(GK_I32, 1, &shape, NULL, 1, 0);
    int64_t full = check_below(batch);
    for (int64_t b = 0; b <= batch; ++b) {
        check_set(&cu.t, b, (double)at);
        at += b == full ? longest : check_below(3) == 0 ? check_below(2) : check_below(longest + 1);
    }
    *end = (int64_t)check_get(&cu.t, batch);
    return cu;
}

static int64_t start_of(const flash_case *x, const check_tensor *cu, int64_t b) {
    return x->packed ? (int64_t)check_get(&cu->t, b) : 0;
}

/* One sequence: its first tokens and lengths in q and k, and the keys that its rows see. */
typedef struct flash_seq {
    int64_t q0, k0, seq_q, seq_k, diagonal;
    gk_span span;
} flash_seq;

static flash_seq seq_of(const flash_case *x, const flash_data *d, int64_t b) {
    flash_seq s = {
        start_of(x, &d->cu_q, b), start_of(x, &d->cu_k, b), x->seq_q, x->seq_k, x->diagonal, {0}};
    if (x->packed) {
        s.seq_q = (int64_t)check_get(&d->cu_q.t, b + 1) - s.q0;
        s.seq_k = (int64_t)check_get(&d->cu_k.t, b + 1) - s.k0;
        s.diagonal = s.seq_k - s.seq_q;
    } else if (x->q_start) {
        s.diagonal = (int64_t)check_get(&d->q_start.t, b);
    }
    s.span = gk_span_make(&d->args.rules, s.seq_k, s.diagonal);
    if (x->kv_start)
        s.span.key_lo = gk_clamp_i64((int64_t)check_get(&d->kv_start.t, b), 0, s.seq_k);
    if (x->kv_end) s.span.key_hi = gk_clamp_i64((int64_t)check_get(&d->kv_end.t, b), 0, s.seq_k);
    return s;
}

/* Offset of row i, head h of sequence b. */
static int64_t row_at(const flash_case *x, const gk_tensor *t, int64_t b, int64_t start, int64_t h,
                      int64_t i) {
    if (x->packed) return (start + i) * t->stride[0] + h * t->stride[1];
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
}

static double element(const gk_tensor *t, int64_t at) { return gk_load(t->data, t->dtype, at); }

/* Sets keys that no row of the sequence sees, and tokens of no sequence, to NaN in k and v. */
static void poison(const flash_case *x, flash_data *d) {
    for (int64_t b = 0; b < x->batch; ++b) {
        flash_seq s = seq_of(x, d, b);
        int64_t lo = INT64_MAX, hi = 0;
        for (int64_t i = 0; i < s.seq_q; ++i) {
            if (gk_span_lo(&s.span, i) >= gk_span_hi(&s.span, i)) continue;
            lo = gk_min_i64(lo, gk_span_lo(&s.span, i));
            hi = gk_max_i64(hi, gk_span_hi(&s.span, i));
        }
        for (int64_t j = 0; j < s.seq_k; ++j) {
            if (j >= lo && j < hi) continue;
            for (int64_t h = 0; h < x->heads_kv; ++h) {
                const gk_tensor *kv[2] = {&d->k.t, &d->v.t};
                for (int t = 0; t < 2; ++t) {
                    int64_t at = row_at(x, kv[t], b, s.k0, h, j), n = kv[t]->shape[kv[t]->ndim - 1];
                    for (int64_t e = 0; e < n; ++e)
                        gk_store(kv[t]->data, kv[t]->dtype, at + e, NAN);
                }
            }
        }
    }
    if (!x->packed) return;
    check_tensor *q_like[] = {&d->q, &d->dout, &d->dlse}, *k_like[] = {&d->k, &d->v};
    int64_t end_q = (int64_t)check_get(&d->cu_q.t, x->batch),
            end_k = (int64_t)check_get(&d->cu_k.t, x->batch);
    for (int i = 0; i < 5; ++i) {
        const gk_tensor *t = i < 3 ? &q_like[i]->t : &k_like[i - 3]->t;
        int64_t per_token = t->shape[0] ? gk_numel(t) / t->shape[0] : 0;
        for (int64_t e = (i < 3 ? end_q : end_k) * per_token; e < gk_numel(t); ++e)
            check_set(t, e, NAN);
    }
}

/* A mask of each head with empty, full and random blocks and some rows that see nothing, and a
 * bias that hides some keys. */
static void make_scores(const flash_case *x, flash_data *d) {
    const int64_t shape[4] = {x->batch, x->heads_q, x->seq_q, x->seq_k},
                  pairs = x->heads_q * x->seq_q * x->seq_k;
    uint8_t *bytes = check_alloc((size_t)pairs + 1);
    for (int64_t e = 0; e < pairs; ++e) {
        const int64_t j = e % x->seq_k, i = e / x->seq_k % x->seq_q, h = e / x->seq_k / x->seq_q;
        /* 0 empty, 1 full, otherwise random */
        const int64_t kind = (i / 128 * 5 + j / 128 * 3 + h) % 4;
        bytes[e] = i % 37 == 5 ? 0 : kind == 0 ? 0 : kind == 1 ? 1 : (uint8_t)check_below(2);
    }
    const gk_tensor mask = {.data = bytes,
                            .dtype = GK_U8,
                            .ndim = 4,
                            .shape = {1, x->heads_q, x->seq_q, x->seq_k},
                            .stride = {pairs, x->seq_q * x->seq_k, x->seq_k, 1}};
    const int64_t ints = gk_attn_mask_ints(GK_MASK_DENSE, x->seq_q, x->seq_k, 0);
    d->mask = (gk_tensor){.data = check_alloc((size_t)(4 * x->heads_q * ints) + 4),
                          .dtype = GK_I32,
                          .ndim = 3,
                          .shape = {1, x->heads_q, ints},
                          .stride = {x->heads_q * ints, ints, 1}};
    const gk_attn_mask_args args = {.size = sizeof args,
                                    .source = GK_MASK_OF_BOOL,
                                    .mask = &mask,
                                    .seq_q = x->seq_q,
                                    .seq_k = x->seq_k,
                                    .out = d->mask};
    gk_context serial = check_context(NULL, 1);
    const gk_status status = gk_attn_mask(&serial, &args);
    check_result(status == GK_OK, "%s", gk_last_error());
    d->bias = check_dense(x->dtype, 4, shape);
    check_fill_normal(&d->bias, 1);
    for (int64_t e = 0; e < gk_numel(&d->bias.t); e += 11) check_set(&d->bias.t, e, -INFINITY);
}

static flash_data make_data(const flash_case *x) {
    flash_data d;
    memset(&d, 0, sizeof d);
    gk_dtype stats = gk_stats_dtype(x->dtype);
    int64_t tokens_q = 0, tokens_k = 0;
    if (x->packed) {
        d.cu_q = make_cu_seqlens(x->batch, x->seq_q, &tokens_q);
        d.cu_k = make_cu_seqlens(x->batch, x->seq_k, &tokens_k);
        tokens_q += check_below(4);
        tokens_k += check_below(4);
    }
    d.q = make_heads(x, tokens_q, x->heads_q, x->seq_q, x->head_dim, x->dtype, 3);
    d.k = make_heads(x, tokens_k, x->heads_kv, x->seq_k, x->head_dim, x->dtype, 5);
    d.v = make_heads(x, tokens_k, x->heads_kv, x->seq_k, x->head_dim_v, x->dtype, 0);
    d.dout = make_heads(x, tokens_q, x->heads_q, x->seq_q, x->head_dim_v, x->dtype, 1);
    d.ndim = d.q.t.ndim;
    memcpy(d.out_shape, d.dout.t.shape, sizeof d.out_shape);
    memcpy(d.lse_shape, d.dout.t.shape, sizeof d.lse_shape);
    d.dlse = check_tensor_make(stats, (int)d.ndim - 1, d.lse_shape, NULL, 2, 0);
    check_fill_normal(&d.q, 1);
    check_fill_normal(&d.k, 1);
    check_fill_normal(&d.v, 1);
    check_fill_normal(&d.dout, 1);
    check_fill_normal(&d.dlse, 1);

    int64_t slopes_shape[2] = {x->batch, x->heads_q};
    d.slopes = check_tensor_make(stats, x->alibi == 2 ? 2 : 1,
                                 x->alibi == 2 ? slopes_shape : slopes_shape + 1, NULL, 1, 2);
    d.sinks = check_tensor_make(x->own_sinks ? x->dtype : stats, 1, &x->heads_q, NULL, 2, 0);
    d.q_start = check_tensor_make(GK_I32, 1, &x->batch, NULL, 2, 0);
    d.kv_start = check_dense(GK_I32, 1, &x->batch);
    d.kv_end = check_dense(GK_I32, 1, &x->batch);
    for (int64_t i = 0; i < gk_numel(&d.slopes.t); ++i)
        check_set(&d.slopes.t, i, check_uniform(0, 0.3));
    for (int64_t h = 0; h < x->heads_q; ++h)
        check_set(&d.sinks.t, h, check_below(4) ? check_uniform(-3, 3) : -INFINITY);
    for (int64_t b = 0; b < x->batch; ++b) {
        check_set(&d.kv_start.t, b, (double)(check_below(x->seq_k / 2 + 3) - 1));
        check_set(&d.kv_end.t, b, (double)(x->seq_k + 2 - check_below(x->seq_k / 2 + 3)));
        check_set(&d.q_start.t, b, (double)(check_below(x->seq_q + x->seq_k + 3) - x->seq_q - 1));
    }
    d.seed[0] = check_below(1 << 30) * (1 << 30) - (1 << 29);
    d.seed[1] = check_below(1 << 30);
    d.args = (gk_flash_attn_args){.size = sizeof d.args,
                                  .q = d.q.t,
                                  .k = d.k.t,
                                  .v = d.v.t,
                                  .max_seqlen_q = x->seq_q,
                                  .max_seqlen_k = x->seq_k,
                                  .rules = {.scale = x->scale,
                                            .softcap = x->softcap,
                                            .is_causal = x->is_causal,
                                            .diagonal = x->q_start ? 0 : x->diagonal,
                                            .window_left = x->window_left,
                                            .window_right = x->window_right}};
    if (x->mask || x->bias) make_scores(x, &d);
    return d;
}

/* Sets pointers into d itself, so d must not move afterwards. */
static void bind(const flash_case *x, flash_data *d) {
    if (x->packed) {
        d->args.cu_seqlens_q = &d->cu_q.t;
        d->args.cu_seqlens_k = &d->cu_k.t;
    }
    d->args.rules.alibi_slopes = x->alibi ? &d->slopes.t : NULL;
    d->args.rules.sinks = x->sinks ? &d->sinks.t : NULL;
    d->args.rules.kv_start = x->kv_start ? &d->kv_start.t : NULL;
    d->args.rules.kv_end = x->kv_end ? &d->kv_end.t : NULL;
    d->args.rules.q_start = x->q_start ? &d->q_start.t : NULL;
    d->seed_t =
        (gk_tensor){.data = d->seed, .dtype = GK_I64, .ndim = 1, .shape = {2}, .stride = {1}};
    d->args.dropout_p = x->dropout;
    d->args.dropout_seed = x->dropout > 0 ? &d->seed_t : NULL;
    d->scores = (gk_attn_scores){.mask = x->mask ? &d->mask : NULL,
                                 .store = GK_MASK_DENSE,
                                 .mask_seq_q = x->seq_q,
                                 .mask_seq_k = x->seq_k,
                                 .bias = x->bias ? &d->bias.t : NULL};
    poison(x, d);
    d->max_logit = 1 + fabs(x->scale) * check_longest_row(&d->q.t) * check_longest_row(&d->k.t);
    if (x->bias) d->max_logit += 6;
    if (x->alibi)
        d->max_logit += 0.3 * (double)(x->seq_q + x->seq_k + llabs((long long)x->diagonal));
}

/* ---- sizes ----------------------------------------------------------------------------------- */
/* Gradient sizes as in the comment at the head, added into tensors like dq, dk, dv, dsinks. */
typedef struct flash_sizes {
    check_tensor dq, dk, dv, dsinks;
} flash_sizes;

static void add(const gk_tensor *t, int64_t at, double x) { ((double *)t->data)[at] += x; }

/* A tensor's memory from its first to its last element as doubles, with the tensor's own
 * offsets. */
static const double *doubles_of(const gk_tensor *t) {
    int64_t count = gk_numel(t) ? 1 : 0;
    for (int k = 0; k < t->ndim && count; ++k) count += (t->shape[k] - 1) * t->stride[k];
    double *to = check_alloc((size_t)count * sizeof(double));
    for (int64_t i = 0; i < count; ++i) to[i] = gk_load(t->data, t->dtype, i);
    return to;
}

/* The values that the pairs read, each hundreds of times. */
typedef struct flash_values {
    const double *q, *k, *v, *dout;
} flash_values;

static void add_pair(const flash_case *x, const flash_data *d, const flash_values *of,
                     const flash_sizes *z, int64_t b, const flash_seq *s, int64_t h, int64_t i,
                     int64_t j, double lse, double row_size) {
    int64_t h_kv = h / (x->heads_q / x->heads_kv), k_at = row_at(x, &d->k.t, b, s->k0, h_kv, j);
    int64_t q_at = row_at(x, &d->q.t, b, s->q0, h, i), v_at = row_at(x, &d->v.t, b, s->k0, h_kv, j);
    int64_t dout_at = row_at(x, &d->dout.t, b, s->q0, h, i);
    double logit = 0, reach = row_size;
    const gk_mask_layout layout = gk_mask_layout_of(GK_MASK_DENSE, x->seq_q, x->seq_k, false);
    if (x->mask) {
        const gk_mask mask = gk_mask_at((const int32_t *)d->mask.data + h * d->mask.stride[1],
                                        &layout, GK_MASK_DENSE, x->seq_q, x->seq_k);
        if (!gk_mask_sees(&mask, i, j)) return;
    }
    const double bias =
        x->bias ? check_get(&d->bias.t, ((b * x->heads_q + h) * x->seq_q + i) * x->seq_k + j) : 0;
    if (bias == -INFINITY) return;
    const double *q = of->q + q_at, *k = of->k + k_at, *v = of->v + v_at,
                 *dout = of->dout + dout_at;
    for (int64_t e = 0; e < x->head_dim; ++e) logit += q[e] * k[e];
    logit *= x->scale;
    if (x->softcap > 0) logit = x->softcap * tanh(logit / x->softcap);
    if (x->alibi)
        logit -= check_get(&d->slopes.t, x->alibi == 2 ? b * x->heads_q + h : h) *
                 fabs((double)(i + s->diagonal - j));
    logit += bias;
    const double p = exp(logit - lse), kept = 1 / (1 - x->dropout);
    double *dv = (double *)z->dv.t.data + row_at(x, &z->dv.t, b, s->k0, h_kv, j);
    for (int64_t e = 0; e < x->head_dim_v; ++e) {
        const double g = fabs(dout[e]) * kept;
        reach += g * fabs(v[e]);
        dv[e] += p * g;
    }
    double *dq = (double *)z->dq.t.data + row_at(x, &z->dq.t, b, s->q0, h, i);
    double *dk = (double *)z->dk.t.data + row_at(x, &z->dk.t, b, s->k0, h_kv, j);
    const double weight = fabs(x->scale) * p * reach;
    for (int64_t e = 0; e < x->head_dim; ++e) {
        dq[e] += weight * fabs(k[e]);
        dk[e] += weight * fabs(q[e]);
    }
}

static void add_sizes(const flash_case *x, const flash_data *d, const flash_sizes *z,
                      const gk_flash_attn_args *f) {
    const flash_values of = {doubles_of(&d->q.t), doubles_of(&d->k.t), doubles_of(&f->v),
                             doubles_of(&d->dout.t)};
    for (int64_t b = 0; b < x->batch; ++b) {
        flash_seq s = seq_of(x, d, b);
        for (int64_t h = 0; h < x->heads_q; ++h) {
            for (int64_t i = 0; i < s.seq_q; ++i) {
                double lse = element(&f->lse, row_at(x, &f->lse, b, s.q0, h, i)), row_size = 0;
                if (lse == -INFINITY) continue;
                for (int64_t e = 0; e < x->head_dim_v; ++e) {
                    row_size += fabs(element(&d->dout.t, row_at(x, &d->dout.t, b, s.q0, h, i) + e) *
                                     element(&f->out, row_at(x, &f->out, b, s.q0, h, i) + e));
                }
                if (x->grad_lse)
                    row_size += fabs(element(&d->dlse.t, row_at(x, &d->dlse.t, b, s.q0, h, i)));
                for (int64_t j = gk_span_lo(&s.span, i); j < gk_span_hi(&s.span, i); ++j) {
                    add_pair(x, d, &of, z, b, &s, h, i, j, lse, row_size);
                }
                double sink = x->sinks ? check_get(&d->sinks.t, h) : -INFINITY;
                if (sink != -INFINITY)
                    add(&z->dsinks.t, h * z->dsinks.t.stride[0], exp(sink - lse) * row_size);
            }
        }
    }
}

/* ---- forward --------------------------------------------------------------------------------- */
static void run_fwd(const char *isa, int32_t num_threads, gk_flash_attn_args *args) {
    gk_context ctx = check_context(isa, num_threads);
    int mark = check_num_owned;
    check_workspace w = check_workspace_make(gk_flash_attn_fwd_workspace_bytes(&ctx, args));
    args->workspace = w.data;
    args->workspace_bytes = w.bytes;
    gk_status status = gk_flash_attn_fwd(&ctx, args);
    check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
    check_workspace_end(&w);
    gk_explanation e = {.size = sizeof e};
    if (gk_explain_flash_attn_fwd(&ctx, args, &e) == GK_OK) check_see(&e, w.bytes);
    check_free(mark);
}

/* The forward's results in float64. */
typedef struct flash_exact {
    check_tensor out, lse;
} flash_exact;

static flash_exact check_fwd(const flash_case *x, const flash_data *d) {
    gk_context serial = check_context(NULL, 1);
    gk_dtype stats = gk_stats_dtype(x->dtype);
    int ndim = (int)d->ndim;
    check_tensor exact = check_dense(GK_F64, ndim, d->out_shape),
                 lse = check_dense(GK_F64, ndim - 1, d->lse_shape);
    check_tensor size = check_dense(GK_F64, ndim, d->out_shape),
                 lse_size = check_dense(GK_F64, ndim - 1, d->lse_shape);
    check_tensor abs_v = check_map(&d->v, fabs);
    gk_flash_attn_masked_args all = {.fwd = d->args, .scores = d->scores};
    gk_flash_attn_args *args = &all.fwd;
    if (x->mask || x->bias) args->size = sizeof all;
    args->v = abs_v.t;
    args->out = size.t;
    args->lse = lse.t;
    gk_ref_flash_attn_fwd(&serial, args);
    args->v = d->args.v;
    args->out = exact.t;
    gk_ref_flash_attn_fwd(&serial, args);
    check_fill(&lse_size, d->max_logit);

    bool half = x->dtype == GK_BF16 || x->dtype == GK_F16;
    double u = check_acc_unit(x->dtype), logit_loss = u * (8 + 2 * sqrt((double)x->head_dim));
    double loss = 2 * logit_loss * d->max_logit + u * (32 + 2 * sqrt((double)x->seq_k)) +
                  (half ? 1.25 * check_unit(x->dtype) : 0);
    double lse_loss =
        2 * logit_loss + (32 * u + (x->dtype == GK_BF16 ? 0x1p-17 : 0)) / d->max_logit;
    for (int i = 0; i < num_isas; ++i) {
        if (check_repeats(check_isa_names[i], x->dtype)) continue;
        int mark = check_num_owned;
        check_isa = check_isa_names[i];
        check_pass = "forward";
        check_tensor out[2], got_lse[2];
        for (int w = 0; w < 2; ++w) {
            int64_t tokens = x->packed ? d->out_shape[0] : 0;
            out[w] = make_heads(x, tokens, x->heads_q, x->seq_q, x->head_dim_v, x->dtype,
                                w == 0 ? 7 : 0);
            got_lse[w] = check_dense(stats, ndim - 1, d->lse_shape);
            check_remember(&out[w]);
            check_remember(&got_lse[w]);
            args->out = out[w].t;
            args->lse = got_lse[w].t;
            run_fwd(check_isa_names[i], w == 0 ? 1 : CHECK_WORKERS, args);
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
    return (flash_exact){exact, lse};
}

/* ---- backward -------------------------------------------------------------------------------- */
static void run_bwd(const char *isa, int32_t num_threads, gk_flash_attn_bwd_args *args) {
    gk_context ctx = check_context(isa, num_threads);
    int mark = check_num_owned;
    check_workspace w = check_workspace_make(gk_flash_attn_bwd_workspace_bytes(&ctx, args));
    args->workspace = w.data;
    args->workspace_bytes = w.bytes;
    gk_status status = gk_flash_attn_bwd(&ctx, args);
    check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
    check_workspace_end(&w);
    gk_explanation e = {.size = sizeof e};
    if (gk_explain_flash_attn_bwd(&ctx, args, &e) == GK_OK) check_see(&e, w.bytes);
    check_free(mark);
}

/* A dense tensor of this dtype with the values of a dense float64 tensor, each rounded once. */
static check_tensor rounded(const check_tensor *exact, gk_dtype dtype) {
    check_tensor to = check_dense(dtype, exact->t.ndim, exact->t.shape);
    for (int64_t i = 0; i < gk_numel(&exact->t); ++i)
        gk_store(to.t.data, dtype, i, gk_load(exact->t.data, GK_F64, i));
    return to;
}

static void check_bwd(const flash_case *x, const flash_data *d, const flash_exact *results) {
    /* 1. a forward result, rounded as the kernels round it, from which ref and kernels both
     * start */
    gk_context serial = check_context(NULL, 1);
    check_tensor out = rounded(&results->out, x->dtype);
    check_tensor lse = rounded(&results->lse, gk_stats_dtype(x->dtype));
    gk_flash_attn_masked_args forward = {.fwd = d->args, .scores = d->scores};
    if (x->mask || x->bias) forward.fwd.size = sizeof forward;
    forward.fwd.out = out.t;
    forward.fwd.lse = lse.t;
    gk_flash_attn_masked_bwd_args all = {.scores = d->scores};
    gk_flash_attn_bwd_args *args = &all.bwd;
    args->size = x->mask || x->bias ? sizeof all : sizeof *args;
    args->fwd = forward.fwd;
    args->fwd.size = sizeof args->fwd;
    args->grad_out = d->dout.t;
    args->grad_lse = x->grad_lse ? &d->dlse.t : NULL;

    /* 2. exact gradients and their sizes */
    check_tensor exact[4], *size[4];
    const check_tensor *like[3] = {&d->q, &d->k, &d->v};
    flash_sizes sizes;
    size[0] = &sizes.dq;
    size[1] = &sizes.dk;
    size[2] = &sizes.dv;
    size[3] = &sizes.dsinks;
    for (int t = 0; t < 3; ++t) {
        exact[t] = check_dense(GK_F64, like[t]->t.ndim, like[t]->t.shape);
        *size[t] = check_dense(GK_F64, like[t]->t.ndim, like[t]->t.shape);
        check_fill(size[t], 0);
    }
    exact[3] = check_dense(GK_F64, 1, &x->heads_q);
    sizes.dsinks = check_dense(GK_F64, 1, &x->heads_q);
    check_fill(&sizes.dsinks, 0);
    args->dq = exact[0].t;
    args->dk = exact[1].t;
    args->dv = exact[2].t;
    args->dsinks = x->sinks ? &exact[3].t : NULL;
    gk_ref_flash_attn_bwd(&serial, args);
    add_sizes(x, d, &sizes, &args->fwd);

    /* 3. the kernels; a sum over rows covers the whole group of heads */
    static const char *const names[4] = {"dq", "dk", "dv", "dsinks"};
    bool half = x->dtype == GK_BF16 || x->dtype == GK_F16;
    double u = check_acc_unit(x->dtype),
           logit_loss = u * (8 + 2 * sqrt((double)x->head_dim)) * d->max_logit;
    double terms = sqrt((double)gk_max_i64(x->seq_k, x->seq_q * x->heads_q * x->batch)) +
                   sqrt((double)x->head_dim_v);
    double loss = 2 * logit_loss + u * (32 + 2 * terms) + (half ? 2.5 * check_unit(x->dtype) : 0);
    for (int i = 0; i < num_isas; ++i) {
        if (check_repeats(check_isa_names[i], x->dtype)) continue;
        int mark = check_num_owned;
        check_isa = check_isa_names[i];
        check_pass = "backward";
        check_tensor got[2][4];
        for (int w = 0; w < 2; ++w) {
            for (int t = 0; t < 3; ++t) {
                int64_t tokens = like[t]->t.shape[0], heads = t == 0 ? x->heads_q : x->heads_kv;
                got[w][t] =
                    make_heads(x, tokens, heads, t == 0 ? x->seq_q : x->seq_k,
                               t == 2 ? x->head_dim_v : x->head_dim, x->dtype, w == 0 ? 3 : 0);
            }
            got[w][3] = check_tensor_make(d->sinks.t.dtype, 1, &x->heads_q, NULL, 1 + w, 0);
            for (int t = 0; t < 4; ++t) check_remember(&got[w][t]);
            args->dq = got[w][0].t;
            args->dk = got[w][1].t;
            args->dv = got[w][2].t;
            args->dsinks = x->sinks ? &got[w][3].t : NULL;
            run_bwd(check_isa_names[i], w == 0 ? 1 : CHECK_WORKERS, args);
            for (int t = 0; t < 4; ++t) check_untouched(&got[w][t], names[t]);
        }
        for (int t = 0; t < (x->sinks ? 4 : 3); ++t) {
            check_close(names[t], &got[0][t].t, &exact[t].t, &size[t]->t, loss);
            check_result(check_same_bits(&got[0][t].t, &got[1][t].t),
                         "%s of 1 and %d workers differ", names[t], CHECK_WORKERS);
        }
        check_free(mark);
    }
}

static void check_flash_case(const flash_case *x) {
    snprintf(check_case, sizeof check_case,
             "flash_attn %s %s B %lld H %lld/%lld S %lld/%lld D %lld/%lld causal %d diagonal %lld "
             "window %lld,%lld cap %g scale %g"
             " alibi %d sinks %d own_sinks %d kv_start %d kv_end %d q_start %d tokens_first %d "
             "grad_lse %d dropout %g mask %d bias %d",
             x->packed ? "packed" : "dense", gk_dtype_name(x->dtype), (long long)x->batch,
             (long long)x->heads_q, (long long)x->heads_kv, (long long)x->seq_q,
             (long long)x->seq_k, (long long)x->head_dim, (long long)x->head_dim_v, x->is_causal,
             (long long)x->diagonal, (long long)x->window_left, (long long)x->window_right,
             x->softcap, x->scale, x->alibi, x->sinks, x->own_sinks, x->kv_start, x->kv_end,
             x->q_start, x->tokens_first, x->grad_lse, x->dropout, x->mask, x->bias);
    flash_data d = make_data(x);
    bind(x, &d);
    const flash_exact exact = check_fwd(x, &d);
    if (x->backward) check_bwd(x, &d, &exact);
    check_free(0);
}

/* ---- grids ----------------------------------------------------------------------------------- */
static const gk_dtype dtypes[] = {GK_F32, GK_BF16, GK_F16, GK_F64};

static flash_case plain(gk_dtype dtype, int64_t seq_q, int64_t seq_k, int64_t head_dim,
                        int64_t head_dim_v) {
    return (flash_case){.dtype = dtype,
                        .batch = 1,
                        .heads_q = 2,
                        .heads_kv = 1,
                        .seq_q = seq_q,
                        .seq_k = seq_k,
                        .head_dim = head_dim,
                        .head_dim_v = head_dim_v,
                        .window_left = -1,
                        .window_right = -1,
                        .scale = 1 / sqrt((double)head_dim),
                        .backward = true};
}

static void check_head_dims(gk_dtype dtype) {
    static const int64_t dims[] = {1, 7, 8, 16, 31, 64, 80, 96, 128, 256, 511, 512};
    for (int i = 0; i < CHECK_COUNT(dims); i += check_small() ? 4 : 1) {
        for (int j = 0; j < 3; ++j) { /* Dv = D, another Dv, causal */
            check_seed = (uint64_t)(i * 3 + j) * 64 + dtype;
            int64_t other = dims[(i + 5) % CHECK_COUNT(dims)];
            flash_case x = plain(dtype, 21, 35, dims[i], j == 1 ? other : dims[i]);
            x.is_causal = j == 2;
            x.diagonal = j == 2 ? 14 : 0;
            x.tokens_first = j == 1;
            check_flash_case(&x);
        }
    }
}

/* Lengths around vectors and tiles, with and without a causal diagonal. */
static void check_lengths(gk_dtype dtype) {
    static const int64_t lengths[] = {0, 1, 2, 15, 16, 17, 63, 64, 65, 130};
    int count = CHECK_COUNT(lengths);
    for (int i = 0; i < count * count; i += check_small() ? 9 : dtype == GK_F64 ? 3 : 1) {
        check_seed = (uint64_t)i * 64 + dtype;
        flash_case x = plain(dtype, lengths[i % count], lengths[i / count], 16, 24);
        x.is_causal = check_below(2);
        x.diagonal = x.is_causal && check_below(2) ? x.seq_k - x.seq_q : 0;
        x.tokens_first = check_below(2);
        check_flash_case(&x);
    }
    if (check_small()) return;
    for (int causal = 0; causal < 2; ++causal) { /* more than one tile in every dimension */
        check_seed = (uint64_t)causal * 64 + dtype;
        flash_case x = plain(dtype, 301, 545, 64, 64);
        x.is_causal = causal;
        x.backward = dtype != GK_F64;
        check_flash_case(&x);
    }
}

/* Sets option number i alone. */
static void apply(flash_case *x, int i) {
    switch (i) {
    case 0: x->is_causal = true; break;
    case 1: x->window_left = 5; break;
    case 2: x->window_right = 3; break;
    case 3: x->softcap = 1.5; break;
    case 4: x->alibi = 1; break;
    case 5: x->alibi = 2; break;
    case 6: x->sinks = true; break;
    case 7: x->kv_start = !x->packed; break;
    case 8: x->kv_end = !x->packed; break;
    case 9: x->grad_lse = true; break;
    case 10: x->diagonal = x->packed ? 0 : x->seq_k - x->seq_q; break;
    case 11: x->scale = -0.3; break;
    case 12: x->window_left = x->window_right = 0; break;
    case 13: x->diagonal = x->packed ? 0 : -x->seq_q / 2; break;
    case 14: x->scale = 0; break;
    case 15:
        x->window_left = INT64_MAX;
        x->window_right = INT64_MAX;
        break;
    case 16:
        x->diagonal = x->packed ? 0 : INT64_MIN / 2;
        x->is_causal = true;
        break;
    case 17: x->scale *= 40; break; /* nearly one-hot: the running maximum jumps */
    case 18: x->scale *= -15; break;
    case 19:
        x->q_start = !x->packed;
        x->is_causal = true;
        break;
    case 20:
        x->q_start = !x->packed;
        x->window_left = 9;
        x->window_right = 6;
        x->alibi = 2;
        break;
    case 21: x->sinks = x->own_sinks = true; break;
    case 22: x->dropout = 0.3; break;
    default: break;
    }
}
enum {
    NUM_MODIFIERS = 23
};

static void check_modifiers(gk_dtype dtype) {
    static const int64_t heads[][2] = {{1, 1}, {4, 4}, {4, 2}, {6, 1}};
    int alone = NUM_MODIFIERS * 2, combined = check_small() ? 12 : dtype == GK_F64 ? 40 : 150;
    for (int i = 0; i < alone + combined; ++i) {
        check_seed = (uint64_t)i * 64 + dtype;
        flash_case x = plain(dtype, 37, 53, 24, 16);
        x.packed = i < alone ? i % 2 : check_below(2);
        x.batch = 2;
        if (i < alone) {
            apply(&x, i / 2);
            x.sinks = x.sinks || i / 2 == 9; /* a gradient of lse also reaches the sinks */
        } else {
            int h = (int)check_below(CHECK_COUNT(heads));
            x.batch = 1 + check_below(3);
            x.heads_q = heads[h][0];
            x.heads_kv = heads[h][1];
            x.seq_q = 1 + check_below(90);
            x.seq_k = 1 + check_below(140);
            x.head_dim = 1 + check_below(40);
            x.head_dim_v = 1 + check_below(40);
            x.scale = 1 / sqrt((double)x.head_dim);
            x.tokens_first = check_below(2);
            for (int m = 2 + (int)check_below(4); m > 0; --m) apply(&x, (int)check_below(13));
            if (check_below(3) == 0) x.q_start = !x.packed;
            if (check_below(3) == 0) x.own_sinks = true;
            if (check_below(3) == 0) x.dropout = check_below(2) ? 0.1 : 0.5;
            if (x.window_left >= 0 && check_below(2)) x.window_left = check_below(60);
        }
        check_flash_case(&x);
    }
}

static void check_shapes_without_elements(gk_dtype dtype) {
    flash_case x = plain(dtype, 5, 7, 8, 8);
    x.batch = 0;
    check_flash_case(&x);
}

/* ---- refusals -------------------------------------------------------------------------------- */
static void set_i32(const check_tensor *t, int64_t i, int32_t value) { check_set(&t->t, i, value); }

static void check_refusals(void) {
    snprintf(check_case, sizeof check_case, "flash_attn refusals");
    check_seed = 1;
    flash_case x = plain(GK_F32, 6, 6, 8, 8);
    x.packed = true;
    x.batch = 2;
    flash_data d = make_data(&x);
    bind(&x, &d);
    check_tensor out = check_dense(GK_F32, 3, d.out_shape),
                 lse = check_dense(GK_F32, 2, d.lse_shape);
    check_remember(&out);
    check_remember(&lse);
    gk_context ctx = check_context(NULL, 1);
    gk_flash_attn_args args = d.args;
    args.out = out.t;
    args.lse = lse.t;
    check_workspace w = check_workspace_make(gk_flash_attn_fwd_workspace_bytes(&ctx, &args));
    args.workspace = w.data;
    args.workspace_bytes = w.bytes;
    int32_t end = (int32_t)check_get(&d.cu_k.t, 2);
    set_i32(&d.cu_k, 0, 1);
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_INDEX,
                  "cu_seqlens_k is expected to start at 0, got cu_seqlens_k[0] = 1");
    set_i32(&d.cu_k, 0, 0);
    set_i32(&d.cu_k, 1, 5);
    set_i32(&d.cu_k, 2, 4);
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_INDEX,
                  "not to decrease, got cu_seqlens_k[2] = 4 after 5");
    set_i32(&d.cu_k, 1, 0);
    set_i32(&d.cu_k, 2, 7);
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_INDEX,
                  "at most max_seqlen 6 tokens, got 7 in sequence 1");
    set_i32(&d.cu_k, 1, 6);
    set_i32(&d.cu_k, 2, 12);
    if (d.k.t.shape[0] < 12)
        check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_INDEX, "got cu_seqlens_k[2] = 12");
    set_i32(&d.cu_k, 1, 0);
    set_i32(&d.cu_k, 2, end);
    gk_flash_attn_args whole = args;
    whole.max_seqlen_k = end;
    whole.lse = (gk_tensor){.data = NULL}; /* not wanted, so it has no shape */
    check_result(gk_flash_attn_fwd(&ctx, &whole) == GK_OK, "without lse: %s", gk_last_error());
    check_remember(&out);
    whole.lse = lse.t;
    whole.lse.shape[0] += 1;
    check_refused(gk_flash_attn_fwd(&ctx, &whole), GK_ERR_ARGUMENT,
                  "gk_flash_attn_fwd: lse must have shape");
    whole.lse = lse.t;
    whole.out.data = d.q.t.data;
    check_refused(gk_flash_attn_fwd(&ctx, &whole), GK_ERR_ARGUMENT,
                  "gk_flash_attn_fwd: out shares memory with q");
    args.rules.scale = NAN;
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_ARGUMENT, "scale");
    args.rules.scale = 1e39;
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_ARGUMENT,
                  "scale must be at most 1e38 in size where q is float32, got 1e+39");
    args.rules.scale = 1e30;
    args.rules.softcap = 1e-9;
    check_refused(
        gk_flash_attn_fwd(&ctx, &args), GK_ERR_ARGUMENT,
        "scale must be at most 1e37 times softcap in size where q is float32, got 1e+30 and 1e-09");
    args.rules.scale = 1;
    args.rules.softcap = 0;
    args.rules.window_left = -2;
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_ARGUMENT, "window_left");
    args.rules.window_left = -1;
    args.max_seqlen_q = -100000;
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_ARGUMENT,
                  "max_seqlen_q must be 0 or more, got -100000");
    check_result(gk_flash_attn_fwd_workspace_bytes(&ctx, &args) == 0,
                 "workspace of a refused call");
    args.max_seqlen_q = INT64_MAX;
    check_result(gk_flash_attn_fwd_workspace_bytes(&ctx, &args) <= w.bytes * 64,
                 "max_seqlen 2^63 - 1 of few tokens");
    args.max_seqlen_q = 6;
    args.max_seqlen_k = -1;
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_ARGUMENT,
                  "max_seqlen_k must be 0 or more, got -1");
    args.max_seqlen_k = 6;
    args.v.shape[1] = 3;
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_ARGUMENT, "v");
    check_unchanged(&out, "out of a refused call");
    check_unchanged(&lse, "lse of a refused call");
    check_free(0);
}

/* Backward of 2^61 empty sequences, whose products once wrapped to 128,640 bytes, and empty
 * packed calls with as many heads. */
static void check_extremes(void) {
    snprintf(check_case, sizeof check_case, "flash_attn extremes");
    static const gk_dtype all[] = {GK_F32, GK_BF16, GK_F16, GK_F64};
    gk_context ctx = check_context(NULL, 1);
    for (int d = 0; d < CHECK_COUNT(all); ++d) {
        const int64_t many = INT64_C(1) << 61;
        const gk_dtype stats = gk_stats_dtype(all[d]);
        const gk_tensor x = {
            .dtype = all[d], .ndim = 4, .shape = {many, 1, 0, 8}, .stride = {8, 8, 8, 1}};
        const gk_tensor lse = {
            .dtype = stats, .ndim = 3, .shape = {many, 1, 0}, .stride = {1, 1, 1}};
        gk_flash_attn_bwd_args args = {
            .size = sizeof args,
            .fwd = {.size = sizeof args.fwd,
                    .q = x,
                    .k = x,
                    .v = x,
                    .out = x,
                    .lse = lse,
                    .rules = {.scale = 1, .window_left = -1, .window_right = -1}},
            .grad_out = x,
            .dq = x,
            .dk = x,
            .dv = x};
        check_refused(gk_flash_attn_bwd(&ctx, &args), GK_ERR_ARGUMENT,
                      " has more than 2^48 elements");
        check_refused(gk_flash_attn_fwd(&ctx, &args.fwd), GK_ERR_ARGUMENT,
                      "q has more than 2^48 elements");
        check_result(gk_flash_attn_bwd_workspace_bytes(&ctx, &args) == 0,
                     "workspace of a refused call");
    }
    int32_t ends[1] = {0};
    const gk_tensor q = {
        .dtype = GK_F32, .ndim = 3, .shape = {0, INT64_C(1) << 40, 8}, .stride = {8, 8, 1}};
    const gk_tensor lse = {.dtype = GK_F32,
                           .ndim = 2,
                           .shape = {0, INT64_C(1) << 40},
                           .stride = {INT64_C(1) << 40, 1}};
    const gk_tensor cu = {
        .data = ends, .dtype = GK_I32, .ndim = 1, .shape = {(INT64_C(1) << 40) + 1}, .stride = {0}};
    gk_flash_attn_args args = {.size = sizeof args,
                               .q = q,
                               .k = q,
                               .v = q,
                               .cu_seqlens_q = &cu,
                               .cu_seqlens_k = &cu,
                               .out = q,
                               .lse = lse,
                               .rules = {.scale = 1, .window_left = -1, .window_right = -1}};
    check_refused(gk_flash_attn_fwd(&ctx, &args), GK_ERR_ARGUMENT, "expected at most 2^44");
}

/* Masks with every kind of block, and biases, alone, together and with the other options. */
static void check_masks(gk_dtype dtype) {
    static const int64_t lengths[][2] = {{1, 300}, {140, 260}, {128, 128}, {300, 129}, {17, 1100}};
    for (int i = 0; i < CHECK_COUNT(lengths); ++i)
        for (int j = 0; j < 4; ++j) {
            if (check_small() && (i + j) % 4) continue;
            check_seed = (uint64_t)(i * 4 + j) * 64 + dtype + 7777;
            flash_case x = plain(dtype, lengths[i][0], lengths[i][1], 40, j == 1 ? 24 : 40);
            x.mask = j != 1;
            x.bias = j != 0;
            x.batch = 2;
            x.heads_q = j == 2 ? 6 : 2;
            x.heads_kv = j == 2 ? 2 : 1;
            x.sinks = x.grad_lse = j >= 2;
            if (j == 3) {
                x.is_causal = x.kv_end = true;
                x.diagonal = 60;
                x.softcap = 4;
                x.alibi = 1;
            }
            check_flash_case(&x);
        }
}

int main(void) {
    num_isas = check_isas();
    for (int d = 0; d < CHECK_COUNT(dtypes); ++d) {
        check_head_dims(dtypes[d]);
        check_lengths(dtypes[d]);
        check_modifiers(dtypes[d]);
        check_shapes_without_elements(dtypes[d]);
        check_masks(dtypes[d]);
    }
    check_refusals();
    check_extremes();
    check_every_instance_seen(GK_OP_FLASH_ATTN_FWD);
    check_every_instance_seen(GK_OP_FLASH_ATTN_BWD);
    return check_end();
}
