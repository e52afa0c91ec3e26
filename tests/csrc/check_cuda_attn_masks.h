/* SPDX-License-Identifier: BSD-3-Clause */
/* check_cuda_attn_masks.h: what check_cuda adds to a problem of flash_attn for a call with a mask,
 * a bias, or both: random masks from every source, biases of every form, their gradients.
 *
 * size and loss of a bias's gradient: those of dq without K. Its sums have up to as many terms as
 * the call has pairs. */
#ifndef GPUKERN_CHECK_CUDA_ATTN_MASKS_H
#define GPUKERN_CHECK_CUDA_ATTN_MASKS_H

static struct {
    gk_flash_attn_masked_args fwd;
    gk_flash_attn_masked_bwd_args bwd;
    gk_attn_mask_args build;
    check_tensor mask, source, bias, distance, dbias, ddistance;
    result *bias_result, *distance_result;
} sc;

static int64_t one_or(int64_t n) { return check_below(2) ? 1 : n; }

/* The mask: ranges of keys, ranges of rows, or bools. fill_scores draws what the source holds. */
static void draw_mask(bool backward) {
    static const gk_mask_source sources[] = {GK_MASK_OF_RANGES, GK_MASK_OF_COLUMNS,
                                             GK_MASK_OF_BOOL};
    gk_attn_mask_args *m = &sc.build;
    *m = (gk_attn_mask_args){.size = sizeof *m, .source = PICK(sources)};
    const int64_t batch = one_or(f.batch), num_heads = one_or(f.heads_q);
    int64_t shape[4] = {batch, num_heads, f.seq_q, f.seq_k};
    m->transposed = backward || check_below(2);
    m->seq_q = f.seq_q;
    m->seq_k = f.seq_k;
    if (m->source == GK_MASK_OF_RANGES) shape[3] = 2 + 2 * check_below(2);
    if (m->source == GK_MASK_OF_COLUMNS) {
        m->is_causal = (int32_t)check_below(2);
        shape[2] = f.seq_k;
        shape[3] = m->is_causal ? 1 + check_below(2) : 2 + 2 * check_below(2);
    }
    const bool bools = m->source == GK_MASK_OF_BOOL;
    sc.source = check_dense(bools ? GK_U8 : GK_I32, 4, shape);
    f.scores.store = bools                            ? GK_MASK_DENSE
                     : m->source == GK_MASK_OF_RANGES ? GK_MASK_RANGES
                                                      : GK_MASK_COLUMNS;
    const int64_t stored[3] = {batch, num_heads,
                               gk_attn_mask_ints(f.scores.store, f.seq_q, f.seq_k, m->transposed)};
    sc.mask = check_dense(GK_I32, 3, stored);
    m->out = sc.mask.t;
    *(bools ? &m->mask : &m->rows) = &sc.source.t;
    mirror(&sc.mask, "mask", false);
    f.scores.mask = &sc.mask.t;
    f.scores.mask_seq_q = f.seq_q;
    f.scores.mask_seq_k = f.seq_k;
    say(" mask of source %d", (int)m->source);
}

static void draw_scores(gk_dtype dtype, bool backward) {
    const gk_attn_rules *r = &f.args.fwd.rules;
    const gk_dtype stats = gk_stats_dtype(dtype);
    const int64_t kind = check_below(4); /* mask, bias, both; another bias */
    f.scores = (gk_attn_scores){0};
    f.dbias = f.ddistance = NULL;
    if (kind != 1 && kind != 3) draw_mask(backward);
    if (kind == 1 || kind == 2 || (kind == 3 && (r->q_start || check_below(2)))) {
        int64_t shape[4] = {one_or(f.batch), one_or(f.heads_q), f.seq_q, f.seq_k};
        if (kind == 3) { /* of keys, or of any form */
            shape[2] = one_or(f.seq_q);
            shape[3] = check_below(4) ? f.seq_k : 1;
        }
        const gk_dtype of = check_below(4) ? dtype : stats;
        sc.bias = check_tensor_make(of, 4, shape, NULL, 1, pad_for(shape[3]));
        sc.dbias = check_dense(of, 4, shape);
        mirror(&sc.bias, "bias", false);
        f.scores.bias = &sc.bias.t;
        if (backward && check_below(2)) {
            mirror(&sc.dbias, "dbias", true);
            f.dbias = &sc.dbias.t;
        }
    } else if (kind == 3) {
        const int64_t shape[2] = {one_or(f.heads_q), f.seq_q + f.seq_k - 1};
        sc.distance = check_tensor_make(stats, 2, shape, NULL, 1 + check_below(2), 0);
        sc.ddistance = check_dense(stats, 2, shape);
        mirror(&sc.distance, "distance_bias", false);
        f.scores.distance_bias = &sc.distance.t;
        if (backward && check_below(2)) {
            mirror(&sc.ddistance, "ddistance_bias", true);
            f.ddistance = &sc.ddistance.t;
        }
    }
    if (backward) {
        sc.bwd = (gk_flash_attn_masked_bwd_args){
            .bwd = f.args, .scores = f.scores, .dbias = f.dbias, .ddistance_bias = f.ddistance};
        sc.bwd.bwd.size = sizeof sc.bwd;
        TO_DEVICE(sc.bwd);
    } else {
        sc.fwd = (gk_flash_attn_masked_args){.fwd = f.args.fwd, .scores = f.scores};
        sc.fwd.fwd.size = sizeof sc.fwd;
        TO_DEVICE(sc.fwd);
    }
}

