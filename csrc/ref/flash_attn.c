/* SPDX-License-Identifier: BSD-3-Clause */
/* ref/flash_attn: attention and its gradients in plain loops, in double, dense and packed, with
 * every option. Tests compare the kernels with it, and it serves float64 on the CPU.
 *
 *  s_ij = cap(scale q_i k_j) - slope |i + diagonal - j|   lse_i = log(e^sink + sum_j e^s_ij)
 *  p_ij = exp(s_ij - lse_i)   out_i = sum_j p_ij v_j        delta_i = dout_i . out_i - dlse_i
 *  dv_j = sum_i p_ij dout_i   ds_ij = p_ij (dout_i . v_j - delta_i) cap'(scale q_i k_j)
 *  dq_i = scale sum_j ds_ij k_j   dk_j = scale sum_i ds_ij q_i
 *  dsink = -sum_i exp(sink - lse_i) delta_i
 *
 * The backward is Algorithm 2 of Dao 2023, arXiv:2307.08691, run twice: by rows for dq, and by keys
 * for dk and dv. So no two tasks add to the same element. Nothing of size seq_q x seq_k is stored.
 *
 * A task owns REF_TOKENS tokens of one head. Within it, a block of up to REF_ROWS tokens of one
 * sequence shares every row that is loaded. */
#include "gpukern.h"
#include "attn.h"

typedef struct flash_job {
    const gk_flash_attn_args *x;
    const gk_flash_attn_bwd_args *bwd; /* NULL in the forward pass */
    ref_sequences q, k;
    int64_t tokens_q, tokens_k, heads_q, heads_kv, group, head_dim, head_dim_v;
    bool packed;
    gk_attn_keep dropout;
    const gk_attn_scores *scores; /* a mask or biases; NULL: none */
} flash_job;

static flash_job job_make(const gk_flash_attn_args *x) {
    flash_job job = {.x = x, .packed = x->cu_seqlens_q != NULL};
    int heads_dim = 1, tokens_dim = job.packed ? 0 : 2;
    int64_t batch = job.packed ? x->cu_seqlens_q->shape[0] - 1 : x->q.shape[0];
    job.q = (ref_sequences){x->cu_seqlens_q, batch, x->q.shape[tokens_dim]};
    job.k = (ref_sequences){x->cu_seqlens_k, batch, x->k.shape[tokens_dim]};
    job.tokens_q = job.packed ? x->q.shape[0] : batch * job.q.length;
    job.tokens_k = job.packed ? x->k.shape[0] : batch * job.k.length;
    job.heads_q = x->q.shape[heads_dim];
    job.heads_kv = x->k.shape[heads_dim];
    job.group = job.heads_kv ? job.heads_q / job.heads_kv : 1;
    job.head_dim = x->q.shape[x->q.ndim - 1];
    job.head_dim_v = x->v.shape[x->v.ndim - 1];
    job.dropout = gk_attn_keep_of(x);
    return job;
}

/* ---- offsets --------------------------------------------------------------------------------- */
/* Offset of token i and head h of sequence b (whose tokens start at `start`) in q, k, v, out,
 * their gradients or lse. */
static int64_t at(const flash_job *job, const gk_tensor *t, int64_t b, int64_t start, int64_t h,
                  int64_t i) {
    if (job->packed) return (start + i) * t->stride[0] + h * t->stride[1];
    return b * t->stride[0] + h * t->stride[1] + i * t->stride[2];
}

/* The row number by which dropout is drawn (formats/attn_dropout.h): the index of the token's
 * element in lse. */
static int64_t drop_row(const flash_job *job, int64_t b, int64_t start, int64_t h, int64_t i) {
    return job->packed ? (start + i) * job->heads_q + h
                       : (b * job->heads_q + h) * job->q.length + i;
}

static int64_t token_step(const flash_job *job, const gk_tensor *t) {
    return t->stride[job->packed ? 0 : 2];
}

/* One sequence: its first tokens, its lengths, and the keys that its rows see. */
typedef struct sequence {
    int64_t b, start_q, start_k, seq_q, seq_k, diagonal;
    gk_span span;
} sequence;

