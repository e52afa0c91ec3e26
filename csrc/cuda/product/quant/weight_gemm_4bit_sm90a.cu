/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_gemm_4bit_sm90a: weight_gemm of int4, uint4, mxfp4 and nvfp4 by WGMMA
 * (weight_gemm_sm90a.cuh). */
#include "weight_gemm_sm90a.cuh"

namespace {

const gk_cuda_instance instances[] = {
    WGMMA_ROWS("bf16_int4", __nv_bfloat16, NIBBLES),
    WGMMA_ROWS("bf16_e2m1", __nv_bfloat16, E2M1),
    WGMMA_ROWS("f16_int4", __half, NIBBLES),
    WGMMA_ROWS("f16_e2m1", __half, E2M1),
};

bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    return plan_weight_best(instances, sizeof instances / sizeof instances[0], ctx, args, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_weight_gemm_4bit_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
