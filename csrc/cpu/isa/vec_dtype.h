/* SPDX-License-Identifier: BSD-3-Clause */
/* vec_dtype.h: loads and stores of float vectors in a dtype that the caller names. Part of
 * vec.h. */
#ifndef GPUKERN_VEC_DTYPE_H
#define GPUKERN_VEC_DTYPE_H

#include "vec.h"

/* n values of a floating dtype (float32, bfloat16, float16) from p[i] on; the other lanes are 0. */
INLINE vf vf_load_dtype(const void *p, gk_dtype dtype, int64_t i, int64_t n) {
    switch (dtype) {
    case GK_BF16:
        return n >= W ? vf_load_bf16((const uint16_t *)p + i)
                      : vf_load_bf16_first((const uint16_t *)p + i, n);
    case GK_F16:
        return n >= W ? vf_load_f16((const uint16_t *)p + i)
                      : vf_load_f16_first((const uint16_t *)p + i, n);
    case GK_F32:
        return n >= W ? vf_load((const float *)p + i) : vf_load_first((const float *)p + i, n);
    default: gk_stop_without_case("vf_load_dtype", dtype);
    }
}
INLINE void vf_store_dtype(void *p, gk_dtype dtype, int64_t i, vf v, int64_t n) {
    switch (dtype) {
    case GK_BF16: vf_store_bf16_first((uint16_t *)p + i, v, n); break;
    case GK_F16: vf_store_f16_first((uint16_t *)p + i, v, n); break;
    case GK_F32: n >= W ? vf_store((float *)p + i, v) : vf_store_first((float *)p + i, v, n); break;
    default: gk_stop_without_case("vf_store_dtype", dtype);
    }
}

/* 2 W values from p[i] on in the cheapest order ("split"). For bfloat16 that is first the values
 * of even index, then those of odd index: one shift and one mask of the loaded vector. Other
 * dtypes keep their order. Cells of pairs are never split. */
typedef uint32_t vu_pairs __attribute__((vector_size(4 * W), aligned(2), may_alias));
INLINE void vf_load2_split(const void *p, gk_dtype dtype, int64_t i, vf to[2]) {
    if (dtype == GK_BF16) {
        const vu_pairs u = *(const vu_pairs *)((const uint16_t *)p + i);
        to[0] = (vf)(u << 16);
        to[1] = (vf)(u & 0xffff0000);
    } else {
        to[0] = vf_load_dtype(p, dtype, i, W);
        to[1] = vf_load_dtype(p, dtype, i + W, W);
    }
}
/* The values of even index (half 0) or odd index (half 1) among 2 W bfloat16, as floats. */
INLINE vf vf_load_half(const void *p, int half) {
    const vu_pairs u = *(const vu_pairs *)p;
    return half ? (vf)(u & 0xffff0000) : (vf)(u << 16);
}
/* restores the order of memory */
INLINE void vf_unsplit(vf x[2], gk_dtype dtype) {
    if (dtype != GK_BF16) return;
    float t[2][W], u[2 * W];
    vf_store(t[0], x[0]);
    vf_store(t[1], x[1]);
    for (int i = 0; i < 2 * W; ++i) u[i] = t[i % 2][i / 2];
    x[0] = vf_load(u);
    x[1] = vf_load(u + W);
}

#endif
