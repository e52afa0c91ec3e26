/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm_sm90a: scaled_gemm on Hopper with wide tiles (scaled_wide.cuh): instances, plan
 * and launch.
 *
 * Workspace: a copy of each operand that is not K-major with rows of whole 16 bytes.
 *
 * Refuses: K = 0, and some scales that change along k: those of single columns of b, those for 32
 * of k, powers of two in a byte, and all with e5m2. */
#include "../../core/invariant.h"
#include "cheapest.cuh"
#include "scaled_wide.cuh"

namespace {

enum {
    KEY_SUMS,
    KEY_BM,
    KEY_BN,
    KEY_ANY,
    KEY_B_DTYPE,
    KEY_STEP_NS, /* ns for 128 of k of a tile on an H200 (docs/worklog/scaled_gemm.md) */
    /* Time of a tile's prologue and epilogue. 1024 cubed takes 3.8 us with 8 steps of 128 x 64. */
    WIDE_TILE_NS = 1800,
    WIDE_GROUP = 8 /* rows of tiles scheduled together; 16 is equally fast at 4096 and 8192 cubed */
};

struct Plan {
    ScaledOperands operands;
};

Sums sums_of(const gk_scaled_gemm_args *g) {
    if (scales_along_k(g) > 0) return BLOCKS;
    return g->a.dtype == GK_I8 || g->accumulate == GK_FAST ? ALL : PARTS;
}

bool plan_wide(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
               gk_plan *plan) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    if (instance->dtype != g->a.dtype || instance->key[KEY_B_DTYPE] != g->b.dtype) return false;
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1];
    if (k == 0 || m == 0 || n == 0 || m > 1 << 30 || n > 1 << 30 || k > 1 << 30) return false;
    Sums sums = sums_of(g);
    const bool mixed = g->a.dtype != g->b.dtype || g->a.dtype == GK_E5M2;
    if (mixed && sums == ALL) sums = PARTS;
    if (sums == BLOCKS && (mixed || !scales_in_tiles(g))) return false;
    if (instance->key[KEY_SUMS] != sums) return false;
    if (!instance->key[KEY_ANY]) {
        const Finish f = finish_of(g);
        if (!plain_form(g, f) || !panels_fit(f, n) ||
            (sums == BLOCKS && !block_scales_of_both(g).fit))
            return false;
    }
    const int64_t tiles =
        gk_ceil_div(m, instance->key[KEY_BM]) * gk_ceil_div(n, instance->key[KEY_BN]);
    const int64_t waves = gk_ceil_div(tiles, gk_gpu_of(ctx->index)->num_sms);
    size_t bytes = 0;
    gk_own<Plan>(plan).operands = scaled_operands_plan(g, &bytes);
    plan->workspace_bytes = bytes;
    plan->tile[0] = instance->key[KEY_BM];
    plan->tile[1] = instance->key[KEY_BN];
    plan->tile[2] = 128;
    plan->tasks = tiles;
    plan->us =
        1e-3 * (WIDE_TILE_NS + (double)(waves * gk_ceil_div(k, 128) * instance->key[KEY_STEP_NS]));
    plan->kernel = instance;
    return true;
}

template <class P>
gk_status run_wide(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    ScaledParams p = {};
    TensorShape a, b;
    gk_status status = place_operands(ctx, gk_own<Plan>(plan).operands, g, workspace, &a, &b);
    if (status == GK_OK) status = make_row_maps("scaled_gemm", a, 1, P::BM, &p.a, &p.a_end);
    if (status == GK_OK) status = make_row_maps("scaled_gemm", b, 1, P::BN, &p.b, &p.b_end);
    const int64_t m = g->a.shape[0], n = g->b.shape[1], k = g->a.shape[1];
    p.m = (int)m;
    p.n = (int)n;
    p.sa = gk_scales_of(&g->scale_a, m, k, false);
    p.sb = gk_scales_of(&g->scale_b, k, n, true);
    p.f = finish_of(g);
    p.panels = panels_fit(p.f, n);
    p.apart = gk_batch_invariant();
    p.pairs = p.f.out_dtype == GK_F32 && n % 2 == 0 && p.f.out_row % 2 == 0 &&
              (uintptr_t)p.f.out % 8 == 0;
    if (status == GK_OK && p.panels) status = make_panel_map("scaled_gemm", p.f, m, n, &p.out);
    if (P::ALONG_K && P::ANY) {
        p.step_a = p.sa.col_log2 == 7 ? p.sa.col : 0;
        p.step_b = p.sb.row_log2 == 7 ? p.sb.row : 0;
        p.fours = p.step_a == 1 && p.sa.row % 4 == 0 && (uintptr_t)p.sa.data % 16 == 0;
    } else if (P::ALONG_K) {
        const BlockScalesOfBoth x = block_scales_of_both(g);
        p.k_inner_a = x.a.k_inner;
        p.k_inner_b = x.b.k_inner;
        p.sb_bytes = block_sb_bytes(x.b);
        if (status == GK_OK)
            status =
                make_tensor_map("scaled_gemm", x.a.shape, block_scales_box(x.a, P::BM), &p.block_a);
        if (status == GK_OK)
            status = make_tensor_map("scaled_gemm", x.b.shape,
                                     block_scales_box(x.b, x.b.k_inner ? 1 : 4), &p.block_b);
    }
    if (status != GK_OK) return status;
    p.scheduler = tile_scheduler(gk_ceil_div(m, P::BM), gk_ceil_div(n, P::BN), WIDE_GROUP,
                                 gk_ceil_div(k, P::BK));
    return launch_product<P>("scaled_gemm", ctx, p, gk_gpu_of(ctx->index)->num_sms);
}

