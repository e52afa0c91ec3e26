/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_attn: attention of new tokens over a paged cache, whose pages are read in place.
 *
 *   out = softmax(scale q K^T + rules) V      lse = log sum exp of the same scores, natural
 *
 *   q [T, Hq, D]  k_cache [num_blocks, block_size, Hkv, D]  v_cache [.., Dv]
 *   block_table [B, max_blocks]  seq_lens [B]  out [T, Hq, Dv]  lse [T, Hq] float32
 *   Query t of a sequence's n tokens stands at position seq_lens[b] - n + t.
 *
 * Kwon et al. 2023, arXiv:2309.06180; the split of the context is Dao et al. 2023 (Flash-Decoding).
 * csrc/cpu/tables.c lists it; it is compiled once per instruction set.
 *
 * A lane is one query token of one head of the group of a kv head. The number of lanes of a
 * sequence decides between two algorithms:
 *
 *   many lanes  a task is a block of lanes of one kv head, by attn_tile.h.
 *   few lanes   the time is that of reading the keys, so each key is read once for all lanes of its
 *               head. A task is one chunk of the context of one sequence, for some kv heads. It
 *               leaves partial O, m and l, which merge_task adds up chunk by chunk in order:
 *               results depend on the chunk size alone. Large tables have longer chunks, unless
 *               the call is batch-invariant.
 *
 * A chunk goes through its keys in tiles of blocks->tile keys of all its heads:
 *
 *   S = Q K^T    P = exp(S - m)    O += P V
 *
 *   order     A few keys outside, heads inside: cache lines are asked for nearly in the order of
 *             their addresses, which the machine's own prefetcher follows. Head by head it would
 *             fetch rows that come much later.
 *   prefetch  While a tile computes, it prefetches the rows of the next one: K during Q K^T, V
 *             during P V. It also asks for the first line of the rows of a later tile, because a
 *             page may lie anywhere and a miss of the TLB takes a page-table walk.
 *   AMX       S^T = K Q^T and O += P V on tiles, for 16 lanes at a time and head by head.
 *
 *   workspace  plan [2][B + 1] int64 | partials [chunks][Hkv][lanes][Dv up to W, m, l] float |
 *              scratch of each worker
 *
 * Pages of 8-bit codes and of latents in 8 bits are decoded tile by tile into rows of q's dtype
 * (paged_codes.h).
 * float64 is served by csrc/ref. */
#include "paged_codes.h"
#include "paged_fetch.h"
#include "paged_products.h"

enum {
    MAX_LANES = TILED ? 64 : 8, /* of a sequence with few lanes */
    MAX_TILE = 64,              /* keys; whole vectors */
    STEP = 16, /* keys that all heads and lanes take before the next; whole vectors */
    AHEAD = 3  /* the tile whose rows are looked up this many tiles ahead of the current one */
};

/* ---- a call ---------------------------------------------------------------------------------- */
typedef struct paged_job {
    const gk_paged_attn_args *args;
    const gk_paged_blocks *blocks;
    int64_t batch, tokens, heads_q, heads_kv;
    int64_t max_tokens; /* upper bound of a sequence's query tokens */
    attn_job attn;      /* of sequences with many lanes */
    /* of sequences with few lanes */
    int64_t chunk, max_chunks; /* keys of a chunk; upper bound of the batch's chunks */
    int64_t lanes, heads;      /* of a partial; kv heads of a task */
    bool near;                 /* prefetch into the L1 */
    int64_t o_step;            /* elements of a lane's O */
    int64_t partial;           /* elements of a lane's O, m and l */
    int64_t q_step;            /* cells of a lane's q */
    /* in the workspace */
    int64_t *first_block, *first_chunk; /* [B + 1] tasks of the sequences before b */
    float *partials;
    char *scratch;
    int64_t plan_bytes, partials_bytes, scratch_bytes;
    paged_codes codes;
} paged_job;
GK_PLAN_HOLDS(paged_job);

/* The scratch of a task with few lanes: arrays [heads][lanes] with one step from head to head. */
typedef struct lanes_scratch {
    cell *q, *p;
    float *o, *s;
    cell *k, *v;                           /* AMX: a tile of one head, as A and as B */
    char *decoded;                         /* rows of a tile of 8-bit pages, of all heads */
    int64_t q_head, o_head, s_head, bytes; /* s_head: of p too */
} lanes_scratch;

/* AMX works on whole runs of W lanes; the lanes behind the last one see no key. */
INLINE int64_t lanes_with_room(int64_t lanes) { return TILED ? gk_round_up(lanes, W) : lanes; }

static lanes_scratch lanes_scratch_at(void *at, const paged_job *job) {
    const int64_t lanes = lanes_with_room(job->lanes), tile = job->blocks->tile;
    lanes_scratch x;
    x.q_head = lanes * job->q_step;
    x.o_head = lanes * job->partial;
    x.s_head = lanes * tile;
    x.q = at;
    x.o = gk_at(x.q, 4 * job->heads * x.q_head);
    x.s = gk_at(x.o, 4 * job->heads * x.o_head);
    x.p = gk_at(x.s, 4 * job->heads * x.s_head);
    const int64_t runs = gk_round_up(4 * job->heads * (x.q_head + x.o_head + 2 * x.s_head), 64);
    const int64_t k_bytes = TILED ? 4 * tile * job->q_step : 0;
    const int64_t v_bytes = TILED ? 4 * cells_of(tile) * job->o_step : 0;
    x.k = gk_at(at, runs);
    x.v = gk_at(x.k, k_bytes);
    x.decoded = gk_at(x.k, gk_round_up(k_bytes + v_bytes, 64));
    x.bytes = runs + gk_round_up(k_bytes + v_bytes, 64) +
              gk_round_up(job->heads * tile * job->attn.decoded_bytes, 64);
    return x;
}

