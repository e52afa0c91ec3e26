/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_attn: attention of new tokens over a paged cache, pages read in place, compiled once per
 * ISA.
 * Kwon et al. 2023, arXiv:2309.06180; the split of the context is Dao et al. 2023 (Flash-Decoding).
 * q [T, Hq, D]  k_cache [num_blocks, block_size, Hkv, D]  v_cache [.., Dv]  block_table [B, max_blocks]  seq_lens [B]
 * out [T, Hq, Dv]  lse [T, Hq] float32, natural log. Query t of n_b stands at position seq_lens[b] - n_b + t.
 *
 * Two bodies. A sequence with many lanes (query token x head of the group) goes through
 * attn_tile.h, block by block. One with few is bound by the reading of its keys, so each key is
 * read once for all lanes of its head:
 *
 *   a task   one chunk of the context of one sequence, some kv heads; partial O, m, l per chunk and lane
 *   a unit   `unit` keys of all those heads: s = q K^T (lanes along d, sums across) | p = exp(s - m) | O += p V (lanes
 *            along dv); 4, 2 or 1 lanes at once, W / lanes keys of all of them in one vector of s
 *            and p
 *   order    few keys outside, heads inside: lines are asked for nearly in the order of their addresses, which is what
 *            the machine's own prefetcher follows; head by head it runs after rows that come much
 *            later
 *   time     a unit computes while it prefetches, line by line, the rows of the next one, K in QK, V in PV, and
 *            touches those of a later unit: pages lie anywhere, and a miss of the TLB takes a walk
 *            through memory; the first unit is read ahead of its products
 *
 * On tiles (AMX) runs are 16 lanes, and a unit goes head by head: paged_tiles.h.
 * The partials are merged chunk by chunk in order, so results depend on the chunk size of blocks.h
 * alone.
 *
 *   workspace   plan [2][B + 1] int64 | partials [chunks][Hkv][lanes][Dv up to W, m, l] float | scratch of each worker
 * Pages of 8-bit codes are decoded unit by unit, or tile by tile, into rows of q's dtype
 * (paged_codes.h).
 * Not here: float64 (ref/). */
#include "paged_job.h"

#if !TILED
#include "paged_products.h"
#endif

/* Columns that lie in O in the order of vf_load2_split. */
INLINE int64_t split_columns(int64_t head_dim_v) {
    return head_dim_v / (VECTORS * W) * (VECTORS * W);
}

