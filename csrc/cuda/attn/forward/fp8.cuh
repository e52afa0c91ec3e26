/* SPDX-License-Identifier: BSD-3-Clause */
/* fp8.cuh: what the three kernels of flash_attn_fp8 have in common: the call, its scales on the
 * device, the conversion of e4m3 codes to float16, and stores of any result dtype. q, k and v are
 * codes:
 *
 *  s_ij = scale q_scale k_scale (q_i . k_j)
 *  out_i = v_scale sum_j p_ij v_j + v_mean sum_j p_ij */
#ifndef GPUKERN_CUDA_ATTN_FP8_CUH
#define GPUKERN_CUDA_ATTN_FP8_CUH

#include "../../../formats/attn_scales.h"
#include "../../tile/convert.cuh"
#include "fwd_rows.cuh"

/* ---- scales ---------------------------------------------------------------------------------- */
/* The scale of a token; 1 if there are no scales. */
__device__ __forceinline__ float fp8_scale(const gk_attn_scale &s, int b, int head, int token) {
    return s.data ? s.data[b * s.batch + head * s.head + token / GK_ATTN_SCALE_TOKENS * s.block]
                  : 1.f;
}

/* The largest v scale of keys [lo, hi). The final sum is multiplied by it. Before a weight is
 * multiplied by v, it is multiplied by its block's share, which is the block's scale divided by the
 * largest one (fp8_share). With one scale for all keys, the largest is that scale and the shares
 * are 1. All lanes of a warp take part. */
__device__ __forceinline__ float fp8_largest(const gk_attn_scale &s, int b, int head, int lo,
                                             int hi) {
    if (s.block == 0 || !s.data) return fp8_scale(s, b, head, 0);
    float largest = 0;
    for (int block = lo / GK_ATTN_SCALE_TOKENS + threadIdx.x % 32;
         block * GK_ATTN_SCALE_TOKENS < hi; block += 32)
        largest = fmaxf(largest, fabsf(fp8_scale(s, b, head, block * GK_ATTN_SCALE_TOKENS)));
    for (int apart = 16; apart > 0; apart /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    return largest;
}

__device__ __forceinline__ float fp8_share(const gk_attn_scale &s, float largest, int b, int head,
                                           int token) {
    if (s.block == 0 || !s.data) return 1.f;
    const float scale = fp8_scale(s, b, head, token);
    /* if `largest` is 0, all scales are 0 or one is NaN */
    return largest > 0 ? scale / largest : scale;
}

/* The product first times scale, limited to +-2^100, for a kernel that multiplies each sum of Q K^T
 * once. With this limit a sum of codes times the factor is finite, and sums of 0 stay 0. NaN stays
 * NaN. An infinite scale gives NaN, which is what it gives for a code of 0 as well. */
__device__ __forceinline__ float fp8_saturated(float first, float scale) {
    const float product = first * scale, most = 0x1p100f;
    const float kept = product > most ? most : product < -most ? -most : product;
    return kept + (first - first) + (scale - scale);
}

/* Two factors for a kernel that may multiply each sum of Q K^T twice. Their product is scale
 * q_scale k_scale. A sum times both factors overflows or underflows only if the result does.
 * `second` is 1 unless the product of the scales leaves float32's normal range. */
struct Fp8Factors {
    float first, second;
};

__device__ __forceinline__ Fp8Factors fp8_factors(float scale, float q_scale, float k_scale) {
    const float two = scale * q_scale, all = two * k_scale;
    if (fabsf(two) >= 0x1p-126f && fabsf(two) < INFINITY && fabsf(all) >= 0x1p-126f &&
        fabsf(all) < INFINITY)
        return {all, 1.f};
    int of_scale, of_q, of_k;
    const float mantissa =
        frexpf(scale, &of_scale) * frexpf(q_scale, &of_q) * frexpf(k_scale, &of_k);
    if (!(fabsf(mantissa) > 0 && fabsf(mantissa) < INFINITY)) return {mantissa, 1.f};
    const int exponent = max(-250, min(250, of_scale + of_q + of_k)), half = exponent / 2;
    return {ldexpf(mantissa, half), ldexpf(1.f, exponent - half)};
}

/* ---- codes ----------------------------------------------------------------------------------- */
/* Converts two e4m3 codes, in the high bytes of a register's halves, to float16, whose exponent
 * bias is 8 larger. The NaN code becomes 480, which no other code gives. */
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint32_t high) {
    const uint32_t bits = (high & 0x80008000u) | (high & 0x7f007f00u) >> 1;
    const __half2 h = __hmul2(*(const __half2 *)&bits, __float2half2_rn(256.f));
    return *(const uint32_t *)&h;
}

/* Converts four codes, the first in the low byte. NaN codes become NaN. */
__device__ __forceinline__ void e4m3x4_to_f16x4(uint32_t *to, uint32_t codes) {
    to[0] = e4m3x2_to_f16x2(prmt(codes, 0, 0x1404));
    to[1] = e4m3x2_to_f16x2(prmt(codes, 0, 0x3424));
    if (((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if ((codes >> 8 * i & 0x7f) == 0x7f) to[i / 2] |= 0x7e00u << 16 * (i % 2);
}

/* ---- results --------------------------------------------------------------------------------- */
__device__ __forceinline__ void fp8_store(void *out, gk_dtype dtype, int64_t at, float x) {
    if (dtype == GK_BF16)
        ((__nv_bfloat16 *)out)[at] = __float2bfloat16_rn(x);
    else if (dtype == GK_F16)
        ((__half *)out)[at] = __float2half_rn(x);
    else
        ((float *)out)[at] = x;
}

/* ---- the call -------------------------------------------------------------------------------- */
struct Fp8Params {
    Problem problem;
    gk_attn_scale q_scale, k_scale, v_scale;
    gk_attn_mean mean;
    gk_dtype out_dtype; /* bfloat16, float16 or float32 */
    int tiles_q;
};

inline Fp8Params fp8_params(const gk_context *ctx, const gk_flash_attn_fp8_args *a, int bq) {
    Fp8Params p = {};
    p.problem = problem_of(ctx, &a->fwd);
    p.q_scale = gk_attn_scale_of(a->q_scale);
    p.k_scale = gk_attn_scale_of(a->k_scale);
    p.v_scale = gk_attn_scale_of(a->v_scale);
    p.mean = gk_attn_mean_of(a->v_mean);
    p.out_dtype = a->fwd.out.dtype;
    p.tiles_q = (int)gk_ceil_div(p.problem.seq_q, bq);
    return p;
}

/* Clears the rows of out that no sequence owns. */
inline gk_status fp8_finish(const char *op, const gk_context *ctx, const Fp8Params &p) {
    if (p.out_dtype == GK_BF16) return clear_unowned<__nv_bfloat16>(op, ctx, p.problem);
    return p.out_dtype == GK_F16 ? clear_unowned<__half>(op, ctx, p.problem)
                                 : clear_unowned<float>(op, ctx, p.problem);
}

#endif
