/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_gemm: activations times packed weights of 4 or 8 bits, by quant_product.h. Compiled
 * once per ISA.
 *
 *  a [M, K] bfloat16, float16 or e4m3
 *  packed [ceil(N / 64), ceil(K / 64), bytes] (weight_tile.h)   scale [ceil(K / g), N]
 *
 * A task decodes its columns of the weight block by block. The 64 codes of two rows of a tile
 * are 16 words; shifts and masks of these words give the codes of one row in order. (code -
 * zero) * scale * global_scale is rounded to a's dtype. With an e4m3 a the codes are multiplied
 * without their scale, and each group's float32 sum is multiplied by it.
 *
 * With offs each group of rows has a weight of its own. The ends are read when the call runs. A row
 * then has the bits of a call of its group alone.
 *
 * Workspace of a call with offs: a weight_group for each group with rows, the reordered rows of
 * small groups, and a worker's memory for each worker. */
#include "../../formats/weight_tile.h"
#include "quant_product.h"
#include "weight_skinny.h"

typedef struct weight {
    const gk_weight_gemm_args *g;
    gk_weight_format format;
    int64_t n, k, tile_row, tile_col; /* strides of packed, bytes */
    int group_log2;
    int64_t scale_k, scale_n, zero_k, zero_n;
    float global_scale;
    bool unscaled; /* codes are multiplied without their scale */
} weight;

/* The workspace of a call with offs, in bytes. */
typedef struct groups_memory {
    int64_t groups, a, worker; /* a: reordered rows, 0 if there are no small groups */
} groups_memory;

typedef struct weight_plan {
    quant_product p;
    weight w;
    groups_memory need;
} weight_plan;
GK_PLAN_HOLDS(weight_plan);

/* ---- 1. codes of a tile ---------------------------------------------------------------------- */
typedef uint16_t vh_mem __attribute__((vector_size(2 * W), aligned(2), may_alias));

/* The 64 codes along k, in order, of rows r and r + 8 of a tile; r % 16 < 8. */
static void codes_of(const uint8_t *tile, bool is_4_bit, int r, uint16_t to[2][GK_TILE]) {
    const int thread = 32 * (r >> 4) + 4 * (r & 7);
    uint32_t v[16], t[16];
    for (int part = 0; part < (is_4_bit ? 1 : 2); ++part) {
        memcpy(v, tile + (is_4_bit ? 16 * thread : 16 * (128 * part + thread)), sizeof v);
        for (int i = 0; i < 16; ++i) t[i] = v[i % 4 * 4 + i / 4]; /* [step][thread of 4] */
        for (int h = 0; h < 2; ++h) {
            if (is_4_bit) {
                for (int j = 0; j < 2; ++j) {
                    uint32_t pair[16];
                    for (int i = 0; i < 16; ++i) pair[i] = t[i] >> 4 * (h + 2 * j) & 0x000f000f;
                    for (int s = 0; s < 4; ++s) memcpy(to[h] + 16 * s + 8 * j, pair + 4 * s, 16);
                }
            } else {
                for (int i = 0; i < 16; ++i) {
                    const uint32_t pair = t[i] >> 16 * h;
                    to[h][32 * part + 2 * i] = pair & 0xff;
                    to[h][32 * part + 2 * i + 1] = pair >> 8 & 0xff;
                }
            }
        }
    }
}

/* The values of W codes, minus `zero`. */
INLINE vf values_of(const uint16_t *codes, gk_weight_format format, float zero) {
    return vf_from_weight_codes(__builtin_convertvector(*(const vh_mem *)codes, vi), format, zero);
}

static float scale_of_group(const weight *w, int64_t n, int64_t group) {
    const gk_tensor *s = &w->g->scale;
    return (float)gk_load(s->data, s->dtype, group * w->scale_k + n * w->scale_n);
}

static float zero_of_group(const weight *w, int64_t n, int64_t group) {
    if (w->format != GK_UINT4) return 0;
    return w->g->zero
               ? (float)((const uint8_t *)w->g->zero->data)[group * w->zero_k + n * w->zero_n]
               : 8;
}

