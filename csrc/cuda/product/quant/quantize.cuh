/* SPDX-License-Identifier: BSD-3-Clause */
/* quantize.cuh: converts a matrix, silu(gate) * up, or an RMSNorm to 8-bit codes and scales
 * (gk_quantize).
 *
 *   scale = max(amax / q, 2^-126)   codes = saturate(round-even(x / scale))
 *
 * gk_granularity gives the block of values that shares a scale.
 * x [..., M, K] float32 | bfloat16 | float16, any strides. codes, scale and sum are contiguous.
 *
 * Blocks within a row (row, 1x128, 1x32): up to 16 warps share a row, and a thread holds 32 of
 * its columns in registers. If a longer row needs a statistic of the whole row, it is read again
 * for each statistic (quantize_looped_kernel).
 *
 * Blocks of 128x128: one thread block each, 32 values a thread.
 *
 * One scale for the tensor: a first kernel writes one amax for each of its blocks. A second kernel
 * reads them all, and reads x backwards, because L2 still holds its end.
 *
 * An RMSNorm whose scales span several rows is first written as float32.
 *
 * Workspace: the first kernel's amax values, and the RMSNorm in float32. Bandwidth bound: x is
 * read once, or twice with one scale for the tensor. */
#ifndef GPUKERN_CUDA_QUANT_QUANTIZE_CUH
#define GPUKERN_CUDA_QUANT_QUANTIZE_CUH

#include "../../../core/invariant.h"
#include "../../ptx/prefetch_l2.cuh"
#include "quantize_values.cuh"

namespace {

/* ---- 1. blocks within a row ------------------------------------------------------------------ */
/* A thread's part of a row: groups at columns col, col + pitch and so on. */
template <class T> struct Row {
    int lane, pitch;
    bool is_row;
    int64_t row, first; /* first: this thread's first column */
    const T *x, *more;

    __device__ __forceinline__ explicit Row(const Params &p) {
        const int lanes = 32 * p.warps;
        const unsigned block = blockIdx.x / p.segments;
        lane = threadIdx.x % lanes;
        pitch = lanes * VEC;
        row = (int64_t)block * p.groups + threadIdx.x / lanes;
        is_row = row < p.rows;
        first = (int64_t)(blockIdx.x - block * p.segments) * pitch * N + lane * VEC;
        x = (const T *)p.x.data + row_offset(p, p.x, row);
        more = p.more.data ? (const T *)p.more.data + row_offset(p, p.more, row) : nullptr;
    }

    /* Number of columns, at most VEC, of group n counted from col on. */
    __device__ __forceinline__ int left(const Params &p, int64_t col, int n) const {
        const int64_t left = p.k - col - n * pitch;
        return is_row ? (int)(left < VEC ? left : VEC) : 0;
    }

    template <int FORM, class V>
    __device__ __forceinline__ void make(const Params &p, int64_t col, bool keeps_sum,
                                         V (&v)[N]) const {
        const Place<T> at = {x + col * p.x.col, more ? more + col * p.more.col : nullptr,
                             pitch * p.x.col, pitch * p.more.col};
        T *const sum = p.sum && keeps_sum ? (T *)p.sum + row * p.k + col : nullptr;
        make_groups<FORM>(p, at, [&](int n) { return left(p, col, n); }, v, sum, pitch);
    }

    /* The first AT_ONCE groups of the weight are under way while rstd() is computed. */
    template <int AT_ONCE, class W, class Rstd>
    __device__ __forceinline__ void multiply(const Params &p, int64_t col, const Rstd &rstd,
                                             const W *weight, Group<float> (&v)[N]) const {
        float by = 0;
#pragma unroll
        for (int begin = 0; begin < N; begin += AT_ONCE) {
            Group<W> w[AT_ONCE];
            load_groups(w, weight + (col + begin * pitch) * p.weight_step, pitch * p.weight_step,
                        p.weight_step, p.weight_vec,
                        [&](int n) { return left(p, col, begin + n); });
            if (begin == 0) by = rstd();
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
                for (int i = 0; i < VEC; ++i) {
                    float &x = v[begin + n].v[i];
                    x = x * by * w[n].get(i);
                }
        }
    }
    __device__ __forceinline__ void prefetch_weight(const Params &p) const {
        const int bytes = p.weight_f32 ? 4 : (int)sizeof(T);
#pragma unroll
        for (int n = 0; n < N; ++n)
            if (left(p, first, n) > 0)
                prefetch_l2((const char *)p.weight + (first + n * pitch) * bytes);
    }
    /* Applies the norm to the thread's values of its row. */
    template <int AT_ONCE, class Rstd>
    __device__ __forceinline__ void norm(const Params &p, int64_t col, const Rstd &rstd,
                                         Group<float> (&v)[N]) const {
        if (!p.weight) {
            const float by = rstd();
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int i = 0; i < VEC; ++i) v[n].v[i] *= by;
        } else if (p.weight_f32) {
            multiply<AT_ONCE>(p, col, rstd, (const float *)p.weight, v);
        } else {
            multiply<AT_ONCE>(p, col, rstd, (const T *)p.weight, v);
        }
    }

