/* SPDX-License-Identifier: BSD-3-Clause */
/* check_gemm: compares gk_gemm and gk_gemm_act_bwd of every instruction set with csrc/ref.
 *
 * size: |alpha| sum |a| |b| + |beta c| + |bias|
 * loss: u(float32) (16 + 2 sqrt K). A running sum of K terms has an error of about sqrt(K)
 * roundings of its size; the rest covers the epilogue and the activation. */
#include "check.h"

static const int64_t edges[] = {0, 1, 7, 13, 14, 15, 31, 33, 64, 100};
static const gk_dtype dtypes[] = {GK_F32, GK_BF16, GK_F16, GK_F64};
static const char *const act_names[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
static int num_isas;

/* ---- one case -------------------------------------------------------------------------------- */
typedef enum operand_layout {
    ROWS,
    COLUMNS,
    SPACED,
    BACKWARDS,
    REPEATED,
    NUM_LAYOUTS
} operand_layout;
typedef enum c_shape {
    C_NONE,
    C_FULL,
    C_ROW,
    C_COLUMN,
    C_SCALAR,
    NUM_C
} c_shape;

typedef struct gemm_case {
    gk_dtype dtype, out_dtype, bias_dtype, c_dtype;
    int64_t m, n, k;
    int a_batch_ndim, b_batch_ndim; /* batch dimensions, aligned at the end */
    int64_t a_batch[3], b_batch[3];
    operand_layout a_layout, b_layout;
    bool bias, preact;
    c_shape c;
    double alpha, beta;
    gk_activation activation;
} gemm_case;

/* A matrix [batch..., rows, cols]: row-major, column-major, every second element, mirrored, or
 * one row repeated. */
static check_tensor operand(gk_dtype dtype, int batch_ndim, const int64_t *batch, int64_t rows,
                            int64_t cols, operand_layout layout) {
    int64_t shape[GK_MAX_DIMS];
    int order[GK_MAX_DIMS], ndim = batch_ndim + 2;
    for (int d = 0; d < ndim; ++d) {
        order[d] = d;
        shape[d] = d < batch_ndim ? batch[d] : d == batch_ndim ? rows : cols;
    }
    if (layout == COLUMNS) {
        order[ndim - 2] = ndim - 1;
        order[ndim - 1] = ndim - 2;
    }
    check_tensor x =
        check_tensor_make(dtype, ndim, shape, order, layout == SPACED ? 2 : 1, check_below(4));
    check_fill_normal(&x, 1);
    if (layout == BACKWARDS && rows > 0 && cols > 0) {
        for (int d = ndim - 2; d < ndim; ++d) {
            x.t.data =
                (char *)x.t.data + (shape[d] - 1) * x.t.stride[d] * (int64_t)gk_dtype_bytes(dtype);
            x.t.stride[d] = -x.t.stride[d];
        }
    }
    if (layout == REPEATED) x.t.stride[ndim - 2] = 0;
    return x;
}

static check_tensor make_c(const gemm_case *x, int batch_ndim, const int64_t *batch) {
    int64_t shape[GK_MAX_DIMS];
    for (int d = 0; d < batch_ndim; ++d) shape[d] = batch[d];
    shape[batch_ndim] = x->m;
    shape[batch_ndim + 1] = x->n;
    check_tensor c;
    int64_t column[2] = {x->m, 1};
    switch (x->c) {
    case C_ROW: c = check_dense(x->c_dtype, 1, &x->n); break;
    case C_COLUMN: c = check_dense(x->c_dtype, 2, column); break;
    case C_SCALAR: c = check_dense(x->c_dtype, 0, NULL); break;
    default: c = check_tensor_make(x->c_dtype, batch_ndim + 2, shape, NULL, 1, 3); break;
    }
    if (x->beta == 0)
        check_fill(&c, NAN); /* must not be read */
    else
        check_fill_normal(&c, 1);
    return c;
}

static void run(const char *isa, int32_t num_threads, gk_gemm_args *args) {
    gk_context ctx = check_context(isa, num_threads);
    int mark = check_num_owned;
    check_workspace w = check_workspace_make(gk_gemm_workspace_bytes(&ctx, args));
    args->workspace = w.data;
    args->workspace_bytes = w.bytes;
    gk_status status = gk_gemm(&ctx, args);
    check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
    check_workspace_end(&w);
    gk_explanation e = {.size = sizeof e};
    if (gk_explain_gemm(&ctx, args, &e) == GK_OK) check_see(&e, w.bytes);
    check_free(mark);
}

static void check_gemm_case(const gemm_case *x) {
    /* 1. operands */
    int64_t batch[3], shape[GK_MAX_DIMS];
    int batch_ndim = x->a_batch_ndim > x->b_batch_ndim ? x->a_batch_ndim : x->b_batch_ndim;
    for (int d = 0; d < batch_ndim; ++d) {
        int a = d - batch_ndim + x->a_batch_ndim, b = d - batch_ndim + x->b_batch_ndim;
        batch[d] = a >= 0 && x->a_batch[a] != 1 ? x->a_batch[a]
                   : b >= 0                     ? x->b_batch[b]
                                                : x->a_batch[a];
        shape[d] = batch[d];
    }
    shape[batch_ndim] = x->m;
    shape[batch_ndim + 1] = x->n;
    check_tensor a = operand(x->dtype, x->a_batch_ndim, x->a_batch, x->m, x->k, x->a_layout);
    check_tensor b = operand(x->dtype, x->b_batch_ndim, x->b_batch, x->k, x->n, x->b_layout);
    check_tensor bias = check_tensor_make(x->bias_dtype, 1, &x->n, NULL, 1 + check_below(2), 0);
    check_fill_normal(&bias, 1);
    check_tensor c = make_c(x, batch_ndim, batch);
    gk_gemm_args args = {.size = sizeof args,
                         .a = a.t,
                         .b = b.t,
                         .alpha = x->alpha,
                         .beta = x->beta,
                         .bias = x->bias ? &bias.t : NULL,
                         .c = x->c == C_NONE ? NULL : &c.t,
                         .activation = x->activation};

    /* 2. the exact result and the size of its terms */
    gk_context serial = check_context(NULL, 1);
    check_tensor exact = check_dense(GK_F64, batch_ndim + 2, shape),
                 pre = check_dense(GK_F64, batch_ndim + 2, shape);
    check_tensor size = check_dense(GK_F64, batch_ndim + 2, shape);
    gk_gemm_args ref = args;
    ref.out = exact.t;
    ref.preact = &pre.t;
    gk_ref_gemm(&serial, &ref);
    check_tensor abs_a = check_map(&a, fabs), abs_b = check_map(&b, fabs),
                 abs_bias = check_map(&bias, fabs);
    check_tensor abs_c = check_map(&c, fabs);
    ref.a = abs_a.t;
    ref.b = abs_b.t;
    ref.bias = x->bias ? &abs_bias.t : NULL;
    ref.c = x->c == C_NONE ? NULL : &abs_c.t;
    ref.alpha = fabs(x->alpha);
    ref.beta = fabs(x->beta);
    ref.activation = GK_ACT_NONE;
    ref.out = size.t;
    ref.preact = NULL;
    gk_ref_gemm(&serial, &ref);
    double loss = check_acc_unit(x->dtype) * (16 + 2 * sqrt((double)x->k));

    /* 3. every instruction set, with one worker and with three; out is contiguous or has gaps
     * between rows */
    int64_t out_pad = check_below(2) * 5;
    for (int i = 0; i < num_isas; ++i) {
        if (check_repeats(check_isa_names[i], x->dtype)) continue;
        int mark = check_num_owned;
        check_isa = check_isa_names[i];
        check_tensor out[2], preact[2];
        for (int w = 0; w < 2; ++w) {
            out[w] = check_tensor_make(x->out_dtype, batch_ndim + 2, shape, NULL, 1, out_pad);
            preact[w] =
                check_tensor_make(x->out_dtype, batch_ndim + 2, shape, NULL, 1, out_pad / 2);
            check_remember(&out[w]);
            check_remember(&preact[w]);
            args.out = out[w].t;
            args.preact = x->preact ? &preact[w].t : NULL;
            run(check_isa_names[i], w == 0 ? 1 : CHECK_WORKERS, &args);
            check_untouched(&out[w], "out");
            if (x->preact) check_untouched(&preact[w], "preact");
        }
        check_close("out", &out[0].t, &exact.t, &size.t, loss);
        if (x->preact) check_close("preact", &preact[0].t, &pre.t, &size.t, loss);
        check_result(check_same_bits(&out[0].t, &out[1].t), "out of 1 and %d workers differ",
                     CHECK_WORKERS);
        if (x->preact)
            check_result(check_same_bits(&preact[0].t, &preact[1].t),
                         "preact of 1 and 3 workers differ");
        check_free(mark);
    }
    check_free(0);
}

static void describe(const gemm_case *x) {
    static const char *const layouts[] = {"rows", "columns", "spaced", "backwards", "repeated"};
    static const char *const cs[] = {"none", "full", "row", "column", "scalar"};
    snprintf(check_case, sizeof check_case,
             "gemm %s->%s m %lld n %lld k %lld batch %d/%d a %s b %s bias %d c %s preact %d alpha "
             "%g beta %g act %s",
             gk_dtype_name(x->dtype), gk_dtype_name(x->out_dtype), (long long)x->m, (long long)x->n,
             (long long)x->k, x->a_batch_ndim, x->b_batch_ndim, layouts[x->a_layout],
             layouts[x->b_layout], x->bias, cs[x->c], x->preact, x->alpha, x->beta,
             act_names[x->activation]);
}

static gemm_case plain(gk_dtype dtype, int64_t m, int64_t n, int64_t k, operand_layout a,
                       operand_layout b) {
    return (gemm_case){.dtype = dtype,
                       .out_dtype = dtype,
                       .bias_dtype = dtype,
                       .c_dtype = dtype,
                       .m = m,
                       .n = n,
                       .k = k,
                       .a_layout = a,
                       .b_layout = b,
                       .alpha = 1};
}

/* ---- grids ----------------------------------------------------------------------------------- */
/* All m, n, k around tile edges. Layouts and epilogues change from case to case. */
static void check_edges(gk_dtype dtype) {
    int step = check_small() ? 7 : dtype == GK_F64 ? 5 : 1, count = CHECK_COUNT(edges);
    for (int e = 0; e < count * count * count; e += step) {
        check_seed = (uint64_t)e * 64 + dtype;
        gemm_case x = plain(dtype, edges[e % count], edges[e / count % count],
                            edges[e / count / count], (operand_layout)check_below(NUM_LAYOUTS),
                            (operand_layout)check_below(NUM_LAYOUTS));
        if (check_below(2)) {
            x.out_dtype = dtype != GK_F64 && check_below(2) ? GK_F32 : dtype;
            x.bias_dtype = check_below(2) ? x.out_dtype : dtype;
            x.c_dtype = check_below(2) ? dtype == GK_F64 ? GK_F64 : GK_F32 : dtype;
            x.bias = check_below(2);
            x.preact = check_below(2);
            x.c = (c_shape)check_below(NUM_C);
            x.activation = (gk_activation)check_below(CHECK_COUNT(act_names));
            x.alpha = check_below(2) ? 1 : -0.75;
            x.beta = x.c && check_below(3) ? 0.5 : 0;
        }
        if (check_below(4) == 0) {
            /* number of dimensions and sizes, of a and of b */
            static const int64_t shapes[][2][4] = {{{1, 3}, {0}},          {{0}, {1, 2}},
                                                   {{1, 2}, {1, 2}},       {{2, 2, 1}, {1, 3}},
                                                   {{2, 1, 3}, {2, 2, 1}}, {{3, 2, 1, 2}, {1, 2}},
                                                   {{1, 0}, {0}},          {{2, 3, 2}, {0}}};
            int s = (int)check_below(CHECK_COUNT(shapes));
            x.a_batch_ndim = (int)shapes[s][0][0];
            x.b_batch_ndim = (int)shapes[s][1][0];
            memcpy(x.a_batch, &shapes[s][0][1], sizeof x.a_batch);
            memcpy(x.b_batch, &shapes[s][1][1], sizeof x.b_batch);
        }
        describe(&x);
        check_gemm_case(&x);
    }
}

/* Sizes larger than every cache block with all four operand orders: long K, long N, long M, and
 * one row. */
static void check_blocks(gk_dtype dtype) {
    static const int64_t sizes[][3] = {{1, 1030, 517},   {4, 517, 1030},  {16, 300, 700},
                                       {17, 129, 2100},  {70, 1100, 130}, {600, 70, 90},
                                       {131, 197, 1050}, {257, 33, 515}};
    for (int s = 0; s < CHECK_COUNT(sizes); s += check_small() ? 5 : 1) {
        for (int layout = 0; layout < 4; layout += check_small() ? 3 : 1) {
            check_seed = (uint64_t)(s * 4 + layout) * 64 + dtype;
            gemm_case x = plain(dtype, sizes[s][0], sizes[s][1], sizes[s][2],
                                (operand_layout)(layout & 1), (operand_layout)(layout >> 1));
            if (layout == 1) {
                x.bias = true;
                x.c = C_FULL;
                x.beta = 1;
                x.preact = true;
                x.activation = GK_ACT_GELU;
            }
            if (layout == 2 && dtype != GK_F64) x.out_dtype = GK_F32;
            describe(&x);
            check_gemm_case(&x);
        }
    }
}

/* Each activation alone and with the whole epilogue, with both output dtypes. */
static void check_epilogues(gk_dtype dtype) {
    for (int i = 0; i < CHECK_COUNT(act_names) * NUM_C * 4; ++i) {
        check_seed = (uint64_t)i * 64 + dtype;
        gemm_case x = plain(dtype, i % 2 ? 37 : 5, 41, 29, ROWS, ROWS);
        x.activation = (gk_activation)(i / 4 % CHECK_COUNT(act_names));
        x.c = (c_shape)(i / 4 / CHECK_COUNT(act_names));
        x.bias = i % 4 != 0;
        x.preact = i % 4 == 3;
        if (i % 4 >= 2 && dtype != GK_F64) x.out_dtype = x.bias_dtype = GK_F32;
        x.alpha = 0.5;
        x.beta = x.c ? -2 : 0;
        describe(&x);
        check_gemm_case(&x);
    }
}

/* ---- the activation's derivative ------------------------------------------------------------- */
/* size |grad| (1 + |x|): the derivative is a bounded function plus x times another. */
static void check_act_bwd(gk_dtype dtype, gk_dtype saved_dtype, gk_activation activation,
                          int64_t rows, int64_t cols, bool transposed) {
    int64_t shape[3] = {2, rows, cols};
    int order[3] = {0, 2, 1};
    check_tensor grad = check_tensor_make(dtype, 3, shape, transposed ? order : NULL, 1, 2);
    check_tensor saved = check_tensor_make(saved_dtype, 3, shape, NULL, 1, 1);
    check_tensor exact = check_dense(GK_F64, 3, shape), size = check_dense(GK_F64, 3, shape);
    check_fill_normal(&grad, 1);
    check_fill_normal(&saved, 3);
    gk_gemm_act_bwd_args args = {sizeof args, grad.t, saved.t, exact.t, activation};
    gk_context serial = check_context(NULL, 1);
    gk_ref_gemm_act_bwd(&serial, &args);
    for (int64_t i = 0; i < gk_numel(&size.t); ++i) {
        check_set(&size.t, i, fabs(check_get(&grad.t, i)) * (1 + fabs(check_get(&saved.t, i))));
    }
    snprintf(check_case, sizeof check_case,
             "gemm_act_bwd %s saved %s %s rows %lld cols %lld transposed %d", gk_dtype_name(dtype),
             gk_dtype_name(saved_dtype), act_names[activation], (long long)rows, (long long)cols,
             transposed);
    for (int i = 0; i < num_isas; ++i) {
        check_isa = check_isa_names[i];
        check_tensor got[2];
        for (int w = 0; w < 2; ++w) {
            got[w] = check_tensor_make(dtype, 3, shape, transposed ? order : NULL, 1, 3 * w);
            check_remember(&got[w]);
            args.grad_in = got[w].t;
            gk_context ctx = check_context(check_isa_names[i], w == 0 ? 1 : CHECK_WORKERS);
            gk_status status = gk_gemm_act_bwd(&ctx, &args);
            check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
            check_untouched(&got[w], "grad_in");
        }
        check_close("grad_in", &got[0].t, &exact.t, &size.t, 16 * check_acc_unit(dtype));
        check_result(check_same_bits(&got[0].t, &got[1].t), "1 and %d workers differ",
                     CHECK_WORKERS);
    }
    check_free(0);
}

static void check_act_bwds(gk_dtype dtype) {
    static const int64_t sizes[][2] = {{0, 3}, {1, 1}, {3, 31}, {7, 100}, {33, 257}};
    for (int act = 0; act < CHECK_COUNT(act_names); ++act) {
        for (int s = 0; s < CHECK_COUNT(sizes); ++s) {
            for (int transposed = 0; transposed < 2; ++transposed) {
                check_seed = (uint64_t)(act * 64 + s * 2 + transposed);
                gk_dtype saved = dtype != GK_F64 && (s & 1) ? GK_F32 : dtype;
                check_act_bwd(dtype, saved, (gk_activation)act, sizes[s][0], sizes[s][1],
                              transposed);
            }
        }
    }
}

/* ---- refusals -------------------------------------------------------------------------------- */
static void check_refusals(void) {
    snprintf(check_case, sizeof check_case, "gemm refusals");
    int64_t shape[2] = {64, 64};
    check_tensor a = check_dense(GK_F32, 2, shape), out = check_dense(GK_F32, 2, shape);
    check_fill_normal(&a, 1);
    check_remember(&out);
    gk_context ctx = check_context(NULL, 1);
    gk_gemm_args args = {.size = sizeof args, .a = a.t, .b = a.t, .out = out.t, .alpha = 1};
    size_t bytes = gk_gemm_workspace_bytes(&ctx, &args);
    check_workspace w = check_workspace_make(bytes + 64);
    if (bytes > 0) {
        args.workspace = w.data;
        args.workspace_bytes = bytes - 1;
        check_refused(gk_gemm(&ctx, &args), GK_ERR_WORKSPACE, "workspace");
        args.workspace = w.data + 4;
        args.workspace_bytes = bytes;
        check_refused(gk_gemm(&ctx, &args), GK_ERR_WORKSPACE, "workspace");
        args.workspace = NULL;
        check_refused(gk_gemm(&ctx, &args), GK_ERR_WORKSPACE, "workspace");
    }
    args.workspace = w.data;
    args.workspace_bytes = bytes;
    gk_context odd = check_context("sse9", 1);
    check_refused(gk_gemm(&odd, &args), GK_ERR_DEVICE, "sse9");
    odd = check_context(NULL, 0);
    check_refused(gk_gemm(&odd, &args), GK_ERR_ARGUMENT,
                  "gk_gemm: context.num_threads is 0, expected 1 or more");
    gk_gemm_args wrong = args;
    wrong.alpha = NAN;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT,
                  "gk_gemm: alpha must be a number, got nan");
    wrong.alpha = 1;
    wrong.beta = NAN;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT,
                  "gk_gemm: beta must be a number, got nan");
    wrong.beta = 0;
    wrong.out.data = (float *)a.t.data + 64 * 63;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT,
                  "gk_gemm: out shares memory with a; it must not");
    wrong.out = out.t;
    wrong.out.data = NULL;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT, "gk_gemm: out has no data");
    wrong.out = out.t;
    wrong.preact = &a.t;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT,
                  "gk_gemm: preact shares memory with a; it must not");
    wrong = args;
    wrong.b.shape[0] = 63;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT, "gk_gemm: b");
    wrong = args;
    wrong.b.dtype = GK_BF16;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT, "gk_gemm: b");
    wrong = args;
    wrong.fp32_precision = (gk_precision)2;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT, "gk_gemm: fp32_precision");
    wrong = args;
    wrong.alpha = 1e39;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT,
                  "alpha must be 0 or a number that float32 holds");
    wrong = args;
    wrong.beta = -1e-46;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT,
                  "beta must be 0 or a number that float32 holds");
    check_unchanged(&out, "out of a refused call");
    check_free(0);
}