static sequence sequence_make(const flash_job *job, int64_t b) {
    const gk_attn_rules *r = &job->x->rules;
    sequence s = {.b = b, .start_q = ref_start(&job->q, b), .start_k = ref_start(&job->k, b)};
    s.seq_q = ref_start(&job->q, b + 1) - s.start_q;
    s.seq_k = ref_start(&job->k, b + 1) - s.start_k;
    s.diagonal = job->packed  ? s.seq_k - s.seq_q
                 : r->q_start ? gk_i32_at(r->q_start, b)
                              : r->diagonal;
    s.span = gk_span_make(r, s.seq_k, s.diagonal);
    s.diagonal = s.span.diagonal;
    gk_span_cut(&s.span, r, b);
    return s;
}

/* The terms that turn q k into a logit: scale, softcap and slope; mask and biases. */
static ref_score score_of(const flash_job *job, const sequence *s, int64_t h) {
    return ref_score_make(&job->x->rules, s->b, h, s->diagonal, 1);
}

static ref_scores scores_of(const flash_job *job, const sequence *s, int64_t h) {
    return ref_scores_make(job->scores, s->b, h, s->seq_q, s->seq_k);
}

static void zero_row(const gk_tensor *t, int64_t offset, int64_t n) {
    for (int64_t d = 0; d < n; ++d) gk_store(t->data, t->dtype, offset + d, 0);
}

static void store_row(const gk_tensor *t, int64_t offset, const double *x, double factor,
                      int64_t n) {
    for (int64_t d = 0; d < n; ++d) gk_store(t->data, t->dtype, offset + d, factor * x[d]);
}

/* ---- forward --------------------------------------------------------------------------------- */
static void fwd_rows(const flash_job *job, const sequence *s, int64_t h, int64_t i0, int64_t rows) {
    const gk_flash_attn_args *x = job->x;
    int64_t h_kv = h / job->group;
    ref_keys keys = {.k = &x->k, .v = &x->v};
    keys.k_at = at(job, &x->k, s->b, s->start_k, h_kv, 0);
    keys.v_at = at(job, &x->v, s->b, s->start_k, h_kv, 0);
    keys.k_step = token_step(job, &x->k);
    keys.v_step = token_step(job, &x->v);
    ref_score score = score_of(job, s, h);
    ref_scores scores = scores_of(job, s, h);
    ref_block block = {.q = &x->q,
                       .out = &x->out,
                       .lse = &x->lse,
                       .sinks = x->rules.sinks,
                       .keys = &keys,
                       .score = &score,
                       .v_scale = job->dropout.factor,
                       .dropout = job->dropout.most ? &job->dropout : NULL,
                       .accumulates = gk_accumulates(x),
                       .scores = job->scores ? &scores : NULL,
                       .head = h,
                       .i0 = i0,
                       .rows = rows};
    for (int64_t r = 0; r < rows; ++r) {
        block.q_at[r] = at(job, &x->q, s->b, s->start_q, h, i0 + r);
        block.out_at[r] = at(job, &x->out, s->b, s->start_q, h, i0 + r);
        block.lse_at[r] = at(job, &x->lse, s->b, s->start_q, h, i0 + r);
        block.drop_row[r] = drop_row(job, s->b, s->start_q, h, i0 + r);
        block.lo[r] = gk_span_lo(&s->span, i0 + r);
        block.hi[r] = gk_span_hi(&s->span, i0 + r);
    }
    ref_attend(&block);
}

static void fwd_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const flash_job *job = arg;
    const gk_flash_attn_args *x = job->x;
    int64_t h = task % job->heads_q, token = task / job->heads_q * REF_TOKENS;
    int64_t end = gk_min_i64(token + REF_TOKENS, job->tokens_q);
    while (token < end) {
        int64_t b = ref_owner(&job->q, token);
        if (b == job->q.batch) { /* token behind the last sequence */
            zero_row(&x->out, at(job, &x->out, 0, 0, h, token), job->head_dim_v);
            if (x->lse.data)
                gk_store(x->lse.data, x->lse.dtype, at(job, &x->lse, 0, 0, h, token), -INFINITY);
            ++token;
            continue;
        }
        sequence s = sequence_make(job, b);
        int64_t i0 = token - s.start_q;
        int64_t rows = gk_min_i64(REF_ROWS, gk_min_i64(end - token, s.seq_q - i0));
        fwd_rows(job, &s, h, i0, rows);
        token += rows;
    }
}

void gk_ref_flash_attn_fwd(const gk_context *ctx, const gk_flash_attn_args *args) {
    flash_job job = job_make(args);
    job.scores = gk_scores_of(args);
    gk_parallel(ctx, gk_ceil_div(job.tokens_q, REF_TOKENS) * job.heads_q, fwd_task, &job);
}

