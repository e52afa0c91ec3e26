/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_tile.h: attention of a block of queries over the keys of one kv head, dense or paged.
 * Algorithm 1 of Dao 2023, arXiv:2307.08691, transposed: a row is a key, and a lane is a query.
 *
 *   S^T = K Q^T     P^T = exp(score(S^T) - m)
 *   O^T = O^T exp(m_old - m) + V^T P^T     O = (O^T / l)^T
 *
 * A lane is a pair of a query row and a head of the GQA group, so the whole group shares every
 * tile of keys. Lanes are ordered by row, so the bounds lo and hi never decrease from lane to lane.
 * A strip is NR lanes. All buffers of a strip are contiguous. vec.h defines cells, PAIR, W and NR.
 *
 *   scratch of one worker (cells and floats are 4 bytes)
 *     q  [bq / NR][cells(D)][NR] cells        Q^T, packed once
 *     k  [bkv][cells(D), padded to W] cells   a tile of keys, converted
 *     v  [cells(bkv)][Dv, padded to W] cells  a tile of values; if a cell is a pair, two
 *                                             neighbouring keys are interleaved
 *     s  [bkv, padded to PAIR][NR] floats     scores of one strip; P^T overwrites them, as cells
 *     o  [bq / NR][Dv][NR] floats             O^T
 *     decoded  [bkv][D + Dv]                  keys and values of 8-bit pages, in q's dtype
 *     bias  [bkv][NR] floats                  bias of one strip's scores, if the call has one
 *
 * For each tile of keys:
 *   pack K and V
 *   for each strip: S^T = K Q^T; P^T, m and l from S^T; rescale O^T where m grew; O^T += V^T P^T
 *
 * A strip's scores stay in the L1 from one product to the next. Each strip reads the tiles of K and
 * V from the L2 once. On AMX, P^T already has the layout of operand B, V is stored transposed,
 * [Dv][cells(bkv)], and cells are padded with zeros to whole tiles. */
#ifndef GPUKERN_CPU_ATTN_TILE_H
#define GPUKERN_CPU_ATTN_TILE_H

#include "attn.h"
#include "attn_drop.h"
#include "attn_scores.h"
#include "vec_math.h"
#include "../blocks.h"

enum {
    ATTN_MAX_BQ = 256,
    ATTN_MAX_BKV = 256
};
_Static_assert(ATTN_MAX_BQ % NR == 0, "strips fill a block");

/* m need not be the largest score. It may be smaller by this much, so that p stays below 2^8. O^T
 * is rescaled only when m is raised, and a larger lag makes that rarer. */
static const float attn_lag = 8 / ATTN_UNIT_LOG2;

/* ---- keys: dense | paged --------------------------------------------------------------------- */
typedef struct attn_keys {
    const char *k, *v; /* key 0 of this kv head; of page 0, if keys are in pages */
    int64_t k_row_bytes, v_row_bytes;
    const int32_t *pages; /* this sequence's row of block_table; NULL: keys are not in pages */
    int64_t pages_step;   /* elements */
    int64_t page_size;    /* keys of a page */
    int64_t k_page_bytes, v_page_bytes;
    /* For pages of 8-bit codes, otherwise NULL: decodes keys j .. j + n to `to`, in q's dtype, and
     * sets k and v to the decoded rows. */
    void (*decode)(const struct attn_keys *keys, int64_t j, int64_t n, const char **k,
                   const char **v, char *to);
    const void *codes; /* an argument of decode: paged_codes */
    int64_t head;
    const gk_attn_keep *dropout; /* its row of a lane is lse_at; NULL: no dropout */
} attn_keys;

