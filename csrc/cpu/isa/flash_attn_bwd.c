/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd: gradients of softmax(scale q k^T + ...) v.
 * Dao 2023, arXiv:2307.08691, Algorithm 2, transposed:
 *
 *   S^T = K Q^T   P^T = exp(scale S^T - lse)   dP^T = V dO^T   dS^T = P^T (dP^T - delta)
 *   dV += P^T dO  dK += scale dS^T Q           dQ^T += scale K^T dS^T
 *   delta = dO . O - dlse                      dsink = -sum exp(sink - lse) delta; of rows without keys sum dlse
 *
 * With dropout keep / (1 - p) is a factor of P in dV and of dP in dS.
 *
 * delta carries the rounding of out. In dS that is noise of P's size; summed over rows into dsink
 * it
 * is not, so there it is put right by what a row's dS leave: sum P dP = sum dS + delta (1 -
 * P_sink).
 *
 * q, dq [B, Hq, Sq, D]  k, dk [B, Hkv, Sk, D]  v, dv [B, Hkv, Sk, Dv]
 * out, grad_out [B, Hq, Sq, Dv]  lse [B, Hq, Sq] f32, or all packed (gpukern.h).
 * Elements are float32, bfloat16 or float16 where a
 * cell is a float (PAIR 1), bfloat16 alone where it is a pair (PAIR 2).
 * A row of a tile is a key and a lane a query: lse and delta are vectors, and each of the five
 * products finds both of its operands in the order in which they were made (tile.h), so nothing of
 * size BQ x BKV is ever transposed. On tiles (AMX), which take A by rows alone, k_panel is K^T.
 *
 * Work split: a task owns one sequence, one kv head and one chunk of keys, with all query heads of
 * its group: dK and dV need no sum over tasks. dQ is summed over key tiles in float32 blocks
 * [D][NR]; over chunks, in order, in a last phase.
 *   phase 1  per (sequence, query head): lse in ATTN_UNIT, delta
 *   phase 2  for each key tile: 1 pack K, V
 *              for each query head, query tile that sees it: 2 pack Q, dO
 *                3 S, dP, P, dS and 4 dV, dK strip by strip of keys, then dQ
 *            5 store dK, dV   6 one chunk: store dQ
 *   phase 3  more chunks: sum them and store dQ; dsink of each (sequence, query head)
 * Shapes alone fix tiles and chunks, so the bits do not depend on the number of workers.
 * Workspace: dQ in float32, once per worker (one chunk) or per task (more), two floats per row,
 * and per worker one tile of everything.
 * A mask or a bias: flash_attn_bwd_masked.h; gradients of biases: flash_attn_bwd_bias.h.
 * Not here: float64 (ref/), gradients of the ALiBi slopes.
 */
#include "attn.h"
#include "attn_drop.h"
#include "attn_scores.h"
#include "vec_math.h"
#include "../blocks.h"
#include "../kernels.h"

#include <stdlib.h>

enum {
    MAX_BQ = 256,
    MAX_BKV = 256,
    KEEP_STEP = MAX_BQ / W,
    LINE = 16
}; /* LINE: floats of a cache line */

#include "flash_attn_bwd_sizes.h"

typedef struct job {
    const gk_flash_attn_bwd_args *args;
    attn_shape shape;
    sizes z;
    gk_dtype dtype, grad; /* of q, k, v, out and grad_out; of dq, dk, dv */
    char *workspace;
    const int64_t (*order)[2]; /* [batch] {pairs, sequence}, most pairs first */
    gk_attn_keep dropout;
    attn_scores scores; /* a mask or biases */
    bool has_scores;
    int64_t phase; /* of those that add to one sum, flash_attn_bwd_bias.h */
} job;
GK_PLAN_HOLDS(job);

/* Offset of row 0 of sequence b and head h in a tensor like q or k; `first` is its first token. */
static int64_t row0_of(const job *g, const gk_tensor *t, int64_t b, int64_t h, int64_t first) {
    return h * t->stride[1] + (g->shape.packed ? first * t->stride[0] : b * t->stride[0]);
}
static int64_t first_of(const gk_tensor *cu_seqlens, int64_t b) {
    return cu_seqlens ? gk_i32_at(cu_seqlens, b) : 0;
}
static int64_t first_q(const job *g, int64_t b) { return first_of(g->args->fwd.cu_seqlens_q, b); }
static int64_t first_k(const job *g, int64_t b) { return first_of(g->args->fwd.cu_seqlens_k, b); }

