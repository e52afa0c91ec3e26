/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_operands.cuh: a [M, K] and b [K, N] of scaled_gemm's Hopper kernels as TMA reads them:
 * rows of m and of n, both K-major, where they are or laid anew in the workspace. */
#ifndef GPUKERN_CUDA_QUANT_SCALED_OPERANDS_CUH
#define GPUKERN_CUDA_QUANT_SCALED_OPERANDS_CUH

#include "../../host/tensormap.cuh"
#include "../../layout/wgmma.cuh"
#include "relay.cuh"
#include "scaled_kinds.cuh"

struct ScaledOperands {
    Relay a, b;
};

inline ScaledOperands scaled_operands_plan(const gk_scaled_gemm_args *g, size_t *bytes) {
    ScaledOperands x;
    x.a = relay_plan(g->a, bytes);
    x.b = relay_plan(rows_of_n(g->b), bytes);
    return x;
}

/* Lays them where they must be and makes their tensor maps, of boxes of so many rows. */
inline gk_status scaled_operands_run(const gk_context *ctx, const ScaledOperands &x,
                                     const gk_scaled_gemm_args *g, void *workspace, int rows_a,
                                     int rows_b, CUtensorMap *map_a, CUtensorMap *map_b) {
    TensorShape a, b;
    gk_status status = relay_run("scaled_gemm", ctx, x.a, g->a, workspace, &a);
    if (status == GK_OK)
        status = relay_run("scaled_gemm", ctx, x.b, rows_of_n(g->b), workspace, &b);
    if (status == GK_OK) status = make_tensor_map("scaled_gemm", a, wgmma_box(1, rows_a), map_a);
    if (status == GK_OK) status = make_tensor_map("scaled_gemm", b, wgmma_box(1, rows_b), map_b);
    return status;
}

#endif
