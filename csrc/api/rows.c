/* SPDX-License-Identifier: BSD-3-Clause */
/* rows: the checks and the costs of the ops along the last dimension: norms, softmax, gated
 * linear units, rotary embedding, cross entropy. */
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "gpukern_train.h"

/* ---- checks that several of these ops use ---------------------------------------------------- */
/* A float tensor [..., N] with a dense last dimension. */
static gk_status take_any_rows(gk_io *io, const char *name, const gk_tensor *t) {
    GK_TRY(gk_take(io, name, t, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, name, t));
    return gk_check_least_dims(name, t, 1);
}

/* The same with N >= 1: a row without columns has no mean and no target. */
static gk_status take_rows(gk_io *io, const char *name, const gk_tensor *t) {
    GK_TRY(take_any_rows(io, name, t));
    GK_REQUIRE(t->shape[t->ndim - 1] >= 1, "%s must have a last dimension of at least 1, got 0",
               name);
    return GK_OK;
}

/* A tensor of the same dtype and shape as `first`. t may be NULL. */
static gk_status take_like(gk_io *io, const char *name, const gk_tensor *t, const char *first_name,
                           const gk_tensor *first) {
    if (!t) return GK_OK;
    GK_TRY(gk_take(io, name, t, GK_DENSE_LAST));
    GK_TRY(gk_check_same_dtype(io, name, t, first_name, first));
    return gk_check_shape(name, t, first->ndim, first->shape);
}

/* A vector [N] of the rows' dtype, or float32 beside 16-bit rows. t may be NULL. */
gk_status gk_take_vector(gk_io *io, const char *name, const gk_tensor *t, const gk_tensor *rows) {
    if (!t) return GK_OK;
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtypes(io, name, t, rows->dtype, gk_stats_dtype(rows->dtype)));
    return gk_check_length_of(name, t, rows->shape[rows->ndim - 1]);
}

static gk_result *give_like(gk_io *io, const char *name, const gk_tensor *given,
                            const gk_tensor *first) {
    return gk_give(io, name, given, first->dtype, first->ndim, first->shape, GK_DENSE_LAST);
}

static double bytes_of(const gk_tensor *t) { return t ? gk_tensor_bytes(t) : 0; }

/* ---- norms ----------------------------------------------------------------------------------- */
static gk_status check_norm(gk_norm_kind kind, double eps, double weight_offset) {
    GK_REQUIRE(kind == GK_RMS_NORM || kind == GK_LAYER_NORM, "kind is %d", (int)kind);
    GK_REQUIRE(isfinite(eps) && eps >= 0, "eps must be a finite number of at least 0, got %g", eps);
    GK_REQUIRE(isfinite(weight_offset), "weight_offset must be finite, got %g", weight_offset);
    return GK_OK;
}

gk_status gk_check_norm_fwd(const gk_context *ctx, const gk_norm_args *a, gk_io *io) {
    (void)ctx;
    const gk_tensor *x = &a->x;
    GK_TRY(take_rows(io, "x", x));
    GK_TRY(gk_take_vector(io, "weight", a->weight, x));
    GK_TRY(gk_take_vector(io, "bias", a->bias, x));
    GK_REQUIRE(!a->residual || a->residual->dtype == x->dtype,
               "residual has dtype %s, x has %s; they must match%s",
               io->dtype_name(a->residual->dtype), io->dtype_name(x->dtype),
               a->residual->dtype == GK_F32
                   ? ", for a float32 residual stream pass x.float() and cast what is normalised"
                   : "");
    GK_TRY(take_like(io, "residual", a->residual, "x", x));
    GK_TRY(check_norm(a->kind, a->eps, a->weight_offset));
    give_like(io, "out", &a->out, x)->in_place = true;
    const int64_t none = 0;
    gk_result *sum = a->residual ? give_like(io, "sum", a->sum, x)
                                 : gk_give(io, "sum", a->sum, x->dtype, 1, &none, GK_DENSE_LAST);
    sum->optional = sum->in_place = true;
    GK_REQUIRE(!a->residual || a->sum || !a->out.data, "sum must be given with residual");
    return GK_OK;
}

void gk_cost_norm_fwd(const gk_context *ctx, const gk_norm_args *a, gk_explanation *out) {
    (void)ctx;
    const double row = gk_tensor_bytes(&a->x);
    out->bytes = (a->residual ? 4 : 2) * row + bytes_of(a->weight) + bytes_of(a->bias);
    out->flops = (a->kind == GK_LAYER_NORM ? 6.0 : 4.0) * (double)gk_numel(&a->x);
}

