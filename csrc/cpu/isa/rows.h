/* SPDX-License-Identifier: BSD-3-Clause */
/* rows.h: the parts that the CPU's row operations share. A row is the last dimension of a tensor
 * [..., N] and is contiguous; the leading dimensions may have any strides. Whatever the dtype in
 * memory, kernels compute in float32 vectors.
 *
 * Sums over a row are taken in blocks of ROW_BLOCK columns: in float32 vectors within a block,
 * in double across blocks. Their error therefore does not grow with the length, and their order
 * depends only on the length and the instruction set. */
#ifndef GPUKERN_CPU_ROWS_H
#define GPUKERN_CPU_ROWS_H

#include "../kernels.h"
#include "vec.h"

enum {
    /* columns: 16 AVX-512 vectors for each of 4 accumulators, so rounding stays at a few ulp */
    ROW_BLOCK = 1024,
    /* elements of a task: some 10 us of work, much more than starting a task costs */
    ROW_TASK = 32 << 10,
    ROW_SUMS = 3 /* most sums that one pass computes */
};

INLINE int64_t rows_of(const gk_tensor *t) {
    int64_t rows = 1;
    for (int d = 0; d < t->ndim - 1; ++d) rows *= t->shape[d];
    return rows;
}

/* The first element of a row. */
INLINE char *row_at(const gk_tensor *t, int64_t row) {
    return (char *)t->data + gk_offset_of(t, t->ndim - 1, row) * (gk_type_of(t->dtype)->bits / 8);
}

/* The element of a row in a tensor [...] that has one element for each row. */
INLINE char *row_element(const gk_tensor *t, int64_t row) {
    return (char *)t->data + gk_offset_of(t, t->ndim, row) * (gk_type_of(t->dtype)->bits / 8);
}

/* The sum and the maximum of all lanes, each in a fixed order. The maximum may ignore a NaN. Both
 * store the vector and reduce four lanes at a time, because every instruction set has vectors of
 * four floats. */
typedef float four __attribute__((vector_size(16), may_alias));
typedef int32_t four_ints __attribute__((vector_size(16)));
INLINE float vf_total(vf v) {
    float t[W] __attribute__((aligned(64)));
    vf_store(t, v);
    four sum = *(const four *)t;
    for (int i = 4; i < W; i += 4) sum += *(const four *)(t + i);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}
INLINE float vf_peak(vf v) {
    float t[W] __attribute__((aligned(64)));
    vf_store(t, v);
    four peak = *(const four *)t;
    for (int i = 4; i < W; i += 4) {
        const four x = *(const four *)(t + i);
        const four_ints more = x > peak;
        peak = (four)(((four_ints)x & more) | ((four_ints)peak & ~more));
    }
    const float a = peak[0] > peak[2] ? peak[0] : peak[2],
                b = peak[1] > peak[3] ? peak[1] : peak[3];
    return a > b ? a : b;
}

/* Rows of a task, so that it has about ROW_TASK elements. */
INLINE int64_t rows_per_task(int64_t n) { return gk_max_i64(1, ROW_TASK / gk_max_i64(1, n)); }

/* The tasks of an operation that may cut rows. A long row is cut into `cuts` ranges of at most
 * ROW_TASK columns, and a task is one range. If rows are short, a task is `each` whole rows. */
typedef struct row_cuts {
    int64_t rows, n, each, cuts;
} row_cuts;
GK_PLAN_HOLDS(row_cuts);

/* Plans rows like those of x. */
INLINE void plan_row_cuts(const gk_tensor *x, gk_plan *plan) {
    row_cuts *p = GK_OWN(row_cuts, plan);
    p->rows = rows_of(x);
    p->n = x->shape[x->ndim - 1];
    p->each = rows_per_task(p->n);
    p->cuts = gk_max_i64(1, gk_ceil_div(p->n, ROW_TASK));
    plan->tasks = p->n == 0 ? 0 : gk_ceil_div(p->rows, p->each) * p->cuts;
}

typedef struct row_span {
    int64_t row, end, from, to; /* rows [row, end), columns [from, to) */
} row_span;

