/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_mma_4bit_sm90a: weight_gemm with int4, uint4, mxfp4 and nvfp4 weights for up to 16
 * tokens (weight_mma.cuh). */
#include "weight_mma.cuh"

namespace {

const gk_cuda_instance instances[] = {
    MMA90_ALL("bf16_int4_g128", __nv_bfloat16, NIBBLES, 128, false),
    MMA90_ALL("bf16_int4_g64", __nv_bfloat16, NIBBLES, 64, false),
    MMA90_ALL("bf16_int4_g32", __nv_bfloat16, NIBBLES, 32, false),
    MMA90_ALL("bf16_uint4_zero_g128", __nv_bfloat16, NIBBLES, 128, true),
    MMA90_ALL("bf16_uint4_zero_g64", __nv_bfloat16, NIBBLES, 64, true),
    MMA90_ALL("bf16_uint4_zero_g32", __nv_bfloat16, NIBBLES, 32, true),
    MMA90_ALL("bf16_mxfp4", __nv_bfloat16, E2M1, 32, false),
    MMA90_ALL("bf16_nvfp4", __nv_bfloat16, E2M1, 16, false),
    MMA90_ALL("f16_int4_g128", __half, NIBBLES, 128, false),
    MMA90_ALL("f16_int4_g64", __half, NIBBLES, 64, false),
    MMA90_ALL("f16_int4_g32", __half, NIBBLES, 32, false),
    MMA90_ALL("f16_uint4_zero_g128", __half, NIBBLES, 128, true),
    MMA90_ALL("f16_uint4_zero_g64", __half, NIBBLES, 64, true),
    MMA90_ALL("f16_uint4_zero_g32", __half, NIBBLES, 32, true),
    MMA90_ALL("f16_mxfp4", __half, E2M1, 32, false),
    MMA90_ALL("f16_nvfp4", __half, E2M1, 16, false),
};

bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    return plan_cheapest(instances, sizeof instances / sizeof instances[0], ctx, args, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_weight_mma_4bit_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
