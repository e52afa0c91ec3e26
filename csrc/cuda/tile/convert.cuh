// SPDX-License-Identifier: BSD-3-Clause
// convert: element types and conversions. T is float, double, __nv_bfloat16 or __half. Values
// pass through float32.
#ifndef GPUKERN_TILE_CONVERT_CUH
#define GPUKERN_TILE_CONVERT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "gpukern.h"
#include "../ptx/regs.cuh"

// The tensor-core instruction for an element type. MMA_16 takes K-major or MN-major operands.
// MMA_TF32 takes only K-major ones, rounded on the way.
enum mma_kind {
    MMA_NONE,
    MMA_16,
    MMA_TF32
};

// Properties of an element type. bits: size in memory. acc: type of sums. Rounding is to nearest
// even; float16 overflows to infinity beyond 65504.
template <typename T> struct element;

template <> struct element<float> {
    typedef float acc;
    static constexpr gk_dtype dtype = GK_F32;
    static constexpr int bits = 32;
    static constexpr mma_kind mma = MMA_TF32;
    static __device__ __forceinline__ float to_f32(float x) { return x; }
    static __device__ __forceinline__ float from_f32(float x) { return x; }
};

template <> struct element<double> {
    typedef double acc;
    static constexpr gk_dtype dtype = GK_F64;
    static constexpr int bits = 64;
    static constexpr mma_kind mma = MMA_NONE;
    static __device__ __forceinline__ float to_f32(double x) { return (float)x; }
    static __device__ __forceinline__ double from_f32(float x) { return x; }
};

template <> struct element<__nv_bfloat16> {
    typedef float acc;
    static constexpr gk_dtype dtype = GK_BF16;
    static constexpr int bits = 16;
    static constexpr mma_kind mma = MMA_16;
    static __device__ __forceinline__ float to_f32(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ __forceinline__ __nv_bfloat16 from_f32(float x) {
        return __float2bfloat16_rn(x);
    }
    static __device__ __forceinline__ uint32_t pack2(float lo, float hi) {
        return cvt_rn_bf16x2(lo, hi);
    }
    static __device__ __forceinline__ float2 unpack2(uint32_t x) {
        return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
    }
};

template <> struct element<__half> {
    typedef float acc;
    static constexpr gk_dtype dtype = GK_F16;
    static constexpr int bits = 16;
    static constexpr mma_kind mma = MMA_16;
    static __device__ __forceinline__ float to_f32(__half x) { return __half2float(x); }
    static __device__ __forceinline__ __half from_f32(float x) { return __float2half_rn(x); }
    static __device__ __forceinline__ uint32_t pack2(float lo, float hi) {
        return cvt_rn_f16x2(lo, hi);
    }
    static __device__ __forceinline__ float2 unpack2(uint32_t x) {
        return make_float2(__half2float(__ushort_as_half((unsigned short)x)),
                           __half2float(__ushort_as_half((unsigned short)(x >> 16))));
    }
};

template <typename T> static __device__ __forceinline__ float to_f32(T x) {
    return element<T>::to_f32(x);
}
template <typename T> static __device__ __forceinline__ T from_f32(float x) {
    return element<T>::from_f32(x);
}

// Two floats as two 16-bit elements of one register, lo in the low half; and the reverse.
template <typename T> static __device__ __forceinline__ uint32_t pack2(float lo, float hi) {
    return element<T>::pack2(lo, hi);
}
template <typename T> static __device__ __forceinline__ float2 unpack2(uint32_t x) {
    return element<T>::unpack2(x);
}

// Conversion of an element to the type of its sums, and back with rounding to nearest even. For
// kernels that also serve float64.
template <typename T> static __device__ __forceinline__ typename element<T>::acc to_acc(T x) {
    return to_f32(x);
}
template <> __device__ __forceinline__ double to_acc<double>(double x) { return x; }

template <typename T> static __device__ __forceinline__ T from_acc(typename element<T>::acc x) {
    return element<T>::from_f32((float)x);
}
template <> __device__ __forceinline__ double from_acc<double>(double x) { return x; }

#endif
