/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_dbias.h: gradients of attention's biases for flash_attn_bwd.c: sums of dS over what a bias
 * broadcasts.
 *
 * Each pair of a query and a key is met once, by the task of its sequence, kv head and chunk of
 * keys. The tasks add in float32:
 *   bias [.., Sq, Sk]   to one [B', H', Sq, Sk] of the bias's own B' and H'. Tasks that share B' or
 *                       H' run in phases, one after the other.
 *   bias [.., 1, Sk]    to [B, Hq, Sk]; a task adds to its keys alone
 *   bias [.., 1]        to [B, Hq, chunks, Sq]
 *   distance_bias       to [B, Hq, chunks, Sq + Sk]
 * A last step adds the parts up in order and in double, so the bits depend on shapes alone. */
#ifndef GPUKERN_CPU_ATTN_DBIAS_H
#define GPUKERN_CPU_ATTN_DBIAS_H

#include "attn_scores.h"

enum {
    DBIAS_MAX_DIAGONALS = 512 /* rows and keys of a strip together */
};

typedef enum dbias_form {
    DBIAS_NONE,
    DBIAS_PAIRS,
    DBIAS_KEYS,
    DBIAS_ROWS
} dbias_form;

typedef struct attn_dbias {
    const gk_tensor *dbias, *ddistance; /* NULL = not wanted */
    dbias_form form;
    float *sums, *distances; /* in the workspace */
    int64_t batch, heads_q, heads_kv, chunks, seq_q, seq_k;
} attn_dbias;

/* A strip of dS: keys key0 .. key0 + keys of the sequence by rows row0 .. row0 + rows; raw is
 * [keys][ld] with a lane a row. */
typedef struct dbias_strip {
    int64_t b, h, chunk, key0, keys, row0, rows;
    const float *raw;
    int64_t ld;
} dbias_strip;

INLINE dbias_form dbias_form_of(const gk_tensor *dbias, int64_t seq_q, int64_t seq_k) {
    if (!dbias) return DBIAS_NONE;
    if (dbias->shape[3] == 1 && seq_k != 1) return DBIAS_ROWS;
    return dbias->shape[2] == 1 && seq_q != 1 ? DBIAS_KEYS : DBIAS_PAIRS;
}

/* Whether the sums of [.., Sq, Sk] are the gradient itself. */
INLINE bool sums_in_place(const gk_tensor *dbias) { return dbias->dtype == GK_F32; }

/* ---- memory ---------------------------------------------------------------------------------- */
INLINE int64_t dbias_bytes(const gk_flash_attn_bwd_args *a, const attn_shape *s, int64_t chunks) {
    const gk_tensor *dbias = gk_dbias_of(a);
    switch (dbias_form_of(dbias, s->max_seq_q, s->max_seq_k)) {
    case DBIAS_PAIRS: return sums_in_place(dbias) ? 0 : 4 * gk_numel(dbias);
    case DBIAS_KEYS: return 4 * s->batch * s->heads_q * s->max_seq_k;
    case DBIAS_ROWS: return 4 * s->batch * s->heads_q * chunks * s->max_seq_q;
    default: return 0;
    }
}
INLINE int64_t ddistance_bytes(const gk_flash_attn_bwd_args *a, const attn_shape *s,
                               int64_t chunks) {
    if (!gk_ddistance_of(a)) return 0;
    return 4 * s->batch * s->heads_q * chunks * (s->max_seq_q + s->max_seq_k);
}

INLINE attn_dbias attn_dbias_of(const gk_flash_attn_bwd_args *a, const attn_shape *s,
                                int64_t chunks, void *sums, void *distances) {
    return (attn_dbias){.dbias = gk_dbias_of(a),
                        .ddistance = gk_ddistance_of(a),
                        .form = dbias_form_of(gk_dbias_of(a), s->max_seq_q, s->max_seq_k),
                        .sums = sums,
                        .distances = distances,
                        .batch = s->batch,
                        .heads_q = s->heads_q,
                        .heads_kv = s->heads_kv,
                        .chunks = chunks,
                        .seq_q = s->max_seq_q,
                        .seq_k = s->max_seq_k};
}

/* The sums of one head: [Sq][Sk], [Sk] or a chunk's [Sq]. */
INLINE float *dbias_sums(const attn_dbias *d, int64_t b, int64_t h, int64_t chunk) {
    const int64_t head = b * d->heads_q + h;
    if (d->form == DBIAS_KEYS) return d->sums + head * d->seq_k;
    if (d->form != DBIAS_PAIRS) return d->sums + (head * d->chunks + chunk) * d->seq_q;
    float *sums = sums_in_place(d->dbias) ? d->dbias->data : d->sums;
    const int64_t own_b = d->dbias->shape[0] == 1 ? 0 : b;
    const int64_t own_h = d->dbias->shape[1] == 1 ? 0 : h;
    return sums + (own_b * d->dbias->shape[1] + own_h) * d->seq_q * d->seq_k;
}