static void *at(const gk_tensor *t, int64_t element) {
    return gk_at(t->data, (int64_t)gk_dtype_bytes(t->dtype) * element);
}

static void zero_rows(void *dst, gk_dtype dtype, int64_t row_stride, int64_t rows, int64_t dim) {
    const size_t es = gk_dtype_bytes(dtype);
    for (int64_t i = 0; i < rows; ++i)
        memset((char *)dst + (int64_t)es * i * row_stride, 0, es * (size_t)dim);
}

/* With a mask or a bias no row and no key counts as unseen: tiles then begin at multiples of a
 * mask's blocks. */
static seen seen_whole(const attn_seq *x) {
    const seen part = seen_of(x);
    if (part.row_lo >= part.row_hi) return part;
    return (seen){0, x->seq_q, 0, x->seq_k};
}

#include "flash_attn_bwd_pre.h"

/* ---- phase 2: one pair of tiles -------------------------------------------------------------- */
typedef struct pair {
    const job *g;
    const scratch *w;
    const attn_seq *x;
    int64_t key0, keys;      /* key tile */
    int64_t i0, rows, lanes; /* query tile; lanes: rows rounded up to whole vectors of cells */
    vf lse[MAX_BQ / W], delta[MAX_BQ / W]; /* lanes past the rows: lse = inf makes P = 0 */
    vi lo[MAX_BQ / W], hi[MAX_BQ / W];     /* keys seen, from the key tile's first */
    float q_scale, factor; /* the scale that Q^T carries; what s lacks to be in ATTN_UNIT */
    float cap_in, cap_out; /* softcap: cap_out tanh(cap_in s), in ATTN_UNIT; cap_in 0 = off */
    float slope, distance; /* ALiBi, in ATTN_UNIT; position of query 0 less that of key 0 */
    vf *left;              /* sums of dS over keys, as lse lies; NULL = dsinks is not wanted */
    bool modified;         /* something comes between s and P, or between P and dS */
    vi *keep; /* dropout: of a strip, words of bits of 32 keys, KEEP_STEP apart; NULL = none */
    float keep_factor;
    int64_t keep_row0; /* row 0 of the head */
    /* with a mask or a bias, flash_attn_bwd_masked.h */
    const attn_row *own; /* [lanes]; NULL = neither */
    vi *word;            /* [4][KEEP_STEP] bits of a strip's block; NULL = no mask */
    int64_t column;      /* of the strip's first key in that block */
    const char *k_at;    /* row key0 of K in memory */
    int num_bad;         /* keys of the tile whose K holds NaN or infinity */
    const int16_t *bad;
    int64_t b, h, chunk;
} pair;

/* A strip of scores: keys [key, key + keys) of the key tile, multiples of PAIR, and the lanes
 * [lane0, lane1). */
typedef struct strip {
    int64_t key, keys, lane0, lane1;
} strip;

