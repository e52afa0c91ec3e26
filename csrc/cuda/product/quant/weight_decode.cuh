/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_decode.cuh: decodes words of a packed weight (csrc/formats/weight_tile.h) to the first
 * operand of mma.m16n8k16, one k16 at a time. All weight_gemm kernels for tensor cores use it. Kim
 * et al. 2022, arXiv:2211.10017.
 *
 * The result has no scale and is exact: bfloat16 and float16 can represent all values of e4m3,
 * int8, e2m1 and (code - zero).
 *
 * Integer codes become the low bits of a fraction. One subtraction then removes the constant part
 * of that number. Codes of e4m3 and e2m1 become exponent and fraction. One multiplication by a
 * power of two then corrects the exponent, also for subnormal codes. */
#ifndef GPUKERN_CUDA_QUANT_WEIGHT_DECODE_CUH
#define GPUKERN_CUDA_QUANT_WEIGHT_DECODE_CUH

#include "../../tile/convert.cuh"
#include "weight.cuh"

enum Code {
    NIBBLES, /* int4, uint4 */
    E2M1,    /* mxfp4, nvfp4 */
    INT8,
    E4M3
};

inline Code code_of(gk_weight_format f) {
    return f == GK_INT4 || f == GK_UINT4 ? NIBBLES
           : f == GK_INT8                ? INT8
           : f == GK_W_E4M3              ? E4M3
                                         : E2M1;
}

/* Constants for two 16-bit numbers in a register. WHOLE: the number into whose low bits NIBBLES and
 * INT8 codes are inserted. NOTHING: WHOLE + 8, which is subtracted from 4-bit codes if there are no
 * zero points. E2M1_UP, E4M3_UP: powers of two that correct the exponent. */
template <class T> struct Two;
template <> struct Two<__nv_bfloat16> {
    typedef __nv_bfloat162 pair;
    /* 128; 136 */
    static constexpr uint32_t WHOLE = 0x43004300u, NOTHING = 0x43004300u + 0x00080008u;
    static constexpr uint32_t E2M1_UP = 0x7e807e80u, E4M3_UP = 0x7b807b80u; /* 2^126, 2^120 */
    static constexpr int E2M1_AT = 6, E4M3_AT = 4; /* position of the fraction's lowest bit */
    static constexpr uint32_t NANS = 0x7fc07fc0u;
};
template <> struct Two<__half> {
    typedef __half2 pair;
    /* 1024; 1032 */
    static constexpr uint32_t WHOLE = 0x64006400u, NOTHING = 0x64006400u + 0x00080008u;
    /* 2^14, 2^8 */
    static constexpr uint32_t E2M1_UP = 0x74007400u, E4M3_UP = 0x5c005c00u;
    static constexpr int E2M1_AT = 9, E4M3_AT = 7;
    static constexpr uint32_t NANS = 0x7e007e00u;
};
template <class T> union TwoBits {
    uint32_t bits;
    typename Two<T>::pair pair;
};
template <class T> __device__ __forceinline__ uint32_t sub_two(uint32_t x, uint32_t y) {
    TwoBits<T> a, b;
    a.bits = x;
    b.bits = y;
    a.pair = __hsub2(a.pair, b.pair);
    return a.bits;
}
template <class T> __device__ __forceinline__ uint32_t mul_two(uint32_t x, uint32_t y) {
    TwoBits<T> a, b;
    a.bits = x;
    b.bits = y;
    a.pair = __hmul2(a.pair, b.pair);
    return a.bits;
}

__device__ __forceinline__ uint32_t shift(uint32_t x, int left) {
    return left >= 0 ? x << left : x >> -left;
}

/* a[h + 2 j] becomes the elements of row 8 h at k 8 j and 8 j + 1. zero[h]: the number to subtract
 * from row 8 h, in both halves. whole: Two::WHOLE. For int4 bit 3 of it is also set, which inverts
 * the code's sign bit. */