/* Addresses of keys j .. j + n. */
INLINE void attn_keys_at(const attn_keys *x, int64_t j, int64_t n, const char **k, const char **v) {
    if (!x->pages) {
        for (int64_t i = 0; i < n; ++i) {
            k[i] = x->k + (j + i) * x->k_row_bytes;
            v[i] = x->v + (j + i) * x->v_row_bytes;
        }
        return;
    }
    int64_t entry = j / x->page_size, row = j % x->page_size;
    for (int64_t i = 0; i < n; ++entry, row = 0) {
        const int64_t page = x->pages[entry * x->pages_step];
        for (; i < n && row < x->page_size; ++i, ++row) {
            k[i] = x->k + page * x->k_page_bytes + row * x->k_row_bytes;
            v[i] = x->v + page * x->v_page_bytes + row * x->v_row_bytes;
        }
    }
}

/* ---- lanes ----------------------------------------------------------------------------------- */
typedef struct attn_lanes {
    int64_t count; /* lanes in use; the other lanes of the last strip are copies of the last one */
    int64_t lo[ATTN_MAX_BQ], hi[ATTN_MAX_BQ];         /* keys seen */
    int64_t position[ATTN_MAX_BQ];                    /* i + diagonal */
    int64_t out_at[ATTN_MAX_BQ], lse_at[ATTN_MAX_BQ]; /* elements */
    const char *q[ATTN_MAX_BQ];
    float slope[ATTN_MAX_BQ];             /* ATTN_UNIT */
    float m[ATTN_MAX_BQ], l[ATTN_MAX_BQ]; /* running maximum (ATTN_UNIT, may lag) and sum of p */
    float sink[ATTN_MAX_BQ];              /* not in ATTN_UNIT */
} attn_lanes;

/* The values that every block of a call shares. */
typedef struct attn_job {
    const gk_attn_rules *rules;
    gk_dtype dtype, out_dtype; /* out_dtype: dtype or float32 */
    int64_t head_dim, head_dim_v, group, bq, bkv;
    int64_t sum_cells; /* of scores */
    void *out;
    float *lse;
    int64_t decoded_bytes; /* of a key and a value of 8-bit pages as rows of dtype; else 0 */
    /* out, which is float32, and lse have the attention over other keys. The result over these keys
     * is merged into them. */
    bool accumulates;
    const attn_scores *scores; /* a mask or a bias (flash_attn_fwd.c); NULL: neither */
} attn_job;

/* Lanes first .. first + count of kv head h_kv in sequence x (number b of the batch). */
INLINE void attn_lanes_fill(attn_lanes *to, const attn_job *job, const attn_seq *x, int64_t b,
                            int64_t h_kv, int64_t first, int64_t count) {
    const gk_attn_rules *r = job->rules;
    const int64_t element_bytes = job->dtype == GK_F32 ? 4 : 2;
    to->count = count;
    for (int64_t n = 0; n < gk_round_up(count, NR); ++n) {
        const int64_t lane = first + gk_min_i64(n, count - 1);
        const int64_t i = lane / job->group, h = h_kv * job->group + lane % job->group;
        to->lo[n] = gk_span_lo(&x->span, i);
        to->hi[n] = gk_span_hi(&x->span, i);
        to->position[n] = i + x->span.diagonal;
        to->out_at[n] = x->out_first + i * x->out_row + h * x->out_head;
        to->lse_at[n] = x->lse_first + i * x->lse_row + h * x->lse_head;
        to->q[n] = x->q + element_bytes * (i * x->q_row + h * x->q_head);
        to->slope[n] = attn_slope(r, b, h) * ATTN_UNIT;
        const float sink = (float)gk_sink_of(r, h);
        to->m[n] = attn_sink(sink); /* -FLT_MAX without a sink */
        to->l[n] = sink == -INFINITY ? 0 : 1;
        to->sink[n] = sink;
    }
}

/* ---- scratch --------------------------------------------------------------------------------- */
typedef struct attn_scratch {
    cell *q, *k, *v;
    float *s, *o, *bias;
    char *decoded;
    int64_t q_strip, o_strip, k_step, v_step; /* elements */
    int64_t bytes;
} attn_scratch;

