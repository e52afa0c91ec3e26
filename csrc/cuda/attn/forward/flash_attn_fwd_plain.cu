/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_plain: attention with one warp a row, for the calls that the tiled kernels refuse:
 * float64, rows that are not aligned to 16 bytes, float32 with dropout, a mask or biases, and a
 * head_dim above 256 that flash_attn_fwd_wide_sm90a does not serve. The kernel is in fwd_plain.cuh.
 * It takes every dtype and modifier, dense and packed.
 *
 * This file also has the kernel that computes single rows again after the tiled kernels with masks
 * (fwd_mend.cuh). */
#include "fwd_mend.cuh"
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

/* ---- rows that the tiled kernels could not compute (fwd_mend.cuh) ---- */
struct MendParams {
    Params plain;
    const uint8_t *spoilt;
    int tiles, tile_rows;
};

template <class T>
__global__ void __launch_bounds__(THREADS, 4)
    flash_attn_fwd_mend_kernel(const __grid_constant__ MendParams x) {
    if (!x.spoilt[blockIdx.x]) return;
    const int tile = blockIdx.x % x.tiles, rest = blockIdx.x / x.tiles,
              heads = x.plain.problem.heads_q;
    for (int group = tile * x.tile_rows / WARPS; group < (tile + 1) * x.tile_rows / WARPS; ++group)
        attend_rows<T, NARROW, false, true, true>(x.plain, group, rest % heads, rest / heads);
}

template <class T>
gk_status mend(const gk_context *ctx, const gk_flash_attn_args *a, const uint8_t *spoilt,
               int tile_rows) {
    MendParams x = {};
    x.plain.problem = problem_of(ctx, a);
    x.plain.drop = dropout_of(a);
    const Problem &p = x.plain.problem;
    x.plain.scores = scores_of(gk_scores_of(a), p.seq_q, p.seq_k);
    x.spoilt = spoilt;
    x.tile_rows = tile_rows;
    x.tiles = (int)gk_ceil_div(p.seq_q, tile_rows);
    const int64_t blocks = (int64_t)x.tiles * p.heads_q * p.batch;
    return launch<flash_attn_fwd_mend_kernel<T>>("gk_flash_attn_fwd", ctx, dim3((unsigned)blocks),
                                                 THREADS, 0, x);
}

} // namespace

gk_status fwd_mend(const gk_context *ctx, const gk_flash_attn_args *a, const uint8_t *spoilt,
                   int tile_rows) {
    switch (a->q.dtype) {
    case GK_BF16: return mend<__nv_bfloat16>(ctx, a, spoilt, tile_rows);
    case GK_F16: return mend<__half>(ctx, a, spoilt, tile_rows);
    default: return gk_no_case("gk_flash_attn_fwd", a->q.dtype);
    }
}

extern "C" const gk_cuda_table gk_flash_attn_fwd_plain_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
