/* SPDX-License-Identifier: BSD-3-Clause */
/* problem.cuh: where a batch entry of a gemm's problem begins, on the device. */
#ifndef GPUKERN_CUDA_GEMM_PROBLEM_CUH
#define GPUKERN_CUDA_GEMM_PROBLEM_CUH

#include "problem.h"

struct GemmPlace { /* offsets of a batch entry, in elements */
    int64_t a, b, c, out, preact;
};

__device__ __forceinline__ GemmPlace gemm_place(const GemmProblem &p, int64_t batch) {
    GemmPlace at = {0, 0, 0, 0, 0};
    for (int d = p.ndim - 1; d >= 0; --d) {
        const int64_t x = batch % p.shape[d];
        batch /= p.shape[d];
        at.a += x * p.a_batch[d];
        at.b += x * p.b_batch[d];
        at.c += x * p.c_batch[d];
        at.out += x * p.out_batch[d];
        at.preact += x * p.preact_batch[d];
    }
    return at;
}

#endif