/* ---- backward: one row ----------------------------------------------------------------------- */
/* The values of row i of head h that both backward passes need. row_load returns false if lse is
 * -inf: the row saw no key and has no gradient. */
typedef struct row {
    double lse, delta;
    int64_t drop_row;
    const double *q, *dout;
    double q_buf[REF_MAX_HEAD_DIM], dout_buf[REF_MAX_HEAD_DIM];
} row;

static bool row_load(row *to, const flash_job *job, const sequence *s, int64_t h, int64_t i) {
    const gk_flash_attn_args *x = job->x;
    const gk_tensor *dout = &job->bwd->grad_out, *dlse = job->bwd->grad_lse;
    double out_buf[REF_MAX_HEAD_DIM];
    to->lse = gk_load(x->lse.data, x->lse.dtype, at(job, &x->lse, s->b, s->start_q, h, i));
    if (to->lse == -INFINITY) return false;
    to->q = ref_row(&x->q, at(job, &x->q, s->b, s->start_q, h, i), job->head_dim, to->q_buf);
    to->dout = ref_row(dout, at(job, dout, s->b, s->start_q, h, i), job->head_dim_v, to->dout_buf);
    const double *out =
        ref_row(&x->out, at(job, &x->out, s->b, s->start_q, h, i), job->head_dim_v, out_buf);
    to->drop_row = drop_row(job, s->b, s->start_q, h, i);
    to->delta = ref_dot(to->dout, out, job->head_dim_v);
    if (dlse) to->delta -= gk_load(dlse->data, dlse->dtype, at(job, dlse, s->b, s->start_q, h, i));
    return true;
}

/* For a row and a key within its span. p is the probability after dropout, the factor of dout in
 * dv. ds is the gradient of scale q k. raw is the gradient of the score, which is also the gradient
 * of a bias. Returns false if a mask or a bias hides the key. */
static bool pair_gradient(const flash_job *job, const ref_score *score, const ref_scores *scores,
                          const row *r, const double *k, const double *v, int64_t i, int64_t j,
                          double *p, double *ds, double *raw) {
    double slope_of_cap,
        logit = ref_logit(score, ref_dot(r->q, k, job->head_dim), i, j, &slope_of_cap);
    if (!ref_scores_add(scores, i, j, &logit)) return false;
    const double factor = gk_attn_kept(&job->dropout, r->drop_row, j) ? job->dropout.factor : 0;
    const double all = exp(logit - r->lse);
    *p = factor * all;
    *raw = all * (factor * ref_dot(r->dout, v, job->head_dim_v) - r->delta);
    *ds = *raw * slope_of_cap;
    return true;
}

/* ---- backward by rows: dq -------------------------------------------------------------------- */
static void dq_row(const flash_job *job, const sequence *s, int64_t h, int64_t i) {
    const gk_flash_attn_args *x = job->x;
    const gk_tensor *dq = &job->bwd->dq;
    int64_t h_kv = h / job->group;
    double sum[REF_MAX_HEAD_DIM] = {0}, k_buf[REF_MAX_HEAD_DIM], v_buf[REF_MAX_HEAD_DIM];
    ref_score score = score_of(job, s, h);
    ref_scores scores = scores_of(job, s, h);
    int64_t lo = gk_span_lo(&s->span, i), hi = gk_span_hi(&s->span, i);
    row r;
    if (lo < hi && row_load(&r, job, s, h, i)) {
        for (int64_t j = lo; j < hi; ++j) {
            const double *k =
                ref_row(&x->k, at(job, &x->k, s->b, s->start_k, h_kv, j), job->head_dim, k_buf);
            const double *v =
                ref_row(&x->v, at(job, &x->v, s->b, s->start_k, h_kv, j), job->head_dim_v, v_buf);
            double p, ds, raw;
            if (pair_gradient(job, &score, &scores, &r, k, v, i, j, &p, &ds, &raw))
                ref_add_scaled(sum, ds, k, job->head_dim);
        }
    }
    store_row(dq, at(job, dq, s->b, s->start_q, h, i), sum, x->rules.scale, job->head_dim);
}

