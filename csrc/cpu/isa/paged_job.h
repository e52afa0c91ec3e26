/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_job: a call of paged_attn, what a worker keeps of it, and how it is cut into tasks.
 * Included by paged_attn.c alone. */
#include "paged_codes.h"
#include "paged_fetch.h"

enum {
    MAX_LANES = TILED ? 64 : 8,
    MAX_UNIT = 64, /* whole vectors */
    STEP = 16,     /* keys that all heads and lanes go through before the next: whole vectors */
    UNITS = 4,     /* whose rows are known at once: the one computed, the one fetched, .., the one
                      touched */
    VECTORS =
        W == 16 ? 4 : 2 /* of values at once: with 4 lanes they leave registers for the values */
};

typedef struct paged_job {
    const gk_paged_attn_args *args;
    const gk_paged_blocks *blocks;
    int64_t batch, tokens, heads_q, heads_kv;
    int64_t max_tokens;        /* upper bound of a sequence's query tokens */
    attn_job tile;             /* sequences with many lanes */
    int64_t chunk, max_chunks; /* keys of a chunk; chunks of the batch at most */
    int64_t lanes, heads;      /* few lanes: of a partial, and kv heads of a task */
    bool near;                 /* few lanes: prefetched into the L1 */
    int64_t o_step, partial,
        q_step; /* elements: O of a lane, O, m and l of a lane, q of a lane as cells */
    int64_t *first_block, *first_chunk; /* [B + 1] tasks of the sequences before b */
    float *partials;
    char *scratch;
    int64_t plan_bytes, partials_bytes, scratch_bytes;
    paged_codes codes;
} paged_job;
GK_PLAN_HOLDS(paged_job);

/* 1 where each page has a scale of its own: decoding takes that. */
static float head_scale(const gk_tensor *t, int64_t h_kv) {
    if (!t || t->ndim == 2) return 1;
    return ((const float *)t->data)[t->ndim ? h_kv * t->stride[0] : 0];
}

/* What a worker keeps of a task with few lanes, each [heads][lanes]; the steps are those of a
 * head. */
typedef struct lanes_scratch {
    cell *q, *p;
    float *o, *s;
    cell *k, *v;                           /* on tiles: the unit of a head, as A and as B */
    char *decoded;                         /* rows of a unit of 8-bit pages, of all heads */
    int64_t q_head, o_head, s_head, bytes; /* s_head: of p too */
} lanes_scratch;

/* On tiles the lanes of a run that are in use are followed by others, which see no key. */
INLINE int64_t lanes_with_room(int64_t lanes) { return TILED ? gk_round_up(lanes, W) : lanes; }

static lanes_scratch lanes_scratch_at(void *at, const paged_job *job) {
    const int64_t lanes = lanes_with_room(job->lanes), unit = job->blocks->unit;
    const int64_t q_head = lanes * job->q_step, o_head = lanes * job->partial,
                  s_head = lanes * unit;
    void *o = gk_at(at, 4 * job->heads * q_head), *s = gk_at(o, 4 * job->heads * o_head);
    const int64_t runs = gk_round_up(4 * job->heads * (q_head + o_head + 2 * s_head), 64);
    const int64_t k = TILED ? 4 * unit * job->q_step : 0,
                  v = TILED ? 4 * cells_of(unit) * job->o_step : 0;
    const int64_t decoded = gk_round_up(job->heads * unit * job->tile.decoded_bytes, 64);
    void *p = gk_at(s, 4 * job->heads * s_head), *keys = gk_at(at, runs), *values = gk_at(keys, k);
    void *decoded_at = gk_at(keys, gk_round_up(k + v, 64));
    const int64_t bytes = runs + gk_round_up(k + v, 64) + decoded;
    return (lanes_scratch){at, p, o, s, keys, values, decoded_at, q_head, o_head, s_head, bytes};
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
    job.tile = (attn_job){&a->rules,   a->q.dtype,  a->q.dtype,
                          head_dim,    head_dim_v,  group,
                          bq,          row->bkv,    attn_sum_cells(a->q.dtype, job.max_tokens),
                          a->out.data, a->lse.data, paged_decoded_bytes(a),
                          false,       NULL};
    const int64_t capacity = a->block_table.shape[1] * a->k_cache.shape[1];
    job.chunk =
        gk_max_i64(job.blocks->chunk,
                   gk_round_up(gk_ceil_div(job.batch * capacity, job.blocks->max_chunks), W));
    job.lanes = gk_min_i64(job.max_tokens * group, job.blocks->max_lanes);
    job.max_chunks = group > job.lanes ? 0 : job.batch * gk_ceil_div(capacity, job.chunk);
    job.heads = gk_max_i64(1, job.heads_kv);
    /* a head's sums do not know which others share its task, so the thread count may decide here */
    const int64_t wanted = job.blocks->tasks_per_thread * gk_num_threads(ctx);
    while (job.heads > 1 && job.max_chunks * gk_ceil_div(job.heads_kv, job.heads) < wanted)
        job.heads = gk_ceil_div(job.heads, 2);
    job.near = gk_cpu_fetches_near();
    job.o_step = gk_round_up(head_dim_v, W);
    job.partial = job.o_step + 2 * W; /* m and l of a run of lanes follow O of its first */
    job.q_step = gk_round_up(cells_of(head_dim), W);

    job.plan_bytes = gk_round_up(16 * (job.batch + 1), 64);
    job.partials_bytes = 4 * job.max_chunks * job.heads_kv * job.lanes * job.partial;
    job.scratch_bytes =
        gk_max_i64(attn_scratch_at(NULL, &job.tile).bytes, lanes_scratch_at(NULL, &job).bytes);
    return job;
}

/* Sequence b as the tile sees one; its keys are addressed through keys_of. */
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
                       .decode = job->tile.decoded_bytes ? paged_decode : NULL,
                       .codes = &job->codes,
                       .head = h_kv};
}

/* The scale of scores times that of the keys. It stays finite, so that a score of zero codes is 0
 * and no NaN. */
INLINE float scale_of(const paged_job *job, int64_t h_kv) {
    const double most = FLT_MAX / GK_LOG2E; /* the softmax multiplies it by ATTN_UNIT */
    const double scale = job->args->rules.scale * head_scale(job->args->k_scale, h_kv);
    return (float)(scale > most ? most : scale < -most ? -most : scale);
}

/* ---- the plan -------------------------------------------------------------------------------- */
INLINE bool few_lanes(const paged_job *job, const attn_seq *x) {
    return x->seq_q * job->tile.group <= job->lanes;
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
            blocks += gk_ceil_div(x.seq_q * job->tile.group, job->tile.bq) * job->heads_kv;
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