/* Gives a result [N] of the rows' dtype or float32. t NULL: not wanted, shape [0]. */
static void give_sum(gk_io *io, const char *name, const gk_tensor *t, const gk_tensor *rows) {
    const int64_t n = t ? rows->shape[rows->ndim - 1] : 0;
    const gk_dtype wide = gk_stats_dtype(rows->dtype);
    gk_give(io, name, t, t && t->dtype == wide ? wide : rows->dtype, 1, &n, GK_ANY_STRIDES)
        ->optional = true;
}

gk_status gk_check_norm_bwd(const gk_context *ctx, const gk_norm_bwd_args *a, gk_io *io) {
    (void)ctx;
    const gk_tensor *h = &a->h;
    GK_TRY(take_rows(io, "grad_out", &a->grad_out));
    GK_TRY(take_like(io, "h", h, "grad_out", &a->grad_out));
    GK_TRY(gk_take_vector(io, "weight", a->weight, h));
    GK_TRY(take_like(io, "grad_sum", a->grad_sum, "grad_out", &a->grad_out));
    GK_TRY(check_norm(a->kind, a->eps, a->weight_offset));
    give_like(io, "dx", &a->dx, h)->in_place = true;
    give_sum(io, "dweight", a->dweight, h);
    give_sum(io, "dbias", a->dbias, h);
    return GK_OK;
}

void gk_cost_norm_bwd(const gk_context *ctx, const gk_norm_bwd_args *a, gk_explanation *out) {
    (void)ctx;
    out->bytes = (a->grad_sum ? 4 : 3) * gk_tensor_bytes(&a->h) + bytes_of(a->weight) +
                 bytes_of(a->dweight) + bytes_of(a->dbias);
    out->flops = 12.0 * (double)gk_numel(&a->h);
}

/* ---- softmax --------------------------------------------------------------------------------- */
static gk_status take_lengths(gk_io *io, const gk_tensor *lengths, const gk_tensor *x) {
    if (!lengths) return GK_OK;
    GK_TRY(gk_take(io, "lengths", lengths, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "lengths", lengths, GK_I32));
    return gk_check_shape("lengths", lengths, x->ndim - 1, x->shape);
}

gk_status gk_check_softmax_fwd(const gk_context *ctx, const gk_softmax_args *a, gk_io *io) {
    (void)ctx;
    GK_TRY(take_any_rows(io, "x", &a->x));
    GK_TRY(take_lengths(io, a->lengths, &a->x));
    GK_REQUIRE(isfinite(a->scale), "scale must be finite, got %g", a->scale);
    give_like(io, "out", &a->out, &a->x)->in_place = true;
    return GK_OK;
}

void gk_cost_softmax_fwd(const gk_context *ctx, const gk_softmax_args *a, gk_explanation *out) {
    (void)ctx;
    out->bytes = 2 * gk_tensor_bytes(&a->x) + bytes_of(a->lengths);
    out->flops = 4.0 * (double)gk_numel(&a->x);
}

gk_status gk_check_softmax_bwd(const gk_context *ctx, const gk_softmax_bwd_args *a, gk_io *io) {
    (void)ctx;
    GK_TRY(take_any_rows(io, "grad_out", &a->grad_out));
    GK_TRY(take_like(io, "out", &a->out, "grad_out", &a->grad_out));
    GK_TRY(take_lengths(io, a->lengths, &a->out));
    GK_REQUIRE(isfinite(a->scale), "scale must be finite, got %g", a->scale);
    give_like(io, "dx", &a->dx, &a->out)->in_place = true;
    return GK_OK;
}

void gk_cost_softmax_bwd(const gk_context *ctx, const gk_softmax_bwd_args *a, gk_explanation *out) {
    (void)ctx;
    out->bytes = 3 * gk_tensor_bytes(&a->out) + bytes_of(a->lengths);
    out->flops = 4.0 * (double)gk_numel(&a->out);
}

/* ---- gated linear units ---------------------------------------------------------------------- */
static gk_status check_gate(gk_activation activation) {
    const bool gates =
        activation == GK_ACT_SILU || activation == GK_ACT_GELU || activation == GK_ACT_GELU_TANH;
    GK_REQUIRE(gates, "activation is %d, expected GK_ACT_SILU, GK_ACT_GELU or GK_ACT_GELU_TANH",
               (int)activation);
    return GK_OK;
}