static void dq_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const flash_job *job = arg;
    int64_t h = task % job->heads_q, begin = task / job->heads_q * REF_TOKENS;
    int64_t end = gk_min_i64(begin + REF_TOKENS, job->tokens_q);
    for (int64_t token = begin; token < end; ++token) {
        int64_t b = ref_owner(&job->q, token);
        if (b == job->q.batch) {
            zero_row(&job->bwd->dq, at(job, &job->bwd->dq, 0, 0, h, token), job->head_dim);
            continue;
        }
        sequence s = sequence_make(job, b);
        dq_row(job, &s, h, token - s.start_q);
    }
}

/* ---- backward by keys: dk, dv ---------------------------------------------------------------- */
static void dkv_keys(const flash_job *job, const sequence *s, int64_t h_kv, int64_t j0,
                     int64_t keys) {
    const gk_flash_attn_args *x = job->x;
    /* The sums are taken in two levels: dk_part and dv_part over REF_KEYS rows, which are then
     * added to dk and dv. */
    double dk[REF_ROWS][REF_MAX_HEAD_DIM], dv[REF_ROWS][REF_MAX_HEAD_DIM];
    double dk_part[REF_ROWS][REF_MAX_HEAD_DIM], dv_part[REF_ROWS][REF_MAX_HEAD_DIM];
    double k_buf[REF_ROWS][REF_MAX_HEAD_DIM], v_buf[REF_ROWS][REF_MAX_HEAD_DIM];
    const double *k[REF_ROWS], *v[REF_ROWS];
    for (int64_t c = 0; c < keys; ++c) {
        k[c] =
            ref_row(&x->k, at(job, &x->k, s->b, s->start_k, h_kv, j0 + c), job->head_dim, k_buf[c]);
        v[c] = ref_row(&x->v, at(job, &x->v, s->b, s->start_k, h_kv, j0 + c), job->head_dim_v,
                       v_buf[c]);
        for (int64_t d = 0; d < job->head_dim; ++d) dk[c][d] = dk_part[c][d] = 0;
        for (int64_t d = 0; d < job->head_dim_v; ++d) dv[c][d] = dv_part[c][d] = 0;
    }
    for (int64_t h = h_kv * job->group; h < (h_kv + 1) * job->group; ++h) {
        ref_score score = score_of(job, s, h);
        ref_scores scores = scores_of(job, s, h);
        for (int64_t i = 0; i < s->seq_q; ++i) {
            int64_t lo = gk_max_i64(gk_span_lo(&s->span, i), j0),
                    hi = gk_min_i64(gk_span_hi(&s->span, i), j0 + keys);
            row r;
            bool seen = lo < hi && row_load(&r, job, s, h, i);
            for (int64_t j = lo; seen && j < hi; ++j) {
                double p, ds, raw;
                if (!pair_gradient(job, &score, &scores, &r, k[j - j0], v[j - j0], i, j, &p, &ds,
                                   &raw))
                    continue;
                ref_add_scaled(dk_part[j - j0], ds, r.q, job->head_dim);
                ref_add_scaled(dv_part[j - j0], p, r.dout, job->head_dim_v);
            }
            for (int64_t c = 0; (i % REF_KEYS == REF_KEYS - 1 || i == s->seq_q - 1) && c < keys;
                 ++c) {
                for (int64_t d = 0; d < job->head_dim; ++d) {
                    dk[c][d] += dk_part[c][d];
                    dk_part[c][d] = 0;
                }
                for (int64_t d = 0; d < job->head_dim_v; ++d) {
                    dv[c][d] += dv_part[c][d];
                    dv_part[c][d] = 0;
                }
            }
        }
    }
    for (int64_t c = 0; c < keys; ++c) {
        const gk_tensor *to_k = &job->bwd->dk, *to_v = &job->bwd->dv;
        store_row(to_k, at(job, to_k, s->b, s->start_k, h_kv, j0 + c), dk[c], x->rules.scale,
                  job->head_dim);
        store_row(to_v, at(job, to_v, s->b, s->start_k, h_kv, j0 + c), dv[c], 1, job->head_dim_v);
    }
}

