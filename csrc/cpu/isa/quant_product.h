/* SPDX-License-Identifier: BSD-3-Clause */
/* quant_product.h: a product whose operands are decoded block by block, with scales along every
 * dimension. The quantised, sparse and grouped products of the CPU use it.
 *
 *  out = activation(sum over blocks of k of scale_a scale_b (A B) + beta c + bias)
 *
 * A task is MB x NB of the result over all of K. For each block of k it decodes both operands
 * into cells (bfloat16 pairs or floats; both hold every 8-bit code exactly), multiplies them
 * with the register tile, and adds the product times its scales to the sums. No sum of the
 * register tile spans more than a block. int8 is multiplied without decoding (int8_product.h).
 * In an instruction set with pairs, 16-bit operands are bfloat16.
 *
 * Workspace per worker: cells of a, of b as read and as panels, the block's product, the sums,
 * the scales of b. */
#ifndef GPUKERN_CPU_QUANT_PRODUCT_H
#define GPUKERN_CPU_QUANT_PRODUCT_H

#include "../../formats/scales.h"
#include "codes_vec.h"
#include "tile.h"

#if PAIR == 2
typedef uint16_t elem; /* half a cell */
#define ELEM_DTYPE GK_BF16
#else
typedef float elem;
#define ELEM_DTYPE GK_F32
#endif

enum {
    MB = 128, /* rows of a task: each decoded value of b is used this many times */
    NB = 128, /* columns of a task; halved or quartered if there are few tasks */
    KB = 512  /* of k, if no scale ends earlier: operands and sums take 400 KB */
};

/* Decodes values from src[o * outer_stride + i * inner_stride] to to[o][i], o < outer, i <
 * inner; zeros up to a whole vector of cells. */
INLINE void decode_as(elem *to, int64_t ld, const char *src, gk_dtype dtype, int64_t outer_stride,
                      int64_t outer, int64_t inner) {
    const bool code = dtype == GK_E4M3 || dtype == GK_E5M2 || dtype == GK_I8;
    const int64_t bytes = code ? 1 : dtype == GK_F32 ? 4 : 2;
    for (int64_t o = 0; o < outer; ++o) {
        const char *from = src + o * outer_stride * bytes;
        elem *row = to + o * ld;
        for (int64_t i = 0; i < inner; i += W * PAIR) {
            vf v[PAIR];
            for (int h = 0; h < PAIR; ++h)
                v[h] = code ? vf_load_code(from, dtype, i + h * W, inner - i - h * W)
                            : vf_load_dtype(from, dtype, i + h * W, inner - i - h * W);
            vc_store((cell *)(void *)(row + i), vc_from_run(v));
        }
    }
}

static void decode(elem *to, int64_t ld, const char *src, gk_dtype dtype, int64_t outer_stride,
                   int64_t inner_stride, int64_t outer, int64_t inner) {
    if (inner_stride == 1 || inner == 1) {
        switch (dtype) { /* constant dtypes give one copy of the loop per dtype */
        case GK_E4M3: decode_as(to, ld, src, GK_E4M3, outer_stride, outer, inner); return;
        case GK_E5M2: decode_as(to, ld, src, GK_E5M2, outer_stride, outer, inner); return;
        case GK_I8: decode_as(to, ld, src, GK_I8, outer_stride, outer, inner); return;
        case GK_BF16: decode_as(to, ld, src, GK_BF16, outer_stride, outer, inner); return;
        case GK_F16: decode_as(to, ld, src, GK_F16, outer_stride, outer, inner); return;
        case GK_F32: decode_as(to, ld, src, GK_F32, outer_stride, outer, inner); return;
        default: gk_stop_without_case("quantised product: decode", dtype);
        }
    }
    for (int64_t o = 0; o < outer; ++o) {
        for (int64_t i = 0; i < gk_round_up(inner, W * PAIR); ++i) {
            const float x =
                i < inner ? (float)gk_load(src, dtype, o * outer_stride + i * inner_stride) : 0;
#if PAIR == 2
            to[o * ld + i] = gk_f32_to_bf16(x);
#else
            to[o * ld + i] = x;
#endif
        }
    }
}