/* c is checked like every other input. With beta 0 it is not read, and its data may be missing. */
static void check_c_refusals(gk_dtype dtype) {
    snprintf(check_case, sizeof check_case, "gemm refusals of c %s", gk_dtype_name(dtype));
    int64_t shape[2] = {4, 4};
    check_tensor a = check_dense(dtype, 2, shape), out = check_dense(dtype, 2, shape);
    check_fill_normal(&a, 1);
    check_remember(&out);
    gk_context ctx = check_context(NULL, 1);
    gk_tensor c = a.t;
    gk_gemm_args args = {
        .size = sizeof args, .a = a.t, .b = a.t, .c = &c, .out = out.t, .alpha = 1, .beta = 1};
    args.workspace_bytes = gk_gemm_workspace_bytes(&ctx, &args);
    args.workspace = check_workspace_make(args.workspace_bytes).data;
    c.data = NULL;
    check_refused(gk_gemm(&ctx, &args), GK_ERR_ARGUMENT, "gk_gemm: c has no data");
    c = a.t;
    c.ndim = -3;
    check_refused(gk_gemm(&ctx, &args), GK_ERR_ARGUMENT, "gk_gemm: c has -3 dimensions");
    c = a.t;
    c.ndim = 3;
    check_refused(gk_gemm(&ctx, &args), GK_ERR_ARGUMENT,
                  "gk_gemm: c must broadcast to the result's shape [4, 4], got [4, 4, 0]");
    c = a.t;
    c.shape[0] = -1;
    check_refused(gk_gemm(&ctx, &args), GK_ERR_ARGUMENT, "gk_gemm: c has size -1");
    c = a.t;
    c.dtype = GK_I32;
    const bool narrow = dtype == GK_BF16 || dtype == GK_F16;
    check_refused(gk_gemm(&ctx, &args), GK_ERR_ARGUMENT,
                  narrow ? "gk_gemm: c must be " : "gk_gemm: c has dtype int32, a has ");
    check_unchanged(&out, "out of a refused call");
    c = a.t;
    c.data = NULL;
    args.beta = 0;
    check_result(gk_gemm(&ctx, &args) == GK_OK, "c without data and beta 0: %s", gk_last_error());
    check_free(0);
}

