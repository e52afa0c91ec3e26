/* SPDX-License-Identifier: BSD-3-Clause */
/* check_cuda_quant.h: check_cuda's random problems for scaled, grouped and sparse products.
 *
 * 8-bit operands are small integers and scales are powers of two, different for each block. A
 * scale that is misplaced, padded or transposed is then wrong by a factor of two. K / 128 goes
 * from 1 to 9. size: sum |a sa| |b sb| + |beta c| + |bias|; loss u (32 + 4 sqrt K). */
#ifndef GPUKERN_CHECK_CUDA_QUANT_H
#define GPUKERN_CHECK_CUDA_QUANT_H

static struct {
    check_tensor a, b, sa, sb, bias, c, values, meta, offs, out;
    union {
        gk_scaled_gemm_args scaled;
        gk_sparse_gemm_args sparse;
        gk_grouped_gemm_args grouped;
    } args;
    int64_t m, n, k, last; /* last: the end of the last group of rows */
} q;

static const int64_t no_batch[1] = {0};

/* Integers; the gaps between elements stay NaN. */
static void fill_whole(const check_tensor *x, int64_t most) {
    for (int64_t i = 0; i < gk_numel(&x->t); ++i)
        check_set(&x->t, i, (double)(check_below(2 * most + 1) - most));
}
static void fill_operand(const check_tensor *x) {
    if (gk_dtype_bytes(x->t.dtype) == 1)
        fill_whole(x, 2);
    else
        check_fill_normal(x, 1);
}
static void fill_powers(const check_tensor *x) {
    for (int64_t i = 0; i < gk_numel(&x->t); ++i)
        check_set(&x->t, i, ldexp(1, (int)check_below(6) - 3));
}

/* One number, or [high, wide] with contiguous rows or columns. whole: they begin at multiples of
 * 16 bytes. */
static check_tensor scales_drawn(bool one, int64_t high, int64_t wide, bool bytes, bool whole) {
    const gk_dtype dtype = bytes ? GK_E8M0 : GK_F32;
    if (one) return check_dense(dtype, 0, NULL);
    const bool columns = check_below(2);
    const int64_t rest = (columns ? high : wide) % 4, pad = whole && rest ? 4 - rest : 0;
    return stored(dtype, no_batch, high, wide, columns, false, 1, pad + 4 * check_below(2));
}

static int64_t deep_of(bool large) {
    static const int64_t some[] = {1, 16, 33, 100, 128, 200};
    return check_below(3) == 0
               ? PICK(some)
               : 128 * (1 + check_below(large ? 3 : 9)) + (check_below(4) ? 0 : 4 * check_below(9));
}

