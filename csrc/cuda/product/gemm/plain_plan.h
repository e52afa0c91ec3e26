/* SPDX-License-Identifier: BSD-3-Clause */
/* plain_plan.h: the plan of gemm_plain. plain_plan.c fills it in, and gemm_plain.cu launches it. */
#ifndef GPUKERN_CUDA_GEMM_PLAIN_PLAN_H
#define GPUKERN_CUDA_GEMM_PLAIN_PLAN_H

#include "problem.h"

/* The part of gk_plan that gemm_plain defines. It is also the kernel's parameter. a_along_k: lanes
 * load a along k. a_vectors: a has 16-byte chunks along m. b likewise. */
typedef struct PlainPlan {
    GemmProblem p;
    bool a_along_k, a_vectors, b_along_k, b_vectors;
} PlainPlan;

#endif
