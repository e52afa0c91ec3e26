/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_partial_dq_sm80: dq alone, in float32, for flash_attn_bwd_partial_sm80. The kernel
 * is in bwd_dq_sm80.cuh. Its MODIFIED form serves every call, with or without softcap and ALiBi. */
#include "bwd_dq_sm80.cuh"

namespace {

template <class T> gk_status dq(const gk_context *ctx, const Bwd &g) {
    typedef BwdDq128 Tile;
    const dim3 grid((unsigned)(gk_ceil_div(g.p.seq_q, Tile::bq) * g.p.heads_q * g.p.batch));
    return launch<bwd_dq_kernel<T, Tile, true, false, float>>(
        "gk_flash_attn_bwd", ctx, grid, DqSmem<Tile>::THREADS, DqSmem<Tile>::bytes, g);
}

} // namespace

gk_status bwd_partial_dq(const gk_context *ctx, gk_dtype dtype, const Bwd &g) {
    return dtype == GK_BF16 ? dq<__nv_bfloat16>(ctx, g) : dq<__half>(ctx, g);
}
