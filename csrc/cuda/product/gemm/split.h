/* SPDX-License-Identifier: BSD-3-Clause */
/* split.h: the workspace and the expected time of split-K through memory (split.cuh), for the plans
 * of gemm_plain and gemm_sm80. */
#ifndef GPUKERN_CUDA_GEMM_SPLIT_H
#define GPUKERN_CUDA_GEMM_SPLIT_H

#include "prices.h"
#include "problem.h"

/* Bytes of all partial sums of the workspace. each: bytes of one partial sum. */
static inline size_t partials_bytes(const GemmProblem *p, int splits, size_t each) {
    if (splits == 1) return 0;
    return (size_t)splits * (size_t)p->batch * (size_t)p->m * (size_t)gk_round_up(p->n, 8) * each;
}

/* Expected time in us of the kernel that adds the partial sums. 0 if k is not split. */
static inline double reduce_us(const GemmProblem *p, int64_t splits) {
    if (splits == 1) return 0;
    return REDUCE_US +
           (double)splits * 8.0 * (double)(p->batch * p->m * p->n) / REDUCE_BYTES_PER_US;
}

#endif
