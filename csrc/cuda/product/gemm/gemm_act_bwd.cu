/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_act_bwd: grad_in = grad_out * activation'(saved), where saved is the preact, or for relu
 * the output. grad_out, saved and grad_in have the same shape and any strides. saved may have
 * another dtype. The time is bound by memory bandwidth.
 *
 * If all three tensors are dense, a thread handles VALUES consecutive elements, with one 16-byte
 * access to each tensor. */
#include "../../host/launch.cuh"
#include "../../tile/convert.cuh"
#include "activation_slope.cuh"

namespace {

constexpr int THREADS = 256; /* enough warps to hide memory, whatever the registers */

struct Params {
    const void *grad_out, *saved;
    void *grad_in;
    int64_t n;
    int ndim;
    int64_t shape[GK_MAX_DIMS], out_stride[GK_MAX_DIMS], saved_stride[GK_MAX_DIMS],
        in_stride[GK_MAX_DIMS];
    gk_activation activation;
};

template <class T> using Wide = typename element<T>::acc;

template <class T>
__device__ __forceinline__ T times_slope(gk_activation activation, T grad, Wide<T> slope) {
    /* If the slope of relu is 0, the gradient is 0 even if grad is infinite or NaN. */
    if (activation == GK_ACT_RELU && slope == 0) return from_acc<T>(Wide<T>(0));
    return from_acc<T>(to_acc(grad) * slope);
}

template <class T, class S>
__device__ __forceinline__ T act_bwd(gk_activation activation, T grad, S saved) {
    return times_slope(activation, grad, act_derivative<Wide<T>>(activation, to_acc(saved)));
}

template <class T, class S>
__global__ void __launch_bounds__(THREADS) act_bwd_strided_kernel(Params p) {
    const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x,
                  step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = first; i < p.n; i += step) {
        int64_t rest = i, at_out = 0, at_saved = 0, at_in = 0;
        for (int d = p.ndim - 1; d >= 0; --d) {
            const int64_t x = rest % p.shape[d];
            rest /= p.shape[d];
            at_out += x * p.out_stride[d];
            at_saved += x * p.saved_stride[d];
            at_in += x * p.in_stride[d];
        }
        ((T *)p.grad_in)[at_in] = act_bwd<T, S>(p.activation, ((const T *)p.grad_out)[at_out],
                                                ((const S *)p.saved)[at_saved]);
    }
}

/* All tensors are dense and 16-byte aligned, and T and S have one size. */
template <class T, class S>
__global__ void __launch_bounds__(THREADS) act_bwd_dense_kernel(Params p) {
    constexpr int VALUES = 16 / sizeof(T);
    static_assert(sizeof(T) == sizeof(S), "one vector of each holds the same elements");
    const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x,
                  step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = first; i < p.n / VALUES; i += step) {
        const uint4 grad4 = ((const uint4 *)p.grad_out)[i], saved4 = ((const uint4 *)p.saved)[i];
        uint4 result4;
        const T *grad = (const T *)&grad4;
        const S *saved = (const S *)&saved4;
        T *result = (T *)&result4;
        if constexpr (sizeof(T) == 2) {
            float x[VALUES], slope[VALUES];
#pragma unroll
            for (int v = 0; v < VALUES; ++v) x[v] = to_acc(saved[v]);
            activate_and_slope_16<VALUES>(p.activation, x, slope);
#pragma unroll
            for (int v = 0; v < VALUES; ++v)
                result[v] = times_slope(p.activation, grad[v], slope[v]);
        } else {
#pragma unroll
            for (int v = 0; v < VALUES; ++v)
                result[v] = act_bwd<T, S>(p.activation, grad[v], saved[v]);
        }
        st_global_128((uint4 *)p.grad_in + i, result4);
    }
    const int64_t tail = p.n / VALUES * VALUES + first;
    if (tail < p.n)
        ((T *)p.grad_in)[tail] =
            act_bwd<T, S>(p.activation, ((const T *)p.grad_out)[tail], ((const S *)p.saved)[tail]);
}

bool dense(const gk_tensor &t) {
    int64_t step = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
        if (t.shape[d] != 1 && t.stride[d] != step) return false;
        step *= t.shape[d];
    }
    return (uintptr_t)t.data % 16 == 0;
}

template <class T, class S>
gk_status run_typed(const gk_context *ctx, const gk_gemm_act_bwd_args *a) {
    Params p = {a->grad_out.data, a->saved.data, a->grad_in.data, gk_numel(&a->grad_in)};
    p.ndim = a->grad_in.ndim;
    p.activation = a->activation;
    for (int d = 0; d < p.ndim; ++d) {
        p.shape[d] = a->grad_in.shape[d];
        p.out_stride[d] = a->grad_out.stride[d];
        p.saved_stride[d] = a->saved.stride[d];
        p.in_stride[d] = a->grad_in.stride[d];
    }
    const bool vectors =
        sizeof(T) == sizeof(S) && dense(a->grad_out) && dense(a->saved) && dense(a->grad_in);
    const int64_t each = vectors ? 16 / (int64_t)sizeof(T) : 1;
    const dim3 grid((unsigned)gk_min_i64(gk_ceil_div(gk_ceil_div(p.n, each), THREADS), 1 << 16));
    if constexpr (sizeof(T) == sizeof(S))
        if (vectors)
            return launch<act_bwd_dense_kernel<T, S>>("gk_gemm_act_bwd", ctx, grid, THREADS, 0, p);
    return launch<act_bwd_strided_kernel<T, S>>("gk_gemm_act_bwd", ctx, grid, THREADS, 0, p);
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_gemm_act_bwd_args *a = (const gk_gemm_act_bwd_args *)args;
    if (gk_numel(&a->grad_in) == 0) return GK_OK;
    if constexpr (sizeof(T) == 8) {
        return run_typed<T, double>(ctx, a);
    } else {
        switch (a->saved.dtype) {
        case GK_F32: return run_typed<T, float>(ctx, a);
        case GK_BF16: return run_typed<T, __nv_bfloat16>(ctx, a);
        case GK_F16: return run_typed<T, __half>(ctx, a);
        default: return gk_no_case("gk_gemm_act_bwd", a->saved.dtype);
        }
    }
}

const gk_cuda_instance instances[] = {
    {"gemm_act_bwd_f32", GK_F32, plan_any, run<float>, {}, NULL},
    {"gemm_act_bwd_bf16", GK_BF16, plan_any, run<__nv_bfloat16>, {}, NULL},
    {"gemm_act_bwd_f16", GK_F16, plan_any, run<__half>, {}, NULL},
    {"gemm_act_bwd_f64", GK_F64, plan_any, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_gemm_act_bwd_table = {instances, 4, 80, NULL};
