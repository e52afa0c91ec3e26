/* SPDX-License-Identifier: BSD-3-Clause */
/* codes.h: 8-bit elements. An element's value is its code's value times a scale.
 *
 * The types are e4m3 (Micikevicius et al. 2022, arXiv:2209.05433: no infinity, one NaN of each
 * sign), e5m2 (IEEE's form), int8, and e8m0 (OCP MX 1.0: a power of two, no sign, no zero), the
 * type of some scales. Stores round to nearest even and saturate; infinities saturate, too. A
 * NaN is stored as NaN, or as 0 in int8. */
#ifndef GPUKERN_CODES_H
#define GPUKERN_CODES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Largest finite values. */
#define GK_E4M3_MAX 448.0f
#define GK_E5M2_MAX 57344.0f

static inline float gk_e4m3_to_f32(uint8_t code) {
    const uint32_t size = code & 0x7f, sign = (uint32_t)(code & 0x80) << 24;
    uint32_t u = (size << 20) + (120u << 23);
    float f;
    if (size == 0x7f) u = 0x7fc00000u;
    memcpy(&f, &u, 4);
    if (size < 8) f = (float)size * 0x1p-9f;
    memcpy(&u, &f, 4);
    u |= sign;
    memcpy(&f, &u, 4);
    return f;
}

static inline float gk_e5m2_to_f32(uint8_t code) {
    const uint32_t size = code & 0x7f, sign = (uint32_t)(code & 0x80) << 24;
    uint32_t u = size > 0x7c    ? 0x7fc00000u
                 : size == 0x7c ? 0x7f800000u
                                : (size << 21) + (112u << 23);
    float f;
    memcpy(&f, &u, 4);
    if (size < 4) f = (float)size * 0x1p-16f;
    memcpy(&u, &f, 4);
    u |= sign;
    memcpy(&f, &u, 4);
    return f;
}

/* Rounds to a code with `fraction` bits after the leading one and exponents from 1 - bias on.
 * `largest` is the largest finite value and `nan` the code of a NaN. */
static inline uint8_t gk_f32_to_code(float f, int fraction, int bias, float largest, uint8_t nan) {
    const int drop = 23 - fraction;
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint8_t sign = (uint8_t)(u >> 24 & 0x80);
    if (f != f) return sign | nan;
    float size = fabsf(f);
    if (size > largest) size = largest;
    memcpy(&u, &size, 4);
    /* subnormal: after the sum the last bit of the float is worth one step of the codes */
    if (u < (uint32_t)(128 - bias) << 23) {
        const uint32_t step = (uint32_t)(127 + 1 - bias - fraction + 23) << 23;
        float magic, sum;
        memcpy(&magic, &step, 4);
        sum = size + magic;
        memcpy(&u, &sum, 4);
        return (uint8_t)(sign | (u - step));
    }
    u += (1u << (drop - 1)) - 1 + (u >> drop & 1);
    return (uint8_t)(sign | ((u >> drop) - ((uint32_t)(127 - bias) << fraction)));
}
static inline uint8_t gk_f32_to_e4m3(float f) { return gk_f32_to_code(f, 3, 7, GK_E4M3_MAX, 0x7f); }
static inline uint8_t gk_f32_to_e5m2(float f) {
    return gk_f32_to_code(f, 2, 15, GK_E5M2_MAX, 0x7f);
}

static inline int8_t gk_f32_to_i8(float f) {
    if (f != f) return 0;
    return (int8_t)rintf(f < -128 ? -128 : f > 127 ? 127 : f);
}

static inline float gk_e8m0_to_f32(uint8_t code) {
    const uint32_t u = code == 255 ? 0x7fc00000u : code ? (uint32_t)code << 23 : 1u << 22;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* The smallest power of two that is not below f, limited to 2^-127 .. 2^127. NaN if f is
 * infinite or NaN. */
static inline uint8_t gk_f32_to_e8m0(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if (!(f > 0)) return f != f ? 255 : 0;
    if (u >= 0x7f800000u) return 255;
    if (u <= 1u << 22) return 0;
    u = (u + 0x7fffff) >> 23;
    return (uint8_t)(u > 254 ? 254 : u);
}

/* Rounds to odd: truncates to float32 and sets the last bit if anything was lost. Rounding the
 * result to a code gives the same code as rounding the double. */
static inline float gk_f64_to_odd_f32(double x) {
    float f = (float)x;
    uint32_t u;
    if (x != x || (double)f == x) return f;
    if (isinf(f)) return f;
    memcpy(&u, &f, 4);
    if (fabs((double)f) > fabs(x)) --u;
    u |= 1;
    memcpy(&f, &u, 4);
    return f;
}

#ifdef __cplusplus
}
#endif
#endif