/* Takes gate, and up if it is given. `shape` becomes the shape of gate alone; without up, half
 * of the given columns. */
static gk_status take_gate(gk_io *io, const gk_tensor *gate, const gk_tensor *up,
                           gk_activation activation, int64_t *shape) {
    GK_TRY(take_any_rows(io, "gate", gate));
    GK_TRY(take_like(io, "up", up, "gate", gate));
    GK_TRY(check_gate(activation));
    const int last = gate->ndim - 1;
    GK_REQUIRE(up || gate->shape[last] % 2 == 0,
               "gate must have an even last dimension where there is no up, got %lld",
               (long long)gate->shape[last]);
    memcpy(shape, gate->shape, sizeof gate->shape);
    if (!up) shape[last] /= 2;
    return GK_OK;
}

gk_status gk_check_glu_fwd(const gk_context *ctx, const gk_glu_args *a, gk_io *io) {
    (void)ctx;
    int64_t shape[GK_MAX_DIMS];
    GK_TRY(take_gate(io, &a->gate, a->up, a->activation, shape));
    gk_result *out = gk_give(io, "out", &a->out, a->gate.dtype, a->gate.ndim, shape, GK_DENSE_LAST);
    out->in_place = a->up != NULL;
    return GK_OK;
}

void gk_cost_glu_fwd(const gk_context *ctx, const gk_glu_args *a, gk_explanation *out) {
    (void)ctx;
    out->bytes = bytes_of(&a->gate) + bytes_of(a->up) + bytes_of(&a->out);
    out->flops = 5.0 * (double)gk_numel(&a->out);
}

gk_status gk_check_glu_bwd(const gk_context *ctx, const gk_glu_bwd_args *a, gk_io *io) {
    (void)ctx;
    int64_t shape[GK_MAX_DIMS];
    const gk_tensor *gate = &a->gate;
    GK_TRY(take_any_rows(io, "grad_out", &a->grad_out));
    GK_TRY(take_gate(io, gate, a->up, a->activation, shape));
    GK_TRY(gk_check_same_dtype(io, "gate", gate, "grad_out", &a->grad_out));
    GK_TRY(gk_check_shape("grad_out", &a->grad_out, gate->ndim, shape));
    const int64_t none = 0;
    give_like(io, "dgate", &a->dgate, gate);
    if (a->up)
        give_like(io, "dup", a->dup, gate)->optional = true;
    else
        gk_give(io, "dup", a->dup, gate->dtype, 1, &none, GK_DENSE_LAST)->optional = true;
    GK_REQUIRE(!a->up || a->dup || !a->dgate.data, "dup must be given with up");
    return GK_OK;
}

void gk_cost_glu_bwd(const gk_context *ctx, const gk_glu_bwd_args *a, gk_explanation *out) {
    (void)ctx;
    out->bytes = 2 * (bytes_of(&a->gate) + bytes_of(a->up)) + bytes_of(&a->grad_out);
    out->flops = 12.0 * (double)gk_numel(&a->grad_out);
}

/* ---- rotary embedding ------------------------------------------------------------------------ */
static gk_status take_table(gk_io *io, const char *name, const gk_tensor *t, gk_dtype dtype,
                            int64_t head_dim) {
    GK_TRY(gk_take(io, name, t, GK_DENSE_LAST));
    GK_TRY(gk_check_dtypes(io, name, t, GK_F32, gk_stats_dtype(dtype)));
    GK_TRY(gk_check_dims(name, t, 2, "[P, R / 2]"));
    GK_REQUIRE(2 * t->shape[1] <= head_dim,
               "%s rotates %lld columns, expected at most the head_dim %lld of q", name,
               2 * (long long)t->shape[1], (long long)head_dim);
    return GK_OK;
}

gk_status gk_take_cos_sin(gk_io *io, const gk_tensor *cos, const gk_tensor *sin, gk_dtype dtype,
                          int64_t head_dim) {
    GK_TRY(take_table(io, "cos", cos, dtype, head_dim));
    GK_TRY(take_table(io, "sin", sin, cos->dtype == GK_F32 ? GK_F32 : dtype, head_dim));
    GK_TRY(gk_check_same_dtype(io, "sin", sin, "cos", cos));
    return gk_check_shape("sin", sin, 2, cos->shape);
}

