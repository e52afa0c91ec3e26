/* SPDX-License-Identifier: BSD-3-Clause */
/* operands.h: the operands of a Hopper gemm as TMA reads them: in place, or as aligned copies
 * (realign.h). The plan calls operands_of, which decides between the two. The launch calls
 * place_copies, which gives the copies their addresses. This header is C, because plans hold an
 * Operands. */
#ifndef GPUKERN_CUDA_GEMM_OPERANDS_H
#define GPUKERN_CUDA_GEMM_OPERANDS_H

#include "../../host/tensor_shape.h"
#include "mode.h"
#include "prices.h"
#include "problem.h"
#include "realign.h"

#include <stdlib.h>

/* An operand as a tensor for TMA. x: its size along m or n. along_x: the stride along x is 1, else
 * the stride along k. */
static inline TensorShape operand_of(const void *data, gk_dtype dtype, int64_t x, int64_t k,
                                     int64_t x_stride, int64_t k_stride, const GemmProblem *p,
                                     const int64_t *batch, bool along_x) {
    TensorShape s = {data,
                     dtype,
                     {along_x ? x : k, along_x ? k : x, 1, 1, 1},
                     {1, along_x ? k_stride : x_stride, 0, 0, 0},
                     false};
    for (int d = 0; d < p->ndim && d < TENSOR_DIMS - 2; ++d)
        if (batch[d]) {
            s.size[2 + d] = p->shape[d];
            s.stride[2 + d] = batch[d];
        }
    return s;
}

/* The operands that TMA reads: the tensors themselves, or their copies. */
typedef struct Operands {
    GemmProblem p; /* with the strides of the copies */
    int mode;
    bool copied[2];   /* a, b */
    TensorShape x[2]; /* a, b */
    RealignMatrix copies[2];
    int64_t at[2]; /* offset of each copy in the workspace */
    int64_t bytes; /* of all copies */
} Operands;

/* Returns 0 if TMA can read the operand in place as K-major, 1 if it can as MN-major, else -1.
 * needed: 0 or 1 if only this layout is acceptable, else -1. */
static inline int as_it_lies(const void *data, gk_dtype dtype, int64_t x, int64_t k,
                             int64_t x_stride, int64_t k_stride, const GemmProblem *p,
                             const int64_t *batch, int needed, TensorShape *s) {
    for (int along = 0; along < 2; ++along) {
        if ((along ? x_stride : k_stride) != 1 || (needed >= 0 && along != needed)) continue;
        *s = operand_of(data, dtype, x, k, x_stride, k_stride, p, batch, along);
        if (tensor_map_fits(*s)) return along;
    }
    return -1;
}

/* Returns the dimension that should have stride 1 in a copy: 1 for x (m or n), 0 for k. */
static inline int copy_along(int64_t x, int64_t k, int64_t x_stride, int64_t k_stride) {
    if (x == 1 || k == 1) return k == 1;
    if (x_stride == 1 || k_stride == 1) return k_stride != 1;
    return llabs(x_stride) < llabs(k_stride);
}

/* The layout that an operand must have: 0 for K-major, 1 for MN-major, -1 for either. WGMMA reads
 * tf32 operands from shared memory only if they are K-major. With swap-AB, A comes through
 * registers instead and must be MN-major (tf32.cuh). */
static inline int needed_along(gk_dtype dtype, bool swapab, bool b) {
    return dtype != GK_F32 ? -1 : swapab && !b;
}

/* True if the numbers of tiles fit in 32 bits, and the coordinates of a tile beyond the last one,
 * too. */
static inline bool counts_fit(const GemmProblem *p) {
    if (p->m < 1 || p->n < 1 || p->k < 1 || p->batch < 1) return false;
    if (p->m > INT32_MAX - 512 || p->n > INT32_MAX - 512) return false;
    return (double)gk_ceil_div(p->m, 32) * (double)gk_ceil_div(p->n, 32) * (double)p->batch <=
           INT32_MAX;
}

