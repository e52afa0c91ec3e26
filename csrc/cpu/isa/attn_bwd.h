/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_bwd.h: one call of flash_attn_bwd.c: its sizes, its workspace, a worker's tiles, and where
 * rows of tensors and of row values lie. */
#ifndef GPUKERN_CPU_ATTN_BWD_H
#define GPUKERN_CPU_ATTN_BWD_H

#include "../blocks.h"
#include "attn.h"
#include "attn_dbias.h"
#include "attn_drop.h"
#include "attn_scores.h"

enum {
    MAX_BQ = 256,
    MAX_BKV = 256,
    LINE = 16 /* floats of a cache line */
};
_Static_assert(MAX_BQ + MAX_BKV <= DBIAS_MAX_DIAGONALS, "a strip's diagonals");

/* ---- sizes ----------------------------------------------------------------------------------- */
typedef struct sizes {
    gk_attn_bwd_blocks tile;
    int64_t tokens_q;      /* of the whole call */
    int64_t ld_d, ld_dv;   /* floats or cells from row to row: rows of D, Dv */
    int64_t ld_kd, ld_kdv; /* rows of cells_of(D), cells_of(Dv) */
    int64_t ld_q, ld_qc;   /* rows of BQ floats, of cells_of(BQ) */
    int64_t ld_k;          /* the A of dQ: D cells; on AMX cells_of(BKV) and one tile to spare */
    int64_t dq_blocks, dq_block; /* blocks [D][NR] of dQ of a head at most; floats of a block */
    int64_t chunk_keys, chunks, heads, tasks; /* heads: sequences x kv heads */
    int64_t workers;
    bool has_bias, has_raw; /* a tile of biases; a tile of dS before softcap, for gk_dbias */
    /* byte offsets in the workspace */
    size_t order_at, lse_at, delta_at, left_at, dsink_at, worker_at, worker_bytes, dq_at;
    size_t dbias_at, ddistance_at, total_bytes;
} sizes;

/* One worker's tiles, in cells or floats (4 bytes). With PAIR 1 several share memory. */
typedef struct scratch {
    cell *k_rows, *v_rows;    /* [BKV][ld_kd], [BKV][ld_kdv]: A of S, dP */
    cell *k_panel;            /* [cells_of(BKV)][ld_k]: A of dQ; PAIR 1: k_rows; on AMX [D][ld_k] */
    cell *q_t, *do_t;         /* [cells_of(D)][ld_q], [cells_of(Dv)][ld_q]: B of S, dP */
    cell *q_panel, *do_panel; /* [cells_of(BQ)][ld_d], [cells_of(BQ)][ld_dv]: B of dK, dV */
    cell *p_rows, *ds_rows;   /* [BKV][ld_qc]: A of dV, dK */
    cell *ds_panel;           /* [cells_of(BKV)][ld_q]: B of dQ; PAIR 1: ds_rows */
    float *s, *dp;            /* [STRIP][ld_q]; PAIR 1: inside p_rows, ds_rows */
    float *dk, *dv;           /* [BKV][ld_d], [BKV][ld_dv] */
    float *bias, *raw;        /* [STRIP][ld_q]; NULL = none */
} scratch;

/* A row length in floats whose rows start in different cache sets: an odd number of lines. */
INLINE int64_t odd_lines(int64_t n) { return (gk_ceil_div(n, LINE) | 1) * LINE; }

/* Room for `count` floats or cells at *at, and a line to spare, which pack_panel may write. */
INLINE void *place(char *base, size_t *at, int64_t count) {
    void *here = gk_at(base, (int64_t)*at);
    *at += 4 * (size_t)(count + LINE);
    return here;
}

