/* SPDX-License-Identifier: BSD-3-Clause */
/* plan.c: plans and runs a product with an epilogue of the user's, by gemm's own planners. It
 * stands for core/dispatch.c in the library that cmake/GpukernEpilogue.cmake makes: such a library
 * has two families of kernels, Hopper's and gemm_sm80. */
#include "plan.h"

#include "../cuda/product/gemm/tables.h"

gk_status gk_plan_epilogue(const gk_context *ctx, const gk_gemm_args *args, gk_plan *plan) {
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    if (!gpu) return gk_fail(GK_ERR_DEVICE, "there is no CUDA device %d", (int)ctx->index);
#ifdef GPUKERN_HAS_SM90A
    if (gpu->arch == 90 && gk_gemm_sm90a_table.plan(ctx, args, gk_plan_begin(plan, NULL)))
        return GK_OK;
#endif
    if (gpu->arch >= 80 && gk_gemm_sm80_table.plan(ctx, args, gk_plan_begin(plan, NULL)))
        return GK_OK;
    return gk_fail(GK_ERR_UNSUPPORTED,
                   "no kernel on cuda:%d (%s, compute capability %d.%d) serves the call; it needs "
                   "compute capability 8.0 and a grid that fits",
                   (int)ctx->index, gpu->name, gpu->arch / 10, gpu->arch % 10);
}

gk_status gk_run_epilogue(const gk_context *ctx, const gk_gemm_args *args, const gk_plan *plan,
                          void *workspace, size_t workspace_bytes) {
    (void)workspace_bytes;
    const gk_cuda_instance *instance = plan->kernel;
    const int32_t before = gk_gpu_enter(ctx->index);
    if (before < 0) return GK_ERR_DEVICE;
    const gk_status status = instance->run(ctx, args, plan, workspace);
    gk_gpu_leave(before);
    return status;
}
