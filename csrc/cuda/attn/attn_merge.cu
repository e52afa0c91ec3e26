/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_merge: merges two attentions over different keys (Dao et al. 2023, Flash-Decoding).
 *
 *  lse = log(exp(lse_a) + exp(lse_b))      out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
 *
 * out_a, out_b [..., Dv] of one dtype, lse_a, lse_b [...] float32 (float64 for float64), any
 * strides; out, lse dense. An input with lse -inf saw no key and is not read: the other input is
 * returned bit for bit. If both are -inf, the result is 0 and -inf. The kernel refuses no layout.
 *
 * Work split: a warp owns a row. The kernel is bound by memory bandwidth. */
#include "../host/launch.cuh"
#include "../tile/convert.cuh"
#include "softmax.cuh"

namespace {

/* Warps are independent, so any block size that fills an SM will do. */
constexpr int THREADS = 128, WARPS = THREADS / 32;

struct Params {
    const void *out_a, *out_b, *lse_a, *lse_b;
    void *out, *lse;
    int64_t num_rows, head_dim_v;
    int ndim; /* dimensions of lse */
    int64_t shape[GK_MAX_DIMS];
    int64_t out_a_stride[GK_MAX_DIMS], out_b_stride[GK_MAX_DIMS], lse_a_stride[GK_MAX_DIMS],
        lse_b_stride[GK_MAX_DIMS];
};

template <class T> __global__ void __launch_bounds__(THREADS) attn_merge_kernel(Params p) {
    typedef typename element<T>::acc W;
    const int lane = threadIdx.x % 32;
    const int64_t step = (int64_t)gridDim.x * WARPS;
    for (int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; row < p.num_rows;
         row += step) {
        int64_t rest = row, at_a = 0, at_b = 0, at_lse_a = 0, at_lse_b = 0;
        for (int d = p.ndim - 1; d >= 0; --d) {
            const int64_t x = rest % p.shape[d];
            rest /= p.shape[d];
            at_a += x * p.out_a_stride[d];
            at_b += x * p.out_b_stride[d];
            at_lse_a += x * p.lse_a_stride[d];
            at_lse_b += x * p.lse_b_stride[d];
        }
        const W lse_a = ((const W *)p.lse_a)[at_lse_a], lse_b = ((const W *)p.lse_b)[at_lse_b];
        const bool no_a = lse_a == -INFINITY, no_b = lse_b == -INFINITY;
        W lse = no_a ? lse_b : lse_a, weight_a = 1, weight_b = 1;
        if (!no_a && !no_b) {
            const RowSoftmax<ExpFull, W> all = {lanes_max2(lse_a, lse_b), 0};
            const W e_a = all.weight(lse_a), e_b = all.weight(lse_b);
            lse = all.peak + log(e_a + e_b);
            weight_a = e_a / (e_a + e_b);
            weight_b = e_b / (e_a + e_b);
        }
        const T *a = (const T *)p.out_a + at_a, *b = (const T *)p.out_b + at_b;
        T *out = (T *)p.out + row * p.head_dim_v;
        for (int64_t d = lane; d < p.head_dim_v; d += 32) {
            W y = 0;
            if (!no_a) y = weight_a * to_acc(a[d * p.out_a_stride[p.ndim]]);
            if (!no_b) {
                const W other = weight_b * to_acc(b[d * p.out_b_stride[p.ndim]]);
                y = no_a ? other : y + other; /* 0 + b would lose the sign of -0 */
            }
            out[d] = from_acc<T>(y);
        }
        if (lane == 0) ((W *)p.lse)[row] = lse;
    }
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_attn_merge_args *a = (const gk_attn_merge_args *)args;
    Params p = {a->out_a.data, a->out_b.data, a->lse_a.data,
                a->lse_b.data, a->out.data,   a->lse.data};
    p.ndim = a->lse.ndim;
    p.num_rows = gk_numel(&a->lse);
    p.head_dim_v = a->out.shape[p.ndim];
    for (int d = 0; d <= p.ndim; ++d) {
        p.out_a_stride[d] = a->out_a.stride[d];
        p.out_b_stride[d] = a->out_b.stride[d];
    }
    for (int d = 0; d < p.ndim; ++d) {
        p.shape[d] = a->lse.shape[d];
        p.lse_a_stride[d] = a->lse_a.stride[d];
        p.lse_b_stride[d] = a->lse_b.stride[d];
    }
    const dim3 grid((unsigned)gk_min_i64(gk_ceil_div(p.num_rows, WARPS), 1 << 20));
    return launch<attn_merge_kernel<T>>("gk_attn_merge", ctx, grid, THREADS, 0, p);
}

const gk_cuda_instance instances[] = {
    {"attn_merge_f32", GK_F32, plan_any, run<float>, {}, NULL},
    {"attn_merge_bf16", GK_BF16, plan_any, run<__nv_bfloat16>, {}, NULL},
    {"attn_merge_f16", GK_F16, plan_any, run<__half>, {}, NULL},
    {"attn_merge_f64", GK_F64, plan_any, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_attn_merge_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
