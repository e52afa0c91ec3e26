/* SPDX-License-Identifier: BSD-3-Clause */
/* check_quant: compares quantised and sparse products of every instruction set of the machine
 * with ref/, with one worker and with three. Data is small integers and powers of two, so that
 * results must be equal. The gaps between tensor elements hold NaN. */
#include "check.h"

#include "cpu/kernels.h"
#include "core/op.h"
#include "formats/weight_tile.h"

#include <stddef.h>

static const char *isa;
static int workers;

static void describe(const char *op, int64_t m, int64_t n, int64_t k, int more) {
    snprintf(check_case, sizeof check_case, "%s %lld x %lld x %lld (%d) %s, %d workers", op,
             (long long)m, (long long)n, (long long)k, more, isa, workers);
}

/* [rows, cols] of small integers, contiguous along rows or columns, with gaps. */
static check_tensor whole(gk_dtype dtype, int64_t rows, int64_t cols, int most) {
    static const int by_columns[2] = {1, 0};
    const int64_t shape[2] = {rows, cols};
    check_tensor x = check_tensor_make(dtype, 2, shape, check_below(2) ? by_columns : NULL,
                                       1 + check_below(4) / 3, check_below(3));
    for (int64_t i = 0; i < rows * cols; ++i)
        check_set(&x.t, i, (double)(check_below(2 * most + 1) - most));
    return x;
}

static check_tensor powers(int64_t rows, int64_t cols) {
    const int64_t shape[2] = {rows, cols};
    check_tensor x = check_tensor_make(GK_F32, 2, shape, NULL, 1, 1);
    for (int64_t i = 0; i < rows * cols; ++i) check_set(&x.t, i, ldexp(1, (int)(i % 7) - 3));
    return x;
}

/* Runs an op and its reference. Their first results must be equal. */
#define BOTH(op, args, result, expected)                                                  \
    do {                                                                                  \
        gk_context ctx = check_context(isa, workers);                                     \
        check_workspace w = check_workspace_make(gk_##op##_workspace_bytes(&ctx, &args)); \
        args.workspace = w.data, args.workspace_bytes = w.bytes;                          \
        check_remember(&result);                                                          \
        const gk_status status = gk_##op(&ctx, &args);                                    \
        check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error()); \
        check_workspace_end(&w);                                                          \
        check_untouched(&result, "the result");                                           \
        args.out = expected.t;                                                            \
        gk_ref_##op(&ctx, &args);                                                         \
        check_equal("out", &result.t, &expected.t);                                       \
    } while (0)

static check_tensor dense(gk_dtype dtype, int64_t rows, int64_t cols) {
    const int64_t shape[2] = {rows, cols};
    return check_dense(dtype, 2, shape);
}

static void check_scaled(int64_t m, int64_t n, int64_t k) {
    static const gk_dtype pairs[5][2] = {{GK_E4M3, GK_E4M3},
                                         {GK_I8, GK_I8},
                                         {GK_E4M3, GK_E5M2},
                                         {GK_E5M2, GK_E4M3},
                                         {GK_E5M2, GK_E5M2}};
    const int64_t blocks = gk_ceil_div(k, 128), fine = gk_ceil_div(k, 32);
    for (int form = 0; form < 16; ++form) {
        const gk_dtype *pair = pairs[form % 5];
        describe("scaled_gemm", m, n, k, form);
        check_tensor a = whole(pair[0], m, k, 2), b = whole(pair[1], k, n, 2),
                     bias = whole(GK_F32, 1, n, 3);
        check_tensor scale_a = form % 4 == 0   ? powers(m, 1)
                               : form % 4 == 1 ? powers(m, blocks)
                               : form % 4 == 2 ? powers(gk_ceil_div(m, 128), blocks)
                                               : powers(m, fine);
        check_tensor scale_b = form / 4 == 0   ? powers(1, n)
                               : form / 4 == 1 ? powers(blocks, gk_ceil_div(n, 128))
                               : form / 4 == 2 ? powers(1, 1)
                                               : powers(fine, n);
        check_tensor out = dense(GK_F32, m, n), expected = dense(GK_F32, m, n);
        gk_tensor one_row = bias.t;
        one_row.ndim = 1;
        one_row.shape[0] = n;
        one_row.stride[0] = bias.t.stride[1];
        gk_scaled_gemm_args args = GK_SCALED_GEMM_ARGS_INIT;
        args.a = a.t;
        args.b = b.t;
        args.scale_a = scale_a.t;
        args.scale_b = scale_b.t;
        args.bias = form % 2 ? &one_row : NULL;
        args.out = out.t;
        args.activation = form % 3 ? GK_ACT_NONE : GK_ACT_RELU;
        BOTH(scaled_gemm, args, out, expected);
        check_free(0);
    }
}