/* ---- a product ------------------------------------------------------------------------------- */
typedef struct quant_product {
    int64_t m, n, k;
    /* element (i, k) is a[i * a_m + k * a_k] */
    const char *a;
    gk_dtype a_dtype;
    int64_t a_m, a_k;
    /* reads b's columns [col, col + cols) at [k0, k0 + kn) to to[column][ld], or to[k][ld] with
     * b_by_k */
    void (*read_b)(const struct quant_product *p, elem *to, int64_t ld, int64_t col, int64_t cols,
                   int64_t k0, int64_t kn);
    const void *b;
    bool b_by_k;
    gk_dtype b_dtype;
    int64_t b_k, b_n;
    gk_scales scale_a, scale_b; /* of [m, k] and [k, n] */
    int64_t row0;  /* in grouped products: the row of the whole scale_a that belongs to row 0 */
    int64_t block; /* of k: the block that shares a scale, at most KB */
    const struct gk_int8_isa *int8; /* int8_product.h; NULL: operands are decoded */
    void (*read_codes)(
        const struct quant_product *p, int8_t *to, int64_t ld, int64_t col, int64_t cols,
        int64_t k0,
        int64_t kn);    /* int8: reads b's columns with k contiguous; NULL: b is a matrix */
    bool exact;         /* int32 sums over all of k */
    gk_gemm_epilogue e; /* pointers to row 0, column 0 */
    gk_dtype out_dtype; /* if it has 8 bits, float32 sums are divided by out_scale */
    float out_scale;
    /* set by quant_tasks */
    int64_t mb, nb, row_tasks, col_tasks, a_ld, b_ld;
    size_t worker_bytes;
} quant_product;

static float scale_value(const gk_scales *s, int64_t row, int64_t col) {
    return s->data ? (float)gk_load(s->data, s->dtype,
                                    (row >> s->row_log2) * s->row + (col >> s->col_log2) * s->col)
                   : 1;
}

static bool scaled_along_k(const quant_product *p) {
    return (p->scale_a.data && p->scale_a.col_log2 < GK_WHOLE_LOG2) ||
           (p->scale_b.data && p->scale_b.row_log2 < GK_WHOLE_LOG2);
}

/* The longest range of k, at most `most`, in which every scale along k is constant. */
static int64_t scaled_block(const quant_product *p, int64_t most) {
    if (p->scale_a.data && p->scale_a.col_log2 < GK_WHOLE_LOG2)
        most = gk_min_i64(most, INT64_C(1) << p->scale_a.col_log2);
    if (p->scale_b.data && p->scale_b.row_log2 < GK_WHOLE_LOG2)
        most = gk_min_i64(most, INT64_C(1) << p->scale_b.row_log2);
    return most;
}

/* Sizes a worker's memory for tasks of mb x nb. */
static void quant_memory(quant_product *p, int64_t mb, int64_t nb) {
    p->a_ld = gk_round_up(gk_min_i64(p->block, gk_max_i64(1, p->k)), W * PAIR) + W * PAIR;
    p->b_ld = p->b_by_k ? nb + W * PAIR : p->a_ld;
    const int64_t b_rows = p->b_by_k ? p->block : nb;
    const int64_t cells = gk_round_up(p->block / PAIR + 1, 16) * nb + 4 * W;
    p->worker_bytes =
        (size_t)gk_round_up((mb * p->a_ld + b_rows * p->b_ld) * (int64_t)sizeof(elem) + 128 +
                                4 * (cells + 2 * mb * nb + 2 * nb),
                            64);
}

/* Enough memory for every part of the planned product. */
INLINE size_t quant_most_bytes(const quant_product *planned) {
    quant_product p = *planned;
    quant_memory(&p, MB, NB);
    return p.worker_bytes;
}

/* Sets the properties of the result that all quantised products share: activation, dtype, and
 * bias, whose last dimension is n. */
static void quant_results(quant_product *p, gk_activation activation, const gk_tensor *out,
                          const gk_tensor *bias) {
    p->e.alpha = 1;
    p->e.activation = activation;
    p->out_dtype = out->dtype;
    if (bias) {
        p->e.bias_dtype = bias->dtype;
        p->e.bias_stride = bias->stride[bias->ndim - 1];
    }
}

/* Chooses the size of tasks, so that there are at least `wanted` if N allows it, and returns their
 * number. */
