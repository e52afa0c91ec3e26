/* SPDX-License-Identifier: BSD-3-Clause */
/* quantize.cuh: a matrix, silu(gate) * up, or an RMSNorm, as 8-bit codes and scales (gk_quantize).
 *
 *   scale = max(amax / q, 2^-126)   codes = saturate(round-even(x / scale))   of each block of gk_granularity
 *
 * x [..., M, K] float32 | bfloat16 | float16, any strides   codes, scale, sum contiguous
 * Blocks within a row (row, 1x128, 1x32): a block of threads owns a row, in registers up to SEGMENT columns a thread group, else it
 * reads the row again for each statistic. 128x128: a block owns one, 64 values a thread. One scale for all: a first kernel leaves
 * an amax for each of its blocks, a second one reads them all and writes. An RMSNorm whose scales span rows is first written as
 * float32.
 * amax is a maximum of bits, those of infinities and NaN the largest. x / scale is a correctly rounded quotient: a product with
 * 1 / scale and one Newton step on its remainder (Markstein 1990), which takes 3 instructions.
 * Workspace: amax of the first kernel's blocks; the RMSNorm in float32. Bandwidth bound. */
#ifndef GPUKERN_CUDA_QUANT_QUANTIZE_CUH
#define GPUKERN_CUDA_QUANT_QUANTIZE_CUH

#include "../../scales.h"
#include "../gemm/activation.cuh"
#include "../host/launch.cuh"
#include "../tile/codes.cuh"
#include "../tile/convert.cuh"
#include "../tile/reduce.cuh"

namespace {

constexpr int VEC = 8; /* columns of a thread at a time: 16 bytes of a 16-bit x */
constexpr int ROW_THREADS = 256;
constexpr int SEGMENT = ROW_THREADS * VEC; /* columns that the largest block takes at a time */
constexpr int AMAX_BLOCKS = 1056;          /* of the first kernel for a whole tensor: 8 an SM of Hopper */

struct Source { /* [..., M, K] */
    const void *data;
    int64_t stride[GK_MAX_DIMS]; /* leading dimensions as in Params::shape */
    int64_t col;
};

struct Params {
    Source x, up, residual;
    const void *weight, *given;
    const float *scale_ub;
    uint8_t *codes;
    void *scale, *sum;
    float *values;  /* the row kernel writes these in place of codes */
    uint32_t *amax; /* [AMAX_BLOCKS] */
    int64_t rows, m, k, weight_step;
    int64_t shape[GK_MAX_DIMS];
    int ndim, what, granularity, amax_blocks;
    float eps, largest;
    gk_dtype dtype;
    bool weight_f32, vec, scale_e8m0;
};

/* ---- 1. values ---------------------------------------------------------------------------------------- */
__device__ __forceinline__ int64_t row_offset(const Params &p, const Source &s, int64_t row) {
    int64_t at = 0;
    for (int d = p.ndim - 1; d > 0; --d) {
        at += row % p.shape[d] * s.stride[d];
        row /= p.shape[d];
    }
    return at + row * s.stride[0];
}

/* Columns [col, col + VEC) of a row, zeros past n. */
template <class T>
__device__ __forceinline__ void load_vec(const T *row, int64_t step, int64_t col, int64_t n, bool vec,
                                         float (&v)[VEC]) {
    if (vec) {
        union {
            uint4 bits[sizeof(T) * VEC / 16];
            T t[VEC];
        } u;
#pragma unroll
        for (int i = 0; i < (int)sizeof(T) * VEC / 16; ++i) u.bits[i] = make_uint4(0, 0, 0, 0);
        if (col < n)
#pragma unroll
            for (int i = 0; i < (int)sizeof(T) * VEC / 16; ++i) u.bits[i] = ((const uint4 *)(row + col))[i];
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = to_f32(u.t[i]);
    } else {
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = col + i < n ? to_f32(row[(col + i) * step]) : 0.f;
    }
}

/* Of a row of x, before a norm's statistics. */
template <class T>
__device__ __forceinline__ void make_vec(const Params &p, const T *const (&row)[3], int64_t at_sum, int64_t col,
                                         float (&v)[VEC]) {
    load_vec(row[0], p.x.col, col, p.k, p.vec, v);
    if (p.what == GK_QUANTIZE_SILU_MUL) {
        float up[VEC];
        load_vec(row[1], p.up.col, col, p.k, p.vec, up);
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[i] = __fdiv_rn(v[i], 1.f + __expf(-v[i])) * up[i];
    } else if (row[2]) {
        float more[VEC];
        load_vec(row[2], p.residual.col, col, p.k, p.vec, more);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const T h = from_f32<T>(v[i] + more[i]);
            v[i] = to_f32(h);
            if (p.sum && col + i < p.k) ((T *)p.sum)[at_sum + col + i] = h;
        }
    }
}

