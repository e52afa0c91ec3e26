// SPDX-License-Identifier: BSD-3-Clause
/* norm_looped: RMSNorm and LayerNorm for rows of any length and alignment, forward and backward;
 * norm.cuh has the equations. Serves gk_norm_fwd and gk_norm_bwd in float32, bfloat16, float16 and
 * float64 when no register kernel takes the call.
 *
 * Forward: a block loops over a row up to three times, for mean, variance and result. Repeated
 * reads hit L1 or L2. Backward takes three kernels. The first computes dx the same way and writes
 * each row's mean and rstd to workspace. In the second, a thread has one column of a chunk of rows
 * and sums dweight and dbias over it. The third is norm_sums.cu, which adds the chunks in order.
 *
 * Workspace, if dweight or dbias is wanted: statistics [rows, 2], then sums [chunks, 2, N], both
 * float32 (float64 for float64 tensors). */
#include "norm.cuh"

namespace {

constexpr int THREADS = ROW_LOOPED_THREADS;
constexpr int COLUMNS = 128;    /* columns of a block of the second kernel */
constexpr int CHUNK_ROWS = 64;  /* rows per chunk, at least: the sums are 1/64 of what is read */
constexpr int MOST_CHUNKS = 64; /* with 8 blocks of columns, 64 chunks already fill a GPU */

template <class T>
__device__ __forceinline__ typename element<T>::acc load_vector(const void *v, bool wide,
                                                                int64_t at) {
    return sizeof(T) < 4 && wide ? (typename element<T>::acc)((const float *)v)[at]
                                 : to_acc(((const T *)v)[at]);
}

/* Mean (0 for RMSNorm) and 1 / sqrt(variance + eps) of a row; `place` has 32 values. */
template <class T, class W>
__device__ __forceinline__ void looped_stats(const T *h, int64_t n, bool layer, W eps, W *place,
                                             W &mean, W &rstd) {
    W s[1] = {0};
    mean = 0;
    if (layer) {
        for (int64_t i = threadIdx.x; i < n; i += THREADS) s[0] += to_acc(h[i]);
        block_sum(s, place);
        mean = s[0] / W(n);
        s[0] = 0;
    }
    for (int64_t i = threadIdx.x; i < n; i += THREADS) {
        const W d = to_acc(h[i]) - mean;
        s[0] += d * d;
    }
    block_sum(s, place);
    rstd = norm_rstd(s[0] / W(n) + eps);
}

template <class T>
__global__ void __launch_bounds__(THREADS, 1) norm_fwd_looped_kernel(NormParams p) {
    typedef typename element<T>::acc W;
    __shared__ W place[32];
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T *h = row_at<T>(p.x, row);
        if (p.residual.data) {
            const T *residual = row_at<T>(p.residual, row);
            T *sum = row_at<T>(p.sum, row);
            for (int64_t i = threadIdx.x; i < p.n; i += THREADS)
                sum[i] = from_acc<T>(to_acc(h[i]) + to_acc(residual[i]));
            h = sum; /* each thread reads only elements that it wrote */
        }
        W mean, rstd;
        looped_stats(h, p.n, p.layer, W(p.eps), place, mean, rstd);
        T *out = row_at<T>(p.out, row);
        for (int64_t i = threadIdx.x; i < p.n; i += THREADS) {
            W y = (to_acc(h[i]) - mean) * rstd;
            if (p.weight)
                y *= load_vector<T>(p.weight, p.weight_wide, i * p.weight_stride) +
                     W(p.weight_offset);
            if (p.bias) y += load_vector<T>(p.bias, p.bias_wide, i * p.bias_stride);
            out[i] = from_acc<T>(y);
        }
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS, 1) norm_bwd_looped_kernel(NormBwdParams p) {
    typedef typename element<T>::acc W;
    __shared__ W place[64];
    for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const T *h = row_at<T>(p.h, row), *g = row_at<T>(p.grad_out, row);
        W mean, rstd, c[2] = {0, 0};
        looped_stats(h, p.n, p.layer, W(p.eps), place, mean, rstd);
        auto weighted = [&](int64_t i) {
            W y = to_acc(g[i]);
            if (p.weight)
                y *= load_vector<T>(p.weight, p.weight_wide, i * p.weight_stride) +
                     W(p.weight_offset);
            return y;
        };
        for (int64_t i = threadIdx.x; i < p.n; i += THREADS) {
            const W y = weighted(i);
            c[0] += y;
            c[1] += y * ((to_acc(h[i]) - mean) * rstd);
        }
        block_sum(c, place);
        const W c1 = p.layer ? c[0] / W(p.n) : W(0), c2 = c[1] / W(p.n);
        const T *grad_sum = p.grad_sum.data ? row_at<T>(p.grad_sum, row) : nullptr;
        T *dx = row_at<T>(p.dx, row);
        for (int64_t i = threadIdx.x; i < p.n; i += THREADS) {
            W y = rstd * (weighted(i) - c1 - (to_acc(h[i]) - mean) * rstd * c2);
            if (grad_sum) y += to_acc(grad_sum[i]);
            dx[i] = from_acc<T>(y);
        }
        if (p.stats && threadIdx.x == 0) {
            ((W *)p.stats)[2 * row] = mean;
            ((W *)p.stats)[2 * row + 1] = rstd;
        }
    }
}

