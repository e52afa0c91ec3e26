/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fp8: attention of e4m3 codes, dense and packed, with every option of gk_attn_rules.
 * Compiled once for each instruction set.
 *
 *   q [B, Hq, Sq, D]   k [B, Hkv, Sk, D]   v [B, Hkv, Sk, Dv]   e4m3
 *   out [B, Hq, Sq, Dv] bfloat16, float16 or float32   lse [B, Hq, Sq] float32
 *   packed calls: as in flash_attn_fwd.c
 *
 * Codes are converted to float32 and multiplied by their scales: q q_scale, k k_scale,
 * v v_scale + v_mean. Then the block of flash_attn_fwd.c runs in float32. A code is exact in
 * float32, so only the product with its scale rounds. Scales of 2^100 and more are balanced by
 * powers of two, so that the product does not overflow unless the scales of both q and k are that
 * large. v_mean is added to the rows of v. So a row of out has v_mean times the sum of its
 * probabilities, and a row that sees no key is 0.
 *
 * Work split: as in flash_attn_fwd.c. The scratch of a worker also holds the block's rows of q in
 * float32. */
#include "../../formats/attn_scales.h"
#include "attn_tile.h"
#include "codes_vec.h"

typedef struct fp8_job {
    const gk_flash_attn_fp8_args *args;
    attn_shape shape;
    attn_job attn;
    gk_attn_scale q_scale, k_scale, v_scale;
    gk_attn_mean mean;
    int64_t blocks, tasks, q_at, scratch_bytes;
    char *workspace;
} fp8_job;
GK_PLAN_HOLDS(fp8_job);

/* ---- codes to rows of float32 ---------------------------------------------------------------- */
/* How a tile of keys of one sequence and kv head is decoded. */
typedef struct fp8_keys {
    int64_t head_dim, head_dim_v, k_block, v_block;
    const float *k_scale, *v_scale; /* of block 0; NULL = 1 */
    const float *mean;              /* of column 0; NULL = 0 */
    int64_t mean_column;
    float k_power, v_power; /* powers of two by which k's scales, and v's scales and mean, shrink */
} fp8_keys;

INLINE const float *scale_at(const gk_attn_scale *s, int64_t b, int64_t h) {
    return s->data ? s->data + b * s->batch + h * s->head : NULL;
}

INLINE float scale_of(const float *scale, int64_t block, int64_t token) {
    return scale ? scale[token / GK_ATTN_SCALE_TOKENS * block] : 1;
}

/* The exponent of the largest of the scales of heads [first, first + heads), 0 if it is below 2^100
 * or not finite. A code times a scale below 2^100 is a float32. */
static int large_exponent(const gk_attn_scale *s, int64_t b, int64_t first, int64_t heads,
                          int64_t tokens) {
    const int64_t blocks = s->block == 0 ? 1 : gk_ceil_div(tokens, GK_ATTN_SCALE_TOKENS);
    float largest = 0;
    for (int64_t h = first; s->data && h < first + heads; ++h)
        for (int64_t i = 0; i < blocks; ++i)
            largest = fmaxf(largest, fabsf(scale_at(s, b, h)[i * s->block]));
    return largest < 0x1p100f || isinf(largest) ? 0 : ilogbf(largest);
}

static void decode_row(const char *from, float *to, int64_t n, float scale) {
    for (int64_t d = 0; d < n; d += W)
        vf_store_dtype(to, GK_F32, d, vf_load_code(from, GK_E4M3, d, n - d) * scale, n - d);
}

static void decode_tile(const attn_keys *keys, int64_t j, int64_t n, const char **k, const char **v,
                        char *to) {
    const fp8_keys *x = keys->codes;
    float *at = (float *)(void *)to;
    for (int64_t i = 0; i < n; ++i, at += x->head_dim) {
        decode_row(k[i], at, x->head_dim, scale_of(x->k_scale, x->k_block, j + i) / x->k_power);
        k[i] = (const char *)at;
    }
    for (int64_t i = 0; i < n; ++i, at += x->head_dim_v) {
        decode_row(v[i], at, x->head_dim_v, scale_of(x->v_scale, x->v_block, j + i) / x->v_power);
        v[i] = (const char *)at;
        if (x->mean)
            for (int64_t d = 0; d < x->head_dim_v; ++d)
                at[d] += x->mean[d * x->mean_column] / x->v_power;
    }
}

/* ---- a block --------------------------------------------------------------------------------- */
static fp8_job job_make(const gk_flash_attn_fp8_args *a) {
    fp8_job job = {.args = a, .shape = attn_shape_of(&a->fwd)};
    const attn_shape *s = &job.shape;
    const gk_attn_blocks *row = gk_attn_fwd_blocks;
    while (row->max_head_dim < gk_max_i64(s->head_dim, s->head_dim_v)) ++row;
    const int64_t lanes = s->max_seq_q * s->group;
    int64_t bq = gk_min_i64(row->bq, gk_round_up(lanes, NR));
    while (bq >= 2 * NR && s->batch * s->heads_kv * gk_ceil_div(lanes, bq) < row->min_tasks)
        bq = gk_round_up(bq / 2, NR);
    job.attn = (attn_job){.rules = &a->fwd.rules,
                          .dtype = GK_F32,
                          .out_dtype = a->fwd.out.dtype,
                          .head_dim = s->head_dim,
                          .head_dim_v = s->head_dim_v,
                          .group = s->group,
                          .bq = gk_max_i64(bq, NR),
                          .bkv = row->bkv,
                          .sum_cells = s->sum_cells,
                          .out = a->fwd.out.data,
                          .lse = a->fwd.lse.data,
                          .decoded_bytes = 4 * (s->head_dim + s->head_dim_v)};
    job.q_scale = gk_attn_scale_of(a->q_scale);
    job.k_scale = gk_attn_scale_of(a->k_scale);
    job.v_scale = gk_attn_scale_of(a->v_scale);
    job.mean = gk_attn_mean_of(a->v_mean);
    job.blocks = gk_ceil_div(lanes, job.attn.bq);
    job.tasks = s->batch * s->heads_kv * job.blocks;
    job.q_at = attn_scratch_at(NULL, &job.attn).bytes;
    job.scratch_bytes = job.q_at + gk_round_up(4 * job.attn.bq * s->head_dim, 64);
    return job;
}

