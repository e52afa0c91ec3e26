/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_gemm, pack_weight, unpack_weight: the checks and the costs of their entry points. */
#include "../formats/weight_tile.h"
#include "../core/dispatch.h"
#include "../formats/scales.h"
#include "quant.h"

#include <stdio.h>

static const char *const format_names[] = {"int4", "uint4", "int8", "e4m3", "mxfp4", "nvfp4"};

static gk_status check_format(gk_weight_format f) {
    GK_REQUIRE((unsigned)f <= GK_NVFP4, "format is %d, expected one of gk_weight_format", (int)f);
    return GK_OK;
}

/* offs: the ends of groups, of n rows each; NULL = one group. */
static gk_status check_packed(const gk_tensor *t, int64_t n, int64_t k, gk_weight_format f,
                              const gk_tensor *offs) {
    const int64_t groups = offs ? offs->shape[0] : 1;
    const int64_t shape[3] = {groups * gk_ceil_div(n, GK_TILE), gk_ceil_div(k, GK_TILE),
                              gk_tile_bytes(f)};
    bool same = t->ndim == 3;
    for (int d = 0; same && d < 3; ++d) same = t->shape[d] == shape[d];
    char of_groups[40] = "";
    if (offs) snprintf(of_groups, sizeof of_groups, "%lld groups of ", (long long)groups);
    GK_REQUIRE(same, "packed must have shape %s for %sn %lld, k %lld and format %s, got %s",
               gk_text_of(3, shape).text, of_groups, (long long)n, (long long)k, format_names[f],
               gk_text_of(t->ndim, t->shape).text);
    return GK_OK;
}

gk_status gk_check_pack_weight(const gk_context *ctx, const gk_pack_weight_args *x, gk_io *io) {
    (void)ctx;
    GK_TRY(check_format(x->format));
    GK_TRY(gk_take(io, "q", &x->q, GK_ANY_STRIDES));
    const gk_dtype dtype = gk_code_dtype(x->format);
    GK_REQUIRE(x->q.dtype == dtype, "q must be %s for format %s, got %s", gk_dtype_name(dtype),
               format_names[x->format], io->dtype_name(x->q.dtype));
    GK_TRY(gk_check_dims("q", &x->q, 2, "[N, K]"));
    const int64_t shape[3] = {gk_ceil_div(x->q.shape[0], GK_TILE),
                              gk_ceil_div(x->q.shape[1], GK_TILE), gk_tile_bytes(x->format)};
    if (gk_reads_contents(io, ctx) && gk_is_4_bit(x->format)) {
        const int64_t low = x->format == GK_INT4 ? -8 : 0;
        for (int64_t i = 0; i < x->q.shape[0]; ++i)
            for (int64_t j = 0; j < x->q.shape[1]; ++j) {
                const int64_t code =
                    (int64_t)gk_load(x->q.data, dtype, i * x->q.stride[0] + j * x->q.stride[1]);
                if (code < low || code > low + 15)
                    return gk_fail(GK_ERR_INDEX,
                                   "q is expected to hold codes in [%lld, %lld] for format %s, got "
                                   "q[%lld, %lld] = %lld",
                                   (long long)low, (long long)low + 15, format_names[x->format],
                                   (long long)i, (long long)j, (long long)code);
            }
    }
    gk_give(io, "packed", &x->packed, GK_U8, 3, shape, GK_CONTIGUOUS);
    return GK_OK;
}

void gk_cost_pack_weight(const gk_context *ctx, const gk_pack_weight_args *x, gk_explanation *out) {
    (void)ctx;
    out->bytes = gk_tensor_bytes(&x->q) + gk_tensor_bytes(&x->packed);
}

gk_status gk_check_unpack_weight(const gk_context *ctx, const gk_unpack_weight_args *x, gk_io *io) {
    (void)ctx;
    GK_TRY(check_format(x->format));
    GK_TRY(gk_take(io, "packed", &x->packed, GK_DENSE_LAST));
    GK_TRY(gk_check_dtype(io, "packed", &x->packed, GK_U8));
    GK_REQUIRE(x->n >= 0 && x->k >= 0, "n and k must be 0 or more, got %lld and %lld",
               (long long)x->n, (long long)x->k);
    GK_TRY(check_packed(&x->packed, x->n, x->k, x->format, NULL));
    const int64_t shape[2] = {x->n, x->k};
    gk_give(io, "q", &x->q, gk_code_dtype(x->format), 2, shape, GK_CONTIGUOUS);
    return GK_OK;
}

