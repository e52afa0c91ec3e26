/* SPDX-License-Identifier: BSD-3-Clause */
/* skinny_plan.h: the plan of gemm_skinny. skinny_plan.c fills it in, and gemm_skinny.cu launches
 * it. */
#ifndef GPUKERN_CUDA_GEMM_SKINNY_PLAN_H
#define GPUKERN_CUDA_GEMM_SKINNY_PLAN_H

#include "problem.h"

/* The part of gk_plan that gemm_skinny defines. It is also the kernel's parameter. */
typedef struct SkinnyPlan {
    GemmProblem p;              /* p.group: number of weights of a tile */
    uintptr_t first_w, first_x; /* misaligned: lowest addresses of the weights and the tokens */
} SkinnyPlan;

/* The number of blocks: at most one for each SM, with equally many tiles each. */
static inline int64_t skinny_blocks(const gk_context *ctx, const GemmProblem *p) {
    const int64_t tiles = (int64_t)p->tiles_n * p->batch, sms = gk_gpu_of(ctx->index)->num_sms;
    return gk_max_i64(1, gk_ceil_div(tiles, gk_max_i64(1, gk_ceil_div(tiles, sms))));
}

#endif