gk_status gk_check_rope(const gk_context *ctx, const gk_rope_args *a, gk_io *io) {
    const gk_tensor *q = &a->q, *k = a->k, *p = a->positions;
    const bool packed = q->ndim == 3;
    GK_TRY(gk_take(io, "q", q, GK_DENSE_LAST));
    GK_TRY(gk_check_float(io, "q", q));
    if (!packed) GK_TRY(gk_check_dims("q", q, 4, "[B, Hq, S, D] (or 3, packed [T, Hq, D])"));
    const gk_tensor heads_q = gk_heads_of(q);
    const int64_t batch = heads_q.shape[0], tokens = heads_q.shape[2], head_dim = heads_q.shape[3];
    if (k) {
        GK_TRY(gk_take(io, "k", k, GK_DENSE_LAST));
        GK_TRY(gk_check_same_dtype(io, "k", k, "q", q));
        GK_TRY(gk_check_dims("k", k, q->ndim, packed ? "[T, Hkv, D]" : "[B, Hkv, S, D]"));
        const gk_tensor heads = gk_heads_of(k);
        GK_TRY(gk_check_same("k", "batch size", heads.shape[0], "q", batch));
        GK_TRY(gk_check_same("k", "tokens", heads.shape[2], "q", tokens));
        GK_TRY(gk_check_same("k", "head_dim", heads.shape[3], "q", head_dim));
    }
    GK_TRY(gk_take_cos_sin(io, &a->cos, &a->sin, q->dtype, head_dim));
    if (p) {
        GK_TRY(gk_take(io, "positions", p, GK_ANY_STRIDES));
        GK_TRY(gk_check_dtypes(io, "positions", p, GK_I64, GK_I32));
        const int64_t each[2] = {batch, tokens};
        const bool of_each = p->ndim == 2 && !packed;
        GK_TRY(gk_check_shape("positions", p, of_each ? 2 : 1, of_each ? each : each + 1));
        GK_REQUIRE(a->cos.shape[0] > 0 || gk_numel(p) == 0, "cos has no rows");
    } else {
        GK_REQUIRE(tokens <= a->cos.shape[0],
                   "cos has %lld rows, expected at least the %lld tokens of q",
                   (long long)a->cos.shape[0], (long long)tokens);
    }
    give_like(io, "out_q", &a->out_q, q)->in_place = true;
    const int64_t none = 0;
    gk_result *out_k = k ? give_like(io, "out_k", a->out_k, k)
                         : gk_give(io, "out_k", a->out_k, q->dtype, 1, &none, GK_DENSE_LAST);
    out_k->in_place = out_k->optional = true;
    GK_REQUIRE(!k || a->out_k || !a->out_q.data, "out_k must be given with k");
    return gk_reads_contents(io, ctx) ? gk_check_positions(a) : GK_OK;
}

void gk_cost_rope(const gk_context *ctx, const gk_rope_args *a, gk_explanation *out) {
    (void)ctx;
    const double rotated =
        (double)(2 * a->cos.shape[1]) / fmax(1, (double)a->q.shape[a->q.ndim - 1]);
    out->bytes = 2 * (bytes_of(&a->q) + bytes_of(a->k)) + bytes_of(a->positions);
    out->flops = 3 * rotated * (double)(gk_numel(&a->q) + (a->k ? gk_numel(a->k) : 0));
}

/* ---- cross entropy --------------------------------------------------------------------------- */
/* Takes the inputs of both passes. */
static gk_status take_cross_entropy(const gk_context *ctx, const gk_cross_entropy_args *a,
                                    const gk_loss_more *more, gk_io *io) {
    const gk_tensor *logits = &a->logits;
    GK_TRY(take_rows(io, "logits", logits));
    GK_TRY(gk_take(io, "target", &a->target, GK_ANY_STRIDES));
    GK_REQUIRE(a->target.dtype == GK_I64, "target must be int64, got %s%s",
               io->dtype_name(a->target.dtype),
               gk_is_float(a->target.dtype) ? "; probabilities of classes are not taken, "
                                              "torch.nn.functional.cross_entropy takes them"
                                            : "");
    GK_TRY(gk_check_shape("target", &a->target, logits->ndim - 1, logits->shape));
    if (a->weight) {
        GK_TRY(gk_take(io, "weight", a->weight, GK_ANY_STRIDES));
        GK_TRY(gk_check_dtype(io, "weight", a->weight, gk_stats_dtype(logits->dtype)));
        GK_TRY(gk_check_length_of("weight", a->weight, more->num_classes));
    }
    GK_REQUIRE(a->label_smoothing >= 0 && a->label_smoothing <= 1,
               "label_smoothing must be between 0 and 1, got %g", a->label_smoothing);
    GK_REQUIRE(isfinite(a->softcap) && a->softcap >= 0,
               "softcap must be 0 (off) or a positive finite number, got %g", a->softcap);
    GK_REQUIRE(isfinite(a->logit_scale), "logit_scale must be finite, got %g", a->logit_scale);
    GK_REQUIRE(isfinite(more->z_loss), "z_loss must be finite, got %g", more->z_loss);
    return gk_reads_contents(io, ctx) ? gk_check_targets(a, more->num_classes) : GK_OK;
}

