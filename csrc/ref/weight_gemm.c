/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_gemm, pack_weight and unpack_weight by their definitions (gpukern_quant.h).
 *
 * The packing is also the CPU's kernel; a task is a row of tiles. The product is computed in
 * double, one element at a time, from weights that are rounded to a's dtype. For an e4m3 a the
 * weights are not rounded. A task is one row of the result. With offs, the row's group gives the
 * first column of its weights. */
#include "../formats/weight_tile.h"
#include "../core/internal.h"
#include "../formats/scales.h"
#include "activation.h"

/* ---- packing --------------------------------------------------------------------------------- */
static void pack_task(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_pack_weight_args *x = arg;
    const int64_t n = x->q.shape[0], k = x->q.shape[1], bytes = gk_tile_bytes(x->format),
                  across = x->packed.shape[1];
    const bool is_4_bit = gk_is_4_bit(x->format);
    uint8_t *to = (uint8_t *)x->packed.data + row * across * bytes;
    memset(to, 0, (size_t)(across * bytes));
    for (int64_t i = row * GK_TILE; i < gk_min_i64(n, (row + 1) * GK_TILE); ++i)
        for (int64_t j = 0; j < k; ++j) {
            const uint8_t code =
                ((const uint8_t *)x->q.data)[i * x->q.stride[0] + j * x->q.stride[1]];
            const int bit = gk_tile_bit(is_4_bit, (int)(i % GK_TILE), (int)(j % GK_TILE));
            uint8_t *byte = to + j / GK_TILE * bytes + bit / 8;
            *byte = is_4_bit ? (uint8_t)(*byte | (code & 15) << bit % 8) : code;
        }
}

void gk_ref_pack_weight(const gk_context *ctx, const gk_pack_weight_args *args) {
    gk_pack_weight_args x = *args;
    gk_parallel(ctx, x.packed.shape[1] ? x.packed.shape[0] : 0, pack_task, &x);
}

static uint8_t code_at(const gk_tensor *packed, gk_weight_format format, int64_t n, int64_t k) {
    const bool is_4_bit = gk_is_4_bit(format);
    const int bit = gk_tile_bit(is_4_bit, (int)(n % GK_TILE), (int)(k % GK_TILE));
    const uint8_t code =
        ((const uint8_t *)packed
             ->data)[n / GK_TILE * packed->stride[0] + k / GK_TILE * packed->stride[1] + bit / 8];
    return is_4_bit ? code >> bit % 8 & 15 : code;
}

static void unpack_task(void *arg, int64_t row, int64_t worker) {
    (void)worker;
    const gk_unpack_weight_args *x = arg;
    for (int64_t i = row * GK_TILE; i < gk_min_i64(x->n, (row + 1) * GK_TILE); ++i)
        for (int64_t j = 0; j < x->k; ++j) {
            const uint8_t code = code_at(&x->packed, x->format, i, j);
            ((uint8_t *)x->q.data)[i * x->k + j] =
                x->format == GK_INT4 ? (uint8_t)((code ^ 8) - 8) : code;
        }
}

void gk_ref_unpack_weight(const gk_context *ctx, const gk_unpack_weight_args *args) {
    gk_unpack_weight_args x = *args;
    gk_parallel(ctx, x.packed.shape[0], unpack_task, &x);
}

/* ---- the product ----------------------------------------------------------------------------- */
/* code - zero, or the value of a floating-point code; without scales. */
static double unscaled_weight(const gk_weight_gemm_args *x, int64_t n, int64_t k, int64_t group) {
    const uint8_t code = code_at(&x->packed, x->format, n, k);
    switch (x->format) {
    case GK_INT4: return (int8_t)((code ^ 8) - 8);
    case GK_UINT4:
        return code -
               (x->zero ? ((const uint8_t *)
                               x->zero->data)[group * x->zero->stride[0] + n * x->zero->stride[1]]
                        : 8);
    case GK_INT8: return (int8_t)code;
    case GK_W_E4M3: return gk_e4m3_to_f32(code);
    default: return gk_e2m1_to_f32(code);
    }
}

static void row_task(void *arg, int64_t i, int64_t worker) {
    (void)worker;
    const gk_weight_gemm_args *x = arg;
    int64_t group_of_row = 0;
    if (x->offs) {
        while (group_of_row < x->offs->shape[0] && i >= gk_i32_at(x->offs, group_of_row))
            ++group_of_row;
        if (group_of_row == x->offs->shape[0]) { /* a row of no group */
            for (int64_t j = 0; j < x->n; ++j) gk_store(x->out.data, x->out.dtype, i * x->n + j, 0);
            return;
        }
    }
    const int64_t n0 = group_of_row * gk_round_up(x->n, GK_TILE); /* the group's first column */
    const int nd = x->a.ndim;
    const int64_t k = x->a.shape[nd - 1], a_m = x->a.stride[nd - 2], a_k = x->a.stride[nd - 1];
    const int log2 = gk_group_log2(k, x->scale.shape[0]);
    const double global = x->global_scale ? *(const float *)x->global_scale->const_data : 1;
    double scale_a = 1;
    if (x->scale_a) {
        int64_t rows = 1;
        for (int d = 0; d < nd - 1; ++d) rows *= x->a.shape[d];
        const gk_scales s = gk_scales_of(x->scale_a, rows, k, false);
        scale_a = gk_load(s.data, s.dtype, (i >> s.row_log2) * s.row);
    }
    for (int64_t j = 0; j < x->n; ++j) {
        double sum = 0;
        for (int64_t kk = 0; kk < k; ++kk) {
            const int64_t group = kk >> log2;
            double w = unscaled_weight(x, n0 + j, kk, group) *
                       gk_load(x->scale.data, x->scale.dtype,
                               group * x->scale.stride[0] + (n0 + j) * x->scale.stride[1]);
            if (x->a.dtype != GK_E4M3) { /* rounded to a's dtype */
                double rounded;
                gk_store(&rounded, x->a.dtype, 0, (float)(w * global));
                w = gk_load(&rounded, x->a.dtype, 0);
            }
            sum += gk_load(x->a.data, x->a.dtype, i * a_m + kk * a_k) * w;
        }
        if (x->a.dtype == GK_E4M3) sum *= scale_a * global;
        if (x->bias) {
            const gk_tensor *t = x->bias;
            sum += gk_load(t->data, t->dtype,
                           j * t->stride[t->ndim - 1] +
                               (t->ndim == 2 ? group_of_row * t->stride[0] : 0));
        }
        gk_store(x->out.data, x->out.dtype, i * x->n + j, act(x->activation, sum));
    }
}

void gk_ref_weight_gemm(const gk_context *ctx, const gk_weight_gemm_args *args) {
    gk_weight_gemm_args x = *args;
    int64_t rows = 1;
    for (int d = 0; d < x.a.ndim - 1; ++d) rows *= x.a.shape[d];
    gk_parallel(ctx, rows, row_task, &x);
}
