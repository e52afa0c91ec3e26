/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_sums: phase 3 of the backward, sums over chunks of keys. Included by
 * flash_attn_bwd.c alone. */
static void sum_task(void *arg, int64_t task, int64_t worker) {
    (void)worker;
    const job *g = arg;
    const gk_flash_attn_bwd_args *a = g->args;
    const sizes *z = &g->z;
    const int64_t b = task / g->shape.heads_q, h = task % g->shape.heads_q,
                  h_kv = h / g->shape.group;
    const attn_seq x = attn_seq_of(&a->fwd, &g->shape, b);
    const seen seen = g->has_scores ? seen_whole(&x) : seen_of(&x);
    const int64_t row = a->dq.stride[attn_row_dim(&g->shape)],
                  row0 = row0_of(g, &a->dq, b, h, first_q(g, b));
    zero_dq_unseen(g, &x, &seen, b, h);
    for (int64_t i = seen.row_lo; i < seen.row_hi; i += NR) {
        const int64_t rows = gk_min_i64(NR, seen.row_hi - i),
                      block = (i - seen.row_lo) / NR * z->dq_block;
        /* the chunks that this block's rows see, all of which wrote it */
        int64_t lo = gk_span_lo(&x.span, i) / z->chunk_keys;
        int64_t hi = (gk_span_hi(&x.span, i + rows - 1) - 1) / z->chunk_keys;
        if (g->has_scores) {
            lo = 0;
            hi = z->chunks - 1;
        } /* all begin with zeros */
        float *sum = NULL;
        for (int64_t c = lo; c <= hi; ++c) {
            float *part =
                dq_of(g, (b * g->shape.heads_kv + h_kv) * z->chunks + c, h % g->shape.group) +
                block;
            if (!sum) {
                sum = part;
                continue;
            }
            for (int64_t d = 0; d < z->dq_block; d += W)
                vf_store(sum + d, vf_load(sum + d) + vf_load(part + d));
        }
        store_dq(g, sum, rows, at(&a->dq, row0 + i * row), row);
    }
}

/* dsink of one head and sequence. */
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
    const float *delta = row_values(g, g->z.delta_at, b, h),
                *row_lse = row_values(g, g->z.lse_at, b, h);
    double sum = 0;
    for (int64_t i = 0; sink != -INFINITY && i < x.seq_q; ++i) {
        const bool own_empty =
            g->has_scores && row_lse[i] == INFINITY && lse[i * x.lse_row] < INFINITY;
        if (own_empty || gk_span_lo(&x.span, i) >= gk_span_hi(&x.span, i)) { /* lse is the sink */
            if (dlse && !a->is_part) sum += dlse[i * grad_lse->stride[attn_row_dim(&g->shape)]];
            continue;
        }
        const double p_sink = exp((double)sink - lse[i * x.lse_row]);
        double exact = a->is_part ? 0 : delta[i] * (1 - p_sink);
        for (int64_t chunk = 0; chunk < g->z.chunks; ++chunk) exact += left_of(g, b, h, chunk)[i];
        if (dlse && !a->is_part) exact -= dlse[i * grad_lse->stride[attn_row_dim(&g->shape)]];
        sum -= p_sink * exact;
    }
    ((double *)(g->workspace + g->z.dsink_at))[h * g->shape.batch + b] = sum;
}