/* dtype of dlogits: that of logits, or a 16-bit one beside float32 logits. */
static gk_dtype dlogits_dtype(gk_dtype logits, gk_dtype own) {
    return logits == GK_F32 && (own == GK_BF16 || own == GK_F16) ? own : logits;
}

static gk_result *give_dlogits(gk_io *io, const gk_tensor *logits, const gk_tensor *given) {
    gk_result *r = gk_give(io, "dlogits", given, dlogits_dtype(logits->dtype, given->dtype),
                           logits->ndim, logits->shape, GK_DENSE_LAST);
    r->in_place = true;
    return r;
}

gk_status gk_check_cross_entropy_fwd(const gk_context *ctx, const gk_cross_entropy_args *a,
                                     gk_io *io) {
    const gk_tensor *logits = &a->logits;
    const gk_loss_more more = gk_more_of_fwd(a);
    GK_TRY(take_cross_entropy(ctx, a, &more, io));
    const gk_dtype stats = gk_stats_dtype(logits->dtype);
    gk_give(io, "loss", &a->loss, stats, logits->ndim - 1, logits->shape, GK_CONTIGUOUS);
    gk_give(io, "lse", &a->lse, stats, logits->ndim - 1, logits->shape, GK_CONTIGUOUS);
    if (more.dlogits) give_dlogits(io, logits, more.dlogits);
    return GK_OK;
}

void gk_cost_cross_entropy_fwd(const gk_context *ctx, const gk_cross_entropy_args *a,
                               gk_explanation *out) {
    (void)ctx;
    const gk_tensor *dlogits = gk_more_of_fwd(a).dlogits;
    out->bytes = gk_tensor_bytes(&a->logits) + bytes_of(&a->target) + bytes_of(a->weight) +
                 bytes_of(dlogits);
    out->flops = (dlogits ? 9.0 : 4.0) * (double)gk_numel(&a->logits);
}

gk_status gk_check_cross_entropy_bwd(const gk_context *ctx, const gk_cross_entropy_bwd_args *a,
                                     gk_io *io) {
    const gk_tensor *logits = &a->fwd.logits;
    GK_TRY(gk_check_args_size(a->fwd.size, sizeof a->fwd));
    const gk_loss_more more = gk_more_of_bwd(a);
    const int64_t here = gk_classes_of(&a->fwd), first = more.first_class,
                  classes = more.num_classes;
    GK_REQUIRE(first >= 0 && here <= classes && first <= classes - here,
               "logits are %lld classes from first_class %lld on, of num_classes %lld",
               (long long)here, (long long)first, (long long)classes);
    GK_TRY(take_cross_entropy(ctx, &a->fwd, &more, io));
    const gk_dtype stats = gk_stats_dtype(logits->dtype);
    GK_TRY(gk_take(io, "lse", &a->fwd.lse, GK_CONTIGUOUS));
    GK_TRY(gk_check_dtype(io, "lse", &a->fwd.lse, stats));
    GK_TRY(gk_check_shape("lse", &a->fwd.lse, logits->ndim - 1, logits->shape));
    GK_TRY(gk_take(io, "grad_loss", &a->grad_loss, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, "grad_loss", &a->grad_loss, stats));
    GK_TRY(gk_check_shape("grad_loss", &a->grad_loss, logits->ndim - 1, logits->shape));
    give_dlogits(io, logits, &a->dlogits);
    return GK_OK;
}

void gk_cost_cross_entropy_bwd(const gk_context *ctx, const gk_cross_entropy_bwd_args *a,
                               gk_explanation *out) {
    (void)ctx;
    const double written =
        (double)gk_numel(&a->fwd.logits) *
        (double)gk_dtype_bytes(dlogits_dtype(a->fwd.logits.dtype, a->dlogits.dtype));
    out->bytes = gk_tensor_bytes(&a->fwd.logits) + written + bytes_of(&a->fwd.target) +
                 bytes_of(a->fwd.weight);
    out->flops = 5.0 * (double)gk_numel(&a->fwd.logits);
}
