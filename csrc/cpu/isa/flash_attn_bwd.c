/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd: gradients of out = softmax(scale q k^T + rules) v, dense and packed.
 * Dao 2023, arXiv:2307.08691, Algorithm 2, transposed:
 *
 *   S^T = K Q^T       P^T = exp(scale S^T - lse)      dP^T = V dO^T     dS^T = P^T (dP^T - delta)
 *   dV += P^T dO      dK += scale dS^T Q              dQ^T += scale K^T dS^T
 *
 * With dropout, keep / (1 - p) is a factor of P in dV and of dP in dS. The algorithm stands in four
 * headers and this file:
 *   attn_bwd.h       a call: sizes, workspace, a worker's tiles
 *   attn_bwd_rows.h  delta, and the gradient of the sinks
 *   attn_bwd_pair.h  a key tile against a query tile: all five products
 *   attn_dbias.h     gradients of biases
 *   this file        the tasks: which tiles meet, packing, dQ over chunks; plan and run
 *
 * q, dq [B, Hq, Sq, D]  k, dk [B, Hkv, Sk, D]  v, dv [B, Hkv, Sk, Dv]
 * out, grad_out [B, Hq, Sq, Dv]  lse [B, Hq, Sq] float32, or all packed (gpukern.h)
 *
 * csrc/cpu/tables.c lists it; it is compiled once per instruction set. Elements are float32,
 * bfloat16 or float16 where a cell is a float (PAIR 1), bfloat16 alone where it is a pair (PAIR 2).
 *
 * A row of a tile is a key and a lane is a query: lse and delta are vectors, and each of the five
 * products finds both operands in the order in which they were made (tile.h). Nothing of size
 * BQ x BKV is ever transposed. On AMX, which takes A only by rows, k_panel is K^T.
 *
 * A task owns one sequence, one kv head and one chunk of keys, with all query heads of its group,
 * so dK and dV need no sum over tasks. dQ is summed over key tiles in float32 blocks [D][NR], and
 * over chunks, in order, in a last phase.
 *
 *   phase 1  for each sequence and query head: lse in ATTN_UNIT, delta
 *   phase 2  for each key tile: pack K, V
 *              for each query head and query tile that sees it: pack Q, dO
 *                for each strip of keys: S, dP | P, dS | dV, dK
 *                dQ
 *            store dK, dV; with one chunk store dQ
 *   phase 3  with more chunks: sum them and store dQ; dsink
 *
 * Shapes alone fix tiles and chunks, so the bits do not depend on the number of workers.
 * Workspace: dQ in float32, once a worker (one chunk) or a task (more); two floats a row; and one
 * tile of everything a worker (attn_bwd.h).
 *
 * float64 is served by csrc/ref. ALiBi slopes have no gradient. */
#include "attn_bwd_pair.h"
#include "attn_bwd_rows.h"

#include <stdlib.h>

/* ---- phase 2: packing and storing ------------------------------------------------------------ */
/* The values of rows [i0, i0 + rows) of head h, lane by lane. */
static void pair_rows(pair *t, int64_t h, int64_t i0, int64_t rows) {
    const float *lse = row_values(t->g, t->g->z.lse_at, t->b, h) + i0;
    const float *delta = row_values(t->g, t->g->z.delta_at, t->b, h) + i0;
    const gk_span *span = &t->x->span;
    t->h = h;
    t->i0 = i0;
    t->rows = rows;
    t->lanes = gk_round_up(rows, PAIR * W);
    t->distance = (float)(i0 + span->diagonal - t->key0);
    for (int64_t l = 0; l < t->lanes; l += W) {
        const int64_t n = rows - l, at = l / W;
        int32_t first[W], end[W];
        for (int64_t i = 0; i < W; ++i) {
            const int64_t row = i0 + l + i;
            first[i] = (int32_t)gk_clamp_i64(gk_span_lo(span, row) - t->key0, 0, t->keys);
            end[i] = (int32_t)gk_clamp_i64(gk_span_hi(span, row) - t->key0, 0, t->keys);
        }
        memcpy(&t->lo[at], first, sizeof first);
        memcpy(&t->hi[at], end, sizeof end);
        t->lse[at] = vf_select(vm_first(n), vf_load_first(lse + l, n), vf_set1(INFINITY));
        t->delta[at] = vf_load_first(delta + l, n);
        if (t->left) t->left[at] = vf_set1(0);
    }
}