/* ---- 2. scales ---------------------------------------------------------------------------------------- */
template <int N> __device__ __forceinline__ uint32_t amax_bits(const float (&v)[N]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
    return most;
}

__device__ __forceinline__ uint32_t block_amax(uint32_t x, uint32_t *place) {
    x = __reduce_max_sync(0xffffffffu, x);
    __syncthreads(); /* the places were read */
    if (threadIdx.x % 32 == 0) place[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? place[threadIdx.x % 32] : 0;
    return __reduce_max_sync(0xffffffffu, x);
}

__device__ __forceinline__ float scale_of(const Params &p, uint32_t bits) {
    if (bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    float amax = __uint_as_float(bits);
    if (p.scale_ub) amax = fminf(amax, *p.scale_ub);
    const float scale = fmaxf(__fdiv_rn(amax, p.largest), 0x1p-126f);
    return p.granularity == GK_PER_1X32 ? e8m0_to_f32(f32_to_e8m0(scale)) : scale;
}

/* The scale of a block, made or given; `writes`: this thread keeps it. */
__device__ __forceinline__ float scale_at(const Params &p, int64_t block, uint32_t bits, bool writes) {
    if (p.given) return p.scale_e8m0 ? e8m0_to_f32(((const uint8_t *)p.given)[block]) : ((const float *)p.given)[block];
    const float scale = scale_of(p, bits);
    if (writes) {
        if (p.scale_e8m0)
            ((uint8_t *)p.scale)[block] = (uint8_t)f32_to_e8m0(scale);
        else
            ((float *)p.scale)[block] = scale;
    }
    return scale;
}

struct Quotient {
    float scale, inverse;
    bool usual; /* neither inverse nor remainder leaves the normal numbers */
    static __device__ __forceinline__ Quotient by(float s) { return {s, __frcp_rn(s), s > 0x1p-90f && s < 0x1p90f}; }
    __device__ __forceinline__ float of(float x) const {
        if (!usual) return __fdiv_rn(x, scale);
        const float q = x * inverse;
        const float better = __fmaf_rn(__fmaf_rn(-q, scale, x), inverse, q);
        return fabsf(q) <= 3e38f ? better : q; /* infinities and NaN */
    }
};

template <class Codes>
__device__ __forceinline__ void store_vec(const Params &p, int64_t row, int64_t col, const float (&v)[VEC],
                                          float scale) {
    if (col >= p.k) return;
    const Quotient by = Quotient::by(scale);
    float q[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) q[i] = by.of(v[i]);
    const uint2 codes = make_uint2(codes_x4<Codes>(p.dtype, q), codes_x4<Codes>(p.dtype, q + 4));
    uint8_t *to = p.codes + row * p.k + col;
    if (p.k % VEC == 0) {
        *(uint2 *)to = codes;
    } else {
#pragma unroll
        for (int i = 0; i < VEC; ++i)
            if (col + i < p.k) to[i] = (uint8_t)((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
    }
}

/* ---- 3. blocks within a row ------------------------------------------------------------------------------ */
template <class T, class Codes, int CHUNKS>
__global__ void __launch_bounds__(ROW_THREADS) quantize_rows_kernel(Params p) {
    __shared__ uint32_t place[32];
    __shared__ float sums[32];
    const int64_t row = blockIdx.x, step = (int64_t)blockDim.x * VEC, segment = step * CHUNKS;
    const T *const rows[3] = {(const T *)p.x.data + row_offset(p, p.x, row),
                              p.up.data ? (const T *)p.up.data + row_offset(p, p.up, row) : nullptr,
                              p.residual.data ? (const T *)p.residual.data + row_offset(p, p.residual, row) : nullptr};
    const bool once = p.k <= segment; /* a thread keeps its values */
    float v[CHUNKS][VEC];
    auto make = [&](int64_t begin) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) make_vec(p, rows, row * p.k, begin + c * step + threadIdx.x * VEC, v[c]);
    };
    float rstd = 1;
    if (p.what == GK_QUANTIZE_RMS_NORM) {
        float squares = 0;
        for (int64_t begin = 0; begin < p.k; begin += segment) {
            make(begin);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int i = 0; i < VEC; ++i) squares += v[c][i] * v[c][i];
        }
        squares = warp_sum(squares);
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
        __syncthreads();
        squares = warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.f);
        rstd = 1.f / sqrtf(squares / (float)p.k + p.eps);
    }
    auto norm = [&](int64_t begin) {
        if (p.what != GK_QUANTIZE_RMS_NORM) return;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                const int64_t col = begin + c * step + threadIdx.x * VEC + i;
                float w = 1;
                if (p.weight && col < p.k)
                    w = p.weight_f32 ? ((const float *)p.weight)[col * p.weight_step]
                                     : to_f32(((const T *)p.weight)[col * p.weight_step]);
                v[c][i] = v[c][i] * rstd * w;
            }
    };
    bool made = once && p.what == GK_QUANTIZE_RMS_NORM, normed = false;
    uint32_t all = 0;
    if (p.granularity == GK_PER_ROW && !p.given && !p.values) {
        for (int64_t begin = 0; begin < p.k; begin += segment) {
            if (!made) make(begin);
            norm(begin);
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) all = max(all, amax_bits(v[c]));
        }
        made = normed = once;
        all = block_amax(all, place);
    }
    const int log2 = p.granularity == GK_PER_1X128 ? 7 : 5;
    const int64_t across = (p.k + (1 << log2) - 1) >> log2;
    const float whole = p.granularity == GK_PER_ROW && !p.values ? scale_at(p, row, all, threadIdx.x == 0) : 0.f;
    for (int64_t begin = 0; begin < p.k; begin += segment) {
        if (!made) make(begin);
        if (!normed) norm(begin);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int64_t col = begin + c * step + threadIdx.x * VEC;
            if (p.values) {
#pragma unroll
                for (int i = 0; i < VEC; ++i)
                    if (col + i < p.k) p.values[row * p.k + col + i] = v[c][i];
                continue;
            }
            float scale = whole;
            if (p.granularity != GK_PER_ROW) {
                uint32_t bits = amax_bits(v[c]); /* of the 16 or 4 neighbours that share the block */
                bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
                bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
                if (log2 == 7) {
                    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 4));
                    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 8));
                }
                const int64_t block = min(col >> log2, across - 1);
                scale = scale_at(p, row * across + block, bits, col < p.k && (col & ((1 << log2) - 1)) == 0);
            }
            store_vec<Codes>(p, row, col, v[c], scale);
        }
    }
}

