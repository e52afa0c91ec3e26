/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_bwd_pair.h: a key tile against a query tile of one head, for flash_attn_bwd.c.
 *
 *   for each strip of keys:  S = K Q^T, dP = V dO^T | P = exp(S - lse), dS = P (dP - delta) |
 *                            dV += P^T dO, dK += dS^T Q
 *   dQ^T += K^T dS^T
 *
 * pair_run does so without a mask or a bias, pair_run_masked with one.
 *
 * With a mask or a bias a strip of keys lies in one block of the mask. A strip that is empty for
 * all rows is skipped. dQ begins with zeros and takes each strip as it comes, because strips may be
 * missing. A key whose K holds NaN or infinity is a zero in dQ's product, and the rows that see it
 * add it one by one. */
#ifndef GPUKERN_CPU_ATTN_BWD_PAIR_H
#define GPUKERN_CPU_ATTN_BWD_PAIR_H

#include "attn_bwd.h"
#include "attn_dbias.h"
#include "vec_math.h"

enum {
    LANE_STEP = MAX_BQ / W /* vectors from word to word of the same lanes */
};

/* ---- one pair of tiles ----------------------------------------------------------------------- */
/* A key tile and a query tile of one head. */
typedef struct pair {
    const job *g;
    const scratch *w;
    const attn_seq *x;
    int64_t b, h, chunk;
    int64_t key0, keys;      /* key tile */
    int64_t i0, rows, lanes; /* query tile; lanes: rows rounded up to whole vectors of cells */
    vf lse[MAX_BQ / W], delta[MAX_BQ / W]; /* lanes behind the rows: lse = inf makes P = 0 */
    vi lo[MAX_BQ / W], hi[MAX_BQ / W];     /* keys seen, from the key tile's first */
    /* how s becomes log P */
    float q_scale, factor; /* the scale that Q^T carries; what s lacks to be in ATTN_UNIT */
    float cap_in, cap_out; /* softcap: cap_out tanh(cap_in s), in ATTN_UNIT; cap_in 0 = off */
    float slope, distance; /* ALiBi, in ATTN_UNIT; position of query 0 less that of key 0 */
    bool modified;         /* a rule changes s, P or dS: score_strip's slow form */
    vf *left;              /* sums of dS over keys, as lse lies; NULL = dsinks is not wanted */
    vi *keep; /* dropout: of a strip, words of bits of 32 keys, LANE_STEP apart; NULL = none */
    float keep_factor;
    int64_t keep_row0; /* row 0 of the head */
    /* with a mask or a bias */
    const attn_row *row; /* [lanes]; NULL = neither */
    vi *word;            /* [4][LANE_STEP] bits of a strip's block; NULL = no mask */
    int64_t column;      /* of the strip's first key in that block */
    const char *k_at;    /* row key0 of K in memory */
    int num_bad;         /* keys of the tile whose K holds NaN or infinity */
    const int16_t *bad;
} pair;

/* Keys [key, key + keys) of the key tile, multiples of PAIR, and the lanes [lane0, lane1) that see
 * any of them; rows: how many of the lanes are rows. */
typedef struct strip {
    int64_t key, keys, lane0, lane1, rows;
} strip;

INLINE strip strip_of(const pair *t, int64_t key, int64_t keys) {
    const int64_t first = first_row(t->x, t->key0 + key) - t->i0;
    const int64_t end = end_row(t->x, t->key0 + key + keys - 1) - t->i0;
    strip r = {.key = key, .keys = keys};
    r.lane0 = gk_clamp_i64(first, 0, t->rows - 1) / NR * NR;
    r.lane1 = gk_min_i64(t->lanes, gk_round_up(gk_clamp_i64(end, r.lane0 + 1, t->rows), NR));
    r.rows = gk_min_i64(r.lane1, t->rows) - r.lane0;
    return r;
}