/* ---- scaled_gemm ----------------------------------------------------------------------------- */
static void scaled_draw(gk_dtype dtype, bool large) {
    static const int64_t ms[] = {1, 5, 16, 17, 33, 64, 70, 130, 300},
                         ns[] = {1, 16, 33, 64, 130, 200, 257, 520};
    static const gk_dtype outs[] = {GK_BF16, GK_F16, GK_F32};
    do {
        q.m = PICK(ms);
        q.n = large ? 128 * (1 + check_below(40)) : PICK(ns);
        q.k = deep_of(large);
    } while (q.m * q.n * q.k > small_or(600000, 30000000));
    const int64_t m = q.m, n = q.n, k = q.k, blocks = gk_ceil_div(k, 128), rows[2] = {m, n};
    /* plain: what the fast instances take, which few other draws have */
    const bool plain = check_below(3) == 0, mixed = dtype != GK_I8 && !plain && check_below(3) == 0;
    /* 0: one for the tensor, 1: per row, 2: blocks of the weight, 3: blocks of both, 4: blocks
     * along one row, 5: blocks of 32, 6: blocks of 32 beside blocks of the weight */
    const int64_t form = plain ? check_below(3) : check_below(7), thirties = gk_ceil_div(k, 32);
    const int64_t high_a = form == 1 ? 1 : form >= 5 ? thirties : form > 1 ? blocks : 1;
    const int64_t high_b = form == 6 ? blocks : high_a;
    const bool bytes = !plain && check_below(form == 5 ? 2 : 8) == 0;
    const gk_dtype out = plain ? GK_BF16 : PICK(outs), added = check_below(2) ? out : GK_F32;
    q.a = operand(dtype, no_batch, m, k);
    q.b = stored(mixed ? (dtype == GK_E4M3 ? GK_E5M2 : GK_E4M3) : dtype, no_batch, k, n,
                 check_below(4), false, 1, pad_for(k));
    q.sa = scales_drawn(form == 0, form == 4 ? 1 : m, high_a, bytes, plain);
    q.sb = scales_drawn(form == 0 || form == 4, form == 1 ? 1 : high_b,
                        form == 2 || form == 6 ? gk_ceil_div(n, 128) : n, bytes, plain);
    q.bias = check_dense(added, 1, &n);
    q.c = check_tensor_make(added, 2, rows, NULL, 1, pad_for(n));
    q.out = check_tensor_make(out, 2, rows, NULL, 1, pad_for(n));
    mirror(&q.a, "a", false);
    mirror(&q.b, "b", false);
    mirror(&q.sa, "scale_a", false);
    mirror(&q.sb, "scale_b", false);
    mirror(&q.bias, "bias", false);
    mirror(&q.c, "c", false);
    mirror(&q.out, "out", true);
    q.args.scaled = (gk_scaled_gemm_args){.size = sizeof q.args.scaled,
                                          .a = q.a.t,
                                          .b = q.b.t,
                                          .scale_a = q.sa.t,
                                          .scale_b = q.sb.t,
                                          .beta = check_below(2) ? 1 : 0.5,
                                          .out = q.out.t};
    if (!plain) {
        q.args.scaled.bias = check_below(2) ? &q.bias.t : NULL;
        q.args.scaled.c = check_below(4) ? NULL : &q.c.t;
        q.args.scaled.activation = check_below(2) ? GK_ACT_NONE : (gk_activation)check_below(5);
    }
    if (form < 2 && dtype != GK_I8 && check_below(2)) q.args.scaled.accumulate = GK_FAST;
    may_have_workspace = true;
    say("b %s form %d%s fast %d activation %d strides a %lld,%lld b %lld,%lld",
        gk_dtype_name(q.b.t.dtype), (int)form, bytes ? " e8m0" : "",
        q.args.scaled.accumulate == GK_FAST, q.args.scaled.activation, (long long)q.a.t.stride[0],
        (long long)q.a.t.stride[1], (long long)q.b.t.stride[0], (long long)q.b.t.stride[1]);
    TO_DEVICE(q.args.scaled);
}

static void scaled_expect(void) {
    fill_operand(&q.a);
    fill_operand(&q.b);
    fill_powers(&q.sa);
    fill_powers(&q.sb);
    check_fill_normal(&q.bias, 1);
    check_fill_normal(&q.c, 1);
    if (q.a.t.dtype != GK_I8 && check_below(4) == 0) { /* a NaN makes its whole row or column NaN */
        const check_tensor *x = check_below(2) ? &q.a : &q.b;
        check_set(&x->t, check_below(gk_numel(&x->t)), check_below(2) ? NAN : -NAN);
    }
    result *out = expected(&q.out, check_unit(GK_F32) * (32 + 4 * sqrt((double)q.k)));
    gk_scaled_gemm_args ref = q.args.scaled;
    ref.out = out->exact.t;
    gk_ref_scaled_gemm(&ref_ctx, &ref);
    const check_tensor a = check_map(&q.a, fabs), b = check_map(&q.b, fabs),
                       bias = check_map(&q.bias, fabs), c = check_map(&q.c, fabs);
    ref.a = a.t;
    ref.b = b.t;
    ref.out = out->size.t;
    ref.activation = GK_ACT_NONE;
    if (ref.bias) ref.bias = &bias.t;
    if (ref.c) ref.c = &c.t;
    gk_ref_scaled_gemm(&ref_ctx, &ref);
}