/* A caller whose struct ends before `offs`. What lies behind it must not be read. */
static void check_without_offs(const gk_context *ctx, gk_weight_gemm_args args,
                               const gk_tensor *expected) {
    check_tensor out = dense(GK_F32, expected->shape[0], expected->shape[1]);
    args.size = offsetof(gk_weight_gemm_args, offs);
    args.offs = &args.packed;
    args.out = out.t;
    const size_t bytes = gk_weight_gemm_workspace_bytes(ctx, &args);
    check_workspace w = check_workspace_make(bytes);
    args.workspace = w.data;
    args.workspace_bytes = w.bytes;
    gk_explanation found = GK_EXPLANATION_INIT;
    check_result(gk_weight_gemm(ctx, &args) == GK_OK, "%s", gk_last_error());
    check_result(gk_explain_weight_gemm(ctx, &args, &found) == GK_OK, "%s", gk_last_error());
    check_workspace_end(&w);
    check_equal("out without offs", &out.t, expected);
    args.size -= 1;
    check_result(gk_weight_gemm(ctx, &args) == GK_ERR_ARGUMENT, "a shorter struct was taken");
}

static void check_weight(int64_t m, int64_t n, int64_t k) {
    static const int64_t groups[] = {16, 32, 64, 128, 256};
    static const gk_dtype dtypes[] = {GK_BF16, GK_F16, GK_E4M3};
    for (int f = 0; f < 36; ++f) {
        const gk_weight_format format = (gk_weight_format)(f % 6);
        const gk_dtype dtype = dtypes[f / 6 % 3];
        const bool grouped = f >= 18;
        const int64_t four = 4, rows = grouped ? four * gk_round_up(n, GK_TILE) : n;
        describe("weight_gemm", m, n, k, f);
        const int64_t group = format == GK_MXFP4   ? 32
                              : format == GK_NVFP4 ? 16
                                                   : groups[check_below(5)];
        const int64_t high = gk_ceil_div(k, group),
                      tiles[3] = {gk_ceil_div(rows, 64), gk_ceil_div(k, 64), gk_tile_bytes(format)};
        check_tensor q = whole(gk_code_dtype(format), rows, k, format == GK_INT4 ? 7 : 3);
        for (int64_t i = 0; gk_code_dtype(format) == GK_U8 && i < rows * k; ++i)
            check_set(&q.t, i, (double)check_below(16));
        check_tensor packed = check_dense(GK_U8, 3, tiles), again = dense(q.t.dtype, rows, k);
        gk_context ctx = check_context(isa, workers);
        gk_pack_weight_args pack = GK_PACK_WEIGHT_ARGS_INIT;
        pack.q = q.t;
        pack.format = format;
        pack.packed = packed.t;
        check_result(gk_pack_weight(&ctx, &pack) == GK_OK, "%s", gk_last_error());
        gk_unpack_weight_args unpack = GK_UNPACK_WEIGHT_ARGS_INIT;
        unpack.packed = packed.t;
        unpack.n = rows;
        unpack.k = k;
        unpack.format = format;
        unpack.q = again.t;
        check_result(gk_unpack_weight(&ctx, &unpack) == GK_OK, "%s", gk_last_error());
        check_result(check_same_bits(&again.t, &q.t), "unpacked codes differ");

        check_tensor a = whole(dtype, m, k, 2), scale = powers(high, rows), scale_a = powers(m, 1);
        check_tensor zero = whole(GK_U8, high, rows, 0), bias = whole(GK_F32, four, n, 3);
        check_tensor offs = check_dense(GK_I32, 1, &four);
        for (int64_t i = 0; i < high * rows; ++i) check_set(&zero.t, i, (double)check_below(16));
        int64_t end = 0;
        for (int64_t g = 0; g < four; ++g) {
            end += g == 1 ? 0 : check_below(m - end + 1);
            check_set(&offs.t, g, (double)end);
        }
        check_tensor out = dense(GK_F32, m, n), expected = dense(GK_F32, m, n);
        gk_weight_gemm_args args = GK_WEIGHT_GEMM_ARGS_INIT;
        args.a = a.t;
        args.packed = packed.t;
        args.scale = scale.t;
        args.n = n;
        args.format = format;
        args.out = out.t;
        if (dtype == GK_E4M3) args.scale_a = &scale_a.t;
        if (grouped) {
            args.offs = &offs.t;
            args.bias = &bias.t;
            if (format == GK_UINT4) args.zero = &zero.t;
        }
        BOTH(weight_gemm, args, out, expected);
        if (!grouped) check_without_offs(&ctx, args, &expected.t);
        check_free(0);
    }
}

