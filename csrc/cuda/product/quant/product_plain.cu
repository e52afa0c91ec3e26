/* SPDX-License-Identifier: BSD-3-Clause */
/* product_plain: scaled_gemm, weight_gemm and sparse_gemm on every GPU (plain.cuh). The slow
 * fallback. */
#include "plain.cuh"
#include "weight.cuh"

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

bool plan_weight(const gk_cuda_instance *, const gk_context *, const void *args, gk_plan *) {
    return plain_in_grid(weight_rows(((const gk_weight_gemm_args *)args)->a));
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
    return start_plain(ctx, "weight_gemm", x);
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
