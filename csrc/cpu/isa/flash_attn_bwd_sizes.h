/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_sizes: where the backward's workspace and a worker's tiles lie. Included by
 * flash_attn_bwd.c alone. */
typedef struct sizes {
    gk_attn_bwd_blocks tile;
    int64_t tokens_q;      /* of the whole call */
    int64_t ld_d, ld_dv;   /* rows of D, Dv floats or cells */
    int64_t ld_kd, ld_kdv; /* rows of cells_of(D), cells_of(Dv) */
    int64_t ld_q, ld_qc;   /* rows of BQ floats, of cells_of(BQ) */
    int64_t ld_k; /* of the A of dQ: D cells; on tiles cells_of(BKV), and a tile's to spare */
    int64_t dq_blocks, dq_block; /* blocks [D][NR] of dQ of a head at most; floats of one */
    int64_t chunk_keys, chunks, heads, tasks; /* heads: sequences x kv heads */
    int64_t workers;
    /* a tile of biases; one of dS before softcap, for the gradients of biases */
    bool has_bias, has_raw;
    size_t dbias_at, ddistance_at; /* float32 sums, flash_attn_bwd_bias.h */
    size_t order_at, lse_at, delta_at, left_at, dsink_at, worker_at, worker_bytes, dq_at,
        total_bytes;
} sizes;

/* A row length in floats whose rows start in different cache sets: an odd number of lines. */
static int64_t odd_lines(int64_t n) { return (gk_ceil_div(n, LINE) | 1) * LINE; }

/* One worker's tiles, in cells or floats (4 bytes). With PAIR 1 several are the same memory. */
typedef struct scratch {
    cell *k_rows, *v_rows; /* [BKV][ld_kd], [BKV][ld_kdv]: A of S, dP */
    cell *k_panel;         /* [cells_of(BKV)][ld_k]: A of dQ; PAIR 1: k_rows; on tiles [D][ld_k] */
    cell *q_t, *do_t;      /* [cells_of(D)][ld_q], [cells_of(Dv)][ld_q]: B of S, dP */
    cell *q_panel, *do_panel; /* [cells_of(BQ)][ld_d], [cells_of(BQ)][ld_dv]: B of dK, dV */
    cell *p_rows, *ds_rows;   /* [BKV][ld_qc]: A of dV, dK */
    cell *ds_panel;           /* [cells_of(BKV)][ld_q]: B of dQ; PAIR 1: ds_rows */
    float *s, *dp;            /* [STRIP][ld_q]; PAIR 1: inside p_rows, ds_rows */
    float *dk, *dv;           /* [BKV][ld_d], [BKV][ld_dv] */
    float *bias, *raw;        /* [STRIP][ld_q]; NULL = none */
} scratch;

/* Lays the tiles out from `base`; returns the bytes they take. */
static size_t scratch_make(scratch *w, const sizes *z, const attn_shape *s, char *base) {
    const int64_t bq = z->tile.bq, bkv = z->tile.bkv;
    size_t at = 0;
#define PLACE(field, rows, ld)            \
    (w->field = gk_at(base, (int64_t)at), \
     at += 4 * (size_t)((rows) * (ld) + LINE)) /* a line to spare: pack_panel */
    PLACE(k_rows, bkv, z->ld_kd);
    PLACE(v_rows, bkv, z->ld_kdv);
    PLACE(q_t, whole_cells(s->head_dim), z->ld_q);
    PLACE(do_t, whole_cells(s->head_dim_v), z->ld_q);
    PLACE(q_panel, whole_cells(bq), z->ld_d);
    PLACE(do_panel, whole_cells(bq), z->ld_dv);
    PLACE(p_rows, bkv, z->ld_qc);
    PLACE(ds_rows, bkv, z->ld_qc);
    PLACE(dk, bkv, z->ld_d);
    PLACE(dv, bkv, z->ld_dv);
    if (PAIR == 1) {
        w->k_panel = w->k_rows;
        w->ds_panel = w->ds_rows;
        w->s = (float *)w->p_rows;
        w->dp = (float *)w->ds_rows;
    } else {
        PLACE(k_panel, TILED ? s->head_dim : cells_of(bkv), z->ld_k);
        PLACE(ds_panel, cells_of(bkv) + K_CELLS - 1, z->ld_q);
        PLACE(s, z->tile.strip, z->ld_q);
        PLACE(dp, z->tile.strip, z->ld_q);
    }
    w->bias = w->raw = NULL;
    if (z->has_bias) PLACE(bias, z->tile.strip, z->ld_q);
    if (z->has_raw) PLACE(raw, z->tile.strip, z->ld_q);
#undef PLACE
    return at;
}

