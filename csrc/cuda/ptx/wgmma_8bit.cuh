// SPDX-License-Identifier: BSD-3-Clause
// wgmma_8bit: products of a warpgroup with 8-bit elements. Checked against PTX ISA 9.0; sm_90a.
//
// d [64][N] += a [64][32] b [32][N]. Both operands are K-major in shared memory (descriptors:
// layout/wgmma.cuh). d has the layout of wgmma.cuh.
//   e4m3, e5m2: d is float. Sums within an instruction, and sums added to d, keep some 13 bits
//               (docs/kernels/gemm_quantised.md). So at most 128 of k should be added to one d.
//   int8:       d is int32, exact.
#ifndef GPUKERN_PTX_WGMMA_8BIT_CUH
#define GPUKERN_PTX_WGMMA_8BIT_CUH

#include "wgmma.cuh"

struct e4m3 {};
struct e5m2 {};

#define GK_I8_D(i)                                                                              \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), \
        "+r"(d[i + 6]), "+r"(d[i + 7])
#define GK_I32_D(i) GK_I8_D(i), GK_I8_D(i + 8), GK_I8_D(i + 16), GK_I8_D(i + 24)

#define GK_WGMMA_FP8(N, TYPES, LIST, i0, i1, i2, ...)                                         \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #i2 ", 0;\n\t"                      \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" LIST "}, %" #i0 \
                 ", %" #i1 ", p, 1, 1;\n\t}"                                                  \
                 : __VA_ARGS__                                                                \
                 : "l"(a), "l"(b), "r"(add))

template <class A, class B, int N> struct wgmma_fp8;

#define GK_WGMMA_FP8_TYPES(A, B, TYPES)                                                        \
    template <> struct wgmma_fp8<A, B, 128> {                                                  \
        static __device__ __forceinline__ void ss(float *d, uint64_t a, uint64_t b, int add) { \
            GK_WGMMA_FP8(128, TYPES, GK_R64, 64, 65, 66, GK_D32(0), GK_D32(32));               \
        }                                                                                      \
    };                                                                                         \
    template <> struct wgmma_fp8<A, B, 16> {                                                   \
        static __device__ __forceinline__ void ss(float *d, uint64_t a, uint64_t b, int add) { \
            GK_WGMMA_FP8(16, TYPES, GK_R8, 8, 9, 10, GK_D8(0));                                \
        }                                                                                      \
    };                                                                                         \
    template <> struct wgmma_fp8<A, B, 32> {                                                   \
        static __device__ __forceinline__ void ss(float *d, uint64_t a, uint64_t b, int add) { \
            GK_WGMMA_FP8(32, TYPES, GK_R16, 16, 17, 18, GK_D8(0), GK_D8(8));                   \
        }                                                                                      \
    };                                                                                         \
    template <> struct wgmma_fp8<A, B, 64> {                                                   \
        static __device__ __forceinline__ void ss(float *d, uint64_t a, uint64_t b, int add) { \
            GK_WGMMA_FP8(64, TYPES, GK_R32, 32, 33, 34, GK_D32(0));                            \
        }                                                                                      \
    };

GK_WGMMA_FP8_TYPES(e4m3, e4m3, "e4m3.e4m3")
GK_WGMMA_FP8_TYPES(e4m3, e5m2, "e4m3.e5m2")
GK_WGMMA_FP8_TYPES(e5m2, e4m3, "e5m2.e4m3")
GK_WGMMA_FP8_TYPES(e5m2, e5m2, "e5m2.e5m2")

// wgmma.mma_async.m64nNk32 for 8-bit floats. add false: d is not read.
template <class A, class B, int N>
static __device__ __forceinline__ void wgmma_8bit_ss(float (&d)[N / 2], uint64_t a, uint64_t b,
                                                     bool add) {
    wgmma_fp8<A, B, N>::ss(d, a, b, add);
}

#define GK_WGMMA_S8(N, LIST, i0, i1, i2, ...)                                             \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #i2 ", 0;\n\t"                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" LIST "}, %" #i0 \
                 ", %" #i1 ", p;\n\t}"                                                    \
                 : __VA_ARGS__                                                            \
                 : "l"(a), "l"(b), "r"((int)add))

// wgmma.mma_async.m64nNk32.s32.s8.s8
template <class A, class B, int N>
static __device__ __forceinline__ void wgmma_8bit_ss(int32_t (&d)[N / 2], uint64_t a, uint64_t b,
                                                     bool add) {
    if constexpr (N == 128)
        GK_WGMMA_S8(128, GK_R64, 64, 65, 66, GK_I32_D(0), GK_I32_D(32));
    else if constexpr (N == 64)
        GK_WGMMA_S8(64, GK_R32, 32, 33, 34, GK_I32_D(0));
    else if constexpr (N == 32)
        GK_WGMMA_S8(32, GK_R16, 16, 17, 18, GK_I8_D(0), GK_I8_D(8));
    else if constexpr (N == 16)
        GK_WGMMA_S8(16, GK_R8, 8, 9, 10, GK_I8_D(0));
    else
        static_assert(N < 0, "no wgmma of this width");
}

// As wgmma_pin (wgmma.cuh).
template <int N> static __device__ __forceinline__ void wgmma_pin(int32_t (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#endif
