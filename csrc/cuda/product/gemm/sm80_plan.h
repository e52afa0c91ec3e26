/* SPDX-License-Identifier: BSD-3-Clause */
/* sm80_plan.h: the plan of gemm_sm80. sm80_plan.c fills it in, and gemm_sm80.cu launches it. */
#ifndef GPUKERN_CUDA_GEMM_SM80_PLAN_H
#define GPUKERN_CUDA_GEMM_SM80_PLAN_H

#include "mode.h"
#include "problem.h"

/* The part of gk_plan that gemm_sm80 defines. */
typedef struct Sm80Plan {
    GemmProblem p;
    int mode; /* layout of both operands (Mode) */
} Sm80Plan;

#endif
