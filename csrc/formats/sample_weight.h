/* SPDX-License-Identifier: BSD-3-Clause */
/* sample_weight.h: the penalties of a logit, and the weight e^x 2^43 of a token, for ref/ and CUDA
 * (gpukern_sample.h has the equations). Both must give the same bits on every device, so every
 * operation is a sum, product or quotient of IEEE 754, in this order, each rounded by itself.
 * exp() would not do: libraries differ in its last bit. torch_gpukern/reference/sampling.py states
 * the same in PyTorch.
 *
 *   e^x = 2^(n / 32) e^r  with n = round(32 x / ln 2), |r| <= ln 2 / 64
 *
 * 2^((n mod 32) / 32) comes from a table and e^r from its series up to r^5 (relative error below
 * 2^-48). A caller in C must be compiled with -ffp-contract=off. */
#ifndef GPUKERN_SAMPLE_WEIGHT_H
#define GPUKERN_SAMPLE_WEIGHT_H

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define GK_SAMPLE_FN static __device__ __forceinline__
#define GK_MUL(a, b) __dmul_rn(a, b)
#define GK_ADD(a, b) __dadd_rn(a, b)
#define GK_DIV(a, b) __ddiv_rn(a, b)
#define GK_BITS_OF(x) __double_as_longlong(x)
#define GK_FROM_BITS(i) __longlong_as_double(i)
#else
#define GK_SAMPLE_FN static inline
#define GK_MUL(a, b) ((a) * (b))
#define GK_ADD(a, b) ((a) + (b))
#define GK_DIV(a, b) ((a) / (b))
static inline int64_t gk_double_bits(double x) {
    int64_t i;
    memcpy(&i, &x, 8);
    return i;
}
static inline double gk_bits_double(int64_t i) {
    double x;
    memcpy(&x, &i, 8);
    return x;
}
#define GK_BITS_OF(x) gk_double_bits(x)
#define GK_FROM_BITS(i) gk_bits_double(i)
#endif

/* The weight of e^0 is 2^43: fewer than 2^20 such weights have a sum below 2^63. */
#define GK_SAMPLE_ONE 0x1p43
/* Below this x a weight is 0: e^-31 2^43 = 0.303. */
#define GK_SAMPLE_LEAST (-31.0)
/* x + GK_SAMPLE_ROUND has x rounded to an integer, to nearest even, in its last bits, if
 * |x| < 2^51. */
#define GK_SAMPLE_ROUND 0x1.8p52

/* 2^(j / 32) */
#define GK_SAMPLE_TABLE                                                                      \
    {0x1.0000000000000p+0, 0x1.059b0d3158574p+0, 0x1.0b5586cf9890fp+0, 0x1.11301d0125b51p+0, \
     0x1.172b83c7d517bp+0, 0x1.1d4873168b9aap+0, 0x1.2387a6e756238p+0, 0x1.29e9df51fdee1p+0, \
     0x1.306fe0a31b715p+0, 0x1.371a7373aa9cbp+0, 0x1.3dea64c123422p+0, 0x1.44e086061892dp+0, \
     0x1.4bfdad5362a27p+0, 0x1.5342b569d4f82p+0, 0x1.5ab07dd485429p+0, 0x1.6247eb03a5585p+0, \
     0x1.6a09e667f3bcdp+0, 0x1.71f75e8ec5f74p+0, 0x1.7a11473eb0187p+0, 0x1.82589994cce13p+0, \
     0x1.8ace5422aa0dbp+0, 0x1.93737b0cdc5e5p+0, 0x1.9c49182a3f090p+0, 0x1.a5503b23e255dp+0, \
     0x1.ae89f995ad3adp+0, 0x1.b7f76f2fb5e47p+0, 0x1.c199bdd85529cp+0, 0x1.cb720dcef9069p+0, \
     0x1.d5818dcfba487p+0, 0x1.dfc97337b9b5fp+0, 0x1.ea4afa2a490dap+0, 0x1.f50765b6e4540p+0}

/* e^x 2^43 for GK_SAMPLE_LEAST <= x <= 0, not rounded. The products with n and the power of two
 * are exact. */
GK_SAMPLE_FN double gk_sample_exp(double x, const double *table) {
    const double shifted = GK_ADD(GK_MUL(x, 0x1.71547652b82fep+5), GK_SAMPLE_ROUND);
    const double n = GK_ADD(shifted, -GK_SAMPLE_ROUND);
    const int64_t i = GK_BITS_OF(shifted) - GK_BITS_OF(GK_SAMPLE_ROUND);
    double r = GK_ADD(x, -GK_MUL(n, 0x1.62e42fefa3800p-6));
    r = GK_ADD(r, -GK_MUL(n, 0x1.ef35793c76800p-50));
    double series = GK_ADD(GK_MUL(r, 0x1.1111111111111p-7), 0x1.5555555555555p-5);
    series = GK_ADD(GK_MUL(r, series), 0x1.5555555555555p-3);
    series = GK_ADD(GK_MUL(r, series), 0.5);
    series = GK_ADD(GK_MUL(r, series), 1.0);
    series = GK_ADD(GK_MUL(r, series), 1.0);
    const double scale = GK_FROM_BITS(((i >> 5) + 43 + 1023) << 52);
    return GK_MUL(GK_MUL(table[i & 31], series), scale);
}

/* A number below 2^51 rounded to an integer. */
GK_SAMPLE_FN int64_t gk_sample_round(double x) {
    return GK_BITS_OF(GK_ADD(x, GK_SAMPLE_ROUND)) - GK_BITS_OF(GK_SAMPLE_ROUND);
}

/* A logit after its penalties. times: how often the answer so far has the token. */
GK_SAMPLE_FN double gk_sample_penalised(double y, int64_t times, int in_prompt, double presence,
                                        double frequency, double repetition) {
    if (times > 0 || in_prompt) y = y > 0 ? GK_DIV(y, repetition) : GK_MUL(y, repetition);
    y = GK_ADD(y, -GK_MUL(frequency, (double)times));
    return GK_ADD(y, -GK_MUL(presence, times > 0 ? 1.0 : 0.0));
}

#endif