INLINE attn_scratch attn_scratch_at(char *base, const attn_job *job) {
    attn_scratch x;
    x.q_strip = whole_cells(job->head_dim) * NR;
    x.o_strip = job->head_dim_v * NR;
    x.k_step = gk_round_up(cells_of(job->head_dim), W);
    /* on AMX one cache line more, so that rows do not share sets of the L1 */
    x.v_step = TILED ? whole_cells(job->bkv) + W : gk_round_up(job->head_dim_v, W);
    const int64_t strips = job->bq / NR;
    int64_t at = 0;
    x.q = gk_at(base, at);
    at += gk_round_up(4 * strips * x.q_strip, 64);
    x.k = gk_at(base, at);
    at += gk_round_up(4 * job->bkv * x.k_step, 64);
    x.v = gk_at(base, at);
    at += gk_round_up(4 * (TILED ? job->head_dim_v : cells_of(job->bkv)) * x.v_step, 64);
    x.s = gk_at(base, at);
    at += gk_round_up(4 * gk_round_up(job->bkv, PAIR) * NR, 64);
    x.o = gk_at(base, at);
    at += gk_round_up(4 * strips * x.o_strip, 64);
    x.decoded = gk_at(base, at);
    at += gk_round_up(job->bkv * job->decoded_bytes, 64);
    x.bias = gk_at(base, at);
    if (job->scores && attn_has_bias(job->scores)) at += 4 * job->bkv * NR;
    x.bytes = at;
    return x;
}

/* ---- packing --------------------------------------------------------------------------------- */
/* Packs Q^T. Float cells are multiplied by the scale; pairs are not, because that would round. */
INLINE void attn_pack_q(const attn_scratch *x, const attn_lanes *lanes, gk_dtype dtype,
                        int64_t head_dim, float scale) {
    const int64_t cells = cells_of(head_dim);
    for (int64_t n = 0; n < gk_round_up(lanes->count, NR); n += W) {
        cell *to = x->q + n / NR * x->q_strip + n % NR;
        for (int64_t c = 0; c < cells; c += W) {
            vc r[W];
            for (int i = 0; i < W; ++i)
                r[i] = vc_scale(
                    vc_load_along_k(lanes->q[n + i], dtype, c * PAIR, head_dim - c * PAIR), scale);
            vc_transpose(r);
            for (int64_t i = 0; i < gk_min_i64(W, whole_cells(head_dim) - c); ++i)
                vc_store(to + (c + i) * NR, r[i]);
        }
    }
}

INLINE void attn_pack_k(const attn_scratch *x, const char *const *k, int64_t n, gk_dtype dtype,
                        int64_t head_dim) {
    for (int64_t j = 0; j < n; ++j)
        for (int64_t c = 0; c < cells_of(head_dim); c += W)
            vc_store(x->k + j * x->k_step + c,
                     vc_load_along_k(k[j], dtype, c * PAIR, head_dim - c * PAIR));
}

INLINE void attn_pack_v(const attn_scratch *x, const char *const *v, int64_t n, gk_dtype dtype,
                        int64_t head_dim_v) {
#if TILED
    pack_columns(x->v, x->v_step, v, n, dtype, head_dim_v);
    return;
#endif
    for (int64_t j = 0; j < n; j += PAIR) {
        const char *next = PAIR == 2 && j + 1 < n ? v[j + 1] : NULL;
        for (int64_t d = 0; d < head_dim_v; d += W)
            vc_store(x->v + j / PAIR * x->v_step + d,
                     vc_load_across_k(v[j], next, dtype, d, head_dim_v - d));
    }
}

/* ---- softmax of a strip ---------------------------------------------------------------------- */
/* Bounds of W lanes, counted from key j0 of a tile of n. */
INLINE vi attn_relative(const int64_t *bounds, int64_t j0, int64_t n) {
    int32_t t[W];
    for (int i = 0; i < W; ++i) t[i] = (int32_t)gk_clamp_i64(bounds[i] - j0, 0, n);
    return vi_load(t);
}