/* ---- 4. blocks of 128 x 128 ------------------------------------------------------------------------------ */
template <class T, class Codes> __global__ void __launch_bounds__(256) quantize_blocks_kernel(Params p) {
    __shared__ uint32_t place[32];
    constexpr int EACH = 8; /* rows of a thread */
    const int64_t tall = (p.m + GK_SCALE_BLOCK - 1) / GK_SCALE_BLOCK, across = gridDim.x;
    const int64_t first = blockIdx.y / tall * p.m, end = first + p.m;
    const int64_t begin = first + blockIdx.y % tall * GK_SCALE_BLOCK + threadIdx.x / 16;
    const int64_t col = (int64_t)blockIdx.x * GK_SCALE_BLOCK + threadIdx.x % 16 * VEC;
    float v[EACH][VEC];
    uint32_t most = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int64_t row = begin + e * 16;
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[e][i] = 0;
        if (row < end) {
            const T *const rows[3] = {(const T *)p.x.data + row_offset(p, p.x, row),
                                      p.up.data ? (const T *)p.up.data + row_offset(p, p.up, row) : nullptr, nullptr};
            make_vec(p, rows, 0, col, v[e]);
        }
        most = max(most, amax_bits(v[e]));
    }
    most = block_amax(most, place);
    const float scale = scale_at(p, blockIdx.y * across + blockIdx.x, most, threadIdx.x == 0);
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (begin + e * 16 < end) store_vec<Codes>(p, begin + e * 16, col, v[e], scale);
}

