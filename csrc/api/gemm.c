/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm: the checks and the costs of gk_gemm and gk_gemm_act_bwd. The entry points that choose a
 * kernel are in gemm_prefer.c. */
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "../core/folds.h"

/* bias has a's dtype or the result's. */
static gk_status check_bias_dtype(gk_io *io, const gk_gemm_args *g) {
    if (g->bias->dtype == g->a.dtype || g->bias->dtype == g->out.dtype) return GK_OK;
    if (g->a.dtype == g->out.dtype) return gk_check_same_dtype(io, "bias", g->bias, "a", &g->a);
    return gk_fail(GK_ERR_ARGUMENT, "bias must be %s (as a) or %s (as out_dtype), got %s",
                   gk_dtype_name(g->a.dtype), io->dtype_name(g->out.dtype),
                   io->dtype_name(g->bias->dtype));
}

/* c may be float32 beside a 16-bit a, for example a partial sum that was not rounded yet. It is
 * added in float32, and the sum is rounded once. */
static gk_status check_c_dtype(gk_io *io, const gk_gemm_args *g) {
    const gk_dtype dtype = g->a.dtype;
    if (gk_type_of(dtype)->bits >= 32) return gk_check_same_dtype(io, "c", g->c, "a", &g->a);
    GK_REQUIRE(g->c->dtype == dtype || g->c->dtype == GK_F32,
               "c must be %s (as a) or float32, got %s", gk_dtype_name(dtype),
               io->dtype_name(g->c->dtype));
    return GK_OK;
}

/* The result has a's dtype, or float32 if a has 16 bits. */
static gk_status check_out_dtype(gk_io *io, const gk_gemm_args *g) {
    const gk_dtype dtype = g->a.dtype, out = g->out.dtype;
    const bool narrow = gk_type_of(dtype)->bits < 32;
    GK_REQUIRE(out == dtype || (narrow && out == GK_F32), "out_dtype must be %s (as a)%s, got %s",
               gk_dtype_name(dtype), narrow ? " or float32" : "", io->dtype_name(out));
    return GK_OK;
}

/* Computes the result's shape [batch..., M, N]. Returns its number of dimensions, or -1 with a
 * failure text. */
static int result_shape(const gk_tensor *a, const gk_tensor *b, int64_t *shape) {
    const int ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
    for (int d = 0; d < ndim - 2; ++d) {
        const int at_a = d - ndim + a->ndim, at_b = d - ndim + b->ndim;
        const int64_t x = at_a < 0 ? 1 : a->shape[at_a], y = at_b < 0 ? 1 : b->shape[at_b];
        if (x != y && x != 1 && y != 1) {
            gk_fail(GK_ERR_ARGUMENT, "b has batch dimensions %s, a has %s; they must broadcast",
                    gk_text_of(b->ndim - 2, b->shape).text, gk_text_of(a->ndim - 2, a->shape).text);
            return -1;
        }
        shape[d] = x == 1 ? y : x;
    }
    shape[ndim - 2] = a->shape[a->ndim - 2];
    shape[ndim - 1] = b->shape[b->ndim - 1];
    return ndim;
}

static gk_status check_broadcasts(const gk_tensor *c, int ndim, const int64_t *shape) {
    const int shift = ndim - c->ndim;
    bool fits = shift >= 0;
    for (int d = 0; fits && d < c->ndim; ++d)
        fits = c->shape[d] == 1 || c->shape[d] == shape[d + shift];
    GK_REQUIRE(fits, "c must broadcast to the result's shape %s, got %s",
               gk_text_of(ndim, shape).text, gk_text_of(c->ndim, c->shape).text);
    return GK_OK;
}

static gk_status check_activation(gk_activation activation) {
    GK_REQUIRE((unsigned)activation <= GK_ACT_SILU,
               "activation is %d, expected one of gk_activation", (int)activation);
    return GK_OK;
}

/* out.dtype is an input of the check: it says which result dtype the caller asks for. */
gk_status gk_check_gemm(const gk_context *ctx, const gk_gemm_args *g, gk_io *io) {
    (void)ctx;
    const gk_tensor *a = &g->a, *b = &g->b;
    int64_t shape[GK_MAX_DIMS];
    GK_TRY(gk_take(io, "a", a, GK_ANY_STRIDES));
    GK_TRY(gk_check_float(io, "a", a));
    GK_TRY(gk_check_least_dims("a", a, 2));
    GK_TRY(gk_take(io, "b", b, GK_ANY_STRIDES));
    GK_TRY(gk_check_same_dtype(io, "b", b, "a", a));
    GK_TRY(gk_check_least_dims("b", b, 2));
    GK_REQUIRE(b->shape[b->ndim - 2] == a->shape[a->ndim - 1],
               "b has %lld rows, a has %lld columns; they must match",
               (long long)b->shape[b->ndim - 2], (long long)a->shape[a->ndim - 1]);
    const int ndim = result_shape(a, b, shape);
    if (ndim < 0) return GK_ERR_ARGUMENT;
    if (g->bias) {
        GK_TRY(gk_take(io, "bias", g->bias, GK_ANY_STRIDES));
        GK_TRY(check_bias_dtype(io, g));
        GK_TRY(gk_check_length_of("bias", g->bias, shape[ndim - 1]));
    }
    if (g->c) {
        /* with beta 0 its data is not read and may be missing */
        GK_TRY(g->beta != 0 ? gk_take(io, "c", g->c, GK_ANY_STRIDES)
                            : gk_take_unread(io, "c", g->c));
        GK_TRY(check_c_dtype(io, g));
        GK_TRY(check_broadcasts(g->c, ndim, shape));
    }
    GK_TRY(gk_check_representable(io, "alpha", g->alpha, "a", a));
    GK_TRY(gk_check_representable(io, "beta", g->beta, "a", a));
    GK_TRY(check_activation(g->activation));
    GK_TRY(check_out_dtype(io, g));
    GK_REQUIRE((unsigned)g->fp32_precision <= GK_TF32,
               "fp32_precision is %d, expected one of gk_precision", (int)g->fp32_precision);
    gk_give(io, "out", &g->out, g->out.dtype, ndim, shape, GK_DENSE_LAST);
    /* The tensor that gk_gemm_act_bwd reads. Without an activation and for relu it is out
     * itself, so preact is empty. */
    const bool saved = g->preact || g->activation > GK_ACT_RELU;
    const int64_t none = 0;
    gk_give(io, "preact", g->preact, g->out.dtype, saved ? ndim : 1, saved ? shape : &none,
            GK_DENSE_LAST)
        ->optional = true;
    return GK_OK;
}

