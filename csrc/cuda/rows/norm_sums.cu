// SPDX-License-Identifier: BSD-3-Clause
/* norm_sums: the last step of a norm's backward. It adds partial sums [parts, 2, N] in workspace to
 * dweight [N] and dbias [N]. A block has 32 columns. Each of its warps adds a consecutive range of
 * parts, and the warps' sums are added in order. Bound by reading the parts, which the kernel
 * before has just written, so that most are in L2. */
#include "norm_sums.cuh"

namespace {

/* Warps per block. Of 300 parts a warp has some 20, whose loads are in flight together. */
constexpr int RUNS = 16;

struct Params {
    const void *sums;
    void *to, *to_bias; /* NULL: not wanted */
    int64_t stride, stride_bias, parts, n;
    gk_dtype dtype, dtype_bias;
};

template <class W>
__device__ __forceinline__ void store_as(void *to, gk_dtype dtype, int64_t at, W x) {
    switch (dtype) {
    case GK_F32: ((float *)to)[at] = (float)x; break;
    case GK_BF16: ((__nv_bfloat16 *)to)[at] = from_f32<__nv_bfloat16>((float)x); break;
    case GK_F16: ((__half *)to)[at] = from_f32<__half>((float)x); break;
    case GK_F64: ((double *)to)[at] = (double)x; break;
    case GK_I32:
    case GK_I64: break;
    }
}

template <class W> __global__ void __launch_bounds__(32 * RUNS, 1) norm_sums_kernel(Params p) {
    const int which = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    void *to = which ? p.to_bias : p.to;
    if (!to) return;
    const int64_t at = (int64_t)blockIdx.x * 32 + lane, each = (p.parts + RUNS - 1) / RUNS;
    const int64_t end = each * (warp + 1) < p.parts ? each * (warp + 1) : p.parts;
    __shared__ W part[RUNS][32];
    W sum = 0;
    if (at < p.n)
#pragma unroll 8
        for (int64_t i = each * warp; i < end; ++i)
            sum += ((const W *)p.sums)[(2 * i + which) * p.n + at];
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || at >= p.n) return;
#pragma unroll
    for (int w = 1; w < RUNS; ++w) sum += part[w][lane];
    store_as(to, which ? p.dtype_bias : p.dtype, at * (which ? p.stride_bias : p.stride), sum);
}

template <class W>
gk_status add_sums(const gk_context *ctx, const gk_norm_bwd_args *a, const void *sums,
                   int64_t parts) {
    Params p = {sums};
    p.parts = parts;
    p.n = a->h.shape[a->h.ndim - 1];
    if (const gk_tensor *w = a->dweight) {
        p.to = w->data;
        p.dtype = w->dtype;
        p.stride = w->stride[0];
    }
    if (const gk_tensor *b = a->dbias) {
        p.to_bias = b->data;
        p.dtype_bias = b->dtype;
        p.stride_bias = b->stride[0];
    }
    return launch<norm_sums_kernel<W>>("gk_norm_bwd", ctx, dim3((unsigned)gk_ceil_div(p.n, 32), 2),
                                       32 * RUNS, 0, p);
}

} // namespace

gk_status norm_add_sums_f32(const gk_context *ctx, const gk_norm_bwd_args *a, const void *sums,
                            int64_t parts) {
    return add_sums<float>(ctx, a, sums, parts);
}
gk_status norm_add_sums_f64(const gk_context *ctx, const gk_norm_bwd_args *a, const void *sums,
                            int64_t parts) {
    return add_sums<double>(ctx, a, sums, parts);
}
