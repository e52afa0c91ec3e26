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

/* The values of e4m3 codes; higher bits are ignored. */
INLINE vf vf_from_e4m3(vi code) {
    const vi size = code & 0x7f, sign = (code & 0x80) << 24;
    const vi u = vi_select(size < 8, (vi)(vf_from_vi(size) * 0x1p-9f), (size << 20) + (120 << 23));
    return (vf)(vi_select(size == 0x7f, vi_set1(0x7fc00000), u) | sign);
}

/* The values of a packed weight's codes (4 or 8 bits, no others set), minus `zero` for uint4. */
INLINE vf vf_from_weight_codes(vi code, gk_weight_format format, float zero) {
    switch (format) {
    case GK_INT4: return vf_from_vi((code ^ 8) - 8);
    case GK_UINT4: return vf_from_vi(code) - zero;
    case GK_INT8: return vf_from_vi((code ^ 128) - 128);
    case GK_W_E4M3: return vf_from_e4m3(code);
    default: { /* e2m1, of mxfp4 and nvfp4 */
        const vi size = code & 7, sign = (code & 8) << 28;
        return (vf)(vi_select(size < 2, (vi)(vf_from_vi(size) * 0.5f), (size << 22) + (126 << 23)) |
                    sign);
    }
    }
}

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
    if (dtype == GK_E4M3) return vf_from_e4m3(code);
    const vi size = code & 0x7f, sign = (code & 0x80) << 24;
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