/* A strip's mask and bias. */
typedef struct attn_strip_scores {
    vi word[4][NV];    /* bits of the block of 128 keys */
    int64_t column;    /* of key j0 in that block */
    const float *bias; /* [n][NR] in ATTN_UNIT */
} attn_strip_scores;

/* Replaces the dot products of keys j0 .. j0 + n in s [n][NR] by scores, and writes the largest of
 * each lane to `top`. The score of a key that a lane does not see is -inf.
 *
 * score_step: whether scores are computed here (see attn_block). edge: whether a bound lo or hi of
 * a lane is in this tile. words, biased: whether own->word and own->bias are used. */
INLINE void attn_top_scores(float *s, int64_t n, int64_t j0, const attn_lanes *lanes, int64_t lane,
                            const attn_job *job, float scale, vf top[NV], const int nv,
                            const bool score_step, const bool edge, const attn_strip_scores *own,
                            const bool words, const bool biased) {
    const float softcap = (float)job->rules->softcap;
    const float cap_in = score_step && softcap > 0 ? scale / softcap : 0;
    vf slope[NV], position[NV];
    vi lo[NV], hi[NV];
    for (int v = 0; v < nv; ++v) {
        top[v] = vf_set1(-INFINITY);
        if (score_step) {
            slope[v] = vf_load(lanes->slope + lane + v * W);
            float t[W];
            for (int i = 0; i < W; ++i) t[i] = (float)(lanes->position[lane + v * W + i] - j0);
            position[v] = vf_load(t);
        }
        if (edge) {
            lo[v] = attn_relative(lanes->lo + lane + v * W, j0, n);
            hi[v] = attn_relative(lanes->hi + lane + v * W, j0, n);
        }
    }

    /* Scores that changed are stored, so that attn_weights needs no such cases. */
    for (int64_t j = 0; j < n; ++j)
#pragma GCC unroll 4
        for (int v = 0; v < nv; ++v) {
            float *at = s + j * NR + v * W;
            vf x = vf_load(at);
            if (score_step) {
                x = softcap > 0 ? vf_tanh(x * cap_in) * (softcap * ATTN_UNIT)
                                : x * (scale * ATTN_UNIT);
                vf distance = position[v] - (float)j;
                x = x - slope[v] * vf_max(-distance, distance);
            }
            if (biased) x = attn_biased(x, vf_load(own->bias + j * NR + v * W));
            if (words)
                x = vf_select(attn_sees(&own->word[0][v], NV, own->column + j), x,
                              vf_set1(-INFINITY));
            if (edge) {
                const vi row = vi_set1((int32_t)j);
                x = vf_select(vi_lt(row, lo[v]), vf_set1(-INFINITY), x);
                x = vf_select(vi_lt(row, hi[v]), x, vf_set1(-INFINITY));
            }
            if (score_step || edge || words || biased) vf_store(at, x);
            top[v] = vf_max(top[v], x);
        }
}

/* Raises m to the largest score if it lags by more than attn_lag, and rescales l. Writes m, and to
 * `shrink` the factor of O^T. Returns whether O^T must be multiplied by it. If one lane of a vector
 * lags, m is raised in all lanes of the vector, or with `by_lane` only in the lanes that lag. */
INLINE bool attn_raise(attn_lanes *lanes, int64_t lane, const vf top[NV], float factor, vf m[NV],
                       vf shrink[NV], const int nv, const bool by_lane) {
    bool moved = false;
    for (int v = 0; v < NV; ++v) shrink[v] = vf_set1(1);
    for (int v = 0; v < nv; ++v) {
        const vf l = vf_load(lanes->l + lane + v * W);
        m[v] = vf_load(lanes->m + lane + v * W);
        const vf largest = top[v] * factor;
        const vm lags = vf_lt(m[v] + attn_lag, largest);
        if (vm_any(lags)) {
            vf to = vf_max(m[v], largest);
            if (by_lane) to = vf_select(lags, to, m[v]);
            shrink[v] = attn_p(m[v], 1, to);
            m[v] = to;
            moved |= vm_any(vf_lt(vf_set1(0), l));
            vf_store(lanes->m + lane + v * W, to);
            vf_store(lanes->l + lane + v * W, l * shrink[v]);
        }
    }
    return moved;
}

