/* SPDX-License-Identifier: BSD-3-Clause */
/* problem.h: the problem of core/gemm_problem.h as CUDA's gemm kernels take it.
 *
 * gemm_problem_of adds two things that the GPU's plans need. It gives dimensions of size 1 strides
 * that allow vector loads, and it notes which tensors allow 16-byte accesses. gemm_swapped
 * exchanges a and b. This header is C, because plans hold a GemmProblem. */
#ifndef GPUKERN_CUDA_GEMM_PROBLEM_H
#define GPUKERN_CUDA_GEMM_PROBLEM_H

#include "../../../core/gemm_problem.h"
#include "../../kernels.h"

typedef gk_gemm_problem GemmProblem;
typedef gk_gemm_result GemmEpilogue;

/* True if every row and every batch entry begins at a multiple of 16 bytes. */
static inline bool gemm_aligned(const void *data, gk_dtype dtype, int64_t row, const int64_t *batch,
                                int ndim) {
    const int64_t bits = gk_bits_of(dtype);
    bool good = (uintptr_t)data % 16 == 0 && row * bits % 128 == 0;
    for (int d = 0; d < ndim; ++d) good = good && batch[d] * bits % 128 == 0;
    return good;
}

/* Sets the flags for 16-byte accesses from the strides. */
static inline void gemm_vectors(GemmProblem *p) {
    GemmEpilogue *e = &p->epilogue;
    e->bias_vectors =
        e->bias && e->bias_col == 1 && gemm_aligned(e->bias, e->bias_dtype, e->bias_row, NULL, 0);
    e->c_vectors =
        e->c && e->c_col == 1 && gemm_aligned(e->c, e->c_dtype, e->c_row, p->c_batch, p->ndim);
    e->out_vectors =
        e->out_col == 1 && gemm_aligned(e->out, e->out_dtype, e->out_row, p->out_batch, p->ndim);
    if (e->preact)
        e->out_vectors =
            e->out_vectors && e->preact_col == 1 &&
            gemm_aligned(e->preact, e->out_dtype, e->preact_row, p->preact_batch, p->ndim);
}

static inline GemmProblem gemm_problem_of(const gk_gemm_args *args) {
    GemmProblem p = gk_gemm_problem_of(args);
    GemmEpilogue *const e = &p.epilogue;
    /* A stride along a dimension of size 1 has no meaning. Set it to the value that allows vector
     * loads: 1 along k, else 0. */
    if (p.m == 1) {
        p.a_m = 0;
        e->out_row = e->preact_row = e->c_row = 0;
    }
    if (p.n == 1) {
        p.b_n = 0;
        e->c_col = 0;
    }
    if (p.k == 1) {
        p.a_k = 1;
        p.b_k = p.b_n == 1 ? 0 : 1;
    }
    gemm_vectors(&p);
    return p;
}

/* Merges neighbouring batch dimensions that are dense in every tensor. */
static inline void gemm_join_batch(GemmProblem *p) {
    int64_t *const strides[] = {p->a_batch, p->b_batch, p->c_batch, p->out_batch, p->preact_batch};
    for (int d = p->ndim - 2; d >= 0; --d) {
        bool dense = true;
        for (int s = 0; s < 5; ++s)
            dense = dense && strides[s][d] == p->shape[d + 1] * strides[s][d + 1];
        if (!dense) continue;
        p->shape[d + 1] *= p->shape[d];
        for (int i = d; i + 1 < p->ndim; ++i) {
            p->shape[i] = p->shape[i + 1];
            for (int s = 0; s < 5; ++s) strides[s][i] = strides[s][i + 1];
        }
        --p->ndim;
    }
}

/* The transposed product: out^T = b^T a^T. */
static inline GemmProblem gemm_swapped(const GemmProblem *p) {
    GemmProblem s = gk_gemm_swapped(p);
    gemm_vectors(&s);
    return s;
}

#endif