INLINE bool is_invariant(const gk_paged_attn_args *a) {
    return (a->flags & GK_PAGED_BATCH_INVARIANT) != 0;
}

static paged_job job_make(const gk_context *ctx, const gk_paged_attn_args *a) {
    paged_job job = {.args = a, .blocks = &SYM(gk_paged_attn_blocks)};
    job.batch = a->seq_lens.shape[0];
    job.tokens = a->q.shape[0];
    job.heads_q = a->q.shape[1];
    job.heads_kv = a->k_cache.shape[2];
    const int64_t head_dim = a->q.shape[2], head_dim_v = a->v_cache.shape[3];
    const int64_t group = job.heads_kv ? job.heads_q / job.heads_kv : 1;
    job.max_tokens = !job.batch        ? 0
                     : a->cu_seqlens_q ? gk_min_i64(a->max_seqlen_q, job.tokens)
                                       : job.tokens / job.batch;

    const gk_attn_blocks *row = TILED ? gk_attn_fwd_blocks_tiled : gk_attn_fwd_blocks;
    while (row->max_head_dim < gk_max_i64(head_dim, head_dim_v)) ++row;
    const int64_t bq = gk_clamp_i64(gk_round_up(job.max_tokens * group, NR), NR, row->bq);
    job.attn = (attn_job){.rules = &a->rules,
                          .dtype = a->q.dtype,
                          .out_dtype = a->q.dtype,
                          .head_dim = head_dim,
                          .head_dim_v = head_dim_v,
                          .group = group,
                          .bq = bq,
                          .bkv = row->bkv,
                          .out = a->out.data,
                          .lse = a->lse.data,
                          .decoded_bytes = paged_decoded_bytes(a)};

    const int64_t capacity = a->block_table.shape[1] * a->k_cache.shape[1];
    job.chunk = job.blocks->chunk;
    if (!is_invariant(a))
        job.chunk = gk_max_i64(
            job.chunk, gk_round_up(gk_ceil_div(job.batch * capacity, job.blocks->max_chunks), W));
    job.lanes = gk_min_i64(job.max_tokens * group, job.blocks->max_lanes);
    job.max_chunks = group > job.lanes ? 0 : job.batch * gk_ceil_div(capacity, job.chunk);
    job.heads = gk_max_i64(1, job.heads_kv);
    /* A head's sums do not depend on the other heads of its task: the thread count may decide. */
    const int64_t wanted = job.blocks->tasks_per_thread * gk_num_threads(ctx);
    while (job.heads > 1 && job.max_chunks * gk_ceil_div(job.heads_kv, job.heads) < wanted)
        job.heads = gk_ceil_div(job.heads, 2);
    job.near = gk_cpu_fetches_near();
    job.o_step = gk_round_up(head_dim_v, W);
    job.partial = job.o_step + 2 * W; /* m and l of a run of lanes follow O of its first lane */
    job.q_step = gk_round_up(cells_of(head_dim), W);

    job.plan_bytes = gk_round_up(16 * (job.batch + 1), 64);
    job.partials_bytes = 4 * job.max_chunks * job.heads_kv * job.lanes * job.partial;
    job.scratch_bytes =
        gk_max_i64(attn_scratch_at(NULL, &job.attn).bytes, lanes_scratch_at(NULL, &job).bytes);
    return job;
}

/* Sequence b; its keys are addressed through keys_of. */
static attn_seq seq_of(const paged_job *job, int64_t b) {
    const gk_paged_attn_args *a = job->args;
    const int64_t each = job->tokens / job->batch;
    const int64_t q0 = a->cu_seqlens_q ? gk_i32_at(a->cu_seqlens_q, b) : b * each;
    attn_seq x = {.q_row = a->q.stride[0], .q_head = a->q.stride[1]};
    x.seq_q = a->cu_seqlens_q ? gk_i32_at(a->cu_seqlens_q, b + 1) - q0 : each;
    x.seq_k = gk_i32_at(&a->seq_lens, b);
    x.q = gk_at(a->q.data, (int64_t)gk_dtype_bytes(a->q.dtype) * q0 * x.q_row);
    x.out_row = a->out.stride[0];
    x.out_head = a->out.stride[1];
    x.out_first = q0 * x.out_row;
    x.lse_row = job->heads_q;
    x.lse_head = 1;
    x.lse_first = q0 * job->heads_q;
    x.span = gk_span_paged(a, b, x.seq_q, x.seq_k);
    return x;
}

