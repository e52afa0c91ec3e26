/* SPDX-License-Identifier: BSD-3-Clause */
/* problem.h: a gemm call in the form that every gemm kernel takes, one struct by value.
 *
 *   out = activation(alpha a b + beta c + bias), preact = the argument of activation
 *
 * gemm_problem_of makes it from the call's arguments. Batch dimensions that can be merged into the
 * rows have been merged. Broadcast dimensions have stride 0. a and b may have been exchanged
 * (gemm_swapped). Strides count elements. It is C, because plans hold it. */
#ifndef GPUKERN_CUDA_GEMM_PROBLEM_H
#define GPUKERN_CUDA_GEMM_PROBLEM_H

#include "../../kernels.h"

enum {
    GEMM_BATCH_DIMS = GK_MAX_DIMS - 2
};

/* The epilogue of one element. Pointers point at row 0, column 0 of batch entry 0. */
typedef struct GemmEpilogue {
    double alpha, beta;
    const void *bias, *c; /* NULL = none; c is NULL if beta is 0 */
    void *out, *preact;   /* preact NULL = not wanted */
    int64_t bias_row, bias_col, c_row, c_col, out_row, out_col, preact_row, preact_col;
    gk_dtype bias_dtype, c_dtype, out_dtype; /* each is a's dtype or float32; preact has out's */
    gk_activation activation;
    /* 16-byte accesses are aligned at every column that is a multiple of 8. out_vectors is for out
     * and preact together. */
    bool bias_vectors, c_vectors, out_vectors;
} GemmEpilogue;

typedef struct GemmProblem {
    int64_t m, n, k, batch;
    const void *a, *b;
    int64_t a_m, a_k, b_k, b_n;
    GemmEpilogue epilogue;
    int ndim; /* batch dimensions left */
    int64_t shape[GEMM_BATCH_DIMS], a_batch[GEMM_BATCH_DIMS], b_batch[GEMM_BATCH_DIMS],
        c_batch[GEMM_BATCH_DIMS], out_batch[GEMM_BATCH_DIMS], preact_batch[GEMM_BATCH_DIMS];
    /* The plan of the launch: block = tile + tiles_m tiles_n (split + splits batch). */
    int tiles_m, tiles_n, group; /* group: rows of tiles that are scheduled together (order.cuh) */
    int splits;      /* 1: the kernel runs the epilogue; else it writes partials (split.cuh) */
    int64_t split_k; /* k of each split except the last */
    void *partials;
} GemmProblem;

/* The stride of t along dimension d of ndim. As in torch, dimensions are aligned at the last one;
 * missing ones and those of size 1 broadcast, so their stride is 0. */
static inline int64_t gemm_stride(const gk_tensor *t, int ndim, int d) {
    const int i = d - (ndim - t->ndim);
    return i < 0 || t->shape[i] == 1 ? 0 : t->stride[i];
}

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
    GemmProblem p;
    memset(&p, 0, sizeof p);
    GemmEpilogue *const e = &p.epilogue;
    const gk_tensor *const a = &args->a, *const b = &args->b, *const out = &args->out;
    const gk_tensor *c = args->c && args->beta != 0 ? args->c : NULL;
    const int nd = out->ndim;
    p.a = a->data;
    p.b = b->data;
    p.m = out->shape[nd - 2];
    p.n = out->shape[nd - 1];
    p.k = a->shape[a->ndim - 1];
    p.a_m = a->stride[a->ndim - 2];
    p.a_k = a->stride[a->ndim - 1];
    p.b_k = b->stride[b->ndim - 2];
    p.b_n = b->stride[b->ndim - 1];
    e->alpha = args->alpha;
    e->beta = args->beta;
    e->activation = args->activation;
    e->out = out->data;
    e->out_dtype = out->dtype;
    e->out_row = out->stride[nd - 2];
    e->out_col = 1;
    if (args->preact) {
        e->preact = args->preact->data;
        e->preact_row = args->preact->stride[nd - 2];
        e->preact_col = 1;
    }
    if (args->bias) {
        e->bias = args->bias->data;
        e->bias_dtype = args->bias->dtype;
        e->bias_col = args->bias->stride[0];
    }
    if (c) {
        e->c = c->data;
        e->c_dtype = c->dtype;
        e->c_row = gemm_stride(c, nd, nd - 2);
        e->c_col = gemm_stride(c, nd, nd - 1);
    }
    p.batch = 1;
    for (int d = 0; d < nd - 2; ++d) {
        const int i = p.ndim;
        if (out->shape[d] == 1) continue;
        p.shape[i] = out->shape[d];
        p.a_batch[i] = gemm_stride(a, nd, d);
        p.b_batch[i] = gemm_stride(b, nd, d);
        p.c_batch[i] = c ? gemm_stride(c, nd, d) : 0;
        p.out_batch[i] = out->stride[d];
        p.preact_batch[i] = args->preact ? args->preact->stride[d] : 0;
        p.batch *= p.shape[i];
        ++p.ndim;
    }
    /* If M is 1, the rows have no stride of their own; use the last batch dimension's. */
    if (p.m == 1 && p.ndim > 0) {
        const int i = p.ndim - 1;
        p.a_m = p.a_batch[i];
        e->out_row = p.out_batch[i];
        e->preact_row = p.preact_batch[i];
        if (c) e->c_row = p.c_batch[i];
    }
    /* Merge the innermost batch dimension into the rows if b is broadcast along it and all other
     * tensors are dense there. */
    while (p.ndim > 0 && p.m > 0 && p.batch > 0) {
        const int i = p.ndim - 1;
        if (p.b_batch[i] != 0 || p.a_batch[i] != p.m * p.a_m || p.out_batch[i] != p.m * e->out_row)
            break;
        if (args->preact && p.preact_batch[i] != p.m * e->preact_row) break;
        if (c && p.c_batch[i] != p.m * e->c_row) break;
        p.batch /= p.shape[i];
        p.m *= p.shape[i];
        --p.ndim;
    }
    /* A stride along a dimension of size 1 has no meaning. Set it to the value that suits: 1
     * along k, else 0. */
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
    GemmProblem s = *p;
    GemmEpilogue *const e = &s.epilogue;
    s.m = p->n;
    s.n = p->m;
    s.a = p->b;
    s.b = p->a;
    s.a_m = p->b_n;
    s.a_k = p->b_k;
    s.b_k = p->a_k;
    s.b_n = p->a_m;
    for (int d = 0; d < p->ndim; ++d) {
        s.a_batch[d] = p->b_batch[d];
        s.b_batch[d] = p->a_batch[d];
    }
    e->bias_row = p->epilogue.bias_col;
    e->bias_col = p->epilogue.bias_row;
    e->c_row = p->epilogue.c_col;
    e->c_col = p->epilogue.c_row;
    e->out_row = p->epilogue.out_col;
    e->out_col = p->epilogue.out_row;
    e->preact_row = p->epilogue.preact_col;
    e->preact_col = p->epilogue.preact_row;
    gemm_vectors(&s);
    return s;
}

#endif
