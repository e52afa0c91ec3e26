/* SPDX-License-Identifier: BSD-3-Clause */
/* quantize, dequantize: the checks and the costs of gk_quantize and gk_dequantize. */
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "../formats/scales.h"
#include "quant.h"

/* ---- checks that quantised ops share (quant.h) ----------------------------------------------- */
gk_status gk_check_codes(gk_io *io, const char *name, const gk_tensor *t) {
    GK_REQUIRE(t->dtype == GK_E4M3 || t->dtype == GK_E5M2 || t->dtype == GK_I8,
               "%s must be float8_e4m3fn, float8_e5m2 or int8, got %s%s", name,
               io->dtype_name(t->dtype), gk_bytes_hint(t->dtype));
    return GK_OK;
}

gk_status gk_take_number(gk_io *io, const char *name, const gk_tensor *t) {
    if (!t) return GK_OK;
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, name, t, GK_F32));
    GK_REQUIRE(t->ndim == 0 || (t->ndim == 1 && t->shape[0] == 1),
               "%s must have shape [] or [1], got %s", name, gk_text_of(t->ndim, t->shape).text);
    return GK_OK;
}

gk_status gk_check_above_0(const char *name, const gk_tensor *t, bool nan) {
    const int64_t n = gk_numel(t);
    for (int64_t i = 0; i < n; ++i) {
        const double x = gk_load(t->data, t->dtype, i);
        GK_REQUIRE(x > 0 || (nan && isnan(x)), "%s must be above 0, got %g", name, x);
    }
    return GK_OK;
}

gk_status gk_take_scale(gk_io *io, const char *name, const gk_tensor *t, const char *of_name,
                        const gk_tensor *of, bool k_is_row) {
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, name, t, GK_F32, GK_E8M0));
    if (t->ndim == 0 || (t->ndim == 1 && t->shape[0] == 1)) return GK_OK;
    const int nd = of->ndim, r = nd - 2, c = nd - 1;
    bool fits = t->ndim == nd && nd >= 2;
    for (int d = 0; fits && d < nd - 2; ++d) fits = t->shape[d] == of->shape[d];
    if (fits) {
        fits = gk_block_log2(of->shape[r], t->shape[r], !k_is_row, k_is_row ? 5 : 7) >= 0 &&
               gk_block_log2(of->shape[c], t->shape[c], k_is_row, k_is_row ? 7 : 5) >= 0;
    } else if (nd == 1 && t->ndim == 1) { /* a single row with a scale for each block */
        fits = gk_block_log2(of->shape[0], t->shape[0], false, 5) >= 0;
    }
    GK_REQUIRE(fits, "%s has shape %s, which does not fit %s %s; expected [] or [%sr, c] with %s",
               name, gk_text_of(t->ndim, t->shape).text, of_name, gk_text_of(nd, of->shape).text,
               nd > 2 ? "..., " : "",
               k_is_row ? "r of 1, ceil(K / 128) or ceil(K / 32) and c of 1, N or ceil(N / 128)"
                        : "r of 1, M or ceil(M / 128) and c of 1, ceil(K / 128) or ceil(K / 32)");
    return GK_OK;
}

/* ---- quantize -------------------------------------------------------------------------------- */
/* Computes the shape of the scales and returns its number of dimensions. */
static int scale_shape(const gk_tensor *x, gk_granularity granularity, int64_t *shape) {
    const int nd = x->ndim;
    if (granularity == GK_PER_TENSOR) return 0;
    for (int d = 0; d < nd; ++d) shape[d] = x->shape[d];
    const int64_t k = shape[nd - 1];
    shape[nd - 1] = granularity == GK_PER_ROW
                        ? 1
                        : gk_ceil_div(k, granularity == GK_PER_1X32 ? GK_MX_BLOCK : GK_SCALE_BLOCK);
    if (granularity == GK_PER_128X128) shape[nd - 2] = gk_ceil_div(shape[nd - 2], GK_SCALE_BLOCK);
    return nd;
}

static gk_status check_like(gk_io *io, const char *name, const gk_tensor *t, const char *first_name,
                            const gk_tensor *first) {
    if (!t) return GK_OK;
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    GK_TRY(gk_check_same_dtype(io, name, t, first_name, first));
    return gk_check_shape(name, t, first->ndim, first->shape);
}

