/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_bias: gradients of biases, sums of dS over what broadcasts. Included by
 * flash_attn_bwd.c alone.
 *
 * Each pair of a query and a key is met once, by the task of its sequence, kv head and chunk of
 * keys. Sums are float32:
 *   bias [.., Sq, Sk]   one [B', H', Sq, Sk] of bias's B' and H'. Tasks that share B' or H' run in phases, one after the other.
 *   bias [.., 1, Sk]    [B, Hq, Sk], a task adds to its keys alone
 *   bias [.., 1]        [B, Hq, chunks, Sq]
 *   distance_bias       [B, Hq, chunks, Sq + Sk]
 * A last step adds the parts up in order and in double, so that the bits depend on shapes alone. */

typedef enum dbias_form {
    DBIAS_NONE,
    DBIAS_PAIRS,
    DBIAS_KEYS,
    DBIAS_ROWS
} dbias_form;

static dbias_form dbias_form_of(const gk_tensor *dbias, int64_t seq_q, int64_t seq_k) {
    if (!dbias) return DBIAS_NONE;
    if (dbias->shape[3] == 1 && seq_k != 1) return DBIAS_ROWS;
    return dbias->shape[2] == 1 && seq_q != 1 ? DBIAS_KEYS : DBIAS_PAIRS;
}

static dbias_form own_form(const job *g) {
    return dbias_form_of(gk_dbias_of(g->args), g->shape.max_seq_q, g->shape.max_seq_k);
}

/* Whether the sums of [.., Sq, Sk] are the gradient itself. */
static bool sums_in_place(const gk_tensor *dbias) { return dbias->dtype == GK_F32; }

static int64_t dbias_floats(const gk_flash_attn_bwd_args *a, const sizes *z, const attn_shape *s) {
    const gk_tensor *dbias = gk_dbias_of(a);
    switch (dbias_form_of(dbias, s->max_seq_q, s->max_seq_k)) {
    case DBIAS_PAIRS: return sums_in_place(dbias) ? 0 : gk_numel(dbias);
    case DBIAS_KEYS: return s->batch * s->heads_q * s->max_seq_k;
    case DBIAS_ROWS: return s->batch * s->heads_q * z->chunks * s->max_seq_q;
    default: return 0;
    }
}

/* Where the sums of one head begin: [Sq][Sk], [Sk] or a chunk's [Sq]. */
static float *dbias_of(const job *g, int64_t b, int64_t h, int64_t chunk) {
    const gk_tensor *dbias = gk_dbias_of(g->args);
    float *sums = (float *)(g->workspace + g->z.dbias_at);
    const int64_t seq_q = g->shape.max_seq_q, seq_k = g->shape.max_seq_k,
                  head = b * g->shape.heads_q + h;
    switch (own_form(g)) {
    case DBIAS_PAIRS: {
        const int64_t own_b = dbias->shape[0] == 1 ? 0 : b, own_h = dbias->shape[1] == 1 ? 0 : h;
        if (sums_in_place(dbias)) sums = dbias->data;
        return sums + (own_b * dbias->shape[1] + own_h) * seq_q * seq_k;
    }
    case DBIAS_KEYS: return sums + head * seq_k;
    default: return sums + (head * g->z.chunks + chunk) * seq_q;
    }
}

static float *ddistance_of(const job *g, int64_t b, int64_t h, int64_t chunk) {
    return (float *)(g->workspace + g->z.ddistance_at) +
           ((b * g->shape.heads_q + h) * g->z.chunks + chunk) *
               (g->shape.max_seq_q + g->shape.max_seq_k);
}

/* Phases of the main step: tasks of one phase add to different sums. */
static int64_t phases_b(const job *g) {
    return own_form(g) == DBIAS_PAIRS && gk_dbias_of(g->args)->shape[0] == 1 ? g->shape.batch : 1;
}
static int64_t phases_h(const job *g) {
    return own_form(g) == DBIAS_PAIRS && gk_dbias_of(g->args)->shape[1] == 1 ? g->shape.heads_kv
                                                                             : 1;
}