static int64_t quant_tasks_of(quant_product *p, int64_t wanted) {
    p->block = scaled_block(p, KB);
    p->row_tasks = gk_ceil_div(p->m, MB);
    p->mb = p->row_tasks ? gk_ceil_div(p->m, p->row_tasks) : 0;
    p->nb = NB;
    while (p->nb > NB / 4 && p->row_tasks * gk_ceil_div(p->n, p->nb) < wanted) p->nb /= 2;
    p->col_tasks = gk_ceil_div(p->n, p->nb);
    quant_memory(p, p->mb, p->nb);
    return p->row_tasks * p->col_tasks;
}

static int64_t quant_tasks(quant_product *p, const gk_context *ctx) {
    return quant_tasks_of(p, 2 * gk_num_threads(ctx));
}

static void quant_plan(quant_product *p, const gk_context *ctx, gk_plan *plan) {
    plan->tasks = quant_tasks(p, ctx);
    plan->tile[0] = p->mb;
    plan->tile[1] = p->nb;
    plan->tile[2] = p->block;
    plan->tile[3] = MR * NR;
    plan->workspace_bytes = (size_t)gk_num_workers(ctx, plan->tasks) * p->worker_bytes;
}

/* True if a float32 sum of codes times this scale neither overflows nor loses bits. These sums
 * are 0 or between 2^-32 and 2^48 in size. */
static bool moderate(float scale) {
    const float size = scale < 0 ? -scale : scale;
    return size == 0 || (size >= 0x1p-64f && size <= 0x1p64f);
}

/* sums += part times the scales of the block that begins at k0. The two scales are never
 * multiplied with each other in float32: their product may overflow or underflow although the
 * result does not. */
static void join_scaled(const quant_product *p, float *sums, const float *part, float *scales,
                        int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t k0,
                        bool first) {
    for (int64_t j = 0; j < cols; ++j) scales[j] = scale_value(&p->scale_b, k0, col + j);
    for (int64_t j = cols; j < gk_round_up(cols, W); ++j) scales[j] = 0;
    for (int64_t i = 0; i < rows; ++i) {
        const float sa = scale_value(&p->scale_a, p->row0 + row + i, k0);
        const float *from = part + i * p->nb;
        float *to = sums + i * p->nb;
        if (!moderate(sa)) {
            for (int64_t j = 0; j < cols; ++j)
                to[j] = (float)((double)from[j] * ((double)sa * scales[j]) +
                                (first ? 0 : (double)to[j]));
            continue;
        }
        for (int64_t j = 0; j < cols; j += W) {
            const vf x = vf_load(from + j) * vf_set1(sa), sb = vf_load(scales + j);
            vf_store(to + j, first ? x * sb : vf_fma(x, sb, vf_load(to + j)));
        }
    }
}

static void join(const quant_product *p, float *sums, const float *part, int64_t rows, int64_t cols,
                 bool first) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; j += W) {
            const vf x = vf_load(part + i * p->nb + j);
            float *to = sums + i * p->nb + j;
            vf_store(to, first ? x : vf_load(to) + x);
        }
}

/* Converts sums over all of k to float32 and multiplies them by the scale of the row and that of
 * the column, whose product is taken in double. excess: the amount by which each row's int32
 * sums are too large, modulo 2^32. */
static void scale_sums(const quant_product *p, void *sums, const uint32_t *excess, float *scales,
                       int64_t row, int64_t rows, int64_t col, int64_t cols) {
    for (int64_t j = 0; j < cols; ++j) scales[j] = scale_value(&p->scale_b, 0, col + j);
    for (int64_t i = 0; i < rows; ++i) {
        const float sa = scale_value(&p->scale_a, p->row0 + row + i, 0);
        float *to = (float *)sums + i * p->nb;
        const uint32_t *whole = (const uint32_t *)sums + i * p->nb;
        if (p->exact)
            for (int64_t j = 0; j < cols; ++j)
                to[j] = (float)((double)(int32_t)(whole[j] - excess[i]) * ((double)sa * scales[j]));
        else
            for (int64_t j = 0; j < cols; ++j)
                to[j] = (float)((double)to[j] * ((double)sa * scales[j]));
    }
}