/* Replaces the scores in s by p, as cells [cells(n)][NR], and adds the sum of p to l. */
INLINE void attn_weights(float *s, int64_t n, attn_lanes *lanes, int64_t lane, float factor,
                         const vf m[NV], const int nv) {
    vf sum[NV];
    for (int v = 0; v < nv; ++v) sum[v] = vf_set1(0);
    if (n % PAIR) /* the pair's missing key */
        for (int v = 0; v < nv; ++v) vf_store(s + n * NR + v * W, vf_set1(-INFINITY));
    for (int64_t j = 0; j < n; j += PAIR)
#pragma GCC unroll 4
        for (int v = 0; v < nv; ++v) {
            const float *at = s + j * NR + v * W;
            vf p[2];
            for (int i = 0; i < PAIR; ++i) {
                p[i] = attn_p(vf_load(at + i * NR), factor, m[v]);
                sum[v] += p[i];
            }
            vc_store((cell *)s + j / PAIR * NR + v * W, vc_from_rows(p[0], p[PAIR - 1]));
        }
    for (int64_t c = cells_of(n); c < whole_cells(n); ++c)
        for (int v = 0; v < nv; ++v) vc_store((cell *)s + c * NR + v * W, vc_set1(0));
    for (int v = 0; v < nv; ++v) {
        float *l = lanes->l + lane + v * W;
        vf_store(l, vf_load(l) + sum[v]);
    }
}

/* The softmax of keys j0 .. j0 + n for nv vectors of lanes. s [n][NR] has dot products before the
 * call, and p after it, as cells [cells(n)][NR]. A dot product times `scale` is the scaled score.
 * Returns true if O^T must be multiplied by *shrink.
 *
 * m starts at -FLT_MAX and stays finite, so a masked score (-inf) gives exactly 0 and never
 * inf - inf. A NaN reaches l. `own` is NULL unless the call has a mask or a bias. With it m is
 * raised lane by lane, so that a lane's bits do not depend on the keys that its neighbours see. */
INLINE bool attn_softmax(float *s, int64_t n, int64_t j0, attn_lanes *lanes, int64_t lane,
                         const attn_job *job, float scale, vf shrink[NV], const int nv,
                         const bool score_step, const bool edge, const attn_strip_scores *own,
                         const bool words, const bool biased) {
    vf top[NV], m[NV];
    attn_top_scores(s, n, j0, lanes, lane, job, scale, top, nv, score_step, edge, own, words,
                    biased);
    const float factor = score_step || PAIR == 1 ? 1 : scale * ATTN_UNIT;
    const bool moved = attn_raise(lanes, lane, top, factor, m, shrink, nv, own != NULL);
    attn_weights(s, n, lanes, lane, factor, m, nv);
    return moved;
}

/* Dropout sets elements of p to 0 after they were summed. */
INLINE void attn_drop(cell *p, int64_t n, int64_t j0, const attn_lanes *lanes, int64_t lane,
                      const int nv, const gk_attn_keep *dropout) {
    vi keep[(ATTN_MAX_BKV / 32 + 2) * NV];
    for (int v = 0; v < nv; ++v)
        attn_keep_words(dropout, lanes->lse_at + lane + v * W, j0, n, keep + v, NV);
    for (int64_t j = 0; j < n; j += PAIR)
        for (int v = 0; v < nv; ++v) {
            vi kept = attn_keeps(keep + v, NV, j0, j0 + j);
            if (PAIR == 2) {
                const vi next = j + 1 < n ? attn_keeps(keep + v, NV, j0, j0 + j + 1) : vi_set1(0);
                kept = (kept & 0xffff) | (next & ~0xffff);
            }
            int32_t *at = (int32_t *)p + j / PAIR * NR + v * W;
            vc x;
            memcpy(&x, at, sizeof x);
            x = (vc)((vi)x & kept);
            memcpy(at, &x, sizeof x);
        }
}

