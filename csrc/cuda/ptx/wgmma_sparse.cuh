// SPDX-License-Identifier: BSD-3-Clause
// wgmma_sparse: products of a warpgroup whose first operand has two non-zeros in every four
// elements along k. Checked against PTX ISA 9.0; sm_90a.
//
// d [64][N] += a [64][K] b [K][N], both K-major in shared memory. K is 64 bytes of b. a holds
// only its K / 2 values, 32 bytes a row. d has the layout of wgmma.cuh. meta gives the values'
// positions: two numbers of 2 bits for every four elements, the lower first, from the lowest
// bits on:
//   16 bits   SELECT 0 uses lanes 0 and 1 of each quad, SELECT 1 lanes 2 and 3. Lane 2 SELECT + i
//             of quad q holds 16 of k from 16 i on: row 16 warp + q in its low half, and row
//             16 warp + q + 8 in its high half.
//   8 bits    Lane i of quad q holds 32 of k from 32 (i / 2) on, of row 16 warp + q + 8 (i % 2).
//             SELECT is 0.
// The instruction reads meta's registers while it runs.
#ifndef GPUKERN_PTX_WGMMA_SPARSE_CUH
#define GPUKERN_PTX_WGMMA_SPARSE_CUH

#include "wgmma_8bit.cuh"

#define GK_WGMMA_SP(N, K, TYPES, TAIL, LIST, i0, i1, i2, i3, i4, ...)                            \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #i3 ", 0;\n\t"                         \
                 "wgmma.mma_async.sp.sync.aligned.m64n" #N "k" #K "." TYPES " {" LIST "}, %" #i0 \
                 ", %" #i1 ", %" #i2 ", %" #i4 ", p" TAIL ";\n\t}"                               \
                 : __VA_ARGS__                                                                   \
                 : "l"(a), "l"(b), "r"(meta), "r"((int)add), "n"(SELECT))

template <class T> struct wgmma_sp;

#define GK_WGMMA_SP_TYPE(T, K, TYPES, TAIL)                                                        \
    template <> struct wgmma_sp<T> {                                                               \
        template <int N, int SELECT>                                                               \
        static __device__ __forceinline__ void ss(float *d, uint64_t a, uint64_t b, uint32_t meta, \
                                                  bool add) {                                      \
            if constexpr (N == 256)                                                                \
                GK_WGMMA_SP(256, K, TYPES, TAIL, GK_R128, 128, 129, 130, 131, 132, GK_D32(0),      \
                            GK_D32(32), GK_D32(64), GK_D32(96));                                   \
            else if constexpr (N == 128)                                                           \
                GK_WGMMA_SP(128, K, TYPES, TAIL, GK_R64, 64, 65, 66, 67, 68, GK_D32(0),            \
                            GK_D32(32));                                                           \
            else if constexpr (N == 64)                                                            \
                GK_WGMMA_SP(64, K, TYPES, TAIL, GK_R32, 32, 33, 34, 35, 36, GK_D32(0));            \
            else                                                                                   \
                static_assert(N < 0, "no sparse wgmma of this width");                             \
        }                                                                                          \
    };

GK_WGMMA_SP_TYPE(__nv_bfloat16, 32, "f32.bf16.bf16", ", 1, 1, 0, 0")
GK_WGMMA_SP_TYPE(__half, 32, "f32.f16.f16", ", 1, 1, 0, 0")
GK_WGMMA_SP_TYPE(e4m3, 64, "f32.e4m3.e4m3", ", 1, 1")

template <> struct wgmma_sp<int8_t> {
    template <int N, int SELECT>
    static __device__ __forceinline__ void ss(int32_t *d, uint64_t a, uint64_t b, uint32_t meta,
                                              bool add) {
        if constexpr (N == 256)
            GK_WGMMA_SP(256, 64, "s32.s8.s8", "", GK_R128, 128, 129, 130, 131, 132, GK_I32_D(0),
                        GK_I32_D(32), GK_I32_D(64), GK_I32_D(96));
        else if constexpr (N == 64)
            GK_WGMMA_SP(64, 64, "s32.s8.s8", "", GK_R32, 32, 33, 34, 35, 36, GK_I32_D(0));
        else
            static_assert(N < 0, "no sparse wgmma of this width");
    }
};

// wgmma.mma_async.sp.m64nNk32; for 8 bits k64.
template <class T, int N, int SELECT, class D>
static __device__ __forceinline__ void wgmma_sp_ss(D (&d)[N / 2], uint64_t a, uint64_t b,
                                                   uint32_t meta, bool add) {
    wgmma_sp<T>::template ss<N, SELECT>(d, a, b, meta, add);
}

// As wgmma_pin: keeps meta's registers unchanged up to this point.
template <int N> static __device__ __forceinline__ void wgmma_pin_meta(uint32_t (&meta)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(meta[i])::"memory");
}

#endif
