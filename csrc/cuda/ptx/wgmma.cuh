// SPDX-License-Identifier: BSD-3-Clause
// wgmma: asynchronous products of a warpgroup. A comes from shared memory or registers, B from
// shared memory. Checked against PTX ISA 9.0; sm_90a.
//
// d [64][N] += a [64][16] b [16][N] (tf32: 8 of k). Descriptors locate operands in shared memory
// (layout/wgmma.cuh). All 128 threads. From wgmma_commit_group to the wgmma_wait_group that ends
// the group, nothing may access d.
//   d[4 j + e]: row 16 warp + lane / 4 + 8 (e / 2), column 8 j + 2 (lane % 4) + e % 2
#ifndef GPUKERN_PTX_WGMMA_CUH
#define GPUKERN_PTX_WGMMA_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

// wgmma.fence: required before the first wgmma, and after other code has accessed registers that
// a wgmma reads or adds to.
static __device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group: the products since the last commit form a group.
static __device__ __forceinline__ void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group: waits until at most PENDING of the newest groups are in flight.
template <int PENDING> static __device__ __forceinline__ void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Emits no instruction. It keeps the compiler from moving its own uses of d across this point.
template <int M, int N> static __device__ __forceinline__ void wgmma_pin(float (&d)[M][N]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[m][i])::"memory");
}

template <int N> static __device__ __forceinline__ void wgmma_pin(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// d[i] to d[i + 7] as operands; four times as many.
#define GK_D8(i)                                                                                \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define GK_D32(i) GK_D8(i), GK_D8(i + 8), GK_D8(i + 16), GK_D8(i + 24)
// Their names in the assembly text: "%0, %1, ..".
#define GK_R4 "%0, %1, %2, %3"
#define GK_R8 GK_R4 ", %4, %5, %6, %7"
#define GK_R16 GK_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define GK_R24 GK_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define GK_R32 \
    GK_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GK_R48 \
    GK_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define GK_R64 \
    GK_R48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GK_R40 GK_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define GK_R80 \
    GK_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define GK_R88 GK_R80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define GK_R96 GK_R88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define GK_R112                                                                                 \
    GK_R96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
           "%110, %111"
#define GK_R128                                                                                \
    GK_R112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, " \
            "%125, %126, %127"

// One shape. a, b: descriptors. add 0: d is not read. A_T, B_T: 1 if a lies [k][m], b [k][n]. i0
// to i4: numbers of the operands that follow d.
#define GK_WGMMA(N, K, TYPE, LIST, i0, i1, i2, i3, i4, ...)                                    \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #i2 ", 0;\n\t"                       \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." TYPE "." TYPE " {" LIST \
                 "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n\t}"                    \
                 : __VA_ARGS__                                                                 \
                 : "l"(a), "l"(b), "r"(add), "n"(A_T), "n"(B_T))

// The same with a 16-bit a in registers. i0 to i3: its operand numbers; i4: b; i5: add; i6: B_T.
#define GK_WGMMA_RS(N, TYPE, LIST, i0, i1, i2, i3, i4, i5, i6, ...)                               \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #i5 ", 0;\n\t"                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" LIST        \
                 "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n\t}" \
                 : __VA_ARGS__                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(B_T))

template <class T> struct wgmma_16;