/* ---- sparse_gemm ----------------------------------------------------------------------------- */
static void sparse_draw(gk_dtype dtype, bool large) {
    static const int64_t ms[] = {1, 5, 17, 64, 70, 130, 300},
                         ns[] = {1, 16, 33, 64, 130, 200, 264, 520};
    do {
        q.m = PICK(ms);
        q.n = PICK(ns);
        q.k = gk_round_up(deep_of(large), check_below(2) ? 32 : 4);
    } while (q.m * q.n * q.k > small_or(600000, 20000000));
    const int64_t m = q.m, n = q.n, k = q.k, rows[2] = {m, n}, half[2] = {n, k / 2},
                  meta[2] = {n, gk_ceil_div(k, 8)};
    const bool eight = gk_dtype_bytes(dtype) == 1;
    const gk_dtype out = check_below(3) == 0 ? GK_F32
                         : !eight            ? dtype
                         : check_below(2)    ? GK_BF16
                                             : GK_F16;
    const int64_t pad = check_below(3) ? 0 : 16 * check_below(2);
    q.a = operand(dtype, no_batch, m, k);
    q.values = check_tensor_make(dtype, 2, half, NULL, 1, pad);
    q.meta = check_tensor_make(GK_U8, 2, meta, NULL, 1, pad);
    q.sa = scales_drawn(check_below(2), m, 1, false, false);
    q.sb = scales_drawn(check_below(2), 1, n, false, false);
    q.bias =
        check_tensor_make(check_below(2) ? out : GK_F32, 1, &n, NULL, 1 + (check_below(4) == 0), 0);
    q.out = check_dense(out, 2, rows);
    mirror(&q.a, "a", false);
    mirror(&q.values, "values", false);
    mirror(&q.meta, "meta", false);
    mirror(&q.sa, "scale_a", false);
    mirror(&q.sb, "scale_b", false);
    mirror(&q.bias, "bias", false);
    mirror(&q.out, "out", true);
    q.args.sparse = (gk_sparse_gemm_args){.size = sizeof q.args.sparse,
                                          .a = q.a.t,
                                          .values = q.values.t,
                                          .meta = q.meta.t,
                                          .out = q.out.t};
    q.args.sparse.scale_a = eight && check_below(3) ? &q.sa.t : NULL;
    q.args.sparse.scale_b = eight && check_below(3) ? &q.sb.t : NULL;
    q.args.sparse.bias = check_below(2) ? &q.bias.t : NULL;
    q.args.sparse.activation = check_below(2) ? GK_ACT_NONE : (gk_activation)check_below(5);
    if (eight && dtype != GK_I8 && check_below(2)) q.args.sparse.accumulate = GK_FAST;
    may_have_workspace = true;
    say("fast %d activation %d strides a %lld,%lld", q.args.sparse.accumulate == GK_FAST,
        q.args.sparse.activation, (long long)q.a.t.stride[0], (long long)q.a.t.stride[1]);
    TO_DEVICE(q.args.sparse);
}

static void sparse_expect(void) {
    static const int pairs[] = {0 | 1 << 2, 0 | 2 << 2, 0 | 3 << 2,
                                1 | 2 << 2, 1 | 3 << 2, 2 | 3 << 2};
    fill_operand(&q.a);
    fill_operand(&q.values);
    fill_powers(&q.sa);
    fill_powers(&q.sb);
    check_fill_normal(&q.bias, 1);
    for (int64_t i = 0; i < q.n; ++i)
        for (int64_t j = 0; j < q.meta.t.shape[1]; ++j)
            ((uint8_t *)q.meta.t.data)[i * q.meta.t.stride[0] + j] =
                (uint8_t)(PICK(pairs) | PICK(pairs) << 4);
    result *out = expected(&q.out, check_unit(GK_F32) * (32 + 4 * sqrt((double)q.k)));
    gk_sparse_gemm_args ref = q.args.sparse;
    ref.out = out->exact.t;
    gk_ref_sparse_gemm(&ref_ctx, &ref);
    const check_tensor a = check_map(&q.a, fabs), values = check_map(&q.values, fabs),
                       bias = check_map(&q.bias, fabs);
    ref.a = a.t;
    ref.values = values.t;
    ref.out = out->size.t;
    ref.activation = GK_ACT_NONE;
    if (ref.bias) ref.bias = &bias.t;
    gk_ref_sparse_gemm(&ref_ctx, &ref);
}

