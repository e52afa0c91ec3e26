/* SPDX-License-Identifier: BSD-3-Clause */
/* plain_plan.h: what the plan of gemm_plain (plain_plan.c) hands to its launch. */
#ifndef GPUKERN_CUDA_GEMM_PLAIN_PLAN_H
#define GPUKERN_CUDA_GEMM_PLAIN_PLAN_H

#include "problem.h"

/* The plan's own part, and the kernel's parameter. */
typedef struct PlainPlan {
    GemmProblem p;
    bool a_along_k, a_vectors, b_along_k, b_vectors;
} PlainPlan;

#endif