static attn_keys keys_of(const paged_job *job, int64_t b, int64_t h_kv) {
    const gk_paged_attn_args *a = job->args;
    const int64_t es = (int64_t)gk_dtype_bytes(a->k_cache.dtype);
    return (attn_keys){.k = gk_at(a->k_cache.data, es * h_kv * a->k_cache.stride[2]),
                       .v = gk_at(a->v_cache.data, es * h_kv * a->v_cache.stride[2]),
                       .k_row_bytes = es * a->k_cache.stride[1],
                       .v_row_bytes = es * a->v_cache.stride[1],
                       .pages = gk_at(a->block_table.data, 4 * b * a->block_table.stride[0]),
                       .pages_step = a->block_table.stride[1],
                       .page_size = a->k_cache.shape[1],
                       .k_page_bytes = es * a->k_cache.stride[0],
                       .v_page_bytes = es * a->v_cache.stride[0],
                       .decode = job->attn.decoded_bytes ? paged_decode : NULL,
                       .codes = &job->codes,
                       .head = h_kv};
}

/* The scale of a head's codes; 1 if each page has its own, which decoding applies. */
static float head_scale(const gk_tensor *t, int64_t h_kv) {
    if (!t || t->ndim == 2) return 1;
    return ((const float *)t->data)[t->ndim ? h_kv * t->stride[0] : 0];
}

/* The scale of scores times that of the keys. It stays finite, so that the score of zero codes is 0
 * and not NaN. */
INLINE float scale_of(const paged_job *job, int64_t h_kv) {
    const double most = FLT_MAX / GK_LOG2E; /* the softmax multiplies it by ATTN_UNIT */
    const double scale = job->args->rules.scale * head_scale(job->args->k_scale, h_kv);
    return (float)(scale > most ? most : scale < -most ? -most : scale);
}

/* ---- the tasks of a call --------------------------------------------------------------------- */
INLINE bool few_lanes(const paged_job *job, const attn_seq *x) {
    return x->seq_q * job->attn.group <= job->lanes;
}

INLINE int64_t num_chunks(const paged_job *job, const attn_seq *x) {
    return x->seq_q ? gk_ceil_div(gk_span_hi(&x->span, x->seq_q - 1) - gk_span_lo(&x->span, 0),
                                  job->chunk)
                    : 0;
}

static void count_tasks(paged_job *job) {
    int64_t blocks = 0, chunks = 0;
    for (int64_t b = 0; b < job->batch; ++b) {
        const attn_seq x = seq_of(job, b);
        job->first_block[b] = blocks;
        job->first_chunk[b] = chunks;
        if (few_lanes(job, &x))
            chunks += num_chunks(job, &x);
        else
            blocks += gk_ceil_div(x.seq_q * job->attn.group, job->attn.bq) * job->heads_kv;
    }
    job->first_block[job->batch] = blocks;
    job->first_chunk[job->batch] = chunks;
}