/* ---- grouped_gemm ---------------------------------------------------------------------------- */
static void grouped_draw(gk_dtype dtype, bool large) {
    static const int64_t ms[] = {1, 33, 64, 130, 300, 520, 700},
                         ns[] = {1, 16, 33, 64, 130, 200, 264};
    const bool eight = gk_dtype_bytes(dtype) == 1, by_k = check_below(3) == 0,
               blocks = !by_k && check_below(2);
    const int64_t groups = 1 + check_below(7);
    do {
        q.m = PICK(ms);
        q.n = PICK(ns);
        q.k = deep_of(large);
    } while (q.m * q.n * q.k > small_or(400000, 12000000));
    const int64_t m = q.m, n = q.n, k = q.k, kb = gk_ceil_div(k, 128);
    const int64_t batch[2] = {!by_k, groups}, out[3] = {groups, m, n}, biases[2] = {groups, n};
    const gk_dtype to = check_below(3) == 0 ? GK_F32
                        : !eight            ? dtype
                        : check_below(2)    ? GK_BF16
                                            : GK_F16;
    q.a = check_below(4)
              ? stored(dtype, no_batch, m, k, by_k, false, 1, by_k ? pad_for(m) : pad_for(k))
              : operand(dtype, no_batch, m, k);
    /* rows behind the ends must be distinct memory */
    if (q.a.t.stride[0] == 0) q.a = stored(dtype, no_batch, m, k, false, false, 1, 0);
    q.b = stored(dtype, batch, k, n, check_below(2), false, 1, pad_for(8));
    q.offs = check_tensor_make(GK_I32, 1, &groups, NULL, 1 + (check_below(4) == 0), 0);
    q.sa = scales_drawn(false, m, blocks ? kb : 1, false, false);
    const int64_t scales_b[3] = {groups, blocks ? kb : 1, blocks ? gk_ceil_div(n, 128) : n};
    q.sb = by_k ? scales_drawn(false, 1, n, false, false) : check_dense(GK_F32, 3, scales_b);
    q.bias = check_below(2) ? check_dense(to, 1, &n) : check_dense(to, 2, biases);
    q.out = by_k ? check_dense(to, 3, out) : check_dense(to, 2, out + 1);
    mirror(&q.a, "a", false);
    mirror(&q.b, "b", false);
    mirror(&q.offs, "offs", false);
    mirror(&q.sa, "scale_a", false);
    mirror(&q.sb, "scale_b", false);
    mirror(&q.bias, "bias", false);
    mirror(&q.out, "out", true);
    q.args.grouped = (gk_grouped_gemm_args){
        .size = sizeof q.args.grouped, .a = q.a.t, .b = q.b.t, .offs = q.offs.t, .out = q.out.t};
    q.args.grouped.scale_a = eight ? &q.sa.t : NULL;
    q.args.grouped.scale_b = eight ? &q.sb.t : NULL;
    if (eight && dtype != GK_I8 && !blocks && check_below(2)) q.args.grouped.accumulate = GK_FAST;
    q.args.grouped.bias = check_below(2) ? &q.bias.t : NULL;
    q.args.grouped.activation = check_below(2) ? GK_ACT_NONE : (gk_activation)check_below(5);
    may_have_workspace = true;
    say("%s%s fast %d activation %d strides a %lld,%lld b %lld,%lld",
        by_k ? "groups of k" : "groups of rows", blocks ? ", blocks" : "",
        q.args.grouped.accumulate == GK_FAST, q.args.grouped.activation, (long long)q.a.t.stride[0],
        (long long)q.a.t.stride[1], (long long)q.b.t.stride[q.b.t.ndim - 2],
        (long long)q.b.t.stride[q.b.t.ndim - 1]);
    TO_DEVICE(q.args.grouped);
}

static void grouped_expect(void) {
    const bool by_k = q.b.t.ndim == 2, int8 = q.a.t.dtype == GK_I8;
    const int64_t all = by_k ? q.k : q.m, groups = q.offs.t.shape[0];
    if (int8 && q.out.t.dtype != GK_F16 && check_below(2)) { /* sums of more than 24 bits */
        fill_whole(&q.a, 127);
        fill_whole(&q.b, 127);
    } else {
        fill_operand(&q.a);
        fill_operand(&q.b);
    }
    fill_powers(&q.sa);
    fill_powers(&q.sb);
    check_fill_normal(&q.bias, 1);
    int64_t end = 0;
    for (int64_t g = 0; g < groups; ++g) { /* some are empty, and some end before the last row */
        if (check_below(4)) end += check_below(2 * (all - end) / (groups - g) + 1);
        end = gk_min_i64(end, all);
        check_set(&q.offs.t, g, (double)end);
    }
    /* a sum over no k is 0, also where a scale is NaN */
    if (by_k && end == 0) check_set(&q.sa.t, 0, NAN);
    result *out = expected(&q.out, check_acc_unit(q.a.t.dtype == GK_F32 ? GK_F32 : GK_BF16) *
                                       (32 + 4 * sqrt((double)q.k)));
    gk_grouped_gemm_args ref = q.args.grouped;
    ref.out = out->exact.t;
    gk_ref_grouped_gemm(&ref_ctx, &ref);
    const check_tensor a = check_map(&q.a, fabs), b = check_map(&q.b, fabs),
                       bias = check_map(&q.bias, fabs);
    ref.a = a.t;
    ref.b = b.t;
    ref.out = out->size.t;
    ref.activation = GK_ACT_NONE;
    if (ref.bias) ref.bias = &bias.t;
    gk_ref_grouped_gemm(&ref_ctx, &ref);
    for (int64_t i = end; i < all; ++i) /* nothing behind the last end may have an effect */
        for (int64_t j = 0; j < (by_k ? q.m : q.k); ++j)
            check_set(&q.a.t, by_k ? j * q.k + i : i * q.k + j, int8 ? 127 : NAN);
}

#endif
