// SPDX-License-Identifier: BSD-3-Clause
/* norm_sums: the last step of a norm's backward, called through norm_sums.cuh. It adds partial sums
 * [parts, 2, N] in workspace to dweight [N] and dbias [N].
 *
 * A block owns 32 columns, or 128 from WIDE columns on. Each of its warps adds a consecutive range
 * of parts, and the warps' sums are added in order. The kernel is bound by reading the parts. The
 * previous kernel has just written them, so most of them are in L2. */
#include "norm_sums.cuh"

namespace {

/* Warps per block. If there are 300 parts, a warp adds some 20, whose loads are in flight together.
 */
constexpr int RUNS = 16;

/* From this many columns on, a lane owns 4 columns. With one column a lane, 131072 columns made
 * 8192 blocks of 512 threads with a few loads each, which took 15 waves. */
constexpr int64_t WIDE = 8192;

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

template <class W, int COLUMNS>
__global__ void __launch_bounds__(32 * RUNS, 1) norm_sums_kernel(Params p) {
    typedef RowSome<W, COLUMNS> Some;
    const int which = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    void *to = which ? p.to_bias : p.to;
    if (!to) return;
    const int64_t at = ((int64_t)blockIdx.x * 32 + lane) * COLUMNS,
                  each = (p.parts + RUNS - 1) / RUNS;
    const int64_t end = each * (warp + 1) < p.parts ? each * (warp + 1) : p.parts;
    __shared__ Some part[RUNS][32];
    Some sum = {};
    if (at < p.n)
#pragma unroll 8
        for (int64_t i = each * warp; i < end; ++i) {
            const Some x = *(const Some *)((const W *)p.sums + (2 * i + which) * p.n + at);
#pragma unroll
            for (int k = 0; k < COLUMNS; ++k) sum.v[k] += x.v[k];
        }
    part[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || at >= p.n) return;
#pragma unroll
    for (int w = 1; w < RUNS; ++w)
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) sum.v[k] += part[w][lane].v[k];
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k)
        store_as(to, which ? p.dtype_bias : p.dtype, (at + k) * (which ? p.stride_bias : p.stride),
                 sum.v[k]);
}

template <class W, int COLUMNS> gk_status launch_sums(const gk_context *ctx, const Params &p) {
    return launch<norm_sums_kernel<W, COLUMNS>>(
        "gk_norm_bwd", ctx, dim3((unsigned)gk_ceil_div(p.n, 32 * COLUMNS), 2), 32 * RUNS, 0, p);
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
    if constexpr (sizeof(W) == 4)
        if (p.n >= WIDE && p.n % 4 == 0) return launch_sums<W, 4>(ctx, p);
    return launch_sums<W, 1>(ctx, p);
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
