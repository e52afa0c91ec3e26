/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_skinny: up to SKINNY_ROWS rows of activations times a packed weight, as products along
 * k. Compiled once per ISA; tables.c lists it before weight_gemm.
 *
 *  a [M, K] bfloat16 or float16
 *  packed [ceil(N / 64), ceil(K / 64), bytes] (weight_tile.h)   scale [ceil(K / g), N]
 *
 * The time goes into reading the weight once, so codes are multiplied in the order in which they
 * are stored. a is first converted to float32 in that order. The codes of rows r and r + 8 of a
 * tile are 16 words with 4 bits (32 words with 8). Shifting all words by the same amount gives
 * the codes of 16 values of k. They are multiplied by the scale of their group, rounded to a's
 * dtype and multiplied by a. Sums are float32 in each lane; lanes are added up at the end.
 *
 * A task is 64 columns of the result. It reads its row of tiles, which are consecutive in
 * memory. Workspace: the reordered a; per worker the sums and the results. Not served: larger M,
 * an e4m3 a, and calls with offs, whose small groups weight_gemm.c multiplies by the functions of
 * weight_skinny.h. */
#include "../../core/invariant.h"
#include "../../formats/weight_tile.h"
#include "codes_vec.h"
#include "tile.h"
#include "weight_skinny.h"

enum {
    WORDS = 16, /* words that are decoded together: 64 bytes */
    PARTS = WORDS / W
};
GK_PLAN_HOLDS(skinny_plan);

/* The k within a tile that lane `lane` of vector v holds. 4 bits: v = 2 j + i; 8 bits: v = 2
 * high + i. */
static int k_of(bool is_4_bit, int v, int lane) {
    const int t = lane / 4, rest = lane % 4, i = v % 2;
    if (is_4_bit) return 16 * rest + 8 * (v / 2) + 2 * t + i;
    return 32 * (v / 2) + 16 * (rest / 2) + 8 * (rest % 2) + 2 * t + i;
}

static void order_row(const skinny_job *jb, int64_t i) {
    const gk_tensor *a = &jb->g->a;
    const int64_t a_m = a->stride[a->ndim - 2], a_k = a->stride[a->ndim - 1];
    const bool is_4_bit = gk_is_4_bit(jb->g->format);
    int at[4][WORDS];
    for (int v = 0; v < 4; ++v)
        for (int lane = 0; lane < WORDS; ++lane) at[v][lane] = k_of(is_4_bit, v, lane);
    float *to = jb->a + i * jb->p.tiles_k * 4 * WORDS;
    for (int64_t tile = 0; tile < jb->p.tiles_k; ++tile)
        for (int v = 0; v < 4; ++v)
            for (int lane = 0; lane < WORDS; ++lane) {
                const int64_t k = tile * GK_TILE + at[v][lane];
                *to++ = k < jb->p.k ? (float)gk_load(a->data, a->dtype, i * a_m + k * a_k) : 0;
            }
}

/* The values of W codes in the low bits of words, minus their zero. */
INLINE vf values_of(vi words, gk_weight_format format, float zero) {
    return vf_from_weight_codes(words & (gk_is_4_bit(format) ? 15 : 255), format, zero);
}

/* Rounds a weight to a's dtype. */
INLINE vf rounded(vf x, gk_dtype dtype) {
    uint16_t t[W];
    if (dtype == GK_BF16) {
        vf_store_bf16_first(t, x, W);
        return vf_load_bf16(t);
    }
    vf_store_f16_first(t, x, W);
    return vf_load_f16(t);
}

/* For row n and one tile of k: the scale (or the zero) of each lane's group. With groups of 64
 * and more all lanes have the same. */
static void of_groups(const skinny_job *jb, int64_t n, int64_t tile, bool zeros, float to[WORDS]) {
    const gk_weight_gemm_args *g = jb->g;
    const gk_tensor *t = zeros ? g->zero : &g->scale;
    const bool is_4_bit = gk_is_4_bit(g->format);
    float four[4];
    for (int s = 0; s < 4; ++s) {
        const int64_t group =
            gk_min_i64((tile * GK_TILE + 16 * s) >> jb->p.group_log2, g->scale.shape[0] - 1);
        four[s] = (float)gk_load(t->data, t->dtype, group * t->stride[0] + n * t->stride[1]);
        if (jb->p.group_log2 >= 6) {
            for (int lane = 0; lane < WORDS; ++lane) to[lane] = four[0];
            return;
        }
    }
    /* Only 4-bit formats get here: the plan refuses 8-bit formats with groups below 64, because a
     * lane's values come from both halves of the tile. */
    for (int lane = 0; lane < WORDS; ++lane) to[lane] = four[is_4_bit ? lane % 4 : lane % 4 / 2];
}

