/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_operands.cuh: the operands of Hopper's scaled_gemm as TMA reads them: a [M, K], and b as
 * [N, K], both K-major. Each is used in place or copied to the workspace (k_major_copy.cuh).
 * scaled_operands_plan decides this in the plan, and place_operands copies in the launch. */
#ifndef GPUKERN_CUDA_QUANT_SCALED_OPERANDS_CUH
#define GPUKERN_CUDA_QUANT_SCALED_OPERANDS_CUH

#include "../../host/tensormap.cuh"
#include "../../layout/wgmma.cuh"
#include "k_major_copy.cuh"
#include "scaled_kinds.cuh"

struct ScaledOperands {
    KMajorCopy a, b;
};

inline ScaledOperands scaled_operands_plan(const gk_scaled_gemm_args *g, size_t *bytes) {
    ScaledOperands x;
    x.a = plan_k_major(g->a, bytes);
    x.b = plan_k_major(rows_of_n(g->b), bytes);
    return x;
}

/* Copies the operands that need it, and returns both as tensors for TMA. */
inline gk_status place_operands(const gk_context *ctx, const ScaledOperands &x,
                                const gk_scaled_gemm_args *g, void *workspace, TensorShape *a,
                                TensorShape *b) {
    const gk_status status = copy_k_major("scaled_gemm", ctx, x.a, g->a, workspace, a);
    return status == GK_OK ? copy_k_major("scaled_gemm", ctx, x.b, rows_of_n(g->b), workspace, b)
                           : status;
}

#endif
