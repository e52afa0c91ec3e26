/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_gemm_8bit_sm90a: weight_gemm of int8 and e4m3 by WGMMA (weight_gemm_sm90a.cuh). */
#include "weight_gemm_sm90a.cuh"

namespace {

const gk_cuda_instance instances[] = {
    WGMMA_ROWS("bf16_int8", __nv_bfloat16, INT8),
    WGMMA_ROWS("bf16_e4m3", __nv_bfloat16, E4M3),
    WGMMA_ROWS("f16_int8", __half, INT8),
    WGMMA_ROWS("f16_e4m3", __half, E4M3),
};

bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    return plan_weight_best(instances, sizeof instances / sizeof instances[0], ctx, args, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_weight_gemm_8bit_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
