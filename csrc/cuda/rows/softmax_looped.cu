// SPDX-License-Identifier: BSD-3-Clause
/* softmax_looped: softmax and log_softmax for rows of any length and alignment; softmax.cuh has the
 * equations. Serves gk_softmax_fwd and gk_softmax_bwd in float32, bfloat16, float16 and float64
 * when no register kernel takes the call.
 *
 * A block loops over a row twice. The first pass of forward keeps a running maximum and sum
 * (Milakov and Gimelshein 2018, arXiv:1805.02867). The second pass finds the row in L1 or L2 as far
 * as it fits. No workspace. */
#include "softmax.cuh"

namespace {

constexpr int THREADS = ROW_LOOPED_THREADS;

/* exp(a - b), and 0 if a is -inf, as the running maximum is before its first value. */
template <class W> __device__ __forceinline__ W weight_of(W a, W b) {
    return a == -INFINITY ? W(0) : row_exp<W>(a - b);
}

template <class T>
__global__ void __launch_bounds__(THREADS, 1) softmax_fwd_looped_kernel(SoftmaxParams p) {
    typedef typename element<T>::acc W;
    __shared__ W place[32];
    const W scale = W(p.scale);
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T *x = row_at<T>(p.x, row);
        const int64_t length = row_length(p, row);
        W peak = -INFINITY, sum[1] = {0};
        bool nan = false;
        for (int64_t i = threadIdx.x; i < length; i += THREADS) {
            const W s = row_scaled(scale, to_acc(x[i]));
            nan |= s != s;
            if (s > peak) {
                sum[0] *= weight_of(peak, s);
                peak = s;
            }
            sum[0] += weight_of(s, peak);
        }
        const W all = block_max(peak, place);
        sum[0] *= weight_of(peak, all);
        /* A row with NaN or inf, or of -inf only, gives NaN, as exp(inf - inf) does. */
        if (nan || all == INFINITY || (all == -INFINITY && length > 0)) sum[0] = NAN;
        block_sum(sum, place);
        const W inverse = 1 / sum[0], log_sum = p.log ? log(sum[0]) : W(0);
        T *out = row_at<T>(p.out, row);
        for (int64_t i = threadIdx.x; i < p.n; i += THREADS) {
            W y = 0;
            if (i < length) {
                const W s = row_scaled(scale, to_acc(x[i])) - all;
                y = p.log ? s - log_sum : row_exp<T>(s) * inverse;
            }
            out[i] = from_acc<T>(y);
        }
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS, 1) softmax_bwd_looped_kernel(SoftmaxParams p) {
    typedef typename element<T>::acc W;
    __shared__ W place[32];
    const W scale = W(p.scale);
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T *g = row_at<T>(p.x, row), *y = row_at<T>(p.y, row);
        const int64_t length = row_length(p, row);
        W sum[1] = {0};
        for (int64_t i = threadIdx.x; i < length; i += THREADS)
            sum[0] += p.log ? to_acc(g[i]) : to_acc(g[i]) * to_acc(y[i]);
        block_sum(sum, place);
        T *dx = row_at<T>(p.out, row);
        for (int64_t i = threadIdx.x; i < p.n; i += THREADS) {
            W d = 0;
            if (i < length) {
                const W a = to_acc(g[i]), b = to_acc(y[i]);
                d = scale * (p.log ? a - row_exp<T>(b) * sum[0] : b * (a - sum[0]));
            }
            dx[i] = from_acc<T>(d);
        }
    }
}

bool fwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    plan->tasks = num_rows(((const gk_softmax_args *)args)->x);
    return true;
}
bool bwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    plan->tasks = num_rows(((const gk_softmax_bwd_args *)args)->out);
    return true;
}

template <class T>
gk_status fwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    return launch<softmax_fwd_looped_kernel<T>>("gk_softmax_fwd", ctx,
                                                dim3(row_blocks(plan->tasks)), THREADS, 0,
                                                softmax_params((const gk_softmax_args *)args));
}
template <class T>
gk_status bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *) {
    return launch<softmax_bwd_looped_kernel<T>>("gk_softmax_bwd", ctx,
                                                dim3(row_blocks(plan->tasks)), THREADS, 0,
                                                softmax_params((const gk_softmax_bwd_args *)args));
}

const gk_cuda_instance fwd[] = {
    {"softmax_fwd_looped_f32", GK_F32, fwd_plan, fwd_run<float>, {}, NULL},
    {"softmax_fwd_looped_bf16", GK_BF16, fwd_plan, fwd_run<__nv_bfloat16>, {}, NULL},
    {"softmax_fwd_looped_f16", GK_F16, fwd_plan, fwd_run<__half>, {}, NULL},
    {"softmax_fwd_looped_f64", GK_F64, fwd_plan, fwd_run<double>, {}, NULL},
};
const gk_cuda_instance bwd[] = {
    {"softmax_bwd_looped_f32", GK_F32, bwd_plan, bwd_run<float>, {}, NULL},
    {"softmax_bwd_looped_bf16", GK_BF16, bwd_plan, bwd_run<__nv_bfloat16>, {}, NULL},
    {"softmax_bwd_looped_f16", GK_F16, bwd_plan, bwd_run<__half>, {}, NULL},
    {"softmax_bwd_looped_f64", GK_F64, bwd_plan, bwd_run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_softmax_fwd_looped_table = {fwd, 4, 80, NULL};
extern "C" const gk_cuda_table gk_softmax_bwd_looped_table = {bwd, 4, 80, NULL};