/* S, dP -> P, dS. */
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
                    vf x = vf_load(s + at), slope_of_cap = vf_set1(1);
                    if (modified) {
                        if (t->cap_in != 0) {
                            const vf tanh_s = vf_tanh(x * t->cap_in);
                            slope_of_cap = 1.0f - tanh_s * tanh_s;
                            x = tanh_s * t->cap_out;
                        } else {
                            x = x * t->factor;
                        }
                        const vf distance = iota + (t->distance + (float)(l + v * W - key - k - u));
                        x = x - t->slope * vf_max(-distance, distance);
                        if (own && w->bias)
                            x = attn_biased(x, vf_load(w->bias + (k + u) * ld + l + v * W));
                        x = x - t->lse[lane];
                    } else {
                        x = PAIR == 2 ? vf_fma(x, vf_set1(t->factor), -t->lse[lane])
                                      : x - t->lse[lane];
                    }
                    vf y = PAIR == 2 ? vf_exp2_poly(x, true) : vf_exp_near(x);
                    const vi j = vi_set1((int32_t)(key + k + u));
                    vm sees = vm_and(vi_lt(t->lo[lane] - 1, j), vi_lt(j, t->hi[lane]));
                    if (own && t->word)
                        sees =
                            vm_and(sees, attn_sees(t->word + lane, KEEP_STEP, t->column + k + u));
                    if (own && w->bias)
                        sees = vm_and(sees, vf_lt(vf_set1(-INFINITY),
                                                  vf_load(w->bias + (k + u) * ld + l + v * W)));
                    if (masked) y = vf_select(sees, y, vf_set1(0));
                    vf d = vf_load(dp + at);
                    p[u][v] = y;
                    if (modified && t->keep) {
                        const vi kept = attn_keeps(t->keep + lane, KEEP_STEP, t->key0 + key,
                                                   t->key0 + key + k + u);
                        p[u][v] = (vf)((vi)y & kept);
                        d = (vf)((vi)(d * t->keep_factor) & kept);
                    }
                    ds[u][v] = y * (d - t->delta[lane]);
                    /* dP of a hidden pair may be NaN */
                    if (own) ds[u][v] = vf_select(sees, ds[u][v], vf_set1(0));
                    if (own && w->raw) vf_store(w->raw + (k + u) * ld + l + v * W, ds[u][v]);
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

/* What dropout keeps of a strip. */
static void keep_strip(const pair *t, const strip *r) {
    for (int64_t l = r->lane0; l < r->lane1; l += W) {
        int64_t row[W];
        for (int i = 0; i < W; ++i) row[i] = t->keep_row0 + (t->i0 + l + i) * t->x->lse_row;
        attn_keep_words(&t->g->dropout, row, t->key0 + r->key, r->keys, t->keep + l / W, KEEP_STEP);
    }
}

/* Steps 3 and 4: keys [from, to) of the tile; dq are the blocks of the query tile; chunk_lo is the
 * chunk's first key. Each strip takes the blocks of lanes that see it, each block of dQ the keys
 * that it sees. */
static void pair_run(const pair *t, int64_t from, int64_t to, float *dq, int64_t chunk_lo) {
    const scratch *w = t->w;
    const sizes *z = &t->g->z;
    const gk_span *span = &t->x->span;
    const int64_t dim = t->g->shape.head_dim, dim_v = t->g->shape.head_dim_v, ld_q = z->ld_q,
                  ld_qc = z->ld_qc;

    for (int64_t k = from; k < to; k += z->tile.strip) {
        const int64_t keys = gk_min_i64(z->tile.strip, to - k), skip = PAIR == 1 ? k * ld_q : 0;
        const int64_t row0 =
            gk_clamp_i64(first_row(t->x, t->key0 + k) - t->i0, 0, t->rows - 1) / NR * NR;
        const int64_t row1 =
            gk_clamp_i64(end_row(t->x, t->key0 + k + keys - 1) - t->i0, row0 + 1, t->rows);
        const strip r = {k, keys, row0, gk_min_i64(t->lanes, gk_round_up(row1, NR))};
        const int64_t rows = gk_min_i64(r.lane1, t->rows) - row0;
        const bool masked = gk_span_lo(span, t->i0 + row0 + rows - 1) > t->key0 + k ||
                            gk_span_hi(span, t->i0 + row0) < t->key0 + k + keys ||
                            k + keys > t->keys;
        /* 3. scores */
        if (t->keep) keep_strip(t, &r);
        tile_product(t->g->shape.sum_cells, true, keys, r.lane1 - row0, cells_of(dim),
                     w->k_rows + k * z->ld_kd, z->ld_kd, w->q_t + row0, ld_q, w->s + skip + row0,
                     ld_q, false);
        tile_product(t->g->shape.sum_cells, true, keys, r.lane1 - row0, cells_of(dim_v),
                     w->v_rows + k * z->ld_kdv, z->ld_kdv, w->do_t + row0, ld_q,
                     w->dp + skip + row0, ld_q, false);
        if (t->modified)
            (masked ? score_both : score_modified)(t, &r);
        else
            (masked ? score_masked : score_plain)(t, &r);
        if (PAIR == 2 && r.lane1 > t->rows)
            clear_lanes(w, ld_qc, k, keys, t->rows, row0 / PAIR + whole_cells(rows));
        /* 4. gradients */
        const int64_t c0 = row0 / PAIR, cells = cells_of(rows);
        tile_product(SUM_CELLS, true, keys, dim_v, cells, w->p_rows + k * ld_qc + c0, ld_qc,
                     w->do_panel + c0 * z->ld_dv, z->ld_dv, w->dv + k * z->ld_dv, z->ld_dv, true);
        tile_product(SUM_CELLS, true, keys, dim, cells, w->ds_rows + k * ld_qc + c0, ld_qc,
                     w->q_panel + c0 * z->ld_d, z->ld_d, w->dk + k * z->ld_d, z->ld_d, true);
    }
    for (int64_t l = 0; l < t->rows; l += NR, dq += z->dq_block) {
        const int64_t lo = gk_span_lo(span, t->i0 + l),
                      hi = gk_span_hi(span, t->i0 + gk_min_i64(l + NR, t->rows) - 1);
        const int64_t k = gk_max_i64(from, (lo - t->key0) / PAIR * PAIR),
                      end = gk_min_i64(to, gk_round_up(hi - t->key0, PAIR)), c0 = k / PAIR;
        if (k >= end) continue;
        for (int64_t c = cells_of(end - k); c < whole_cells(end - k);
             ++c) /* other keys of the last tile */
            for (int64_t n = 0; n < NR; n += W)
                vc_store(w->ds_panel + (c0 + c) * ld_q + l + n, vc_set1(0));
        /* the first keys of the chunk that the block sees start its sum */
        const bool has_sum = t->key0 > chunk_lo && lo < t->key0;
        tile_product(SUM_CELLS, TILED, dim, gk_min_i64(NR, t->lanes - l), cells_of(end - k),
                     w->k_panel + c0 * (TILED ? 1 : z->ld_k), z->ld_k, w->ds_panel + c0 * ld_q + l,
                     ld_q, dq, NR, has_sum);
    }
}