/* The sequence that owns task i: the last b with first[b] <= i. */
INLINE int64_t owner(const int64_t *first, int64_t batch, int64_t i) {
    int64_t lo = 0, hi = batch - 1;
    while (lo < hi) {
        const int64_t mid = (lo + hi + 1) / 2;
        if (first[mid] <= i)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

/* ---- few lanes: softmax of a tile ------------------------------------------------------------ */
INLINE int lane_run(int64_t left) { return TILED ? W : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

/* A run: the lanes [l, l + run). */
#define FOR_RUNS(l, run, num_lanes)                                 \
    for (int64_t l = 0, run = lane_run(num_lanes); l < (num_lanes); \
         l += run, run = lane_run((num_lanes) - l))

typedef struct paged_lane {
    int64_t lo, hi, position; /* keys seen, i + diagonal */
    int64_t i, g;             /* query token, head of the group */
    float slope;              /* ATTN_UNIT */
} paged_lane;

/* The factor of sums made with maximum m once the maximum is larger. */
INLINE float paged_weight(float m, float larger) { return exp2f((m - larger) * ATTN_UNIT_LOG2); }

/* The maximum of a lane has grown by more than attn_lag: its O and l are rescaled. top is
 * [lane][keys]. */
static __attribute__((noinline)) void raise_maximum(int lanes, const paged_job *job,
                                                    const float *top, float *o) {
    const int keys = W / lanes;
    float *m = o + job->o_step, *l = m + W;
    for (int n = 0; n < lanes; ++n, o += job->partial) {
        float peak = top[n * keys];
        for (int i = 1; i < keys; ++i) peak = peak > top[n * keys + i] ? peak : top[n * keys + i];
        if (!(peak > m[n * keys] + attn_lag)) continue;
        const float shrink = paged_weight(m[n * keys], peak);
        for (int64_t d = 0; d < job->o_step; d += W) vf_store(o + d, vf_load(o + d) * shrink);
        for (int i = n * keys; i < (n + 1) * keys; ++i) {
            m[i] = peak;
            l[i] *= shrink;
        }
    }
}

/* Turns the scores s of a run of lanes and the keys j0 .. j0 + n into p, as cells. m and l of the
 * run follow O of its first lane: m is the same for all keys of a lane, l is a sum for each of W /
 * lanes keys. */
INLINE void softmax(const int lanes, const paged_job *job, const paged_lane *lane, float scale,
                    int64_t j0, int64_t n, float *s, cell *p, float *o) {
    const int keys = W / lanes;
    const float softcap = (float)job->args->rules.softcap;
    float slopes[W], positions[W], t[W];
    int32_t first[W], end[W], offset[W];
    bool edge = n % keys != 0, has_slope = false;
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l) {
        edge |= lane[l].lo > j0 || lane[l].hi < j0 + n;
        has_slope |= lane[l].slope != 0;
    }
    if (edge || has_slope)
        for (int i = 0; i < W; ++i) {
            const paged_lane *x = lane + i / keys;
            slopes[i] = x->slope;
            positions[i] = (float)(x->position - j0);
            offset[i] = i % keys;
            first[i] = (int32_t)gk_clamp_i64(x->lo - j0, 0, n);
            end[i] = (int32_t)gk_clamp_i64(x->hi - j0, 0, n);
        }
    vf top = vf_set1(-INFINITY);
    for (int64_t j = 0; j < n; j += keys) {
        vf x = vf_load(s + j * lanes);
        x = softcap > 0 ? vf_tanh(x * (scale / softcap)) * (softcap * ATTN_UNIT)
                        : x * (scale * ATTN_UNIT);
        if (edge || has_slope) {
            const vi key = vi_load(offset) + (int32_t)j;
            const vf distance = vf_load(positions) - __builtin_convertvector(key, vf);
            if (has_slope) x = x - vf_load(slopes) * vf_max(-distance, distance);
            x = vf_select(vi_lt(key, vi_load(first)), vf_set1(-INFINITY), x);
            x = vf_select(vi_lt(key, vi_load(end)), x, vf_set1(-INFINITY));
        }
        vf_store(s + j * lanes, x);
        top = vf_max(top, x);
    }
    float *m = o + job->o_step, *l = m + W;
    if (vm_any(vf_lt(vf_load(m) + attn_lag, top))) {
        vf_store(t, top);
        raise_maximum(lanes, job, t, o);
    }
    const vf peaks = vf_load(m);
    vf sum = vf_set1(0); /* of the tile, then added: a long chunk has few roundings */
    for (int64_t j = 0; j < n; j += keys * PAIR) {
        vf x[PAIR];
#pragma GCC unroll 2
        for (int i = 0; i < PAIR; ++i) {
            x[i] = j + i * keys < n ? attn_p(vf_load(s + (j + i * keys) * lanes), 1, peaks)
                                    : vf_set1(0);
            sum += x[i];
        }
        vc_store(p + j / PAIR * lanes,
                 lanes == W ? vc_from_rows(x[0], x[PAIR - 1]) : vc_from_run(x));
    }
    vf_store(l, vf_load(l) + sum);
}

/* After the last tile: copies O, m and l of a run of lanes into the lanes' partials. */
static void close_run(const paged_job *job, int lanes, int64_t used, const float *o, float *to) {
    const float *m = o + job->o_step, *l = m + W;
    for (int n = 0, keys = W / lanes; n < used; ++n, to += job->partial) {
        memcpy(to, o + n * job->partial, 4 * (size_t)job->o_step);
        double sum = 0;
        for (int i = n * keys; i < (n + 1) * keys; ++i) sum += l[i];
        to[job->o_step] = m[n * keys];
        to[job->o_step + 1] = (float)sum;
    }
}

/* ---- few lanes: a chunk ---------------------------------------------------------------------- */
/* A chunk of the context of one sequence, for the kv heads head0 .. head0 + num_heads. */
typedef struct chunk {
    const paged_job *job;
    lanes_scratch own;
    attn_seq seq;
    int64_t b, first, end; /* keys first .. end */
    int64_t head0, num_heads;
    int64_t num_lanes;
    paged_lane lanes[MAX_LANES];
} chunk;

/* Keys j .. j + n. k[i] and v[i] are the rows of key j + i and head head0; the next head's row is
 * k_head or v_head bytes behind. */
typedef struct key_tile {
    int64_t j, n;
    const char *const *k, *const *v;
    int64_t k_head, v_head;
} key_tile;

/* The rows of AHEAD + 1 tiles in a ring, as they lie in the pages. */
typedef struct row_ring {
    const char *k[AHEAD + 1][MAX_TILE], *v[AHEAD + 1][MAX_TILE];
} row_ring;

INLINE float *partial_at(const paged_job *job, int64_t chunk, int64_t h_kv, int64_t lane) {
    return job->partials + ((chunk * job->heads_kv + h_kv) * job->lanes + lane) * job->partial;
}

static void set_slopes(chunk *c, int64_t h) {
    const paged_job *job = c->job;
    const int64_t first = (c->head0 + h) * job->attn.group;
    for (int64_t l = 0; l < c->num_lanes; ++l)
        c->lanes[l].slope = attn_slope(&job->args->rules, c->b, first + c->lanes[l].g) * ATTN_UNIT;
}

#if TILED
_Static_assert(W == K_CELLS, "an AMX tile is 16 lanes and 16 cells");

/* Prefetches the next `bytes` bytes line by line. */
INLINE void fetch_lines(fetch *f, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) f->at = fetch_bytes(f, f->at, 64);
}

/* Copies one head's rows of K out of the pages, as the A of S^T. */
static void copy_k(const chunk *c, const key_tile *t, int64_t h, fetch *next) {
    const paged_job *job = c->job;
    const int64_t head_dim = job->attn.head_dim;
    for (int64_t i = 0; i < t->n; ++i) {
        const char *row = t->k[i] + h * t->k_head;
        for (int64_t x = 0; x < job->q_step; x += W)
            vc_store(c->own.k + i * job->q_step + x,
                     vc_load_along_k(row, job->attn.dtype, x * PAIR, head_dim - x * PAIR));
        fetch_lines(next, 2 * head_dim);
    }
}

/* Copies one head's rows of V, neighbouring keys zipped, as the B of O; zeros up to whole cells. */
static void copy_v(const chunk *c, const key_tile *t, int64_t h, fetch *next) {
    const paged_job *job = c->job;
    const int64_t head_dim_v = job->attn.head_dim_v, at = h * t->v_head;
    for (int64_t i = 0; i < PAIR * whole_cells(t->n); i += PAIR) {
        cell *to = c->own.v + i / PAIR * job->o_step;
        for (int64_t d = 0; d < head_dim_v; d += W)
            vc_store(to + d, i < t->n ? vc_load_across_k(t->v[i] + at,
                                                         i + 1 < t->n ? t->v[i + 1] + at : NULL,
                                                         job->attn.dtype, d, head_dim_v - d)
                                      : vc_set1(0));
        fetch_lines(next, PAIR * 2 * head_dim_v);
    }
}

/* O += P V of 16 lanes. p is a B, [pair of keys][lane], as the softmax left it; a transposition of
 * 16 x 16 cells in place makes it an A. */
static void add_values(const chunk *c, int64_t n, cell *p, float *o) {
    const paged_job *job = c->job;
    for (int64_t pair = 0; pair < whole_cells(n); pair += W) {
        vc r[W];
        for (int64_t i = 0; i < W; ++i)
            r[i] = pair + i < cells_of(n) ? vc_load(p + (pair + i) * W) : vc_set1(0);
        vc_transpose(r);
        for (int64_t i = 0; i < W; ++i) vc_store(p + (pair + i) * W, r[i]);
        tile_product(SUM_CELLS, true, W, job->attn.head_dim_v, W, p + pair * W, W,
                     c->own.v + pair * job->o_step, job->o_step, o, job->partial, true);
    }
}

/* S, P and O of all lanes and heads for one tile of keys. */
static void attend(chunk *c, const key_tile *t, fetch *k_next, fetch *v_next) {
    const paged_job *job = c->job;
    const lanes_scratch *own = &c->own;
    for (int64_t h = 0; h < c->num_heads; ++h) {
        const float scale = scale_of(job, c->head0 + h);
        set_slopes(c, h);
        copy_k(c, t, h, k_next);
        copy_v(c, t, h, v_next);
        for (int64_t l = 0; l < c->num_lanes; l += W) {
            float *s = own->s + h * own->s_head + l * job->blocks->tile;
            cell *p = own->p + h * own->s_head + l * job->blocks->tile;
            float *o = own->o + h * own->o_head + l * job->partial;
            tile_product(SUM_CELLS, true, t->n, W, cells_of(job->attn.head_dim), own->k,
                         job->q_step, own->q + h * own->q_head + l * job->q_step, W, s, W, false);
            softmax(W, job, c->lanes + l, scale, t->j, t->n, s, p, o);
            add_values(c, t->n, p, o);
        }
    }
}
#else
#define SOFTMAX(lanes)                                                                    \
    static __attribute__((noinline)) void softmax_##lanes(                                \
        const paged_job *job, const paged_lane *lane, float scale, int64_t j0, int64_t n, \
        float *s, cell *p, float *o) {                                                    \
        softmax(lanes, job, lane, scale, j0, n, s, p, o);                                 \
    }