#define WIDE(name, dtype, A, B, D, MS, BN, sums, any, b_dtype, step_ns) \
    {"scaled_gemm_sm90a_" name,                                         \
     dtype,                                                             \
     plan_wide,                                                         \
     run_wide<ScaledWide<A, B, D, MS, BN, sums, any>>,                  \
     {sums, 128 * MS, BN, any, b_dtype, step_ns},                       \
     NULL}
#define E4M3(name, MS, BN, sums, any, step_ns) \
    WIDE("e4m3_" name, GK_E4M3, e4m3, e4m3, float, MS, BN, sums, any, GK_E4M3, step_ns)
#define INT8(name, MS, BN, sums, any, step_ns) \
    WIDE("i8_" name, GK_I8, int8_t, int8_t, int32_t, MS, BN, sums, any, GK_I8, step_ns)

/* The last column is KEY_STEP_NS. It was measured for instances without "any" at 1024, 2048 and
 * 4096 cubed on an H200. Those with "any" have about 8 % more. */
const gk_cuda_instance instances[] = {
    E4M3("fast_256x128", 2, 128, ALL, false, 850),
    E4M3("fast_128x128", 1, 128, ALL, false, 430),
    E4M3("fast_128x64", 1, 64, ALL, false, 240),
    E4M3("256x128", 2, 128, PARTS, false, 880),
    E4M3("128x128", 1, 128, PARTS, false, 465),
    E4M3("128x64", 1, 64, PARTS, false, 285),
    E4M3("block_256x128", 2, 128, BLOCKS, false, 920),
    E4M3("block_128x128", 1, 128, BLOCKS, false, 475),
    E4M3("block_128x64", 1, 64, BLOCKS, false, 375),
    INT8("256x128", 2, 128, ALL, false, 850),
    INT8("128x128", 1, 128, ALL, false, 420),
    INT8("block_256x128", 2, 128, BLOCKS, false, 1400),
    INT8("block_128x128", 1, 128, BLOCKS, false, 700),
    /* for every other form of scales, epilogue and result */
    E4M3("fast_any_256x128", 2, 128, ALL, true, 920),
    E4M3("fast_any_128x128", 1, 128, ALL, true, 465),
    E4M3("any_256x128", 2, 128, PARTS, true, 950),
    E4M3("any_128x128", 1, 128, PARTS, true, 500),
    E4M3("block_any_256x128", 2, 128, BLOCKS, true, 1080),
    E4M3("block_any_128x128", 1, 128, BLOCKS, true, 550),
    WIDE("e4m3_e5m2_128x128", GK_E4M3, e4m3, e5m2, float, 1, 128, PARTS, true, GK_E5M2, 500),
    WIDE("e5m2_e4m3_128x128", GK_E5M2, e5m2, e4m3, float, 1, 128, PARTS, true, GK_E4M3, 500),
    WIDE("e5m2_128x128", GK_E5M2, e5m2, e5m2, float, 1, 128, PARTS, true, GK_E5M2, 500),
    INT8("any_256x128", 2, 128, ALL, true, 920),
    INT8("any_128x128", 1, 128, ALL, true, 455),
    INT8("block_any_256x128", 2, 128, BLOCKS, true, 1400),
    INT8("block_any_128x128", 1, 128, BLOCKS, true, 700),
};

/* Chooses the instance with the least estimated time. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    return plan_cheapest(instances, sizeof instances / sizeof instances[0], ctx, args, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