    __device__ __forceinline__ float rstd_of(const Params &p, float squares, float *place) const {
        return 1.f / sqrtf(sum_of_warps(squares, place, p.warps) / (float)p.k + p.eps);
    }
    /* The scale of a whole row or tensor. most: amax of this thread's values. */
    __device__ __forceinline__ Quotient by_row(const Params &p, uint32_t most,
                                               uint32_t *place) const {
        if (!p.given) most = max_of_warps(most, place, p.warps);
        if (!is_row) return {};
        return Quotient::by(scale_at(p, p.granularity == GK_PER_ROW ? row : 0, most, lane == 0));
    }

    /* Stores codes with one scale, codes with a scale for each 128 or 32 columns, or values. */
    template <class Codes, int FORM, class V>
    __device__ __forceinline__ void store(const Params &p, int64_t col, const V (&v)[N],
                                          const Quotient &by) const {
        const int64_t to = row * p.k + col;
        if (FORM == MADE && p.values) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                Group<float> out;
#pragma unroll
                for (int i = 0; i < VEC; ++i) out.v[i] = v[n].get(i);
                store_group(p.values + to + n * pitch, out, left(p, col, n), p.wide);
            }
        } else if (p.granularity <= GK_PER_ROW) {
#pragma unroll
            for (int n = 0; n < N; ++n)
                store_codes<Codes>(p, p.codes + to + n * pitch, left(p, col, n), v[n], by);
        } else {
            const int log2 = p.granularity == GK_PER_1X128 ? 7 : 5;
            const int64_t across = (p.k + (1 << log2) - 1) >> log2;
#pragma unroll
            for (int n = 0; n < N; ++n) {
                /* amax over the 16 or 4 neighbouring lanes that share the block */
                uint32_t bits = amax_bits(v[n]);
                bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 1));
                bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 2));
                if (log2 == 7) {
                    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 4));
                    bits = max(bits, __shfl_xor_sync(0xffffffffu, bits, 8));
                }
                const int64_t at = col + n * pitch;
                if (left(p, col, n) <= 0) continue;
                const float scale =
                    scale_at(p, row * across + (at >> log2), bits, (at & ((1 << log2) - 1)) == 0);
                const bool power = log2 == 5 && !p.given;
                store_codes<Codes>(p, p.codes + to + n * pitch, left(p, col, n), v[n],
                                   power ? Quotient::by_power(scale) : Quotient::by(scale),
                                   power || !(p.given || p.scale_ub));
            }
        }
    }
};

template <class V> __device__ __forceinline__ float squares_of(const V (&v)[N]) {
    float squares = 0;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < VEC; ++i) squares += v[n].get(i) * v[n].get(i);
    return squares;
}
template <class V> __device__ __forceinline__ uint32_t amax_of(const V (&v)[N]) {
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) most = max(most, amax_bits(v[n]));
    return most;
}

/* True if one scale covers at least a row. A scale for the whole tensor reaches these kernels only
 * if it is given or if the tensor is one row. */
__device__ __forceinline__ bool by_rows(const Params &p) {
    return p.granularity <= GK_PER_ROW && !p.values;
}

/* Gated rows have a kernel for up to 14 warps, two blocks of which fill an SM at 72 registers. With
 * one block an SM, no loads were under way while it computed (341 us instead of the 137 that the
 * bytes take, 8192 x 14336, H200). */
constexpr int GATED_WARPS = 14;

