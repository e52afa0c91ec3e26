/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_gemm, sparse_pack and sparse_gemm by their definitions (gpukern_quant.h), one element at
 * a time, in double. sparse_pack is also the CPU's kernel. */
#include "../core/internal.h"
#include "../formats/scales.h"
#include "activation.h"

static double scale_at(const gk_scales *s, int64_t row, int64_t col) {
    return s->data ? gk_load(s->data, s->dtype,
                             (row >> s->row_log2) * s->row + (col >> s->col_log2) * s->col)
                   : 1;
}

/* ---- grouped_gemm ---------------------------------------------------------------------------- */
void gk_ref_grouped_gemm(const gk_context *ctx, const gk_grouped_gemm_args *x) {
    (void)ctx;
    const int nd = x->b.ndim;
    const bool by_rows = nd == 3;
    const int64_t m = x->a.shape[0], k = x->a.shape[1], n = x->b.shape[nd - 1],
                  groups = x->offs.shape[0];
    const gk_scales sa = gk_scales_of(x->scale_a, m, k, false);
    int64_t begin = 0;
    for (int64_t g = 0; g <= groups; ++g) {
        const int64_t end = g < groups ? gk_i32_at(&x->offs, g) : m;
        gk_scales sb = gk_scales_of(x->scale_b, k, n, true);
        if (x->scale_b && x->scale_b->ndim == 3 && g < groups)
            sb.data = (const char *)sb.data +
                      (int64_t)gk_dtype_bytes(sb.dtype) * g * x->scale_b->stride[0];
        if (g == groups && !by_rows) break;
        for (int64_t i = by_rows ? begin : 0; i < (by_rows ? end : m); ++i)
            for (int64_t j = 0; j < n; ++j) {
                double sum = 0;
                for (int64_t kk = by_rows ? 0 : begin; g < groups && kk < (by_rows ? k : end);
                     ++kk) {
                    const int64_t b = kk * x->b.stride[nd - 2] + j * x->b.stride[nd - 1] +
                                      (by_rows ? g * x->b.stride[0] : 0);
                    sum +=
                        gk_load(x->a.data, x->a.dtype, i * x->a.stride[0] + kk * x->a.stride[1]) *
                        scale_at(&sa, i, kk) * gk_load(x->b.data, x->b.dtype, b) *
                        scale_at(&sb, kk, j);
                }
                if (x->bias && g < groups) {
                    const gk_tensor *t = x->bias;
                    sum +=
                        gk_load(t->data, t->dtype,
                                j * t->stride[t->ndim - 1] + (t->ndim == 2 ? g * t->stride[0] : 0));
                }
                gk_store(x->out.data, x->out.dtype, ((by_rows ? 0 : g * m) + i) * n + j,
                         g < groups ? act(x->activation, sum) : 0);
            }
        begin = end;
    }
}

/* ---- sparse_pack ----------------------------------------------------------------------------- */
static void pack_row(void *arg, int64_t i, int64_t worker) {
    (void)worker;
    const gk_sparse_pack_args *x = arg;
    const int64_t k = x->w.shape[1], bytes = (int64_t)gk_dtype_bytes(x->w.dtype);
    uint8_t *meta = (uint8_t *)x->meta.data + i * x->meta.shape[1];
    memset(meta, 0, (size_t)x->meta.shape[1]);
    for (int64_t q = 0; q < k / 4; ++q) {
        int place[2] = {0, 0}, found = 0;
        bool taken[4] = {false};
        for (int e = 0; e < 4; ++e)
            if (gk_load(x->w.data, x->w.dtype, i * x->w.stride[0] + (4 * q + e) * x->w.stride[1]) !=
                    0 &&
                found < 2) {
                place[found++] = e;
                taken[e] = true;
            }
        for (int e = 0; found < 2; ++e) /* zeros go to the lowest free positions */
            if (!taken[e]) {
                place[found++] = e;
                taken[e] = true;
            }
        if (place[0] > place[1]) {
            const int first = place[1];
            place[1] = place[0];
            place[0] = first;
        }
        for (int e = 0; e < 2; ++e)
            memcpy((char *)x->values.data + bytes * (i * (k / 2) + 2 * q + e),
                   (const char *)x->w.data +
                       bytes * (i * x->w.stride[0] + (4 * q + place[e]) * x->w.stride[1]),
                   (size_t)bytes);
        meta[q / 2] |= (uint8_t)((place[0] | place[1] << 2) << 4 * (q % 2));
    }
}

void gk_ref_sparse_pack(const gk_context *ctx, const gk_sparse_pack_args *args) {
    gk_sparse_pack_args x = *args;
    gk_parallel(ctx, x.w.shape[1] ? x.w.shape[0] : 0, pack_row, &x);
}

/* ---- sparse_gemm ----------------------------------------------------------------------------- */
void gk_ref_sparse_gemm(const gk_context *ctx, const gk_sparse_gemm_args *x) {
    (void)ctx;
    const int64_t m = x->a.shape[0], k = x->a.shape[1], n = x->values.shape[0];
    const gk_scales sa = gk_scales_of(x->scale_a, m, k, false),
                    sb = gk_scales_of(x->scale_b, k, n, true);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t v = 0; v < k / 2; ++v) {
                const int four = ((const uint8_t *)x->meta.data)[j * x->meta.stride[0] + v / 4] >>
                                     4 * (v / 2 % 2) &
                                 15;
                const int64_t kk = v / 2 * 4 + (v % 2 ? four >> 2 : four & 3);
                sum += gk_load(x->a.data, x->a.dtype, i * x->a.stride[0] + kk * x->a.stride[1]) *
                       gk_load(x->values.data, x->values.dtype, j * x->values.stride[0] + v);
            }
            sum *= scale_at(&sa, i, 0) * scale_at(&sb, 0, j);
            if (x->bias) sum += gk_load(x->bias->data, x->bias->dtype, j * x->bias->stride[0]);
            gk_store(x->out.data, x->out.dtype, i * n + j, act(x->activation, sum));
        }
}
