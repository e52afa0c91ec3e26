/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_plain: attention with one warp a row, for what the tiled kernels refuse:
 * float64, and rows that are not aligned to 16 bytes. The kernel, in fwd_plain.cuh, takes every
 * dtype and modifier, dense and packed. */
#include "fwd_plain.cuh"

namespace {

const gk_cuda_instance instances[] = {
    {"flash_attn_fwd_plain_f32", GK_F32, plan, run<float>, {}, blocks_an_sm<float>},
    {"flash_attn_fwd_plain_bf16",
     GK_BF16,
     plan,
     run<__nv_bfloat16>,
     {},
     blocks_an_sm<__nv_bfloat16>},
    {"flash_attn_fwd_plain_f16", GK_F16, plan, run<__half>, {}, blocks_an_sm<__half>},
    {"flash_attn_fwd_plain_f64", GK_F64, plan, run<double>, {}, blocks_an_sm<double>},
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_plain_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
