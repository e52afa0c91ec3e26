/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd: O = softmax(scale Q K^T) V and its LSE, dense and packed. Compiled once for each
 * instruction set. Algorithm 1 of Dao 2023, arXiv:2307.08691; attn_tile.h computes a block.
 *
 *            dense               packed
 *   q        [B, Hq, Sq, D]      [Tq, Hq, D]
 *   k        [B, Hkv, Sk, D]     [Tk, Hkv, D]
 *   v        [B, Hkv, Sk, Dv]    [Tk, Hkv, Dv]
 *   out      [B, Hq, Sq, Dv]     [Tq, Hq, Dv]
 *   lse      [B, Hq, Sq]         [Tq, Hq]         float32, natural logarithm
 *
 * Work split: a task is a block of bq lanes of one kv head of one sequence. A lane is a pair of a
 * query row and a head of the GQA group. The blocks of the last rows come first, because under a
 * causal mask they see the most keys. Each worker has one scratch buffer.
 * Dropout: V^T multiplies the kept elements of P^T alone. The factor 1 / (1 - p) is applied
 * together with 1 / l.
 * Not served: float64 (ref/), keys in pages (paged_attn.c). */
#include "../../core/paged.h"
#include "attn_tile.h"

/* ---- a block with a mask or a bias ------------------------------------------------------------
 *
 *   s = cap(scale q k) - slope |i + diagonal - j| + bias
 *   p = exp(s - m) if mask and rules show the key, else 0
 *
 * Tiles of keys begin at multiples of ATTN_MASKED_BKV, which divides a mask's block of keys. For
 * each tile a strip of lanes is one of three:
 *   empty    skipped; a tile that is empty for all strips is not packed
 *   full     computed as without a mask
 *   partial  masked by words: four vectors of bits, one bit a key
 * A hidden key gets weight 0, which changes no bit of the lane's sums. So a strip may be skipped or
 * computed for the sake of its other lanes.
 *
 * A value that holds NaN or infinity may be hidden from some lanes and seen by others, and 0 times
 * such a value is NaN. Its key is packed as zeros. The lanes that see the key add it one by one
 * after the product. */
enum {
    ATTN_MASKED_BKV = TILED ? GK_MASK_TILE : 64
};

typedef enum strip_state {
    STRIP_EMPTY,
    STRIP_FULL,
    STRIP_PARTIAL
} strip_state;

/* How the mask's block looks to a strip: empty, full or partial for its lanes together. */
INLINE strip_state strip_state_of(const attn_row *rows, int64_t count, int64_t block) {
    bool any = false, all = true;
    for (int64_t n = 0; n < count; ++n) {
        const int kind = gk_mask_flag(&rows[n].mask, rows[n].i, block) & 3;
        any = any || kind != GK_BLOCK_EMPTY;
        all = all && kind == GK_BLOCK_FULL;
    }
    return !any ? STRIP_EMPTY : all ? STRIP_FULL : STRIP_PARTIAL;
}

/* p of a key and a lane as it was rounded for the product. */
INLINE float strip_p(const cell *p, int64_t key, int64_t lane) {
#if PAIR == 2
    return gk_bf16_to_f32((uint16_t)(p[key / 2 * NR + lane] >> 16 * (key % 2)));
#else
    return p[key * NR + lane];
#endif
}

/* Adds p v of keys that were packed as zeros, to the lanes that see them. */
INLINE void strip_add_keys(float *o, const cell *p, const attn_job *job, const attn_lanes *lanes,
                           int64_t lane, int64_t width, const attn_row *rows, const char *const *v,
                           const int16_t *bad, int count, int64_t j0) {
    for (int b = 0; b < count; ++b)
        for (int64_t n = 0; n < width; ++n) {
            const int64_t j = j0 + bad[b];
            if (j < lanes->lo[lane + n] || j >= lanes->hi[lane + n]) continue;
            if (!attn_row_sees(job->scores, rows + lane + n, j)) continue;
            const float weight = strip_p(p, bad[b], n);
            for (int64_t d = 0; d < job->head_dim_v; ++d)
                o[d * NR + n] += weight * (float)gk_load(v[b], job->dtype, d);
        }
}

