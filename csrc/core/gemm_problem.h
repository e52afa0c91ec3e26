/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_problem.h: a gemm call as the kernels of both devices see it.
 *
 *   out = activation(alpha a b + beta c + bias), preact = the argument of activation
 *
 * gk_gemm_problem_of reads the call's tensors once. Batch dimensions of size 1 are dropped, and
 * those that can be merged into the rows are merged, so that many small products become one.
 * Broadcast dimensions have stride 0. Strides count elements. */
#ifndef GPUKERN_GEMM_PROBLEM_H
#define GPUKERN_GEMM_PROBLEM_H

#include "internal.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GK_GEMM_BATCH_DIMS = GK_MAX_DIMS - 2
};

/* What happens to a sum. Pointers point at row 0, column 0 of batch entry 0. */
typedef struct gk_gemm_result {
    double alpha, beta;
    const void *bias, *c; /* NULL = none; c is NULL if beta is 0 */
    void *out, *preact;   /* preact NULL = not wanted */
    int64_t bias_row, bias_col, c_row, c_col, out_row, out_col, preact_row, preact_col;
    gk_dtype bias_dtype, c_dtype, out_dtype; /* each is a's dtype or float32; preact has out's */
    gk_activation activation;
    /* CUDA only, false otherwise: 16-byte accesses are aligned at every column that is a multiple
     * of 8. out_vectors is for out and preact together. */
    bool bias_vectors, c_vectors, out_vectors;
} gk_gemm_result;

/* CUDA kernels take it by value as their parameter. */
typedef struct gk_gemm_problem {
    int64_t m, n, k, batch;
    const void *a, *b;
    int64_t a_m, a_k, b_k, b_n;
    gk_gemm_result epilogue;
    int ndim; /* batch dimensions left */
    int64_t shape[GK_GEMM_BATCH_DIMS], a_batch[GK_GEMM_BATCH_DIMS], b_batch[GK_GEMM_BATCH_DIMS],
        c_batch[GK_GEMM_BATCH_DIMS], out_batch[GK_GEMM_BATCH_DIMS],
        preact_batch[GK_GEMM_BATCH_DIMS];
    /* The plan of a CUDA launch, 0 otherwise: block = tile + tiles_m tiles_n (split + splits
     * batch). */
    int tiles_m, tiles_n, group; /* group: rows of tiles that are scheduled together (order.cuh) */
    int splits;      /* 1: the kernel runs the epilogue; else it writes partials (split.cuh) */
    int64_t split_k; /* k of each split except the last */
    void *partials;
} gk_gemm_problem;

gk_gemm_problem gk_gemm_problem_of(const gk_gemm_args *args);

/* The transposed product: out^T = b^T a^T. */
gk_gemm_problem gk_gemm_swapped(const gk_gemm_problem *p);

#ifdef __cplusplus
}
#endif
#endif