/* ---- 5. one scale ---------------------------------------------------------------------------------------- */
template <class T, class Codes, bool FIRST> __global__ void __launch_bounds__(256) quantize_tensor_kernel(Params p) {
    __shared__ uint32_t place[32];
    const int64_t each = (p.k + VEC - 1) / VEC, total = p.rows * each;
    uint32_t most = 0;
    float scale = 1;
    if (!FIRST) {
        for (int i = threadIdx.x; i < p.amax_blocks; i += blockDim.x) most = max(most, p.amax[i]);
        most = block_amax(most, place);
        scale = scale_at(p, 0, most, blockIdx.x == 0 && threadIdx.x == 0);
    }
    for (int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; at < total;
         at += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = at / each, col = at % each * VEC;
        const T *const rows[3] = {(const T *)p.x.data + row_offset(p, p.x, row),
                                  p.up.data ? (const T *)p.up.data + row_offset(p, p.up, row) : nullptr, nullptr};
        float v[VEC];
        make_vec(p, rows, 0, col, v);
        if (FIRST)
            most = max(most, amax_bits(v));
        else
            store_vec<Codes>(p, row, col, v, scale);
    }
    if (!FIRST) return;
    most = block_amax(most, place);
    if (threadIdx.x == 0) p.amax[blockIdx.x] = most;
}

/* ---- 6. launches ------------------------------------------------------------------------------------------- */
Source source_of(const gk_tensor *t, Params &p) {
    Source s = {};
    if (!t) return s;
    const int nd = t->ndim;
    s.data = t->data, s.col = nd ? t->stride[nd - 1] : 1;
    for (int d = 0; d < nd - 1; ++d) s.stride[d] = t->stride[d];
    if (!((uintptr_t)t->data % 16 == 0 && rows_aligned(*t) && (s.col == 1 || p.k == 1))) p.vec = false;
    return s;
}

Params params_of(const gk_quantize_args *a) {
    Params p = {};
    const int nd = a->x.ndim;
    p.k = nd ? a->x.shape[nd - 1] : 1, p.m = nd > 1 ? a->x.shape[nd - 2] : 1, p.rows = 1;
    p.ndim = nd > 1 ? nd - 1 : 1, p.shape[0] = 1;
    for (int d = 0; d < nd - 1; ++d) p.shape[d] = a->x.shape[d], p.rows *= a->x.shape[d];
    p.vec = p.k % VEC == 0;
    p.x = source_of(&a->x, p), p.up = source_of(a->up, p), p.residual = source_of(a->residual, p);
    if (a->weight)
        p.weight = a->weight->data, p.weight_step = a->weight->stride[0], p.weight_f32 = a->weight->dtype == GK_F32;
    p.given = a->given ? a->given->data : nullptr;
    p.scale_ub = a->scale_ub ? (const float *)a->scale_ub->data : nullptr;
    p.codes = (uint8_t *)a->codes.data, p.scale = a->scale.data, p.sum = a->sum ? a->sum->data : nullptr;
    p.scale_e8m0 = (a->given ? a->given->dtype : a->scale.dtype) == GK_E8M0;
    p.what = a->what, p.granularity = a->granularity, p.eps = (float)a->eps, p.dtype = a->codes.dtype;
    p.largest = a->codes.dtype == GK_E4M3 ? 448.f : a->codes.dtype == GK_E5M2 ? 57344.f : 127.f;
    return p;
}

