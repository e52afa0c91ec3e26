// SPDX-License-Identifier: BSD-3-Clause
/* softmax.cuh: softmax and log_softmax over rows in registers, forward and backward. With s = scale
 * x over the columns below the row's length:
 *
 *   softmax:      out = exp(s - max s) / sum exp(s - max s),      dx = scale out (g - sum g out)
 *   log_softmax:  out = s - max s - log sum exp(s - max s),       dx = scale (g - exp(out) sum g)
 *
 * From the row's length on, out and dx are 0.
 *
 * softmax.cu and softmax_sm90a.cu instantiate these kernels, with one block or one cluster per row.
 * A group of threads (row_block.cuh) owns a row, reads it once and writes it once. */
#ifndef GPUKERN_CUDA_ROWS_SOFTMAX_CUH
#define GPUKERN_CUDA_ROWS_SOFTMAX_CUH

#include "../ptx/regs.cuh"
#include "row_block.cuh"

struct SoftmaxParams {
    RowTensor x, lengths, out; /* backward: grad_out, lengths, dx */
    RowTensor y;               /* backward: out of the forward call */
    int64_t rows, n;
    double scale;
    bool log;
};

/* exp for results of type T: two instructions if they are rounded to 16 bits, otherwise expf, which
 * takes a dozen. */
template <class T> __device__ __forceinline__ float row_exp(float x) {
    return sizeof(T) == 2 ? ex2_approx_ftz(x * 1.44269504f) : expf(x);
}
template <class T> __device__ __forceinline__ double row_exp(double x) { return exp(x); }

/* scale x, rounded. The compiler must not contract it with the subtraction of the maximum to an
 * FMA: the largest value would then not give exactly 0. */
__device__ __forceinline__ float row_scaled(float scale, float x) { return __fmul_rn(scale, x); }
__device__ __forceinline__ double row_scaled(double scale, double x) { return __dmul_rn(scale, x); }

/* The row's length, clamped to [0, n]. */
__device__ __forceinline__ int64_t row_length(const SoftmaxParams &p, int64_t row) {
    if (!p.lengths.data) return p.n;
    const int64_t length = *row_at<int32_t>(p.lengths, row);
    return length < 0 ? 0 : length < p.n ? length : p.n;
}

/* ---- 1. forward ------------------------------------------------------------------------------ */
/* RAGGED: rows have lengths, and every column is compared with its row's length. FLAT: see row_in.
 */
template <class T, int LANES, int ITEMS, int CLUSTER, bool RAGGED, bool FLAT>
__global__ void __launch_bounds__(RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS,
                                  FLAT ? ROW_SM_THREADS / LANES
                                  : LANES == 512 && ITEMS == 4 && CLUSTER == 1 ? 2
                                                                               : 1)
    softmax_fwd_kernel(SoftmaxParams p) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    typedef typename Group::acc W;
    constexpr int VEC = Group::VEC;
    __shared__ typename Group::Shared shared;
    Group group(shared);
    const int64_t row = group.first_row();
    const bool is_row = row < p.rows;
    const int n = (int)p.n, length = !RAGGED ? n : is_row ? (int)row_length(p, row) : 0;
    const auto seen = [&](int i, int v) { return (RAGGED ? v : 0) < length - group.column(i); };
    const W scale = W(p.scale);
    RowVec<T> x[ITEMS];
    group.load(x, is_row ? row_in<T, FLAT>(p.x, row) : nullptr, length, is_row);
    /* 32 and 64-bit values are overwritten by their results; 16-bit values need separate floats */
    constexpr bool IN_PLACE = sizeof(T) == sizeof(W);
    W wide[IN_PLACE ? 1 : ITEMS][VEC], peak[1] = {-INFINITY}, sum[1] = {0};
    const auto s = [&](int i, int v) -> W & {
        if constexpr (IN_PLACE)
            return x[i].v[v];
        else
            return wide[i][v];
    };
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            s(i, v) = seen(i, v) ? row_scaled(scale, x[i].get(v)) : W(-INFINITY);
            peak[0] = lanes_max2(peak[0], s(i, v));
        }
    group.peak(peak);
    /* softmax keeps exp(s - max) for the result, log_softmax keeps s - max */
    if (p.log) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                s(i, v) -= peak[0];
                sum[0] += row_exp<T>(s(i, v));
            }
    } else {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
#pragma unroll
            for (int v = 0; v < VEC; ++v) {
                s(i, v) = row_exp<T>(s(i, v) - peak[0]);
                sum[0] += s(i, v);
            }
    }
    group.sum(sum);
    if (!is_row) return;
    const W by = p.log ? W(1) : 1 / sum[0], less = p.log ? W(log(sum[0])) : W(0);
    T *out = row_in<T, FLAT>(p.out, row);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (group.column(i) >= n) continue;
        RowVec<T> y;
#pragma unroll
        for (int v = 0; v < VEC; ++v) y.set(v, seen(i, v) ? (s(i, v) - less) * by : W(0));
        group.store(out, i, y);
    }
}