/* dweight and dbias of a column, summed over the rows of chunk blockIdx.y. */
template <class T> __global__ void __launch_bounds__(COLUMNS) norm_columns_kernel(NormBwdParams p) {
    typedef typename element<T>::acc W;
    const int64_t at = (int64_t)blockIdx.x * COLUMNS + threadIdx.x,
                  each = (p.rows + gridDim.y - 1) / gridDim.y;
    const int64_t end = each * (blockIdx.y + 1) < p.rows ? each * (blockIdx.y + 1) : p.rows;
    if (at >= p.n) return;
    W sums[2] = {0, 0};
#pragma unroll 4
    for (int64_t row = each * blockIdx.y; row < end; ++row) {
        const W g = to_acc(row_at<T>(p.grad_out, row)[at]), h = to_acc(row_at<T>(p.h, row)[at]);
        const W mean = ((const W *)p.stats)[2 * row], rstd = ((const W *)p.stats)[2 * row + 1];
        sums[0] += g * ((h - mean) * rstd);
        sums[1] += g;
    }
    W *to = (W *)p.sums + (int64_t)blockIdx.y * 2 * p.n + at;
    to[0] = sums[0];
    to[p.n] = sums[1];
}

bool fwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    plan->tasks = num_rows(((const gk_norm_args *)args)->x);
    return true;
}

template <class T>
gk_status fwd_run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const NormParams p = norm_params((const gk_norm_args *)args);
    return launch<norm_fwd_looped_kernel<T>>("gk_norm_fwd", ctx, dim3(row_blocks(p.rows)), THREADS,
                                             0, p);
}

int64_t stats_bytes(const gk_norm_bwd_args *a) {
    return gk_round_up(2 * num_rows(a->h) * (int64_t)gk_dtype_bytes(gk_stats_dtype(a->h.dtype)),
                       64);
}

bool bwd_plan(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *plan) {
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    plan->tasks = num_rows(a->h);
    plan->chunks = gk_clamp_i64(gk_ceil_div(plan->tasks, CHUNK_ROWS), 1, MOST_CHUNKS);
    const size_t sums = norm_sums_bytes(a, plan->chunks);
    if (sums) plan->workspace_bytes = sums + (size_t)stats_bytes(a);
    return true;
}

template <class T>
gk_status bwd_run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    typedef typename element<T>::acc W;
    const gk_norm_bwd_args *a = (const gk_norm_bwd_args *)args;
    NormBwdParams p = norm_params(a);
    const bool sums = a->dweight || a->dbias;
    if (sums) {
        p.stats = workspace;
        p.sums = gk_at(workspace, stats_bytes(a));
    }
    gk_status status = launch<norm_bwd_looped_kernel<T>>("gk_norm_bwd", ctx,
                                                         dim3(row_blocks(p.rows)), THREADS, 0, p);
    if (status != GK_OK || !sums) return status;
    const dim3 grid((unsigned)gk_ceil_div(p.n, COLUMNS), (unsigned)plan->chunks);
    status = launch<norm_columns_kernel<T>>("gk_norm_bwd", ctx, grid, COLUMNS, 0, p);
    return status == GK_OK ? norm_add_sums<W>(ctx, a, p.sums, plan->chunks) : status;
}

const gk_cuda_instance fwd[] = {
    {"norm_fwd_looped_f32", GK_F32, fwd_plan, fwd_run<float>, {}, NULL},
    {"norm_fwd_looped_bf16", GK_BF16, fwd_plan, fwd_run<__nv_bfloat16>, {}, NULL},
    {"norm_fwd_looped_f16", GK_F16, fwd_plan, fwd_run<__half>, {}, NULL},
    {"norm_fwd_looped_f64", GK_F64, fwd_plan, fwd_run<double>, {}, NULL},
};
const gk_cuda_instance bwd[] = {
    {"norm_bwd_looped_f32", GK_F32, bwd_plan, bwd_run<float>, {}, NULL},
    {"norm_bwd_looped_bf16", GK_BF16, bwd_plan, bwd_run<__nv_bfloat16>, {}, NULL},
    {"norm_bwd_looped_f16", GK_F16, bwd_plan, bwd_run<__half>, {}, NULL},
    {"norm_bwd_looped_f64", GK_F64, bwd_plan, bwd_run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_norm_fwd_looped_table = {fwd, 4, 80, NULL};
extern "C" const gk_cuda_table gk_norm_bwd_looped_table = {bwd, 4, 80, NULL};