template <class T, class Codes, int FORM>
__global__ void __launch_bounds__(32 * (FORM == GATED ? GATED_WARPS : MOST_WARPS),
                                  FORM == GATED && sizeof(T) == 2 ? 2 : 0)
    quantize_rows_kernel(Params p) {
    __shared__ uint32_t peaks[MOST_WARPS];
    __shared__ float sums[MOST_WARPS];
    const Row<T> row(p);
    if (Codes::overlaps && FORM == MADE && p.weight_vec && threadIdx.x % 8 == 0)
        row.prefetch_weight(p); /* its latency would otherwise follow the reduction */
    Codes::begin();
    typename values_of<FORM, T>::type v[N];
    row.template make<FORM>(p, row.first, true, v);
    if constexpr (FORM == MADE)
        if (p.what == GK_QUANTIZE_RMS_NORM)
            row.template norm<N>(
                p, row.first, [&] { return row.rstd_of(p, squares_of(v), sums); }, v);
    Quotient by = {};
    if (by_rows(p)) by = row.by_row(p, p.given ? 0 : amax_of(v), peaks);
    row.template store<Codes, FORM>(p, row.first, v, by);
}

/* For rows too long for registers: reads the row once for the norm, once for amax, and once for
 * the codes. */
template <class T, class Codes>
__global__ void __launch_bounds__(32 * MOST_WARPS) quantize_looped_kernel(Params p) {
    __shared__ uint32_t peaks[MOST_WARPS];
    __shared__ float sums[MOST_WARPS];
    const Row<T> row(p);
    const bool norm = p.what == GK_QUANTIZE_RMS_NORM;
    enum {
        SQUARES,
        AMAX,
        CODES
    };
    float rstd = 1;
    Quotient by = {};
    if (by_rows(p) && p.given) by = row.by_row(p, 0, peaks);
#pragma unroll 1
    for (int pass = norm ? SQUARES : AMAX; pass <= CODES; ++pass) {
        if (pass == AMAX && (!by_rows(p) || p.given)) continue;
        float squares = 0;
        uint32_t most = 0;
#pragma unroll 1
        for (int64_t col = row.first; col - row.first < p.k; col += row.pitch * N) {
            Group<float> v[N];
            row.template make<MADE>(p, col, pass == CODES, v);
            if (pass == SQUARES) {
                squares += squares_of(v);
                continue;
            }
            if (norm) row.template norm<1>(p, col, [&] { return rstd; }, v);
            if (pass == AMAX)
                most = max(most, amax_of(v));
            else
                row.template store<Codes, MADE>(p, col, v, by);
        }
        if (pass == SQUARES) rstd = row.rstd_of(p, squares, sums);
        if (pass == AMAX) by = row.by_row(p, most, peaks);
    }
}

/* ---- 2. blocks of 128 x 128 ------------------------------------------------------------------ */
constexpr int BLOCK_THREADS = GK_SCALE_BLOCK / VEC * GK_SCALE_BLOCK / N;

template <class T, class Codes, int FORM>
__global__ void __launch_bounds__(BLOCK_THREADS, sizeof(T) == 4  ? 1
                                                 : FORM == PLAIN ? 3
                                                                 : 2)
    quantize_blocks_kernel(Params p) {
    __shared__ uint32_t peaks[MOST_WARPS];
    /* Rows between a thread's groups, and threads of a row. */
    constexpr int APART = GK_SCALE_BLOCK / N, ACROSS = GK_SCALE_BLOCK / VEC;
    const unsigned down = blockIdx.x / p.segments, across = blockIdx.x - down * p.segments,
                   matrix = down / p.tiles;
    const int64_t in_matrix =
        (int64_t)(down - matrix * p.tiles) * GK_SCALE_BLOCK + threadIdx.x / ACROSS;
    const int64_t col = (int64_t)across * GK_SCALE_BLOCK + threadIdx.x % ACROSS * VEC,
                  first = matrix * p.m;
    const int rows_left =
        (int)(p.m - in_matrix < GK_SCALE_BLOCK ? p.m - in_matrix : GK_SCALE_BLOCK);
    const int cols_left = (int)(p.k - col < VEC ? p.k - col : VEC);
    auto left = [&](int n) { return n * APART < rows_left ? cols_left : 0; };
    auto begin = [&](const Source &s) {
        return (const T *)s.data + row_offset(p, s, first) + in_matrix * s.row + col * s.col;
    };
    const Place<T> at = {begin(p.x), p.more.data ? begin(p.more) : nullptr, APART * p.x.row,
                         APART * p.more.row};
    typename values_of<FORM, T>::type v[N];
    make_groups<FORM>(p, at, left, v);
    const uint32_t most = max_of_warps(amax_of(v), peaks, MOST_WARPS);
    const Quotient by = Quotient::by(scale_at(p, blockIdx.x, most, threadIdx.x == 0));
#pragma unroll
    for (int n = 0; n < N; ++n)
        store_codes<Codes>(p, p.codes + (first + in_matrix + n * APART) * p.k + col, left(n), v[n],
                           by);
}
static_assert(BLOCK_THREADS == 32 * MOST_WARPS, "max_of_warps");