#include "flash_attn_bwd_bias.h"
#include "flash_attn_bwd_masked.h"

/* ---- phase 2: a task ------------------------------------------------------------------------- */
/* A block [dim][NR] of dQ, transposed into rows. */
static void store_dq(const job *g, const float *block, int64_t rows, void *dst,
                     int64_t row_stride) {
    const int64_t dim = g->shape.head_dim, es = (int64_t)gk_dtype_bytes(g->grad);
    const float scale = (float)g->args->fwd.rules.scale;
    for (int64_t i = 0; i < rows; i += W)
        for (int64_t d = 0; d < dim; d += W) {
            vc r[W];
            for (int64_t c = 0; c < W; ++c)
                r[c] = d + c < dim ? (vc)(vf_load(block + (d + c) * NR + i) * scale) : vc_set1(0);
            vc_transpose(r);
            for (int64_t c = 0; c < gk_min_i64(W, rows - i); ++c)
                vf_store_dtype((char *)dst + es * (i + c) * row_stride, g->grad, d, (vf)r[c],
                               dim - d);
        }
}

static void store_rows(const job *g, const float *tile, int64_t ld, int64_t rows, int64_t dim,
                       float scale, void *dst, int64_t row_stride) {
    const int64_t es = (int64_t)gk_dtype_bytes(g->grad);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t d = 0; d < dim; d += W)
            vf_store_dtype((char *)dst + es * i * row_stride, g->grad, d,
                           vf_load(tile + i * ld + d) * scale, dim - d);
}

/* dQ of query head h of a group in one worker's or task's slice: [dq_blocks][dim][NR]. */
static float *dq_of(const job *g, int64_t slice, int64_t h) {
    return (float *)(g->workspace + g->z.dq_at) +
           (slice * g->shape.group + h) * g->z.dq_blocks * g->z.dq_block;
}