void gk_cost_unpack_weight(const gk_context *ctx, const gk_unpack_weight_args *x,
                           gk_explanation *out) {
    (void)ctx;
    out->bytes = gk_tensor_bytes(&x->packed) + gk_tensor_bytes(&x->q);
}

/* ---- weight_gemm ----------------------------------------------------------------------------- */
static gk_status check_scale(gk_io *io, const gk_weight_gemm_args *x, int64_t k) {
    const gk_tensor *s = &x->scale;
    GK_TRY(gk_take(io, "scale", s, GK_ANY_STRIDES));
    const gk_dtype own = x->format == GK_MXFP4   ? GK_E8M0
                         : x->format == GK_NVFP4 ? GK_E4M3
                                                 : x->a.dtype;
    if (own == x->a.dtype && x->a.dtype == GK_E4M3 && x->format != GK_NVFP4)
        GK_TRY(gk_check_dtypes(io, "scale", s, GK_F32, GK_BF16));
    else
        GK_TRY(gk_check_dtypes(io, "scale", s, own, GK_F32));
    const int64_t columns = x->offs ? x->offs->shape[0] * gk_round_up(x->n, GK_TILE) : x->n;
    const char *const name = x->offs ? "G N'" : "N"; /* N': N rounded up to whole tiles */
    GK_REQUIRE(s->ndim == 2 && s->shape[1] == columns && (gk_group_log2(k, s->shape[0]) > 0),
               "scale must have shape [ceil(K / g), %s], g 16, 32, 64, 128, 256 or K, with K %lld "
               "and %s %lld, got %s",
               name, (long long)k, name, (long long)columns, gk_text_of(s->ndim, s->shape).text);
    const int64_t wanted = x->format == GK_MXFP4 ? 32 : x->format == GK_NVFP4 ? 16 : 0;
    GK_REQUIRE(!wanted || s->shape[0] == gk_ceil_div(k, wanted),
               "scale must have groups of %lld for format %s, [%lld, %s], got %s",
               (long long)wanted, format_names[x->format],
               (long long)gk_ceil_div(k, gk_max_i64(1, wanted)), name,
               gk_text_of(2, s->shape).text);
    return GK_OK;
}

static gk_status check_offs(gk_io *io, const gk_weight_gemm_args *x) {
    GK_REQUIRE(x->a.ndim == 2, "a must have 2 dimensions [M, K] with offs, got %d", (int)x->a.ndim);
    GK_TRY(gk_take(io, "offs", x->offs, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "offs", x->offs, GK_I32));
    GK_TRY(gk_check_dims("offs", x->offs, 1, "[G]"));
    const int64_t groups = x->offs->shape[0];
    GK_REQUIRE(x->n < INT64_MAX / GK_TILE / (groups + 1), /* G N' fits in 64 bits */
               "n is %lld, which is too large with the %lld groups of offs", (long long)x->n,
               (long long)groups);
    return GK_OK;
}