SOFTMAX(1)
SOFTMAX(2)
SOFTMAX(4)
/* of a run of 1, 2 or 4 lanes at [lanes / 2] */
static void (*const softmax_of[])(const paged_job *, const paged_lane *, float, int64_t, int64_t,
                                  float *, cell *, float *) = {softmax_1, softmax_2, softmax_4};

/* S = Q K^T. The first run of lanes prefetches. */
static void scores(const chunk *c, const key_tile *t, fetch *next) {
    const paged_job *job = c->job;
    const lanes_scratch *own = &c->own;
    const products *of = products_of(job->attn.dtype);
    fetch none = fetch_none(t->k[0]);
    for (int64_t i = 0; i < t->n; i += STEP) FOR_RUNS(l, run, c->num_lanes) {
            const key_rows k = {t->k + i, gk_min_i64(STEP, t->n - i), c->num_heads, t->k_head};
            of[run / 2].dots(job->attn.head_dim, own->q + l * job->q_step, own->q_head, &k,
                             l ? &none : next, own->s + l * job->blocks->tile + i * run,
                             own->s_head);
        }
}

/* P = exp(S - m); m, l and O follow a maximum that grows. */
static void probabilities(chunk *c, const key_tile *t) {
    const paged_job *job = c->job;
    const lanes_scratch *own = &c->own;
    for (int64_t h = 0; h < c->num_heads; ++h) {
        const float scale = scale_of(job, c->head0 + h);
        if (job->args->rules.alibi_slopes) set_slopes(c, h);
        FOR_RUNS(l, run, c->num_lanes) {
            const int64_t at = h * own->s_head + l * job->blocks->tile;
            softmax_of[run / 2](job, c->lanes + l, scale, t->j, t->n, own->s + at, own->p + at,
                                own->o + h * own->o_head + l * job->partial);
        }
    }
}

