/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_partial_plain: flash_attn_fwd_plain with a float32 out for any q (float64 for
 * float64 inputs). The result may be merged with the old values of out and lse. It serves calls
 * that the tiled kernels refuse. */
#include "fwd_plain.cuh"

namespace {

const gk_cuda_instance instances[] = {
    {"flash_attn_fwd_partial_plain_f32",
     GK_F32,
     plan,
     run<float, true>,
     {},
     blocks_an_sm<float, true>},
    {"flash_attn_fwd_partial_plain_bf16",
     GK_BF16,
     plan,
     run<__nv_bfloat16, true>,
     {},
     blocks_an_sm<__nv_bfloat16, true>},
    {"flash_attn_fwd_partial_plain_f16",
     GK_F16,
     plan,
     run<__half, true>,
     {},
     blocks_an_sm<__half, true>},
    {"flash_attn_fwd_partial_plain_f64",
     GK_F64,
     plan,
     run<double, true>,
     {},
     blocks_an_sm<double, true>},
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_partial_plain_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
