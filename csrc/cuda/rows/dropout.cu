// SPDX-License-Identifier: BSD-3-Clause
/* dropout: out = keep / (1 - p) act(x + bias) + residual, and its gradient. Serves the op
 * gk_dropout; gpukern_train.h has the equations and defines the mask `keep`.
 *
 * x, residual, grad_out and out [M, N] have one dtype: float32, bfloat16, float16 or float64. Four
 * consecutive elements of x share a Philox block of four words. A thread takes a 16-byte vector of
 * a row, which is one or two blocks. If rows are not whole vectors that start at multiples of 16
 * bytes, and in float64, a thread takes the four elements of one block, which may lie in several
 * rows. No workspace. */
#include "gpukern_train.h"
#include "../product/gemm/activation_slope.cuh"
#include "philox.cuh"
#include "row_block.cuh"

namespace {

constexpr int THREADS = 256; /* a thread keeps one vector, so any count that fills an SM will do */

enum Form {
    PLAIN,   /* no activation */
    FORWARD, /* with GELU */
    BACKWARD /* the gradient of x + bias */
};

struct Params {
    RowTensor x, more, out; /* more: the residual, or g of a backward pass */
    const void *bias;
    const int64_t *seed;
    int64_t seed_stride, rows, n;
    double scale;
    uint32_t below; /* an element is kept if its word is less than this */
    bool all;       /* every element is kept (p = 0) */
    gk_activation activation;
};

/* V elements, whose random words are the Philox blocks [block, block + V / 4). */
template <class T, int V, Form FORM>
__device__ __forceinline__ void drop(const Params &p, const PhiloxSeed &seed, int64_t block,
                                     const RowSome<T, V> &x, const RowSome<T, V> &bias,
                                     const RowSome<T, V> &more, RowSome<T, V> &out) {
    typedef typename element<T>::acc W;
    static_assert(V % 4 == 0, "whole blocks");
    W y[V];
#pragma unroll
    for (int v = 0; v < V; ++v) y[v] = to_acc(x.v[v]);
    if (p.bias) {
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] += to_acc(bias.v[v]);
    }
    if constexpr (FORM == BACKWARD) {
        W slope[V];
        if constexpr (sizeof(T) == 2) {
            activate_and_slope_16<V>(p.activation, y, slope);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) slope[v] = act_derivative(p.activation, y[v]);
        }
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] = to_acc(more.v[v]) * slope[v];
    } else if constexpr (FORM == FORWARD && sizeof(T) == 2) {
        const unsigned lowest = act_lowest(y);
        activate_16<V>(p.activation, y);
        act_put_nan(p.activation, lowest, y);
    } else if constexpr (FORM == FORWARD) {
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] = activate(p.activation, y[v]);
    }
#pragma unroll
    for (int b = 0; b < V / 4; ++b) {
        const uint4 words = philox(seed, (uint64_t)(block + b));
#pragma unroll
        for (int v = 4 * b; v < 4 * b + 4; ++v)
            y[v] = p.all || philox_word(words, v % 4) < p.below ? y[v] * W(p.scale) : W(0);
    }
    if (FORM != BACKWARD && p.more.data) {
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] += to_acc(more.v[v]);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) out.v[v] = from_acc<T>(y[v]);
}

/* A thread per 16-byte vector. */
template <class T, Form FORM>
__global__ void __launch_bounds__(THREADS) dropout_vectors_kernel(Params p) {
    constexpr int V = row_vec<T>;
    typedef RowSome<T, V> Vec;
    const PhiloxSeed seed(p.seed, p.seed_stride);
    const int64_t each = p.n / V, total = p.rows * each, step = (int64_t)gridDim.x * THREADS;
    const bool small = total <= UINT32_MAX;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < total; i += step) {
        const int64_t row = small ? (int64_t)((uint32_t)i / (uint32_t)each) : i / each,
                      at = (i - row * each) * V;
        Vec bias = {}, more = {}, out;
        const Vec x = *(const Vec *)(row_at<T>(p.x, row) + at);
        if (p.more.data) more = *(const Vec *)(row_at<T>(p.more, row) + at);
        if (p.bias) bias = *(const Vec *)((const T *)p.bias + at);
        drop<T, V, FORM>(p, seed, i * (V / 4), x, bias, more, out);
        store_some(row_at<T>(p.out, row) + at, out);
    }
}