/* Rows of dq of one head that see no key. */
static void zero_dq_unseen(const job *g, const attn_seq *x, const seen *seen, int64_t b,
                           int64_t h) {
    const gk_tensor *dq = &g->args->dq;
    const int64_t row0 = row0_of(g, dq, b, h, first_q(g, b)),
                  row = dq->stride[attn_row_dim(&g->shape)];
    zero_rows(at(dq, row0), g->grad, row, seen->row_lo, g->shape.head_dim);
    zero_rows(at(dq, row0 + seen->row_hi * row), g->grad, row, x->seq_q - seen->row_hi,
              g->shape.head_dim);
}

/* What rows [i0, i0 + rows) of head h bring to a pair of tiles. */
static void pair_rows(pair *t, int64_t b, int64_t h, int64_t i0, int64_t rows) {
    const float *lse = row_values(t->g, t->g->z.lse_at, b, h) + i0;
    const float *delta = row_values(t->g, t->g->z.delta_at, b, h) + i0;
    t->i0 = i0;
    t->rows = rows;
    t->lanes = gk_round_up(rows, PAIR * W);
    t->distance = (float)(i0 + t->x->span.diagonal - t->key0);
    for (int64_t l = 0; l < t->lanes; l += W) {
        const int64_t n = rows - l, at = l / W;
        int32_t first[W], end[W];
        for (int64_t i = 0; i < W; ++i) {
            first[i] =
                (int32_t)gk_clamp_i64(gk_span_lo(&t->x->span, i0 + l + i) - t->key0, 0, t->keys);
            end[i] =
                (int32_t)gk_clamp_i64(gk_span_hi(&t->x->span, i0 + l + i) - t->key0, 0, t->keys);
        }
        memcpy(&t->lo[at], first, sizeof first);
        memcpy(&t->hi[at], end, sizeof end);
        t->lse[at] = vf_select(vm_first(n), vf_load_first(lse + l, n), vf_set1(INFINITY));
        t->delta[at] = vf_load_first(delta + l, n);
        if (t->left) t->left[at] = vf_set1(0);
    }
}

/* Rows [rows][dim] as panel [cells_of(rows)][ld] and, times `scale` where cells are floats,
 * transposed [cells_of(dim)][ld_q]. The panel comes first: it streams row by row through memory,
 * and the
 * transposition, which jumps from row to row, then reads near memory. */
static void pack_queries(const pair *t, const char *src, int64_t row_stride, int64_t dim,
                         float scale, cell *panel, int64_t ld, cell *transposed) {
    gk_dtype dtype = t->g->dtype;
    const int64_t ld_q = t->g->z.ld_q, cells = cells_of(dim), rows = t->rows;
    pack_panel(panel, ld, src, dtype, 1, row_stride, dim, rows);
    if (TILED)
        memset(panel + cells_of(rows) * ld, 0,
               4 * (size_t)((whole_cells(rows) - cells_of(rows)) * ld));
    if (PAIR == 1) {
        src = (const char *)panel;
        row_stride = ld;
        dtype = GK_F32;
    } /* rows already, as floats */
    const int64_t row_bytes = row_stride * (int64_t)gk_dtype_bytes(dtype);
    for (int64_t l = 0; l < t->lanes; l += W)
        for (int64_t c = 0; c < cells; c += W) {
            vc r[W];
#pragma GCC unroll 16
            for (int64_t i = 0; i < W; ++i)
                r[i] = l + i < rows ? vc_load_along_k(src + (l + i) * row_bytes, dtype, c * PAIR,
                                                      dim - c * PAIR)
                                    : vc_set1(0);
            vc_transpose(r);
            const int64_t n = gk_min_i64(W, gk_round_up(cells, K_CELLS) - c);
#pragma GCC unroll 16
            for (int64_t i = 0; i < W; ++i)
                if (i < n) vc_store(transposed + (c + i) * ld_q + l, vc_scale(r[i], scale));
        }
}

/* K of a key tile as the A of dQ. */
static void pack_keys(const scratch *w, const sizes *z, const char *k, gk_dtype dtype,
                      int64_t row_stride, int64_t keys, int64_t dim) {
#if TILED
    const char *rows[MAX_BKV];
    for (int64_t j = 0; j < keys; ++j) rows[j] = k + 2 * j * row_stride;
    pack_columns(w->k_panel, z->ld_k, rows, keys, dtype, dim);
    for (int64_t d = 0; d < dim; ++d)
        vc_store(w->k_panel + d * z->ld_k + whole_cells(keys), vc_set1(0));
#else
    pack_panel(w->k_panel, z->ld_k, k, dtype, 1, row_stride, dim, keys);
#endif
}