/* Whether the span hides any key of a strip from any of its rows. */
INLINE bool at_edge(const pair *t, const strip *r) {
    const int64_t key = t->key0 + r->key, row = t->i0 + r->lane0;
    return gk_span_lo(&t->x->span, row + r->rows - 1) > key ||
           gk_span_hi(&t->x->span, row) < key + r->keys || r->key + r->keys > t->keys;
}

/* ---- S, dP -> P, dS -------------------------------------------------------------------------- */
/* log P + lse where a rule stands between s and P; *slope_of_cap: the derivative of softcap. */
INLINE vf modified_score(const pair *t, vf s, vf distance, vf *slope_of_cap) {
    if (t->cap_in != 0) {
        const vf tanh_s = vf_tanh(s * t->cap_in);
        *slope_of_cap = 1.0f - tanh_s * tanh_s;
        s = tanh_s * t->cap_out;
    } else {
        s = s * t->factor;
    }
    return s - t->slope * vf_max(-distance, distance);
}

/* The lanes of vector `lane` that see key `key` of the key tile, which is key `k` of the strip. */
INLINE vm lanes_that_see(const pair *t, int64_t lane, int64_t key, int64_t k, const bool own,
                         const float *bias) {
    const vi j = vi_set1((int32_t)key);
    vm sees = vm_and(vi_lt(t->lo[lane] - 1, j), vi_lt(j, t->hi[lane]));
    if (own && t->word) sees = vm_and(sees, attn_sees(t->word + lane, LANE_STEP, t->column + k));
    if (bias) sees = vm_and(sees, vf_lt(vf_set1(-INFINITY), vf_load(bias)));
    return sees;
}

/* P and dS of a strip, as rows and, with PAIR 2, as a panel too. masked: the span or the mask hides
 * pairs. modified: a rule stands between s and P or between P and dS. own: a mask or a bias. */
INLINE void score_strip(const pair *t, const strip *r, const bool masked, const bool modified,
                        const bool own) {
    const scratch *w = t->w;
    const int64_t ld = t->g->z.ld_q, ld_c = t->g->z.ld_qc;
    const int64_t key = r->key;
    const float *s = w->s + (PAIR == 1 ? key * ld : 0), *dp = w->dp + (PAIR == 1 ? key * ld : 0);
    vf iota;
    for (int i = 0; i < W; ++i) iota[i] = (float)i;
    for (int64_t k = 0; k < r->keys; k += PAIR)
        for (int64_t l = r->lane0; l < r->lane1; l += PAIR * W) {
            vf p[PAIR][PAIR], ds[PAIR][PAIR]; /* [key][vector of queries] */
#pragma GCC unroll 2
            for (int u = 0; u < PAIR; ++u)
#pragma GCC unroll 2
                for (int v = 0; v < PAIR; ++v) {
                    const int64_t at = (k + u) * ld + l + v * W, lane = l / W + v;
                    const float *bias = own && w->bias ? w->bias + at : NULL;
                    vf x = vf_load(s + at), slope_of_cap = vf_set1(1);
                    if (modified) {
                        const vf distance = iota + (t->distance + (float)(l + v * W - key - k - u));
                        x = modified_score(t, x, distance, &slope_of_cap);
                        if (bias) x = attn_biased(x, vf_load(bias));
                        x = x - t->lse[lane];
                    } else {
                        x = PAIR == 2 ? vf_fma(x, vf_set1(t->factor), -t->lse[lane])
                                      : x - t->lse[lane];
                    }
                    vf y = PAIR == 2 ? vf_exp2_poly(x, true) : vf_exp_near(x);
                    const vm seen = lanes_that_see(t, lane, key + k + u, k + u, own, bias);
                    if (masked) y = vf_select(seen, y, vf_set1(0));
                    vf d = vf_load(dp + at);
                    p[u][v] = y;
                    if (modified && t->keep) {
                        const vi kept = attn_keeps(t->keep + lane, LANE_STEP, t->key0 + key,
                                                   t->key0 + key + k + u);
                        p[u][v] = (vf)((vi)y & kept);
                        d = (vf)((vi)(d * t->keep_factor) & kept);
                    }
                    ds[u][v] = y * (d - t->delta[lane]);
                    /* dP and the score of a hidden pair may be NaN */
                    if (own) ds[u][v] = vf_select(seen, ds[u][v], vf_set1(0));
                    if (own) slope_of_cap = vf_select(seen, slope_of_cap, vf_set1(1));
                    if (own && w->raw) vf_store(w->raw + at, ds[u][v]);
                    if (modified && t->left) t->left[lane] += ds[u][v];
                    if (modified) ds[u][v] = ds[u][v] * slope_of_cap;
                }
#pragma GCC unroll 2
            for (int u = 0; u < PAIR; ++u) {
                vc_store(w->p_rows + (key + k + u) * ld_c + l / PAIR, vc_from_run(p[u]));
                vc_store(w->ds_rows + (key + k + u) * ld_c + l / PAIR, vc_from_run(ds[u]));
            }
            if (PAIR == 2) {
#pragma GCC unroll 2
                for (int v = 0; v < PAIR; ++v)
                    vc_store(w->ds_panel + (key + k) / PAIR * ld + l + v * W,
                             vc_from_rows(ds[0][v], ds[PAIR - 1][v]));
            }
        }
}

