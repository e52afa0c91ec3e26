// SPDX-License-Identifier: BSD-3-Clause
// wgmma_e4m3: additions to wgmma_8bit for attention: A from registers, 96 columns, and the
// conversion of four floats to codes. Checked against PTX ISA 9.0; sm_90a.
//
// a [64][32] of a warpgroup: register i of a lane holds row 16 warp + lane / 4 + 8 (i % 2), k
// from 16 (i / 2) + 4 (lane % 4) on, four codes with the first in the low byte. The registers
// must not change until wgmma_wait_group has ended the group.
#ifndef GPUKERN_PTX_WGMMA_E4M3_CUH
#define GPUKERN_PTX_WGMMA_E4M3_CUH

#include "wgmma_8bit.cuh"

template <> struct wgmma_fp8<e4m3, e4m3, 96> {
    static __device__ __forceinline__ void ss(float *d, uint64_t a, uint64_t b, int add) {
        GK_WGMMA_FP8(96, "e4m3.e4m3", GK_R48, 48, 49, 50, GK_D32(0), GK_D8(32), GK_D8(40));
    }
};

// i0 to i3: operand numbers of a; i4: b.
#define GK_WGMMA_E4M3_RS(N, LIST, i0, i1, i2, i3, i4, ...)                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" LIST "}, {%" #i0 \
                 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", 1, 1, 1;"                         \
                 : __VA_ARGS__                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// wgmma.mma_async.m64nNk32.f32.e4m3.e4m3: d [64][N] += a [64][32] b [32][N], with a in registers
// and b K-major in shared memory.
template <int N>
static __device__ __forceinline__ void wgmma_e4m3_rs(float (&d)[N / 2], const uint32_t *a,
                                                     uint64_t b) {
    if constexpr (N == 64)
        GK_WGMMA_E4M3_RS(64, GK_R32, 32, 33, 34, 35, 36, GK_D32(0));
    else if constexpr (N == 128)
        GK_WGMMA_E4M3_RS(128, GK_R64, 64, 65, 66, 67, 68, GK_D32(0), GK_D32(32));
    else if constexpr (N == 192)
        GK_WGMMA_E4M3_RS(192, GK_R96, 96, 97, 98, 99, 100, GK_D32(0), GK_D32(32), GK_D32(64));
    else if constexpr (N == 256)
        GK_WGMMA_E4M3_RS(256, GK_R128, 128, 129, 130, 131, 132, GK_D32(0), GK_D32(32), GK_D32(64),
                         GK_D32(96));
    else
        static_assert(N < 0, "no wgmma of this width");
}

// cvt.rn.satfinite.e4m3x2.f32, twice: to nearest even, saturates at 448, NaN stays NaN. The
// first goes to the low byte.
static __device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x4(float w0, float w1, float w2,
                                                                   float w3) {
    uint32_t y;
    asm("{\n\t.reg .b16 lo, hi;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n\t"
        "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n\t"
        "mov.b32 %0, {lo, hi};\n\t}"
        : "=r"(y)
        : "f"(w0), "f"(w1), "f"(w2), "f"(w3));
    return y;
}

#endif