gk_status gk_check_quantize(const gk_context *ctx, const gk_quantize_args *q, gk_io *io) {
    const gk_tensor *x = &q->x;
    const char *name = q->what == GK_QUANTIZE_SILU_MUL ? "gate" : "x";
    GK_REQUIRE((unsigned)q->what <= GK_QUANTIZE_RMS_NORM,
               "what is %d, expected one of gk_quantized", (int)q->what);
    GK_TRY(gk_take(io, name, x, GK_ANY_STRIDES));
    GK_TRY(gk_check_float(io, name, x));
    GK_REQUIRE(q->what == GK_QUANTIZE_X || x->dtype != GK_F64,
               "%s must be float32, bfloat16 or float16, got float64", name);
    GK_TRY(gk_check_least_dims(
        name, x, q->what == GK_QUANTIZE_X && q->granularity == GK_PER_TENSOR ? 0 : 1));
    if (q->what == GK_QUANTIZE_SILU_MUL) {
        GK_REQUIRE(q->up, "up is NULL");
        GK_TRY(check_like(io, "up", q->up, "gate", x));
    }
    if (q->what == GK_QUANTIZE_RMS_NORM) {
        if (q->weight) {
            GK_TRY(gk_take(io, "weight", q->weight, GK_ANY_STRIDES));
            GK_TRY(gk_check_dtypes(io, "weight", q->weight, x->dtype, GK_F32));
            GK_TRY(gk_check_length_of("weight", q->weight, x->shape[x->ndim - 1]));
        }
        GK_TRY(check_like(io, "residual", q->residual, "x", x));
        GK_REQUIRE(q->eps >= 0 && isfinite(q->eps),
                   "eps must be 0 or a positive finite number, got %g", q->eps);
    }
    GK_TRY(gk_check_codes(io, "dtype", &q->codes));
    GK_REQUIRE((unsigned)q->granularity <= GK_PER_1X32,
               "granularity is %d, expected one of gk_granularity", (int)q->granularity);
    GK_REQUIRE(q->granularity != GK_PER_128X128 || x->ndim >= 2,
               "%s must have at least 2 dimensions with 128x128, got %d", name, (int)x->ndim);
    GK_TRY(gk_take_number(io, "scale_ub", q->scale_ub));
    int64_t shape[GK_MAX_DIMS];
    const int ndim = scale_shape(x, q->granularity, shape);
    if (q->given) {
        GK_TRY(gk_take(io, "scale", q->given, GK_CONTIGUOUS));
        GK_TRY(gk_check_dtypes(io, "scale", q->given, GK_F32,
                               q->granularity == GK_PER_1X32 ? GK_E8M0 : GK_F32));
        if (!(ndim == 0 && q->given->ndim == 1 && q->given->shape[0] == 1))
            GK_TRY(gk_check_shape("scale", q->given, ndim, shape));
    }
    if (gk_reads_contents(io, ctx)) {
        if (q->scale_ub) GK_TRY(gk_check_above_0("scale_ub", q->scale_ub, false));
        if (q->given) /* a NaN is allowed: it shows that the scale was computed from a NaN */
            GK_TRY(gk_check_above_0("scale", q->given, true));
    }
    gk_give(io, "codes", &q->codes, q->codes.dtype, x->ndim, x->shape, GK_CONTIGUOUS);
    const gk_dtype of_scale =
        q->granularity == GK_PER_1X32 && q->scale.dtype == GK_E8M0 ? GK_E8M0 : GK_F32;
    const int64_t none = 0;
    gk_give(io, "scale", &q->scale, of_scale, q->given ? 1 : ndim, q->given ? &none : shape,
            GK_CONTIGUOUS)
        ->optional = q->given != NULL;
    gk_give(io, "sum", q->sum, x->dtype, q->residual ? x->ndim : 1, q->residual ? x->shape : &none,
            GK_CONTIGUOUS)
        ->optional = true;
    return GK_OK;
}

void gk_cost_quantize(const gk_context *ctx, const gk_quantize_args *q, gk_explanation *out) {
    (void)ctx;
    out->bytes = gk_tensor_bytes(&q->x) + gk_tensor_bytes(&q->codes) + gk_tensor_bytes(&q->scale);
    if (q->up) out->bytes += gk_tensor_bytes(q->up);
    if (q->weight) out->bytes += gk_tensor_bytes(q->weight);
    if (q->residual) out->bytes += gk_tensor_bytes(q->residual);
    if (q->sum) out->bytes += gk_tensor_bytes(q->sum);
    out->flops = 2.0 * (double)gk_numel(&q->x);
}

/* ---- dequantize ------------------------------------------------------------------------------ */
gk_status gk_check_dequantize(const gk_context *ctx, const gk_dequantize_args *q, gk_io *io) {
    (void)ctx;
    GK_TRY(gk_take(io, "codes", &q->codes, GK_ANY_STRIDES));
    GK_TRY(gk_check_codes(io, "codes", &q->codes));
    GK_TRY(gk_take_scale(io, "scale", &q->scale, "codes", &q->codes, false));
    GK_TRY(gk_check_float(io, "dtype", &q->out));
    gk_give(io, "out", &q->out, q->out.dtype, q->codes.ndim, q->codes.shape, GK_CONTIGUOUS);
    return GK_OK;
}

void gk_cost_dequantize(const gk_context *ctx, const gk_dequantize_args *q, gk_explanation *out) {
    (void)ctx;
    out->bytes = gk_tensor_bytes(&q->codes) + gk_tensor_bytes(&q->scale) + gk_tensor_bytes(&q->out);
    out->flops = (double)gk_numel(&q->codes);
}
