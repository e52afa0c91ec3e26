/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_gemm: the check and the cost of gk_grouped_gemm. */
#include "../core/dispatch.h"
#include "../formats/scales.h"
#include "quant.h"

static bool is_fp8(gk_dtype dtype) { return dtype == GK_E4M3 || dtype == GK_E5M2; }
static bool has_scales(gk_dtype dtype) { return is_fp8(dtype) || dtype == GK_I8; }

gk_status gk_check_product_out(gk_io *io, gk_dtype a, gk_dtype out) {
    const bool code = gk_is_code(a);
    GK_REQUIRE(out == GK_F32 || (code ? out == GK_BF16 || out == GK_F16 : out == a),
               "out_dtype must be %s%s, got %s",
               code          ? "bfloat16, float16 or "
               : a == GK_F32 ? ""
               : a == GK_F16 ? "float16 or "
                             : "bfloat16 or ",
               "float32", io->dtype_name(out));
    return GK_OK;
}

static gk_status check_scales(gk_io *io, const gk_grouped_gemm_args *g, bool by_rows) {
    const bool codes = has_scales(g->a.dtype);
    GK_REQUIRE(codes || (!g->scale_a && !g->scale_b),
               "%s goes with float8_e4m3fn, float8_e5m2 and int8, a is %s",
               g->scale_a ? "scale_a" : "scale_b", gk_dtype_name(g->a.dtype));
    GK_REQUIRE(!codes || (g->scale_a && g->scale_b), "%s must be given where a is %s",
               g->scale_a ? "scale_b" : "scale_a", gk_dtype_name(g->a.dtype));
    GK_REQUIRE(is_fp8(g->a.dtype) || g->accumulate == GK_PRECISE,
               "accumulate must be precise where a is %s, got fast", gk_dtype_name(g->a.dtype));
    if (!codes) return GK_OK;
    GK_TRY(gk_take_scale(io, "scale_a", g->scale_a, "a", &g->a, false));
    GK_TRY(gk_take_scale(io, "scale_b", g->scale_b, "b", &g->b, true));
    const gk_tensor *sa = g->scale_a, *sb = g->scale_b;
    const bool whole =
        (sa->ndim < 2 || sa->shape[1] == 1) && (sb->ndim < 2 || sb->shape[sb->ndim - 2] == 1);
    GK_REQUIRE(whole || g->accumulate == GK_PRECISE,
               "accumulate must be precise with scales along K, got fast");
    GK_REQUIRE(g->a.dtype != GK_I8 || !whole || g->a.shape[1] <= INT8_MOST_K,
               "a has %lld columns; int8 without scales along K takes at most %d, because longer "
               "sums overflow int32",
               (long long)g->a.shape[1], INT8_MOST_K);
    if (by_rows) return GK_OK;
    GK_REQUIRE(
        whole,
        "scale_a and scale_b must have one scale along K where groups are of K, got %s and %s",
        gk_text_of(g->scale_a->ndim, g->scale_a->shape).text,
        gk_text_of(g->scale_b->ndim, g->scale_b->shape).text);
    return GK_OK;
}

gk_status gk_check_ends(const gk_tensor *offs, int64_t total) {
    int64_t before = 0;
    for (int64_t i = 0; i < offs->shape[0]; ++i) {
        const int64_t end = gk_i32_at(offs, i);
        if (end < before)
            return gk_fail(
                GK_ERR_INDEX,
                "offs is expected not to decrease from 0 on, got offs[%lld] = %lld after %lld",
                (long long)i, (long long)end, (long long)before);
        if (end > total)
            return gk_fail(GK_ERR_INDEX,
                           "offs is expected to end at or before %lld, got offs[%lld] = %lld",
                           (long long)total, (long long)i, (long long)end);
        before = end;
    }
    return GK_OK;
}

gk_status gk_check_grouped_gemm(const gk_context *ctx, const gk_grouped_gemm_args *g, gk_io *io) {
    const gk_tensor *a = &g->a, *b = &g->b;
    GK_TRY(gk_take(io, "a", a, GK_ANY_STRIDES));
    GK_REQUIRE(a->dtype == GK_F32 || a->dtype == GK_BF16 || a->dtype == GK_F16 ||
                   has_scales(a->dtype),
               "a must be float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, got %s%s",
               io->dtype_name(a->dtype), gk_bytes_hint(a->dtype));
    GK_TRY(gk_check_dims("a", a, 2, "[M, K]"));
    GK_TRY(gk_take(io, "b", b, GK_ANY_STRIDES));
    if (!(is_fp8(a->dtype) && is_fp8(b->dtype))) GK_TRY(gk_check_same_dtype(io, "b", b, "a", a));
    GK_REQUIRE(b->ndim == 2 || b->ndim == 3,
               "b must have 3 dimensions [G, K, N] or 2 [K, N], got %d", (int)b->ndim);
    const bool by_rows = b->ndim == 3;
    const int64_t m = a->shape[0], k = a->shape[1], n = b->shape[b->ndim - 1];
    GK_REQUIRE(b->shape[b->ndim - 2] == k, "b has %lld rows, a has %lld columns; they must match",
               (long long)b->shape[b->ndim - 2], (long long)k);
    GK_TRY(gk_take(io, "offs", &g->offs, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "offs", &g->offs, GK_I32));
    GK_TRY(gk_check_dims("offs", &g->offs, 1, "[G]"));
    const int64_t groups = g->offs.shape[0];
    GK_REQUIRE(!by_rows || b->shape[0] == groups,
               "offs has %lld groups, b has %lld; they must match", (long long)groups,
               (long long)b->shape[0]);
    GK_REQUIRE((unsigned)g->accumulate <= GK_FAST,
               "accumulate is %d, expected one of gk_accumulate", (int)g->accumulate);
    GK_TRY(check_scales(io, g, by_rows));
    if (g->bias) {
        const int64_t each[2] = {groups, n};
        GK_TRY(gk_take(io, "bias", g->bias, GK_ANY_STRIDES));
        GK_TRY(gk_check_addend(io, "bias", g->bias, g->out.dtype));
        GK_TRY(g->bias->ndim == 2 ? gk_check_shape("bias", g->bias, 2, each)
                                  : gk_check_length_of("bias", g->bias, n));
    }
    GK_TRY(gk_check_activation(g->activation));
    GK_TRY(gk_check_product_out(io, a->dtype, g->out.dtype));
    const int64_t shape[3] = {groups, m, n};
    gk_give(io, "out", &g->out, g->out.dtype, by_rows ? 2 : 3, by_rows ? shape + 1 : shape,
            GK_CONTIGUOUS);
    return gk_reads_contents(io, ctx) ? gk_check_ends(&g->offs, by_rows ? m : k) : GK_OK;
}

void gk_cost_grouped_gemm(const gk_context *ctx, const gk_grouped_gemm_args *g,
                          gk_explanation *out) {
    (void)ctx;
    out->bytes = gk_tensor_bytes(&g->a) + gk_tensor_bytes(&g->b) + gk_tensor_bytes(&g->out);
    out->flops =
        2.0 * (double)g->a.shape[0] * (double)g->a.shape[1] * (double)g->b.shape[g->b.ndim - 1];
}