INLINE int lane_run(int64_t left) { return TILED ? W : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

/* ---- few lanes: softmax of a unit ------------------------------------------------------------ */
typedef struct paged_lane {
    int64_t lo, hi, position; /* keys seen, i + diagonal */
    int64_t i, g;             /* query token, head of the group */
    float slope;              /* ATTN_UNIT */
} paged_lane;

/* What sums made with maximum m weigh beside a larger one. */
INLINE float paged_weight(float m, float larger) { return exp2f((m - larger) * ATTN_UNIT_LOG2); }

/* A maximum of a run has grown by more than what p may lag behind: O and l of its lane shrink. top
 * is [lane][keys]. */
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

/* s of a run of lanes becomes p, as cells. Behind O of the run's first lane: m, the same for all
 * keys of a lane, and l, a sum for each of W / lanes keys. Keys are j0 .. j0 + n. */
INLINE void softmax(const int lanes, const paged_job *job, const paged_lane *lane, float scale,
                    int64_t j0, int64_t n, float *s, cell *p, float *o) {
    const int keys = W / lanes;
    const float softcap = (float)job->args->rules.softcap;
    float slopes[W], positions[W], t[W];
    int32_t first[W], end[W], offset[W];
    bool edge = n % keys != 0, sloped = false;
#pragma GCC unroll 4
    for (int l = 0; l < lanes; ++l) {
        edge |= lane[l].lo > j0 || lane[l].hi < j0 + n;
        sloped |= lane[l].slope != 0;
    }
    if (edge || sloped)
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
        if (edge || sloped) {
            const vi key = vi_load(offset) + (int32_t)j;
            const vf distance = vf_load(positions) - __builtin_convertvector(key, vf);
            if (sloped) x = x - vf_load(slopes) * vf_max(-distance, distance);
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
    vf sum = vf_set1(0); /* of the unit, then added: few roundings where a chunk is long */
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

/* After the last unit: O of a run of lanes, and behind each the lane's own m and l, become
 * partials. */
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

#if TILED
#include "paged_tiles.h"
#else
#include "paged_instances.h"
#endif

/* ---- few lanes: a chunk ---------------------------------------------------------------------- */
INLINE float *partial_at(const paged_job *job, int64_t chunk, int64_t h_kv, int64_t lane) {
    return job->partials + ((chunk * job->heads_kv + h_kv) * job->lanes + lane) * job->partial;
}

static void chunk_units(const paged_job *job, int64_t b, const attn_seq *x, int64_t first,
                        int64_t end, int64_t head0, int64_t head1, const lanes_scratch *own,
                        gk_dtype dtype) {
    const gk_paged_attn_args *a = job->args;
    const int64_t group = job->tile.group, num_lanes = x->seq_q * group, unit = job->blocks->unit;
    const int64_t head_dim = job->tile.head_dim, head_dim_v = job->tile.head_dim_v,
                  num_heads = head1 - head0;
    const int64_t element = (int64_t)gk_dtype_bytes(a->k_cache.dtype),
                  row = dtype == GK_F32 ? 4 : 2;
    /* in memory; rows are of q's dtype */
    const int64_t k_bytes = element * head_dim, v_bytes = element * head_dim_v;
    const int64_t k_head = element * a->k_cache.stride[2], v_head = element * a->v_cache.stride[2];
    const attn_keys keys = keys_of(job, b, head0);
    const char *k[UNITS][MAX_UNIT], *v[UNITS][MAX_UNIT], *k_decoded[MAX_UNIT], *v_decoded[MAX_UNIT];
    paged_lane lanes[MAX_LANES];
    if (TILED) memset(lanes, 0, sizeof lanes); /* what follows the last one sees no key */
    for (int64_t n = 0; n < num_lanes; ++n) {
        const int64_t i = n / group;
        lanes[n] = (paged_lane){gk_span_lo(&x->span, i),
                                gk_span_hi(&x->span, i),
                                i + x->span.diagonal,
                                i,
                                n % group,
                                0};
    }

    for (int64_t j = first; j < gk_min_i64(end, first + (UNITS - 1) * unit); j += unit)
        attn_keys_at(&keys, j, gk_min_i64(unit, end - j), k[(j - first) / unit],
                     v[(j - first) / unit]);
    read_rows((key_rows){k[0], gk_min_i64(unit, end - first), num_heads, k_head}, k_bytes);
    read_rows((key_rows){v[0], gk_min_i64(unit, end - first), num_heads, v_head}, v_bytes);
    for (int64_t j = first; j < end; j += unit) {
        const int64_t now = (j - first) / unit % UNITS, next_unit = (now + 1) % UNITS,
                      last = (now + UNITS - 1) % UNITS;
        const int64_t j_last = gk_min_i64(end, j + (UNITS - 1) * unit);
        const int64_t n = gk_min_i64(unit, end - j), n_next = gk_clamp_i64(end - j - unit, 0, unit);
        const int64_t n_last = gk_min_i64(unit, end - j_last);
        attn_keys_at(&keys, j_last, n_last, k[last], v[last]);
        const char **k_now = k[now], **v_now = v[now];
        int64_t k_step = k_head, v_step = v_head;
        if (keys.decode) {
            memcpy(k_decoded, k_now, sizeof k_decoded);
            memcpy(v_decoded, v_now, sizeof v_decoded);
            k_now = k_decoded;
            v_now = v_decoded;
            k_step = row * head_dim;
            v_step = row * head_dim_v;
            paged_decode_heads(&keys, j, n, num_heads, k_head, v_head, k_now, v_now, own->decoded);
        }
        /* dots takes whole vectors of keys */
        for (int64_t i = n; i < gk_round_up(n, W); ++i) k_now[i] = k_now[n - 1];
        fetch none = fetch_none(k[now][0]), k_next = none, v_next = none;
        if (n_next) {
            const key_rows k_rows = {k[next_unit], n_next, num_heads, k_head};
            const key_rows v_rows = {v[next_unit], n_next, num_heads, v_head};
            k_next = fetch_make(k_rows, k_bytes, k[last], n_last, job->near);
            v_next = fetch_make(v_rows, v_bytes, v[last], n_last, job->near);
        }
#if TILED
        for (int64_t h = 0; h < num_heads; ++h) {
            for (int64_t l = 0; l < num_lanes; ++l)
                lanes[l].slope =
                    attn_slope(&a->rules, b, (head0 + h) * group + lanes[l].g) * ATTN_UNIT;
            unit_on_tiles(job, own, lanes, num_lanes, h, scale_of(job, head0 + h), j, n, k_now,
                          h * k_step, v_now, h * v_step, &k_next, &v_next);
        }
#else
        /* runs of lanes; the first one fetches */
        const products *of = dtype == GK_F32   ? f32_products
                             : dtype == GK_F16 ? f16_products
                                               : bf16_products;
        for (int64_t i = 0; i < n; i += STEP)
            for (int64_t l = 0, run = lane_run(num_lanes); l < num_lanes;
                 l += run, run = lane_run(num_lanes - l)) {
                const key_rows rows = {k_now + i, gk_min_i64(STEP, n - i), num_heads, k_step};
                of[run / 2].dots(head_dim, own->q + l * job->q_step, own->q_head, &rows,
                                 l ? &none : &k_next, own->s + l * unit + i * run, own->s_head);
            }
        for (int64_t h = 0; h < num_heads; ++h) {
            if (a->rules.alibi_slopes)
                for (int64_t l = 0; l < num_lanes; ++l)
                    lanes[l].slope =
                        attn_slope(&a->rules, b, (head0 + h) * group + lanes[l].g) * ATTN_UNIT;
            for (int64_t l = 0, run = lane_run(num_lanes); l < num_lanes;
                 l += run, run = lane_run(num_lanes - l))
                of[run / 2].softmax(job, lanes + l, scale_of(job, head0 + h), j, n,
                                    own->s + h * own->s_head + l * unit,
                                    own->p + h * own->s_head + l * unit,
                                    own->o + h * own->o_head + l * job->partial);
        }
        for (int64_t i = 0; i < n; i += STEP)
            for (int64_t l = 0, run = lane_run(num_lanes); l < num_lanes;
                 l += run, run = lane_run(num_lanes - l)) {
                const key_rows rows = {v_now + i, gk_min_i64(STEP, n - i), num_heads, v_step};
                of[run / 2].weighted_rows(head_dim_v, own->p + l * unit + i * run / PAIR,
                                          own->s_head, &rows, l ? &none : &v_next,
                                          own->o + l * job->partial, own->o_head, job->partial);
            }
#endif
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

static void chunk_task(const paged_job *job, int64_t task, int64_t worker) {
    const gk_paged_attn_args *a = job->args;
    const int64_t parts = gk_ceil_div(job->heads_kv, job->heads), slot = task / parts;
    const int64_t b = owner(job->first_chunk, job->batch, slot);
    const int64_t head0 = task % parts * job->heads,
                  head1 = gk_min_i64(head0 + job->heads, job->heads_kv);
    const int64_t group = job->tile.group, head_dim = job->tile.head_dim;
    const attn_seq x = seq_of(job, b);
    const int64_t first = gk_span_lo(&x.span, 0) + (slot - job->first_chunk[b]) * job->chunk;
    const int64_t end = gk_min_i64(first + job->chunk, gk_span_hi(&x.span, x.seq_q - 1));
    const int64_t element_bytes = (int64_t)gk_dtype_bytes(a->q.dtype), num_lanes = x.seq_q * group;

    const lanes_scratch own = lanes_scratch_at(job->scratch + worker * job->scratch_bytes, job);
    for (int64_t h = head0; h < head1; ++h)
        for (int64_t n = 0, run = 0, lanes = 0; n < lanes_with_room(num_lanes); ++n) {
            if (n == run + lanes) {
                run = n;
                lanes = lane_run(num_lanes - n);
            }
            const int64_t lane = gk_min_i64(n, num_lanes - 1);
            const char *row = x.q + element_bytes * (lane / group * x.q_row +
                                                     (h * group + lane % group) * x.q_head);
            cell *q = own.q + (h - head0) * own.q_head + run * job->q_step;
            pack_q(q + (n - run) * (TILED ? 1 : W), (int)lanes, row, a->q.dtype, head_dim);
            float *o_n = own.o + (h - head0) * own.o_head + n * job->partial;
            memset(o_n, 0, 4 * (size_t)job->partial);
            vf_store(o_n + job->o_step, vf_set1(-FLT_MAX));
        }
    chunk_units(job, b, &x, first, end, head0, head1, &own, a->q.dtype);
    for (int64_t h = head0; h < head1; ++h)
        for (int64_t n = 0, run = lane_run(num_lanes); n < num_lanes;
             n += run, run = lane_run(num_lanes - n))
            close_run(job, (int)run, gk_min_i64(run, num_lanes - n),
                      own.o + (h - head0) * own.o_head + n * job->partial,
                      partial_at(job, slot, h, n));
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
    const int64_t b = task / job->heads_kv, h_kv = task % job->heads_kv, group = job->tile.group;
    const int64_t head_dim_v = job->tile.head_dim_v, split = split_columns(head_dim_v);
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
            if (VC_SPLITS) vf_unsplit(o, job->tile.dtype);
            for (int w = 0; w < 2; ++w)
                vf_store_dtype(out->data, out->dtype, at + d + w * W, o[w], W);
        }
        for (; d < head_dim_v; d += W)
            vf_store_dtype(out->data, out->dtype, at + d, merged(job, b, h_kv, n, d, m, l, factor),
                           head_dim_v - d);
        if (job->tile.lse) job->tile.lse[x.lse_first + i * x.lse_row + h] = attn_lse(m, l, sink);
    }
}

/* ---- many lanes ------------------------------------------------------------------------------ */
static void block_task(const paged_job *job, int64_t task, int64_t worker) {
    const int64_t b = owner(job->first_block, job->batch, task),
                  h_kv = (task - job->first_block[b]) % job->heads_kv;
    const attn_seq x = seq_of(job, b);
    const int64_t lanes_in_all = x.seq_q * job->tile.group,
                  blocks = gk_ceil_div(lanes_in_all, job->tile.bq);
    const int64_t first =
        (blocks - 1 - (task - job->first_block[b]) / job->heads_kv) * job->tile.bq;
    attn_lanes lanes;
    attn_lanes_fill(&lanes, &job->tile, &x, b, h_kv, first,
                    gk_min_i64(job->tile.bq, lanes_in_all - first));
    const attn_keys keys = keys_of(job, b, h_kv);
    attn_block(&job->tile, &lanes, &keys, scale_of(job, h_kv), head_scale(job->args->v_scale, h_kv),
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
    const int64_t lanes = job->max_tokens * job->tile.group;
    return job->batch * job->heads_kv * gk_ceil_div(lanes, job->tile.bq) +
           job->max_chunks * gk_ceil_div(job->heads_kv, job->heads);
}

static bool plan(const gk_context *ctx, const void *args, gk_plan *to) {
    paged_job *job = GK_OWN(paged_job, to);
    *job = job_make(ctx, args);
    /* tiles are for more lanes than these, whose keys avx512 reads as fast */
    if (TILED && job->max_tokens * job->tile.group <= 4) return false;
    to->tile[0] = job->tile.bq;
    to->tile[2] = job->max_chunks ? job->chunk : 0;
    to->tile[1] =
        job->max_tokens * job->tile.group <= job->lanes ? job->blocks->unit : job->tile.bkv;
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
    job.tile.rules = &a->rules;
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
    if (job.lanes >= job.tile.group) gk_parallel(ctx, job.batch * job.heads_kv, merge_task, &job);
}

const gk_cpu_kernel SYM(gk_paged_attn) = {plan, run};
