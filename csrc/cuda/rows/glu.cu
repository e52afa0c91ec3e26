// SPDX-License-Identifier: BSD-3-Clause
/* glu: gated linear units, forward and backward (Shazeer 2020, arXiv:2002.05202). Serves the ops
 * gk_glu_fwd and gk_glu_bwd.
 *
 *   out = act(gate) up;   dgate = g up act'(gate),   dup = g act(gate)
 *
 * gate, up, out, g, dgate and dup [M, N] have one dtype: float32, bfloat16, float16 or float64. A
 * thread takes a 16-byte vector of a row. If rows are not whole vectors that start at multiples of
 * 16 bytes, it takes one element. No workspace. Bound by memory. */
#include "../product/gemm/activation.cuh"
#include "row_block.cuh"

namespace {

constexpr int THREADS = 256; /* a thread keeps one vector, so any count that fills an SM will do */

struct Params {
    RowTensor grad_out, gate, up, out, more; /* backward: out is dgate and more is dup */
    int64_t rows, n;
    gk_activation activation;
};

/* The activation by exact functions. gemm's epilogues have faster ones, which are accurate enough
 * for 16-bit results only. */
template <class W> __device__ __forceinline__ W value(gk_activation activation, W x) {
    return activation == GK_ACT_SILU ? x / (1 + act_exp(-x)) : activate(activation, x);
}

template <class T, int V, bool BACKWARD>
__global__ void __launch_bounds__(THREADS) glu_kernel(Params p) {
    typedef typename element<T>::acc W;
    typedef RowSome<T, V> Vec;
    const int64_t each = p.n / V, total = p.rows * each, step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < total; i += step) {
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
                more.v[v] = from_acc<T>(g * value(p.activation, x));
            }
            *(Vec *)(row_at<T>(p.more, row) + at) = more;
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v)
                out.v[v] = from_acc<T>(value(p.activation, (W)to_acc(gate.v[v])) * to_acc(up.v[v]));
        }
        *(Vec *)(row_at<T>(p.out, row) + at) = out;
    }
}

template <class T, bool BACKWARD>
gk_status run(const gk_context *ctx, const Params &p, bool vectors) {
    constexpr int V = row_vec<T>;
    const int64_t total = p.rows * p.n / (vectors ? V : 1);
    const dim3 grid((unsigned)gk_min_i64(gk_ceil_div(total, THREADS), 1 << 20));
    const char *op = BACKWARD ? "gk_glu_bwd" : "gk_glu_fwd";
    return vectors ? launch<glu_kernel<T, V, BACKWARD>>(op, ctx, grid, THREADS, 0, p)
                   : launch<glu_kernel<T, 1, BACKWARD>>(op, ctx, grid, THREADS, 0, p);
}

template <class T>
gk_status fwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_glu_args *a = (const gk_glu_args *)args;
    const gk_tensor gate = gk_glu_half(&a->gate, a->up, 0), up = gk_glu_half(&a->gate, a->up, 1);
    Params p = {{}, row_tensor(gate), row_tensor(up), row_tensor(a->out)};
    p.rows = num_rows(a->out);
    p.n = a->out.shape[a->out.ndim - 1];
    p.activation = a->activation;
    return run<T, false>(ctx, p, rows_whole(a->out, &gate, &up));
}

template <class T>
gk_status bwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_glu_bwd_args *a = (const gk_glu_bwd_args *)args;
    const gk_tensor gate = gk_glu_half(&a->gate, a->up, 0), up = gk_glu_half(&a->gate, a->up, 1);
    const gk_tensor dgate = gk_glu_half(&a->dgate, a->dup, 0),
                    dup = gk_glu_half(&a->dgate, a->dup, 1);
    Params p = {row_tensor(a->grad_out), row_tensor(gate), row_tensor(up), row_tensor(dgate),
                row_tensor(dup)};
    p.rows = num_rows(a->grad_out);
    p.n = a->grad_out.shape[a->grad_out.ndim - 1];
    p.activation = a->activation;
    return run<T, true>(ctx, p, rows_whole(a->grad_out, &gate, &up, &dgate, &dup));
}

bool plan_rows(const gk_tensor &x, gk_plan *plan) {
    plan->tasks = gk_ceil_div(gk_numel(&x), THREADS);
    return true;
}
bool fwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    return plan_rows(((const gk_glu_args *)args)->out, plan);
}
bool bwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    return plan_rows(((const gk_glu_bwd_args *)args)->grad_out, plan);
}

const gk_cuda_instance fwd[] = {
    {"glu_fwd_f32", GK_F32, fwd_plan, fwd_run<float>, {}, NULL},
    {"glu_fwd_bf16", GK_BF16, fwd_plan, fwd_run<__nv_bfloat16>, {}, NULL},
    {"glu_fwd_f16", GK_F16, fwd_plan, fwd_run<__half>, {}, NULL},
    {"glu_fwd_f64", GK_F64, fwd_plan, fwd_run<double>, {}, NULL},
};
const gk_cuda_instance bwd[] = {
    {"glu_bwd_f32", GK_F32, bwd_plan, bwd_run<float>, {}, NULL},
    {"glu_bwd_bf16", GK_BF16, bwd_plan, bwd_run<__nv_bfloat16>, {}, NULL},
    {"glu_bwd_f16", GK_F16, bwd_plan, bwd_run<__half>, {}, NULL},
    {"glu_bwd_f64", GK_F64, bwd_plan, bwd_run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_glu_fwd_table = {fwd, 4, 80, NULL};
extern "C" const gk_cuda_table gk_glu_bwd_table = {bwd, 4, 80, NULL};