/* ---- 3. one scale ---------------------------------------------------------------------------- */
/* Resident blocks per SM that the grid is sized for. */
template <class T, int FORM>
constexpr int tensor_blocks = sizeof(T) == 4  ? 2
                              : FORM == PLAIN ? 4
                                              : 3;

template <class T, class Codes, int FORM, bool FIRST>
__global__ void __launch_bounds__(256) quantize_tensor_kernel(Params p) {
    __shared__ uint32_t peaks[MOST_WARPS];
    const int pitch = blockDim.x * VEC;
    uint32_t most = 0;
    Quotient by = {};
    if (FIRST) {
        Codes::let_next_begin();
    } else {
        Codes::wait_for_previous();
        for (int i = threadIdx.x; i < p.amax_blocks; i += blockDim.x) most = max(most, p.amax[i]);
        most = max_of_warps(most, peaks, p.warps);
        by = Quotient::by(scale_at(p, 0, most, blockIdx.x == 0 && threadIdx.x == 0));
    }
#pragma unroll 1
    for (unsigned i = blockIdx.x; i < p.tiles; i += gridDim.x) {
        const unsigned tile = FIRST ? i : p.tiles - 1 - i, row = tile / p.segments;
        const int64_t col = (int64_t)(tile - row * p.segments) * pitch * N + threadIdx.x * VEC;
        auto left = [&](int n) {
            const int64_t left = p.k - col - n * pitch;
            return (int)(left < VEC ? left : VEC);
        };
        auto begin = [&](const Source &s) {
            return (const T *)s.data + row_offset(p, s, row) + col * s.col;
        };
        const Place<T> at = {begin(p.x), p.more.data ? begin(p.more) : nullptr, pitch * p.x.col,
                             pitch * p.more.col};
        typename values_of<FORM, T>::type v[N];
        make_groups<FORM>(p, at, left, v);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            if (FIRST)
                most = max(most, amax_bits(v[n]));
            else
                store_codes<Codes>(p, p.codes + row * p.k + col + n * pitch, left(n), v[n], by);
        }
    }
    if (!FIRST) return;
    most = max_of_warps(most, peaks, p.warps);
    if (threadIdx.x == 0) p.amax[blockIdx.x] = most;
}

