/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_wgmma_4bit_sm90a: weight_gemm with int4, uint4, mxfp4 and nvfp4 weights for more than
 * 16 tokens (weight_wgmma.cuh). */
#include "weight_wgmma.cuh"

namespace {

const gk_cuda_instance instances[] = {
    WGMMA90_ALL("bf16_int4_g128", __nv_bfloat16, NIBBLES, 128, false),
    WGMMA90_ALL("bf16_int4_g64", __nv_bfloat16, NIBBLES, 64, false),
    WGMMA90_ALL("bf16_int4_g32", __nv_bfloat16, NIBBLES, 32, false),
    WGMMA90_ALL("bf16_uint4_zero_g128", __nv_bfloat16, NIBBLES, 128, true),
    WGMMA90_ALL("bf16_uint4_zero_g64", __nv_bfloat16, NIBBLES, 64, true),
    WGMMA90_ALL("bf16_uint4_zero_g32", __nv_bfloat16, NIBBLES, 32, true),
    WGMMA90_ALL("bf16_mxfp4", __nv_bfloat16, E2M1, 32, false),
    WGMMA90_ALL("bf16_nvfp4", __nv_bfloat16, E2M1, 16, false),
    WGMMA90_ALL("f16_int4_g128", __half, NIBBLES, 128, false),
    WGMMA90_ALL("f16_int4_g64", __half, NIBBLES, 64, false),
    WGMMA90_ALL("f16_int4_g32", __half, NIBBLES, 32, false),
    WGMMA90_ALL("f16_uint4_zero_g128", __half, NIBBLES, 128, true),
    WGMMA90_ALL("f16_uint4_zero_g64", __half, NIBBLES, 64, true),
    WGMMA90_ALL("f16_uint4_zero_g32", __half, NIBBLES, 32, true),
    WGMMA90_ALL("f16_nvfp4", __half, E2M1, 16, false),
};

bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    if (weight_rows(((const gk_weight_gemm_args *)args)->a) >= WEIGHT_DECODED_ROWS) return false;
    return plan_cheapest(instances, sizeof instances / sizeof instances[0], ctx, args, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_weight_wgmma_4bit_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
