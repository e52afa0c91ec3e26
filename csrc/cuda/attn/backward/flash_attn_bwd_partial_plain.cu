/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_partial_plain: flash_attn_bwd_plain with float32 gradients for 16-bit inputs. It
 * serves calls that flash_attn_bwd_partial_sm90a and flash_attn_bwd_partial_sm80 refuse. */
#include "bwd_plain.cuh"

namespace {

const gk_cuda_instance instances[] = {
    {"flash_attn_bwd_partial_plain_bf16",
     GK_BF16,
     plan<__nv_bfloat16>,
     run<__nv_bfloat16, float>,
     {},
     NULL},
    {"flash_attn_bwd_partial_plain_f16", GK_F16, plan<__half>, run<__half, float>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_partial_plain_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
