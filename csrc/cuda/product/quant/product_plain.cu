/* SPDX-License-Identifier: BSD-3-Clause */
/* product_plain: scaled_gemm, weight_gemm and sparse_gemm on every GPU and for every call, by
 * plain.cuh. It is slow and serves only calls that no other kernel serves. */
#include "plain.cuh"
#include "weight_groups.cuh"

namespace {

/* ---- scaled_gemm ----------------------------------------------------------------------------- */
bool plan_scaled(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *) {
    return plain_in_grid(((const gk_scaled_gemm_args *)args)->a.shape[0]);
}

gk_status run_scaled(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_scaled_gemm_args *g = (const gk_scaled_gemm_args *)args;
    PlainParams<MatrixB> x = {};
    PlainProduct &p = x.p;
    p.m = g->a.shape[0];
    p.k = g->a.shape[1];
    p.n = g->b.shape[1];
    p.a = g->a.data;
    p.a_dtype = g->a.dtype;
    p.a_m = g->a.stride[0];
    p.a_k = g->a.stride[1];
    x.b = {g->b.data, g->b.stride[0], g->b.stride[1], g->b.dtype};
    p.sa = gk_scales_of(&g->scale_a, p.m, p.k, false);
    p.sb = gk_scales_of(&g->scale_b, p.k, p.n, true);
    p.along_k = p.sa.col_log2 < GK_WHOLE_LOG2 || p.sb.row_log2 < GK_WHOLE_LOG2;
    p.exact = g->a.dtype == GK_I8 && !p.along_k;
    p.f = finish_of(g->out, g->bias, g->c, g->beta, g->out_scale, g->activation);
    return start_plain(ctx, "scaled_gemm", x);
}

/* ---- weight_gemm ----------------------------------------------------------------------------- */
struct WeightB {
    static constexpr bool SCALES_ALONG_K = true;
    Weight w;
    __device__ __forceinline__ float operator()(int64_t k, int64_t n) const {
        return weight_value(w, n, k);
    }
};

/* Groups of rows are handled as in grouped_gemm_plain.cu. Each group has as many blocks as all rows
 * would need. The last plane of the grid writes zeros behind the last group's end. */
struct GroupedWeightParams {
    PlainParams<WeightB> x;
    const int32_t *offs;
    int64_t offs_step, bias_group; /* bias_group: bytes */
    int groups;
    uint8_t *error_word;
};

__global__ void __launch_bounds__(256) grouped_weight_plain_kernel(GroupedWeightParams g) {
    PlainProduct p = g.x.p;
    WeightB b = g.x.b;
    const int group = blockIdx.z;
    const int64_t col0 = (int64_t)blockIdx.x * PLAIN_TILE;
    const bool reports =
        group == g.groups && blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
    int64_t begin = 0, end = 0;
    for (int i = 0; i <= min(group, g.groups - 1); ++i) {
        const int64_t given = g.offs[i * g.offs_step];
        if (reports && (given < end || given > p.m)) report(g.error_word, GK_BAD_OFFS);
        begin = end;
        end = min(max(end, given), p.m);
    }
    if (group == g.groups) {
        begin = end;
        end = p.m;
    }
    const int64_t row0 = begin + (int64_t)blockIdx.y * PLAIN_TILE,
                  row_end = min(row0 + PLAIN_TILE, end);
    if (row0 >= end) return;
    if (group == g.groups) {
        for (int i = threadIdx.x; i < PLAIN_TILE * PLAIN_TILE; i += 256) {
            const int64_t row = row0 + i / PLAIN_TILE, col = col0 + i % PLAIN_TILE;
            if (row < row_end && col < p.n) store_value<CodesBySoftware>(p.f, row, col, 0);
        }
        return;
    }
    const int64_t first = group * ((p.n + GK_TILE - 1) / GK_TILE),
                  scale_at = first * GK_TILE * b.w.scale_n,
                  scale_bytes = b.w.scale_dtype == GK_F32                                 ? 4
                                : b.w.scale_dtype == GK_BF16 || b.w.scale_dtype == GK_F16 ? 2
                                                                                          : 1;
    b.w.packed += first * b.w.tile_row;
    b.w.scale = (const char *)b.w.scale + scale_at * scale_bytes;
    if (b.w.zero) b.w.zero += first * GK_TILE * b.w.zero_n;
    if (p.along_k) p.sb.data = b.w.scale;
    if (p.f.bias) p.f.bias = (const char *)p.f.bias + group * g.bias_group;
    plain_tile(p, b, row0, row_end, col0, 0, p.k);
}

bool plan_weight(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    return plain_in_grid(weight_rows(g->a)) && (!g->offs || g->offs->shape[0] < 65535);
}

gk_status run_weight(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_weight_gemm_args *g = (const gk_weight_gemm_args *)args;
    PlainParams<WeightB> x = {};
    PlainProduct &p = x.p;
    const int nd = g->a.ndim;
    p.m = weight_rows(g->a);
    p.k = g->a.shape[nd - 1];
    p.n = g->n;
    p.a = g->a.data;
    p.a_dtype = g->a.dtype;
    p.a_m = g->a.stride[nd - 2];
    p.a_k = g->a.stride[nd - 1];
    x.b.w = weight_of(g);
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    p.f.out_row = g->n;
    if (x.b.w.round == GK_F32) { /* 8-bit a: the sums are multiplied by the weight's scales */
        p.along_k = true;
        p.sa = gk_scales_of(g->scale_a, p.m, p.k, false);
        p.sb = {g->scale.data, g->scale.dtype, x.b.w.group_log2, 0, x.b.w.scale_k, x.b.w.scale_n};
        p.f.alpha = x.b.w.global_scale;
    }
    if (!g->offs) return start_plain(ctx, "weight_gemm", x);
    GroupedWeightParams grouped = {};
    grouped.bias_group = bias_of_groups(g, &p.f);
    if (g->bias) grouped.bias_group *= (int64_t)gk_dtype_bytes(g->bias->dtype);
    grouped.x = x;
    grouped.offs = (const int32_t *)g->offs->data;
    grouped.offs_step = g->offs->stride[0];
    grouped.groups = (int)g->offs->shape[0];
    grouped.error_word = ctx->error_word;
    const dim3 grid((unsigned)gk_ceil_div(p.n, PLAIN_TILE),
                    (unsigned)gk_max_i64(1, gk_ceil_div(p.m, PLAIN_TILE)),
                    (unsigned)grouped.groups + 1);
    return launch<grouped_weight_plain_kernel>("weight_gemm", ctx, grid, 256, 0, grouped);
}

/* ---- sparse_gemm ----------------------------------------------------------------------------- */
struct SparseB {
    static constexpr bool SCALES_ALONG_K = false;
    const void *values;
    const uint8_t *meta;
    int64_t values_row, meta_row;
    gk_dtype dtype;
    __device__ __forceinline__ float operator()(int64_t k, int64_t n) const {
        const int64_t group = k / 4;
        const int four = meta[n * meta_row + group / 2] >> 4 * (group % 2) & 15,
                  place = (int)(k % 4);
        const int64_t at = n * values_row + 2 * group;
        if ((four & 3) == place) return load_any(values, dtype, at);
        return (four >> 2) == place ? load_any(values, dtype, at + 1) : 0.f;
    }
};

bool plan_sparse(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *) {
    return plain_in_grid(((const gk_sparse_gemm_args *)args)->a.shape[0]);
}

gk_status run_sparse(const gk_context *ctx, const void *args, const gk_plan *, void *) {
    const gk_sparse_gemm_args *g = (const gk_sparse_gemm_args *)args;
    PlainParams<SparseB> x = {};
    PlainProduct &p = x.p;
    p.m = g->a.shape[0];
    p.k = g->a.shape[1];
    p.n = g->values.shape[0];
    p.a = g->a.data;
    p.a_dtype = g->a.dtype;
    p.a_m = g->a.stride[0];
    p.a_k = g->a.stride[1];
    x.b = {g->values.data, (const uint8_t *)g->meta.data, g->values.stride[0], g->meta.stride[0],
           g->values.dtype};
    p.sa = gk_scales_of(g->scale_a, p.m, p.k, false);
    p.sb = gk_scales_of(g->scale_b, p.k, p.n, true);
    p.exact = g->a.dtype == GK_I8;
    p.f = finish_of(g->out, g->bias, nullptr, 0, nullptr, g->activation);
    return start_plain(ctx, "sparse_gemm", x);
}

#define OF(name, dtype, op) {name, dtype, plan_##op, run_##op, {}, NULL}

const gk_cuda_instance scaled[] = {OF("scaled_gemm_plain_e4m3", GK_E4M3, scaled),
                                   OF("scaled_gemm_plain_e5m2", GK_E5M2, scaled),
                                   OF("scaled_gemm_plain_i8", GK_I8, scaled)};
const gk_cuda_instance weights[] = {OF("weight_gemm_plain_bf16", GK_BF16, weight),
                                    OF("weight_gemm_plain_f16", GK_F16, weight),
                                    OF("weight_gemm_plain_e4m3", GK_E4M3, weight)};
const gk_cuda_instance sparse[] = {
    OF("sparse_gemm_plain_bf16", GK_BF16, sparse), OF("sparse_gemm_plain_f16", GK_F16, sparse),
    OF("sparse_gemm_plain_e4m3", GK_E4M3, sparse), OF("sparse_gemm_plain_e5m2", GK_E5M2, sparse),
    OF("sparse_gemm_plain_i8", GK_I8, sparse)};

} // namespace

extern "C" const gk_cuda_table gk_scaled_gemm_plain_table = {
    scaled, sizeof scaled / sizeof scaled[0], 80, NULL};
extern "C" const gk_cuda_table gk_weight_gemm_plain_table = {
    weights, sizeof weights / sizeof weights[0], 80, NULL};
extern "C" const gk_cuda_table gk_sparse_gemm_plain_table = {
    sparse, sizeof sparse / sizeof sparse[0], 80, NULL};