static void dkv_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const flash_job *job = arg;
    int64_t h_kv = task % job->heads_kv, token = task / job->heads_kv * REF_TOKENS;
    int64_t end = gk_min_i64(token + REF_TOKENS, job->tokens_k);
    while (token < end) {
        int64_t b = ref_owner(&job->k, token);
        if (b == job->k.batch) {
            zero_row(&job->bwd->dk, at(job, &job->bwd->dk, 0, 0, h_kv, token), job->head_dim);
            zero_row(&job->bwd->dv, at(job, &job->bwd->dv, 0, 0, h_kv, token), job->head_dim_v);
            ++token;
            continue;
        }
        sequence s = sequence_make(job, b);
        int64_t j0 = token - s.start_k;
        int64_t keys = gk_min_i64(REF_ROWS, gk_min_i64(end - token, s.seq_k - j0));
        dkv_keys(job, &s, h_kv, j0, keys);
        token += keys;
    }
}

/* ---- backward of the sinks ------------------------------------------------------------------- */
/* The sum of P (dP - delta) over the keys of this call. Used if they are a part of all keys
 * (is_part; gpukern.h has the equation). */
static double part_of_row(const flash_job *job, const sequence *s, const row *r, int64_t h,
                          int64_t i) {
    const gk_flash_attn_args *x = job->x;
    double sum = 0, k_buf[REF_MAX_HEAD_DIM], v_buf[REF_MAX_HEAD_DIM];
    ref_score score = score_of(job, s, h);
    for (int64_t j = gk_span_lo(&s->span, i); j < gk_span_hi(&s->span, i); ++j) {
        const int64_t h_kv = h / job->group;
        const double *k =
            ref_row(&x->k, at(job, &x->k, s->b, s->start_k, h_kv, j), job->head_dim, k_buf);
        const double *v =
            ref_row(&x->v, at(job, &x->v, s->b, s->start_k, h_kv, j), job->head_dim_v, v_buf);
        double slope, logit = ref_logit(&score, ref_dot(r->q, k, job->head_dim), i, j, &slope);
        sum += exp(logit - r->lse) * (ref_dot(r->dout, v, job->head_dim_v) - r->delta);
    }
    return sum;
}

/* True if row i of head h sees a key. */
static bool sees_any(const flash_job *job, const sequence *s, int64_t h, int64_t i) {
    const int64_t lo = gk_span_lo(&s->span, i), hi = gk_span_hi(&s->span, i);
    const ref_scores scores = scores_of(job, s, h);
    double none = 0;
    for (int64_t j = lo; j < hi; ++j)
        if (ref_scores_add(&scores, i, j, &none)) return true;
    return false;
}

/* A task owns one head. A row that sees no key has lse = sink, so it contributes its grad_lse. Its
 * grad_out is not read and may be NaN. */
static void dsink_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const flash_job *job = arg;
    const gk_tensor *sinks = job->x->rules.sinks, *dsinks = job->bwd->dsinks,
                    *dlse = job->bwd->grad_lse;
    double sink = gk_load(sinks->data, sinks->dtype, task * sinks->stride[0]);
    double sum = 0, lost = 0; /* compensated sum (Neumaier 1974); lost: its rounding errors */
    for (int64_t b = 0; b < job->q.batch && sink != -INFINITY; ++b) {
        sequence s = sequence_make(job, b);
        for (int64_t i = 0; i < s.seq_q; ++i) {
            row r;
            double x = 0;
            if (sees_any(job, &s, task, i)) {
                if (!row_load(&r, job, &s, task, i)) continue;
                x = -exp(sink - r.lse) *
                    (job->bwd->is_part ? part_of_row(job, &s, &r, task, i) : r.delta);
            } else if (dlse && !job->bwd->is_part) {
                x = gk_load(dlse->data, dlse->dtype, at(job, dlse, s.b, s.start_q, task, i));
            }
            double next = sum + x;
            lost += fabs(sum) >= fabs(x) ? sum - next + x : x - next + sum;
            sum = next;
        }
    }
    gk_store(dsinks->data, dsinks->dtype, task * dsinks->stride[0],
             isfinite(sum) ? sum + lost : sum);
}

/* ---- backward of biases ---------------------------------------------------------------------- */
/* Adds the gradients of the scores of row i, head h and keys [j0, j0 + n) to sum[0], sum[step], ..
 * step is 0 if the bias has one column: then all of them are added to sum[0]. */