/* Lanes `first` .. of kv head h_kv of sequence b, as attn_lanes_fill made them. */
INLINE void attn_block_masked(const attn_job *job, attn_lanes *lanes, const attn_keys *keys,
                              const attn_seq *seq, int64_t b, int64_t h_kv, int64_t first,
                              float scale, float v_scale, char *scratch) {
    static const char zeros[4 * GK_CACHE_HEAD_DIM]; /* a row of any head_dim */
    const attn_scratch x = attn_scratch_at(scratch, job);
    const attn_scores *scores = job->scores;
    const int64_t head_dim = job->head_dim, head_dim_v = job->head_dim_v, last = lanes->count - 1;
    const int64_t whole = gk_round_up(lanes->count, NR);
    const char *k[ATTN_MAX_BKV], *v[ATTN_MAX_BKV], *bad_v[ATTN_MAX_BKV];
    int16_t bad[ATTN_MAX_BKV];
    attn_row rows[ATTN_MAX_BQ];
    bool started[ATTN_MAX_BQ / NR] = {false};
    strip_state state[ATTN_MAX_BQ / NR];
    const bool biased = attn_has_bias(scores);
    const float left = PAIR == 2 ? scale : 1;
    const bool score_step =
        biased || job->rules->softcap > 0 || job->rules->alibi_slopes || !(left > 0);

    for (int64_t n = 0; n < whole; ++n) {
        const int64_t lane = first + gk_min_i64(n, last);
        rows[n] = attn_row_of(scores, b, h_kv * job->group + lane % job->group, lane / job->group);
    }
    attn_pack_q(&x, lanes, job->dtype, head_dim, scale);
    const int64_t end = lanes->hi[last];
    for (int64_t j = lanes->lo[0] / job->bkv * job->bkv; j < end; j += job->bkv) {
        const int64_t n = gk_min_i64(job->bkv, seq->seq_k - j), block = j / GK_MASK_TILE;
        bool any = false;
        for (int64_t lane = 0; lane <= last; lane += NR) {
            const int64_t width = gk_min_i64(NR, last + 1 - lane);
            strip_state s = scores->mask ? strip_state_of(rows + lane, width, block) : STRIP_FULL;
            if (lanes->hi[lane + width - 1] <= j || lanes->lo[lane] >= j + n) s = STRIP_EMPTY;
            state[lane / NR] = s;
            any = any || s != STRIP_EMPTY;
        }
        if (!any) continue;

        attn_keys_at(keys, j, n, k, v);
        attn_pack_k(&x, k, n, job->dtype, head_dim);
        const int num_bad = attn_not_finite(v, n, job->dtype, head_dim_v, bad);
        for (int i = 0; i < num_bad; ++i) {
            bad_v[i] = v[bad[i]];
            v[bad[i]] = zeros;
        }
        attn_pack_v(&x, v, n, job->dtype, head_dim_v);
        for (int64_t lane = 0; lane <= last; lane += NR) {
            const int64_t strip = lane / NR, width = gk_min_i64(NR, last + 1 - lane),
                          strip_last = lane + width - 1;
            if (state[strip] == STRIP_EMPTY) continue;
            const bool edge = lanes->lo[strip_last] > j || lanes->hi[lane] < j + n;
            const bool partial = state[strip] == STRIP_PARTIAL;
            const int nv = width > W ? NV : 1;
            attn_strip_scores own = {.column = j % GK_MASK_TILE, .bias = x.bias};
            for (int w = 0; w < nv; ++w) {
                const attn_row *row[W];
                vi word[4] = {vi_set1(-1), vi_set1(-1), vi_set1(-1), vi_set1(-1)};
                for (int i = 0; i < W; ++i) row[i] = rows + lane + w * W + i;
                if (partial) attn_words(row, block, word);
                for (int q = 0; q < 4; ++q) own.word[q][w] = word[q];
                if (biased) attn_bias_tile(scores, row, j, n, x.bias + w * W, NR);
            }
            vf shrink[NV];
            bool moved;
            tile_product(job->sum_cells, true, n, width, cells_of(head_dim), x.k, x.k_step,
                         x.q + strip * x.q_strip, NR, x.s, NR, false);
            if (nv == 1 && biased)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, 1, true, true, &own,
                                     true, true);
            else if (nv == 1)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, 1, true, true, &own,
                                     true, false);
            else if (biased)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, NV, true, true,
                                     &own, true, true);
            else if (score_step)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, NV, true, true,
                                     &own, true, false);
            else if (edge || partial)
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, NV, false, true,
                                     &own, true, false);
            else
                moved = attn_softmax(x.s, n, j, lanes, lane, job, left, shrink, NV, false, false,
                                     &own, false, false);
            if (keys->dropout) attn_drop((cell *)x.s, n, j, lanes, lane, nv, keys->dropout);
            attn_add_values(&x, job, strip, n, width, nv, moved, shrink, &started[strip]);
            if (num_bad)
                strip_add_keys(x.o + strip * x.o_strip, (const cell *)x.s, job, lanes, lane, width,
                               rows, bad_v, bad, num_bad, j);
        }
    }
    attn_end_block(&x, lanes, job, started, v_scale);
}

/* ---- a call ---------------------------------------------------------------------------------- */
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
    const float scale = s->scale, factor = (float)job->dropout.factor;
    if (job->attn.scores)
        attn_block_masked(&job->attn, &lanes, &keys, &x, b, h_kv, first, scale, factor, scratch);
    else
        attn_block(&job->attn, &lanes, &keys, scale, factor, scratch);
}

/* ---- the instance of tables.c ---------------------------------------------------------------- */
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
