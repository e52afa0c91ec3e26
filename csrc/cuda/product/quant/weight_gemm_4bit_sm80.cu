/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_gemm_4bit_sm80: weight_gemm with int4, uint4, mxfp4 and nvfp4 weights by mma.sync
 * (weight_gemm_sm80.cuh). */
#include "weight_gemm_sm80.cuh"

namespace {

const gk_cuda_instance instances[] = {
    WEIGHT_INSTANCES("bf16_int4", __nv_bfloat16, NIBBLES),
    WEIGHT_INSTANCES("bf16_e2m1", __nv_bfloat16, E2M1),
    WEIGHT_INSTANCES("f16_int4", __half, NIBBLES),
    WEIGHT_INSTANCES("f16_e2m1", __half, E2M1),
};

} // namespace

extern "C" const gk_cuda_table gk_weight_gemm_4bit_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
