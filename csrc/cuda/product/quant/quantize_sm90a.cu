/* SPDX-License-Identifier: BSD-3-Clause */
/* quantize_sm90a: codes and scales (quantize.cuh) on Hopper. Codes are rounded by cvt. Integer
 * arithmetic takes 12 instructions a value, which is longer than moving its bytes. */
#include "../../tile/begins_sm90a.cuh"
#include "../../tile/codes_sm90a.cuh"
#include "quantize.cuh"

namespace {

struct Hopper : CodesByHardware, BeginsOverlapped {
    static __device__ __forceinline__ void wait_for_previous() { griddepcontrol_wait(); }
    static __device__ __forceinline__ void let_next_begin() { griddepcontrol_launch_dependents(); }
};

const gk_cuda_instance instances[] = {
    {"quantize_sm90a_f32", GK_F32, plan_quantize, run_quantize<float, Hopper>, {}, NULL},
    {"quantize_sm90a_bf16", GK_BF16, plan_quantize, run_quantize<__nv_bfloat16, Hopper>, {}, NULL},
    {"quantize_sm90a_f16", GK_F16, plan_quantize, run_quantize<__half, Hopper>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_quantize_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
