/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_price.cuh: estimates the time of a weight_gemm call on Hopper for the plans of
 * weight_mma.cuh and weight_wgmma.cuh. It also has the number of rows of a from which the weight is
 * decoded first.
 *
 *   us = start + waves (each + k slope)
 *
 * start: time of the launch. each: time of a wave without its k. slope: time of a unit of k.
 *
 * Fitted to bf16 with int4 and groups of 128 on one H200, for N x K of 8192 x 8192, 5120 x 5120,
 * 4096 x 4096, 28672 x 4096 and 4096 x 14336. Errors are below 15 %. A plan only compares
 * instances, and the ratios of their times are more accurate. On other Hopper devices times differ,
 * but the ranking of the instances is about the same. */
#ifndef GPUKERN_CUDA_PRODUCT_WEIGHT_PRICE_CUH
#define GPUKERN_CUDA_PRODUCT_WEIGHT_PRICE_CUH

#include "quant/weight_decode.cuh"

enum {
    /* From this many rows of a on, the weight is decoded once. 8192 x 8192, int4, H200: 2048
     * rows take 375 us from packed codes by WGMMA and 410 decoded; 4096 rows take 797 and 770. */
    WEIGHT_DECODED_ROWS = 3584,
    /* The same for forms that have no Hopper kernel of their own: with fewer rows,
     * weight_gemm_sm80 is used, which re-reads the weight for each 32 rows of a. */
    WEIGHT_GENERAL_ROWS = 65
};

/* Estimated time of weight_gemm_mma_*. A wave is the clusters that run at once, each with a tile of
 * 64 weight rows. slope: us for 4096 of k. */
inline double weight_mma_us(int nt, int occ, Code code, int64_t waves, int64_t k) {
    static const struct {
        int nt, occ;
        double start, slope;
    } prices[] = {{8, 1, 2.9, 2.37}, {8, 2, 2.0, 4.3}, {16, 1, 3.0, 2.45}, {16, 2, 2.2, 5.2}};
    for (const auto &x : prices) {
        if (x.nt != nt || x.occ != occ) continue;
        const double bits = code == NIBBLES ? 1 : code == E2M1 ? 1.3 : occ == 1 ? 1.9 : 1.75;
        return x.start + (double)waves * x.slope * bits * ((double)k / 4096);
    }
    return 0;
}

/* Estimated time of weight_gemm_wgmma_*. An SM runs one block. The `splits` blocks of a cluster
 * share a tile's k. slope: us for 64 of k. */
inline double weight_wgmma_us(int nt, int rt, Code code, int64_t tiles, int splits, int64_t k,
                              int num_sms) {
    static const struct {
        int nt, rt;
        double each, slope;
    } prices[] = {{32, 2, 1.5, 0.205}, {64, 2, 2.3, 0.27}, {128, 2, 3.3, 0.35},
                  {256, 2, 7.0, 0.66}, {32, 1, 2.2, 0.10}, {64, 1, 2.5, 0.135},
                  {128, 1, 3.5, 0.185}};
    for (const auto &x : prices) {
        if (x.nt != nt || x.rt != rt) continue;
        const double bits = code == NIBBLES ? 1 : code == E2M1 ? 1.17 : 1.38;
        const int64_t waves = gk_ceil_div(tiles, gk_max_i64(1, num_sms / splits)),
                      steps = gk_ceil_div(gk_ceil_div(k, 64), splits);
        return 1 + (double)waves * (x.each + (double)steps * x.slope * bits);
    }
    return 0;
}

#endif
