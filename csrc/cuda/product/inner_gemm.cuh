/* SPDX-License-Identifier: BSD-3-Clause */
/* inner_gemm.cuh: gemm as the second step of another op. The first step of that op writes an
 * operand to the workspace (scaled_decoded.cuh, weight_decoded_sm90a.cu). host/inner_call.cuh says
 * how such a step is planned. */
#ifndef GPUKERN_CUDA_PRODUCT_INNER_GEMM_CUH
#define GPUKERN_CUDA_PRODUCT_INNER_GEMM_CUH

#include "../../core/op.h"
#include "../host/inner_call.cuh"
#include "../kernels.h"

extern "C" const gk_cuda_table *const *gk_cuda_tables(gk_op op, int *num_tables);

/* True if gemm of operands of `dtype` can read or write t. Its kernels know two dtypes of bias, c
 * and out: that of the operands, and float32. gemm's own checks allow no other. But the op that
 * calls it may have another, such as a float16 bias with bfloat16 operands and a float32 result. */
inline bool inner_gemm_knows(const gk_tensor *t, gk_dtype dtype) {
    return !t || t->dtype == dtype || t->dtype == GK_F32;
}

/* Plans a product of operands of `dtype` with the first table that serves it. Returns false if
 * none does. */
inline bool plan_inner_gemm(const gk_context *ctx, gk_dtype dtype, const gk_gemm_args *gemm,
                            gk_plan *to) {
    if (!inner_gemm_knows(&gemm->out, dtype) || !inner_gemm_knows(gemm->bias, dtype) ||
        !inner_gemm_knows(gemm->c, dtype))
        return false;
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(GK_OP_GEMM, &num_tables);
    const int arch = gk_gpu_of(ctx->index)->arch;
    for (int t = 0; t < num_tables; ++t) {
        const gk_cuda_table &table = *tables[t];
        if (table.arch == 90 ? arch != 90 : arch < table.arch) continue;
        if (table.plan && table.plan(ctx, gemm, gk_plan_begin(to, NULL))) return true;
        for (int i = 0; !table.plan && i < table.num_instances; ++i) {
            const gk_cuda_instance *instance = &table.instances[i];
            if (instance->dtype == dtype &&
                instance->plan(instance, ctx, gemm, gk_plan_begin(to, instance)))
                return true;
        }
    }
    return false;
}

#endif