/* Finds operand i (0: a, 1: b) in place, or plans a copy of it. needed: as in as_it_lies. copy:
 * always copy. Returns false if neither is possible. */
static inline bool find_operand(int i, gk_dtype dtype, int needed, bool copy, Operands *o) {
    GemmProblem *const p = &o->p;
    const int64_t each = gk_chunk_of(dtype);
    const void **const data = i ? &p->b : &p->a;
    int64_t *const x_stride = i ? &p->b_n : &p->a_m, *const k_stride = i ? &p->b_k : &p->a_k,
                   *const batch = i ? p->b_batch : p->a_batch;
    const int64_t x = i ? p->n : p->m;
    const bool short_rows =
        i && dtype != GK_F32 && x > 1 && x <= REALIGN_ROW && *x_stride == 1 && *k_stride != 1;
    if (short_rows) needed = 0;
    int along =
        copy ? -1
             : as_it_lies(*data, dtype, x, p->k, *x_stride, *k_stride, p, batch, needed, &o->x[i]);
    o->copied[i] = along < 0;
    if (o->copied[i]) {
        RealignMatrix *const matrix = &o->copies[i];
        along = needed < 0 ? copy_along(x, p->k, *x_stride, *k_stride) : needed;
        const int64_t inner = along ? x : p->k, outer = along ? p->k : x;
        const int64_t inner_stride = along ? *x_stride : *k_stride,
                      outer_stride = along ? *k_stride : *x_stride;
        const bool good = dtype == GK_F32
                              ? realign_plan_32(*data, inner, outer, inner_stride, outer_stride,
                                                p->ndim, p->shape, batch, matrix)
                              : realign_plan(*data, inner, outer, inner_stride, outer_stride,
                                             p->ndim, p->shape, batch, matrix);
        if (!good) return false;
        o->bytes = gk_round_up(o->bytes, 128);
        *data = NULL;
        o->at[i] = o->bytes;
        o->bytes += realign_bytes(matrix);
        *(along ? x_stride : k_stride) = 1;
        *(along ? k_stride : x_stride) = gk_round_up(inner, each);
    }
    o->mode |= along << i;
    return true;
}

/* Finds both operands of o->p, in place or as planned copies, and fills in *o. Returns false if TMA
 * can read an operand in neither way. The copies get their addresses later (place_copies). */
static inline bool operands_of(gk_dtype dtype, bool swapab, Operands *o) {
    GemmProblem *const p = &o->p;
    if (!counts_fit(p)) return false;
    if (p->ndim > TENSOR_DIMS - 2) gemm_join_batch(p);
    const bool both = p->ndim > TENSOR_DIMS - 2; /* dense copies need fewer batch dimensions */
    o->mode = 0;
    o->bytes = 0;
    for (int i = 0; i < 2; ++i)
        if (!find_operand(i, dtype, needed_along(dtype, swapab, i), both, o)) return false;
    if (o->bytes == 0) return true;
    if (both) gemm_join_batch(p);
    if (p->ndim > TENSOR_DIMS - 2) return false;
    o->x[0] =
        operand_of(p->a, dtype, p->m, p->k, p->a_m, p->a_k, p, p->a_batch, o->mode & A_ALONG_M);
    o->x[1] =
        operand_of(p->b, dtype, p->n, p->k, p->b_n, p->b_k, p, p->b_batch, o->mode & B_ALONG_N);
    return tensor_map_fits(o->x[0]) && tensor_map_fits(o->x[1]);
}

/* Gives the copies their addresses in the call's workspace and moves them to the front of
 * `copies`. Returns their number. */
static inline int place_copies(void *workspace, Operands *o) {
    int count = 0;
    for (int i = 0; i < 2; ++i) {
        if (!o->copied[i]) continue;
        void *const to = (char *)workspace + o->at[i];
        o->copies[i].to = to;
        o->x[i].data = to;
        *(i ? &o->p.b : &o->p.a) = to;
        o->copies[count++] = o->copies[i];
    }
    return count;
}

#endif