#define GK_WGMMA_16(T, TYPE)                                                                       \
    template <> struct wgmma_16<T> {                                                               \
        template <int N, int A_T, int B_T>                                                         \
        static __device__ __forceinline__ void ss(float *d, uint64_t a, uint64_t b, int add) {     \
            if constexpr (N == 8)                                                                  \
                GK_WGMMA(8, 16, TYPE, GK_R4, 4, 5, 6, 7, 8, "+f"(d[0]), "+f"(d[1]), "+f"(d[2]),    \
                         "+f"(d[3]));                                                              \
            else if constexpr (N == 16)                                                            \
                GK_WGMMA(16, 16, TYPE, GK_R8, 8, 9, 10, 11, 12, GK_D8(0));                         \
            else if constexpr (N == 32)                                                            \
                GK_WGMMA(32, 16, TYPE, GK_R16, 16, 17, 18, 19, 20, GK_D8(0), GK_D8(8));            \
            else if constexpr (N == 48)                                                            \
                GK_WGMMA(48, 16, TYPE, GK_R24, 24, 25, 26, 27, 28, GK_D8(0), GK_D8(8), GK_D8(16)); \
            else if constexpr (N == 64)                                                            \
                GK_WGMMA(64, 16, TYPE, GK_R32, 32, 33, 34, 35, 36, GK_D32(0));                     \
            else if constexpr (N == 80)                                                            \
                GK_WGMMA(80, 16, TYPE, GK_R40, 40, 41, 42, 43, 44, GK_D32(0), GK_D8(32));          \
            else if constexpr (N == 96)                                                            \
                GK_WGMMA(96, 16, TYPE, GK_R48, 48, 49, 50, 51, 52, GK_D32(0), GK_D8(32),           \
                         GK_D8(40));                                                               \
            else if constexpr (N == 128)                                                           \
                GK_WGMMA(128, 16, TYPE, GK_R64, 64, 65, 66, 67, 68, GK_D32(0), GK_D32(32));        \
            else if constexpr (N == 160)                                                           \
                GK_WGMMA(160, 16, TYPE, GK_R80, 80, 81, 82, 83, 84, GK_D32(0), GK_D32(32),         \
                         GK_D8(64), GK_D8(72));                                                    \
            else if constexpr (N == 176)                                                           \
                GK_WGMMA(176, 16, TYPE, GK_R88, 88, 89, 90, 91, 92, GK_D32(0), GK_D32(32),         \
                         GK_D8(64), GK_D8(72), GK_D8(80));                                         \
            else if constexpr (N == 192)                                                           \
                GK_WGMMA(192, 16, TYPE, GK_R96, 96, 97, 98, 99, 100, GK_D32(0), GK_D32(32),        \
                         GK_D32(64));                                                              \
            else if constexpr (N == 224)                                                           \
                GK_WGMMA(224, 16, TYPE, GK_R112, 112, 113, 114, 115, 116, GK_D32(0), GK_D32(32),   \
                         GK_D32(64), GK_D8(96), GK_D8(104));                                       \
            else if constexpr (N == 256)                                                           \
                GK_WGMMA(256, 16, TYPE, GK_R128, 128, 129, 130, 131, 132, GK_D32(0), GK_D32(32),   \
                         GK_D32(64), GK_D32(96));                                                  \
            else                                                                                   \
                static_assert(N < 0, "no wgmma of this width");                                    \
        }                                                                                          \
        template <int N, int B_T>                                                                  \
        static __device__ __forceinline__ void rs(float *d, const uint32_t *a, uint64_t b,         \
                                                  int add) {                                       \
            if constexpr (N == 64)                                                                 \
                GK_WGMMA_RS(64, TYPE, GK_R32, 32, 33, 34, 35, 36, 37, 38, GK_D32(0));              \
            else if constexpr (N == 80)                                                            \
                GK_WGMMA_RS(80, TYPE, GK_R40, 40, 41, 42, 43, 44, 45, 46, GK_D32(0), GK_D8(32));   \
            else if constexpr (N == 96)                                                            \
                GK_WGMMA_RS(96, TYPE, GK_R48, 48, 49, 50, 51, 52, 53, 54, GK_D32(0), GK_D8(32),    \
                            GK_D8(40));                                                            \
            else if constexpr (N == 128)                                                           \
                GK_WGMMA_RS(128, TYPE, GK_R64, 64, 65, 66, 67, 68, 69, 70, GK_D32(0), GK_D32(32)); \
            else if constexpr (N == 192)                                                           \
                GK_WGMMA_RS(192, TYPE, GK_R96, 96, 97, 98, 99, 100, 101, 102, GK_D32(0),           \
                            GK_D32(32), GK_D32(64));                                               \
            else if constexpr (N == 256)                                                           \
                GK_WGMMA_RS(256, TYPE, GK_R128, 128, 129, 130, 131, 132, 133, 134, GK_D32(0),      \
                            GK_D32(32), GK_D32(64), GK_D32(96));                                   \
            else                                                                                   \
                static_assert(N < 0, "no wgmma of this width");                                    \
        }                                                                                          \
    };

GK_WGMMA_16(__nv_bfloat16, "bf16")
GK_WGMMA_16(__half, "f16")

// wgmma.mma_async.m64nNk16, both operands in shared memory.
template <class T, int N, int A_T, int B_T>
static __device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b,
                                                bool add) {
    wgmma_16<T>::template ss<N, A_T, B_T>(d, a, b, add);
}

// wgmma.mma_async.m64nNk16 with a in registers; each warp holds an m16k16 fragment of mma. The
// registers must not change until wgmma_wait_group has ended the group.
template <class T, int N, int B_T>
static __device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t *a, uint64_t b,
                                                bool add) {
    wgmma_16<T>::template rs<N, B_T>(d, a, b, add);
}

// tf32: 8 of k; both operands must lie [x][k]. The low 13 bits of float32 are ignored. SS: a and
// b are descriptors. RS: a is in registers, one k8 as frag_a32 (layout/atoms.cuh) maps it. The
// registers must not change until wgmma_wait_group has ended the group.
#define GK_WGMMA_TF32(N, LIST, A, i1, i2, A_OPERANDS, ...)                                \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #i2 ", 0;\n\t"                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k8.f32.tf32.tf32 {" LIST "}, " A \
                 ", %" #i1 ", p, 1, 1;\n\t}"                                              \
                 : __VA_ARGS__                                                            \
                 : A_OPERANDS, "l"(b), "r"(add))
#define GK_A1 "l"(a)
#define GK_A4 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// wgmma.mma_async.m64nNk8.f32.tf32.tf32, both operands in shared memory.
template <int N>
static __device__ __forceinline__ void wgmma_tf32_ss(float (&d)[N / 2], uint64_t a, uint64_t b,
                                                     int add) {
    if constexpr (N == 64)
        GK_WGMMA_TF32(64, GK_R32, "%32", 33, 34, GK_A1, GK_D32(0));
    else if constexpr (N == 128)
        GK_WGMMA_TF32(128, GK_R64, "%64", 65, 66, GK_A1, GK_D32(0), GK_D32(32));
    else if constexpr (N == 192)
        GK_WGMMA_TF32(192, GK_R96, "%96", 97, 98, GK_A1, GK_D32(0), GK_D32(32), GK_D32(64));
    else if constexpr (N == 256)
        GK_WGMMA_TF32(256, GK_R128, "%128", 129, 130, GK_A1, GK_D32(0), GK_D32(32), GK_D32(64),
                      GK_D32(96));
    else
        static_assert(N < 0, "no wgmma of this width");
}

// The same with a in registers.
template <int N>
static __device__ __forceinline__ void wgmma_tf32_rs(float (&d)[N / 2], const uint32_t (&a)[4],
                                                     uint64_t b, int add) {
    if constexpr (N == 64)
        GK_WGMMA_TF32(64, GK_R32, "{%32, %33, %34, %35}", 36, 37, GK_A4, GK_D32(0));
    else if constexpr (N == 128)
        GK_WGMMA_TF32(128, GK_R64, "{%64, %65, %66, %67}", 68, 69, GK_A4, GK_D32(0), GK_D32(32));
    else
        static_assert(N < 0, "no wgmma of this width");
}

#endif
