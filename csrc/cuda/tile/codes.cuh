/* SPDX-License-Identifier: BSD-3-Clause */
/* codes.cuh: converts 8-bit codes (csrc/formats/codes.h) to and from floats, in plain arithmetic
 * that every GPU has. Kernels choose a rounding policy: CodesBySoftware here, or CodesByHardware
 * (sm_89 and later) in codes_sm90a.cuh. */
#ifndef GPUKERN_CUDA_TILE_CODES_CUH
#define GPUKERN_CUDA_TILE_CODES_CUH

#include "gpukern.h"

#include <stdint.h>

template <int FRACTION, int BIAS> __device__ __forceinline__ float code_to_f32(uint32_t code) {
    const uint32_t size = code & 0x7f, sign = (code & 0x80) << 24;
    float f = __uint_as_float((size << (23 - FRACTION)) + ((127 - BIAS) << 23));
    /* A subnormal is its fraction times 2 to the least exponent. The product is exact. */
    if (size < 1u << FRACTION)
        f = (float)size * __uint_as_float((uint32_t)(127 + 1 - BIAS - FRACTION) << 23);
    return __uint_as_float(__float_as_uint(f) | sign);
}
__device__ __forceinline__ float e4m3_to_f32(uint32_t code) {
    return (code & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u) : code_to_f32<3, 7>(code);
}
__device__ __forceinline__ float e5m2_to_f32(uint32_t code) {
    if ((code & 0x7f) >= 0x7c)
        return __uint_as_float(((code & 0x80) << 24) | 0x7f800000u | (code & 3) << 21);
    return code_to_f32<2, 15>(code);
}
__device__ __forceinline__ float e8m0_to_f32(uint32_t code) {
    return __uint_as_float(code == 255 ? 0x7fc00000u : code ? code << 23 : 1u << 22);
}
/* csrc/formats/codes.h: gk_f32_to_e8m0 */
__device__ __forceinline__ uint32_t f32_to_e8m0(float f) {
    const uint32_t u = __float_as_uint(f);
    if (!(f > 0)) return f != f ? 255 : 0;
    if (u >= 0x7f800000u) return 255;
    if (u <= 1u << 22) return 0;
    return min((u + 0x7fffff) >> 23, 254u);
}

/* The value of a code of any dtype that codes and scales have. */
__device__ __forceinline__ float code_value(gk_dtype dtype, uint32_t code) {
    switch (dtype) {
    case GK_E4M3: return e4m3_to_f32(code);
    case GK_E5M2: return e5m2_to_f32(code);
    case GK_I8: return (float)(int8_t)code;
    case GK_E8M0: return e8m0_to_f32(code);
    default: return (float)code;
    }
}

__device__ __forceinline__ uint32_t f32_to_i8(float f) {
    return (uint32_t)min(127, max(-128, __float2int_rn(f))) & 0xff; /* NaN: 0 */
}

struct CodesBySoftware {
    template <int FRACTION, int BIAS>
    static __device__ __forceinline__ uint32_t code(float f, float largest) {
        constexpr int DROP = 23 - FRACTION;
        constexpr uint32_t STEP = (uint32_t)(128 - BIAS - FRACTION + 23) << 23;
        const uint32_t sign = __float_as_uint(f) >> 24 & 0x80;
        const float size = fminf(fabsf(f), largest);
        const uint32_t u = __float_as_uint(size);
        uint32_t c =
            ((u + ((1u << (DROP - 1)) - 1) + (u >> DROP & 1)) >> DROP) - ((127 - BIAS) << FRACTION);
        if (u < (uint32_t)(128 - BIAS) << 23)
            c = __float_as_uint(size + __uint_as_float(STEP)) - STEP;
        return (f != f ? 0x7f : c) | sign;
    }
    static __device__ __forceinline__ uint32_t e4m3x2(float lo, float hi) {
        return code<3, 7>(lo, 448.f) | code<3, 7>(hi, 448.f) << 8;
    }
    static __device__ __forceinline__ uint32_t e5m2x2(float lo, float hi) {
        return code<2, 15>(lo, 57344.f) | code<2, 15>(hi, 57344.f) << 8;
    }
};

/* Four floats to four codes, the first in the low byte. */
template <class Policy>
__device__ __forceinline__ uint32_t codes_x4(gk_dtype dtype, const float *v) {
    if (dtype == GK_E4M3) return Policy::e4m3x2(v[0], v[1]) | Policy::e4m3x2(v[2], v[3]) << 16;
    if (dtype == GK_E5M2) return Policy::e5m2x2(v[0], v[1]) | Policy::e5m2x2(v[2], v[3]) << 16;
    return f32_to_i8(v[0]) | f32_to_i8(v[1]) << 8 | f32_to_i8(v[2]) << 16 | f32_to_i8(v[3]) << 24;
}

#endif
