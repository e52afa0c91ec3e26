/* SPDX-License-Identifier: BSD-3-Clause */
/* tables.h: gemm's tables of instances. sm90_plan.c, skinny_plan.c, sm80_plan.c and plain_plan.c
 * make them from instances.def. */
#ifndef GPUKERN_CUDA_GEMM_TABLES_H
#define GPUKERN_CUDA_GEMM_TABLES_H

#include "../../kernels.h"

/* gk_gemm_sm90a_table also plans for the next three tables. */
extern const gk_cuda_table gk_gemm_sm90a_table, gk_gemm_pingpong_sm90a_table,
    gk_gemm_swapab_sm90a_table, gk_gemm_tf32_sm90a_table;
extern const gk_cuda_table gk_gemm_skinny_table, gk_gemm_sm80_table, gk_gemm_plain_table;

#endif