static void store_sums(const quant_product *p, float *sums, float *part, int64_t row, int64_t rows,
                       int64_t col, int64_t cols) {
    gk_gemm_epilogue at = p->e;
    if (at.bias)
        at.bias =
            (const char *)at.bias + (int64_t)gk_dtype_bytes(at.bias_dtype) * col * at.bias_stride;
    if (at.c)
        at.c = (const char *)at.c +
               (int64_t)gk_dtype_bytes(at.c_dtype) * (row * at.c_row + col * at.c_col);
    char *out = (char *)at.out + (int64_t)gk_dtype_bytes(p->out_dtype) * (row * at.out_row + col);
    at.out = out;
    at.out_dtype = p->out_dtype;
    const bool code = gk_is_code(p->out_dtype);
    if (code) {
        at.out = part;
        at.out_row = p->nb;
        at.out_dtype = GK_F32;
    }
    SYM(gk_gemm_isa).store(&at, sums, p->nb, rows, cols);
    if (!code) return;
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < cols; j += W) {
            const vf v = vf_load_first(part + i * p->nb + j, cols - j) / vf_set1(p->out_scale);
            char *to = out + i * p->e.out_row;
            switch (p->out_dtype) {
            case GK_E4M3: vf_store_code(to, GK_E4M3, j, v, cols - j); break;
            case GK_E5M2: vf_store_code(to, GK_E5M2, j, v, cols - j); break;
            default: vf_store_code(to, GK_I8, j, v, cols - j);
            }
        }
}

/* Computes task t of p in a worker's memory. */
static void quant_task(const quant_product *p, int64_t t, char *memory) {
    const int64_t row = t / p->col_tasks * p->mb, rows = gk_min_i64(p->mb, p->m - row);
    const int64_t col = t % p->col_tasks * p->nb, cols = gk_min_i64(p->nb, p->n - col);
    elem *a = (elem *)(void *)memory, *b = a + p->mb * p->a_ld;
    cell *panel = (cell *)(void *)gk_at(
        memory, gk_round_up((char *)(b + (p->b_by_k ? p->block : p->nb) * p->b_ld) - memory, 64));
    float *part = (float *)(void *)(panel + gk_round_up(p->block / PAIR + 1, 16) * p->nb + 4 * W);
    float *sums = part + p->mb * p->nb, *scales = sums + p->mb * p->nb;
    const bool along_k = scaled_along_k(p);
    memset(sums, 0, (size_t)(4 * p->mb * p->nb));
    for (int64_t k0 = 0; k0 < p->k; k0 += p->block) {
        const int64_t kn = gk_min_i64(p->block, p->k - k0);
        decode(a, p->a_ld,
               p->a + (int64_t)gk_dtype_bytes(p->a_dtype) * (row * p->a_m + k0 * p->a_k),
               p->a_dtype, p->a_m, p->a_k, rows, kn);
        p->read_b(p, b, p->b_ld, col, cols, k0, kn);
        if (p->b_by_k)
            pack_panels(panel, b, ELEM_DTYPE, 1, p->b_ld, cols, kn);
        else
            pack_panels(panel, b, ELEM_DTYPE, p->b_ld, 1, cols, kn);
        for (int64_t j = 0; j < cols; j += NR)
            tile_product(SUM_CELLS, true, rows, gk_min_i64(NR, cols - j), cells_of(kn),
                         (cell *)(void *)a, p->a_ld / PAIR, panel + j * cells_of(kn), NR, part + j,
                         p->nb, false);
        if (along_k)
            join_scaled(p, sums, part, scales, row, rows, col, cols, k0, k0 == 0);
        else
            join(p, sums, part, rows, cols, k0 == 0);
    }
    if (!along_k && (p->scale_a.data || p->scale_b.data))
        scale_sums(p, sums, NULL, scales, row, rows, col, cols);
    store_sums(p, sums, part, row, rows, col, cols);
}

/* ---- reading a b that is a matrix in memory -------------------------------------------------- */
INLINE void read_matrix(const quant_product *p, elem *to, int64_t ld, int64_t col, int64_t cols,
                        int64_t k0, int64_t kn) {
    const char *from =
        (const char *)p->b + (int64_t)gk_dtype_bytes(p->b_dtype) * (k0 * p->b_k + col * p->b_n);
    if (p->b_by_k)
        decode(to, ld, from, p->b_dtype, p->b_k, p->b_n, kn, cols);
    else
        decode(to, ld, from, p->b_dtype, p->b_n, p->b_k, cols, kn);
}

#endif