/* ---- storing the result ---------------------------------------------------------------------- */
/* Merges two results over different keys, with lse `other` and `own`:
 * out = share * other result + (1 - share) * own result. Returns the lse over all keys. If the
 * other result has no keys, share is -1 and that result must not be read. A NaN of either lse is
 * kept. */
INLINE float attn_join(float other, float own, float *share) {
    if (other == -INFINITY) {
        *share = -1;
        return own;
    }
    const double peak = other > own ? other : own;
    const double a = exp(other - peak), b = exp(own - peak);
    *share = (float)(a / (a + b));
    return (float)(peak + log(a + b));
}

INLINE void attn_store(const attn_scratch *x, const attn_lanes *lanes, const attn_job *job,
                       float v_scale) {
    float share[ATTN_MAX_BQ] = {0}; /* of the result that out has already */
    for (int64_t n = 0; job->accumulates && n < lanes->count; ++n) {
        float *lse = job->lse + lanes->lse_at[n];
        *lse = attn_join(*lse, attn_lse(lanes->m[n], lanes->l[n], lanes->sink[n]), share + n);
    }
    for (int64_t n = 0; n < lanes->count; n += W) {
        const float *from = x->o + n / NR * x->o_strip + n % NR;
        const vf l = vf_load(lanes->l + n);
        const vm empty = vf_lt(l, vf_set1(FLT_MIN)); /* false for NaN */
        const vf factor = v_scale / l;
        for (int64_t d = 0; d < job->head_dim_v; d += W) {
            vc r[W];
            for (int i = 0; i < W; ++i) {
                vf o = d + i < job->head_dim_v ? vf_load(from + (d + i) * NR) * factor : vf_set1(0);
                r[i] = (vc)vf_select(empty, vf_set1(0), o);
            }
            vc_transpose(r);
            for (int64_t i = 0; i < gk_min_i64(W, lanes->count - n); ++i) {
                const int64_t at = lanes->out_at[n + i] + d;
                vf row = (vf)r[i];
                if (job->accumulates && !(share[n + i] < 0)) /* true for NaN */
                    row = share[n + i] * vf_load_dtype(job->out, GK_F32, at, job->head_dim_v - d) +
                          (1 - share[n + i]) * row;
                vf_store_dtype(job->out, job->out_dtype, at, row, job->head_dim_v - d);
            }
        }
    }
    for (int64_t n = 0; !job->accumulates && n < lanes->count; ++n) {
        if (job->lse)
            job->lse[lanes->lse_at[n]] = attn_lse(lanes->m[n], lanes->l[n], lanes->sink[n]);
    }
}

/* Sets out [T, Hq, Dv] to 0 and lse [T, Hq] to -inf for the tokens from `first` on, which belong to
 * no sequence. */
INLINE void attn_clear_tokens(const gk_tensor *out, float *lse, int64_t first) {
    const int64_t element_bytes = out->dtype == GK_F32 ? 4 : 2, heads = out->shape[1];
    for (int64_t t = first; t < out->shape[0]; ++t)
        for (int64_t h = 0; h < heads; ++h) {
            const int64_t at = t * out->stride[0] + h * out->stride[1];
            memset((char *)out->data + element_bytes * at, 0,
                   (size_t)(element_bytes * out->shape[2]));
            if (lse) lse[t * heads + h] = -INFINITY;
        }
}

/* ---- the end of a tile and of a block -------------------------------------------------------- */
/* O^T += V^T P^T for one strip and n keys. P^T is in x->s. If `moved`, O^T is first multiplied by
 * `shrink`, which has a vector for each of the strip's nv vectors of lanes. *started: whether O^T
 * has a sum already. */