INLINE row_span span_of(const row_cuts *p, int64_t task) {
    const int64_t row = task / p->cuts * p->each, from = task % p->cuts * ROW_TASK;
    return (row_span){row, gk_min_i64(row + p->each, p->rows), from,
                      gk_min_i64(from + ROW_TASK, p->n)};
}

/* Adds the contribution of columns [i, i + n) to s[0 .. k). n < W only at the end of a row;
 * lanes from n on must then add 0. */
typedef void (*row_terms)(const void *arg, int64_t i, int64_t n, vf *s);

/* total[0 .. k): the sums over columns [begin, end), at most ROW_BLOCK of them. */
INLINE void block_sums(int k, row_terms add, const void *arg, int64_t begin, int64_t end,
                       double *total) {
    vf s[4][ROW_SUMS] = {{{0}}};
    int64_t i = begin;
    for (; i + 4 * W <= end; i += 4 * W) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) add(arg, i + v * W, W, s[v]);
    }
    for (; i + W <= end; i += W) add(arg, i, W, s[0]);
    if (i < end) add(arg, i, end - i, s[1]);
    for (int j = 0; j < k; ++j) total[j] = vf_total((s[0][j] + s[1][j]) + (s[2][j] + s[3][j]));
}

INLINE void row_sums(int k, row_terms add, const void *arg, int64_t n, double *total) {
    for (int j = 0; j < k; ++j) total[j] = 0;
    for (int64_t begin = 0; begin < n; begin += ROW_BLOCK) {
        double of_block[ROW_SUMS];
        block_sums(k, add, arg, begin, gk_min_i64(n, begin + ROW_BLOCK), of_block);
        for (int j = 0; j < k; ++j) total[j] += of_block[j];
    }
}

/* Sets the lanes from n on to 0. */
INLINE vf vf_first(vf x, int64_t n) { return n >= W ? x : vf_select(vm_first(n), x, vf_set1(0)); }

/* A weight or bias [N] as the loops over rows read it: contiguous, in the rows' dtype or float32.
 */
typedef struct row_vector {
    const void *data; /* NULL: not given */
    float added;      /* to each element */
    bool wide;        /* float32, whatever the rows' dtype */
} row_vector;

/* A strided vector is copied to `copy`, float32 [N]. */
INLINE row_vector row_vector_of(const gk_tensor *t, float added, gk_dtype rows, float *copy) {
    if (!t) return (row_vector){0};
    const int64_t n = t->shape[0];
    if (t->stride[0] == 1 || n == 1) return (row_vector){t->data, added, t->dtype != rows};
    for (int64_t i = 0; i < n; ++i) copy[i] = (float)gk_load(t->data, t->dtype, i * t->stride[0]);
    return (row_vector){copy, added, true};
}

/* Converts the vector to float32 in `copy`. */
INLINE void row_widen(row_vector *v, gk_dtype rows, int64_t n, float *copy) {
    for (int64_t i = 0; i < n; i += W)
        vf_store_first(copy + i, vf_load_dtype(v->data, rows, i, n - i), n - i);
    v->data = copy;
    v->wide = true;
}

INLINE vf row_vector_at(const row_vector *v, gk_dtype rows, bool wide, int64_t i, int64_t n) {
    return vf_load_dtype(v->data, wide ? GK_F32 : rows, i, n) + v->added;
}

/* Calls body(dtype, wide) with constants, so that each pair is compiled separately. wide: weight
 * and bias are float32. */
#define ROW_DTYPES(dtype, wide, body)                             \
    switch (dtype) {                                              \
    case GK_F32: body(GK_F32, true); break;                       \
    case GK_BF16:                                                 \
        if (wide) {                                               \
            body(GK_BF16, true);                                  \
        } else {                                                  \
            body(GK_BF16, false);                                 \
        }                                                         \
        break;                                                    \
    case GK_F16:                                                  \
        if (wide) {                                               \
            body(GK_F16, true);                                   \
        } else {                                                  \
            body(GK_F16, false);                                  \
        }                                                         \
        break;                                                    \
    default: break; /* tables.c has no kernel of another dtype */ \
    }

#endif