/* O += P V. The first run of lanes prefetches. */
static void values(const chunk *c, const key_tile *t, fetch *next) {
    const paged_job *job = c->job;
    const lanes_scratch *own = &c->own;
    const products *of = products_of(job->attn.dtype);
    fetch none = fetch_none(t->k[0]);
    for (int64_t i = 0; i < t->n; i += STEP) FOR_RUNS(l, run, c->num_lanes) {
            const key_rows v = {t->v + i, gk_min_i64(STEP, t->n - i), c->num_heads, t->v_head};
            of[run / 2].weighted_rows(
                job->attn.head_dim_v, own->p + l * job->blocks->tile + i * run / PAIR, own->s_head,
                &v, l ? &none : next, own->o + l * job->partial, own->o_head, job->partial);
        }
}

/* S, P and O of all lanes and heads for one tile of keys. */
static void attend(chunk *c, const key_tile *t, fetch *k_next, fetch *v_next) {
    scores(c, t, k_next);
    probabilities(c, t);
    values(c, t, v_next);
}
#endif

/* All tiles of a chunk. */
static void chunk_tiles(chunk *c) {
    const paged_job *job = c->job;
    const gk_paged_attn_args *a = job->args;
    const int64_t tile = job->blocks->tile, end = c->end, heads = c->num_heads;
    const int64_t head_dim = job->attn.head_dim, head_dim_v = job->attn.head_dim_v;
    /* rows in the pages */
    const int64_t element = (int64_t)gk_dtype_bytes(a->k_cache.dtype);
    const int64_t k_bytes = element * a->k_cache.shape[3], v_bytes = element * head_dim_v;
    const int64_t k_head = element * a->k_cache.stride[2], v_head = element * a->v_cache.stride[2];
    const attn_keys keys = keys_of(job, c->b, c->head0);
    const int64_t decoded_element = job->attn.dtype == GK_F32 ? 4 : 2;
    const char *k_decoded[MAX_TILE], *v_decoded[MAX_TILE];
    row_ring rows;

    for (int64_t i = 0; i < AHEAD && c->first + i * tile < end; ++i) {
        const int64_t j = c->first + i * tile;
        attn_keys_at(&keys, j, gk_min_i64(tile, end - j), rows.k[i], rows.v[i]);
    }
    const int64_t n_first = gk_min_i64(tile, end - c->first);
    read_rows((key_rows){rows.k[0], n_first, heads, k_head}, k_bytes);
    read_rows((key_rows){rows.v[0], n_first, heads, v_head}, v_bytes);

    for (int64_t j = c->first; j < end; j += tile) {
        const int64_t now = (j - c->first) / tile % (AHEAD + 1);
        const int64_t next = (now + 1) % (AHEAD + 1), far = (now + AHEAD) % (AHEAD + 1);
        const int64_t n = gk_min_i64(tile, end - j);
        const int64_t n_next = gk_clamp_i64(end - j - tile, 0, tile);
        const int64_t j_far = gk_min_i64(end, j + AHEAD * tile);
        const int64_t n_far = gk_min_i64(tile, end - j_far);
        attn_keys_at(&keys, j_far, n_far, rows.k[far], rows.v[far]);

        const char **k = rows.k[now], **v = rows.v[now];
        int64_t k_step = k_head, v_step = v_head;
        if (keys.decode) {
            memcpy(k_decoded, k, sizeof k_decoded);
            memcpy(v_decoded, v, sizeof v_decoded);
            k = k_decoded;
            v = v_decoded;
            k_step = decoded_element * head_dim;
            v_step = decoded_element * head_dim_v;
            paged_decode_heads(&keys, j, n, heads, k_head, v_head, k, v, c->own.decoded);
        }
        for (int64_t i = n; i < gk_round_up(n, W); ++i) k[i] = k[n - 1]; /* dots: whole vectors */

        fetch k_next = fetch_none(rows.k[now][0]), v_next = k_next;
        if (n_next) {
            const key_rows k_rows = {rows.k[next], n_next, heads, k_head};
            const key_rows v_rows = {rows.v[next], n_next, heads, v_head};
            k_next = fetch_make(k_rows, k_bytes, rows.k[far], n_far, job->near);
            v_next = fetch_make(v_rows, v_bytes, rows.v[far], n_far, job->near);
        }
        const key_tile t = {j, n, k, v, k_step, v_step};
        attend(c, &t, &k_next, &v_next);
    }
}

/* Row `lane` of a run of q as dots reads it, [head_dim / (W PAIR)][lanes][W]; on tiles as their B,
 * [cells][lanes]. */