static void check_grouped(int64_t m, int64_t n, int64_t k) {
    static const gk_dtype dtypes[] = {GK_F32, GK_BF16, GK_F16, GK_E4M3, GK_E5M2, GK_I8};
    for (int f = 0; f < 12; ++f) {
        const gk_dtype dtype = dtypes[f / 2];
        const bool by_rows = f % 2;
        const int64_t total = by_rows ? m : k, four = 4, shape_b[3] = {4, k, n},
                      shape_out[3] = {4, m, n};
        describe("grouped_gemm", m, n, k, f);
        check_tensor a = whole(dtype, m, k, 2), offs = check_dense(GK_I32, 1, &four);
        check_tensor b = by_rows ? check_dense(dtype, 3, shape_b) : whole(dtype, k, n, 2);
        for (int64_t i = 0; by_rows && i < 4 * k * n; ++i)
            check_set(&b.t, i, (double)(check_below(5) - 2));
        int64_t end = 0;
        for (int64_t g = 0; g < 4; ++g)
            check_set(&offs.t, g,
                      (double)(end = g == 1 ? end : end + check_below(total - end + 1)));
        check_tensor out = check_dense(GK_F32, by_rows ? 2 : 3, shape_out + by_rows);
        check_tensor expected = check_dense(GK_F32, by_rows ? 2 : 3, shape_out + by_rows);
        check_tensor scale_a = powers(by_rows ? m : m, by_rows ? gk_ceil_div(k, 128) : 1),
                     scale_b = powers(1, by_rows ? 1 : n);
        gk_tensor one = scale_b.t;
        if (by_rows) one.ndim = 0;
        gk_grouped_gemm_args args = GK_GROUPED_GEMM_ARGS_INIT;
        args.a = a.t;
        args.b = b.t;
        args.offs = offs.t;
        args.out = out.t;
        if (gk_is_code(dtype)) {
            args.scale_a = &scale_a.t;
            args.scale_b = &one;
        }
        BOTH(grouped_gemm, args, out, expected);
        check_free(0);
    }
}

static void check_sparse(int64_t m, int64_t n, int64_t k) {
    static const gk_dtype dtypes[] = {GK_BF16, GK_F16, GK_E4M3, GK_E5M2, GK_I8};
    for (int f = 0; f < 5; ++f) {
        describe("sparse_gemm", m, n, k, f);
        check_tensor a = whole(dtypes[f], m, k, 3), w = whole(dtypes[f], n, k, 3);
        for (int64_t i = 0; i < n * k / 4; ++i)
            for (int e = 0; e < 2; ++e) check_set(&w.t, 4 * i + check_below(2) + 2 * e, 0);
        for (int64_t i = 0; i < n * k / 4; ++i) {
            int found = 0;
            for (int e = 0; e < 4; ++e)
                if (check_get(&w.t, 4 * i + e) != 0 && ++found > 2) check_set(&w.t, 4 * i + e, 0);
        }
        check_tensor values = dense(dtypes[f], n, k / 2), meta = dense(GK_U8, n, gk_ceil_div(k, 8));
        gk_context ctx = check_context(isa, workers);
        gk_sparse_pack_args pack = GK_SPARSE_PACK_ARGS_INIT;
        pack.w = w.t;
        pack.values = values.t;
        pack.meta = meta.t;
        check_result(gk_sparse_pack(&ctx, &pack) == GK_OK, "%s", gk_last_error());
        check_tensor out = dense(GK_F32, m, n), expected = dense(GK_F32, m, n),
                     scale = powers(m, 1);
        gk_sparse_gemm_args args = GK_SPARSE_GEMM_ARGS_INIT;
        args.a = a.t;
        args.values = values.t;
        args.meta = meta.t;
        args.out = out.t;
        if (gk_is_code(dtypes[f])) args.scale_a = &scale.t;
        BOTH(sparse_gemm, args, out, expected);
        check_free(0);
    }
}

