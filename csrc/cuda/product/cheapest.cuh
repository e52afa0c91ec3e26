/* SPDX-License-Identifier: BSD-3-Clause */
/* cheapest.cuh: plans a call with the instance of a table that has the least estimated time. */
#ifndef GPUKERN_CUDA_PRODUCT_CHEAPEST_CUH
#define GPUKERN_CUDA_PRODUCT_CHEAPEST_CUH

#include "../kernels.h"

/* On a tie the first instance wins. Every plan of the table must set `us`. */
inline bool plan_cheapest(const gk_cuda_instance *instances, int count, const gk_context *ctx,
                          const void *args, gk_plan *plan) {
    const gk_cuda_instance *best = NULL;
    double us = 0;
    for (int i = 0; i < count; ++i) {
        if (!instances[i].plan(&instances[i], ctx, args, gk_plan_begin(plan, NULL))) continue;
        if (best && plan->us >= us) continue;
        best = &instances[i];
        us = plan->us;
    }
    return best && best->plan(best, ctx, args, gk_plan_begin(plan, NULL));
}

#endif
