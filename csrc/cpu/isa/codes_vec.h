/* SPDX-License-Identifier: BSD-3-Clause */
/* codes_vec.h: converts vectors of 8-bit codes (csrc/formats/codes.h) to float32 and back with
 * plain vector arithmetic. */
#ifndef GPUKERN_CODES_VEC_H
#define GPUKERN_CODES_VEC_H

#include "vec_int8.h"

typedef uint8_t vb __attribute__((vector_size(W)));
typedef uint8_t vb_mem __attribute__((vector_size(W), aligned(1), may_alias));

INLINE vi vi_select(vi mask, vi yes, vi no) { return (yes & mask) | (no & ~mask); }
INLINE vf vf_from_vi(vi x) { return __builtin_convertvector(x, vf); }

/* n values from p[i] on; the other lanes are 0 */
INLINE vf vf_load_code(const void *p, gk_dtype dtype, int64_t i, int64_t n) {
    const uint8_t *from = (const uint8_t *)p + i;
    uint8_t some[W] = {0};
    if (n < W) {
        if (n > 0) memcpy(some, from, (size_t)n);
        from = some;
    }
    const vi code = vi_from_bytes(from);
    if (dtype == GK_I8) return vf_from_vi((code << 24) >> 24);
    if (dtype == GK_U8) return vf_from_vi(code);
    const vi size = code & 0x7f, sign = (code & 0x80) << 24;
    if (dtype == GK_E4M3) {
        vi u = vi_select(size < 8, (vi)(vf_from_vi(size) * 0x1p-9f), (size << 20) + (120 << 23));
        u = vi_select(size == 0x7f, vi_set1(0x7fc00000), u);
        return (vf)(u | sign);
    }
    vi u = vi_select(size < 4, (vi)(vf_from_vi(size) * 0x1p-16f), (size << 21) + (112 << 23));
    u = vi_select(size >= 0x7c, (size << 21) | 0x7f800000, u);
    return (vf)(u | sign);
}

/* the codes of v, rounded to nearest even and saturated */
INLINE vi vi_codes(vf v, gk_dtype dtype) {
    if (dtype == GK_I8) {
        v = vf_min(vf_set1(127), vf_max(vf_set1(-128), v)); /* NaN stays NaN */
        v = (vf)((vi)v & (v == v));
        return __builtin_convertvector(vf_round(v), vi);
    }
    const int fraction = dtype == GK_E4M3 ? 3 : 2, bias = dtype == GK_E4M3 ? 7 : 15,
              drop = 23 - fraction;
    const vi bits = (vi)v, sign = (bits >> 24) & 0x80;
    const vf size =
        vf_min((vf)(bits & 0x7fffffff), vf_set1(dtype == GK_E4M3 ? GK_E4M3_MAX : GK_E5M2_MAX));
    const vi u = (vi)size, step = vi_set1((128 - bias - fraction + 23) << 23);
    const vi small = (vi)(size + (vf)step) - step;
    const vi normal =
        ((u + ((1 << (drop - 1)) - 1) + ((u >> drop) & 1)) >> drop) - ((127 - bias) << fraction);
    vi code = vi_select(u < ((128 - bias) << 23), small, normal) | sign;
    return vi_select((vi)(v == v), code, vi_set1(0x7f) | sign);
}

INLINE void vf_store_code(void *p, gk_dtype dtype, int64_t i, vf v, int64_t n) {
    const vb bytes = __builtin_convertvector(vi_codes(v, dtype), vb);
    if (n >= W)
        *(vb_mem *)((uint8_t *)p + i) = bytes;
    else if (n > 0) {
        uint8_t t[W];
        *(vb_mem *)t = bytes;
        memcpy((uint8_t *)p + i, t, (size_t)n);
    }
}

#endif
