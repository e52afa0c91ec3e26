/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_mma_8bit_sm90a: weight_gemm with int8 and e4m3 weights for up to 16 tokens
 * (weight_mma.cuh). */
#include "weight_mma.cuh"

namespace {

const gk_cuda_instance instances[] = {
    MMA90_ALL("bf16_int8_g128", __nv_bfloat16, INT8, 128, false),
    MMA90_ALL("bf16_e4m3_g128", __nv_bfloat16, E4M3, 128, false),
    MMA90_ALL("f16_int8_g128", __half, INT8, 128, false),
    MMA90_ALL("f16_e4m3_g128", __half, E4M3, 128, false),
};

bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    return plan_cheapest(instances, sizeof instances / sizeof instances[0], ctx, args, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_weight_mma_8bit_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
