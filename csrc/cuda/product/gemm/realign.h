/* SPDX-License-Identifier: BSD-3-Clause */
/* realign.h: plans an aligned copy of a matrix of 16-bit elements that cannot be read 16 bytes at a
 * time in place. The copy lies in the call's workspace. operands.h uses it for Hopper's gemm.
 *
 *   from [entries][outer][inner], any strides   ->   to [entries][outer][ld]
 *
 * ld is inner rounded up to 8, and the padding is zeros. inner is the dimension with stride 1 or,
 * if there is none, the one with the smaller stride. An entry that the batch broadcasts is copied
 * once.
 *
 * Rows of float32 are treated as rows of twice as many 16-bit elements. A float32 matrix whose
 * inner dimension does not have stride 1 is transposed in tiles.
 *
 * This header is C, because plans hold a RealignMatrix. */
#ifndef GPUKERN_CUDA_GEMM_REALIGN_H
#define GPUKERN_CUDA_GEMM_REALIGN_H

#include "../../../core/internal.h"
#include "../../tile/divisor.h"

/* REALIGN_DIMS: batch dimensions. REALIGN_EACH: elements of a 16-byte chunk. */
enum {
    REALIGN_DIMS = GK_MAX_DIMS - 2,
    REALIGN_EACH = 8
};

typedef struct RealignMatrix {
    const uint16_t *from;
    void *to;
    int64_t inner_stride, outer_stride; /* of `from` */
    /* The range of an entry's elements, relative to its first row. It is empty (0, 0) if the inner
     * dimension does not have stride 1. */
    int64_t begin, end;
    int32_t inner, ndim;
    uint32_t total;  /* chunks of the copy */
    bool transposed; /* 32-bit elements: strides count these, `inner` counts 16-bit halves */
    /* Divisors by sizes. `batch` and `stride` skip batch dimensions that broadcast. */
    Divisor chunks, outer, batch[REALIGN_DIMS];
    int64_t stride[REALIGN_DIMS];
} RealignMatrix;

/* Plans the copy of a matrix with batch dimensions shape[ndim]. A dimension of stride 0 broadcasts.
 * `stride` is replaced by the copy's strides. Returns false if there are too many chunks. */
static inline bool realign_plan(const void *from, int64_t inner, int64_t outer,
                                int64_t inner_stride, int64_t outer_stride, int ndim,
                                const int64_t *shape, int64_t *stride, RealignMatrix *x) {
    const int64_t chunks = gk_ceil_div(inner, REALIGN_EACH);
    double total = (double)outer * (double)chunks;
    for (int d = 0; d < ndim; ++d) total *= stride[d] ? (double)shape[d] : 1;
    if (inner < 1 || outer < 1 || inner > INT32_MAX - 2 * REALIGN_EACH || total < 1 ||
        total > INT32_MAX)
        return false;
    x->from = (const uint16_t *)from;
    x->to = NULL;
    x->inner_stride = inner_stride;
    x->outer_stride = outer_stride;
    const int64_t last = (outer - 1) * outer_stride;
    x->begin = inner_stride == 1 ? gk_min_i64(0, last) : 0;
    x->end = inner_stride == 1 ? gk_max_i64(0, last) + inner : 0;
    x->inner = (int32_t)inner;
    x->ndim = 0;
    x->total = (uint32_t)total;
    x->transposed = false;
    x->chunks = divisor_of((uint32_t)chunks);
    x->outer = divisor_of((uint32_t)outer);
    for (int d = 0; d < ndim; ++d)
        if (stride[d]) {
            x->batch[x->ndim] = divisor_of((uint32_t)shape[d]);
            x->stride[x->ndim++] = stride[d];
        }
    int64_t step = outer * chunks * REALIGN_EACH;
    for (int d = ndim - 1; d >= 0; --d)
        if (stride[d]) {
            stride[d] = step;
            step *= shape[d];
        }
    return true;
}

/* realign_plan for 32-bit elements; strides count 32-bit elements. */
static inline bool realign_plan_32(const void *from, int64_t inner, int64_t outer,
                                   int64_t inner_stride, int64_t outer_stride, int ndim,
                                   const int64_t *shape, int64_t *stride, RealignMatrix *x) {
    const bool transposed = inner_stride != 1;
    const int64_t from_unit = transposed ? 1 : 2;
    int64_t copied[REALIGN_DIMS];
    for (int d = 0; d < ndim; ++d) copied[d] = from_unit * stride[d];
    if (!realign_plan(from, 2 * inner, outer, inner_stride, from_unit * outer_stride, ndim, shape,
                      copied, x))
        return false;
    for (int d = 0; d < ndim; ++d) stride[d] = copied[d] / 2;
    x->transposed = transposed;
    return true;
}

static inline int64_t realign_bytes(const RealignMatrix *x) { return (int64_t)x->total * 16; }

#endif
