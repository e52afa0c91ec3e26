/* SPDX-License-Identifier: BSD-3-Clause */
/* sparse_pack, sparse_gemm: the checks and the costs of gk_sparse_pack and gk_sparse_gemm. */
#include "../core/dispatch.h"
#include "../formats/scales.h"
#include "quant.h"

static bool is_sparse_dtype(gk_dtype d) {
    return d == GK_BF16 || d == GK_F16 || d == GK_E4M3 || d == GK_E5M2 || d == GK_I8;
}

/* Checks that w has at most two non-zeros in each group of four along K. */
static gk_status check_mask(const gk_tensor *w) {
    for (int64_t i = 0; i < w->shape[0]; ++i)
        for (int64_t q = 0; q < w->shape[1] / 4; ++q) {
            int found = 0;
            for (int e = 0; e < 4; ++e)
                found +=
                    gk_load(w->data, w->dtype, i * w->stride[0] + (4 * q + e) * w->stride[1]) != 0;
            GK_REQUIRE(found <= 2,
                       "w is expected to have at most 2 non-zeros of each 4 along K, got %d in "
                       "w[%lld, %lld:%lld]",
                       found, (long long)i, (long long)(4 * q), (long long)(4 * q + 4));
        }
    return GK_OK;
}

gk_status gk_check_sparse_pack(const gk_context *ctx, const gk_sparse_pack_args *x, gk_io *io) {
    const gk_tensor *w = &x->w;
    GK_TRY(gk_take(io, "w", w, GK_ANY_STRIDES));
    GK_REQUIRE(is_sparse_dtype(w->dtype),
               "w must be bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, got %s%s",
               io->dtype_name(w->dtype), gk_bytes_hint(w->dtype));
    GK_TRY(gk_check_dims("w", w, 2, "[N, K]"));
    GK_REQUIRE(w->shape[1] % 4 == 0, "w has %lld columns, expected a multiple of 4",
               (long long)w->shape[1]);
    const int64_t values[2] = {w->shape[0], w->shape[1] / 2},
                  meta[2] = {w->shape[0], gk_ceil_div(w->shape[1], 8)};
    if (gk_reads_contents(io, ctx)) GK_TRY(check_mask(w));
    gk_give(io, "values", &x->values, w->dtype, 2, values, GK_CONTIGUOUS);
    gk_give(io, "meta", &x->meta, GK_U8, 2, meta, GK_CONTIGUOUS);
    return GK_OK;
}

void gk_cost_sparse_pack(const gk_context *ctx, const gk_sparse_pack_args *x, gk_explanation *out) {
    (void)ctx;
    out->bytes = gk_tensor_bytes(&x->w) + gk_tensor_bytes(&x->values) + gk_tensor_bytes(&x->meta);
}

gk_status gk_check_sparse_gemm(const gk_context *ctx, const gk_sparse_gemm_args *x, gk_io *io) {
    (void)ctx;
    const gk_tensor *a = &x->a, *values = &x->values;
    GK_TRY(gk_take(io, "a", a, GK_ANY_STRIDES));
    GK_REQUIRE(is_sparse_dtype(a->dtype),
               "a must be bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, got %s%s",
               io->dtype_name(a->dtype), gk_bytes_hint(a->dtype));
    GK_TRY(gk_check_dims("a", a, 2, "[M, K]"));
    const int64_t k = a->shape[1];
    GK_REQUIRE(k % 4 == 0, "a has %lld columns, expected a multiple of 4", (long long)k);
    GK_TRY(gk_take(io, "values", values, GK_DENSE_LAST));
    const bool fp8 = gk_is_code(a->dtype) && a->dtype != GK_I8 && gk_is_code(values->dtype) &&
                     values->dtype != GK_I8;
    if (!fp8) GK_TRY(gk_check_same_dtype(io, "values", values, "a", a));
    GK_TRY(gk_check_dims("values", values, 2, "[N, K / 2]"));
    GK_REQUIRE(values->shape[1] == k / 2, "values has %lld columns, expected %lld, half of a's",
               (long long)values->shape[1], (long long)(k / 2));
    const int64_t n = values->shape[0], meta[2] = {n, gk_ceil_div(k, 8)};
    GK_TRY(gk_take(io, "meta", &x->meta, GK_DENSE_LAST));
    GK_TRY(gk_check_dtype(io, "meta", &x->meta, GK_U8));
    GK_TRY(gk_check_shape("meta", &x->meta, 2, meta));
    const gk_tensor of_b = {.dtype = values->dtype, .ndim = 2, .shape = {k, n}};
    for (int i = 0; i < 2; ++i) {
        const gk_tensor *s = i ? x->scale_b : x->scale_a;
        const char *name = i ? "scale_b" : "scale_a";
        if (!s) continue;
        GK_REQUIRE(gk_is_code(a->dtype), "%s goes with 8-bit operands, a is %s", name,
                   gk_dtype_name(a->dtype));
        GK_TRY(gk_take_scale(io, name, s, i ? "the weight" : "a", i ? &of_b : a, i));
        GK_REQUIRE(s->ndim < 2 || s->shape[i ? 0 : 1] == 1,
                   "%s must have one scale along K, got %s", name,
                   gk_text_of(s->ndim, s->shape).text);
    }
    GK_REQUIRE(a->dtype != GK_I8 || k / 2 <= 131071,
               "a has %lld columns; int8 takes at most 262142, because longer sums overflow int32",
               (long long)k);
    if (x->bias) {
        GK_TRY(gk_take(io, "bias", x->bias, GK_ANY_STRIDES));
        GK_TRY(gk_check_addend(io, "bias", x->bias, x->out.dtype));
        GK_TRY(gk_check_length_of("bias", x->bias, n));
    }
    GK_TRY(gk_check_activation(x->activation));
    GK_REQUIRE((unsigned)x->accumulate <= GK_FAST,
               "accumulate is %d, expected one of gk_accumulate", (int)x->accumulate);
    GK_REQUIRE(fp8 || x->accumulate == GK_PRECISE,
               "accumulate must be precise where a is %s, got fast", gk_dtype_name(a->dtype));
    GK_TRY(gk_check_product_out(io, a->dtype, x->out.dtype));
    const int64_t shape[2] = {a->shape[0], n};
    gk_give(io, "out", &x->out, x->out.dtype, 2, shape, GK_CONTIGUOUS);
    return GK_OK;
}

void gk_cost_sparse_gemm(const gk_context *ctx, const gk_sparse_gemm_args *x, gk_explanation *out) {
    (void)ctx;
    out->bytes = gk_tensor_bytes(&x->a) + gk_tensor_bytes(&x->values) + gk_tensor_bytes(&x->meta) +
                 gk_tensor_bytes(&x->out);
    out->flops = (double)gk_numel(&x->out) * (double)x->a.shape[1];
}
