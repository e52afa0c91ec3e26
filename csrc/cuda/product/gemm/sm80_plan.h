/* SPDX-License-Identifier: BSD-3-Clause */
/* sm80_plan.h: what the plan of gemm_sm80 (sm80_plan.c) hands to its launch. */
#ifndef GPUKERN_CUDA_GEMM_SM80_PLAN_H
#define GPUKERN_CUDA_GEMM_SM80_PLAN_H

#include "mode.h"
#include "problem.h"

/* The plan's own part. */
typedef struct Sm80Plan {
    GemmProblem p;
    int mode; /* layout of both operands (Mode) */
} Sm80Plan;

#endif