/* Lays the tiles out from `base` and returns the bytes they take. */
INLINE size_t scratch_make(scratch *w, const sizes *z, const attn_shape *s, char *base) {
    const int64_t bq = z->tile.bq, bkv = z->tile.bkv;
    size_t at = 0;
    w->k_rows = place(base, &at, bkv * z->ld_kd);
    w->v_rows = place(base, &at, bkv * z->ld_kdv);
    w->q_t = place(base, &at, whole_cells(s->head_dim) * z->ld_q);
    w->do_t = place(base, &at, whole_cells(s->head_dim_v) * z->ld_q);
    w->q_panel = place(base, &at, whole_cells(bq) * z->ld_d);
    w->do_panel = place(base, &at, whole_cells(bq) * z->ld_dv);
    w->p_rows = place(base, &at, bkv * z->ld_qc);
    w->ds_rows = place(base, &at, bkv * z->ld_qc);
    w->dk = place(base, &at, bkv * z->ld_d);
    w->dv = place(base, &at, bkv * z->ld_dv);
    if (PAIR == 1) {
        w->k_panel = w->k_rows;
        w->ds_panel = w->ds_rows;
        w->s = (float *)w->p_rows;
        w->dp = (float *)w->ds_rows;
    } else {
        w->k_panel = place(base, &at, (TILED ? s->head_dim : cells_of(bkv)) * z->ld_k);
        w->ds_panel = place(base, &at, (cells_of(bkv) + K_CELLS - 1) * z->ld_q);
        w->s = place(base, &at, z->tile.strip * z->ld_q);
        w->dp = place(base, &at, z->tile.strip * z->ld_q);
    }
    w->bias = z->has_bias ? place(base, &at, z->tile.strip * z->ld_q) : NULL;
    w->raw = z->has_raw ? place(base, &at, z->tile.strip * z->ld_q) : NULL;
    return at;
}

/* Keys of a chunk. Few heads split the keys, as long as a chunk is worth it and its copy of dQ
 * affordable. */
INLINE void chunks_of(sizes *z, const attn_shape *s) {
    z->heads = s->batch * s->heads_kv;
    const int64_t dq_bytes = 4 * z->heads * s->group * z->dq_blocks * z->dq_block;
    int64_t chunks = gk_ceil_div(GK_ATTN_BWD_TASKS, gk_max_i64(1, z->heads));
    chunks = gk_min_i64(chunks, s->max_seq_k / GK_ATTN_BWD_CHUNK_KEYS);
    chunks = gk_max_i64(1, gk_min_i64(chunks, GK_ATTN_BWD_CHUNK_BYTES / gk_max_i64(1, dq_bytes)));
    z->chunk_keys =
        gk_max_i64(1, gk_ceil_div(gk_ceil_div(s->max_seq_k, chunks), z->tile.bkv)) * z->tile.bkv;
    z->chunks = gk_max_i64(1, gk_ceil_div(s->max_seq_k, z->chunk_keys));
    z->tasks = z->heads * z->chunks;
}

/* Room for `bytes` in the workspace at *at; returns its offset. */
INLINE size_t reserve(size_t *at, int64_t bytes) {
    const size_t here = *at;
    *at += (size_t)gk_round_up(bytes, 64);
    return here;
}