/* ---- 4. launches ----------------------------------------------------------------------------- */
Params params_of(const gk_quantize_args *a) {
    Params p = {};
    const gk_tensor *const more = a->up ? a->up : a->residual;
    const int nd = a->x.ndim;
    p.k = nd ? a->x.shape[nd - 1] : 1;
    p.m = nd > 1 ? a->x.shape[nd - 2] : 1;
    p.rows = 1;
    p.ndim = 1;
    p.shape[0] = 1;
    p.vec = p.k % VEC == 0;
    auto open = [&](Source &s, const gk_tensor &t) {
        s.data = t.data;
        s.col = nd ? t.stride[nd - 1] : 1;
        s.row = nd > 1 ? t.stride[nd - 2] : 0;
        if (!rows_aligned(t) || (s.col != 1 && p.k != 1)) p.vec = false;
    };
    open(p.x, a->x);
    if (more) open(p.more, *more);
    for (int d = 0; d < nd - 1; ++d) {
        const int64_t size = a->x.shape[d], step = a->x.stride[d],
                      more_step = more ? more->stride[d] : 0;
        p.rows *= size;
        if (size == 1) continue;
        int last = p.ndim - 1;
        const bool first = last == 0 && p.shape[0] == 1;
        const bool merges =
            p.x.stride[last] == size * step && (!more || p.more.stride[last] == size * more_step);
        if (!first && !merges) p.shape[last = p.ndim++] = 1;
        p.shape[last] *= size;
        p.x.stride[last] = step;
        p.more.stride[last] = more_step;
    }
    if (a->weight) {
        p.weight = a->weight->data;
        p.weight_step = a->weight->stride[0];
        p.weight_f32 = a->weight->dtype == GK_F32;
        p.weight_vec = p.k % VEC == 0 && p.weight_step == 1 && (uintptr_t)p.weight % 16 == 0;
    }
    p.given = a->given ? a->given->data : nullptr;
    p.scale_ub = a->scale_ub ? (const float *)a->scale_ub->data : nullptr;
    p.codes = (uint8_t *)a->codes.data;
    p.scale = a->scale.data;
    p.sum = a->sum ? a->sum->data : nullptr;
    p.wide = p.k % VEC == 0 && (uintptr_t)p.codes % VEC == 0 && (uintptr_t)p.sum % 16 == 0;
    p.scale_e8m0 = (a->given ? a->given->dtype : a->scale.dtype) == GK_E8M0;
    p.what = a->what;
    p.granularity = a->granularity;
    p.eps = (float)a->eps;
    p.dtype = a->codes.dtype;
    p.largest = a->codes.dtype == GK_E4M3 ? 448.f : a->codes.dtype == GK_E5M2 ? 57344.f : 127.f;
    p.inverse_largest = 1 / p.largest;
    return p;
}

/* True if a scale spans more than one row. */
bool spans_rows(const gk_quantize_args *a) {
    return a->granularity == GK_PER_128X128 || (a->granularity == GK_PER_TENSOR && !a->given);
}

bool plan_quantize(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    const gk_quantize_args *a = (const gk_quantize_args *)args;
    plan->workspace_bytes = 4 * 1088; /* AMAX_BLOCKS words, rounded up to whole cache lines */
    if (a->what == GK_QUANTIZE_RMS_NORM && spans_rows(a))
        plan->workspace_bytes += 4 * (size_t)gk_numel(&a->x);
    plan->tasks = a->x.ndim ? gk_numel(&a->x) / gk_max_i64(1, a->x.shape[a->x.ndim - 1]) : 1;
    return true;
}

/* Number of warps for `groups` groups of columns, so that no thread has more than N. Takes more
 * warps if the rows alone would leave SMs idle. */
int warps_for(int64_t groups, int64_t rows, int most) {
    int64_t warps = gk_clamp_i64(gk_ceil_div(groups, 32 * N), 1, most);
    while (2 * warps <= most && rows * warps < AMAX_BLOCKS && 32 * warps < groups) warps *= 2;
    return (int)warps;
}

template <class T, class Codes> gk_status run_rows(const gk_context *ctx, Params &p) {
    const int64_t groups = gk_max_i64(1, gk_ceil_div(p.k, VEC));
    const bool whole = p.what == GK_QUANTIZE_RMS_NORM || (p.granularity <= GK_PER_ROW && !p.given);
    const bool fits = groups <= 32 * N * MOST_WARPS;
    /* The warps of a row decide the order of a norm's sum. */
    const bool one_order = p.what == GK_QUANTIZE_RMS_NORM && gk_batch_invariant();
    p.warps = warps_for(groups, one_order ? 1 : p.rows, whole ? MOST_WARPS : MOST_WARPS / 2);
    p.segments = whole ? 1 : (unsigned)gk_ceil_div(groups, 32 * N * p.warps);
    p.groups = (int)gk_clamp_i64(p.rows / AMAX_BLOCKS, 1, gk_max_i64(1, 4 / p.warps));
    const dim3 grid((unsigned)gk_ceil_div(p.rows, p.groups) * p.segments);
    const unsigned threads = 32u * (unsigned)(p.warps * p.groups);
    if (whole && !fits)
        return launch<quantize_looped_kernel<T, Codes>>("quantize", ctx, grid, threads, 0, p);
    if (p.what == GK_QUANTIZE_X)
        return launch<quantize_rows_kernel<T, Codes, PLAIN>>("quantize", ctx, grid, threads, 0, p,
                                                             Codes::overlaps);
    if (p.what == GK_QUANTIZE_SILU_MUL && p.warps * p.groups <= GATED_WARPS && p.vec && p.wide)
        return launch<quantize_rows_kernel<T, Codes, GATED>>("quantize", ctx, grid, threads, 0, p,
                                                             Codes::overlaps);
    return launch<quantize_rows_kernel<T, Codes, MADE>>("quantize", ctx, grid, threads, 0, p,
                                                        Codes::overlaps);
}