/* A thread per four elements of x in row-major order, rows of any stride and alignment. */
template <class T, Form FORM>
__global__ void __launch_bounds__(THREADS) dropout_any_kernel(Params p) {
    typedef RowSome<T, 4> Some;
    const PhiloxSeed seed(p.seed, p.seed_stride);
    const int64_t total = p.rows * p.n, step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; 4 * i < total; i += step) {
        const bool small = total <= UINT32_MAX;
        Some x = {}, bias = {}, more = {}, out;
        T *to[4];
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            const int64_t e = 4 * i + v,
                          row = small ? (int64_t)((uint32_t)e / (uint32_t)p.n) : e / p.n;
            const int64_t at = e - row * p.n;
            to[v] = nullptr;
            if (e >= total) continue;
            x.v[v] = row_at<T>(p.x, row)[at];
            to[v] = row_at<T>(p.out, row) + at;
            if (p.more.data) more.v[v] = row_at<T>(p.more, row)[at];
            if (p.bias) bias.v[v] = ((const T *)p.bias)[at];
        }
        drop<T, 4, FORM>(p, seed, i, x, bias, more, out);
#pragma unroll
        for (int v = 0; v < 4; ++v)
            if (to[v]) *to[v] = out.v[v];
    }
}

template <class T, Form FORM>
gk_status run_form(const gk_context *ctx, const Params &p, bool vectors) {
    const int64_t total = gk_ceil_div(p.rows * p.n, vectors ? row_vec<T> : 4);
    const dim3 grid((unsigned)gk_min_i64(gk_ceil_div(total, THREADS), 1 << 20));
    if constexpr (sizeof(T) < 8) /* a vector of two float64 is half a Philox block */
        if (vectors)
            return launch<dropout_vectors_kernel<T, FORM>>("gk_dropout", ctx, grid, THREADS, 0, p);
    return launch<dropout_any_kernel<T, FORM>>("gk_dropout", ctx, grid, THREADS, 0, p);
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_dropout_args *a = (const gk_dropout_args *)args;
    const gk_tensor *more = a->grad_out ? a->grad_out : a->residual;
    Params p = {row_tensor(a->x), row_tensor(more), row_tensor(a->out)};
    p.bias = a->bias ? a->bias->data : nullptr;
    p.seed = (const int64_t *)a->seed.data;
    p.seed_stride = a->seed.stride[0];
    p.rows = num_rows(a->x);
    p.n = a->x.shape[a->x.ndim - 1];
    const uint64_t keep = gk_keep_below(a->p);
    p.scale = gk_keep_scale(a->p);
    p.below = (uint32_t)keep;
    p.all = keep > UINT32_MAX;
    p.activation = a->activation;
    const bool vectors =
        sizeof(T) < 8 && rows_whole(a->x, more, &a->out) && (uintptr_t)p.bias % 16 == 0;
    if (a->grad_out) return run_form<T, BACKWARD>(ctx, p, vectors);
    return a->activation == GK_ACT_NONE ? run_form<T, PLAIN>(ctx, p, vectors)
                                        : run_form<T, FORWARD>(ctx, p, vectors);
}

bool plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    plan->tasks = gk_ceil_div(gk_numel(&((const gk_dropout_args *)args)->x), 4 * THREADS);
    return true;
}

const gk_cuda_instance instances[] = {
    {"dropout_f32", GK_F32, plan, run<float>, {}, NULL},
    {"dropout_bf16", GK_BF16, plan, run<__nv_bfloat16>, {}, NULL},
    {"dropout_f16", GK_F16, plan, run<__half>, {}, NULL},
    {"dropout_f64", GK_F64, plan, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_dropout_table = {instances, 4, 80, NULL};
