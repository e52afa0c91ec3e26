/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_plain: attention, a warp a row, for what the tiled kernels do not take: float64,
 * and rows that do not begin at a multiple of 16 bytes. Every dtype, every modifier, dense and
 * packed, by the kernel of fwd_plain.cuh. */
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