static void score_plain(const pair *t, const strip *r) { score_strip(t, r, false, false, false); }
static void score_masked(const pair *t, const strip *r) { score_strip(t, r, true, false, false); }
static void score_modified(const pair *t, const strip *r) { score_strip(t, r, false, true, false); }
static void score_both(const pair *t, const strip *r) { score_strip(t, r, true, true, false); }
static void score_own(const pair *t, const strip *r) { score_strip(t, r, true, true, true); }

/* The bits that dropout keeps of a strip. */
static void keep_strip(const pair *t, const strip *r) {
    for (int64_t l = r->lane0; l < r->lane1; l += W) {
        int64_t row[W];
        for (int i = 0; i < W; ++i) row[i] = t->keep_row0 + (t->i0 + l + i) * t->x->lse_row;
        attn_keep_words(&t->g->dropout, row, t->key0 + r->key, r->keys, t->keep + l / W, LANE_STEP);
    }
}

/* ---- the products of a strip ----------------------------------------------------------------- */
/* S = K Q^T, dP = V dO^T. */
INLINE void score_products(const pair *t, const strip *r) {
    const scratch *w = t->w;
    const sizes *z = &t->g->z;
    const attn_shape *s = &t->g->shape;
    const int64_t lanes = r->lane1 - r->lane0, ld = z->ld_q;
    const int64_t to = (PAIR == 1 ? r->key * ld : 0) + r->lane0;
    tile_product(s->sum_cells, true, r->keys, lanes, cells_of(s->head_dim),
                 w->k_rows + r->key * z->ld_kd, z->ld_kd, w->q_t + r->lane0, ld, w->s + to, ld,
                 false);
    tile_product(s->sum_cells, true, r->keys, lanes, cells_of(s->head_dim_v),
                 w->v_rows + r->key * z->ld_kdv, z->ld_kdv, w->do_t + r->lane0, ld, w->dp + to, ld,
                 false);
}

/* Zeros in P and dS where lanes behind the rows share a cell with a row, or an AMX tile. q is 0
 * there, so an infinite key has made them NaN. */
INLINE void clear_lanes(const pair *t, const strip *r) {
    const int64_t ld = t->g->z.ld_qc, value_bytes = 4 / PAIR;
    const int64_t end = r->lane0 / PAIR + whole_cells(r->rows); /* cell */
    const size_t bytes = (size_t)((end * PAIR - t->rows) * value_bytes);
    for (int64_t k = r->key; k < r->key + r->keys; ++k) {
        memset((char *)(t->w->p_rows + k * ld) + t->rows * value_bytes, 0, bytes);
        memset((char *)(t->w->ds_rows + k * ld) + t->rows * value_bytes, 0, bytes);
    }
}

