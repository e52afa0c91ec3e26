/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_grouped_price.cuh: estimates the time of a weight_gemm call with groups of rows on Hopper,
 * in microseconds. The host does not know the groups' sizes. A plan only compares instances.
 *
 * Fitted to int4 with groups of 128 in bfloat16 on one H200, for 8 groups of 28672 x 4096 and 4096
 * x 14336 and 128 groups of 1536 x 2048 and 2048 x 768, 2 to 32768 rows. */
#ifndef GPUKERN_CUDA_PRODUCT_WEIGHT_GROUPED_PRICE_CUH
#define GPUKERN_CUDA_PRODUCT_WEIGHT_GROUPED_PRICE_CUH

#include "quant/weight_decode.cuh"

/* A tile of a grouped product: `rows` of the weight, and `nt` tokens. It takes
 * each + (k / 64) slope of an SM's time, times the price of the code. `round` is what k is rounded
 * up to. A group's last tokens take the narrowest tile of `steps` that holds them. */
struct WeightGroupedTile {
    int nt, rows, round, step;
    struct {
        double each, slope;
    } price[2];     /* of step and of nt tokens */
    double bits[3]; /* nibbles, e2m1, 8 bits */
};

inline const WeightGroupedTile *weight_grouped_tile(bool wgmma, int nt) {
    static const WeightGroupedTile mma[] = {
        {8, 64, 1024, 8, {{1.2, 0.071}}, {1, 1.3, 1.9}},
        {16, 64, 1024, 16, {{2.1, 0.082}}, {1, 1.3, 1.9}},
    };
    static const WeightGroupedTile by_wgmma[] = {
        {32, 128, 256, 32, {{2.8, 0.21}}, {1, 1.25, 1.45}},
        {128, 128, 128, 64, {{2.4, 0.28}, {5.4, 0.40}}, {1, 1.15, 1.3}},
        {256, 128, 128, 128, {{4.6, 0.47}, {5.6, 0.80}}, {1, 1.05, 1.1}},
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
    return 2 + (work > longest ? work : longest);
}

#endif