static void main_task(void *arg, int64_t task, int64_t worker) {
    const job *g = arg;
    const gk_flash_attn_bwd_args *a = g->args;
    const gk_attn_rules *rules = &a->fwd.rules;
    const sizes *z = &g->z;
    task = phase_task(g, task);
    const int64_t dim = g->shape.head_dim, dim_v = g->shape.head_dim_v, group = g->shape.group;
    const int64_t chunk = task / z->heads, h_kv = task % z->heads % g->shape.heads_kv;
    const int64_t b = g->order[task % z->heads / g->shape.heads_kv][1],
                  es = (int64_t)gk_dtype_bytes(g->dtype);
    const int64_t slice =
        z->chunks == 1 ? worker : (b * g->shape.heads_kv + h_kv) * z->chunks + chunk;
    const int r = attn_row_dim(&g->shape);
    const attn_seq x = attn_seq_of(&a->fwd, &g->shape, b);
    const seen seen = g->has_scores ? seen_whole(&x) : seen_of(&x);
    const int64_t grad_es = (int64_t)gk_dtype_bytes(g->grad), grad_row = a->grad_out.stride[r],
                  dk_row = a->dk.stride[r], dv_row = a->dv.stride[r];
    char *const dk = at(&a->dk, row0_of(g, &a->dk, b, h_kv, first_k(g, b)));
    char *const dv = at(&a->dv, row0_of(g, &a->dv, b, h_kv, first_k(g, b)));
    scratch w;
    scratch_make(&w, z, &g->shape, g->workspace + z->worker_at + (size_t)worker * z->worker_bytes);
    vf left[MAX_BQ / W];
    pair t = {.g = g, .w = &w, .x = &x, .q_scale = (float)rules->scale};
    const float lacks = PAIR == 2 ? t.q_scale : 1;
    t.factor = lacks * ATTN_UNIT;
    if (a->dsinks) t.left = left;
    if (rules->softcap > 0) {
        t.cap_in = lacks / (float)rules->softcap;
        t.cap_out = (float)rules->softcap * ATTN_UNIT;
    }
    vi keep[(MAX_BKV / 32 + 2) * KEEP_STEP];
    if (g->dropout.most) {
        t.keep = keep;
        t.keep_factor = (float)g->dropout.factor;
    }
    t.modified = rules->softcap > 0 || rules->alibi_slopes || t.left || t.keep;
    vi word[4 * KEEP_STEP];
    int16_t bad[MAX_BKV];
    attn_row own[MAX_BQ];
    if (g->has_scores) {
        t.own = own;
        t.bad = bad;
        t.b = b;
        t.chunk = chunk;
        if (g->scores.mask) t.word = word;
        begin_own_sums(g, b, h_kv, chunk, slice);
    }

    const int64_t chunk_lo = chunk * z->chunk_keys,
                  chunk_hi = gk_min_i64(chunk_lo + z->chunk_keys, x.seq_k);
    for (int64_t j0 = chunk_lo; j0 < chunk_hi; j0 += z->tile.bkv) {
        const int64_t j1 = gk_min_i64(j0 + z->tile.bkv, chunk_hi);
        const int64_t key0 = gk_clamp_i64(seen.key_lo, j0, j1),
                      key1 = gk_clamp_i64(seen.key_hi, key0, j1);
        const int64_t keys = key1 - key0, keys_even = gk_round_up(keys, PAIR);
        t.key0 = key0;
        t.keys = keys;
        zero_rows(dk + grad_es * j0 * dk_row, g->grad, dk_row, key0 - j0, dim);
        zero_rows(dv + grad_es * j0 * dv_row, g->grad, dv_row, key0 - j0, dim_v);
        zero_rows(dk + grad_es * key1 * dk_row, g->grad, dk_row, j1 - key1, dim);
        zero_rows(dv + grad_es * key1 * dv_row, g->grad, dv_row, j1 - key1, dim_v);
        if (keys == 0) continue;

        /* 1. K and V; an odd number of keys leaves one to mask */
        const char *k = x.k + es * (h_kv * x.k_head + key0 * x.k_row),
                   *v = x.v + es * (h_kv * x.v_head + key0 * x.v_row);
        pack_rows(w.k_rows, z->ld_kd, k, g->dtype, x.k_row, keys, dim);
        pack_rows(w.v_rows, z->ld_kdv, v, g->dtype, x.v_row, keys, dim_v);
        if (PAIR == 2) {
            memset(w.k_rows + keys * z->ld_kd, 0, 4 * (size_t)((keys_even - keys) * z->ld_kd));
            memset(w.v_rows + keys * z->ld_kdv, 0, 4 * (size_t)((keys_even - keys) * z->ld_kdv));
            pack_keys(&w, z, k, g->dtype, x.k_row, keys, dim);
        }
        if (t.own) find_bad_keys(&t, k, bad);
        memset(w.dk, 0, 4 * (size_t)(keys_even * z->ld_d));
        memset(w.dv, 0, 4 * (size_t)(keys_even * z->ld_dv));

        const int64_t row_lo = gk_max_i64(first_row(&x, key0), seen.row_lo);
        const int64_t row_hi = gk_min_i64(end_row(&x, key1 - 1), seen.row_hi);
        for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
            const char *q = x.q + es * h * x.q_head;
            const char *grad = at(&a->grad_out, row0_of(g, &a->grad_out, b, h, first_q(g, b)));
            t.slope = attn_slope(rules, b, h) * ATTN_UNIT;
            t.keep_row0 = x.lse_first + h * x.lse_head;
            for (int64_t i0 = row_lo - (row_lo - seen.row_lo) % z->tile.bq; i0 < row_hi;
                 i0 += z->tile.bq) {
                const int64_t rows = gk_min_i64(z->tile.bq, seen.row_hi - i0);
                const int64_t from = gk_max_i64(gk_span_lo(&x.span, i0) - key0, 0) / PAIR * PAIR;
                const int64_t to = gk_min_i64(gk_span_hi(&x.span, i0 + rows - 1) - key0, keys);
                /* 2. Q and dO in both orders */
                pair_rows(&t, b, h, i0, rows);
                pack_queries(&t, q + es * i0 * x.q_row, x.q_row, dim, t.q_scale, w.q_panel, z->ld_d,
                             w.q_t);
                pack_queries(&t, grad + es * i0 * grad_row, grad_row, dim_v, 1, w.do_panel,
                             z->ld_dv, w.do_t);
                float *dq =
                    dq_of(g, slice, h - h_kv * group) + (i0 - seen.row_lo) / NR * z->dq_block;
                if (t.own) {
                    t.h = h;
                    for (int64_t i = 0; i < t.lanes; ++i)
                        own[i] = attn_row_of(&g->scores, b, h, i0 + gk_min_i64(i, rows - 1));
                    clear_empty_rows(&t);
                    pair_run_masked(&t, from, gk_round_up(to, PAIR), dq);
                } else {
                    pair_run(&t, from, gk_round_up(to, PAIR), dq, chunk_lo);
                }
                float *sums = t.left ? left_of(g, b, h, chunk) + i0 : NULL;
                for (int64_t l = 0; sums && l < rows; l += W)
                    vf_store_first(sums + l, vf_load_first(sums + l, rows - l) + left[l / W],
                                   rows - l);
            }
        }
        /* 5. */
        store_rows(g, w.dk, z->ld_d, keys, dim, (float)rules->scale, dk + grad_es * key0 * dk_row,
                   dk_row);
        store_rows(g, w.dv, z->ld_dv, keys, dim_v, (float)g->dropout.factor,
                   dv + grad_es * key0 * dv_row, dv_row);
    }
    release_tiles();
    if (z->chunks > 1) return;
    /* 6. */
    for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h) {
        const int64_t row = a->dq.stride[r], row0 = row0_of(g, &a->dq, b, h, first_q(g, b));
        zero_dq_unseen(g, &x, &seen, b, h);
        const float *block = dq_of(g, slice, h - h_kv * group);
        for (int64_t i = seen.row_lo; i < seen.row_hi; i += NR, block += z->dq_block)
            store_dq(g, block, gk_min_i64(NR, seen.row_hi - i), at(&a->dq, row0 + i * row), row);
    }
}