/* dV += P^T dO, dK += dS^T Q. */
INLINE void add_dv_dk(const pair *t, const strip *r) {
    const scratch *w = t->w;
    const sizes *z = &t->g->z;
    const attn_shape *s = &t->g->shape;
    const int64_t c0 = r->lane0 / PAIR, cells = cells_of(r->rows), ld = z->ld_qc;
    if (PAIR == 2 && r->lane1 > t->rows) clear_lanes(t, r);
    tile_product(SUM_CELLS, true, r->keys, s->head_dim_v, cells, w->p_rows + r->key * ld + c0, ld,
                 w->do_panel + c0 * z->ld_dv, z->ld_dv, w->dv + r->key * z->ld_dv, z->ld_dv, true);
    tile_product(SUM_CELLS, true, r->keys, s->head_dim, cells, w->ds_rows + r->key * ld + c0, ld,
                 w->q_panel + c0 * z->ld_d, z->ld_d, w->dk + r->key * z->ld_d, z->ld_d, true);
}

/* dQ^T += K^T dS^T of the NR lanes from `lane` on, over keys [key, end) of the key tile. */
INLINE void add_dq(const pair *t, int64_t lane, int64_t key, int64_t end, float *dq,
                   bool accumulate) {
    const scratch *w = t->w;
    const sizes *z = &t->g->z;
    const int64_t c0 = key / PAIR, cells = cells_of(end - key);
    for (int64_t c = cells; c < whole_cells(end - key); ++c) /* other keys of the last AMX tile */
        for (int64_t n = 0; n < NR; n += W)
            vc_store(w->ds_panel + (c0 + c) * z->ld_q + lane + n, vc_set1(0));
    tile_product(SUM_CELLS, TILED, t->g->shape.head_dim, gk_min_i64(NR, t->lanes - lane), cells,
                 w->k_panel + c0 * (TILED ? 1 : z->ld_k), z->ld_k,
                 w->ds_panel + c0 * z->ld_q + lane, z->ld_q, dq, NR, accumulate);
}

/* ---- a pair of tiles without a mask or a bias ------------------------------------------------ */
/* Keys [from, to) of the key tile against the query tile. dq are the blocks of the query tile.
 * chunk_lo is the chunk's first key. */
static void pair_run(const pair *t, int64_t from, int64_t to, float *dq, int64_t chunk_lo) {
    const sizes *z = &t->g->z;
    for (int64_t k = from; k < to; k += z->tile.strip) {
        const strip r = strip_of(t, k, gk_min_i64(z->tile.strip, to - k));
        const bool masked = at_edge(t, &r);
        if (t->keep) keep_strip(t, &r);
        score_products(t, &r);
        if (t->modified)
            (masked ? score_both : score_modified)(t, &r);
        else
            (masked ? score_masked : score_plain)(t, &r);
        add_dv_dk(t, &r);
    }
    /* each block of dQ takes the keys that it sees */
    for (int64_t l = 0; l < t->rows; l += NR, dq += z->dq_block) {
        const int64_t last = t->i0 + gk_min_i64(l + NR, t->rows) - 1;
        const int64_t lo = gk_span_lo(&t->x->span, t->i0 + l);
        const int64_t hi = gk_span_hi(&t->x->span, last);
        const int64_t key = gk_max_i64(from, (lo - t->key0) / PAIR * PAIR);
        const int64_t end = gk_min_i64(to, gk_round_up(hi - t->key0, PAIR));
        /* the first keys of the chunk that the block sees start its sum */
        const bool has_sum = t->key0 > chunk_lo && lo < t->key0;
        if (key < end) add_dq(t, l, key, end, dq, has_sum);
    }
}