/* Stores W values rounded to dtype, bfloat16 or float16. With an e4m3 a they are exact. */
INLINE void store_values(elem *to, vf v, gk_dtype dtype) {
#if PAIR == 2
    (void)dtype;
    vf_store_bf16_first(to, v, W);
#else
    uint16_t t[W];
    if (dtype == GK_BF16) {
        vf_store_bf16_first(t, v, W);
        v = vf_load_bf16(t);
    }
    if (dtype == GK_F16) {
        vf_store_f16_first(t, v, W);
        v = vf_load_f16(t);
    }
    vf_store(to, v);
#endif
}

/* Decodes the weights of row n at [k0, k0 + kn), which lie in one tile, from their codes. */
INLINE void decode_row(const weight *w, gk_weight_format format, gk_dtype dtype, elem *to,
                       const uint16_t *codes, int64_t n, int64_t k0, int64_t kn) {
    for (int64_t i = 0; i < kn;) {
        const int64_t group = (k0 + i) >> w->group_log2;
        const int64_t end =
            w->group_log2 > 60 ? kn : gk_min_i64(kn, ((group + 1) << w->group_log2) - k0);
        const float zero = zero_of_group(w, n, group),
                    scale = w->unscaled ? 1 : scale_of_group(w, n, group);
        for (; i < end; i += W) { /* groups and the ends of tiles are multiples of 16 */
            vf v = values_of(codes + i, format, zero);
            if (!w->unscaled) v = v * scale * w->global_scale;
            store_values(to + i, v, dtype);
        }
    }
}

static void read_weight(const quant_product *p, elem *to, int64_t ld, int64_t col, int64_t cols,
                        int64_t k0, int64_t kn) {
    const weight *w = p->b;
    const bool is_4_bit = gk_is_4_bit(w->format);
    const uint8_t *packed = w->g->packed.const_data;
    uint16_t codes[2][GK_TILE];
    for (int64_t k = k0; k < k0 + kn;) {
        const int64_t inside = k % GK_TILE, here = gk_min_i64(GK_TILE - inside, k0 + kn - k);
        for (int64_t n = col / 16 * 16; n < col + cols; ++n) {
            if (n % 16 >= 8) continue;
            codes_of(packed + n / GK_TILE * w->tile_row + k / GK_TILE * w->tile_col, is_4_bit,
                     (int)(n % GK_TILE), codes);
            for (int h = 0; h < 2; ++h) {
                const int64_t row = n + 8 * h;
                if (row < col || row >= col + cols) continue;
                elem *at = to + (row - col) * ld + (k - k0);
                switch (w->format) { /* constant formats give one copy of the loop per format */
#define DECODE(f) \
    case f: decode_row(w, f, p->a_dtype, at, codes[h] + inside, row, k, here); break;
                    DECODE(GK_INT4)
                    DECODE(GK_UINT4)
                    DECODE(GK_INT8)
                    DECODE(GK_W_E4M3)
                    DECODE(GK_MXFP4)
                    DECODE(GK_NVFP4)
#undef DECODE
                }
            }
        }
        k += here;
    }
}

/* ---- 2. the op ------------------------------------------------------------------------------- */
typedef struct weight_job {
    const quant_product *p;
    char *workspace;
} weight_job;

static void weight_task(void *arg, int64_t t, int64_t worker) {
    const weight_job *jb = arg;
    quant_task(jb->p, t, jb->workspace + (size_t)worker * jb->p->worker_bytes);
}

/* Everything but the pointers. m: rows of a. */
static void plan_product(const gk_weight_gemm_args *g, int64_t m, weight_plan *x) {
    quant_product *p = &x->p;
    weight *w = &x->w;
    const int nd = g->a.ndim;
    memset(x, 0, sizeof *x);
    p->k = g->a.shape[nd - 1];
    p->n = g->n;
    p->m = m;
    p->a_dtype = g->a.dtype;
    p->a_m = g->a.stride[nd - 2];
    p->a_k = g->a.stride[nd - 1];
    p->read_b = read_weight;
    w->format = g->format;
    w->n = g->n;
    w->k = p->k;
    w->tile_row = g->packed.stride[0];
    w->tile_col = g->packed.stride[1];
    w->group_log2 = gk_group_log2(p->k, g->scale.shape[0]);
    w->scale_k = g->scale.stride[0];
    w->scale_n = g->scale.stride[1];
    if (g->zero) {
        w->zero_k = g->zero->stride[0];
        w->zero_n = g->zero->stride[1];
    }
    w->unscaled = g->a.dtype == GK_E4M3;
    if (w->unscaled) {
        if (g->scale_a) p->scale_a = gk_scales_of(g->scale_a, p->m, p->k, false);
        p->scale_b =
            (gk_scales){g->scale.data, g->scale.dtype, w->group_log2, 0, w->scale_k, w->scale_n};
    }
    quant_results(p, g->activation, &g->out, g->bias);
    p->e.out_row = g->n;
}

