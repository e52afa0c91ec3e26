/* SPDX-License-Identifier: BSD-3-Clause */
/* rows.h: elements of tensors [..., N] by row and column, in double. */
#ifndef GPUKERN_REF_ROWS_H
#define GPUKERN_REF_ROWS_H

#include "../core/internal.h"

static inline int64_t last_size(const gk_tensor *t) { return t->shape[t->ndim - 1]; }

static inline int64_t num_rows(const gk_tensor *t) {
    int64_t rows = 1;
    for (int d = 0; d < t->ndim - 1; ++d) rows *= t->shape[d];
    return rows;
}

/* Offset of a row's first element. last is 1 for a tensor [..., N], whose rows have N elements, and
 * 0 for a tensor [...], which has one element for each row. */
static inline int64_t ref_row_offset(const gk_tensor *t, int64_t row, int last) {
    return gk_offset_of(t, t->ndim - last, row);
}

static inline double ref_at(const gk_tensor *t, int64_t row, int64_t i) {
    return gk_load(t->data, t->dtype, ref_row_offset(t, row, 1) + i * t->stride[t->ndim - 1]);
}
static inline void ref_put(const gk_tensor *t, int64_t row, int64_t i, double x) {
    gk_store(t->data, t->dtype, ref_row_offset(t, row, 1) + i * t->stride[t->ndim - 1], x);
}
static inline double ref_vector_at(const gk_tensor *t, int64_t i) {
    return gk_load(t->data, t->dtype, i * t->stride[0]);
}
static inline void ref_vector_put(const gk_tensor *t, int64_t i, double x) {
    gk_store(t->data, t->dtype, i * t->stride[0], x);
}

#endif