INLINE float *ddistance_sums(const attn_dbias *d, int64_t b, int64_t h, int64_t chunk) {
    const int64_t part = (b * d->heads_q + h) * d->chunks + chunk;
    return d->distances + part * (d->seq_q + d->seq_k);
}

/* ---- phases of the main step ----------------------------------------------------------------- */
/* Tasks of one phase add to different sums. */
INLINE int64_t phases_b(const attn_dbias *d) {
    return d->form == DBIAS_PAIRS && d->dbias->shape[0] == 1 ? d->batch : 1;
}
INLINE int64_t phases_h(const attn_dbias *d) {
    return d->form == DBIAS_PAIRS && d->dbias->shape[1] == 1 ? d->heads_kv : 1;
}
INLINE int64_t num_phases(const attn_dbias *d) { return gk_max_i64(1, phases_b(d) * phases_h(d)); }

/* The number of a phase's task among the tasks of all phases, [chunk][sequence][kv head]. */
INLINE int64_t phase_task(const attn_dbias *d, int64_t phase, int64_t task) {
    const int64_t by_b = phases_b(d), by_h = phases_h(d);
    const int64_t many_b = d->batch / by_b, many_h = d->heads_kv / by_h;
    const int64_t chunk = task / (many_b * many_h);
    const int64_t b = task % (many_b * many_h) / many_h + (by_b > 1 ? phase / by_h : 0);
    const int64_t h = task % many_h + (by_h > 1 ? phase % by_h : 0);
    return (chunk * d->batch + b) * d->heads_kv + h;
}

/* ---- the sums -------------------------------------------------------------------------------- */
/* Before all tasks. */
INLINE void begin_dbias(const attn_dbias *d) {
    if (d->form != DBIAS_PAIRS) return;
    void *sums = sums_in_place(d->dbias) ? d->dbias->data : d->sums;
    memset(sums, 0, 4 * (size_t)gk_numel(d->dbias));
}

/* Zeros in the sums of one head that a task alone adds to; its keys are first .. end. */
INLINE void begin_dbias_head(const attn_dbias *d, int64_t b, int64_t h, int64_t chunk,
                             int64_t first, int64_t end) {
    if (d->form == DBIAS_KEYS)
        memset(dbias_sums(d, b, h, chunk) + first, 0, 4 * (size_t)(end - first));
    if (d->form == DBIAS_ROWS) memset(dbias_sums(d, b, h, chunk), 0, 4 * (size_t)d->seq_q);
    if (d->ddistance) memset(ddistance_sums(d, b, h, chunk), 0, 4 * (size_t)(d->seq_q + d->seq_k));
}

/* sums[row][key] += dS, which is transposed on the way. */
INLINE void add_pairs(const attn_dbias *d, const dbias_strip *r, float *sums) {
    for (int64_t l = 0; l < r->rows; l += W)
        for (int64_t k = 0; k < r->keys; k += W) {
            const int64_t n = gk_min_i64(W, r->keys - k);
            vc x[W];
            for (int64_t i = 0; i < W; ++i)
                x[i] = i < n ? (vc)vf_load(r->raw + (k + i) * r->ld + l) : vc_set1(0);
            vc_transpose(x);
            for (int64_t i = 0; i < gk_min_i64(W, r->rows - l); ++i) {
                float *to = sums + (r->row0 + l + i) * d->seq_k + r->key0 + k;
                vf_store_first(to, vf_load_first(to, n) + (vf)x[i], n);
            }
        }
}

/* sums[key] += the sum of dS over rows. */
INLINE void add_keys(const dbias_strip *r, float *sums) {
    for (int64_t k = 0; k < r->keys; ++k) {
        vf all = vf_set1(0);
        for (int64_t l = 0; l < r->rows; l += W)
            all += vf_load_first(r->raw + k * r->ld + l, r->rows - l);
        float part[W], sum = 0;
        vf_store(part, all);
        for (int i = 0; i < W; ++i) sum += part[i];
        sums[r->key0 + k] += sum;
    }
}

