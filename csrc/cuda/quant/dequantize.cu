/* SPDX-License-Identifier: BSD-3-Clause */
/* dequantize: out = codes * scale, rounded once (gk_dequantize).
 * codes [..., M, K], scale [] or [..., Sm, Sk], any strides; out contiguous. A thread takes VEC columns. Bandwidth bound. */
#include "../../scales.h"
#include "../host/launch.cuh"
#include "../tile/codes.cuh"
#include "../tile/convert.cuh"

namespace {

constexpr int VEC = 8, THREADS = 256;

struct Params {
    const uint8_t *codes;
    void *out;
    gk_scales scales;
    int64_t rows, m, k, col;
    int64_t shape[GK_MAX_DIMS], stride[GK_MAX_DIMS], scale_stride[GK_MAX_DIMS];
    int ndim; /* of codes, without the last */
    gk_dtype dtype;
};

template <class T> __global__ void __launch_bounds__(THREADS) dequantize_kernel(Params p) {
    const int64_t each = (p.k + VEC - 1) / VEC, total = p.rows * each;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < total; i += (int64_t)gridDim.x * THREADS) {
        const int64_t row = i / each, begin = i % each * VEC;
        int64_t rest = row, at = 0, scale_at = 0;
        for (int d = p.ndim - 1; d >= 0; --d) {
            const int64_t x = rest % p.shape[d];
            rest /= p.shape[d];
            at += x * p.stride[d];
            scale_at += d == p.ndim - 1 ? (x >> p.scales.row_log2) * p.scales.row : x * p.scale_stride[d];
        }
        for (int64_t col = begin; col < min(begin + VEC, p.k); ++col) {
            const int64_t where = scale_at + (col >> p.scales.col_log2) * p.scales.col;
            const float scale = p.scales.dtype == GK_E8M0 ? e8m0_to_f32(((const uint8_t *)p.scales.data)[where])
                                                          : ((const float *)p.scales.data)[where];
            const float value = code_value(p.dtype, p.codes[at + col * p.col]);
            if constexpr (sizeof(T) == 8)
                ((double *)p.out)[row * p.k + col] = (double)value * scale;
            else
                ((T *)p.out)[row * p.k + col] = from_f32<T>(value * scale);
        }
    }
}

template <class T> gk_status run(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_dequantize_args *a = (const gk_dequantize_args *)args;
    Params p = {};
    const int nd = a->codes.ndim;
    p.codes = (const uint8_t *)a->codes.data, p.out = a->out.data, p.dtype = a->codes.dtype;
    p.k = nd ? a->codes.shape[nd - 1] : 1, p.m = nd > 1 ? a->codes.shape[nd - 2] : 1, p.rows = 1;
    p.col = nd ? a->codes.stride[nd - 1] : 1, p.ndim = nd > 1 ? nd - 1 : 0;
    p.scales = gk_scales_of(&a->scale, p.m, p.k, false);
    for (int d = 0; d < p.ndim; ++d) {
        p.shape[d] = a->codes.shape[d], p.stride[d] = a->codes.stride[d], p.rows *= p.shape[d];
        if (a->scale.ndim == nd && d < nd - 2) p.scale_stride[d] = a->scale.stride[d];
    }
    const dim3 grid((unsigned)gk_min_i64(gk_ceil_div(p.rows * gk_ceil_div(p.k, VEC), THREADS), 1 << 16));
    return launch<dequantize_kernel<T>>("dequantize", ctx, grid, THREADS, 0, p);
}

const gk_cuda_instance instances[] = {
    {"dequantize_f32", GK_F32, plan_any, run<float>, {}, NULL},
    {"dequantize_bf16", GK_BF16, plan_any, run<__nv_bfloat16>, {}, NULL},
    {"dequantize_f16", GK_F16, plan_any, run<__half>, {}, NULL},
    {"dequantize_f64", GK_F64, plan_any, run<double>, {}, NULL},
};

} // namespace

extern "C" const gk_cuda_table gk_dequantize_table = {instances, sizeof instances / sizeof instances[0], 80, NULL};
