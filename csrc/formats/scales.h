/* SPDX-License-Identifier: BSD-3-Clause */
/* scales.h: which scale an element of a quantised matrix has.
 *
 * A scale tensor is one number or [Sr, Sc]. Sr is 1, the number of rows, or the number of blocks
 * of rows; Sc likewise for columns. Element (i, j) takes the scale of its row or block. If a
 * shape can be read in two ways, both give the same scales. */
#ifndef GPUKERN_SCALES_H
#define GPUKERN_SCALES_H

#include "gpukern_quant.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GK_SCALE_BLOCK = 128, /* rows or columns of a block */
    GK_MX_BLOCK = 32      /* consecutive columns that share a power of two (OCP MX 1.0) */
};
#define GK_WHOLE_LOG2 62 /* block size of a dimension with one scale */

typedef struct gk_scales {
    const void *data; /* NULL: all scales are 1 */
    gk_dtype dtype;
    int row_log2, col_log2; /* log2 of the elements of a block */
    int64_t row, col;       /* strides in elements from block to block */
} gk_scales;

/* log2 of the block size in a dimension of `size` elements with `count` scales, or -1 if no
 * block size fits. `single` allows one scale per element. Blocks have at least 2^least_log2
 * elements. */
static inline int gk_block_log2(int64_t size, int64_t count, bool single, int least_log2) {
    if (count == 1) return GK_WHOLE_LOG2;
    if (single && count == size) return 0;
    for (int log2 = 7; log2 >= least_log2; log2 -= 2)
        if (count == (size + (INT64_C(1) << log2) - 1) >> log2) return log2;
    return -1;
}

/* From a checked tensor t (its last two dimensions) for a matrix of rows x cols. k_is_row: the
 * product sums over the rows. */
static inline gk_scales gk_scales_of(const gk_tensor *t, int64_t rows, int64_t cols,
                                     bool k_is_row) {
    gk_scales s = {0, GK_F32, GK_WHOLE_LOG2, GK_WHOLE_LOG2, 0, 0};
    if (!t) return s;
    s.data = t->data;
    s.dtype = t->dtype;
    if (t->ndim == 1 && t->shape[0] > 1) {
        s.col_log2 = gk_block_log2(cols, t->shape[0], false, 5);
        s.col = t->stride[0];
    }
    if (t->ndim < 2) return s;
    const int r = t->ndim - 2, c = t->ndim - 1;
    s.row_log2 = gk_block_log2(rows, t->shape[r], !k_is_row, k_is_row ? 5 : 7);
    s.col_log2 = gk_block_log2(cols, t->shape[c], k_is_row, k_is_row ? 7 : 5);
    s.row = t->shape[r] == 1 ? 0 : t->stride[r];
    s.col = t->shape[c] == 1 ? 0 : t->stride[c];
    return s;
}

#ifdef __cplusplus
}
#endif
#endif
