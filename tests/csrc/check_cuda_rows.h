/* SPDX-License-Identifier: BSD-3-Clause */
/* check_cuda_rows.h: check_cuda's random problems for operations along the last dimension.
 *
 * For each op, `size` and `loss` of check.h: an element may have the error size times loss, beside
 * the rounding of the result. u is the rounding of the accumulator, N the number of terms of a sum,
 * and s = u (64 + 4 sqrt N):
 *
 *   norm_fwd       size (|xhat| + 1) |w| + |b|; loss s. The sum is exact.
 *   norm_bwd       dx: size rstd (|g w| + mean |g w| + |xhat| mean |g w xhat|) + |grad_sum|
 *                  dweight, dbias: size sum |g| (|xhat| + 1)
 *   softmax_fwd    size p (1 + max |s|), log_softmax: 1 + |s| + |lse|; loss s
 *   softmax_bwd    size |scale y| (|g| + sum |g y|); loss s
 *                  log_softmax: size |scale| (|g| + exp(y) (1 + |y|) sum |g|); loss s
 *   glu            size |gate up|; backward |g up| (1 + |gate|), |g gate|; loss 32 u
 *   rope           size |x1 cos| + |x2 sin|; loss 8 u
 *   cross_entropy  size (1 + max |z|) times the weights of the row; loss s (1 + max |z|)
 *                  backward: size |g| times those weights
 *   kl_div         size 60 for the loss; dlogits 60 (S + T) / temperature; loss s
 *   moe_unpermute  size sum |w x|; loss 4 u times the terms; backward sum |w g|, and sum |g x| with
 *                  loss s for dweight
 *   dropout        size |x + b| / (1 - p) + |residual|; loss 32 u. Which elements are kept is
 *                  exact. Backward: size |g| (1 + |x + b|) / (1 - p)
 *
 * adamw writes the tensors that it reads, which no problem here supports. tests/ops/test_train.py
 * tests it on both devices. */
#include "gpukern_distill.h"
#include "gpukern_moe.h"
#include "gpukern_train.h"
#include "formats/philox.h"

static struct {
    check_tensor x, y, z, more, w, b, out, out2, out3, index;
    union {
        gk_norm_args norm;
        gk_norm_bwd_args norm_bwd;
        gk_softmax_args softmax;
        gk_softmax_bwd_args softmax_bwd;
        gk_glu_args glu;
        gk_glu_bwd_args glu_bwd;
        gk_rope_args rope;
        gk_cross_entropy_more_args loss;
        gk_cross_entropy_bwd_more_args loss_bwd;
        gk_kl_div_args kl_div;
        gk_moe_unpermute_args moe;
        gk_moe_unpermute_bwd_args moe_bwd;
        gk_dropout_args dropout;
    } args;
    int64_t shape[3], n;
    int ndim;
} r;

/* Draws the shape of rows. Their lengths cover every kernel instance, and are multiples of a vector
 * or not. */
static void rows_shape(gk_dtype dtype, bool large, bool even) {
    static const int64_t usual[] = {1,   7,   8,    16,   64,   100,  128, 256,
                                    257, 512, 1000, 1024, 2048, 2056, 4096};
    static const int64_t most[] = {6000,  8192,  12288, 16384,  20000,  24576,
                                   32768, 40000, 65536, 100000, 131072, 200000};
    const int64_t vec = 16 / (int64_t)gk_dtype_bytes(dtype);
    r.n = large || check_below(3) == 0 ? PICK(most) : PICK(usual);
    if (check_below(2)) r.n = gk_round_up(r.n, 2 * vec);
    if (even) r.n = gk_round_up(r.n, 2);
    const int64_t rows = gk_max_i64(1, small_or(100000, 400000) / r.n);
    r.ndim = 2 + (int)check_below(2);
    r.shape[0] = check_below(40) ? 1 + check_below(gk_min_i64(rows, 70)) : 0;
    r.shape[1] = r.ndim == 3 ? 1 + check_below(3) : r.n;
    r.shape[2] = r.n;
}