INLINE void attn_add_values(const attn_scratch *x, const attn_job *job, int64_t strip, int64_t n,
                            int64_t width, const int nv, bool moved, const vf shrink[NV],
                            bool *started) {
    float *o = x->o + strip * x->o_strip;
    if (moved && *started)
        for (int64_t d = 0; d < job->head_dim_v; ++d)
            for (int w = 0; w < nv; ++w) {
                float *at = o + d * NR + w * W;
                vf_store(at, vf_load(at) * shrink[w]);
            }
    tile_product(SUM_CELLS, TILED, job->head_dim_v, width, cells_of(n), x->v, x->v_step,
                 (const cell *)x->s, NR, o, NR, *started);
    *started = true;
}

/* Stores out and lse. A strip that saw no key has O^T = 0. */
INLINE void attn_end_block(const attn_scratch *x, const attn_lanes *lanes, const attn_job *job,
                           const bool *started, float v_scale) {
    for (int64_t strip = 0; strip * NR < lanes->count; ++strip)
        if (!started[strip]) memset(x->o + strip * x->o_strip, 0, 4 * (size_t)x->o_strip);
    release_tiles();
    attn_store(x, lanes, job, v_scale);
}

/* ---- the block ------------------------------------------------------------------------------- */
INLINE void attn_block(const attn_job *job, attn_lanes *lanes, const attn_keys *keys, float scale,
                       float v_scale, char *scratch) {
    const attn_scratch x = attn_scratch_at(scratch, job);
    const int64_t head_dim = job->head_dim, head_dim_v = job->head_dim_v, last = lanes->count - 1;
    const char *k[ATTN_MAX_BKV], *v[ATTN_MAX_BKV];
    bool started[ATTN_MAX_BQ / NR] = {false};
    /* The factor that turns a dot product into a scaled score. Float cells of q have it already. */
    const float to_score = PAIR == 2 ? scale : 1;
    /* If nothing else changes the scores and the factor is positive, the largest dot product is the
     * largest score. The softmax then applies the factor inside the exponential and needs no score
     * step. */
    const bool score_step = job->rules->softcap > 0 || job->rules->alibi_slopes || !(to_score > 0);

    attn_pack_q(&x, lanes, job->dtype, head_dim, scale);
    const int64_t first = lanes->lo[0], end = lanes->hi[last];
    /* Tiles begin at multiples of bkv from the first key, so that a row's bits do not depend on the
     * block that it is in. */
    for (int64_t j = first; j < end; j += job->bkv) {
        const int64_t n = gk_min_i64(job->bkv, end - j);
        attn_keys_at(keys, j, n, k, v);
        if (keys->decode) keys->decode(keys, j, n, k, v, x.decoded);
        attn_pack_k(&x, k, n, job->dtype, head_dim);
        attn_pack_v(&x, v, n, job->dtype, head_dim_v);
        for (int64_t lane = 0; lane <= last; lane += NR) {
            const int64_t strip = lane / NR, strip_last = gk_min_i64(lane + NR - 1, last),
                          width = strip_last - lane + 1;
            if (lanes->hi[strip_last] <= j || lanes->lo[lane] >= j + n) continue;
            const bool edge = lanes->lo[strip_last] > j || lanes->hi[lane] < j + n;
            const int nv = width > W ? NV : 1;
            vf shrink[NV];
            bool moved;
            tile_product(job->sum_cells, true, n, width, cells_of(head_dim), x.k, x.k_step,
                         x.q + strip * x.q_strip, NR, x.s, NR, false);
            if (nv == 1)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, to_score, shrink, 1, true, true,
                                     NULL, false, false);
            else if (score_step)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, to_score, shrink, NV, true, true,
                                     NULL, false, false);
            else if (edge)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, to_score, shrink, NV, false, true,
                                     NULL, false, false);
            else
                moved = attn_softmax(x.s, n, j, lanes, lane, job, to_score, shrink, NV, false,
                                     false, NULL, false, false);
            if (keys->dropout) attn_drop((cell *)x.s, n, j, lanes, lane, nv, keys->dropout);
            attn_add_values(&x, job, strip, n, width, nv, moved, shrink, &started[strip]);
        }
    }
    attn_end_block(&x, lanes, job, started, v_scale);
}

#endif