/* ---- 2. backward ----------------------------------------------------------------------------- */
template <class T, int LANES, int ITEMS, int CLUSTER>
__global__ void __launch_bounds__(RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS, 1)
    softmax_bwd_kernel(SoftmaxParams p) {
    typedef RowGroup<T, LANES, ITEMS, CLUSTER> Group;
    typedef typename Group::acc W;
    constexpr int VEC = Group::VEC;
    __shared__ typename Group::Shared shared;
    Group group(shared);
    const int64_t row = group.first_row();
    const bool is_row = row < p.rows;
    const int n = (int)p.n, length = is_row ? (int)row_length(p, row) : 0;
    RowVec<T> g[ITEMS], y[ITEMS];
    group.load(g, is_row ? row_at<T>(p.x, row) : nullptr, length, is_row);
    group.load(y, is_row ? row_at<T>(p.y, row) : nullptr, length, is_row);
    W sum[1] = {0};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int v = 0; v < VEC; ++v)
            if (group.column(i) + v < length)
                sum[0] += p.log ? W(g[i].get(v)) : g[i].get(v) * y[i].get(v);
    group.sum(sum);
    if (!is_row) return;
    const W scale = W(p.scale);
    T *dx = row_at<T>(p.out, row);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (group.column(i) >= n) continue;
        RowVec<T> d;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const W a = g[i].get(v), b = y[i].get(v);
            const W slope = p.log ? a - row_exp<T>(b) * sum[0] : b * (a - sum[0]);
            d.set(v, group.column(i) + v >= length ? W(0) : scale * slope);
        }
        group.store(dx, i, d);
    }
}

/* ---- 3. plan and run ------------------------------------------------------------------------- */
inline SoftmaxParams softmax_params(const gk_softmax_args *a) {
    SoftmaxParams p = {row_tensor(a->x), row_elements(a->lengths), row_tensor(a->out)};
    p.rows = num_rows(a->x);
    p.n = a->x.shape[a->x.ndim - 1];
    p.scale = a->scale;
    p.log = a->log;
    return p;
}
inline SoftmaxParams softmax_params(const gk_softmax_bwd_args *a) {
    SoftmaxParams p = {row_tensor(a->grad_out), row_elements(a->lengths), row_tensor(a->dx),
                       row_tensor(a->out)};
    p.rows = num_rows(a->out);
    p.n = a->out.shape[a->out.ndim - 1];
    p.scale = a->scale;
    p.log = a->log;
    return p;
}

inline bool softmax_fwd_plan(const gk_cuda_instance *instance, const gk_context *, const void *args,
                             gk_plan *plan) {
    const gk_softmax_args *a = (const gk_softmax_args *)args;
    plan->tasks = gk_ceil_div(num_rows(a->x), instance->key[RowKey::ROWS]);
    return rows_fit(instance, a->x, &a->out);
}
inline bool softmax_bwd_plan(const gk_cuda_instance *instance, const gk_context *, const void *args,
                             gk_plan *plan) {
    const gk_softmax_bwd_args *a = (const gk_softmax_bwd_args *)args;
    plan->tasks = gk_ceil_div(num_rows(a->out), instance->key[RowKey::ROWS]);
    return rows_fit(instance, a->out, &a->grad_out, &a->dx);
}

template <class T, int LANES, int ITEMS, int CLUSTER>
gk_status softmax_fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    const SoftmaxParams p = softmax_params((const gk_softmax_args *)args);
    const dim3 grid((unsigned)plan->tasks * CLUSTER);
    constexpr int THREADS = RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS;
    const char *op = "gk_softmax_fwd";
    if (p.lengths.data)
        return launch<softmax_fwd_kernel<T, LANES, ITEMS, CLUSTER, true, false>>(
            op, ctx, grid, THREADS, 0, p, false, CLUSTER);
    if constexpr (ROW_FITS_32<T, LANES, ITEMS, CLUSTER>)
        if (p.x.ndim == 1 && p.out.ndim == 1)
            return launch<softmax_fwd_kernel<T, LANES, ITEMS, CLUSTER, false, true>>(op, ctx, grid,
                                                                                     THREADS, 0, p);
    return launch<softmax_fwd_kernel<T, LANES, ITEMS, CLUSTER, false, false>>(
        op, ctx, grid, THREADS, 0, p, false, CLUSTER);
}

template <class T, int LANES, int ITEMS, int CLUSTER>
gk_status softmax_bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    return launch<softmax_bwd_kernel<T, LANES, ITEMS, CLUSTER>>(
        "gk_softmax_bwd", ctx, dim3((unsigned)plan->tasks * CLUSTER),
        RowGroup<T, LANES, ITEMS, CLUSTER>::THREADS, 0,
        softmax_params((const gk_softmax_bwd_args *)args), false, CLUSTER);
}

#define GK_SOFTMAX_INSTANCE(PASS, T, DTYPE, NAME, LANES, ITEMS, CLUSTER) \
    {"softmax_" #PASS NAME,                                              \
     DTYPE,                                                              \
     softmax_##PASS##_plan,                                              \
     softmax_##PASS##_run<T, LANES, ITEMS, CLUSTER>,                     \
     GK_ROW_KEY(T, LANES, ITEMS, CLUSTER),                               \
     NULL},

#endif
