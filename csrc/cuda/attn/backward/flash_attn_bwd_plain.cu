/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_plain: the gradients of attention for every dtype, alignment and modifier, with or
 * without a mask and biases. The kernels are in bwd_plain.cuh. It refuses no call that checks.c
 * allows. */
#include "bwd_plain.cuh"

namespace {

const gk_cuda_instance instances[] = {
    {"flash_attn_bwd_plain_f32", GK_F32, plan<float>, run<float>, {}, NULL},
    {"flash_attn_bwd_plain_bf16", GK_BF16, plan<__nv_bfloat16>, run<__nv_bfloat16>, {}, NULL},
    {"flash_attn_bwd_plain_f16", GK_F16, plan<__half>, run<__half>, {}, NULL},
    {"flash_attn_bwd_plain_f64", GK_F64, plan<double>, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_plain_table = {instances, 4, 80, NULL};
