/* SPDX-License-Identifier: BSD-3-Clause */
/* quantize: codes and scales (quantize.cuh) on every GPU, rounded in plain arithmetic. */
#include "quantize.cuh"

namespace {

const gk_cuda_instance instances[] = {
    {"quantize_f32", GK_F32, plan_quantize, run_quantize<float, CodesBySoftware>, {}, NULL},
    {"quantize_bf16", GK_BF16, plan_quantize, run_quantize<__nv_bfloat16, CodesBySoftware>, {}, NULL},
    {"quantize_f16", GK_F16, plan_quantize, run_quantize<__half, CodesBySoftware>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_quantize_table = {instances, sizeof instances / sizeof instances[0], 80, NULL};
