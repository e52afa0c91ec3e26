/* SPDX-License-Identifier: BSD-3-Clause */
/* quantize and dequantize by their definitions (gpukern_quant.h), one block and one element at a
 * time. Values are computed in double. The quotient x / scale is float32, or float64 for a float64
 * x. A block is read twice, for amax and for the codes. With one scale per tensor, the first pass
 * reads all rows before the second begins. */
#include "../core/internal.h"
#include "../formats/scales.h"

#include <float.h>

static int64_t offset_of(const gk_tensor *t, int64_t lead, int64_t row, int64_t col) {
    int64_t offset = t->ndim ? col * t->stride[t->ndim - 1] : 0;
    if (t->ndim > 1) offset += row * t->stride[t->ndim - 2];
    return offset + gk_offset_of(t, t->ndim - 2, lead);
}

static double at(const gk_tensor *t, int64_t lead, int64_t row, int64_t col) {
    return gk_load(t->data, t->dtype, offset_of(t, lead, row, col));
}

/* x + residual, rounded as it is stored */
static double sum_at(const gk_quantize_args *a, int64_t lead, int64_t row, int64_t col) {
    double h = at(&a->x, lead, row, col), rounded;
    if (!a->residual) return h;
    h += at(a->residual, lead, row, col);
    gk_store(&rounded, a->x.dtype, 0, h);
    return gk_load(&rounded, a->x.dtype, 0);
}

static double value_at(const gk_quantize_args *a, int64_t lead, int64_t row, int64_t col,
                       double rstd) {
    const double x = at(&a->x, lead, row, col);
    switch (a->what) {
    case GK_QUANTIZE_SILU_MUL: return x / (1 + exp(-x)) * at(a->up, lead, row, col);
    case GK_QUANTIZE_RMS_NORM: {
        const double h = sum_at(a, lead, row, col) * rstd;
        return a->weight
                   ? h * gk_load(a->weight->data, a->weight->dtype, col * a->weight->stride[0])
                   : h;
    }
    default: return x;
    }
}

static double rstd_of(const gk_quantize_args *a, int64_t lead, int64_t row, int64_t k) {
    double squares = 0;
    if (a->what != GK_QUANTIZE_RMS_NORM) return 1;
    for (int64_t j = 0; j < k; ++j) squares += sum_at(a, lead, row, j) * sum_at(a, lead, row, j);
    return 1 / sqrt(squares / (double)k + a->eps);
}

void gk_ref_quantize(const gk_context *ctx, const gk_quantize_args *a) {
    (void)ctx;
    const int nd = a->x.ndim;
    const int64_t k = nd ? a->x.shape[nd - 1] : 1, m = nd > 1 ? a->x.shape[nd - 2] : 1;
    int64_t leads = 1;
    for (int d = 0; d < nd - 2; ++d) leads *= a->x.shape[d];
    const bool whole = a->granularity == GK_PER_TENSOR, wide = a->x.dtype == GK_F64;
    const int64_t bk = a->granularity == GK_PER_1X128 || a->granularity == GK_PER_128X128
                           ? GK_SCALE_BLOCK
                       : a->granularity == GK_PER_1X32 ? GK_MX_BLOCK
                                                       : gk_max_i64(1, k);
    const int64_t bm = a->granularity == GK_PER_128X128 ? GK_SCALE_BLOCK
                       : whole                          ? gk_max_i64(1, m)
                                                        : 1;
    const int64_t high = whole || a->granularity != GK_PER_ROW ? gk_ceil_div(m, bm) : m;
    const int64_t across = whole || a->granularity == GK_PER_ROW ? 1 : gk_ceil_div(k, bk);
    const double q = a->codes.dtype == GK_I8 ? 127 : gk_type_of(a->codes.dtype)->largest;
    double most = 0, scale = 1;
    if (whole && !a->given && gk_numel(&a->x) == 0)
        gk_store(a->scale.data, a->scale.dtype, 0, 0x1p-126);
    for (int pass = whole ? 0 : 1; pass < 2; ++pass)
        for (int64_t b = 0; b < leads * high * across; ++b) {
            const int64_t lead = b / across / high, i0 = b / across % high * bm,
                          j0 = b % across * bk;
            if (!whole) most = 0;
            for (int half = pass == 0 || !whole ? 0 : 1; half < (pass ? 2 : 1); ++half) {
                if (half) { /* amax is known: compute the scale, then the codes */
                    if (a->given) {
                        scale = gk_load(a->given->data, a->given->dtype, whole ? 0 : b);
                    } else {
                        if (a->scale_ub && !isnan(most))
                            most = fmin(most, *(const float *)a->scale_ub->const_data);
                        /* the minimum matters for a float64 x beyond float32; its codes saturate */
                        float s = (float)fmin(most / q, FLT_MAX);
                        if (!wide) s = (float)most / (float)q;
                        s = fmaxf(s, 0x1p-126f);
                        if (isnan(most)) s = NAN;
                        if (a->granularity == GK_PER_1X32) s = gk_e8m0_to_f32(gk_f32_to_e8m0(s));
                        scale = s;
                        gk_store(a->scale.data, a->scale.dtype, whole ? 0 : b, scale);
                    }
                }
                for (int64_t i = i0; i < gk_min_i64(m, i0 + bm); ++i) {
                    const double rstd = rstd_of(a, lead, i, k);
                    for (int64_t j = j0; j < gk_min_i64(k, j0 + bk); ++j) {
                        const double x = value_at(a, lead, i, j, rstd);
                        if (!half) {
                            if (!(fabs(x) <= most))
                                most = isfinite(x) && !isnan(most) ? fabs(x) : NAN;
                        } else {
                            const double code =
                                wide ? x / scale : (double)((float)x / (float)scale);
                            gk_store(a->codes.data, a->codes.dtype, (lead * m + i) * k + j, code);
                            if (a->sum)
                                gk_store(a->sum->data, a->sum->dtype, (lead * m + i) * k + j,
                                         sum_at(a, lead, i, j));
                        }
                    }
                }
            }
        }
}

void gk_ref_dequantize(const gk_context *ctx, const gk_dequantize_args *a) {
    (void)ctx;
    const int nd = a->codes.ndim;
    const int64_t k = nd ? a->codes.shape[nd - 1] : 1, m = nd > 1 ? a->codes.shape[nd - 2] : 1;
    const gk_scales s = gk_scales_of(&a->scale, m, k, false);
    const int64_t n = gk_numel(&a->codes);
    for (int64_t e = 0; e < n; ++e) {
        const int64_t col = e % k, row = e / k % m, lead = e / k / m;
        const int64_t first = a->scale.ndim < 2 ? 0 : offset_of(&a->scale, lead, 0, 0);
        const int64_t block = first + (row >> s.row_log2) * s.row + (col >> s.col_log2) * s.col;
        gk_store(a->out.data, a->out.dtype, e,
                 at(&a->codes, lead, row, col) * gk_load(s.data, s.dtype, block));
    }
}