bool spans_rows(const gk_quantize_args *a) {
    return a->granularity == GK_PER_TENSOR || a->granularity == GK_PER_128X128;
}

bool plan_quantize(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    const gk_quantize_args *a = (const gk_quantize_args *)args;
    plan->workspace_bytes = 4 * 1088; /* of AMAX_BLOCKS, in whole lines */
    if (a->what == GK_QUANTIZE_RMS_NORM && spans_rows(a)) plan->workspace_bytes += 4 * (size_t)gk_numel(&a->x);
    plan->tasks = a->x.ndim ? gk_numel(&a->x) / gk_max_i64(1, a->x.shape[a->x.ndim - 1]) : 1;
    return true;
}

template <class T, class Codes> gk_status run_rows(const gk_context *ctx, const Params &p) {
    const unsigned threads = (unsigned)gk_clamp_i64(gk_round_up(gk_ceil_div(p.k, VEC), 32), 32, ROW_THREADS);
    const dim3 grid((unsigned)p.rows);
    if (p.k <= SEGMENT) return launch<quantize_rows_kernel<T, Codes, 1>>("quantize", ctx, grid, threads, 0, p);
    if (p.k <= 2 * SEGMENT) return launch<quantize_rows_kernel<T, Codes, 2>>("quantize", ctx, grid, threads, 0, p);
    return launch<quantize_rows_kernel<T, Codes, 4>>("quantize", ctx, grid, threads, 0, p);
}

template <class T, class Codes> gk_status run_spanning(const gk_context *ctx, Params &p) {
    if (p.granularity == GK_PER_128X128) {
        const dim3 grid((unsigned)gk_ceil_div(p.k, GK_SCALE_BLOCK),
                        (unsigned)(p.rows / gk_max_i64(1, p.m) * gk_ceil_div(p.m, GK_SCALE_BLOCK)));
        return launch<quantize_blocks_kernel<T, Codes>>("quantize", ctx, grid, 256, 0, p);
    }
    p.amax_blocks = (int)gk_clamp_i64(gk_ceil_div(p.rows * gk_ceil_div(p.k, VEC), 256), 1, AMAX_BLOCKS);
    const dim3 grid((unsigned)p.amax_blocks);
    if (!p.given) {
        const gk_status status = launch<quantize_tensor_kernel<T, Codes, true>>("quantize", ctx, grid, 256, 0, p);
        if (status != GK_OK) return status;
    }
    return launch<quantize_tensor_kernel<T, Codes, false>>("quantize", ctx, grid, 256, 0, p);
}

template <class T, class Codes>
gk_status run_quantize(const gk_context *ctx, const void *args, const gk_plan *, void *workspace) {
    const gk_quantize_args *a = (const gk_quantize_args *)args;
    Params p = params_of(a);
    p.amax = (uint32_t *)workspace;
    if (!spans_rows(a)) return run_rows<T, Codes>(ctx, p);
    if (a->what != GK_QUANTIZE_RMS_NORM) return run_spanning<T, Codes>(ctx, p);
    p.values = (float *)workspace + 1088;
    if (p.rows > 0) {
        const gk_status status = run_rows<T, Codes>(ctx, p);
        if (status != GK_OK) return status;
    }
    Params q = p; /* the norm, dense */
    q.what = GK_QUANTIZE_X, q.values = nullptr, q.sum = nullptr, q.weight = nullptr;
    q.up = q.residual = Source{}, q.x = Source{p.values, {}, 1};
    q.ndim = 1, q.shape[0] = p.rows, q.x.stride[0] = p.k, q.vec = p.k % VEC == 0;
    return run_spanning<float, Codes>(ctx, q);
}

} // namespace

#endif