#include "flash_attn_bwd_sums.h"

/* ---- the call -------------------------------------------------------------------------------- */
/* Tokens past the last sequence. */
static void zero_tail(const job *g, const gk_tensor *t, const gk_tensor *cu_seqlens) {
    const int64_t end = gk_i32_at(cu_seqlens, g->shape.batch);
    for (int64_t h = 0; h < t->shape[1]; ++h)
        zero_rows(at(t, h * t->stride[1] + end * t->stride[0]), g->grad, t->stride[0],
                  t->shape[0] - end, t->shape[2]);
}

/* Heavy sequences first, equal ones in order. */
static int by_pairs(const void *p, const void *q) {
    const int64_t *x = p, *y = q;
    if (x[0] != y[0]) return x[0] < y[0] ? 1 : -1;
    return x[1] < y[1] ? -1 : x[1] > y[1];
}

static void order_sequences(const job *g, int64_t (*order)[2]) {
    for (int64_t b = 0; b < g->shape.batch; ++b) {
        const attn_seq x = attn_seq_of(&g->args->fwd, &g->shape, b);
        order[b][0] = x.seq_q * x.seq_k;
        order[b][1] = b;
    }
    qsort(order, (size_t)g->shape.batch, sizeof *order, by_pairs);
}

static bool plan(const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_bwd_args *a = args;
    job *g = GK_OWN(job, to);
    *g = (job){
        .args = a, .shape = attn_shape_of(&a->fwd), .dtype = a->fwd.q.dtype, .grad = a->dq.dtype};
    g->z = sizes_of(ctx, a, &g->shape);
    to->tile[0] = g->z.tile.bq;
    to->tile[1] = g->z.tile.bkv;
    to->tile[2] = g->z.chunk_keys;
    to->tasks = g->z.tasks;
    to->chunks = g->z.chunks;
    to->workspace_bytes = g->z.total_bytes;
    return true;
}

