/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_grouped_mma_sm90a: weight_gemm for groups of at most some 16 rows of a, by mma.sync
 * (weight_mma.cuh). weight_grouped_wgmma_sm90a serves the same forms of weight, and this table
 * leaves it the calls for which it is expected to be faster. */
#include "weight_grouped_price.cuh"
#include "weight_mma.cuh"

namespace {

template <class K>
bool plan_grouped(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                  gk_plan *plan) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    if (gk_gpu_of(ctx->index)->smem_per_block < K::SMEM) return false;
    /* Products read the tokens' panels at the distance of a box of NT rows. */
    if (weight_rows(g->a) <= K::NT - 8) return false;
    if (!plan_weight_groups<K>(instance, ctx, g, false, 2, plan)) return false;
    const int64_t tiles = plan->tasks / 2;
    plan->chunks = 2;
    plan->waves = (double)tiles / weight_mma_clusters<K>(ctx, tiles);
    return true;
}

template <class K>
gk_status run_grouped(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    WeightMmaGroupedParams p = {};
    gk_status status = weight_codes<typename K::F, typename K::Stage, K::ROWS>(
        g, group_rows(g) * g->offs->shape[0], &p.w);
    if (status != GK_OK) return status;
    p.m = (int)weight_rows(g->a);
    p.n = (int)g->n;
    p.tiles = (int)(group_rows(g) / GK_TILE);
    p.box = K::NT;
    status = make_tensor_map("weight_gemm", token_panels(g), wgmma_box(2, p.box, K::TILES), &p.w.a);
    if (status != GK_OK) return status;
    p.f = weight_finish(g);
    p.bias_group = bias_of_groups(g, &p.f);
    if (g->bias) p.bias_group *= (int64_t)gk_dtype_bytes(g->bias->dtype);
    p.plain = is_plain(p.f, g->a.dtype);
    p.groups = weight_groups(ctx, g, K::ROWS);
    return launch<weight_mma_kernel<K>>(
        "weight_gemm", ctx, dim3((unsigned)(2 * weight_mma_clusters<K>(ctx, plan->tasks / 2))),
        K::THREADS, K::SMEM, p, true, 2);
}

#define GROUPED90(name, T, C, GROUP, ZERO, NT, OCC)                          \
    {"weight_gemm_grouped_mma_" name,                                        \
     element<T>::dtype,                                                      \
     plan_grouped<WeightMmaGrouped<WeightForm<T, C, GROUP, ZERO>, NT, OCC>>, \
     run_grouped<WeightMmaGrouped<WeightForm<T, C, GROUP, ZERO>, NT, OCC>>,  \
     {},                                                                     \
     NULL}
/* With two blocks an SM, one computes while the other goes to its next tile. With 16 tokens, the
 * scales of nvfp4 and of groups of 32 with 16-bit scales leave no room for two. */
#define GROUPED90_ALL(name, T, C, GROUP, ZERO)     \
    GROUPED90(name "_8", T, C, GROUP, ZERO, 8, 2), \
        GROUPED90(name "_16", T, C, GROUP, ZERO, 16, ((GROUP) >= (C == E2M1 ? 32 : 64) ? 2 : 1))

const gk_cuda_instance instances[] = {
    GROUPED90_ALL("bf16_int4_g128", __nv_bfloat16, NIBBLES, 128, false),
    GROUPED90("bf16_int4_g128_16_wide", __nv_bfloat16, NIBBLES, 128, false, 16, 1),
    GROUPED90_ALL("bf16_int4_g32", __nv_bfloat16, NIBBLES, 32, false),
    GROUPED90_ALL("bf16_int4_g64", __nv_bfloat16, NIBBLES, 64, false),
    GROUPED90_ALL("bf16_uint4_zero_g128", __nv_bfloat16, NIBBLES, 128, true),
    GROUPED90_ALL("bf16_uint4_zero_g64", __nv_bfloat16, NIBBLES, 64, true),
    GROUPED90_ALL("bf16_mxfp4", __nv_bfloat16, E2M1, 32, false),
    GROUPED90_ALL("bf16_nvfp4", __nv_bfloat16, E2M1, 16, false),
    GROUPED90_ALL("bf16_int8_g128", __nv_bfloat16, INT8, 128, false),
    GROUPED90_ALL("f16_int4_g128", __half, NIBBLES, 128, false),
    GROUPED90_ALL("f16_int4_g64", __half, NIBBLES, 64, false),
    GROUPED90_ALL("f16_uint4_zero_g128", __half, NIBBLES, 128, true),
    GROUPED90_ALL("f16_uint4_zero_g64", __half, NIBBLES, 64, true),
    GROUPED90_ALL("f16_int8_g128", __half, INT8, 128, false),
};

bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    if (!g->offs ||
        !plan_cheapest(instances, sizeof instances / sizeof instances[0], ctx, args, plan))
        return false;
    for (const int nt : {32, 128, 256})
        if (weight_grouped_us(*weight_grouped_tile(true, nt), code_of(g->format), weight_rows(g->a),
                              g->offs->shape[0], g->n, weight_k(g),
                              gk_gpu_of(ctx->index)->num_sms) < plan->us)
            return false;
    return true;
}

} // namespace

extern "C" const gk_cuda_table gk_weight_grouped_mma_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
