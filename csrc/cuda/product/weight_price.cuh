/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_price.cuh: what a call of weight_gemm is expected to take on Hopper, in microseconds, and
 * which rows of a are better served by a decoded weight.
 *
 *   us = start + waves (each + k slope)
 *
 * Fitted on one H200 to bf16, int4, groups of 128: N, K 8192 squared, 5120 squared, 4096 squared,
 * 28672 x 4096, 4096 x
 * 14336. Errors are below 15 %; ratios between instances, which is what a plan asks for, are
 * better. Another device has other times but, of the same architecture, about the same order. */
#ifndef GPUKERN_CUDA_PRODUCT_WEIGHT_PRICE_CUH
#define GPUKERN_CUDA_PRODUCT_WEIGHT_PRICE_CUH

#include "quant/weight_decode.cuh"

enum {
    /* Rows of a from which the weight is decoded once: 8192 x 8192, int4: 2048 rows take 375 us by
     * WGMMA from packed codes and 410 decoded, 4096 rows 797 and 770 (H200) */
    WEIGHT_DECODED_ROWS = 3584,
    /* The same for forms that have no Hopper kernel of their own: below, weight_gemm_sm80 re-reads
     * the weight for each 32 rows of a */
    WEIGHT_GENERAL_ROWS = 65
};

/* By mma.sync: waves of clusters, each a tile of 64 rows of the weight. slope: of 4096 of k. */
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

/* By WGMMA: blocks of one SM each, `splits` of a cluster share a tile's k. slope: of 64 of k. */
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
        const int64_t waves = gk_ceil_div(tiles, num_sms / splits),
                      steps = gk_ceil_div(gk_ceil_div(k, 64), splits);
        return 1 + (double)waves * (x.each + (double)steps * x.slope * bits);
    }
    return 0;
}

#endif