static void run(const gk_context *ctx, const void *args, const gk_plan *planned, void *workspace) {
    const gk_flash_attn_bwd_args *a = args;
    job g = *GK_OWN_CONST(job, planned);
    g.args = a;
    g.grad = a->dq.dtype;
    g.workspace = workspace;
    g.dropout = gk_attn_keep_of(&a->fwd);
    g.scores = attn_scores_of(gk_scores_of_bwd(a), g.shape.max_seq_q, g.shape.max_seq_k);
    g.has_scores = gk_scores_of_bwd(a) != NULL;
    const int64_t phases = begin_dbias(&g);
    int64_t (*order)[2] = (int64_t (*)[2])(g.workspace + g.z.order_at);
    order_sequences(&g, order);
    g.order = (const int64_t (*)[2])order;
    if (g.shape.packed) {
        zero_tail(&g, &a->dq, a->fwd.cu_seqlens_q);
        zero_tail(&g, &a->dk, a->fwd.cu_seqlens_k);
        zero_tail(&g, &a->dv, a->fwd.cu_seqlens_k);
    }
    gk_parallel(ctx, g.shape.batch * g.shape.heads_q, pre_task, &g);
    for (g.phase = 0; g.phase < phases; ++g.phase)
        gk_parallel(ctx, g.z.tasks / phases, main_task, &g);
    end_dbias(&g);
    if (g.z.chunks > 1) gk_parallel(ctx, g.shape.batch * g.shape.heads_q, sum_task, &g);
    if (a->dsinks) {
        gk_parallel(ctx, g.shape.batch * g.shape.heads_q, dsink_task, &g);
        const double *part = (const double *)(g.workspace + g.z.dsink_at);
        for (int64_t h = 0; h < g.shape.heads_q; ++h) {
            double sum = 0;
            for (int64_t b = 0; b < g.shape.batch; ++b) sum += part[h * g.shape.batch + b];
            gk_store(a->dsinks->data, a->dsinks->dtype, h * a->dsinks->stride[0], sum);
        }
    }
}

const gk_cpu_kernel SYM(gk_flash_attn_bwd) = {plan, run};
