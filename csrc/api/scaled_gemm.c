/* SPDX-License-Identifier: BSD-3-Clause */
/* scaled_gemm: the check and the cost of gk_scaled_gemm. */
#include "../core/dispatch.h"
#include "../formats/scales.h"
#include "quant.h"

gk_status gk_check_addend(gk_io *io, const char *name, const gk_tensor *t, gk_dtype out) {
    /* either 16-bit dtype fits beside the result */
    const bool any = out == GK_F32 || gk_is_code(out);
    const bool fits =
        t->dtype == GK_F32 || (any ? t->dtype == GK_BF16 || t->dtype == GK_F16 : t->dtype == out);
    GK_REQUIRE(fits, "%s must be %s%s, got %s", name,
               any ? "float32, bfloat16 or float16" : gk_dtype_name(out),
               any ? "" : " (as the result) or float32", io->dtype_name(t->dtype));
    return GK_OK;
}

gk_status gk_check_activation(gk_activation activation) {
    GK_REQUIRE((unsigned)activation <= GK_ACT_SILU,
               "activation is %d, expected one of gk_activation", (int)activation);
    return GK_OK;
}

static gk_status check_out(gk_io *io, const gk_scaled_gemm_args *g) {
    const gk_dtype out = g->out.dtype;
    GK_REQUIRE(
        out == GK_F32 || out == GK_BF16 || out == GK_F16 || out == GK_E4M3 || out == GK_E5M2 ||
            out == GK_I8,
        "out_dtype must be float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, got %s",
        io->dtype_name(out));
    GK_REQUIRE(gk_is_code(out) || !g->out_scale,
               "out_scale goes with an 8-bit result, got out_dtype %s", gk_dtype_name(out));
    GK_REQUIRE(!gk_is_code(out) || g->out_scale, "out_scale must be given with out_dtype %s",
               gk_dtype_name(out));
    return GK_OK;
}

gk_status gk_check_scaled_gemm(const gk_context *ctx, const gk_scaled_gemm_args *g, gk_io *io) {
    const gk_tensor *a = &g->a, *b = &g->b;
    GK_TRY(gk_take(io, "a", a, GK_ANY_STRIDES));
    GK_TRY(gk_check_codes(io, "a", a));
    GK_TRY(gk_check_dims("a", a, 2, "[M, K]"));
    GK_TRY(gk_take(io, "b", b, GK_ANY_STRIDES));
    GK_TRY(gk_check_codes(io, "b", b));
    GK_REQUIRE((a->dtype == GK_I8) == (b->dtype == GK_I8),
               "b has dtype %s, a has %s; int8 goes only with int8", gk_dtype_name(b->dtype),
               gk_dtype_name(a->dtype));
    GK_TRY(gk_check_dims("b", b, 2, "[K, N]"));
    GK_REQUIRE(b->shape[0] == a->shape[1], "b has %lld rows, a has %lld columns; they must match",
               (long long)b->shape[0], (long long)a->shape[1]);
    GK_TRY(gk_take_scale(io, "scale_a", &g->scale_a, "a", a, false));
    GK_TRY(gk_take_scale(io, "scale_b", &g->scale_b, "b", b, true));
    const int64_t shape[2] = {a->shape[0], b->shape[1]};
    if (g->bias) {
        GK_TRY(gk_take(io, "bias", g->bias, GK_ANY_STRIDES));
        GK_TRY(gk_check_addend(io, "bias", g->bias, g->out.dtype));
        GK_TRY(gk_check_length_of("bias", g->bias, shape[1]));
    }
    if (g->c) {
        GK_TRY(g->beta != 0 ? gk_take(io, "c", g->c, GK_ANY_STRIDES)
                            : gk_take_unread(io, "c", g->c));
        GK_TRY(gk_check_addend(io, "c", g->c, g->out.dtype));
        bool fits = g->c->ndim <= 2;
        for (int d = 0; fits && d < g->c->ndim; ++d)
            fits = g->c->shape[d] == 1 || g->c->shape[d] == shape[d + 2 - g->c->ndim];
        GK_REQUIRE(fits, "c must broadcast to the result's shape %s, got %s",
                   gk_text_of(2, shape).text, gk_text_of(g->c->ndim, g->c->shape).text);
    }
    GK_TRY(gk_check_representable(io, "beta", g->beta, "a", a));
    GK_TRY(gk_take_number(io, "out_scale", g->out_scale));
    if (g->out_scale && gk_reads_contents(io, ctx))
        GK_TRY(gk_check_above_0("out_scale", g->out_scale, false));
    GK_TRY(gk_check_activation(g->activation));
    GK_TRY(check_out(io, g));
    const bool along_k =
        gk_scales_of(&g->scale_a, shape[0], a->shape[1], false).col_log2 < GK_WHOLE_LOG2 ||
        gk_scales_of(&g->scale_b, a->shape[1], shape[1], true).row_log2 < GK_WHOLE_LOG2;
    GK_REQUIRE((unsigned)g->accumulate <= GK_FAST,
               "accumulate is %d, expected one of gk_accumulate", (int)g->accumulate);
    GK_REQUIRE(g->accumulate == GK_PRECISE || a->dtype != GK_I8,
               "accumulate must be precise with int8, got fast");
    GK_REQUIRE(g->accumulate == GK_PRECISE || !along_k,
               "accumulate must be precise with scales along K, got fast");
    GK_REQUIRE(a->dtype != GK_I8 || along_k || a->shape[1] <= INT8_MOST_K,
               "a has %lld columns; int8 without scales along K takes at most %d, because longer "
               "sums overflow int32",
               (long long)a->shape[1], INT8_MOST_K);
    gk_give(io, "out", &g->out, g->out.dtype, 2, shape, GK_DENSE_LAST);
    return GK_OK;
}

void gk_cost_scaled_gemm(const gk_context *ctx, const gk_scaled_gemm_args *g, gk_explanation *out) {
    (void)ctx;
    out->bytes = gk_tensor_bytes(&g->a) + gk_tensor_bytes(&g->b) + gk_tensor_bytes(&g->scale_a) +
                 gk_tensor_bytes(&g->scale_b) + gk_tensor_bytes(&g->out);
    if (g->bias) out->bytes += gk_tensor_bytes(g->bias);
    if (g->c && g->beta != 0) out->bytes += gk_tensor_bytes(g->c);
    out->flops = 2.0 * (double)gk_numel(&g->out) * (double)g->a.shape[1];
}
