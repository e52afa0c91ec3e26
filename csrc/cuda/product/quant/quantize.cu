/* SPDX-License-Identifier: BSD-3-Clause */
/* quantize: codes and scales (quantize.cuh) on every GPU. Codes are rounded in integer
 * arithmetic. */
#include "../../tile/begins.cuh"
#include "quantize.cuh"

namespace {

struct Any : CodesBySoftware, BeginsAlone {
    static __device__ __forceinline__ void wait_for_previous() {}
    static __device__ __forceinline__ void let_next_begin() {}
};

const gk_cuda_instance instances[] = {
    {"quantize_f32", GK_F32, plan_quantize, run_quantize<float, Any>, {}, NULL},
    {"quantize_bf16", GK_BF16, plan_quantize, run_quantize<__nv_bfloat16, Any>, {}, NULL},
    {"quantize_f16", GK_F16, plan_quantize, run_quantize<__half, Any>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_quantize_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
