/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_swapped_plan.cuh: plan and launch of scaled_gemm's swap-AB instances
 * (scaled_swapped.cuh). scaled_gemm_swapab_sm90a.cu and scaled_gemm_mx_sm90a.cu use it.
 *
 * Workspace: a copy of each operand that is not K-major in rows of whole 16 bytes.
 *
 * swapped_plan refuses empty products, sizes over 2^30, more rows of a than a tile of fewer than 32
 * tokens holds, and scales that the instance's way of summing does not apply. */
#ifndef GPUKERN_CUDA_PRODUCT_SCALED_SWAPPED_PLAN_CUH
#define GPUKERN_CUDA_PRODUCT_SCALED_SWAPPED_PLAN_CUH

#include "scaled_swapped.cuh"

enum {
    KEY_NT,
    KEY_SUMS,
    KEY_ANY,
    KEY_BLOCK,
    KEY_KS,
    SWAPPED_GROUP = 8 /* tiles of tokens scheduled together, to read the same weights from L2 */
};

struct SwappedPlan {
    ScaledOperands operands;
};

inline int64_t swapped_tiles(const gk_cuda_instance *instance, const gk_scaled_gemm_args *g) {
    return gk_ceil_div(g->b.shape[1], 64) * gk_ceil_div(g->a.shape[0], instance->key[KEY_NT]);
}

inline bool swapped_plan(const gk_cuda_instance *instance, const gk_context *, const void *args,
                         gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1];
    if (g->a.dtype != instance->dtype || g->b.dtype != instance->dtype) return false;
    if (k == 0 || m == 0 || n == 0 || m > 1 << 30 || n > 1 << 30 || k > 1 << 30) return false;
    if (m > instance->key[KEY_NT] && instance->key[KEY_NT] < 32) return false;
    const int block = scales_along_k(g);
    if ((instance->key[KEY_BLOCK] == 32) != (block == 32)) return false;
    const bool any = instance->key[KEY_ANY];
    const Sums sums = (Sums)instance->key[KEY_SUMS];
    if ((sums == BLOCKS) != (block > 0)) return false;
    /* ALL serves int8 and fast calls only. PARTS also serves fast calls. */
    if (sums == ALL && g->a.dtype != GK_I8 && g->accumulate != GK_FAST) return false;
    if (!any && (!plain_form(g, finish_of(g)) || (block > 0 && !block_scales_of_both(g).fit)))
        return false;
    size_t bytes = 0;
    gk_own<SwappedPlan>(plan).operands = scaled_operands_plan(g, &bytes);
    plan->workspace_bytes = bytes;
    plan->tile[0] = 64;
    plan->tile[1] = instance->key[KEY_NT];
    plan->tile[2] = 128 * instance->key[KEY_KS];
    plan->tasks = 2 * swapped_tiles(instance, g);
    plan->chunks = 2;
    plan->kernel = instance;
    return gk_grid_fits(plan->tasks);
}

/* True if a row's scales for 256 of k are 8 aligned bytes. quantize writes MXFP8 scales in this
 * way. */
inline bool eight_bytes(const gk_scales &s, int k_log2, int64_t along_k, int64_t along_rows,
                        int64_t k) {
    return s.dtype == GK_E8M0 && k_log2 == 5 && along_k == 1 && along_rows % 8 == 0 &&
           k % 256 == 0 && (uintptr_t)s.data % 8 == 0;
}

template <class P>
gk_status swapped_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                      void *workspace) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1];
    const int box = m < P::NT ? (int)m : P::NT;
    SwappedParams p = {};
    TensorShape a, b;
    gk_status status =
        place_operands(ctx, gk_own<SwappedPlan>(plan).operands, g, workspace, &a, &b);
    if (status == GK_OK) status = make_tensor_map("scaled_gemm", a, wgmma_box(1, box), &p.tokens);
    if (status == GK_OK)
        status = make_tensor_map("scaled_gemm", b, wgmma_box(1, P::BW), &p.weights);
    p.m = (int)m;
    p.n = (int)n;
    p.k = (int)k;
    p.stage_bytes = P::KS * 128 * (P::BW + box);
    p.once = m <= P::NT;
    p.sa = gk_scales_of(&g->scale_a, m, k, false);
    p.sb = gk_scales_of(&g->scale_b, k, n, true);
    p.f = finish_of(g);
    if (P::ALONG_K && P::ANY) {
        p.eights_a = p.sa.row_log2 == 0 && eight_bytes(p.sa, p.sa.col_log2, p.sa.col, p.sa.row, k);
        p.eights_b = p.sb.col_log2 == 0 && eight_bytes(p.sb, p.sb.row_log2, p.sb.row, p.sb.col, k);
    } else if (P::ALONG_K) {
        const BlockScalesOfBoth x = block_scales_of_both(g);
        p.k_inner_a = x.a.k_inner;
        p.k_inner_b = x.b.k_inner;
        p.stage_bytes += P::NT * 4 * BLOCK_STEPS + block_sb_bytes(x.b);
        if (status == GK_OK)
            status =
                make_tensor_map("scaled_gemm", x.a.shape, block_scales_box(x.a, P::NT), &p.block_a);
        if (status == GK_OK)
            status = make_tensor_map("scaled_gemm", x.b.shape,
                                     block_scales_box(x.b, x.b.k_inner ? 1 : 4), &p.block_b);
    }
    if (status != GK_OK) return status;
    p.scheduler = tile_scheduler(gk_ceil_div(m, P::NT), gk_ceil_div(n, P::BW), SWAPPED_GROUP,
                                 gk_ceil_div(k, P::BK));
    return launch_product<P>("scaled_gemm", ctx, p,
                             (int64_t)gk_gpu_of(ctx->index)->num_sms * P::PER_SM);
}

#define SWAPPED(name, dtype, E, D, NT, KS, STAGES, sums, any, BLOCK)        \
    {name,                                                                  \
     dtype,                                                                 \
     swapped_plan,                                                          \
     swapped_run<ScaledSwapped<E, D, 1, NT, KS, STAGES, sums, any, BLOCK>>, \
     {NT, sums, any, BLOCK, KS},                                            \
     NULL}

#endif