static void add_row_gradients(const flash_job *job, const sequence *s, int64_t h, int64_t i,
                              int64_t j0, int64_t n, double *sum, int64_t step) {
    const gk_flash_attn_args *x = job->x;
    const int64_t h_kv = h / job->group;
    const int64_t lo = gk_max_i64(gk_span_lo(&s->span, i), j0),
                  hi = gk_min_i64(gk_span_hi(&s->span, i), j0 + n);
    double k_buf[REF_MAX_HEAD_DIM], v_buf[REF_MAX_HEAD_DIM];
    const ref_score score = score_of(job, s, h);
    const ref_scores scores = scores_of(job, s, h);
    row r;
    if (lo >= hi || !row_load(&r, job, s, h, i)) return;
    for (int64_t j = lo; j < hi; ++j) {
        const double *k =
            ref_row(&x->k, at(job, &x->k, s->b, s->start_k, h_kv, j), job->head_dim, k_buf);
        const double *v =
            ref_row(&x->v, at(job, &x->v, s->b, s->start_k, h_kv, j), job->head_dim_v, v_buf);
        double p, ds, raw;
        if (pair_gradient(job, &score, &scores, &r, k, v, i, j, &p, &ds, &raw))
            sum[(j - j0) * step] += raw;
    }
}

/* A task owns up to REF_TOKENS columns of one row of dbias. */
static void dbias_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const flash_job *job = arg;
    const gk_tensor *t = gk_dbias_of(job->bwd);
    const int64_t parts = gk_ceil_div(t->shape[3], REF_TOKENS), col = task % parts * REF_TOKENS,
                  row_of = task / parts;
    const int64_t i_of = row_of % t->shape[2], h_of = row_of / t->shape[2] % t->shape[1];
    const int64_t b_of = row_of / t->shape[2] / t->shape[1];
    const bool all_keys = t->shape[3] == 1;
    const int64_t cols = gk_min_i64(REF_TOKENS, t->shape[3] - col);
    double sum[REF_TOKENS] = {0};
    for (int64_t b = b_of; b < (t->shape[0] == 1 ? job->q.batch : b_of + 1); ++b) {
        const sequence s = sequence_make(job, b);
        for (int64_t h = h_of; h < (t->shape[1] == 1 ? job->heads_q : h_of + 1); ++h)
            for (int64_t i = i_of; i < (t->shape[2] == 1 ? s.seq_q : i_of + 1); ++i)
                add_row_gradients(job, &s, h, i, all_keys ? 0 : col, all_keys ? s.seq_k : cols, sum,
                                  !all_keys);
    }
    for (int64_t c = 0; c < cols; ++c)
        gk_store(t->data, t->dtype, row_of * t->shape[3] + col + c, sum[c]);
}

/* A task owns one distance of one head. */
static void ddistance_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const flash_job *job = arg;
    const gk_tensor *t = gk_ddistance_of(job->bwd);
    const int64_t h_of = task / t->shape[1], distance = task % t->shape[1] - (job->q.length - 1);
    double sum = 0;
    for (int64_t b = 0; b < job->q.batch; ++b) {
        const sequence s = sequence_make(job, b);
        for (int64_t h = h_of; h < (t->shape[0] == 1 ? job->heads_q : h_of + 1); ++h)
            for (int64_t i = gk_max_i64(0, -distance); i < gk_min_i64(s.seq_q, s.seq_k - distance);
                 ++i)
                add_row_gradients(job, &s, h, i, i + distance, 1, &sum, 0);
    }
    gk_store(t->data, t->dtype, task, sum);
}

void gk_ref_flash_attn_bwd(const gk_context *ctx, const gk_flash_attn_bwd_args *args) {
    flash_job job = job_make(&args->fwd);
    job.bwd = args;
    job.scores = gk_scores_of_bwd(args);
    gk_parallel(ctx, gk_ceil_div(job.tokens_q, REF_TOKENS) * job.heads_q, dq_task, &job);
    gk_parallel(ctx, gk_ceil_div(job.tokens_k, REF_TOKENS) * job.heads_kv, dkv_task, &job);
    if (args->dsinks && args->fwd.rules.sinks) gk_parallel(ctx, job.heads_q, dsink_task, &job);
    const gk_tensor *dbias = gk_dbias_of(args), *ddistance = gk_ddistance_of(args);
    if (dbias) {
        const int64_t rows = dbias->shape[0] * dbias->shape[1] * dbias->shape[2];
        gk_parallel(ctx, rows * gk_ceil_div(dbias->shape[3], REF_TOKENS), dbias_task, &job);
    }
    if (ddistance) gk_parallel(ctx, gk_numel(ddistance), ddistance_task, &job);
}