INLINE sizes sizes_of(const gk_context *ctx, const gk_flash_attn_bwd_args *a, const attn_shape *s) {
    sizes z;
    z.tile = SYM(gk_attn_bwd_blocks);
    z.tokens_q = s->packed ? a->fwd.q.shape[0] : s->batch * s->max_seq_q;
    z.ld_d = odd_lines(s->head_dim);
    z.ld_dv = odd_lines(s->head_dim_v);
    z.ld_kd = odd_lines(cells_of(s->head_dim));
    z.ld_kdv = odd_lines(cells_of(s->head_dim_v));
    z.ld_q = odd_lines(z.tile.bq);
    z.ld_qc = odd_lines(cells_of(z.tile.bq));
    z.ld_k = TILED ? odd_lines(cells_of(z.tile.bkv) + K_CELLS) : z.ld_d;
    z.dq_blocks = gk_ceil_div(s->max_seq_q, NR);
    z.dq_block = s->head_dim * NR;
    chunks_of(&z, s);
    z.workers = gk_num_workers(ctx, z.tasks);
    const gk_attn_scores *scores = gk_scores_of_bwd(a);
    z.has_bias = scores && (scores->bias || scores->distance_bias);
    z.has_raw = gk_dbias_of(a) || gk_ddistance_of(a);

    scratch unused;
    size_t at = 0;
    const int64_t row_bytes = 4 * s->heads_q * z.tokens_q;
    z.order_at = reserve(&at, s->batch * (int64_t)sizeof(int64_t) * 2);
    z.lse_at = reserve(&at, row_bytes);
    z.delta_at = reserve(&at, row_bytes);
    z.left_at = reserve(&at, a->dsinks ? z.chunks * row_bytes : 0);
    z.dsink_at = reserve(&at, 8 * s->heads_q * s->batch);
    z.worker_bytes = (size_t)gk_round_up((int64_t)scratch_make(&unused, &z, s, NULL), 64);
    z.worker_at = reserve(&at, (int64_t)z.worker_bytes * z.workers);
    z.dq_at = reserve(&at, 4 * (z.chunks == 1 ? z.workers : z.tasks) * s->group * z.dq_blocks *
                               z.dq_block);
    z.dbias_at = reserve(&at, dbias_bytes(a, s, z.chunks));
    z.ddistance_at = reserve(&at, ddistance_bytes(a, s, z.chunks));
    z.total_bytes = at;
    return z;
}

/* ---- the call -------------------------------------------------------------------------------- */
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
    attn_dbias dbias; /* the sums of the gradients of biases */
    int64_t phase;    /* of the main step, attn_dbias.h */
} job;
GK_PLAN_HOLDS(job);

/* Offset of row 0 of sequence b and head h in a tensor like q or k; `first` is its first token. */
INLINE int64_t row0_of(const job *g, const gk_tensor *t, int64_t b, int64_t h, int64_t first) {
    return h * t->stride[1] + (g->shape.packed ? first * t->stride[0] : b * t->stride[0]);
}
INLINE int64_t first_of(const gk_tensor *cu_seqlens, int64_t b) {
    return cu_seqlens ? gk_i32_at(cu_seqlens, b) : 0;
}
INLINE int64_t first_q(const job *g, int64_t b) { return first_of(g->args->fwd.cu_seqlens_q, b); }
INLINE int64_t first_k(const job *g, int64_t b) { return first_of(g->args->fwd.cu_seqlens_k, b); }

INLINE void *at(const gk_tensor *t, int64_t element) {
    return gk_at(t->data, (int64_t)gk_dtype_bytes(t->dtype) * element);
}

INLINE void zero_rows(void *dst, gk_dtype dtype, int64_t row_stride, int64_t rows, int64_t dim) {
    const size_t es = gk_dtype_bytes(dtype);
    for (int64_t i = 0; i < rows; ++i)
        memset((char *)dst + (int64_t)es * i * row_stride, 0, es * (size_t)dim);
}

/* The rows and keys of a sequence that take part. With a mask or a bias all do, so that tiles begin
 * at multiples of a mask's blocks. */
INLINE seen seen_by(const job *g, const attn_seq *x) {
    const seen part = seen_of(x);
    if (!g->has_scores || part.row_lo >= part.row_hi) return part;
    return (seen){0, x->seq_q, 0, x->seq_k};
}

/* lse, delta, or what a row's dS leave, of head h and sequence b: [rows]. */
INLINE float *row_values(const job *g, size_t where, int64_t b, int64_t h) {
    const int64_t first = g->shape.packed ? first_q(g, b) : b * g->shape.max_seq_q;
    return (float *)(g->workspace + where) + h * g->z.tokens_q + first;
}

/* The sums of a row's dS over the keys of a chunk: [rows]. */
INLINE float *left_of(const job *g, int64_t b, int64_t h, int64_t chunk) {
    return row_values(g, g->z.left_at, b, h) + chunk * g->shape.heads_q * g->z.tokens_q;
}

#endif