/* The number of a phase's task among all of them. */
static int64_t phase_task(const job *g, int64_t task) {
    if (!g->has_scores) return task;
    const int64_t by_b = phases_b(g), by_h = phases_h(g), heads_kv = g->shape.heads_kv;
    const int64_t many_b = g->shape.batch / by_b, many_h = heads_kv / by_h,
                  per_chunk = many_b * many_h;
    const int64_t chunk = task / per_chunk, b = task % per_chunk / many_h, h = task % many_h;
    const int64_t phase_b = by_b > 1 ? g->phase / by_h : 0,
                  phase_h = by_h > 1 ? g->phase % by_h : 0;
    return chunk * g->z.heads + (b + phase_b) * heads_kv + h + phase_h;
}

static int64_t begin_dbias(const job *g) {
    const gk_tensor *dbias = gk_dbias_of(g->args);
    if (own_form(g) != DBIAS_PAIRS) return 1;
    if (sums_in_place(dbias))
        memset(dbias->data, 0, 4 * (size_t)gk_numel(dbias));
    else
        memset(g->workspace + g->z.dbias_at, 0, 4 * (size_t)gk_numel(dbias));
    return gk_max_i64(1, phases_b(g) * phases_h(g));
}

/* Zeros in what a task alone adds to: dQ of its slice, and its parts of the gradients of biases. */
static void begin_own_sums(const job *g, int64_t b, int64_t h_kv, int64_t chunk, int64_t slice) {
    const sizes *z = &g->z;
    const int64_t seq_q = g->shape.max_seq_q, seq_k = g->shape.max_seq_k, group = g->shape.group;
    float *const dq =
        (float *)(g->workspace + z->dq_at) + slice * group * z->dq_blocks * z->dq_block;
    memset(dq, 0, 4 * (size_t)(group * z->dq_blocks * z->dq_block));
    const dbias_form form = own_form(g);
    const int64_t first = gk_min_i64(chunk * z->chunk_keys, seq_k),
                  end = gk_min_i64(first + z->chunk_keys, seq_k);
    for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
        if (form == DBIAS_KEYS)
            memset(dbias_of(g, b, h, chunk) + first, 0, 4 * (size_t)(end - first));
        if (form == DBIAS_ROWS) memset(dbias_of(g, b, h, chunk), 0, 4 * (size_t)seq_q);
        if (gk_ddistance_of(g->args))
            memset(ddistance_of(g, b, h, chunk), 0, 4 * (size_t)(seq_q + seq_k));
    }
}

/* Adds a strip's dS, transposed, to rows [Sk] of sums. */
static void add_pairs(const pair *t, const strip *r, int64_t keys, float *sums) {
    const int64_t ld = t->g->z.ld_q, seq_k = t->g->shape.max_seq_k;
    for (int64_t l = r->lane0; l < gk_min_i64(r->lane1, t->rows); l += W)
        for (int64_t k = 0; k < keys; k += W) {
            const int64_t n = gk_min_i64(W, keys - k);
            vc x[W];
            for (int64_t i = 0; i < W; ++i)
                x[i] = i < n ? (vc)vf_load(t->w->raw + (k + i) * ld + l) : vc_set1(0);
            vc_transpose(x);
            for (int64_t i = 0; i < gk_min_i64(W, t->rows - l); ++i) {
                float *to = sums + (t->i0 + l + i) * seq_k + t->key0 + r->key + k;
                vf_store_first(to, vf_load_first(to, n) + (vf)x[i], n);
            }
        }
}