/* One tile times all rows of a: sums[row of 64][i][lane]. */
INLINE void tile_times(const skinny_job *jb, gk_weight_format format, gk_dtype dtype,
                       const uint8_t *tile, int64_t n0, int64_t tile_k, float *sums) {
    const int64_t m = jb->p.m, rows = gk_min_i64(GK_TILE, jb->p.n - n0);
    const bool is_4_bit = gk_is_4_bit(format);
    const float *a = jb->a + tile_k * 4 * WORDS;
    const int64_t a_row = jb->p.tiles_k * 4 * WORDS;
    /* Weights beyond K are made 0 for uint4, whose code 0 may be an infinity in float16. Those of
     * the other formats are 0. */
    const bool cut = format == GK_UINT4 && jb->p.k - tile_k * GK_TILE < GK_TILE;
    int32_t inside[4][WORDS];
    for (int v = 0; cut && v < 4; ++v)
        for (int lane = 0; lane < WORDS; ++lane)
            inside[v][lane] = -(tile_k * GK_TILE + k_of(is_4_bit, v, lane) < jb->p.k);
    for (int r = 0; r < GK_TILE; ++r) {
        if (r % 16 >= 8) continue;
        const int thread = 32 * (r >> 4) + 4 * (r & 7);
        for (int h = 0; h < 2; ++h) {
            const int row = r + 8 * h;
            if (row >= rows) continue;
            float scale[WORDS], zero[WORDS];
            of_groups(jb, n0 + row, tile_k, false, scale);
            if (format == GK_UINT4 && jb->g->zero) of_groups(jb, n0 + row, tile_k, true, zero);
            for (int part = 0; part < PARTS; ++part) {
                vf value[4];
                for (int v = 0; v < 4; ++v) {
                    const uint8_t *words = tile + 16 * (is_4_bit ? thread : 128 * (v / 2) + thread);
                    const vi w = vi_load_bytes(words + 4 * W * part);
                    const int shift =
                        is_4_bit ? 4 * (h + 2 * (v / 2) + 4 * (v % 2)) : 8 * (2 * h + v % 2);
                    value[v] = values_of(w >> shift, format, 8);
                    if (format == GK_UINT4 && jb->g->zero) value[v] += 8 - vf_load(zero + part * W);
                    value[v] =
                        rounded(value[v] * vf_load(scale + part * W) * jb->global_scale, dtype);
                    if (cut)
                        value[v] = (vf)((vi)value[v] &
                                        vi_load_bytes((const uint8_t *)(inside[v] + part * W)));
                }
                for (int64_t i = 0; i < m; ++i) {
                    const float *x = a + i * a_row + part * W;
                    float *to = sums + (row * m + i) * WORDS + part * W;
                    vf s = value[0] * vf_load(x);
                    for (int v = 1; v < 4; ++v) s = vf_fma(value[v], vf_load(x + v * WORDS), s);
                    vf_store(to, vf_load(to) + s);
                }
            }
        }
    }
}