static void check_quantize(int64_t m, int64_t k) {
    static const gk_dtype from[] = {GK_F32, GK_BF16, GK_F16, GK_F64},
                          to[] = {GK_E4M3, GK_E5M2, GK_I8};
    for (int f = 0; f < 60; ++f) {
        const gk_granularity granularity = (gk_granularity)(f % 5);
        const gk_dtype x_dtype = from[f / 5 % 4], dtype = to[f / 20];
        describe("quantize", m, 1, k, f);
        const int64_t shape[2] = {m, k}, bk = granularity == GK_PER_1X32 ? 32 : 128;
        int64_t of_scale[2] = {m, granularity == GK_PER_ROW ? 1 : gk_ceil_div(k, bk)};
        if (granularity == GK_PER_128X128) of_scale[0] = gk_ceil_div(m, 128);
        const int ndim = granularity == GK_PER_TENSOR ? 0 : 2;
        check_tensor x = whole(x_dtype, m, k, 9);
        for (int64_t i = 0; i < m * k; ++i)
            check_set(&x.t, i, check_normal() * ldexp(1, (int)check_below(9)) + 0.5);
        check_tensor codes = check_dense(dtype, 2, shape), codes2 = check_dense(dtype, 2, shape);
        check_tensor scale = check_dense(GK_F32, ndim, of_scale),
                     scale2 = check_dense(GK_F32, ndim, of_scale);
        gk_quantize_args args = GK_QUANTIZE_ARGS_INIT;
        args.x = x.t;
        args.granularity = granularity;
        args.codes = codes.t;
        args.scale = scale.t;
        gk_context ctx = check_context(isa, workers);
        check_workspace w = check_workspace_make(gk_quantize_workspace_bytes(&ctx, &args));
        args.workspace = w.data;
        args.workspace_bytes = w.bytes;
        check_remember(&codes);
        check_remember(&scale);
        check_result(gk_quantize(&ctx, &args) == GK_OK, "%s", gk_last_error());
        check_workspace_end(&w);
        check_untouched(&codes, "codes");
        check_untouched(&scale, "scale");
        args.codes = codes2.t;
        args.scale = scale2.t;
        gk_ref_quantize(&ctx, &args);
        check_equal("codes", &codes.t, &codes2.t);
        check_equal("scale", &scale.t, &scale2.t);
        check_free(0);
    }
}

/* Runs a call by every int8 kernel of this machine, not only by the first that serves it. Each must
 * give the bits that ref/ wrote to out, the result in args, which is another tensor afterwards. */
static void check_int8_instances(gk_op op, const void *args, gk_tensor *out, int64_t m, int64_t n,
                                 int64_t k, int form) {
    int num;
    const gk_cpu_instance *rows = gk_cpu_instances(op, &num);
    const gk_tensor expected = *out;
    for (int r = 0; r < num; ++r)
        for (workers = 1; workers <= CHECK_WORKERS; workers += CHECK_WORKERS - 1) {
            gk_plan plan;
            memset(&plan, 0, sizeof plan);
            isa = gk_isa_names[rows[r].isa];
            const gk_context ctx = check_context(isa, workers);
            if (rows[r].dtype != GK_I8 || !gk_cpu_has(rows[r].isa)) continue;
            check_tensor result = check_dense(expected.dtype, expected.ndim, expected.shape);
            *out = result.t;
            if (!rows[r].kernel->plan(&ctx, args, &plan)) continue;
            describe(rows[r].name, m, n, k, form);
            check_workspace w = check_workspace_make(plan.workspace_bytes);
            rows[r].kernel->run(&ctx, args, &plan, w.data);
            check_workspace_end(&w);
            check_result(check_same_bits(out, &expected), "the bits are not those of ref/");
        }
}

/* scaled_gemm by every int8 kernel. Codes cover the whole range. One case has only the smallest
 * code, for which quads have the largest excess. */
static void check_int8(int64_t m, int64_t n, int64_t k) {
    for (int form = 0; form < 6; ++form) {
        /* sums are then float32, so values are small to be exact */
        const bool along_k = form == 0 || form == 3 || form == 4;
        const int most = along_k ? 2 : 128;
        check_tensor a = whole(GK_I8, m, k, most), b = whole(GK_I8, k, n, most);
        if (form == 1 || form == 2) {
            check_fill(&a, -128);
            check_fill(&b, form == 1 ? 127 : -128);
        }
        check_tensor scale_a = powers(m, form % 3 ? 1 : gk_ceil_div(k, 128)),
                     scale_b = powers(form == 4 ? gk_ceil_div(k, 32) : 1, n);
        check_tensor expected = dense(GK_F32, m, n);
        gk_scaled_gemm_args args = GK_SCALED_GEMM_ARGS_INIT;
        args.a = a.t;
        args.b = b.t;
        args.scale_a = scale_a.t;
        args.scale_b = scale_b.t;
        args.out = expected.t;
        gk_context ctx = check_context("base", 1);
        gk_ref_scaled_gemm(&ctx, &args);
        if (gk_cpu_has(GK_ISA_AMX_EMULATED)) { /* small M uses VNNI */
            gk_explanation e = GK_EXPLANATION_INIT;
            ctx = check_context("amx_emulated", 1);
            check_result(gk_explain_scaled_gemm(&ctx, &args, &e) == GK_OK, "%s", gk_last_error());
            check_result((strstr(e.instance, "amx") != NULL) == (m > 8), "%lld rows go by %s",
                         (long long)m, e.instance);
        }
        check_int8_instances(GK_OP_SCALED_GEMM, &args, &args.out, m, n, k, form);
        check_free(0);
    }
}