static void pack_q(cell *to, int lanes, const char *row, gk_dtype dtype, int64_t head_dim) {
    int64_t d = 0;
#if TILED
    cell cells[W];
    for (; d < whole_cells(head_dim); d += W) {
        vc_store(cells, vc_load_along_k(row, dtype, d * PAIR, head_dim - d * PAIR));
        for (int64_t i = 0; i < W; ++i) to[(d + i) * lanes] = cells[i];
    }
    return;
#endif
    for (; d + 2 * W * PAIR <= head_dim; d += 2 * W * PAIR) {
        vc x[2];
        vc_load2_split_along_k(row, dtype, d, x);
        vc_store(to + d / PAIR * lanes, x[0]);
        vc_store(to + (d / PAIR + W) * lanes, x[1]);
    }
    for (; d < head_dim; d += W * PAIR)
        vc_store(to + d / PAIR * lanes, vc_load_along_k(row, dtype, d, head_dim - d));
}

/* Packs q of all lanes and sets O and l to 0, m to the lowest number. */
static void begin_lanes(chunk *c) {
    const paged_job *job = c->job;
    const int64_t group = job->attn.group, num_lanes = c->num_lanes;
    const int64_t es = (int64_t)gk_dtype_bytes(job->attn.dtype);
    if (TILED) memset(c->lanes, 0, sizeof c->lanes); /* lanes behind the last one see no key */
    for (int64_t n = 0; n < num_lanes; ++n) {
        const int64_t i = n / group;
        c->lanes[n] = (paged_lane){.lo = gk_span_lo(&c->seq.span, i),
                                   .hi = gk_span_hi(&c->seq.span, i),
                                   .position = i + c->seq.span.diagonal,
                                   .i = i,
                                   .g = n % group};
    }
    for (int64_t h = 0; h < c->num_heads; ++h)
        for (int64_t n = 0, run = 0, lanes = 0; n < lanes_with_room(num_lanes); ++n) {
            if (n == run + lanes) {
                run = n;
                lanes = lane_run(num_lanes - n);
            }
            const int64_t lane = gk_min_i64(n, num_lanes - 1);
            const int64_t head = (c->head0 + h) * group + lane % group;
            const char *row = c->seq.q + es * (lane / group * c->seq.q_row + head * c->seq.q_head);
            cell *q = c->own.q + h * c->own.q_head + run * job->q_step;
            pack_q(q + (n - run) * (TILED ? 1 : W), (int)lanes, row, job->attn.dtype,
                   job->attn.head_dim);
            float *o = c->own.o + h * c->own.o_head + n * job->partial;
            memset(o, 0, 4 * (size_t)job->partial);
            vf_store(o + job->o_step, vf_set1(-FLT_MAX));
        }
}

static void chunk_task(const paged_job *job, int64_t task, int64_t worker) {
    const int64_t parts = gk_ceil_div(job->heads_kv, job->heads), number = task / parts;
    chunk c = {.job = job, .b = owner(job->first_chunk, job->batch, number)};
    c.seq = seq_of(job, c.b);
    c.own = lanes_scratch_at(job->scratch + worker * job->scratch_bytes, job);
    c.first = gk_span_lo(&c.seq.span, 0) + (number - job->first_chunk[c.b]) * job->chunk;
    c.end = gk_min_i64(c.first + job->chunk, gk_span_hi(&c.seq.span, c.seq.seq_q - 1));
    c.head0 = task % parts * job->heads;
    c.num_heads = gk_min_i64(job->heads, job->heads_kv - c.head0);
    c.num_lanes = c.seq.seq_q * job->attn.group;

    begin_lanes(&c);
    chunk_tiles(&c);
    for (int64_t h = 0; h < c.num_heads; ++h) FOR_RUNS(n, run, c.num_lanes)
    close_run(job, (int)run, gk_min_i64(run, c.num_lanes - n),
              c.own.o + h * c.own.o_head + n * job->partial,
              partial_at(job, number, c.head0 + h, n));
    release_tiles();
}

/* ---- few lanes: the chunks of a sequence and kv head become out and lse ---------------------- */
/* The sums of all chunks, each weighted; what no key was seen for is 0. */
INLINE vf merged(const paged_job *job, int64_t b, int64_t h_kv, int64_t n, int64_t d, float m,
                 float l, float factor) {
    vf o = vf_set1(0);
    if (l == 0) return o;
    for (int64_t c = job->first_chunk[b]; c < job->first_chunk[b + 1]; ++c) {
        const float *from = partial_at(job, c, h_kv, n);
        o = vf_fma(vf_load(from + d), vf_set1(paged_weight(from[job->o_step], m) * factor), o);
    }
    return o;
}

