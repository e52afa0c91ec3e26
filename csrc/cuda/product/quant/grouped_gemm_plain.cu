/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_gemm_plain: grouped_gemm on every GPU (plain.cuh), for groups of rows or of k, whose
 * ends are read from offs on the device.
 *
 * A block takes a tile of a group. For groups of rows, each group has as many blocks as all rows
 * of a would need, and blocks after the group's end return at once. The last plane of the grid
 * writes zeros after the last group's end. Bad ends are clamped and reported. */
#include "plain.cuh"

namespace {

struct Params {
    PlainProduct p;
    MatrixB b;
    const int32_t *offs;
    int64_t offs_step, b_group, scale_group, bias_group;
    int groups;
    bool by_rows;
    uint8_t *error_word;
};

/* The end of group g. Ends are clamped to at least the previous end and at most `total`. */
__device__ __forceinline__ int64_t end_of(const Params &x, int g, int64_t total, bool reports) {
    int64_t end = 0;
    for (int i = 0; i <= g; ++i) {
        const int64_t e = x.offs[i * x.offs_step];
        if (reports && (e < end || e > total)) report(x.error_word, GK_BAD_OFFS);
        end = min(max(end, e), total);
    }
    return end;
}

__global__ void __launch_bounds__(256) grouped_plain_kernel(Params x) {
    const int g = blockIdx.z;
    const int64_t total = x.by_rows ? x.p.m : x.p.k, col0 = (int64_t)blockIdx.x * PLAIN_TILE;
    const bool first = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0 && g == x.groups;
    const int64_t begin = g ? end_of(x, g - 1, total, first) : 0;
    if (g == x.groups) { /* rows of no group */
        if (!x.by_rows) return;
        const int64_t row0 = begin + (int64_t)blockIdx.y * PLAIN_TILE;
        for (int i = threadIdx.x; i < PLAIN_TILE * PLAIN_TILE; i += 256) {
            const int64_t row = row0 + i / PLAIN_TILE, col = col0 + i % PLAIN_TILE;
            if (row < x.p.m && col < x.p.n) store_value<CodesBySoftware>(x.p.f, row, col, 0);
        }
        return;
    }
    const int64_t end = end_of(x, g, total, false);
    MatrixB b = x.b;
    PlainProduct p = x.p;
    if (p.f.bias) p.f.bias = (const char *)p.f.bias + g * x.bias_group;
    if (!x.by_rows && begin == end) { /* an empty sum is 0, also where a scale is NaN */
        p.sa.data = nullptr;
        p.sb.data = nullptr;
    }
    if (x.by_rows) {
        const int64_t row0 = begin + (int64_t)blockIdx.y * PLAIN_TILE;
        if (row0 >= end) return;
        b.data = (const char *)b.data + g * x.b_group;
        if (p.sb.data) p.sb.data = (const char *)p.sb.data + g * x.scale_group;
        plain_tile(p, b, row0, min(row0 + PLAIN_TILE, end), col0, 0, p.k);
    } else {
        const int64_t row0 = (int64_t)blockIdx.y * PLAIN_TILE,
                      bytes = p.f.out_dtype == GK_F32 ? 4 : 2;
        p.f.out = (char *)p.f.out + g * p.m * p.n * bytes;
        plain_tile(p, b, row0, min(row0 + PLAIN_TILE, p.m), col0, begin, end);
    }
}

bool plan_grouped(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *) {
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    return plain_in_grid(g->a.shape[0]) && g->offs.shape[0] < 65535;
}

gk_status run_grouped(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_grouped_gemm_args *g = (const gk_grouped_gemm_args *)args;
    Params x = {};
    PlainProduct &p = x.p;
    const int nd = g->b.ndim;
    x.by_rows = nd == 3;
    x.groups = (int)g->offs.shape[0];
    p.m = g->a.shape[0];
    p.k = g->a.shape[1];
    p.n = g->b.shape[nd - 1];
    p.a = g->a.data;
    p.a_dtype = g->a.dtype;
    p.a_m = g->a.stride[0];
    p.a_k = g->a.stride[1];
    x.b = {g->b.data, g->b.stride[nd - 2], g->b.stride[nd - 1], g->b.dtype};
    x.b_group = x.by_rows ? g->b.stride[0] * (int64_t)gk_dtype_bytes(g->b.dtype) : 0;
    p.sa = gk_scales_of(g->scale_a, p.m, p.k, false);
    p.sb = gk_scales_of(g->scale_b, p.k, p.n, true);
    if (g->scale_b && g->scale_b->ndim == 3)
        x.scale_group = g->scale_b->stride[0] * (int64_t)gk_dtype_bytes(g->scale_b->dtype);
    p.along_k = p.sa.col_log2 < GK_WHOLE_LOG2 || p.sb.row_log2 < GK_WHOLE_LOG2;
    p.exact = g->a.dtype == GK_I8 && !p.along_k;
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    p.f.out_row = p.n;
    if (g->bias) {
        p.f.bias_step = g->bias->stride[g->bias->ndim - 1];
        if (g->bias->ndim == 2)
            x.bias_group = g->bias->stride[0] * (int64_t)gk_dtype_bytes(g->bias->dtype);
    }
    x.offs = (const int32_t *)g->offs.data;
    x.offs_step = g->offs.stride[0];
    x.error_word = ctx->error_word;
    const dim3 grid((unsigned)gk_ceil_div(p.n, PLAIN_TILE),
                    (unsigned)gk_max_i64(1, gk_ceil_div(p.m, PLAIN_TILE)), (unsigned)x.groups + 1);
    return launch<grouped_plain_kernel>("grouped_gemm", ctx, grid, 256, 0, x);
}

#define OF(name, dtype) {name, dtype, plan_grouped, run_grouped, {}, NULL}

const gk_cuda_instance instances[] = {
    OF("grouped_gemm_plain_f32", GK_F32),   OF("grouped_gemm_plain_bf16", GK_BF16),
    OF("grouped_gemm_plain_f16", GK_F16),   OF("grouped_gemm_plain_e4m3", GK_E4M3),
    OF("grouped_gemm_plain_e5m2", GK_E5M2), OF("grouped_gemm_plain_i8", GK_I8)};

} // namespace

extern "C" const gk_cuda_table gk_grouped_gemm_plain_table = {
    instances, sizeof instances / sizeof instances[0], 80, NULL};
