/* SPDX-License-Identifier: BSD-3-Clause */
/* plan.h: the plan and the run of a product with an epilogue of the user's. */
#ifndef GPUKERN_EPILOGUE_PLAN_H
#define GPUKERN_EPILOGUE_PLAN_H

#include "../core/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* args: a checked EpilogueCall (call.h) on a GPU. */
gk_status gk_plan_epilogue(const gk_context *ctx, const gk_gemm_args *args, gk_plan *plan);
gk_status gk_run_epilogue(const gk_context *ctx, const gk_gemm_args *args, const gk_plan *plan,
                          void *workspace, size_t workspace_bytes);

#ifdef __cplusplus
}
#endif
#endif