static float global_scale_of(const gk_weight_gemm_args *g) {
    return g->global_scale ? *(const float *)g->global_scale->const_data : 1;
}

/* Fills the pointers of a planned product. x stays where it is until the product is done. */
static void set_pointers(weight_plan *x, const gk_weight_gemm_args *g) {
    x->w.g = g;
    x->w.global_scale = global_scale_of(g);
    x->p.a = g->a.data;
    x->p.b = &x->w;
    if (x->w.unscaled) {
        x->p.scale_a.data = g->scale_a ? g->scale_a->data : NULL;
        x->p.scale_b.data = g->scale.data;
        x->p.e.alpha = x->w.global_scale;
    }
    x->p.e.out = g->out.data;
    x->p.e.bias = g->bias ? g->bias->data : NULL;
}

/* ---- 3. groups -------------------------------------------------------------------------------- */
/* A group that has rows. Small groups are multiplied as in weight_skinny.c, all others as a call of
 * one group. The tasks of all groups are numbered one after the other and shared by all workers. */
typedef struct weight_group {
    gk_weight_gemm_args g; /* of this group alone, without offs */
    gk_tensor zero, bias;
    int64_t first_task;
    bool is_small;
    skinny_job small;
    weight_plan large;
} weight_group;

typedef struct groups_job {
    const weight_group *groups;
    int64_t num_groups, worker_bytes;
    char *workers;
} groups_job;

static groups_memory memory_of(const gk_weight_gemm_args *g, const quant_product *p) {
    const int64_t most = gk_min_i64(g->offs->shape[0], p->m); /* groups that have rows */
    skinny_plan small;
    groups_memory x = {.groups = gk_round_up(most * (int64_t)sizeof(weight_group), 64),
                       .worker = (int64_t)quant_most_bytes(p)};
    if (SYM(gk_skinny_isa).plan(g, SKINNY_ROWS, &small)) {
        x.a = gk_min_i64(p->m, most * SKINNY_ROWS) * small.row_bytes;
        x.worker = gk_max_i64(x.worker, small.worker_bytes);
    }
    return x;
}

static char *past(const gk_tensor *t, int64_t elements) {
    return gk_at(t->data, (int64_t)gk_dtype_bytes(t->dtype) * elements);
}

/* The arguments of group i of the call g, which has rows [begin, end). */
static void take_group(weight_group *to, const gk_weight_gemm_args *g, int64_t i, int64_t begin,
                       int64_t end) {
    const int64_t tiles = gk_ceil_div(g->n, GK_TILE), n0 = i * tiles * GK_TILE;
    to->g = *g;
    to->g.offs = NULL;
    to->g.a.shape[0] = end - begin;
    to->g.a.data = past(&g->a, begin * g->a.stride[0]);
    to->g.packed.data = past(&g->packed, i * tiles * g->packed.stride[0]);
    to->g.packed.shape[0] = tiles;
    to->g.scale.data = past(&g->scale, n0 * g->scale.stride[1]);
    to->g.out.data = past(&g->out, begin * g->n);
    to->g.out.shape[0] = end - begin;
    if (g->zero) {
        to->zero = *g->zero;
        to->zero.data = past(g->zero, n0 * g->zero->stride[1]);
        to->g.zero = &to->zero;
    }
    if (g->bias) {
        const int last = g->bias->ndim - 1;
        to->bias = *g->bias;
        if (last) to->bias.data = past(g->bias, i * g->bias->stride[0]);
        to->bias.stride[0] = g->bias->stride[last];
        to->bias.shape[0] = g->n;
        to->bias.ndim = 1;
        to->g.bias = &to->bias;
    }
}

static const weight_group *group_of_task(const groups_job *jb, int64_t t) {
    int64_t low = 0, high = jb->num_groups; /* the group is in [low, high) */
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (jb->groups[middle].first_task <= t)
            low = middle;
        else
            high = middle;
    }
    return &jb->groups[low];
}

