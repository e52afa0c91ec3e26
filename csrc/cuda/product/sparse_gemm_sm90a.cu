/* SPDX-License-Identifier: BSD-3-Clause */
/* sparse_gemm_sm90a: sparse_gemm on Hopper (sparse_wide.cuh): instances, plan and launch.
 *
 * Workspace: a copy of an 8-bit a that is not K-major with rows of whole 16 bytes, and a copy of
 * meta if its rows are no multiples of 16 bytes (K no multiple of 128).
 *
 * Refuses: K = 0, values whose rows are no multiples of 16 bytes (K is no multiple of 32, or of 16
 * with 16-bit elements), a 16-bit a that is not K-major with rows of whole 16 bytes, and e5m2,
 * which product_plain computes. */
#include "cheapest.cuh"
#include "quant/k_major_copy.cuh"
#include "sparse_wide.cuh"

namespace {

enum {
    KEY_BW,
    KEY_BT,
    KEY_SUMS,
    KEY_STEP_NS /* ns for a stage of a tile on an H200 (docs/worklog/sparse_gemm.md) */
};

struct Plan {
    KMajorCopy a, meta; /* a: of 8-bit elements only */
};

TensorShape shape_of(const gk_tensor &t) {
    const gk_dtype dtype = gk_dtype_bytes(t.dtype) == 1 ? GK_U8 : t.dtype;
    return {t.data, dtype, {t.shape[1], t.shape[0], 1, 1, 1}, {1, t.stride[0], 0, 0, 0}, false};
}

Sums sums_of(const gk_sparse_gemm_args *g) {
    return g->a.dtype == GK_E4M3 && g->accumulate == GK_PRECISE ? PARTS : ALL;
}

/* The number of steps of k. With 8-bit elements it is even, and the last step may be all zeros. */
int64_t steps_of(const gk_sparse_gemm_args *g) {
    const int64_t bytes = g->a.shape[1] * gk_dtype_bytes(g->a.dtype);
    return gk_dtype_bytes(g->a.dtype) == 1 ? 2 * gk_ceil_div(bytes, 256) : gk_ceil_div(bytes, 128);
}

/* The number of blocks of a cluster. It is two if there are many columns of tiles, even if the
 * second block of the last cluster then has no weights. */
int pair_of(int64_t tiles_n) { return tiles_n % 2 == 0 || tiles_n > SPARSE_PAIRS ? 2 : 1; }

bool plan_instance(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                   gk_plan *plan) {
    const gk_sparse_gemm_args *g = (const gk_sparse_gemm_args *)args;
    const int64_t m = g->a.shape[0], k = g->a.shape[1], n = g->values.shape[0], most = 1 << 30;
    if (m == 0 || n == 0 || k == 0 || m > most || n > most || k > most) return false;
    if (g->a.dtype != instance->dtype || g->values.dtype != instance->dtype) return false;
    if (instance->key[KEY_SUMS] != sums_of(g)) return false;
    if (!tensor_map_fits(shape_of(g->values))) return false;
    Plan *x = &gk_own<Plan>(plan);
    size_t bytes = 0;
    *x = {};
    if (gk_dtype_bytes(g->a.dtype) == 1)
        x->a = plan_k_major(g->a, &bytes);
    else if (g->a.stride[1] != 1 || !tensor_map_fits(shape_of(g->a)))
        return false;
    x->meta = plan_k_major(g->meta, &bytes);
    const int bw = instance->key[KEY_BW], bt = instance->key[KEY_BT];
    const int64_t tiles_m = gk_ceil_div(m, bt), tiles_n = gk_ceil_div(n, bw),
                  pair = pair_of(tiles_n);
    const int64_t waves = gk_ceil_div(tiles_m * gk_ceil_div(tiles_n, pair),
                                      gk_clusters_of(gk_gpu_of(ctx->index)->num_sms, pair));
    plan->workspace_bytes = bytes;
    plan->tile[0] = bt;
    plan->tile[1] = bw;
    plan->tile[2] = 128 / gk_dtype_bytes(g->a.dtype);
    plan->tasks = tiles_m * tiles_n;
    plan->us = 1e-3 * (double)(waves * (SPARSE_TILE_NS + steps_of(g) * instance->key[KEY_STEP_NS]));
    plan->kernel = instance;
    return gk_grid_fits(plan->tasks);
}

template <class P>
gk_status run_instance(const gk_context *ctx, const void *args, const gk_plan *plan,
                       void *workspace) {
    static const char op[] = "sparse_gemm";
    const gk_sparse_gemm_args *g = (const gk_sparse_gemm_args *)args;
    const Plan &x = gk_own<Plan>(plan);
    SparseParams p = {};
    const int64_t m = g->a.shape[0], k = g->a.shape[1], n = g->values.shape[0];
    TensorShape a = shape_of(g->a), meta;
    gk_status status = copy_k_major(op, ctx, x.meta, g->meta, workspace, &meta);
    if (status == GK_OK && P::BYTES == 1) status = copy_k_major(op, ctx, x.a, g->a, workspace, &a);
    if (status == GK_OK) status = make_row_maps(op, a, P::BYTES, P::BT / 2, &p.a, &p.a_end);
    if (status == GK_OK)
        status =
            make_tensor_map(op, shape_of(g->values), smem_rows(P::BYTES, 64, P::BW), &p.values);
    if (status == GK_OK)
        status = make_tensor_map(op, meta, smem_rows(1, P::META_ROW, P::BW), &p.meta);
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    p.panels = panels_fit(p.f, n);
    if (status == GK_OK && p.panels) {
        const TensorShape out = {
            p.f.out, p.f.out_dtype, {n, m, 1, 1, 1}, {1, p.f.out_row, 0, 0, 0}, false};
        status = make_tensor_map(op, out, smem_rows(2, P::PANEL_ROW, 64), &p.out);
    }
    if (status != GK_OK) return status;
    p.m = (int)m;
    p.n = (int)n;
    p.sa = gk_scales_of(g->scale_a, m, k, false);
    p.sb = gk_scales_of(g->scale_b, k, n, true);
    const int64_t tiles_n = gk_ceil_div(n, P::BW);
    p.pair = pair_of(tiles_n);
    /* The clusters that run at once cover a square of the result. */
    p.scheduler = tile_scheduler(gk_ceil_div(m, P::BT), gk_ceil_div(tiles_n, p.pair),
                                 P::BT < P::BW ? 2 * SPARSE_GROUP : SPARSE_GROUP, steps_of(g));
    return launch_product<P>(op, ctx, p, gk_gpu_of(ctx->index)->num_sms);
}

#define SPARSE(name, dtype, T, MS, CONSUMERS, BT, sums, step_ns) \
    {"sparse_gemm_sm90a_" name,                                  \
     dtype,                                                      \
     plan_instance,                                              \
     run_instance<SparseWide<T, MS, CONSUMERS, BT, sums>>,       \
     {64 * MS * CONSUMERS, BT, sums, step_ns},                   \
     NULL}
/* The names have tokens x weight rows of a block. The last argument is KEY_STEP_NS. It was measured
 * at 4096 cubed, and for 64 tokens at 8192 x 8192. That of 64 x 128 is an estimate. */
#define SPARSE_ALL(label, dtype, T, wide_ns)                    \
    SPARSE(label "256x128", dtype, T, 1, 2, 256, ALL, wide_ns), \
        SPARSE(label "64x128", dtype, T, 1, 2, 64, ALL, 280),   \
        SPARSE(label "64x64", dtype, T, 1, 1, 64, ALL, 200)

const gk_cuda_instance instances[] = {
    SPARSE_ALL("bf16_", GK_BF16, __nv_bfloat16, 500),
    SPARSE_ALL("f16_", GK_F16, __half, 500),
    SPARSE_ALL("i8_", GK_I8, int8_t, 500),
    SPARSE_ALL("e4m3_fast_", GK_E4M3, e4m3, 560),
    SPARSE("e4m3_128x256", GK_E4M3, e4m3, 2, 2, 128, PARTS, 700),
    SPARSE("e4m3_64x128", GK_E4M3, e4m3, 1, 2, 64, PARTS, 300),
    SPARSE("e4m3_64x64", GK_E4M3, e4m3, 1, 1, 64, PARTS, 200),
};

/* Chooses the instance with the least estimated time. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *plan) {
    return plan_cheapest(instances, sizeof instances / sizeof instances[0], ctx, args, plan);
}

} // namespace

extern "C" const gk_cuda_table gk_sparse_gemm_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_best};