/* ---- a pair of tiles with a mask or a bias --------------------------------------------------- */
/* The half of a cell that key or row i does not have. */
#define OTHER_HALF(i) ((i) % 2 ? 0xffffu : 0xffff0000u)

/* Finds the keys of a tile whose rows of K, from `k` on, are not finite. Where cells are pairs they
 * become zeros in the panel of dQ. Where cells are floats the panel serves S too, and strip_dq
 * takes them out for its product. */
static void find_bad_keys(pair *t, const char *k, int16_t *bad) {
    const int64_t es = (int64_t)gk_dtype_bytes(t->g->dtype), dim = t->g->shape.head_dim;
    const char *rows[MAX_BKV];
    t->k_at = k;
    for (int64_t j = 0; j < t->keys; ++j) rows[j] = k + es * j * t->x->k_row;
    t->num_bad = attn_not_finite(rows, t->keys, t->g->dtype, dim, bad);
#if PAIR == 2
    const int64_t ld = t->g->z.ld_k;
    for (int i = 0; i < t->num_bad; ++i)
        for (int64_t d = 0; d < dim; ++d)
            t->w->k_panel[TILED ? d * ld + bad[i] / 2 : bad[i] / 2 * ld + d] &= OTHER_HALF(bad[i]);
#endif
}

/* Zeros in row i of a panel. */
INLINE void clear_row(cell *panel, int64_t ld, int64_t i, int64_t dim) {
    cell *row = panel + i / PAIR * ld;
    for (int64_t d = 0; d < dim; ++d) {
#if PAIR == 2
        row[d] &= OTHER_HALF(i);
#else
        row[d] = 0;
#endif
    }
}

/* Rows without keys take part in nothing, whatever their q and their incoming gradient hold. */
static void clear_empty_rows(const pair *t) {
    const float *lse = (const float *)t->lse;
    for (int64_t i = 0; i < t->rows; ++i) {
        if (lse[i] != INFINITY) continue;
        clear_row(t->w->q_panel, t->g->z.ld_d, i, t->g->shape.head_dim);
        clear_row(t->w->do_panel, t->g->z.ld_dv, i, t->g->shape.head_dim_v);
    }
}

/* Whether the mask shows any key of a block to any of some rows, and all keys to all of them. */
static void ask_rows(const attn_row *rows, int64_t count, int64_t block, bool *any, bool *all) {
    *any = false;
    *all = true;
    for (int64_t i = 0; i < count; ++i) {
        const int kind = gk_mask_flag(&rows[i].mask, rows[i].i, block) & 3;
        *any = *any || kind != GK_BLOCK_EMPTY;
        *all = *all && kind == GK_BLOCK_FULL;
    }
}

/* The mask's words and the biases of a strip. */
static void load_mask_and_bias(const pair *t, const strip *r) {
    const int64_t key = t->key0 + r->key, ld = t->g->z.ld_q;
    for (int64_t l = r->lane0; l < r->lane1; l += W) {
        const attn_row *row[W];
        for (int i = 0; i < W; ++i) row[i] = t->row + l + i;
        if (t->word) {
            vi word[4];
            attn_words(row, key / GK_MASK_TILE, word);
            for (int q = 0; q < 4; ++q) t->word[q * LANE_STEP + l / W] = word[q];
        }
        if (t->w->bias)
            attn_bias_tile(&t->g->scores, row, key, gk_min_i64(r->keys, t->keys - r->key),
                           t->w->bias + l, ld);
    }
}

/* dS of a key and a lane as it was rounded for the product. */
static float rounded_ds(const pair *t, int64_t key, int64_t lane) {
    const cell x = t->w->ds_panel[key / PAIR * t->g->z.ld_q + lane];
#if PAIR == 2
    return gk_bf16_to_f32((uint16_t)(x >> 16 * (key % 2)));
#else
    return x;
#endif
}