/* Number of consecutive rows of t [batch..., M, .], broadcast to `shape` and counted from the
 * last dimension, that are one stride apart. */
static int64_t rows_in_one_stride(const gk_tensor *t, int ndim, const int64_t *shape) {
    int64_t rows = 1, stride = 0;
    for (int d = ndim - 2; d >= 0; --d) {
        const int64_t step = gk_broadcast_stride(t, ndim, d);
        if (shape[d] == 1) continue;
        if (rows > 1 && step != rows * stride) break;
        if (rows == 1) stride = step;
        rows *= shape[d];
    }
    return rows;
}

/* Whether a should be copied to dense rows, so that a batch of products with one b becomes a single
 * product. Without the copy every product reads b again and fills only a part of its tiles. An
 * example of such an a is a transposed activation [S, B, K].
 *
 * Measured time of the permuted product over the dense one (float32, one core, K = N = 512):
 * 1000 products of 7 rows 4.2, 256 of 16 rows 2.8, 16 of 256 rows 1.17; the copy of a takes
 * 0.02. With N = 64, 300 products of 3 rows take 1.9 and the copy 0.5.
 *
 * The limits for CUDA are computed, not measured: at N = 512 the copy takes as long as the
 * product (3 TB/s), and 32 rows fill half of the smallest tile. */
bool gk_gemm_is_better_dense(const gk_context *ctx, const gk_gemm_args *g) {
    const bool cpu = ctx->device == GK_CPU;
    const int64_t most_rows = cpu ? 256 : 32, least_columns = cpu ? 64 : 512;
    const gk_tensor *a = &g->a, *b = &g->b, *c = g->beta != 0 ? g->c : NULL;
    int64_t shape[GK_MAX_DIMS], rows = 1;
    for (int d = 0; d < b->ndim - 2; ++d)
        if (b->shape[d] != 1) return false;
    const int ndim = result_shape(a, b, shape);
    for (int d = 0; d < ndim - 1; ++d) rows *= shape[d];
    if (rows == 0 || shape[ndim - 1] < least_columns) return false;
    const int64_t together = rows_in_one_stride(a, ndim, shape);
    return together < rows && together <= most_rows &&
           (!c || rows_in_one_stride(c, ndim, shape) == rows);
}

void gk_cost_gemm(const gk_context *ctx, const gk_gemm_args *g, gk_explanation *out) {
    (void)ctx;
    out->bytes = gk_tensor_bytes(&g->a) + gk_tensor_bytes(&g->b) + gk_tensor_bytes(&g->out);
    if (g->bias) out->bytes += gk_tensor_bytes(g->bias);
    if (g->c && g->beta != 0) out->bytes += gk_tensor_bytes(g->c);
    if (g->preact) out->bytes += gk_tensor_bytes(g->preact);
    out->flops = 2.0 * (double)gk_numel(&g->out) * (double)g->a.shape[g->a.ndim - 1];
}

gk_status gk_check_gemm_act_bwd(const gk_context *ctx, const gk_gemm_act_bwd_args *g, gk_io *io) {
    (void)ctx;
    const gk_tensor *grad = &g->grad_out, *saved = &g->saved;
    GK_TRY(gk_take(io, "grad_out", grad, GK_ANY_STRIDES));
    GK_TRY(gk_check_float(io, "grad_out", grad));
    GK_TRY(gk_take(io, "saved", saved, GK_ANY_STRIDES));
    GK_TRY(gk_check_float(io, "saved", saved));
    if (gk_stats_dtype(saved->dtype) != gk_stats_dtype(grad->dtype))
        GK_TRY(gk_check_same_dtype(io, "saved", saved, "grad_out", grad));
    GK_TRY(gk_check_shape("saved", saved, grad->ndim, grad->shape));
    GK_TRY(check_activation(g->activation));
    gk_give(io, "grad_in", &g->grad_in, grad->dtype, grad->ndim, grad->shape, GK_ANY_STRIDES)
        ->in_place = true;
    return GK_OK;
}

void gk_cost_gemm_act_bwd(const gk_context *ctx, const gk_gemm_act_bwd_args *g,
                          gk_explanation *out) {
    (void)ctx;
    out->bytes =
        gk_tensor_bytes(&g->grad_out) + gk_tensor_bytes(&g->saved) + gk_tensor_bytes(&g->grad_in);
    out->flops = (double)gk_numel(&g->grad_out);
}