/* Random contents of a mask's source: ranges anywhere, or a window and some first keys that all
 * queries see, so that lists differ in length. */
static void fill_mask(void) {
    const gk_tensor *t = &sc.source.t;
    const int64_t n = t->shape[3], limit = sc.build.source == GK_MASK_OF_RANGES ? f.seq_k : f.seq_q,
                  window = 1 + check_below(200), shared = check_below(150);
    const bool wild = check_below(2);
    const double share = check_below(3) ? 0.5 : check_below(2) ? 0.003 : 0.99;
    for (int64_t at = 0; at < gk_numel(t); ++at) {
        const int64_t row = at / n % t->shape[2], c = at % n;
        double x;
        if (sc.build.source == GK_MASK_OF_BOOL)
            x = check_uniform(0, 1) < share;
        else if (wild)
            x = (double)(check_below(limit + 20) - 10);
        else if (sc.build.source == GK_MASK_OF_RANGES)
            x = (double)(c == 0 ? row - window : c == 1 ? row + 1 : c == 2 ? 0 : shared);
        else
            x = (double)(c > 0 ? row - window : row < shared ? limit : row + window);
        check_set(t, at, x);
    }
    gk_ref_attn_mask(&ref_ctx, &sc.build);
}

static void fill_bias(const check_tensor *x) {
    check_fill_normal(x, 2);
    for (int64_t i = 0; i < gk_numel(&x->t); ++i)
        if (check_below(8) == 0)
            check_set(&x->t, i, -INFINITY);
        else
            f.most_bias = fmax(f.most_bias, fabs(check_get(&x->t, i)));
}

static void fill_scores(void) {
    if (f.scores.mask) fill_mask();
    if (f.scores.bias) fill_bias(&sc.bias);
    if (f.scores.distance_bias) fill_bias(&sc.distance);
}

static void expect_bias_gradients(const gk_flash_attn_bwd_args *exact, double most) {
    const double pairs = (double)(f.batch * f.heads_q * f.seq_q * f.seq_k),
                 loss = attn_loss(f.q.t.dtype, f.dim, most, pairs + (double)f.dim_v, 2.5);
    sc.bias_result = f.dbias ? expected(&sc.dbias, loss) : NULL;
    sc.distance_result = f.ddistance ? expected(&sc.ddistance, loss) : NULL;
    if (f.dbias) sc.bias_result->floor = attn_floor(f.q.t.dtype, pairs);
    if (f.ddistance) sc.distance_result->floor = attn_floor(f.q.t.dtype, pairs);
    ref_bwd(exact, f.dbias ? &sc.bias_result->exact.t : NULL,
            f.ddistance ? &sc.distance_result->exact.t : NULL);
}

/* sizes: the arguments that make every term positive (bwd_expect). */
static void size_bias_gradients(const gk_flash_attn_bwd_args *sizes) {
    gk_flash_attn_bwd_args a = *sizes;
    const check_tensor dq = check_dense(GK_F64, 4, f.q.t.shape),
                       dk = check_dense(GK_F64, 4, f.k.t.shape),
                       dv = check_dense(GK_F64, 4, f.v.t.shape);
    if (!f.dbias && !f.ddistance) return;
    a.dq = dq.t;
    a.dk = dk.t;
    a.dv = dv.t;
    a.dsinks = NULL;
    ref_bwd(&a, f.dbias ? &sc.bias_result->size.t : NULL,
            f.ddistance ? &sc.distance_result->size.t : NULL);
}

#endif
