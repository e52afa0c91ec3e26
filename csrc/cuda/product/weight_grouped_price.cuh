/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_grouped_price.cuh: estimates the time of a weight_gemm call with groups of rows on Hopper,
 * in microseconds. The host does not know the groups' sizes. A plan only compares instances.
 *
 * Fitted to int4 with groups of 128 in bfloat16 on one H200, for 8 groups of 28672 x 4096 and 4096
 * x 14336 and 128 groups of 1536 x 2048 and 2048 x 768, 2 to 32768 rows. */
#ifndef GPUKERN_CUDA_PRODUCT_WEIGHT_GROUPED_PRICE_CUH
#define GPUKERN_CUDA_PRODUCT_WEIGHT_GROUPED_PRICE_CUH

#include "quant/weight_decode.cuh"
#include "weight_grouped.cuh"

/* A tile of a grouped product: `rows` of the weight, and `nt` tokens. It takes
 * each + (k / 64) slope of an SM's time, times the price of the code. `round` is what k is rounded
 * up to. A group's last tokens take the narrowest tile of `steps` that holds them. */
struct WeightGroupedTile {
    int nt, rows, round, step;
    struct {
        double each, slope;
    } price[4];     /* of step, 2 step, .. nt tokens */
    double bits[3]; /* nibbles, e2m1, 8 bits */
};

inline const WeightGroupedTile *weight_grouped_tile(bool wgmma, int nt) {
    static const WeightGroupedTile mma[] = {
        {8, 64, 1024, 8, {{1.0, 0.072}}, {1, 1.3, 1.9}},
        {16, 64, 512, 16, {{0.8, 0.087}}, {1, 1.3, 1.9}},
    };
    static const WeightGroupedTile by_wgmma[] = {
        {32, 128, 256, 32, {{1.5, 0.20}}, {1, 1.25, 1.4}},
        {128, 128, 128, 64, {{1.2, 0.27}, {3.5, 0.45}}, {1, 1.15, 1.25}},
        {256, 128, 128, 64, {{2.8, 0.31}, {4.6, 0.50}, {5.2, 0.51}, {5.3, 0.83}}, {1, 1.05, 1.1}},
    };
    for (const auto &x : mma)
        if (!wgmma && x.nt == nt) return &x;
    for (const auto &x : by_wgmma)
        if (wgmma && x.nt == nt) return &x;
    return nullptr;
}

/* Estimates a grouped product of m rows in `groups` groups, whose sizes only the device knows. Rows
 * go to random groups; groups that have any rows have half, once and one and a half times their
 * mean. */
inline double weight_grouped_us(const WeightGroupedTile &x, Code code, int64_t m, int64_t groups,
                                int64_t n, int64_t k, int num_sms) {
    const double bits = x.bits[code == NIBBLES ? 0
                               : code == E2M1  ? 1
                                               : 2],
                 steps = (double)gk_round_up(k, x.round) / 64;
    double empty = 1; /* (1 - 1 / groups)^m */
    double base = 1 - 1 / (double)groups;
    for (int64_t i = m; i > 0; i /= 2) {
        if (i % 2) empty *= base;
        base *= base;
    }
    const double hit = (double)groups * (1 - empty), mean = (double)m / hit;
    double work = 0, longest = 0;
    for (int i = 1; i <= 3; ++i) {
        const int64_t rows = gk_max_i64(1, (int64_t)(0.5 * i * mean + 0.5));
        const int last = x.nt / x.step - 1;
        const double full = x.price[last].each + steps * x.price[last].slope * bits;
        work += (double)(rows / x.nt) * full / 3;
        if (rows / x.nt > 0) longest = full;
        if (rows % x.nt == 0) continue;
        const int tail = (int)(gk_ceil_div(rows % x.nt, x.step) - 1);
        const double part = x.price[tail].each + steps * x.price[tail].slope * bits;
        work += part / 3;
        if (part > longest) longest = part;
    }
    work *= hit * (double)gk_ceil_div(n, x.rows) / num_sms;
    /* Persistent blocks have their tasks from the start, and some have longer ones. */
    if (x.nt < 256) work += 0.25 * longest;
    return 2 + (work > longest ? work : longest);
}

/* Plans instance K of either table. A tile takes `blocks` thread blocks. */
template <class K>
bool plan_weight_groups(const gk_cuda_instance *instance, const gk_context *ctx,
                        const gk_weight_gemm_args *g, bool wgmma, int blocks, gk_plan *plan) {
    if (!weight_groups_serve<typename K::F>(g)) return false;
    const int num_sms = gk_gpu_of(ctx->index)->num_sms;
    const int64_t tiles = token_tiles(g, K::NT) * gk_ceil_div(g->n, K::ROWS);
    if (!gk_grid_fits(blocks * tiles)) return false;
    plan->kernel = instance;
    plan->tile[0] = K::NT;
    plan->tile[1] = K::ROWS;
    plan->tile[2] = GK_TILE * K::TILES;
    plan->tasks = blocks * tiles;
    plan->waves = (double)tiles / num_sms;
    plan->us = weight_grouped_us(*weight_grouped_tile(wgmma, K::NT), K::F::C, weight_rows(g->a),
                                 g->offs->shape[0], g->n, weight_k(g), num_sms);
    return true;
}

#endif