/* A block [dim][NR] of dQ, transposed into rows. */
static void store_dq(const job *g, const float *block, int64_t rows, void *dst,
                     int64_t row_stride) {
    const int64_t dim = g->shape.head_dim, es = (int64_t)gk_dtype_bytes(g->grad);
    const float scale = g->shape.scale;
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

/* dQ of query head h of a group in the slice of a worker or a task: [dq_blocks][dim][NR]. */
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

/* Rows [rows][dim] as panel [cells_of(rows)][ld] and, times `scale` where cells are floats,
 * transposed [cells_of(dim)][ld_q]. The panel comes first: it streams row by row through memory.
 * The transposition, which jumps from row to row, then reads from a cache. */
static void pack_queries(const pair *t, const char *src, int64_t row_stride, int64_t dim,
                         float scale, cell *panel, int64_t ld, cell *transposed) {
    gk_dtype dtype = t->g->dtype;
    const int64_t ld_q = t->g->z.ld_q, cells = cells_of(dim), rows = t->rows;
    pack_panel(panel, ld, src, dtype, 1, row_stride, dim, rows);
    if (TILED)
        memset(panel + cells_of(rows) * ld, 0,
               4 * (size_t)((whole_cells(rows) - cells_of(rows)) * ld));
    if (PAIR == 1) { /* the panel holds these rows as floats */
        src = (const char *)panel;
        row_stride = ld;
        dtype = GK_F32;
    }
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

/* ---- phase 2: a task ------------------------------------------------------------------------- */
/* The state of a task from key tile to key tile. */
typedef struct task_state {
    pair t;
    scratch w;
    attn_seq x;
    seen seen;
    int64_t h_kv, slice; /* slice: of dQ */
    int64_t chunk_lo, chunk_hi;
    char *dk, *dv; /* of key 0 */
    int64_t dk_row_bytes, dv_row_bytes;
    vf left[MAX_BQ / W];
    vi keep[(MAX_BKV / 32 + 2) * LANE_STEP];
    vi word[4 * LANE_STEP];
    int16_t bad[MAX_BKV];
    attn_row row[MAX_BQ];
} task_state;

/* The rules of the call as score_strip reads them. */
static void set_rules(task_state *s) {
    pair *t = &s->t;
    const gk_attn_rules *rules = &t->g->args->fwd.rules;
    t->q_scale = t->g->shape.scale;
    const float lacks = PAIR == 2 ? t->q_scale : 1;
    t->factor = lacks * ATTN_UNIT;
    if (t->g->args->dsinks) t->left = s->left;
    if (rules->softcap > 0) {
        t->cap_in = lacks / (float)rules->softcap;
        t->cap_out = (float)rules->softcap * ATTN_UNIT;
    }
    if (t->g->dropout.most) {
        t->keep = s->keep;
        t->keep_factor = (float)t->g->dropout.factor;
    }
    t->modified = rules->softcap > 0 || rules->alibi_slopes || t->left || t->keep;
    if (!t->g->has_scores) return;
    t->row = s->row;
    t->bad = s->bad;
    if (t->g->scores.mask) t->word = s->word;
}

static void task_begin(task_state *s, const job *g, int64_t task, int64_t worker) {
    const gk_flash_attn_bwd_args *a = g->args;
    const sizes *z = &g->z;
    const int row_dim = attn_row_dim(&g->shape);
    const int64_t grad_es = (int64_t)gk_dtype_bytes(g->grad);
    const int64_t chunk = task / z->heads, h_kv = task % z->heads % g->shape.heads_kv;
    const int64_t b = g->order[task % z->heads / g->shape.heads_kv][1];
    s->t = (pair){.g = g, .w = &s->w, .x = &s->x, .b = b, .chunk = chunk};
    s->x = attn_seq_of(&a->fwd, &g->shape, b);
    s->seen = seen_by(g, &s->x);
    s->h_kv = h_kv;
    s->slice = z->chunks == 1 ? worker : (b * g->shape.heads_kv + h_kv) * z->chunks + chunk;
    s->chunk_lo = chunk * z->chunk_keys;
    s->chunk_hi = gk_min_i64(s->chunk_lo + z->chunk_keys, s->x.seq_k);
    s->dk = at(&a->dk, row0_of(g, &a->dk, b, h_kv, first_k(g, b)));
    s->dv = at(&a->dv, row0_of(g, &a->dv, b, h_kv, first_k(g, b)));
    s->dk_row_bytes = grad_es * a->dk.stride[row_dim];
    s->dv_row_bytes = grad_es * a->dv.stride[row_dim];
    scratch_make(&s->w, z, &g->shape,
                 g->workspace + z->worker_at + (size_t)worker * z->worker_bytes);
    set_rules(s);
}

/* Zeros in all that a task with a mask or a bias adds to: dQ of its slice and its own sums of the
 * gradients of biases. */
static void begin_sums(const task_state *s) {
    const job *g = s->t.g;
    const int64_t group = g->shape.group, seq_k = g->shape.max_seq_k;
    const int64_t first = gk_min_i64(s->chunk_lo, seq_k);
    const int64_t end = gk_min_i64(first + g->z.chunk_keys, seq_k);
    memset(dq_of(g, s->slice, 0), 0, 4 * (size_t)(group * g->z.dq_blocks * g->z.dq_block));
    for (int64_t h = s->h_kv * group; h < (s->h_kv + 1) * group; ++h)
        begin_dbias_head(&g->dbias, s->t.b, h, s->t.chunk, first, end);
}

/* dK and dV of keys [from, to), which no row sees. */
static void zero_keys(const task_state *s, int64_t from, int64_t to) {
    const job *g = s->t.g;
    const int row_dim = attn_row_dim(&g->shape);
    zero_rows(s->dk + from * s->dk_row_bytes, g->grad, g->args->dk.stride[row_dim], to - from,
              g->shape.head_dim);
    zero_rows(s->dv + from * s->dv_row_bytes, g->grad, g->args->dv.stride[row_dim], to - from,
              g->shape.head_dim_v);
}

/* Packs K and V of keys [key0, key0 + keys) and zeroes dK and dV. An odd number of keys leaves one
 * of zeros. */
static void begin_keys(task_state *s, int64_t key0, int64_t keys) {
    pair *t = &s->t;
    const scratch *w = &s->w;
    const sizes *z = &t->g->z;
    const gk_dtype dtype = t->g->dtype;
    const int64_t es = (int64_t)gk_dtype_bytes(dtype), keys_even = gk_round_up(keys, PAIR);
    const int64_t dim = t->g->shape.head_dim, dim_v = t->g->shape.head_dim_v;
    const char *k = s->x.k + es * (s->h_kv * s->x.k_head + key0 * s->x.k_row);
    const char *v = s->x.v + es * (s->h_kv * s->x.v_head + key0 * s->x.v_row);
    t->key0 = key0;
    t->keys = keys;
    pack_rows(w->k_rows, z->ld_kd, k, dtype, s->x.k_row, keys, dim);
    pack_rows(w->v_rows, z->ld_kdv, v, dtype, s->x.v_row, keys, dim_v);
    if (PAIR == 2) {
        memset(w->k_rows + keys * z->ld_kd, 0, 4 * (size_t)((keys_even - keys) * z->ld_kd));
        memset(w->v_rows + keys * z->ld_kdv, 0, 4 * (size_t)((keys_even - keys) * z->ld_kdv));
        pack_keys(w, z, k, dtype, s->x.k_row, keys, dim);
    }
    if (t->row) find_bad_keys(t, k, s->bad);
    memset(w->dk, 0, 4 * (size_t)(keys_even * z->ld_d));
    memset(w->dv, 0, 4 * (size_t)(keys_even * z->ld_dv));
}

static void end_keys(const task_state *s) {
    const job *g = s->t.g;
    const int row_dim = attn_row_dim(&g->shape);
    store_rows(g, s->w.dk, g->z.ld_d, s->t.keys, g->shape.head_dim, g->shape.scale,
               s->dk + s->t.key0 * s->dk_row_bytes, g->args->dk.stride[row_dim]);
    store_rows(g, s->w.dv, g->z.ld_dv, s->t.keys, g->shape.head_dim_v, (float)g->dropout.factor,
               s->dv + s->t.key0 * s->dv_row_bytes, g->args->dv.stride[row_dim]);
}

/* One query tile, rows [i0, i0 + rows) of head h, against the key tile. */
static void attend(task_state *s, int64_t h, int64_t i0, int64_t rows) {
    pair *t = &s->t;
    const job *g = t->g;
    const sizes *z = &g->z;
    const gk_tensor *grad_out = &g->args->grad_out;
    const int64_t es = (int64_t)gk_dtype_bytes(g->dtype);
    const int64_t grad_row = grad_out->stride[attn_row_dim(&g->shape)];
    const char *q = s->x.q + es * (h * s->x.q_head + i0 * s->x.q_row);
    const char *grad = at(grad_out, row0_of(g, grad_out, t->b, h, first_q(g, t->b)));
    const int64_t seen_lo = gk_span_lo(&s->x.span, i0) - t->key0;
    const int64_t seen_hi = gk_span_hi(&s->x.span, i0 + rows - 1) - t->key0;
    const int64_t from = gk_max_i64(seen_lo, 0) / PAIR * PAIR;
    const int64_t to = gk_round_up(gk_min_i64(seen_hi, t->keys), PAIR);

    pair_rows(t, h, i0, rows);
    pack_queries(t, q, s->x.q_row, g->shape.head_dim, t->q_scale, s->w.q_panel, z->ld_d, s->w.q_t);
    pack_queries(t, grad + es * i0 * grad_row, grad_row, g->shape.head_dim_v, 1, s->w.do_panel,
                 z->ld_dv, s->w.do_t);
    float *dq =
        dq_of(g, s->slice, h - s->h_kv * g->shape.group) + (i0 - s->seen.row_lo) / NR * z->dq_block;
    if (t->row) {
        for (int64_t i = 0; i < t->lanes; ++i)
            s->row[i] = attn_row_of(&g->scores, t->b, h, i0 + gk_min_i64(i, rows - 1));
        clear_empty_rows(t);
        pair_run_masked(t, from, to, dq);
    } else {
        pair_run(t, from, to, dq, s->chunk_lo);
    }
    float *sums = t->left ? left_of(g, t->b, h, t->chunk) + i0 : NULL;
    for (int64_t l = 0; sums && l < rows; l += W)
        vf_store_first(sums + l, vf_load_first(sums + l, rows - l) + t->left[l / W], rows - l);
}

/* The key tile against all rows that see it. */
static void attend_rows(task_state *s) {
    pair *t = &s->t;
    const job *g = t->g;
    const int64_t bq = g->z.tile.bq, group = g->shape.group, first = s->seen.row_lo;
    const int64_t row_lo = gk_max_i64(first_row(&s->x, t->key0), first);
    const int64_t row_hi = gk_min_i64(end_row(&s->x, t->key0 + t->keys - 1), s->seen.row_hi);
    for (int64_t h = s->h_kv * group; h < (s->h_kv + 1) * group; ++h) {
        t->slope = attn_slope(&g->args->fwd.rules, t->b, h) * ATTN_UNIT;
        t->keep_row0 = s->x.lse_first + h * s->x.lse_head;
        for (int64_t i0 = row_lo - (row_lo - first) % bq; i0 < row_hi; i0 += bq)
            attend(s, h, i0, gk_min_i64(bq, s->seen.row_hi - i0));
    }
}

/* With one chunk the slice holds all of dQ. */
static void store_slice(const task_state *s) {
    const job *g = s->t.g;
    const gk_tensor *dq = &g->args->dq;
    const int64_t row = dq->stride[attn_row_dim(&g->shape)], group = g->shape.group;
    for (int64_t h = s->h_kv * group; h < (s->h_kv + 1) * group; ++h) {
        const int64_t row0 = row0_of(g, dq, s->t.b, h, first_q(g, s->t.b));
        const float *block = dq_of(g, s->slice, h - s->h_kv * group);
        zero_dq_unseen(g, &s->x, &s->seen, s->t.b, h);
        for (int64_t i = s->seen.row_lo; i < s->seen.row_hi; i += NR, block += g->z.dq_block)
            store_dq(g, block, gk_min_i64(NR, s->seen.row_hi - i), at(dq, row0 + i * row), row);
    }
}

static void main_task(void *arg, int64_t task, int64_t worker) {
    const job *g = arg;
    const int64_t bkv = g->z.tile.bkv;
    task_state s;
    task_begin(&s, g, phase_task(&g->dbias, g->phase, task), worker);
    if (g->has_scores) begin_sums(&s);
    for (int64_t j0 = s.chunk_lo; j0 < s.chunk_hi; j0 += bkv) {
        const int64_t j1 = gk_min_i64(j0 + bkv, s.chunk_hi);
        const int64_t key0 = gk_clamp_i64(s.seen.key_lo, j0, j1);
        const int64_t key1 = gk_clamp_i64(s.seen.key_hi, key0, j1);
        zero_keys(&s, j0, key0);
        zero_keys(&s, key1, j1);
        if (key0 == key1) continue;
        begin_keys(&s, key0, key1 - key0);
        attend_rows(&s);
        end_keys(&s);
    }
    release_tiles();
    if (g->z.chunks == 1) store_slice(&s);
}

/* ---- phase 3: dQ of more than one chunk ------------------------------------------------------ */
static void sum_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *g = arg;
    const gk_tensor *dq = &g->args->dq;
    const sizes *z = &g->z;
    const int64_t b = task / g->shape.heads_q, h = task % g->shape.heads_q;
    const int64_t first_slice = (b * g->shape.heads_kv + h / g->shape.group) * z->chunks;
    const attn_seq x = attn_seq_of(&g->args->fwd, &g->shape, b);
    const seen seen = seen_by(g, &x);
    const int64_t row = dq->stride[attn_row_dim(&g->shape)];
    const int64_t row0 = row0_of(g, dq, b, h, first_q(g, b));
    zero_dq_unseen(g, &x, &seen, b, h);
    for (int64_t i = seen.row_lo; i < seen.row_hi; i += NR) {
        const int64_t rows = gk_min_i64(NR, seen.row_hi - i);
        const int64_t block = (i - seen.row_lo) / NR * z->dq_block;
        /* The chunks that wrote this block: those that its rows see. With a mask or a bias all
         * chunks began with zeros. */
        int64_t lo = gk_span_lo(&x.span, i) / z->chunk_keys;
        int64_t hi = (gk_span_hi(&x.span, i + rows - 1) - 1) / z->chunk_keys;
        if (g->has_scores) {
            lo = 0;
            hi = z->chunks - 1;
        }
        float *sum = dq_of(g, first_slice + lo, h % g->shape.group) + block;
        for (int64_t c = lo + 1; c <= hi; ++c) {
            const float *part = dq_of(g, first_slice + c, h % g->shape.group) + block;
            for (int64_t d = 0; d < z->dq_block; d += W)
                vf_store(sum + d, vf_load(sum + d) + vf_load(part + d));
        }
        store_dq(g, sum, rows, at(dq, row0 + i * row), row);
    }
}

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
    g.dbias = attn_dbias_of(a, &g.shape, g.z.chunks, g.workspace + g.z.dbias_at,
                            g.workspace + g.z.ddistance_at);
    const int64_t phases = num_phases(&g.dbias);
    begin_dbias(&g.dbias);
    int64_t (*order)[2] = (int64_t (*)[2])(g.workspace + g.z.order_at);
    order_sequences(&g, order);
    g.order = (const int64_t (*)[2])order;
    if (g.shape.packed) {
        zero_tail(&g, &a->dq, a->fwd.cu_seqlens_q);
        zero_tail(&g, &a->dk, a->fwd.cu_seqlens_k);
        zero_tail(&g, &a->dv, a->fwd.cu_seqlens_k);
    }
    gk_parallel(ctx, g.shape.batch * g.shape.heads_q, lse_task, &g);
    for (g.phase = 0; g.phase < phases; ++g.phase)
        gk_parallel(ctx, g.z.tasks / phases, main_task, &g);
    end_dbias(&g.dbias);
    if (g.z.chunks > 1) gk_parallel(ctx, g.shape.batch * g.shape.heads_q, sum_task, &g);
    if (a->dsinks) {
        gk_parallel(ctx, g.shape.batch * g.shape.heads_q, dsink_task, &g);
        store_dsinks(&g);
    }
}

const gk_cpu_kernel SYM(gk_flash_attn_bwd) = {plan, run};
