/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_bwd_rows.h: what flash_attn_bwd.c computes row by row: lse and delta before the products,
 * and the gradient of the sinks after them.
 *
 *   delta = dO . O - dlse      dsink = - sum over rows of exp(sink - lse) delta
 *
 * A row without keys has lse = sink and gives dsink its dlse.
 * The rounding of out enters delta. It is negligible in dS, but its sum over all rows would bias
 * dsink. So dsink takes delta from what a row's dS leave: sum P dP = sum dS + delta (1 - P_sink).
 */
#ifndef GPUKERN_CPU_ATTN_BWD_ROWS_H
#define GPUKERN_CPU_ATTN_BWD_ROWS_H

#include "attn_bwd.h"

/* The values that an AMX tile adds to C: lane by lane the products of W pairs, even and odd ones
 * apart. */
INLINE vf tile_dot(const vc a[W], const vc b[W]) {
    vf sum[2] = {vf_set1(0), vf_set1(0)};
    for (int i = 0; i < W; ++i)
        for (int odd = 0; odd < 2; ++odd)
            sum[odd] = vf_fma(vf_load_half(&a[i], odd), vf_load_half(&b[i], odd), sum[odd]);
    return sum[0] + sum[1];
}

/* dO . O of W rows, summed in two orders. */
typedef struct row_dots {
    vf as_product; /* the order in which tile_product sums dP */
    vf near;       /* shorter sums, which round less */
} row_dots;

INLINE row_dots row_dots_of(const job *g, const char *const o_row[W], const char *const d_row[W]) {
    const int64_t dim = g->shape.head_dim_v;
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
    return (row_dots){sum, near};
}

/* One sequence and head of lse_task. */
typedef struct head_rows {
    const job *g;
    attn_seq x;
    int64_t b, h;
    float sink;
} head_rows;

/* Whether row i sees no key: then P = 0 whatever s is and whatever dO holds. */
INLINE bool row_is_empty(const head_rows *r, int64_t i, float lse) {
    const int64_t lo = gk_span_lo(&r->x.span, i), hi = gk_span_hi(&r->x.span, i);
    if (lse == -INFINITY || lo >= hi) return true;
    /* without a sink lse says it: mask and bias hide all keys */
    if (!r->g->has_scores || r->sink == -INFINITY) return false;
    const attn_row row = attn_row_of(&r->g->scores, r->b, r->h, i);
    return !attn_row_sees_any(&r->g->scores, &row, lo, hi);
}

/* The factor that dropout gives the one key of row i. */
INLINE float lone_key_factor(const head_rows *r, int64_t i) {
    const gk_attn_keep *dropout = &r->g->dropout;
    const int64_t row = r->x.lse_first + r->h * r->x.lse_head + i * r->x.lse_row;
    return gk_attn_kept(dropout, row, gk_span_lo(&r->x.span, i)) ? (float)dropout->factor : 0;
}