/* The same for grouped_gemm, with groups of no rows, of few and of many, and weights stored either
 * way. */
static void check_int8_groups(int64_t m, int64_t n, int64_t k) {
    static const int k_last[3] = {0, 2, 1};
    for (int form = 0; form < 8; ++form) {
        const bool by_rows = form % 2 == 0, along_k = form == 4;
        const int most = along_k ? 2 : 128;
        const int64_t total = by_rows ? m : k, groups = 5, of_b[3] = {groups, k, n},
                      of_out[3] = {groups, m, n}, biases[2] = {groups, n};
        check_tensor a = whole(GK_I8, m, k, most), offs = check_dense(GK_I32, 1, &groups);
        check_tensor b = by_rows ? check_tensor_make(GK_I8, 3, of_b, form % 4 ? k_last : NULL, 1, 3)
                                 : whole(GK_I8, k, n, most);
        for (int64_t i = 0; by_rows && i < gk_numel(&b.t); ++i)
            check_set(&b.t, i, (double)(check_below(2 * most + 1) - most));
        int64_t end = 0;
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t most_rows = g % 2 ? 5 : total - end + 1;
            end = g == 2 ? end : gk_min_i64(total, end + check_below(most_rows));
            check_set(&offs.t, g, (double)end);
        }
        check_tensor scale_a = powers(m, along_k ? gk_ceil_div(k, 128) : 1),
                     scale_b = by_rows ? check_dense(GK_F32, 2, biases) : powers(1, n),
                     bias = check_dense(GK_F32, 2, biases);
        for (int64_t i = 0; i < gk_numel(&scale_b.t); ++i)
            check_set(&scale_b.t, i, ldexp(1, (int)(i % 5) - 2));
        for (int64_t i = 0; i < groups * n; ++i) check_set(&bias.t, i, (double)(i % 7) - 3);
        if (by_rows) { /* [G, 1, N] */
            scale_b.t.ndim = 3;
            scale_b.t.shape[2] = n;
            scale_b.t.stride[2] = 1;
            scale_b.t.shape[1] = 1;
        }
        check_tensor expected = check_dense(GK_F32, by_rows ? 2 : 3, of_out + by_rows);
        gk_grouped_gemm_args args = GK_GROUPED_GEMM_ARGS_INIT;
        args.a = a.t;
        args.b = b.t;
        args.offs = offs.t;
        args.scale_a = &scale_a.t;
        args.scale_b = &scale_b.t;
        args.bias = form > 4 ? &bias.t : NULL;
        args.out = expected.t;
        gk_context ctx = check_context("base", 1);
        gk_ref_grouped_gemm(&ctx, &args);
        check_int8_instances(GK_OP_GROUPED_GEMM, &args, &args.out, m, n, k, form);
        check_free(0);
    }
}

int main(void) {
    static const int64_t int8_sizes[][3] = {{1, 1, 1},       {5, 70, 3},     {13, 33, 131},
                                            {30, 1100, 140}, {40, 40, 2100}, {270, 290, 70}};
    static const int64_t sizes[][3] = {
        {1, 1, 4}, {2, 33, 128}, {17, 40, 200}, {66, 20, 260}, {3, 7, 520}};
    const int n = check_isas();
    for (int i = 0; i < n; ++i)
        for (workers = 1; workers <= CHECK_WORKERS; workers += CHECK_WORKERS - 1) {
            isa = check_isa_names[i];
            for (int s = 0; s < CHECK_COUNT(sizes); ++s) {
                const int64_t *x = sizes[s];
                check_scaled(x[0], x[1], x[2]);
                check_weight(x[0], x[1], x[2]);
                check_grouped(x[0], x[1], x[2]);
                check_sparse(x[0], x[1], x[2]);
                check_quantize(x[0], x[2]);
            }
        }
    for (int s = 0; s < CHECK_COUNT(int8_sizes); ++s) {
        check_int8(int8_sizes[s][0], int8_sizes[s][1], int8_sizes[s][2]);
        check_int8_groups(int8_sizes[s][0], int8_sizes[s][1], int8_sizes[s][2]);
    }
    return check_end();
}