/* sums[row] += the sum of dS over keys. */
INLINE void add_rows(const dbias_strip *r, float *sums) {
    for (int64_t l = 0; l < r->rows; l += W) {
        vf all = vf_set1(0);
        for (int64_t k = 0; k < r->keys; ++k) all += vf_load(r->raw + k * r->ld + l);
        float *to = sums + r->row0 + l;
        vf_store_first(to, vf_load_first(to, r->rows - l) + all, r->rows - l);
    }
}

/* sums[key - row] += dS. The strip's own diagonals come first: a sum of fewer terms errs less. */
INLINE void add_distances(const attn_dbias *d, const dbias_strip *r, float *sums) {
    float part[DBIAS_MAX_DIAGONALS] = {0};
    for (int64_t k = 0; k < r->keys; ++k) {
        const float *from = r->raw + k * r->ld;
        float *to = part + k + r->rows - 1;
        for (int64_t l = 0; l < r->rows; ++l) to[-l] += from[l];
    }
    sums += r->key0 - r->row0 - (r->rows - 1) + d->seq_q - 1;
    for (int64_t e = 0; e < r->keys + r->rows - 1; ++e) sums[e] += part[e];
}

/* Adds a strip's dS to all gradients that are wanted. */
static void add_dbias(const attn_dbias *d, const dbias_strip *r) {
    float *sums = d->form == DBIAS_NONE ? NULL : dbias_sums(d, r->b, r->h, r->chunk);
    if (d->form == DBIAS_PAIRS) add_pairs(d, r, sums);
    if (d->form == DBIAS_KEYS) add_keys(r, sums);
    if (d->form == DBIAS_ROWS) add_rows(r, sums);
    if (d->ddistance) add_distances(d, r, ddistance_sums(d, r->b, r->h, r->chunk));
}

/* ---- the gradients from their parts ---------------------------------------------------------- */
/* Element e of the gradient of [.., 1, Sk] or [.., 1] of one sequence and head. */
INLINE double dbias_part(const attn_dbias *d, int64_t b, int64_t h, int64_t e, double sum) {
    if (d->form == DBIAS_KEYS) return sum + dbias_sums(d, b, h, 0)[e];
    for (int64_t chunk = 0; chunk < d->chunks; ++chunk) {
        const float *rows = dbias_sums(d, b, h, chunk);
        if (d->dbias->shape[2] == 1)
            for (int64_t i = 0; i < d->seq_q; ++i) sum += rows[i];
        else
            sum += rows[e];
    }
    return sum;
}

INLINE void end_dbias_parts(const attn_dbias *d) {
    const gk_tensor *t = d->dbias;
    const int64_t row = t->shape[2] * t->shape[3];
    const int64_t many_b = t->shape[0] == 1 ? d->batch : 1;
    const int64_t many_h = t->shape[1] == 1 ? d->heads_q : 1;
    for (int64_t own_b = 0; own_b < t->shape[0]; ++own_b)
        for (int64_t own_h = 0; own_h < t->shape[1]; ++own_h)
            for (int64_t e = 0; e < row; ++e) {
                double sum = 0;
                for (int64_t b = own_b; b < own_b + many_b; ++b)
                    for (int64_t h = own_h; h < own_h + many_h; ++h)
                        sum = dbias_part(d, b, h, e, sum);
                gk_store(t->data, t->dtype, (own_b * t->shape[1] + own_h) * row + e, sum);
            }
}

INLINE void end_ddistance(const attn_dbias *d) {
    const int64_t entries = d->seq_q + d->seq_k - 1;
    const int64_t many_h = d->ddistance->shape[0] == 1 ? d->heads_q : 1;
    for (int64_t own_h = 0; own_h < d->ddistance->shape[0]; ++own_h)
        for (int64_t e = 0; e < entries; ++e) {
            double sum = 0;
            for (int64_t b = 0; b < d->batch; ++b)
                for (int64_t h = own_h; h < own_h + many_h; ++h)
                    for (int64_t chunk = 0; chunk < d->chunks; ++chunk)
                        sum += ddistance_sums(d, b, h, chunk)[e];
            ((float *)d->ddistance->data)[own_h * entries + e] = (float)sum;
        }
}

/* After all tasks. */
static void end_dbias(const attn_dbias *d) {
    if (d->form == DBIAS_PAIRS && !sums_in_place(d->dbias))
        for (int64_t i = 0; i < gk_numel(d->dbias); ++i)
            gk_store(d->dbias->data, d->dbias->dtype, i, d->sums[i]);
    if (d->form == DBIAS_KEYS || d->form == DBIAS_ROWS) end_dbias_parts(d);
    if (d->ddistance) end_ddistance(d);
}

#endif