static void merge_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const paged_job *job = arg;
    const int64_t b = task / job->heads_kv, h_kv = task % job->heads_kv, group = job->attn.group;
    const int64_t head_dim_v = job->attn.head_dim_v, split = split_columns(head_dim_v);
    const gk_tensor *out = &job->args->out;
    const attn_seq x = seq_of(job, b);
    if (!few_lanes(job, &x)) return;
    const float v_scale = head_scale(job->args->v_scale, h_kv);
    for (int64_t n = 0; n < x.seq_q * group; ++n) {
        const int64_t i = n / group, h = h_kv * group + n % group;
        const float sink = (float)gk_sink_of(&job->args->rules, h);
        float m = attn_sink(sink), l = 0;
        for (int64_t c = job->first_chunk[b]; c < job->first_chunk[b + 1]; ++c)
            m = fmaxf(m, partial_at(job, c, h_kv, n)[job->o_step]);
        if (sink != -INFINITY) l = paged_weight(attn_sink(sink), m);
        for (int64_t c = job->first_chunk[b]; c < job->first_chunk[b + 1]; ++c) {
            const float *from = partial_at(job, c, h_kv, n) + job->o_step;
            l += paged_weight(from[0], m) * from[1];
        }
        const float factor = v_scale / l;
        const int64_t at = x.out_first + i * x.out_row + h * x.out_head;
        int64_t d = 0;
        for (; d < split; d += 2 * W) {
            vf o[2];
            for (int w = 0; w < 2; ++w) o[w] = merged(job, b, h_kv, n, d + w * W, m, l, factor);
            if (VC_SPLITS) vf_unsplit(o, job->attn.dtype);
            for (int w = 0; w < 2; ++w)
                vf_store_dtype(out->data, out->dtype, at + d + w * W, o[w], W);
        }
        for (; d < head_dim_v; d += W)
            vf_store_dtype(out->data, out->dtype, at + d, merged(job, b, h_kv, n, d, m, l, factor),
                           head_dim_v - d);
        if (job->attn.lse) job->attn.lse[x.lse_first + i * x.lse_row + h] = attn_lse(m, l, sink);
    }
}

/* ---- many lanes ------------------------------------------------------------------------------ */
static void block_task(const paged_job *job, int64_t task, int64_t worker) {
    const int64_t b = owner(job->first_block, job->batch, task),
                  h_kv = (task - job->first_block[b]) % job->heads_kv;
    const attn_seq x = seq_of(job, b);
    const int64_t lanes_in_all = x.seq_q * job->attn.group,
                  blocks = gk_ceil_div(lanes_in_all, job->attn.bq);
    const int64_t first =
        (blocks - 1 - (task - job->first_block[b]) / job->heads_kv) * job->attn.bq;
    /* The sums of a sequence follow from its own tokens, whatever the others of the call have. */
    attn_job own = job->attn;
    own.sum_cells = attn_sum_cells(own.dtype, x.seq_q);
    attn_lanes lanes;
    attn_lanes_fill(&lanes, &own, &x, b, h_kv, first, gk_min_i64(own.bq, lanes_in_all - first));
    const attn_keys keys = keys_of(job, b, h_kv);
    attn_block(&own, &lanes, &keys, scale_of(job, h_kv), head_scale(job->args->v_scale, h_kv),
               job->scratch + worker * job->scratch_bytes);
}

static void task(void *arg, int64_t i, int64_t worker) {
    const paged_job *job = arg;
    const int64_t blocks = job->first_block[job->batch];
    if (i < blocks)
        block_task(job, i, worker);
    else
        chunk_task(job, i - blocks, worker);
}

/* ---- the row of tables.c --------------------------------------------------------------------- */
static int64_t max_tasks(const paged_job *job) {
    const int64_t lanes = job->max_tokens * job->attn.group;
    return job->batch * job->heads_kv * gk_ceil_div(lanes, job->attn.bq) +
           job->max_chunks * gk_ceil_div(job->heads_kv, job->heads);
}

static bool plan(const gk_context *ctx, const void *args, gk_plan *to) {
    if (gk_paged_mask_of(args)) return false; /* ref/ serves masks over new tokens */
    paged_job *job = GK_OWN(paged_job, to);
    *job = job_make(ctx, args);
    /* Tiles are for more lanes than these, whose keys avx512 reads as fast. The longest sequence
     * decides, which an invariant call must not depend on. */
    if (TILED && !is_invariant(args) && job->max_tokens * job->attn.group <= 4) return false;
    to->tile[0] = job->attn.bq;
    to->tile[2] = job->max_chunks ? job->chunk : 0;
    to->tile[1] =
        job->max_tokens * job->attn.group <= job->lanes ? job->blocks->tile : job->attn.bkv;
    to->tasks = max_tasks(job);
    to->chunks = job->batch && job->max_chunks ? job->max_chunks / job->batch : 1;
    to->workspace_bytes = (size_t)(job->plan_bytes + job->partials_bytes +
                                   gk_num_workers(ctx, to->tasks) * job->scratch_bytes);
    return true;
}

static void run(const gk_context *ctx, const void *args, const gk_plan *planned, void *workspace) {
    paged_job job = *GK_OWN_CONST(paged_job, planned);
    const gk_paged_attn_args *a = args;
    job.args = a;
    job.attn.rules = &a->rules;
    job.codes = paged_codes_of(a);
    job.first_block = workspace;
    job.first_chunk = gk_at(workspace, 8 * (job.batch + 1));
    job.partials = gk_at(workspace, job.plan_bytes);
    job.scratch = gk_at(job.partials, job.partials_bytes);
    if (a->cu_seqlens_q)
        attn_clear_tokens(&a->out, a->lse.data, gk_i32_at(a->cu_seqlens_q, job.batch));
    if (job.batch == 0 || job.heads_kv == 0) return;
    count_tasks(&job);
    const int64_t parts = gk_ceil_div(job.heads_kv, job.heads);
    gk_parallel(ctx, job.first_block[job.batch] + job.first_chunk[job.batch] * parts, task, &job);
    if (job.lanes >= job.attn.group) gk_parallel(ctx, job.batch * job.heads_kv, merge_task, &job);
}

const gk_cpu_kernel SYM(gk_paged_attn) = {plan, run};