gk_status gk_check_weight_gemm(const gk_context *ctx, const gk_weight_gemm_args *x, gk_io *io) {
    const gk_tensor *a = &x->a;
    GK_TRY(gk_take(io, "a", a, a->ndim == 2 ? GK_ANY_STRIDES : GK_CONTIGUOUS));
    GK_REQUIRE(a->dtype == GK_BF16 || a->dtype == GK_F16 || a->dtype == GK_E4M3,
               "a must be bfloat16, float16 or float8_e4m3fn, got %s%s", io->dtype_name(a->dtype),
               gk_bytes_hint(a->dtype));
    GK_TRY(gk_check_least_dims("a", a, 2));
    const int64_t k = a->shape[a->ndim - 1];
    GK_TRY(check_format(x->format));
    GK_REQUIRE(x->n >= 0, "n must be 0 or more, got %lld", (long long)x->n);
    if (x->offs) GK_TRY(check_offs(io, x));
    GK_TRY(gk_take(io, "packed", &x->packed, GK_DENSE_LAST));
    GK_TRY(gk_check_dtype(io, "packed", &x->packed, GK_U8));
    GK_TRY(check_packed(&x->packed, x->n, k, x->format, x->offs));
    GK_TRY(check_scale(io, x, k));
    if (x->zero) {
        GK_REQUIRE(x->format == GK_UINT4, "zero goes with format uint4, got %s",
                   format_names[x->format]);
        GK_TRY(gk_take(io, "zero", x->zero, GK_ANY_STRIDES));
        GK_TRY(gk_check_dtype(io, "zero", x->zero, GK_U8));
        GK_TRY(gk_check_shape("zero", x->zero, 2, x->scale.shape));
    }
    GK_REQUIRE(!x->global_scale || x->format == GK_NVFP4,
               "global_scale goes with format nvfp4, got %s", format_names[x->format]);
    GK_TRY(gk_take_number(io, "global_scale", x->global_scale));
    GK_REQUIRE(a->dtype != GK_E4M3 || x->scale_a, "scale_a must be given where a is float8_e4m3fn");
    GK_REQUIRE(a->dtype == GK_E4M3 || !x->scale_a, "scale_a goes with a float8_e4m3fn a, got %s",
               gk_dtype_name(a->dtype));
    if (x->scale_a) {
        gk_tensor rows = *a; /* a as rows of all its leading dimensions */
        rows.ndim = 2;
        rows.shape[0] = 1;
        rows.shape[1] = k;
        for (int d = 0; d < a->ndim - 1; ++d) rows.shape[0] *= a->shape[d];
        GK_TRY(gk_take_scale(io, "scale_a", x->scale_a, "a", &rows, false));
        GK_REQUIRE(x->scale_a->ndim < 2 || x->scale_a->shape[x->scale_a->ndim - 1] == 1,
                   "scale_a must have one scale along K, got %s",
                   gk_text_of(x->scale_a->ndim, x->scale_a->shape).text);
    }
    const gk_dtype out = x->out.dtype;
    const bool fits = out == GK_F32 || out == a->dtype ||
                      (a->dtype == GK_E4M3 && (out == GK_BF16 || out == GK_F16));
    GK_REQUIRE(fits && out != GK_E4M3, "out_dtype must be %s or float32, got %s",
               a->dtype == GK_E4M3 ? "bfloat16, float16" : gk_dtype_name(a->dtype),
               io->dtype_name(out));
    if (x->bias) {
        GK_TRY(gk_take(io, "bias", x->bias, GK_ANY_STRIDES));
        GK_TRY(gk_check_addend(io, "bias", x->bias, out));
        const int64_t each[2] = {x->offs ? x->offs->shape[0] : 0, x->n};
        GK_TRY(x->offs && x->bias->ndim == 2 ? gk_check_shape("bias", x->bias, 2, each)
                                             : gk_check_length_of("bias", x->bias, x->n));
    }
    GK_TRY(gk_check_activation(x->activation));
    int64_t shape[GK_MAX_DIMS];
    for (int d = 0; d < a->ndim - 1; ++d) shape[d] = a->shape[d];
    shape[a->ndim - 1] = x->n;
    gk_give(io, "out", &x->out, out, a->ndim, shape, GK_CONTIGUOUS);
    return x->offs && gk_reads_contents(io, ctx) ? gk_check_ends(x->offs, a->shape[0]) : GK_OK;
}

void gk_cost_weight_gemm(const gk_context *ctx, const gk_weight_gemm_args *x, gk_explanation *out) {
    (void)ctx;
    double weight = gk_tensor_bytes(&x->packed) + gk_tensor_bytes(&x->scale);
    if (x->zero) weight += gk_tensor_bytes(x->zero);
    /* at most as many groups have rows as there are rows */
    const int64_t groups = x->offs ? x->offs->shape[0] : 1;
    if (groups > 0)
        weight *= (double)gk_min_i64(groups, x->offs ? x->a.shape[0] : 1) / (double)groups;
    out->bytes = gk_tensor_bytes(&x->a) + weight + gk_tensor_bytes(&x->out);
    if (x->bias) out->bytes += gk_tensor_bytes(x->bias);
    out->flops = 2.0 * (double)gk_numel(&x->out) * (double)x->a.shape[x->a.ndim - 1];
}
