/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_gemm_8bit_sm80: weight_gemm with int8 and e4m3 weights by mma.sync
 * (weight_gemm_sm80.cuh). */
#include "weight_gemm_sm80.cuh"

namespace {

const gk_cuda_instance instances[] = {
    WEIGHT_INSTANCES("bf16_int8", __nv_bfloat16, INT8),
    WEIGHT_INSTANCES("bf16_e4m3", __nv_bfloat16, E4M3),
    WEIGHT_INSTANCES("f16_int8", __half, INT8),
    WEIGHT_INSTANCES("f16_e4m3", __half, E4M3),
};

} // namespace

extern "C" const gk_cuda_table gk_weight_gemm_8bit_sm80_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
