/* SPDX-License-Identifier: BSD-3-Clause */
/* load_bits.cuh: reads scales and biases of several dtypes without serialising the loads. The
 * epilogues of Hopper's scaled and sparse products use it.
 *
 * The dtype switch stands outside the loop, and values are converted only where they are used. With
 * the switch inside the loop, the compiler would reuse one register for loads of different widths,
 * and each load would wait for the one before. */
#ifndef GPUKERN_CUDA_QUANT_LOAD_BITS_CUH
#define GPUKERN_CUDA_QUANT_LOAD_BITS_CUH

#include "product.cuh"

template <class U, int N, class At>
__device__ __forceinline__ void load_bits_as(uint32_t (&bits)[N], const void *data, const At &at) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int64_t from = at(i);
        bits[i] = 0;
        if (from >= 0) bits[i] = __ldg((const U *)data + from);
    }
}

/* bits[i] becomes the bits of element at(i), or 0 if at(i) is negative. log2: binary logarithm
 * of an element's bytes. */
template <int N, class At>
__device__ __forceinline__ void load_bits(uint32_t (&bits)[N], const void *data, int log2,
                                          const At &at) {
    if (log2 == 2)
        load_bits_as<uint32_t>(bits, data, at);
    else if (log2 == 1)
        load_bits_as<uint16_t>(bits, data, at);
    else
        load_bits_as<uint8_t>(bits, data, at);
}

/* Reads scales, which are float32 or powers of two in a byte (e8m0). The op's checks allow no
 * others for 8-bit operands. Without scales, every scale is 1. */
template <int N, class At>
__device__ __forceinline__ void load_scale_bits(uint32_t (&bits)[N], const gk_scales &s,
                                                const At &at) {
    if (!s.data) {
#pragma unroll
        for (int i = 0; i < N; ++i) bits[i] = __float_as_uint(1.f);
    } else if (s.dtype == GK_F32) {
        load_bits_as<uint32_t>(bits, s.data, at);
    } else {
        load_bits_as<uint8_t>(bits, s.data, at);
    }
}
__device__ __forceinline__ float scale_from(const gk_scales &s, uint32_t bits) {
    return s.dtype == GK_F32 ? __uint_as_float(bits) : e8m0_to_f32(bits);
}

/* Offset of the scale of element (row, col). */
__device__ __forceinline__ int64_t scale_at(const gk_scales &s, int row, int col) {
    return (row >> min(s.row_log2, 31)) * s.row + (col >> min(s.col_log2, 31)) * s.col;
}

/* Reads the biases of columns at(i), which are float32 or 16-bit. */
template <int N, class At>
__device__ __forceinline__ void load_bias(float (&bias)[N], const Finish &f, const At &at) {
    uint32_t bits[N];
    if (!f.bias) {
#pragma unroll
        for (int i = 0; i < N; ++i) bias[i] = -0.f; /* -0 + x is x for every x */
        return;
    }
    load_bits(bits, f.bias, f.bias_dtype == GK_F32 ? 2 : 1,
              [&](int i) { return at(i) * f.bias_step; });
#pragma unroll
    for (int i = 0; i < N; ++i)
        bias[i] = f.bias_dtype == GK_F32    ? __uint_as_float(bits[i])
                  : f.bias_dtype == GK_BF16 ? __uint_as_float(bits[i] << 16)
                                            : to_f32(__ushort_as_half((unsigned short)bits[i]));
}

#endif
