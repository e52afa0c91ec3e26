/* SPDX-License-Identifier: BSD-3-Clause */
/* glu.cuh: gated linear units, forward and backward (Shazeer 2020, arXiv:2002.05202).
 *
 *   forward    out = act(gate) up
 *   backward   dgate = grad_out up act'(gate)     dup = grad_out act(gate)
 *
 * All tensors are [M, N] of one dtype: float32, bfloat16, float16 or float64. glu.cu and
 * glu_sm90a.cu instantiate the kernel.
 *
 * Work split: a thread takes a 16-byte vector of a row. If rows are not whole vectors that start at
 * multiples of 16 bytes, it takes one element. No workspace. Memory bandwidth bounds the time. */
#ifndef GPUKERN_CUDA_ROWS_GLU_CUH
#define GPUKERN_CUDA_ROWS_GLU_CUH

#include "../product/gemm/activation.cuh"
#include "../tile/begins.cuh"
#include "row_block.cuh"

namespace {

/* Threads share nothing, so any number that fills an SM will do. */
constexpr int GLU_THREADS = 256;

struct GluParams {
    RowTensor grad_out, gate, up, out, more; /* backward: out is dgate and more is dup */
    int64_t rows, n;
    gk_activation activation;
};

/* The activation by exact functions. The faster functions of gemm's epilogues are accurate enough
 * for 16-bit results only. */
template <class W> __device__ __forceinline__ W glu_value(gk_activation activation, W x) {
    return activation == GK_ACT_SILU ? x / (1 + act_exp(-x)) : activate(activation, x);
}

template <class T, int V, bool BACKWARD, class Begins>
__global__ void __launch_bounds__(GLU_THREADS) glu_kernel(GluParams p) {
    Begins::begin();
    typedef typename element<T>::acc W;
    typedef RowSome<T, V> Vec;
    const int64_t each = p.n / V, total = p.rows * each, step = (int64_t)gridDim.x * GLU_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * GLU_THREADS + threadIdx.x; i < total; i += step) {
        /* a 32-bit division takes some 20 instructions less */
        const bool small = total <= UINT32_MAX;
        const int64_t row = small ? (int64_t)((uint32_t)i / (uint32_t)each) : i / each,
                      at = (i - row * each) * V;
        const Vec gate = *(const Vec *)(row_at<T>(p.gate, row) + at),
                  up = *(const Vec *)(row_at<T>(p.up, row) + at);
        Vec out, more;
        if (BACKWARD) {
            const Vec grad = *(const Vec *)(row_at<T>(p.grad_out, row) + at);
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const W g = to_acc(grad.v[v]), x = to_acc(gate.v[v]);
                out.v[v] = from_acc<T>(g * to_acc(up.v[v]) * act_derivative(p.activation, x));
                more.v[v] = from_acc<T>(g * glu_value(p.activation, x));
            }
            *(Vec *)(row_at<T>(p.more, row) + at) = more;
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v)
                out.v[v] =
                    from_acc<T>(glu_value(p.activation, (W)to_acc(gate.v[v])) * to_acc(up.v[v]));
        }
        *(Vec *)(row_at<T>(p.out, row) + at) = out;
    }
}

template <class T, bool BACKWARD, class Begins>
gk_status glu_run(const gk_context *ctx, const GluParams &p, bool vectors) {
    constexpr int V = row_vec<T>;
    const int64_t total = p.rows * p.n / (vectors ? V : 1);
    const dim3 grid((unsigned)gk_min_i64(gk_ceil_div(total, GLU_THREADS), 1 << 20));
    const char *op = BACKWARD ? "gk_glu_bwd" : "gk_glu_fwd";
    if constexpr (!Begins::overlaps)
        if (!vectors)
            return launch<glu_kernel<T, 1, BACKWARD, Begins>>(op, ctx, grid, GLU_THREADS, 0, p);
    return launch<glu_kernel<T, V, BACKWARD, Begins>>(op, ctx, grid, GLU_THREADS, 0, p,
                                                      Begins::overlaps);
}

template <class T, class Begins = BeginsAlone>
gk_status glu_fwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_glu_args *a = (const gk_glu_args *)args;
    const gk_tensor gate = gk_glu_half(&a->gate, a->up, 0), up = gk_glu_half(&a->gate, a->up, 1);
    GluParams p = {{}, row_tensor(gate), row_tensor(up), row_tensor(a->out)};
    p.rows = num_rows(a->out);
    p.n = a->out.shape[a->out.ndim - 1];
    p.activation = a->activation;
    return glu_run<T, false, Begins>(ctx, p, rows_whole(a->out, &gate, &up));
}

bool glu_plan_rows(const gk_tensor &x, gk_plan *plan) {
    plan->tasks = gk_ceil_div(gk_numel(&x), GLU_THREADS);
    return true;
}

} // namespace

#endif