static int64_t dbias_floats(const gk_flash_attn_bwd_args *a, const sizes *z, const attn_shape *s);

static sizes sizes_of(const gk_context *ctx, const gk_flash_attn_bwd_args *a, const attn_shape *s) {
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

    /* few heads: split the keys, as long as a chunk is worth it and its copy of dQ affordable */
    z.heads = s->batch * s->heads_kv;
    const int64_t dq_bytes = 4 * z.heads * s->group * z.dq_blocks * z.dq_block;
    int64_t chunks = gk_ceil_div(GK_ATTN_BWD_TASKS, gk_max_i64(1, z.heads));
    chunks = gk_min_i64(chunks, s->max_seq_k / GK_ATTN_BWD_CHUNK_KEYS);
    chunks = gk_max_i64(1, gk_min_i64(chunks, GK_ATTN_BWD_CHUNK_BYTES / gk_max_i64(1, dq_bytes)));
    z.chunk_keys =
        gk_max_i64(1, gk_ceil_div(gk_ceil_div(s->max_seq_k, chunks), z.tile.bkv)) * z.tile.bkv;
    z.chunks = gk_max_i64(1, gk_ceil_div(s->max_seq_k, z.chunk_keys));
    z.tasks = z.heads * z.chunks;
    z.workers = gk_num_workers(ctx, z.tasks);
    const gk_attn_scores *scores = gk_scores_of_bwd(a);
    z.has_bias = scores && (scores->bias || scores->distance_bias);
    z.has_raw = gk_dbias_of(a) || gk_ddistance_of(a);

    scratch unused;
    size_t at = 0;
#define PLACE(field, bytes) (z.field = at, at += (size_t)gk_round_up((int64_t)(bytes), 64))
    PLACE(order_at, s->batch * (int64_t)sizeof(int64_t) * 2);
    PLACE(lse_at, 4 * s->heads_q * z.tokens_q);
    PLACE(delta_at, 4 * s->heads_q * z.tokens_q);
    PLACE(left_at, a->dsinks ? 4 * z.chunks * s->heads_q * z.tokens_q : 0);
    PLACE(dsink_at, 8 * s->heads_q * s->batch);
    z.worker_bytes = (size_t)gk_round_up((int64_t)scratch_make(&unused, &z, s, NULL), 64);
    PLACE(worker_at, z.worker_bytes * (size_t)z.workers);
    PLACE(dq_at, 4 * (z.chunks == 1 ? z.workers : z.tasks) * s->group * z.dq_blocks * z.dq_block);
    PLACE(dbias_at, 4 * dbias_floats(a, &z, s));
    PLACE(ddistance_at, gk_ddistance_of(a)
                            ? 4 * s->batch * s->heads_q * z.chunks * (s->max_seq_q + s->max_seq_k)
                            : 0);
#undef PLACE
    z.total_bytes = at;
    return z;
}

/* Zeros in P and dS of keys [key, key + keys) where lanes past `rows` share a cell with a row, or a
 * tile, which ends at cell `end`: q is 0 there, so an infinite key has made them NaN. */
static __attribute__((unused)) void clear_lanes(const scratch *w, int64_t ld, int64_t key,
                                                int64_t keys, int64_t rows, int64_t end) {
    const int64_t bytes = 4 / PAIR;
    for (int64_t k = key; k < key + keys; ++k) {
        memset((char *)(w->p_rows + k * ld) + rows * bytes, 0,
               (size_t)((end * PAIR - rows) * bytes));
        memset((char *)(w->ds_rows + k * ld) + rows * bytes, 0,
               (size_t)((end * PAIR - rows) * bytes));
    }
}