static void columns(const skinny_job *jb, int64_t t, char *memory) {
    const gk_weight_gemm_args *g = jb->g;
    const int64_t m = jb->p.m, n0 = t * GK_TILE, rows = gk_min_i64(GK_TILE, jb->p.n - n0);
    float *sums = (float *)(void *)memory, *results = sums + GK_TILE * m * WORDS;
    memset(sums, 0, (size_t)(GK_TILE * m * WORDS) * sizeof *sums);
    const uint8_t *tiles = (const uint8_t *)g->packed.const_data + t * g->packed.stride[0];
    for (int64_t k = 0; k < jb->p.tiles_k; ++k) {
        const uint8_t *tile = tiles + k * g->packed.stride[1];
        switch (g->format) { /* constant formats and dtypes give one copy of the loop for each */
#define TILE(f)                                            \
    case f:                                                \
        if (g->a.dtype == GK_BF16)                         \
            tile_times(jb, f, GK_BF16, tile, n0, k, sums); \
        else                                               \
            tile_times(jb, f, GK_F16, tile, n0, k, sums);  \
        break;
            TILE(GK_INT4)
            TILE(GK_UINT4)
            TILE(GK_INT8)
            TILE(GK_W_E4M3)
            TILE(GK_MXFP4)
            TILE(GK_NVFP4)
#undef TILE
        }
    }
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < m; ++i) {
            const float *s = sums + (row * m + i) * WORDS;
            float total = 0;
            for (int half = 0; half < 4; ++half)
                total += (s[half] + s[half + 4]) + (s[half + 8] + s[half + 12]);
            results[i * GK_TILE + row] = total;
        }
    gk_gemm_epilogue e = {
        .alpha = 1, .activation = g->activation, .out_dtype = g->out.dtype, .out_row = jb->p.n};
    e.out = (char *)g->out.data + (int64_t)gk_dtype_bytes(g->out.dtype) * n0;
    if (g->bias) {
        e.bias_dtype = g->bias->dtype;
        e.bias_stride = g->bias->stride[0];
        e.bias = (const char *)g->bias->data +
                 (int64_t)gk_dtype_bytes(e.bias_dtype) * n0 * e.bias_stride;
    }
    SYM(gk_gemm_isa).store(&e, results, GK_TILE, m, rows);
}

static bool plan_product(const gk_weight_gemm_args *g, int64_t m, skinny_plan *p) {
    p->m = m;
    p->n = g->n;
    p->k = g->a.shape[g->a.ndim - 1];
    p->group_log2 = gk_group_log2(p->k, g->scale.shape[0]);
    /* with 8 bits a lane's four values come from both halves of the tile, which must share a
     * group */
    if (g->a.dtype == GK_E4M3 || m > SKINNY_ROWS || m == 0 || p->k == 0 || gk_batch_invariant() ||
        (!gk_is_4_bit(g->format) && p->group_log2 < 6))
        return false;
    p->tiles_k = gk_ceil_div(p->k, GK_TILE);
    p->row_bytes = p->tiles_k * 4 * WORDS * (int64_t)sizeof(float);
    p->worker_bytes = gk_round_up((GK_TILE * m * (WORDS + 1) + W) * (int64_t)sizeof(float), 64);
    return true;
}
const gk_skinny_isa SYM(gk_skinny_isa) = {plan_product, order_row, columns};

/* ---- a call of one group --------------------------------------------------------------------- */
typedef struct skinny_call {
    skinny_job job;
    char *workers; /* each: sums [64][m][WORDS], results [m][64] */
} skinny_call;

static void skinny_task(void *arg, int64_t t, int64_t worker) {
    const skinny_call *c = arg;
    columns(&c->job, t, c->workers + worker * c->job.p.worker_bytes);
}

static bool plan_skinny(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_weight_gemm_args *g = args;
    skinny_plan *p = GK_OWN(skinny_plan, plan);
    int64_t m = 1;
    for (int d = 0; d < g->a.ndim - 1; ++d) m *= g->a.shape[d];
    if (g->offs || !plan_product(g, m, p)) return false;
    plan->tasks = gk_ceil_div(p->n, GK_TILE);
    plan->tile[0] = p->m;
    plan->tile[1] = GK_TILE;
    plan->tile[2] = GK_TILE;
    plan->workspace_bytes =
        (size_t)(m * p->row_bytes + gk_num_workers(ctx, plan->tasks) * p->worker_bytes);
    return true;
}

static void run_skinny(const gk_context *ctx, const void *args, const gk_plan *plan,
                       void *workspace) {
    const skinny_plan *p = GK_OWN_CONST(skinny_plan, plan);
    skinny_call c = {.job = {.g = args, .p = *p, .a = workspace}};
    c.workers = (char *)workspace + p->m * p->row_bytes;
    c.job.global_scale =
        c.job.g->global_scale ? *(const float *)c.job.g->global_scale->const_data : 1;
    for (int64_t i = 0; i < p->m; ++i) order_row(&c.job, i);
    gk_parallel(ctx, plan->tasks, skinny_task, &c);
}
const gk_cpu_kernel SYM(gk_weight_skinny) = {plan_skinny, run_skinny};
