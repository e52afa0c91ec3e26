/* SPDX-License-Identifier: BSD-3-Clause */
/* check_cuda_weight_grouped.h: check_cuda's random problems for weight_gemm with groups of rows.
 *
 * Groups may be empty, one may have all rows, and the ends may stop before the last row. Rows of a
 * behind the last end are NaN, and so are a result's rows before the call. Rows of the packed
 * weight between n and its 64 rows hold random codes, which belong to nothing. Sizes and losses are
 * those of weight_gemm. */
#ifndef GPUKERN_CHECK_CUDA_WEIGHT_GROUPED_H
#define GPUKERN_CHECK_CUDA_WEIGHT_GROUPED_H

static check_tensor wg_offs;

static void weight_grouped_draw(gk_dtype dtype, bool large) {
    static const int64_t ms[] = {1, 2, 7, 9, 17, 40, 70, 130, 200, 300, 520, 700},
                         ns[] = {1, 33, 64, 70, 130, 200}, some[] = {1, 2, 3, 5, 8, 33},
                         ks[] = {1, 33, 64, 128, 200, 512, 1000},
                         sizes[] = {16, 32, 64, 128, 256, 1 << 20},
                         usual_sizes[] = {128, 128, 128, 64, 64, 32, 1 << 20};
    static const int64_t none[1] = {0};
    /* Most problems have the strides of linear layers. Hopper's kernels take no others. */
    const bool usual = check_below(4);
    const int64_t groups = PICK(some);
    int64_t m, n, k;
    do {
        m = large ? 1 + check_below(900) : PICK(ms);
        n = usual ? 16 * (1 + check_below(17)) : PICK(ns);
        k = usual ? 64 * (1 + check_below(large ? 30 : 18)) : PICK(ks);
        /* most groups have whole tiles, as experts do */
        if (usual && check_below(2)) n = gk_round_up(n, 64);
    } while ((m + 4 * groups) * n * k > small_or(1000000, 20000000));
    if (usual) placing = ALIGNED;
    may_have_workspace = true;
    const gk_weight_format format = (gk_weight_format)check_below(6);
    const int64_t group = format == GK_MXFP4   ? 32
                          : format == GK_NVFP4 ? 16
                          : usual              ? PICK(usual_sizes)
                                               : PICK(sizes);
    const int64_t each = gk_round_up(n, 64), rows = groups * each, high = gk_ceil_div(k, group),
                  one = 1, codes[2] = {rows, k}, out_shape[2] = {m, n}, biases[2] = {groups, n};
    const int64_t tiles[3] = {rows / 64, gk_ceil_div(k, 64), gk_tile_bytes(format)};
    const gk_dtype own = format == GK_MXFP4 ? GK_E8M0 : format == GK_NVFP4 ? GK_E4M3 : dtype;
    const gk_dtype out = check_below(3) ? dtype : GK_F32;
    wg.powers = format == GK_MXFP4 || check_below(3);
    wg.q = check_dense(gk_code_dtype(format), 2, codes);
    wg.a = usual ? check_dense(dtype, 2, (int64_t[2]){m, k}) : operand(dtype, none, m, k);
    /* rows behind the ends must be distinct memory */
    if (wg.a.t.stride[0] == 0) wg.a = stored(dtype, none, m, k, false, false, 1, 0);
    wg.packed = check_dense(GK_U8, 3, tiles);
    wg.scale = stored(usual || check_below(4) ? own : GK_F32, none, high, rows,
                      !usual && check_below(4) == 0, false, 1, usual ? 0 : check_below(3));
    wg.zero = stored(GK_U8, none, high, rows, false, false, 1, usual ? 0 : check_below(3));
    wg.global_scale = check_dense(GK_F32, 1, &one);
    const gk_dtype added = check_below(2) ? out : GK_F32;
    wg.bias = check_below(2) ? check_tensor_make(added, 1, &n, NULL, 1 + (check_below(4) == 0), 0)
                             : check_dense(added, 2, biases);
    wg_offs = check_tensor_make(GK_I32, 1, &groups, NULL, 1 + (check_below(4) == 0), 0);
    wg.out = check_dense(out, 2, out_shape);
    mirror(&wg.a, "a", false);
    mirror(&wg.packed, "packed", false);
    mirror(&wg.scale, "scale", false);
    mirror(&wg.zero, "zero", false);
    mirror(&wg.global_scale, "global_scale", false);
    mirror(&wg.bias, "bias", false);
    mirror(&wg_offs, "offs", false);
    mirror(&wg.out, "out", true);
    wg.args = (gk_weight_gemm_args){.size = sizeof wg.args,
                                    .a = wg.a.t,
                                    .packed = wg.packed.t,
                                    .scale = wg.scale.t,
                                    .n = n,
                                    .format = format,
                                    .out = wg.out.t,
                                    .offs = &wg_offs.t};
    wg.args.zero = format == GK_UINT4 && check_below(4) ? &wg.zero.t : NULL;
    wg.args.global_scale = format == GK_NVFP4 && check_below(2) ? &wg.global_scale.t : NULL;
    wg.args.bias = check_below(2) ? &wg.bias.t : NULL;
    wg.args.activation = check_below(2) ? GK_ACT_NONE : (gk_activation)check_below(5);
    say("format %d group %lld activation %d scale %s%s", (int)format, (long long)group,
        wg.args.activation, gk_dtype_name(wg.scale.t.dtype), wg.powers ? ", powers of two" : "");
    TO_DEVICE(wg.args);
}