template <class T>
__device__ __forceinline__ void decode_nibbles(uint32_t (&a)[4], uint32_t word, uint32_t whole,
                                               const uint32_t (&zero)[2]) {
#pragma unroll
    for (int q = 0; q < 4; ++q)
        a[q] = sub_two<T>(((word >> 4 * q) & 0x000f000fu) ^ whole, zero[q % 2]);
}

template <class T> __device__ __forceinline__ void decode_e2m1(uint32_t (&a)[4], uint32_t word) {
    constexpr int AT = Two<T>::E2M1_AT;
#pragma unroll
    for (int q = 0; q < 4; ++q)
        a[q] = mul_two<T>((shift(word, AT - 4 * q) & 0x00070007u << AT) |
                              (shift(word, 12 - 4 * q) & 0x80008000u),
                          Two<T>::E2M1_UP);
}

/* x0, x1: the words of j = 0 and 1. Byte 2 h + i of a word is row 8 h, k 8 j + i. */
template <class T>
__device__ __forceinline__ void decode_int8(uint32_t (&a)[4], uint32_t x0, uint32_t x1) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const uint32_t two = prmt(q < 2 ? x0 : x1, 0, q % 2 ? 0x4342 : 0x4140); /* 0x00yy00xx */
        if constexpr (element<T>::dtype == GK_BF16) /* 128 + the low seven bits, less 128 or 256 */
            a[q] = sub_two<T>((two & 0x007f007fu) | Two<T>::WHOLE,
                              (two & 0x00800080u) | Two<T>::WHOLE);
        else /* 1024 + 128 + code, less 1152 */
            a[q] = sub_two<T>(two ^ (Two<T>::WHOLE | 0x00800080u), Two<T>::WHOLE | 0x00800080u);
    }
}

/* Decodes e4m3. A NaN code becomes 480. */
template <class T>
__device__ __forceinline__ void decode_e4m3_finite(uint32_t (&a)[4], uint32_t x0, uint32_t x1) {
    constexpr int AT = Two<T>::E4M3_AT;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        const uint32_t two = prmt(q < 2 ? x0 : x1, 0, q % 2 ? 0x3424 : 0x1404); /* 0xyy00xx00 */
        a[q] = mul_two<T>((two >> (8 - AT) & 0x007f007fu << AT) | (two & 0x80008000u),
                          Two<T>::E4M3_UP);
    }
}

template <class T>
__device__ __forceinline__ void decode_e4m3(uint32_t (&a)[4], uint32_t x0, uint32_t x1) {
    decode_e4m3_finite<T>(a, x0, x1);
    constexpr uint32_t SIZE = 0x7f7f7f7fu, ONE = 0x01010101u;
    if ((((x0 & SIZE) + ONE) | ((x1 & SIZE) + ONE)) & 0x80808080u) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const uint32_t two = prmt(q < 2 ? x0 : x1, 0, q % 2 ? 0x4342 : 0x4140) & 0x007f007fu;
            if ((two & 0xffffu) == 0x7f) a[q] |= Two<T>::NANS & 0xffffu;
            if ((two >> 16) == 0x7f) a[q] |= Two<T>::NANS & 0xffff0000u;
        }
    }
}

/* Decodes step s of four. w: 4 words for 4 bits, 8 words for 8 bits. */
template <class T, Code C>
__device__ __forceinline__ void decode_step(uint32_t (&a)[4], const uint32_t *w, int s,
                                            uint32_t whole, const uint32_t (&zero)[2]) {
    if constexpr (C == NIBBLES)
        decode_nibbles<T>(a, w[s], whole, zero);
    else if constexpr (C == E2M1)
        decode_e2m1<T>(a, w[s]);
    else if constexpr (C == INT8)
        decode_int8<T>(a, w[2 * s], w[2 * s + 1]);
    else
        decode_e4m3<T>(a, w[2 * s], w[2 * s + 1]);
}

/* The number to subtract from the codes of a group, in both halves of a word. zero: the zero point
 * of uint4, or 8 if there are no zero points. */
template <class T> __device__ __forceinline__ uint32_t zero_bits(uint32_t zero) {
    return Two<T>::WHOLE | zero | zero << 16;
}

#endif