/* The rows of q that the lanes read, one behind the other; heads are side by side in a row's
 * lanes. */
static void decode_q(const fp8_job *job, const attn_seq *x, attn_lanes *lanes, int64_t b,
                     int64_t h_kv, int64_t first, float power, float *to) {
    const attn_shape *s = &job->shape;
    for (int64_t n = 0; n < gk_round_up(lanes->count, NR); ++n) {
        if (n >= lanes->count) {
            lanes->q[n] = lanes->q[lanes->count - 1];
            continue;
        }
        const int64_t i = (first + n) / s->group, h = h_kv * s->group + (first + n) % s->group;
        decode_row(x->q + i * x->q_row + h * x->q_head, to, s->head_dim,
                   scale_of(scale_at(&job->q_scale, b, h), job->q_scale.block, i) / power);
        lanes->q[n] = (const char *)to;
        to += s->head_dim;
    }
}

static void block_task(void *arg, int64_t task, int64_t worker) {
    const fp8_job *job = arg;
    const attn_shape *s = &job->shape;
    const int64_t heads = s->batch * s->heads_kv;
    const int64_t block = job->blocks - 1 - task / heads, b = task % heads / s->heads_kv,
                  h_kv = task % s->heads_kv;
    const attn_seq x = attn_seq_of(&job->args->fwd, s, b);
    const int64_t first = block * job->attn.bq, lanes_in_all = x.seq_q * s->group;
    if (first >= lanes_in_all) return; /* a sequence shorter than the longest */

    char *scratch = job->workspace + worker * job->scratch_bytes;
    attn_lanes lanes;
    attn_lanes_fill(&lanes, &job->attn, &x, b, h_kv, first,
                    gk_min_i64(job->attn.bq, lanes_in_all - first));
    /* Scales that would carry a code past float32 are divided by a power of two, which k takes over
     * from q, q from k, and the block's result from v. */
    const int q_large = large_exponent(&job->q_scale, b, h_kv * s->group, s->group, x.seq_q),
              k_large = large_exponent(&job->k_scale, b, h_kv, 1, x.seq_k),
              v_large = large_exponent(&job->v_scale, b, h_kv, 1, x.seq_k);
    const float q_power = ldexpf(1, (q_large - k_large) / 2), v_power = ldexpf(1, v_large / 2);
    decode_q(job, &x, &lanes, b, h_kv, first, q_power, (float *)(void *)(scratch + job->q_at));
    const fp8_keys codes = {.head_dim = s->head_dim,
                            .head_dim_v = s->head_dim_v,
                            .k_block = job->k_scale.block,
                            .v_block = job->v_scale.block,
                            .k_scale = scale_at(&job->k_scale, b, h_kv),
                            .v_scale = scale_at(&job->v_scale, b, h_kv),
                            .mean = job->mean.data ? job->mean.data + b * job->mean.batch +
                                                         h_kv * job->mean.head
                                                   : NULL,
                            .mean_column = job->mean.column,
                            .k_power = 1 / q_power,
                            .v_power = v_power};
    const attn_keys keys = {.k = gk_at(x.k, h_kv * x.k_head),
                            .v = gk_at(x.v, h_kv * x.v_head),
                            .k_row_bytes = x.k_row,
                            .v_row_bytes = x.v_row,
                            .decode = decode_tile,
                            .codes = &codes};
    attn_block(&job->attn, &lanes, &keys, s->scale, v_power, scratch);
}

/* ---- the instance of tables.c ---------------------------------------------------------------- */
static bool plan(const gk_context *ctx, const void *args, gk_plan *to) {
    fp8_job *job = GK_OWN(fp8_job, to);
    *job = job_make(args);
    to->tile[0] = job->attn.bq;
    to->tile[1] = job->attn.bkv;
    to->tasks = job->tasks;
    to->workspace_bytes = (size_t)(gk_num_workers(ctx, job->tasks) * job->scratch_bytes);
    return true;
}

static void run(const gk_context *ctx, const void *args, const gk_plan *planned, void *workspace) {
    fp8_job job = *GK_OWN_CONST(fp8_job, planned);
    job.args = args;
    job.attn.rules = &job.args->fwd.rules;
    job.workspace = workspace;
    if (job.shape.packed)
        attn_clear_tokens(&job.args->fwd.out, job.attn.lse,
                          gk_i32_at(job.args->fwd.cu_seqlens_q, job.shape.batch));
    gk_parallel(ctx, job.tasks, block_task, &job);
}

const gk_cpu_kernel SYM(gk_flash_attn_fp8) = {plan, run};
