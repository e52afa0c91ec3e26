/* SPDX-License-Identifier: BSD-3-Clause */
/* dequantize: out = codes * scale, rounded once (gk_dequantize). codes [..., M, K] and scale []
 * or [..., Sm, Sk] have any strides; out is contiguous.
 *
 * A thread takes N groups of VEC columns of a row. It loads all of their codes first, then writes
 * at least 16 bytes at a time. The time is bound by memory bandwidth. */
#include "../../../formats/scales.h"
#include "../../host/launch.cuh"
#include "../../tile/codes.cuh"
#include "../../tile/convert.cuh"

namespace {

constexpr int VEC = 8, N = 4, THREADS = 256;

struct Params {
    const uint8_t *codes;
    void *out;
    gk_scales scales;
    int64_t rows, m, k, col;
    int64_t shape[GK_MAX_DIMS], stride[GK_MAX_DIMS], scale_stride[GK_MAX_DIMS];
    /* ndim: dimensions of codes without the last. lanes: threads that share a row, or a segment of
     * it. groups: rows of a block. */
    int ndim, lanes, groups;
    unsigned segments; /* segments of a row, one for each block */
    gk_dtype dtype;
    bool vec, wide; /* vec: 8 codes are one load; wide: 16-byte stores */
};

template <class T> struct alignas(16) Group {
    T v[VEC];
};

__device__ __forceinline__ float scale_of(const gk_scales &s, int64_t at) {
    return s.dtype == GK_E8M0 ? e8m0_to_f32(((const uint8_t *)s.data)[at])
                              : ((const float *)s.data)[at];
}

template <class T> __device__ __forceinline__ T product(float value, float scale) {
    if constexpr (sizeof(T) == 8)
        return (double)value * scale;
    else
        return from_f32<T>(value * scale);
}

/* Writes this thread's groups, at columns col, col + pitch and so on. The row's scales begin at
 * scale_at. */
template <gk_dtype DTYPE, class T>
__device__ __forceinline__ void write_groups(const Params &p, const uint2 (&codes)[N], T *out,
                                             int64_t col, int pitch, int64_t scale_at) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int64_t at = col + n * pitch;
        if (at >= p.k) return;
        const bool one = p.scales.col_log2 >= 3; /* the whole group shares a scale */
        float scale =
            one ? scale_of(p.scales, scale_at + (at >> p.scales.col_log2) * p.scales.col) : 0;
        Group<T> g;
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const uint32_t code = (i < 4 ? codes[n].x : codes[n].y) >> 8 * (i % 4) & 0xff;
            if (!one && at + i < p.k)
                scale =
                    scale_of(p.scales, scale_at + ((at + i) >> p.scales.col_log2) * p.scales.col);
            g.v[i] = product<T>(code_value(DTYPE, code), scale);
        }
        if (p.wide) {
#pragma unroll
            for (int i = 0; i < (int)sizeof g / 16; ++i) /* whole, as store_some */
                st_global_128((uint4 *)(out + at) + i, ((const uint4 *)&g)[i]);
        } else {
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                if (at + i < p.k) out[at + i] = g.v[i];
        }
    }
}

template <class T> __global__ void __launch_bounds__(THREADS) dequantize_kernel(Params p) {
    const unsigned block = blockIdx.x / p.segments;
    const int64_t row = (int64_t)block * p.groups + threadIdx.x / p.lanes;
    const int pitch = p.lanes * VEC;
    const int64_t col =
        (int64_t)(blockIdx.x - block * p.segments) * pitch * N + threadIdx.x % p.lanes * VEC;
    if (row >= p.rows) return;
    int64_t rest = row, at = 0, scale_at = 0;
    for (int d = p.ndim - 1; d >= 0; --d) {
        const int64_t x = d ? rest % p.shape[d] : rest;
        if (d) rest /= p.shape[d];
        at += x * p.stride[d];
        scale_at +=
            d == p.ndim - 1 ? (x >> p.scales.row_log2) * p.scales.row : x * p.scale_stride[d];
    }
    const uint8_t *const from = p.codes + at + col * p.col;
    uint2 codes[N];
    if (p.vec) {
#pragma unroll
        for (int n = 0; n < N; ++n)
            codes[n] =
                col + n * pitch < p.k ? *(const uint2 *)(from + n * pitch) : make_uint2(0, 0);
    } else {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            uint32_t word[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < VEC; ++i)
                if (col + n * pitch + i < p.k)
                    word[i / 4] |= (uint32_t)from[(n * pitch + i) * p.col] << 8 * (i % 4);
            codes[n] = make_uint2(word[0], word[1]);
        }
    }
    T *const out = (T *)p.out + row * p.k;
    if (p.dtype == GK_E4M3)
        write_groups<GK_E4M3>(p, codes, out, col, pitch, scale_at);
    else if (p.dtype == GK_E5M2)
        write_groups<GK_E5M2>(p, codes, out, col, pitch, scale_at);
    else
        write_groups<GK_I8>(p, codes, out, col, pitch, scale_at);
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_dequantize_args *a = (const gk_dequantize_args *)args;
    Params p = {};
    const int nd = a->codes.ndim;
    p.codes = (const uint8_t *)a->codes.data;
    p.out = a->out.data;
    p.dtype = a->codes.dtype;
    p.k = nd ? a->codes.shape[nd - 1] : 1;
    p.m = nd > 1 ? a->codes.shape[nd - 2] : 1;
    p.rows = 1;
    p.col = nd ? a->codes.stride[nd - 1] : 1;
    p.ndim = nd > 1 ? nd - 1 : 0;
    p.scales = gk_scales_of(&a->scale, p.m, p.k, false);
    for (int d = 0; d < p.ndim; ++d) {
        p.shape[d] = a->codes.shape[d];
        p.stride[d] = a->codes.stride[d];
        p.rows *= p.shape[d];
        if (a->scale.ndim == nd && d < nd - 2) p.scale_stride[d] = a->scale.stride[d];
    }
    p.wide = p.k % VEC == 0 && (uintptr_t)p.out % 16 == 0;
    p.vec = p.k % VEC == 0 && p.col == 1 && (uintptr_t)p.codes % VEC == 0;
    for (int d = 0; d < p.ndim; ++d) p.vec = p.vec && (p.shape[d] == 1 || p.stride[d] % VEC == 0);
    const int64_t groups = gk_max_i64(1, gk_ceil_div(p.k, VEC));
    p.lanes = (int)gk_clamp_i64(gk_round_up(gk_ceil_div(groups, N), 32), 32, THREADS);
    p.groups = THREADS / 2 / p.lanes > 0 ? THREADS / 2 / p.lanes : 1;
    p.segments = (unsigned)gk_ceil_div(groups, (int64_t)p.lanes * N);
    const dim3 grid((unsigned)gk_ceil_div(p.rows, p.groups) * p.segments);
    return launch<dequantize_kernel<T>>("dequantize", ctx, grid, (unsigned)(p.lanes * p.groups), 0,
                                        p);
}

const gk_cuda_instance instances[] = {
    {"dequantize_f32", GK_F32, plan_any, run<float>, {}, NULL},
    {"dequantize_bf16", GK_BF16, plan_any, run<__nv_bfloat16>, {}, NULL},
    {"dequantize_f16", GK_F16, plan_any, run<__half>, {}, NULL},
    {"dequantize_f64", GK_F64, plan_any, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_dequantize_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