/* Phase 1: lse in ATTN_UNIT, +inf for a row without keys, and delta, of one sequence and head. */
static void lse_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *g = arg;
    const gk_flash_attn_bwd_args *a = g->args;
    const gk_flash_attn_args *f = &a->fwd;
    const int64_t b = task / g->shape.heads_q, h = task % g->shape.heads_q;
    const head_rows r = {g, attn_seq_of(f, &g->shape, b), b, h, (float)gk_sink_of(&f->rules, h)};
    const attn_seq *x = &r.x;
    const int row_dim = attn_row_dim(&g->shape);
    const int64_t es = (int64_t)gk_dtype_bytes(g->dtype), grad_row = a->grad_out.stride[row_dim];
    const char *out = at(&f->out, x->out_first + h * x->out_head);
    const char *grad = at(&a->grad_out, row0_of(g, &a->grad_out, b, h, first_q(g, b)));
    const char *v = x->v + es * (h / g->shape.group * x->v_head);
    const float *lse = gk_at(f->lse.data, 4 * (x->lse_first + h * x->lse_head));
    float *row_lse = row_values(g, g->z.lse_at, b, h), *delta = row_values(g, g->z.delta_at, b, h);
    const gk_tensor *grad_lse = a->grad_lse;
    const int64_t dlse = grad_lse ? row0_of(g, grad_lse, b, h, first_q(g, b)) : 0;

    for (int64_t i0 = 0; i0 < x->seq_q; i0 += W) {
        const int64_t rows = gk_min_i64(W, x->seq_q - i0);
        /* out of a row with one key is that key's value. With the value itself, summed in the order
         * of dP, the row's dS is exactly 0. */
        const char *o_row[W], *d_row[W];
        bool alone[W];
        for (int64_t i = 0; i < W; ++i) {
            const int64_t row = i0 + gk_min_i64(i, rows - 1), key = gk_span_lo(&x->span, row);
            alone[i] = !a->is_part && r.sink == -INFINITY && gk_span_hi(&x->span, row) == key + 1;
            o_row[i] = alone[i] ? v + es * key * x->v_row : out + es * row * x->out_row;
            d_row[i] = grad + es * row * grad_row;
        }
        const row_dots dots = row_dots_of(g, o_row, d_row);
        for (int64_t n = 0, i = i0; n < rows; ++n, ++i) {
            const float l = lse[i * x->lse_row];
            if (row_is_empty(&r, i, l)) {
                row_lse[i] = INFINITY;
                delta[i] = 0;
                continue;
            }
            delta[i] = alone[n] ? dots.as_product[n] : dots.near[n];
            if (alone[n] && g->dropout.most) {
                const float factor = lone_key_factor(&r, i);
                delta[i] = factor != 0 ? delta[i] * factor : 0;
            }
            if (grad_lse)
                delta[i] -= ((const float *)grad_lse->data)[dlse + i * grad_lse->stride[row_dim]];
            row_lse[i] = l * ATTN_UNIT;
        }
    }
    for (int64_t chunk = 0; a->dsinks && chunk < g->z.chunks; ++chunk)
        memset(left_of(g, b, h, chunk), 0, 4 * (size_t)x->seq_q);
}

/* Phase 3: the part of one sequence and head in dsink. */
static void dsink_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *g = arg;
    const gk_flash_attn_bwd_args *a = g->args;
    const int64_t b = task / g->shape.heads_q, h = task % g->shape.heads_q;
    const attn_seq x = attn_seq_of(&a->fwd, &g->shape, b);
    const gk_tensor *grad_lse = a->grad_lse;
    const float sink = (float)gk_sink_of(&a->fwd.rules, h);
    const float *lse = gk_at(a->fwd.lse.data, 4 * (x.lse_first + h * x.lse_head));
    const float *dlse = grad_lse ? at(grad_lse, row0_of(g, grad_lse, b, h, first_q(g, b))) : NULL;
    const int64_t dlse_row = grad_lse ? grad_lse->stride[attn_row_dim(&g->shape)] : 0;
    const float *delta = row_values(g, g->z.delta_at, b, h);
    const float *row_lse = row_values(g, g->z.lse_at, b, h);
    double sum = 0;
    for (int64_t i = 0; sink != -INFINITY && i < x.seq_q; ++i) {
        const bool all_hidden =
            g->has_scores && row_lse[i] == INFINITY && lse[i * x.lse_row] < INFINITY;
        if (all_hidden || gk_span_lo(&x.span, i) >= gk_span_hi(&x.span, i)) { /* lse is the sink */
            if (dlse && !a->is_part) sum += dlse[i * dlse_row];
            continue;
        }
        const double p_sink = exp((double)sink - lse[i * x.lse_row]);
        double exact = a->is_part ? 0 : delta[i] * (1 - p_sink);
        for (int64_t chunk = 0; chunk < g->z.chunks; ++chunk) exact += left_of(g, b, h, chunk)[i];
        if (dlse && !a->is_part) exact -= dlse[i * dlse_row];
        sum -= p_sink * exact;
    }
    ((double *)(g->workspace + g->z.dsink_at))[h * g->shape.batch + b] = sum;
}

/* dsink from its parts, sequence by sequence. */
INLINE void store_dsinks(const job *g) {
    const gk_tensor *dsinks = g->args->dsinks;
    const double *part = (const double *)(g->workspace + g->z.dsink_at);
    for (int64_t h = 0; h < g->shape.heads_q; ++h) {
        double sum = 0;
        for (int64_t b = 0; b < g->shape.batch; ++b) sum += part[h * g->shape.batch + b];
        gk_store(dsinks->data, dsinks->dtype, h * dsinks->stride[0], sum);
    }
}

#endif