/* A tensor of rows. Its leading dimensions are stored in any order. */
static check_tensor rows_tensor(gk_dtype dtype, int64_t n) {
    static const int swapped[3] = {1, 0, 2};
    int64_t shape[3] = {r.shape[0], r.shape[1], r.shape[2]};
    shape[r.ndim - 1] = n;
    check_tensor x = check_tensor_make(
        dtype, r.ndim, shape, r.ndim == 3 && check_below(2) ? swapped : NULL, 1, pad_for(n));
    return x;
}
#define ROWS(at, dtype, n, output) (r.at = rows_tensor(dtype, n), mirror(&r.at, #at, output))
#define VECTOR(at, dtype, output)                                                  \
    (r.at = check_tensor_make(dtype, 1, &r.n, NULL, 1 + (check_below(4) == 0), 0), \
     mirror(&r.at, #at, output))

static int64_t rows_count(void) { return r.n ? r.shape[0] * (r.ndim == 3 ? r.shape[1] : 1) : 0; }
static double sum_loss(gk_dtype dtype, int64_t terms) {
    return check_acc_unit(dtype) * (64 + 4 * sqrt((double)terms));
}
static gk_dtype vector_dtype(gk_dtype dtype) {
    return check_below(2) ? dtype : gk_stats_dtype(dtype);
}

/* ---- norms ----------------------------------------------------------------------------------- */
static void norm_draw(gk_dtype dtype, bool large) {
    rows_shape(dtype, large, false);
    ROWS(x, dtype, r.n, false);
    ROWS(y, dtype, r.n, false);
    ROWS(out, dtype, r.n, true);
    ROWS(out2, dtype, r.n, true);
    VECTOR(w, vector_dtype(dtype), false);
    VECTOR(b, vector_dtype(dtype), false);
    gk_norm_args *a = &r.args.norm;
    *a = (gk_norm_args){
        .size = sizeof *a, .kind = (gk_norm_kind)check_below(2), .x = r.x.t, .out = r.out.t};
    if (check_below(2)) {
        a->residual = &r.y.t;
        a->sum = &r.out2.t;
    }
    if (check_below(3)) a->weight = &r.w.t;
    if (check_below(2)) a->bias = &r.b.t;
    a->eps = check_below(2) ? 1e-6 : 0.1;
    a->weight_offset = (double)check_below(2);
    say("kind %d", a->kind);
    TO_DEVICE(*a);
}

static void norm_expect(void) {
    const gk_norm_args *a = &r.args.norm;
    check_fill_normal(&r.x, 1);
    check_fill_normal(&r.y, 1);
    check_fill_normal(&r.w, 1);
    check_fill_normal(&r.b, 1);
    result *out = expected(&r.out, sum_loss(r.x.t.dtype, r.n)),
           *sum = a->residual ? expected(&r.out2, -1) : NULL;
    gk_norm_args ref = *a;
    /* The reference rounds h = x + residual to x's dtype, as the op does. */
    check_tensor h = check_dense(r.x.t.dtype, r.ndim, r.x.t.shape);
    ref.out = out->exact.t;
    ref.sum = sum ? &h.t : NULL;
    gk_ref_norm_fwd(&ref_ctx, &ref);
    for (int64_t i = 0; i < rows_count() * r.n; ++i) {
        const double w = a->weight ? fabs(check_get(&r.w.t, i % r.n) + a->weight_offset) : 1;
        const double b = a->bias ? check_get(&r.b.t, i % r.n) : 0, y = check_get(&out->exact.t, i);
        if (sum) check_set(&sum->exact.t, i, check_get(&h.t, i));
        check_set(&out->size.t, i, fabs(y - b) + w + fabs(b));
    }
}

static void norm_bwd_draw(gk_dtype dtype, bool large) {
    rows_shape(dtype, large, false);
    ROWS(x, dtype, r.n, false);
    ROWS(y, dtype, r.n, false);
    ROWS(more, dtype, r.n, false);
    ROWS(out, dtype, r.n, true);
    VECTOR(w, vector_dtype(dtype), false);
    VECTOR(out2, vector_dtype(dtype), true);
    VECTOR(out3, vector_dtype(dtype), true);
    gk_norm_bwd_args *a = &r.args.norm_bwd;
    *a = (gk_norm_bwd_args){
        .size = sizeof *a, .kind = (gk_norm_kind)check_below(2), .grad_out = r.x.t, .h = r.y.t};
    a->dx = r.out.t;
    a->eps = check_below(2) ? 1e-6 : 0.1;
    a->weight_offset = (double)check_below(2);
    if (check_below(3)) a->weight = &r.w.t;
    if (check_below(2)) a->grad_sum = &r.more.t;
    if (check_below(3)) a->dweight = &r.out2.t;
    if (check_below(3)) a->dbias = &r.out3.t;
    may_have_workspace = true;
    say("kind %d", a->kind);
    TO_DEVICE(*a);
}

static void norm_bwd_expect(void) {
    const gk_norm_bwd_args *a = &r.args.norm_bwd;
    const int64_t rows = rows_count(), n = r.n;
    const double loss = sum_loss(r.x.t.dtype, n), of_rows = sum_loss(r.x.t.dtype, n + rows);
    check_fill_normal(&r.x, 1);
    check_fill_normal(&r.y, 1);
    check_fill_normal(&r.w, 1);
    check_fill_normal(&r.more, 1);
    result *dx = expected(&r.out, loss), *dw = a->dweight ? expected(&r.out2, of_rows) : NULL;
    result *db = a->dbias ? expected(&r.out3, of_rows) : NULL;
    gk_norm_bwd_args ref = *a;
    ref.dx = dx->exact.t;
    ref.dweight = dw ? &dw->exact.t : NULL;
    ref.dbias = db ? &db->exact.t : NULL;
    gk_ref_norm_bwd(&ref_ctx, &ref);
    for (int64_t i = 0; i < n; ++i) {
        if (dw) check_set(&dw->size.t, i, 0);
        if (db) check_set(&db->size.t, i, 0);
    }
    for (int64_t row = 0; row < rows; ++row) {
        double mean = 0, squares = 0, c1 = 0, c2 = 0;
        for (int64_t i = 0; i < n; ++i)
            mean += a->kind == GK_LAYER_NORM ? check_get(&r.y.t, row * n + i) : 0;
        mean /= (double)n;
        for (int64_t i = 0; i < n; ++i) squares += pow(check_get(&r.y.t, row * n + i) - mean, 2);
        const double rstd = 1 / sqrt(squares / (double)n + a->eps);
        for (int pass = 0; pass < 2; ++pass) {
            for (int64_t i = 0; i < n; ++i) {
                const int64_t at = row * n + i;
                const double w = a->weight ? check_get(&r.w.t, i) + a->weight_offset : 1,
                             g = check_get(&r.x.t, at);
                const double xhat = fabs((check_get(&r.y.t, at) - mean) * rstd), gw = fabs(g * w);
                if (pass == 0) {
                    c1 += gw / (double)n;
                    c2 += gw * (xhat + 1) / (double)n;
                    if (dw)
                        check_set(&dw->size.t, i, check_get(&dw->size.t, i) + fabs(g) * (xhat + 1));
                    if (db) check_set(&db->size.t, i, check_get(&db->size.t, i) + fabs(g));
                } else {
                    const double more = a->grad_sum ? fabs(check_get(&r.more.t, at)) : 0;
                    check_set(&dx->size.t, at, rstd * (gw + c1 + (xhat + 1) * c2) + more);
                }
            }
        }
    }
}

/* ---- softmax --------------------------------------------------------------------------------- */
static void lengths_draw(void) {
    r.index = check_tensor_make(GK_I32, r.ndim - 1, r.shape, NULL, 1 + check_below(2), 0);
    mirror(&r.index, "lengths", false);
}
static void lengths_fill(void) {
    for (int64_t i = 0; i < rows_count(); ++i)
        check_set(&r.index.t, i,
                  check_below(4) ? (double)check_below(r.n + 1)
                                 : (double)(check_below(2) ? -3 : r.n + 9));
}

static void softmax_draw(gk_dtype dtype, bool large) {
    rows_shape(dtype, large, false);
    ROWS(x, dtype, r.n, false);
    ROWS(out, dtype, r.n, true);
    lengths_draw();
    gk_softmax_args *a = &r.args.softmax;
    *a = (gk_softmax_args){
        .size = sizeof *a, .x = r.x.t, .out = r.out.t, .scale = check_below(2) ? 1 : -0.3};
    a->log = (int32_t)check_below(2);
    a->lengths = check_below(2) ? &r.index.t : NULL;
    may_have_workspace = true;
    say("log %d", a->log);
    TO_DEVICE(*a);
}

static void softmax_expect(void) {
    const gk_softmax_args *a = &r.args.softmax;
    check_fill_normal(&r.x, 3);
    lengths_fill();
    result *out = expected(&r.out, sum_loss(r.x.t.dtype, r.n));
    gk_softmax_args ref = *a;
    ref.out = out->exact.t;
    gk_ref_softmax_fwd(&ref_ctx, &ref);
    for (int64_t i = 0; i < rows_count() * r.n; ++i) {
        const double y = fabs(check_get(&out->exact.t, i));
        check_set(&out->size.t, i, a->log ? 20 + 2 * y : 20 * y);
    }
}

static void softmax_bwd_draw(gk_dtype dtype, bool large) {
    rows_shape(dtype, large, false);
    ROWS(x, dtype, r.n, false);
    ROWS(y, dtype, r.n, false);
    ROWS(out, dtype, r.n, true);
    lengths_draw();
    gk_softmax_bwd_args *a = &r.args.softmax_bwd;
    *a = (gk_softmax_bwd_args){
        .size = sizeof *a, .grad_out = r.x.t, .out = r.y.t, .dx = r.out.t, .scale = 0.5};
    a->log = (int32_t)check_below(2);
    a->lengths = check_below(2) ? &r.index.t : NULL;
    say("log %d", a->log);
    TO_DEVICE(*a);
}

static void softmax_bwd_expect(void) {
    const gk_softmax_bwd_args *a = &r.args.softmax_bwd;
    const int64_t n = r.n;
    check_fill_normal(&r.x, 1);
    lengths_fill();
    for (int64_t i = 0; i < rows_count() * n; ++i) /* values that a forward pass may have given */
        check_set(&r.y.t, i, a->log ? check_uniform(-20, -3) : check_uniform(0, 2) / (double)n);
    result *dx = expected(&r.out, sum_loss(r.x.t.dtype, n));
    gk_softmax_bwd_args ref = *a;
    ref.dx = dx->exact.t;
    gk_ref_softmax_bwd(&ref_ctx, &ref);
    for (int64_t row = 0; row < rows_count(); ++row) {
        double sum = 0;
        for (int64_t at = row * n; at < row * n + n; ++at)
            sum += fabs(check_get(&r.x.t, at) * (a->log ? 1 : check_get(&r.y.t, at)));
        for (int64_t at = row * n; at < row * n + n; ++at) {
            const double y = check_get(&r.y.t, at), g = fabs(check_get(&r.x.t, at));
            check_set(&dx->size.t, at,
                      a->scale * (a->log ? g + exp(y) * (1 - y) * sum : fabs(y) * (g + sum)));
        }
    }
}

/* ---- gated units ----------------------------------------------------------------------------- */
static const gk_activation gates[] = {GK_ACT_SILU, GK_ACT_GELU, GK_ACT_GELU_TANH};

static void glu_draw(gk_dtype dtype, bool large) {
    rows_shape(dtype, large, true);
    const bool two = check_below(2);
    ROWS(x, dtype, two ? r.n : 2 * r.n, false);
    ROWS(y, dtype, r.n, false);
    ROWS(out, dtype, r.n, true);
    gk_glu_args *a = &r.args.glu;
    *a = (gk_glu_args){.size = sizeof *a, .gate = r.x.t, .up = two ? &r.y.t : NULL, .out = r.out.t};
    a->activation = PICK(gates);
    say("activation %d", a->activation);
    TO_DEVICE(*a);
}

static double glu_input(const gk_tensor *gate, const gk_tensor *up, int which, int64_t i) {
    if (up) return check_get(which ? up : gate, i);
    return check_get(gate, i / r.n * 2 * r.n + which * r.n + i % r.n);
}

static void glu_expect(void) {
    const gk_glu_args *a = &r.args.glu;
    check_fill_normal(&r.x, 2);
    check_fill_normal(&r.y, 2);
    result *out = expected(&r.out, 32 * check_acc_unit(r.x.t.dtype));
    gk_glu_args ref = *a;
    ref.out = out->exact.t;
    gk_ref_glu_fwd(&ref_ctx, &ref);
    for (int64_t i = 0; i < rows_count() * r.n; ++i)
        check_set(&out->size.t, i,
                  fabs(glu_input(&a->gate, a->up, 0, i) * glu_input(&a->gate, a->up, 1, i)));
}

static void glu_bwd_draw(gk_dtype dtype, bool large) {
    rows_shape(dtype, large, true);
    const bool two = check_below(2);
    ROWS(more, dtype, r.n, false);
    ROWS(x, dtype, two ? r.n : 2 * r.n, false);
    ROWS(y, dtype, r.n, false);
    ROWS(out, dtype, two ? r.n : 2 * r.n, true);
    ROWS(out2, dtype, r.n, true);
    gk_glu_bwd_args *a = &r.args.glu_bwd;
    *a =
        (gk_glu_bwd_args){.size = sizeof *a, .grad_out = r.more.t, .gate = r.x.t, .dgate = r.out.t};
    if (two) {
        a->up = &r.y.t;
        a->dup = &r.out2.t;
    }
    a->activation = PICK(gates);
    say("activation %d", a->activation);
    TO_DEVICE(*a);
}

static void glu_bwd_expect(void) {
    const gk_glu_bwd_args *a = &r.args.glu_bwd;
    const double loss = 32 * check_acc_unit(r.x.t.dtype);
    check_fill_normal(&r.x, 2);
    check_fill_normal(&r.y, 2);
    check_fill_normal(&r.more, 1);
    result *dgate = expected(&r.out, loss), *dup = a->up ? expected(&r.out2, loss) : NULL;
    gk_glu_bwd_args ref = *a;
    ref.dgate = dgate->exact.t;
    ref.dup = dup ? &dup->exact.t : NULL;
    gk_ref_glu_bwd(&ref_ctx, &ref);
    for (int64_t i = 0; i < rows_count() * r.n; ++i) {
        const double g = fabs(check_get(&r.more.t, i)), x = fabs(glu_input(&a->gate, a->up, 0, i));
        const double u = fabs(glu_input(&a->gate, a->up, 1, i)), first = g * u * (1 + x),
                     second = g * x;
        const int64_t at = dup ? i : i / r.n * 2 * r.n + i % r.n;
        check_set(&dgate->size.t, at, first);
        check_set(dup ? &dup->size.t : &dgate->size.t, dup ? i : at + r.n, second);
    }
}

/* ---- rotary embedding ------------------------------------------------------------------------ */
static void rope_draw(gk_dtype dtype, bool large) {
    static const int64_t dims[] = {2, 6, 8, 16, 40, 64, 80, 128, 192, 256};
    static const int tokens_first[4] = {0, 2, 1, 3};
    const int64_t batch = 1 + check_below(3), tokens = check_below(large ? 300 : 60),
                  dim = PICK(dims);
    const int64_t half = check_below(3) ? dim / 2 : check_below(dim / 2 + 1),
                  table[2] = {tokens + check_below(9) + 1, half};
    int64_t q[4] = {batch, 1 + check_below(6), tokens, dim},
            k[4] = {batch, 1 + check_below(3), tokens, dim};
    const int *order = check_below(2) ? tokens_first : NULL;
    r.x = check_tensor_make(dtype, 4, q, order, 1, pad_for(dim));
    r.y = check_tensor_make(dtype, 4, k, order, 1, pad_for(dim));
    r.out = check_tensor_make(dtype, 4, q, order, 1, pad_for(dim));
    r.out2 = check_tensor_make(dtype, 4, k, order, 1, pad_for(dim));
    r.w = check_tensor_make(gk_stats_dtype(dtype), 2, table, NULL, 1, pad_for(half));
    r.b = check_dense(gk_stats_dtype(dtype), 2, table);
    const int64_t each[2] = {batch, tokens};
    const bool of_each = check_below(2);
    r.index = check_tensor_make(check_below(2) ? GK_I32 : GK_I64, of_each ? 2 : 1,
                                of_each ? each : each + 1, NULL, 1 + check_below(2), 0);
    mirror(&r.x, "q", false);
    mirror(&r.y, "k", false);
    mirror(&r.w, "cos", false);
    mirror(&r.b, "sin", false);
    mirror(&r.index, "positions", false);
    mirror(&r.out, "out_q", true);
    mirror(&r.out2, "out_k", true);
    gk_rope_args *a = &r.args.rope;
    *a =
        (gk_rope_args){.size = sizeof *a, .q = r.x.t, .cos = r.w.t, .sin = r.b.t, .out_q = r.out.t};
    if (check_below(3)) {
        a->k = &r.y.t;
        a->out_k = &r.out2.t;
    }
    if (check_below(2)) a->positions = &r.index.t;
    a->interleaved = (int32_t)check_below(2);
    a->inverse = (int32_t)check_below(2);
    say("interleaved %d inverse %d", a->interleaved, a->inverse);
    TO_DEVICE(*a);
}

static void rope_expect(void) {
    const gk_rope_args *a = &r.args.rope;
    check_fill_normal(&r.x, 1);
    check_fill_normal(&r.y, 1);
    for (int64_t i = 0; i < gk_numel(&r.w.t); ++i) {
        const double angle = check_uniform(0, 6.3);
        check_set(&r.w.t, i, cos(angle));
        check_set(&r.b.t, i, sin(angle));
    }
    for (int64_t i = 0; i < gk_numel(&r.index.t); ++i)
        check_set(&r.index.t, i, (double)check_below(r.w.t.shape[0]));
    const double loss = 8 * check_acc_unit(r.x.t.dtype);
    result *q = expected(&r.out, loss), *k = a->k ? expected(&r.out2, loss) : NULL;
    gk_rope_args ref = *a;
    ref.out_q = q->exact.t;
    ref.out_k = k ? &k->exact.t : NULL;
    gk_ref_rope(&ref_ctx, &ref);
    /* an upper bound of all values */
    for (int64_t i = 0; i < gk_numel(&r.out.t); ++i) check_set(&q->size.t, i, 8);
    for (int64_t i = 0; k && i < gk_numel(&r.out2.t); ++i) check_set(&k->size.t, i, 8);
}

/* ---- cross entropy --------------------------------------------------------------------------- */
static gk_cross_entropy_args loss_args(gk_dtype dtype, bool large, bool backward) {
    rows_shape(dtype, large, false);
    ROWS(x, dtype, r.n, false);
    r.index = check_tensor_make(GK_I64, r.ndim - 1, r.shape, NULL, 1 + check_below(2), 0);
    r.w = check_tensor_make(gk_stats_dtype(dtype), 1, &r.n, NULL, 1 + (check_below(4) == 0), 0);
    r.y = check_dense(gk_stats_dtype(dtype), r.ndim - 1, r.shape);
    r.z = check_dense(gk_stats_dtype(dtype), r.ndim - 1, r.shape);
    mirror(&r.index, "target", false);
    mirror(&r.w, "weight", false);
    mirror(&r.y, "loss", !backward);
    mirror(&r.z, "lse", !backward);
    gk_cross_entropy_args a = GK_CROSS_ENTROPY_ARGS_INIT;
    a.logits = r.x.t;
    a.target = r.index.t;
    a.loss = r.y.t;
    a.lse = r.z.t;
    if (check_below(2)) a.weight = &r.w.t;
    a.label_smoothing = check_below(2) ? 0.1 : 0;
    a.softcap = check_below(3) ? 0 : 4;
    a.logit_scale = check_below(2) ? 1 : 0.7;
    return a;
}

static void loss_fill(void) {
    check_fill_normal(&r.x, 2);
    for (int64_t i = 0; i < r.n; ++i) check_set(&r.w.t, i, check_uniform(0.1, 2));
    for (int64_t i = 0; i < rows_count(); ++i)
        check_set(&r.index.t, i, check_below(5) ? (double)check_below(r.n) : -100);
}

static void loss_draw(gk_dtype dtype, bool large) {
    static const gk_dtype narrow[] = {GK_F32, GK_BF16, GK_F16};
    gk_cross_entropy_more_args *a = &r.args.loss;
    *a = (gk_cross_entropy_more_args){.fwd = loss_args(dtype, large, false),
                                      .z_loss = check_below(2) ? 0 : 0.01};
    a->fwd.size = sizeof *a;
    if (check_below(2)) {
        ROWS(out, dtype == GK_F32 ? PICK(narrow) : dtype, r.n, true);
        a->dlogits = &r.out.t;
    }
    TO_DEVICE(r.args.loss);
}

/* g: the gradient of element i's row. The size is p (1 + |z| + |lse|) times the weights of a
 * row, which are at most 2 plus e / V times their sum, plus 2 plus e / V. */
static double dlogits_size(double exact, int64_t i, double g) {
    return 20 * fabs(exact) +
           g * (check_get(&r.index.t, i / r.n) == (double)(i % r.n) ? 60 : 4 / (double)r.n);
}

static void loss_expect(void) {
    loss_fill();
    const double s = sum_loss(r.x.t.dtype, r.n);
    result *loss = expected(&r.y, s), *lse = expected(&r.z, s),
           *dx = r.args.loss.dlogits ? expected(&r.out, s) : NULL;
    gk_cross_entropy_more_args ref = r.args.loss;
    ref.fwd.loss = loss->exact.t;
    ref.fwd.lse = lse->exact.t;
    ref.dlogits = dx ? &dx->exact.t : NULL;
    gk_ref_cross_entropy_fwd(&ref_ctx, &ref.fwd);
    for (int64_t i = 0; i < rows_count(); ++i) {
        check_set(&loss->size.t, i, 60);
        check_set(&lse->size.t, i, 20);
    }
    for (int64_t i = 0; dx && i < rows_count() * r.n; ++i)
        check_set(&dx->size.t, i, dlogits_size(check_get(&dx->exact.t, i), i, 1));
}

static void loss_bwd_draw(gk_dtype dtype, bool large) {
    gk_cross_entropy_bwd_more_args *more = &r.args.loss_bwd;
    gk_cross_entropy_bwd_args *a = &more->bwd;
    *more = (gk_cross_entropy_bwd_more_args){.z_loss = check_below(2) ? 0 : 0.01};
    a->size = sizeof *more;
    a->fwd = loss_args(dtype, large, true);
    r.more =
        check_tensor_make(gk_stats_dtype(dtype), r.ndim - 1, r.shape, NULL, 1 + check_below(2), 0);
    static const gk_dtype narrow[] = {GK_F32, GK_BF16, GK_F16};
    mirror(&r.more, "grad_loss", false);
    ROWS(out, dtype == GK_F32 ? PICK(narrow) : dtype, r.n, true);
    a->grad_loss = r.more.t;
    a->dlogits = r.out.t;
    TO_DEVICE(*more);
}

static void loss_bwd_expect(void) {
    const gk_cross_entropy_bwd_args *a = &r.args.loss_bwd.bwd;
    loss_fill();
    check_fill_normal(&r.more, 1);
    check_tensor loss = check_dense(GK_F64, r.ndim - 1, r.shape);
    gk_cross_entropy_args fwd = a->fwd;
    fwd.loss = loss.t; /* rounds lse to what the kernel reads */
    gk_ref_cross_entropy_fwd(&ref_ctx, &fwd);
    result *dx = expected(&r.out, sum_loss(r.x.t.dtype, r.n));
    gk_cross_entropy_bwd_more_args ref = r.args.loss_bwd;
    ref.bwd.dlogits = dx->exact.t;
    gk_ref_cross_entropy_bwd(&ref_ctx, &ref.bwd);
    for (int64_t i = 0; i < rows_count() * r.n; ++i) {
        const double g = fabs(check_get(&r.more.t, i / r.n));
        check_set(&dx->size.t, i, dlogits_size(check_get(&dx->exact.t, i), i, g));
    }
}

/* ---- kl_div ---------------------------------------------------------------------------------- */
static void kl_div_draw(gk_dtype dtype, bool large) {
    static const gk_dtype narrow[] = {GK_F32, GK_BF16, GK_F16};
    static const double betas[] = {0, 0.3, 1};
    rows_shape(dtype, large, false);
    ROWS(x, dtype, r.n, false);
    ROWS(y, dtype, r.n, false);
    r.index = check_tensor_make(GK_U8, r.ndim - 1, r.shape, NULL, 1 + check_below(2), 0);
    r.z = check_dense(gk_stats_dtype(dtype), r.ndim - 1, r.shape);
    mirror(&r.index, "mask", false);
    mirror(&r.z, "loss", true);
    gk_kl_div_args *a = &r.args.kl_div;
    *a = (gk_kl_div_args)GK_KL_DIV_ARGS_INIT;
    a->logits = r.x.t;
    a->teacher_logits = r.y.t;
    a->loss = r.z.t;
    if (check_below(2)) a->mask = &r.index.t;
    a->beta = PICK(betas);
    a->temperature = check_below(2) ? 1 : 1.4;
    if (check_below(4)) {
        ROWS(out, dtype == GK_F32 ? PICK(narrow) : dtype, r.n, true);
        a->dlogits = &r.out.t;
    }
    say("beta %g temperature %g", a->beta, a->temperature);
    TO_DEVICE(*a);
}

/* The probabilities of row i's classes, times `by`, are added to size. */
static void add_probabilities(const check_tensor *x, int64_t i, double temperature, double by,
                              check_tensor *size) {
    double peak = -INFINITY, sum = 0;
    for (int64_t c = 0; c < r.n; ++c) peak = fmax(peak, check_get(&x->t, i * r.n + c));
    for (int64_t c = 0; c < r.n; ++c)
        sum += exp((check_get(&x->t, i * r.n + c) - peak) / temperature);
    for (int64_t c = 0; c < r.n; ++c) {
        const double p = exp((check_get(&x->t, i * r.n + c) - peak) / temperature) / sum;
        check_set(&size->t, i * r.n + c, check_get(&size->t, i * r.n + c) + by * p);
    }
}

static void kl_div_expect(void) {
    const gk_kl_div_args *a = &r.args.kl_div;
    check_fill_normal(&r.x, 2);
    check_fill_normal(&r.y, 2);
    for (int64_t i = 0; i < rows_count(); ++i) check_set(&r.index.t, i, check_below(5) != 0);
    const double s = sum_loss(r.x.t.dtype, r.n);
    result *loss = expected(&r.z, s), *dx = a->dlogits ? expected(&r.out, s) : NULL;
    gk_kl_div_args ref = *a;
    ref.loss = loss->exact.t;
    ref.dlogits = dx ? &dx->exact.t : NULL;
    gk_ref_kl_div(&ref_ctx, &ref);
    for (int64_t i = 0; i < rows_count(); ++i) {
        check_set(&loss->size.t, i, 60);
        if (!dx) continue;
        for (int64_t c = 0; c < r.n; ++c) check_set(&dx->size.t, i * r.n + c, 0);
        if (a->mask && check_get(&r.index.t, i) == 0) continue;
        add_probabilities(&r.x, i, a->temperature, 60 / a->temperature, &dx->size);
        add_probabilities(&r.y, i, a->temperature, 60 / a->temperature, &dx->size);
    }
}

/* ---- moe_unpermute --------------------------------------------------------------------------- */
/* Draws rows [R, H], place and weight [T, J], and a tensor [T, H] at out. */
static void choices_draw(gk_dtype dtype, bool large, bool backward) {
    static const int swapped[2] = {1, 0};
    static const int64_t each[] = {1, 2, 3, 4, 8, 9, 16, 40};
    rows_shape(dtype, large, false);
    const int64_t rows = gk_max_i64(2, small_or(50000, 200000) / r.n);
    const int64_t choices[2] = {1 + check_below(gk_min_i64(rows, 70)), PICK(each)};
    r.ndim = 2;
    r.shape[0] = 1 + check_below(gk_min_i64(rows, 300));
    r.shape[1] = r.n;
    ROWS(x, dtype, r.n, false);
    if (backward) ROWS(out2, dtype, r.n, true);
    r.index = check_tensor_make(check_below(2) ? GK_I32 : GK_I64, 2, choices,
                                check_below(2) ? swapped : NULL, 1 + check_below(2), 0);
    r.w = check_tensor_make(vector_dtype(dtype), 2, choices, check_below(2) ? swapped : NULL,
                            1 + check_below(2), 0);
    mirror(&r.index, "place", false);
    mirror(&r.w, "weight", false);
    r.shape[0] = choices[0];
    ROWS(out, dtype, r.n, !backward);
    say("%lld rows, %lld x %lld choices", (long long)r.x.t.shape[0], (long long)choices[0],
        (long long)choices[1]);
}

/* Places that differ where there are enough rows, some below 0. Rows without a place are NaN, as
 * are the weights of places below 0. Returns a choice that the caller may make invalid, or -1. */
static int64_t choices_fill(void) {
    const int64_t rows = r.x.t.shape[0], choices = gk_numel(&r.index.t);
    const bool differ = check_below(3) != 0;
    const int64_t past = check_below(4) ? -1 : check_below(choices);
    check_fill(&r.x, NAN);
    check_fill_normal(&r.w, 1);
    for (int64_t i = 0; i < choices; ++i) {
        int64_t row = differ ? choices - 1 - i : check_below(rows);
        if (row >= rows || i == past || check_below(7) == 0) row = -1 - check_below(9);
        check_set(&r.index.t, i, (double)row);
        if (row < 0) check_set(&r.w.t, i, NAN);
        for (int64_t c = 0; row >= 0 && c < r.n; ++c)
            check_set(&r.x.t, row * r.n + c, check_normal());
    }
    return past;
}

static void spoil_place(int64_t choice) {
    if (choice < 0) return;
    check_set(&r.index.t, choice, (double)(r.x.t.shape[0] + check_below(1000)));
    error_kind = GK_BAD_SLOTS;
}

static void moe_draw(gk_dtype dtype, bool large) {
    choices_draw(dtype, large, false);
    gk_moe_unpermute_args *a = &r.args.moe;
    *a = (gk_moe_unpermute_args)GK_MOE_UNPERMUTE_ARGS_INIT;
    a->rows = r.x.t;
    a->place = r.index.t;
    a->weight = r.w.t;
    a->out = r.out.t;
    TO_DEVICE(*a);
}

static void moe_expect(void) {
    const int64_t past = choices_fill(), each = r.index.t.shape[1];
    result *out = expected(&r.out, 4 * check_acc_unit(r.x.t.dtype) * (double)(each + 1));
    gk_moe_unpermute_args ref = r.args.moe;
    ref.out = out->exact.t;
    gk_ref_moe_unpermute(&ref_ctx, &ref);
    for (int64_t i = 0; i < gk_numel(&r.out.t); ++i) {
        double size = 0;
        for (int64_t j = 0; j < each; ++j) {
            const int64_t choice = i / r.n * each + j;
            const int64_t row = (int64_t)check_get(&r.index.t, choice);
            if (row >= 0)
                size += fabs(check_get(&r.w.t, choice) * check_get(&r.x.t, row * r.n + i % r.n));
        }
        check_set(&out->size.t, i, size);
    }
    spoil_place(past);
}

static void moe_bwd_draw(gk_dtype dtype, bool large) {
    choices_draw(dtype, large, true);
    may_have_workspace = true;
    r.out3 = check_dense(gk_stats_dtype(dtype), 2, r.index.t.shape);
    mirror(&r.out3, "dweight", true);
    gk_moe_unpermute_bwd_args *a = &r.args.moe_bwd;
    *a = (gk_moe_unpermute_bwd_args)GK_MOE_UNPERMUTE_BWD_ARGS_INIT;
    a->grad_out = r.out.t;
    a->rows = r.x.t;
    a->place = r.index.t;
    a->weight = r.w.t;
    const int64_t wanted = check_below(4);
    if (wanted != 0) a->drows = &r.out2.t;
    if (wanted != 1) a->dweight = &r.out3.t;
    TO_DEVICE(*a);
}

static void moe_bwd_expect(void) {
    const gk_moe_unpermute_bwd_args *a = &r.args.moe_bwd;
    const int64_t past = choices_fill(), choices = gk_numel(&r.index.t), each = a->place.shape[1];
    const double u = check_acc_unit(r.x.t.dtype);
    check_fill_normal(&r.out, 1);
    result *drows = a->drows ? expected(&r.out2, 4 * u * (double)(choices + 1)) : NULL;
    result *dweight = a->dweight ? expected(&r.out3, sum_loss(r.x.t.dtype, r.n)) : NULL;
    gk_moe_unpermute_bwd_args ref = *a;
    ref.drows = drows ? &drows->exact.t : NULL;
    ref.dweight = dweight ? &dweight->exact.t : NULL;
    gk_ref_moe_unpermute_bwd(&ref_ctx, &ref);
    for (int64_t i = 0; drows && i < gk_numel(&r.x.t); ++i) check_set(&drows->size.t, i, 0);
    for (int64_t choice = 0; choice < choices; ++choice) {
        const int64_t row = (int64_t)check_get(&r.index.t, choice), token = choice / each;
        double size = 0;
        for (int64_t c = 0; row >= 0 && c < r.n; ++c) {
            const double g = fabs(check_get(&r.out.t, token * r.n + c));
            const int64_t at = row * r.n + c;
            size += g * fabs(check_get(&r.x.t, at));
            if (drows)
                check_set(&drows->size.t, at,
                          check_get(&drows->size.t, at) + g * fabs(check_get(&r.w.t, choice)));
        }
        if (dweight) check_set(&dweight->size.t, choice, size);
    }
    spoil_place(past);
}

/* ---- dropout --------------------------------------------------------------------------------- */
static void dropout_draw(gk_dtype dtype, bool large) {
    static const gk_activation curves[] = {GK_ACT_NONE, GK_ACT_GELU, GK_ACT_GELU_TANH};
    static const double shares[] = {0, 0.1, 0.5, 1};
    const int64_t two = 2;
    rows_shape(dtype, large, false);
    ROWS(x, dtype, r.n, false);
    ROWS(y, dtype, r.n, false);
    ROWS(out, dtype, r.n, true);
    r.b = check_dense(dtype, 1, &r.n);
    r.index = check_tensor_make(GK_I64, 1, &two, NULL, 1 + check_below(2), 0);
    mirror(&r.b, "bias", false);
    mirror(&r.index, "seed", false);
    gk_dropout_args *a = &r.args.dropout;
    *a = (gk_dropout_args){
        .size = sizeof *a, .x = r.x.t, .seed = r.index.t, .out = r.out.t, .p = PICK(shares)};
    a->activation = PICK(curves);
    a->bias = check_below(2) ? &r.b.t : NULL;
    const int64_t more = check_below(3);
    if (more == 1) a->residual = &r.y.t;
    if (more == 2) a->grad_out = &r.y.t;
    say("p %g activation %d", a->p, a->activation);
    TO_DEVICE(*a);
}

static void dropout_expect(void) {
    const gk_dropout_args *a = &r.args.dropout;
    check_fill_normal(&r.x, 2);
    check_fill_normal(&r.y, 1);
    check_fill_normal(&r.b, 1);
    for (int i = 0; i < 2; ++i)
        ((int64_t *)r.index.t.data)[i * r.index.t.stride[0]] = (int64_t)check_random();
    result *out = expected(&r.out, 32 * check_acc_unit(r.x.t.dtype));
    gk_dropout_args ref = *a;
    ref.out = out->exact.t;
    gk_ref_dropout(&ref_ctx, &ref);
    for (int64_t i = 0; i < rows_count() * r.n; ++i) {
        const double x =
            fabs(check_get(&r.x.t, i)) + (a->bias ? fabs(check_get(&r.b.t, i % r.n)) : 0);
        const double y = fabs(check_get(&r.y.t, i)), scale = gk_keep_scale(a->p);
        check_set(&out->size.t, i,
                  a->grad_out ? y * (1 + x) * scale : x * scale + (a->residual ? y : 0));
    }
}