static void add_dbias(const pair *t, const strip *r) {
    const job *g = t->g;
    const int64_t ld = g->z.ld_q, lanes = gk_min_i64(r->lane1, t->rows), key = t->key0 + r->key;
    const int64_t keys = gk_min_i64(r->keys, t->keys - r->key);
    const dbias_form form = own_form(g);
    float *sums = form == DBIAS_NONE ? NULL : dbias_of(g, t->b, t->h, t->chunk);
    if (form == DBIAS_PAIRS) add_pairs(t, r, keys, sums);
    if (form == DBIAS_KEYS)
        for (int64_t k = 0; k < keys; ++k) {
            vf all = vf_set1(0);
            for (int64_t l = r->lane0; l < lanes; l += W)
                all += vf_load_first(t->w->raw + k * ld + l, lanes - l);
            float part[W], sum = 0;
            vf_store(part, all);
            for (int i = 0; i < W; ++i) sum += part[i];
            sums[key + k] += sum;
        }
    if (form == DBIAS_ROWS)
        for (int64_t l = r->lane0; l < lanes; l += W) {
            vf all = vf_set1(0);
            for (int64_t k = 0; k < keys; ++k) all += vf_load(t->w->raw + k * ld + l);
            float *to = sums + t->i0 + l;
            vf_store_first(to, vf_load_first(to, lanes - l) + all, lanes - l);
        }
    if (!gk_ddistance_of(g->args)) return;
    /* the diagonals of this pair of tiles first: a sum of fewer terms errs less */
    float part[MAX_BQ + MAX_BKV] = {0};
    for (int64_t k = 0; k < keys; ++k) {
        const float *from = t->w->raw + k * ld;
        float *to = part + k + lanes - 1;
        for (int64_t l = r->lane0; l < lanes; ++l) to[-l] += from[l];
    }
    float *distance =
        ddistance_of(g, t->b, t->h, t->chunk) + key - t->i0 - (lanes - 1) + g->shape.max_seq_q - 1;
    for (int64_t e = 0; e < keys + lanes - 1 - r->lane0; ++e) distance[e] += part[e];
}

/* The gradients from their parts. */
static void end_dbias(const job *g) {
    const gk_tensor *dbias = gk_dbias_of(g->args), *ddistance = gk_ddistance_of(g->args);
    const dbias_form form = own_form(g);
    const float *sums = (const float *)(g->workspace + g->z.dbias_at);
    const int64_t seq_q = g->shape.max_seq_q, seq_k = g->shape.max_seq_k;
    if (form == DBIAS_PAIRS && !sums_in_place(dbias))
        for (int64_t i = 0; i < gk_numel(dbias); ++i)
            gk_store(dbias->data, dbias->dtype, i, sums[i]);
    for (int64_t own_b = 0; form >= DBIAS_KEYS && own_b < dbias->shape[0]; ++own_b)
        for (int64_t own_h = 0; own_h < dbias->shape[1]; ++own_h)
            for (int64_t e = 0; e < dbias->shape[2] * dbias->shape[3]; ++e) {
                double sum = 0;
                for (int64_t b = own_b; b < (dbias->shape[0] == 1 ? g->shape.batch : own_b + 1);
                     ++b)
                    for (int64_t h = own_h;
                         h < (dbias->shape[1] == 1 ? g->shape.heads_q : own_h + 1); ++h) {
                        if (form == DBIAS_KEYS) sum += dbias_of(g, b, h, 0)[e];
                        if (form == DBIAS_KEYS) continue;
                        for (int64_t chunk = 0; chunk < g->z.chunks; ++chunk) {
                            const float *rows = dbias_of(g, b, h, chunk);
                            if (dbias->shape[2] == 1)
                                for (int64_t i = 0; i < seq_q; ++i) sum += rows[i];
                            else
                                sum += rows[e];
                        }
                    }
                gk_store(dbias->data, dbias->dtype,
                         (own_b * dbias->shape[1] + own_h) * dbias->shape[2] * dbias->shape[3] + e,
                         sum);
            }
    for (int64_t own_h = 0; ddistance && own_h < ddistance->shape[0]; ++own_h)
        for (int64_t e = 0; e < seq_q + seq_k - 1; ++e) {
            double sum = 0;
            for (int64_t b = 0; b < g->shape.batch; ++b)
                for (int64_t h = own_h;
                     h < (ddistance->shape[0] == 1 ? g->shape.heads_q : own_h + 1); ++h)
                    for (int64_t chunk = 0; chunk < g->z.chunks; ++chunk)
                        sum += ddistance_of(g, b, h, chunk)[e];
            ((float *)ddistance->data)[own_h * (seq_q + seq_k - 1) + e] = (float)sum;
        }
}