template <class T, class Codes> gk_status run_blocks(const gk_context *ctx, Params &p) {
    p.segments = (unsigned)gk_ceil_div(p.k, GK_SCALE_BLOCK);
    p.tiles = (unsigned)gk_max_i64(1, gk_ceil_div(p.m, GK_SCALE_BLOCK));
    const dim3 grid((unsigned)(p.rows / gk_max_i64(1, p.m)) * p.tiles * p.segments);
    if (p.rows == 0) return GK_OK;
    if (p.what == GK_QUANTIZE_X)
        return launch<quantize_blocks_kernel<T, Codes, PLAIN>>("quantize", ctx, grid, BLOCK_THREADS,
                                                               0, p);
    return launch<quantize_blocks_kernel<T, Codes, MADE>>("quantize", ctx, grid, BLOCK_THREADS, 0,
                                                          p);
}

template <class T, class Codes, int FORM> gk_status run_tensor(const gk_context *ctx, Params &p) {
    const int64_t groups = gk_max_i64(1, gk_ceil_div(p.k, VEC));
    p.warps = (int)gk_clamp_i64(gk_ceil_div(groups, 32 * N), 1, 8);
    while (p.warps > 1 && p.rows * gk_ceil_div(groups, 32 * N * p.warps) < AMAX_BLOCKS / 8)
        p.warps /= 2;
    p.segments = (unsigned)gk_ceil_div(groups, 32 * N * p.warps);
    p.tiles = (unsigned)p.rows * p.segments;
    p.amax_blocks = (int)gk_clamp_i64(
        p.tiles, 1,
        gk_min_i64(AMAX_BLOCKS, tensor_blocks<T, FORM> * gk_gpu_of(ctx->index)->num_sms));
    const dim3 grid((unsigned)p.amax_blocks);
    const unsigned threads = 32u * (unsigned)p.warps;
    const gk_status status =
        launch<quantize_tensor_kernel<T, Codes, FORM, true>>("quantize", ctx, grid, threads, 0, p);
    if (status != GK_OK) return status;
    return launch<quantize_tensor_kernel<T, Codes, FORM, false>>("quantize", ctx, grid, threads, 0,
                                                                 p, Codes::overlaps);
}

template <class T, class Codes> gk_status run_spanning(const gk_context *ctx, Params &p) {
    if (p.granularity == GK_PER_128X128) return run_blocks<T, Codes>(ctx, p);
    const bool more = p.more.data != nullptr, any = p.rows > 0 && p.k > 0;
    auto dense = [&](const Source &s) {
        return (s.col == 1 || p.k == 1) && (p.rows == 1 || (p.ndim == 1 && s.stride[0] == p.k));
    };
    if (any && dense(p.x) && (!more || dense(p.more))) { /* treat the tensor as one row */
        p.k *= p.rows;
        p.rows = 1;
        p.x.col = p.more.col = 1;
        p.vec = p.k % VEC == 0 && (uintptr_t)p.x.data % 16 == 0 &&
                (!more || (uintptr_t)p.more.data % 16 == 0);
        p.wide = p.k % VEC == 0 && (uintptr_t)p.codes % VEC == 0;
        if (p.k <= 32 * N * VEC * MOST_WARPS) return run_rows<T, Codes>(ctx, p);
    }
    return p.what == GK_QUANTIZE_X ? run_tensor<T, Codes, PLAIN>(ctx, p)
                                   : run_tensor<T, Codes, MADE>(ctx, p);
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
    Params q = p; /* reads the norm, which is dense */
    q.what = GK_QUANTIZE_X;
    q.values = nullptr;
    q.sum = nullptr;
    q.weight = nullptr;
    q.more = Source{};
    q.x = Source{p.values, {p.k}, p.k, 1};
    q.ndim = 1;
    q.shape[0] = p.rows;
    q.vec = p.k % VEC == 0;
    q.wide = p.k % VEC == 0 && (uintptr_t)p.codes % VEC == 0;
    return run_spanning<float, Codes>(ctx, q);
}

} // namespace

#endif