/* dQ += dS k of key `key` of the tile, for those of the NR lanes from `lane` on that see it. */
static void add_bad_key(const pair *t, int64_t key, int64_t lane, float *dq) {
    const int64_t es = (int64_t)gk_dtype_bytes(t->g->dtype), j = t->key0 + key;
    const char *k = t->k_at + es * key * t->x->k_row;
    for (int64_t n = lane; n < gk_min_i64(lane + NR, t->rows); ++n) {
        const int64_t row = t->i0 + n;
        if (j < gk_span_lo(&t->x->span, row) || j >= gk_span_hi(&t->x->span, row)) continue;
        if (!attn_row_sees(&t->g->scores, t->row + n, j)) continue;
        const float ds = rounded_ds(t, key, n);
        for (int64_t d = 0; d < t->g->shape.head_dim; ++d)
            dq[d * NR + n - lane] += ds * (float)gk_load(k, t->g->dtype, d);
    }
}

/* dQ of the lanes and keys of a strip. */
static void strip_dq(const pair *t, const strip *r, float *dq) {
    const scratch *w = t->w;
    const sizes *z = &t->g->z;
    const int64_t es = (int64_t)gk_dtype_bytes(t->g->dtype);
    int num = 0;
    int16_t bad[MAX_BKV];
    for (int i = 0; i < t->num_bad; ++i)
        if (t->bad[i] >= r->key && t->bad[i] < r->key + r->keys) bad[num++] = t->bad[i];
    for (int i = 0; PAIR == 1 && i < num; ++i)
        memset(w->k_rows + bad[i] * z->ld_kd, 0, 4 * (size_t)z->ld_kd);
    for (int64_t l = r->lane0; l < r->lane0 + r->rows; l += NR) {
        float *block = dq + l / NR * z->dq_block;
        add_dq(t, l, r->key, r->key + r->keys, block, true);
        for (int i = 0; i < num; ++i) add_bad_key(t, bad[i], l, block);
    }
    for (int i = 0; PAIR == 1 && i < num; ++i)
        pack_rows(w->k_rows + bad[i] * z->ld_kd, z->ld_kd, t->k_at + es * bad[i] * t->x->k_row,
                  t->g->dtype, t->x->k_row, 1, t->g->shape.head_dim);
}

/* Adds a strip's dS to the gradients of biases. */
static void strip_dbias(const pair *t, const strip *r) {
    const dbias_strip s = {.b = t->b,
                           .h = t->h,
                           .chunk = t->chunk,
                           .key0 = t->key0 + r->key,
                           .keys = gk_min_i64(r->keys, t->keys - r->key),
                           .row0 = t->i0 + r->lane0,
                           .rows = r->rows,
                           .raw = t->w->raw + r->lane0,
                           .ld = t->g->z.ld_q};
    add_dbias(&t->g->dbias, &s);
}

/* As pair_run; strips begin at multiples of their length in the key tile. */
static void pair_run_masked(pair *t, int64_t from, int64_t to, float *dq) {
    const scratch *w = t->w;
    const int64_t step = t->g->z.tile.strip;
    for (int64_t k = from / step * step; k < to; k += step) {
        const strip r = strip_of(t, k, gk_min_i64(step, to - k));
        bool any = true, full = true;
        if (t->word) ask_rows(t->row + r.lane0, r.rows, (t->key0 + k) / GK_MASK_TILE, &any, &full);
        if (!any) continue;
        full = full && !at_edge(t, &r) && !w->bias && !w->raw;
        t->column = (t->key0 + k) % GK_MASK_TILE;
        if (!full) load_mask_and_bias(t, &r);
        if (t->keep) keep_strip(t, &r);
        score_products(t, &r);
        (!full ? score_own : t->modified ? score_modified : score_plain)(t, &r);
        add_dv_dk(t, &r);
        strip_dq(t, &r, dq);
        if (w->raw) strip_dbias(t, &r);
    }
}

#endif