/* The tensor from element `at` of its first dimension, or of its second one, on. */
static gk_tensor from_row(const gk_tensor *t, int dim, int64_t at, int64_t count) {
    gk_tensor x = *t;
    x.data = (char *)t->data + at * t->stride[dim] * (int64_t)gk_dtype_bytes(t->dtype);
    x.shape[dim] = count;
    return x;
}

static void weight_grouped_expect(void) {
    const gk_weight_gemm_args *x = &wg.args;
    const int64_t m = x->a.shape[0], n = x->n, k = x->a.shape[1], high = x->scale.shape[0],
                  groups = wg_offs.t.shape[0], each = gk_round_up(n, 64), rows = groups * each;
    weight_fill(rows * k, high * rows);
    int64_t end = 0;
    const int64_t all_in = check_below(4) ? -1 : check_below(groups); /* one group has all rows */
    for (int64_t g = 0; g < groups; ++g) {
        if (all_in >= 0)
            end = g >= all_in ? m : 0;
        else if (check_below(4))
            end += check_below(2 * (m - end) / (groups - g) + 1);
        end = gk_min_i64(end, m);
        check_set(&wg_offs.t, g, (double)end);
    }
    const gk_pack_weight_args pack = {
        .size = sizeof pack, .q = wg.q.t, .format = x->format, .packed = wg.packed.t};
    gk_ref_pack_weight(&ref_ctx, &pack);
    result *out = expected(&wg.out, check_acc_unit(x->a.dtype) * (32 + 4 * sqrt((double)k)) +
                                        (wg.powers ? 0 : check_unit(x->a.dtype)));
    for (int64_t i = 0; i < m * n; ++i) {
        check_set(&out->exact.t, i, 0);
        check_set(&out->size.t, i, 0);
    }
    const int log2 = gk_group_log2(k, high);
    double *w = (double *)check_alloc((size_t)k * sizeof *w);
    int64_t begin = 0;
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t stop = (int64_t)check_get(&wg_offs.t, g),
                      bias_at = wg.bias.t.ndim == 2 ? g : 0;
        if (stop == begin) continue;
        gk_weight_gemm_args ref = *x;
        ref.offs = NULL;
        ref.a = from_row(&x->a, 0, begin, stop - begin);
        ref.packed = from_row(&x->packed, 0, g * each / 64, gk_ceil_div(n, 64));
        ref.scale = from_row(&x->scale, 1, g * each, n);
        gk_tensor zero, bias;
        if (x->zero) {
            zero = from_row(x->zero, 1, g * each, n);
            ref.zero = &zero;
        }
        if (x->bias) {
            bias = *x->bias;
            if (bias.ndim == 2) {
                bias = from_row(x->bias, 0, g, 1);
                bias.ndim = 1;
                bias.shape[0] = n;
                bias.stride[0] = x->bias->stride[1];
            }
            ref.bias = &bias;
        }
        ref.out = from_row(&out->exact.t, 0, begin, stop - begin);
        gk_ref_weight_gemm(&ref_ctx, &ref);
        for (int64_t j = 0; j < n; ++j) {
            for (int64_t i = 0; i < k; ++i) {
                const int64_t at = (i >> log2) * rows + g * each + j;
                w[i] = fabs(weight_code(x->format, check_get(&wg.q.t, (g * each + j) * k + i),
                                        x->zero ? check_get(&wg.zero.t, at) : 8) *
                            check_get(&wg.scale.t, at));
                if (x->global_scale) w[i] *= 0.125;
            }
            for (int64_t r = begin; r < stop; ++r) {
                double size = x->bias ? fabs(check_get(&wg.bias.t, bias_at * n + j)) : 0;
                for (int64_t i = 0; i < k; ++i) size += w[i] * fabs(check_get(&wg.a.t, r * k + i));
                check_set(&out->size.t, r * n + j, size);
            }
        }
        begin = stop;
    }
    for (int64_t i = begin; i < m; ++i) /* nothing behind the last end may have an effect */
        for (int64_t j = 0; j < k; ++j) check_set(&wg.a.t, i * k + j, NAN);
}

#endif