static void groups_task(void *arg, int64_t t, int64_t worker) {
    const groups_job *jb = arg;
    const weight_group *x = group_of_task(jb, t);
    char *memory = jb->workers + worker * jb->worker_bytes;
    if (x->is_small)
        SYM(gk_skinny_isa).task(&x->small, t - x->first_task, memory);
    else
        quant_task(&x->large.p, t - x->first_task, memory);
}

/* Reorders the activations of a small group. */
static void order_task(void *arg, int64_t i, int64_t worker) {
    (void)worker;
    const groups_job *jb = arg;
    const weight_group *x = &jb->groups[i];
    if (!x->is_small) return;
    for (int64_t row = 0; row < x->small.p.m; ++row) SYM(gk_skinny_isa).order_row(&x->small, row);
}

static void run_groups(const gk_context *ctx, const gk_weight_gemm_args *g,
                       const weight_plan *whole, char *workspace) {
    const int64_t m = whole->p.m, out_bytes = (int64_t)gk_dtype_bytes(g->out.dtype);
    const groups_memory need = whole->need;
    weight_group *groups = (weight_group *)(void *)workspace;
    float *a = (float *)(void *)(workspace + need.groups);
    groups_job jb = {
        .groups = groups, .worker_bytes = need.worker, .workers = workspace + need.groups + need.a};
    if (gk_numel(&g->out) == 0) return;
    int64_t begin = 0, with_rows = 0;
    for (int64_t i = 0; i < g->offs->shape[0]; ++i) {
        const int64_t end = gk_i32_at(g->offs, i);
        with_rows += end > begin;
        begin = end;
    }
    const int64_t wanted = gk_ceil_div(2 * gk_num_threads(ctx), gk_max_i64(1, with_rows));
    int64_t tasks = 0;
    begin = 0;
    for (int64_t i = 0; i < g->offs->shape[0]; ++i) {
        const int64_t end = gk_i32_at(g->offs, i), rows = end - begin;
        if (rows == 0) continue;
        weight_group *x = &groups[jb.num_groups++];
        take_group(x, g, i, begin, end);
        x->first_task = tasks;
        x->is_small = need.a && SYM(gk_skinny_isa).plan(&x->g, rows, &x->small.p);
        if (x->is_small) {
            x->small.g = &x->g;
            x->small.a = a;
            x->small.global_scale = global_scale_of(g);
            a += rows * x->small.p.row_bytes / (int64_t)sizeof(float);
            tasks += gk_ceil_div(g->n, GK_TILE);
        } else {
            x->large = *whole;
            x->large.p.m = rows;
            x->large.p.row0 = begin; /* scale_a is that of all rows */
            set_pointers(&x->large, &x->g);
            tasks += quant_tasks_of(&x->large.p, wanted);
        }
        begin = end;
    }
    if (need.a) gk_parallel(ctx, jb.num_groups, order_task, &jb);
    gk_parallel(ctx, tasks, groups_task, &jb);
    if (begin < m) memset(past(&g->out, begin * g->n), 0, (size_t)(out_bytes * (m - begin) * g->n));
}

/* ---- 4. a call -------------------------------------------------------------------------------- */
static bool plan_weight(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_weight_gemm_args *g = args;
    weight_plan *x = GK_OWN(weight_plan, plan);
    int64_t m = 1;
    for (int d = 0; d < g->a.ndim - 1; ++d) m *= g->a.shape[d];
    plan_product(g, m, x);
    quant_plan(&x->p, ctx, plan);
    if (!g->offs) return true;
    x->need = memory_of(g, &x->p);
    plan->chunks = g->offs->shape[0];
    plan->workspace_bytes =
        (size_t)(x->need.groups + x->need.a + gk_num_workers(ctx, GK_MAX_THREADS) * x->need.worker);
    return true;
}

static void run_weight(const gk_context *ctx, const void *args, const gk_plan *plan,
                       void *workspace) {
    const gk_weight_gemm_args *g = args;
    weight_plan x = *GK_OWN_CONST(weight_plan, plan);
    if (g->offs) {
        run_groups(ctx, g, &x, workspace);
        return;
    }
    set_pointers(&x, g);
    weight_job jb = {&x.p, workspace};
    gk_parallel(ctx, plan->tasks, weight_task, &jb);
}
const gk_cpu_kernel SYM(gk_weight_gemm) = {plan_weight, run_weight};
