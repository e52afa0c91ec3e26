/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd: O = softmax(scale Q K^T) V and its LSE, dense and packed, compiled once per ISA.
 * Dao 2023, arXiv:2307.08691, Algorithm 1; the block itself is attn_tile.h.
 * q [B, Hq, Sq, D]  k [B, Hkv, Sk, D]  v [B, Hkv, Sk, Dv]  out [B, Hq, Sq, Dv]  lse [B, Hq, Sq] float32, natural log
 * packed: q [Tq, Hq, D]  k [Tk, Hkv, D]  v [Tk, Hkv, Dv]  out [Tq, Hq, Dv]  lse [Tq, Hq]
 * Work split: a task is a block of bq lanes (query row x head of the group) of one kv head of one
 * sequence; the blocks of the last rows come first, because under a causal mask they see the most
 * keys. A worker owns one scratch.
 * Calls with a mask or a bias go by attn_masked.h.
 * Dropout: what is kept of p is what V^T multiplies, 1 / (1 - p) joins 1 / l.
 * Not here: float64 (ref/), keys in pages (paged_attn.c). */
#include "attn_masked.h"

typedef struct fwd_job {
    const gk_flash_attn_args *args;
    attn_shape shape;
    attn_job attn;
    int64_t blocks; /* of one sequence and kv head, by the longest sequence */
    int64_t tasks;
    int64_t scratch_bytes;
    char *workspace;
    gk_attn_keep dropout;
    attn_scores scores; /* where attn.scores points while the call runs; a mask or a bias */
} fwd_job;
GK_PLAN_HOLDS(fwd_job);

static fwd_job job_make(const gk_flash_attn_args *a) {
    fwd_job job = {.args = a, .shape = attn_shape_of(a)};
    const attn_shape *s = &job.shape;
    const gk_attn_blocks *row = TILED ? gk_attn_fwd_blocks_tiled : gk_attn_fwd_blocks;
    while (row->max_head_dim < gk_max_i64(s->head_dim, s->head_dim_v)) ++row;
    job.attn = (attn_job){&a->rules,   a->q.dtype, a->out.dtype,      s->head_dim,  s->head_dim_v,
                          s->group,    row->bq,    row->bkv,          s->sum_cells, a->out.data,
                          a->lse.data, 0,          gk_accumulates(a), NULL};
    const gk_attn_scores *scores = gk_scores_of(a);
    if (scores) {
        job.scores = attn_scores_of(scores, s->max_seq_q, s->max_seq_k);
        job.attn.scores = &job.scores;
        job.attn.bkv = ATTN_MASKED_BKV;
    }
    const int64_t lanes = s->max_seq_q * s->group;
    int64_t bq = gk_min_i64(row->bq, gk_round_up(lanes, NR));
    while (bq >= 2 * NR && s->batch * s->heads_kv * gk_ceil_div(lanes, bq) < row->min_tasks)
        bq = gk_round_up(bq / 2, NR);
    job.attn.bq = gk_max_i64(bq, NR);
    job.blocks = gk_ceil_div(lanes, job.attn.bq);
    job.tasks = s->batch * s->heads_kv * job.blocks;
    job.scratch_bytes = attn_scratch_at(NULL, &job.attn).bytes;
    return job;
}

static void block_task(void *arg, int64_t task, int64_t worker) {
    const fwd_job *job = arg;
    const gk_flash_attn_args *a = job->args;
    const attn_shape *s = &job->shape;
    const int64_t heads = s->batch * s->heads_kv;
    const int64_t block = job->blocks - 1 - task / heads, b = task % heads / s->heads_kv,
                  h_kv = task % s->heads_kv;
    const int64_t element_bytes = (int64_t)gk_dtype_bytes(a->q.dtype);

    const attn_seq x = attn_seq_of(a, s, b);
    const int64_t first = block * job->attn.bq, lanes_in_all = x.seq_q * s->group;
    if (first >= lanes_in_all) return; /* a sequence shorter than the longest */
    attn_lanes lanes;
    attn_lanes_fill(&lanes, &job->attn, &x, b, h_kv, first,
                    gk_min_i64(job->attn.bq, lanes_in_all - first));
    const attn_keys keys = {.k = gk_at(x.k, element_bytes * h_kv * x.k_head),
                            .v = gk_at(x.v, element_bytes * h_kv * x.v_head),
                            .k_row_bytes = element_bytes * x.k_row,
                            .v_row_bytes = element_bytes * x.v_row,
                            .dropout = job->dropout.most ? &job->dropout : NULL};
    char *scratch = job->workspace + worker * job->scratch_bytes;
    if (job->attn.scores)
        attn_block_masked(&job->attn, &lanes, &keys, &x, b, h_kv, first, (float)a->rules.scale,
                          (float)job->dropout.factor, scratch);
    else
        attn_block(&job->attn, &lanes, &keys, (float)a->rules.scale, (float)job->dropout.factor,
                   scratch);
}

/* ---- the row of tables.c --------------------------------------------------------------------- */
static bool plan(const gk_context *ctx, const void *args, gk_plan *to) {
    fwd_job *job = GK_OWN(fwd_job, to);
    *job = job_make(args);
    to->tile[0] = job->attn.bq;
    to->tile[1] = job->attn.bkv;
    to->tasks = job->tasks;
    to->workspace_bytes = (size_t)(gk_num_workers(ctx, job->tasks) * job->scratch_bytes);
    return true;
}

static void run(const gk_context *ctx, const void *args, const gk_plan *planned, void *workspace) {
    fwd_job job = *GK_OWN_CONST(fwd_job, planned);
    job.args = args;
    job.attn.rules = &job.args->rules;
    job.workspace = workspace;
    if (job.attn.scores) {
        job.scores = attn_scores_of(gk_scores_of(args), job.shape.max_seq_q, job.shape.max_seq_k);
        job.attn.scores = &job.scores;
    }
    job.dropout = gk_attn_keep_of(job.args); /* the seed is read as late as q is */
    if (job.shape.packed)
        attn_clear_tokens(&job.args->out, job.attn.lse,
                          gk_i32_at(job.args->cu_seqlens_q, job.shape.batch));
    gk_parallel(ctx, job.tasks, block_task, &job);
}

const gk_cpu_kernel SYM(gk_flash_attn_fwd) = {plan, run};
