/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_pre: the backward's first phase, a row's lse and delta. Included by
 * flash_attn_bwd.c alone. */
/* ---- phase 1: lse and delta ------------------------------------------------------------------ */
/* lse or delta of head h and sequence b: [rows]. */
static float *row_values(const job *g, size_t where, int64_t b, int64_t h) {
    const int64_t first = g->shape.packed ? first_q(g, b) : b * g->shape.max_seq_q;
    return (float *)(g->workspace + where) + h * g->z.tokens_q + first;
}

/* What a row's dS leave, summed over the keys of a chunk: [rows]. */
static float *left_of(const job *g, int64_t b, int64_t h, int64_t chunk) {
    return row_values(g, g->z.left_at, b, h) + chunk * g->shape.heads_q * g->z.tokens_q;
}

/* What a tile of AMX adds to C: lane by lane the products of W pairs, even and odd ones apart. */
INLINE vf tile_dot(const vc a[W], const vc b[W]) {
    vf sum[2] = {vf_set1(0), vf_set1(0)};
    for (int i = 0; i < W; ++i)
        for (int odd = 0; odd < 2; ++odd)
            sum[odd] = vf_fma(vf_load_half(&a[i], odd), vf_load_half(&b[i], odd), sum[odd]);
    return sum[0] + sum[1];
}

static void pre_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *g = arg;
    const gk_flash_attn_bwd_args *a = g->args;
    const gk_flash_attn_args *f = &a->fwd;
    const int64_t b = task / g->shape.heads_q, h = task % g->shape.heads_q,
                  dim = g->shape.head_dim_v;
    const int r = attn_row_dim(&g->shape);
    const attn_seq x = attn_seq_of(f, &g->shape, b);
    const char *out = at(&f->out, x.out_first + h * x.out_head);
    const char *grad = at(&a->grad_out, row0_of(g, &a->grad_out, b, h, first_q(g, b)));
    const int64_t es = (int64_t)gk_dtype_bytes(g->dtype), grad_row = a->grad_out.stride[r];
    const float *lse = gk_at(f->lse.data, 4 * (x.lse_first + h * x.lse_head));
    float *row_lse = row_values(g, g->z.lse_at, b, h), *delta = row_values(g, g->z.delta_at, b, h);
    const gk_tensor *grad_lse = a->grad_lse;
    const int64_t dlse = grad_lse ? row0_of(g, grad_lse, b, h, first_q(g, b)) : 0;
    const float sink = (float)gk_sink_of(&f->rules, h);
    /* mask and bias may hide all but the sink */
    const bool own_empty = g->has_scores && sink != -INFINITY;

    for (int64_t i0 = 0; i0 < x.seq_q; i0 += W) {
        const int64_t rows = gk_min_i64(W, x.seq_q - i0);
        /* out of a row with one key is that value: with the value itself, and summed in the order
         * in which tile_product sums dP, its dS is exactly 0 */
        const char *o_row[W], *d_row[W];
        bool alone[W];
        for (int64_t i = 0; i < W; ++i) {
            const int64_t row = i0 + gk_min_i64(i, rows - 1), key = gk_span_lo(&x.span, row);
            alone[i] = !a->is_part && sink == -INFINITY && gk_span_hi(&x.span, row) == key + 1;
            o_row[i] = alone[i] ? x.v + es * (h / g->shape.group * x.v_head + key * x.v_row)
                                : out + es * row * x.out_row;
            d_row[i] = grad + es * row * grad_row;
        }
        /* near: for all other rows, of shorter sums */
        vf sum = vf_set1(0), parts = vf_set1(0), near = vf_set1(0);
        for (int64_t c = 0; c < dim; c += PAIR * W) {
            if (!TILED && c > 0 && c % (PAIR * g->shape.sum_cells) == 0) {
                parts += sum;
                sum = vf_set1(0);
            }
            vf part = vf_set1(0);
            vc o[W], d[W];
            for (int64_t i = 0; i < W; ++i) {
                o[i] = vc_load_along_k(o_row[i], g->dtype, c, dim - c);
                d[i] = vc_load_along_k(d_row[i], g->dtype, c, dim - c);
            }
            vc_transpose(o);
            vc_transpose(d);
            for (int i = 0; i < W; ++i) {
                if (!TILED) sum = vc_dot(sum, o[i], d[i]);
                part = vc_dot(part, o[i], d[i]);
            }
            if (TILED) sum += tile_dot(o, d);
            near += part;
        }
        sum += parts;
        for (int64_t r_i = 0, i = i0; r_i < rows; ++r_i, ++i) {
            const float l = lse[i * x.lse_row];
            /* no key: P = 0 whatever s is, and whatever dO holds */
            bool empty = l == -INFINITY || gk_span_lo(&x.span, i) >= gk_span_hi(&x.span, i);
            if (own_empty && !empty) {
                const attn_row row = attn_row_of(&g->scores, b, h, i);
                empty = !attn_row_sees_any(&g->scores, &row, gk_span_lo(&x.span, i),
                                           gk_span_hi(&x.span, i));
            }
            if (empty) {
                row_lse[i] = INFINITY;
                delta[i] = 0;
                continue;
            }
            delta[i] = alone[r_i] ? sum[r_i] : near[r_i];
            if (alone[r_i] && g->dropout.most) {
                const bool kept =
                    gk_attn_kept(&g->dropout, x.lse_first + h * x.lse_head + i * x.lse_row,
                                 gk_span_lo(&x.span, i));
                delta[i] = kept ? delta[i] * (float)g->dropout.factor : 0;
            }
            if (grad_lse)
                delta[i] -= ((const float *)grad_lse->data)[dlse + i * grad_lse->stride[r]];
            row_lse[i] = l * ATTN_UNIT;
        }
    }
    for (int64_t chunk = 0; a->dsinks && chunk < g->z.chunks; ++chunk)
        memset(left_of(g, b, h, chunk), 0, 4 * (size_t)x.seq_q);
}