/* Sizes and strides whose products do not fit in 64 bits are refused. As many threads as an int
 * can count are accepted. */
static void check_extremes(void) {
    snprintf(check_case, sizeof check_case, "gemm extremes");
    int64_t shape[2] = {64, 64};
    check_tensor a = check_dense(GK_F32, 2, shape), out = check_dense(GK_F32, 2, shape);
    check_fill_normal(&a, 1);
    gk_context ctx = check_context(NULL, INT32_MAX);
    gk_gemm_args args = {.size = sizeof args, .a = a.t, .b = a.t, .out = out.t, .alpha = 1}, wrong;
    args.workspace_bytes = gk_gemm_workspace_bytes(&ctx, &args);
    args.workspace = check_workspace_make(args.workspace_bytes).data;
    /* 64 x 64 has fewer tasks than threads, but more than the test can start */
    ctx.parallel_for = NULL;
    check_result(gk_gemm(&ctx, &args) == GK_OK, "2^31 - 1 threads: %s", gk_last_error());
    wrong = args;
    wrong.a.shape[0] = wrong.out.shape[0] = INT64_C(1) << 61;
    wrong.a.shape[1] = wrong.b.shape[0] = 0;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT, "more than 2^48 elements");
    wrong = args;
    wrong.a.stride[0] = INT64_MIN;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT, "gk_gemm: a has stride");
    wrong = args;
    wrong.a.shape[0] = wrong.out.shape[0] = 1;
    wrong.a.stride[0] = INT64_MAX;
    check_refused(gk_gemm(&ctx, &wrong), GK_ERR_ARGUMENT, "gk_gemm: a has stride");
    check_free(0);
}

int main(void) {
    num_isas = check_isas();
    for (int d = 0; d < CHECK_COUNT(dtypes); ++d) {
        check_edges(dtypes[d]);
        check_blocks(dtypes[d]);
        check_epilogues(dtypes[d]);
        check_act_bwds(dtypes[d]);
    }
    check_refusals();
    for (int d = 0; d < CHECK_COUNT(dtypes); ++d) check_c_refusals(dtypes[d]);
    check_extremes();
    check_every_instance_seen(GK_OP_GEMM);
    return check_end();
}
