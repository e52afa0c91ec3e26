/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_train.h: what training alone needs: dropout, the step of an optimiser, and more of cross
 * entropy. gpukern.h has the conventions. */
#ifndef GPUKERN_TRAIN_H
#define GPUKERN_TRAIN_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- dropout --------------------------------------------------------------------------------- */
/* out = keep / (1 - p) act(x + bias) + residual, or with grad_out the gradient of x + bias: keep /
 * (1 - p) grad_out act'(x + bias).
 *
 * What is kept: element i of x, counted in row-major order, has word i % 4 of Philox4x32-10 (Salmon
 * et al. 2011) with key seed[0] and counter (i / 4, seed[1]), 64 bits each, low word first. It is
 * kept where that word is less than (1 - p) 2^32. So the mask follows from the shape, p and the
 * seed alone, on every device and in both passes. A value that is dropped is 0, also where x is
 * NaN. */
typedef struct gk_dropout_args {
    size_t size;
    gk_tensor x;               /* [..., N], N >= 0 */
    const gk_tensor *bias;     /* [N] x's dtype; NULL = 0 */
    const gk_tensor *residual; /* like x; NULL = none; not with grad_out */
    const gk_tensor *grad_out; /* like x; NULL: the forward pass */
    gk_tensor seed;            /* [2] int64: seed and offset, read on the device */
    gk_tensor out;             /* like x; may be x, residual or grad_out itself */
    double p;                  /* 0 <= p <= 1 */
    gk_activation activation;  /* GK_ACT_NONE, GK_ACT_GELU or GK_ACT_GELU_TANH */
} gk_dropout_args;
#define GK_DROPOUT_ARGS_INIT {.size = sizeof(gk_dropout_args)}
GK_API gk_status gk_dropout(const gk_context *, const gk_dropout_args *);
GK_API gk_status gk_explain_dropout(const gk_context *, const gk_dropout_args *, gk_explanation *);

/* ---- AdamW ----------------------------------------------------------------------------------- */
/* One step of AdamW (Loshchilov and Hutter 2019) for each of num tensors. With g = grad /
 * grad_scale * clip, negated where maximize:
 *   w = w (1 - lr weight_decay);  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  u = v, or of a maximum max = max(max, v)
 *   w = w - lr / (1 - beta1^step) m / (sqrt(u) / sqrt(1 - beta2^step) + eps)
 * w is the master weight where there is one, and the parameter its rounding. float32 inside
 * (float64 for GK_F64). The tensors of one parameter have one shape and the same strides, dense in
 * some order of their dimensions. A list is an array of num tensors; NULL = none. Scalars are
 * tensors [] float32, read on the device; NULL = 1, found_inf 0. */
typedef struct gk_adamw_args {
    size_t size;
    int64_t num;
    const gk_tensor *params; /* written; all of one dtype */
    const gk_tensor *grads;  /* params' dtype */
    const gk_tensor *exp_avgs,
        *exp_avg_sqs; /* m and v, written: params' dtype, or GK_F32 beside 16-bit ones, all alike */
    const gk_tensor *max_exp_avg_sqs; /* max, written: m's dtype; "amsgrad" */
    const gk_tensor *masters;         /* written: GK_F32 beside 16-bit params, m GK_F32 too */
    const gk_tensor *steps;           /* [] each: how many steps this one makes, 1 at first */
    const gk_tensor *lr_tensor;       /* in place of lr */
    const gk_tensor *grad_scale, *clip;
    const gk_tensor *found_inf; /* other than 0: nothing is written */
    const gk_tensor *
        seed; /* [2] int64: bfloat16 params are rounded stochastically; without masters, m GK_F32 */
    double lr, beta1, beta2, eps, weight_decay;
    int32_t maximize;
} gk_adamw_args;
#define GK_ADAMW_ARGS_INIT \
    {.size = sizeof(gk_adamw_args), .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}
GK_API gk_status gk_adamw(const gk_context *, const gk_adamw_args *);
GK_API gk_status gk_explain_adamw(const gk_context *, const gk_adamw_args *, gk_explanation *);

/* ---- cross entropy: z-loss, the gradient in the same pass, a slice of V ---------------------- */
/* Arguments of cross entropy beyond those of gpukern.h. A caller passes &x.fwd or &x.bwd, and its
 * size says that the rest follows it. */
/* Of gk_cross_entropy_fwd. */
typedef struct gk_cross_entropy_more_args {
    gk_cross_entropy_args fwd; /* size: of the whole struct */
    double z_loss;             /* z_loss lse^2 is added to the loss of a row that is not ignored */
    const gk_tensor
        *dlogits; /* the gradient of the losses' sum, in the same pass: like logits, or 16 bits
                   * beside GK_F32; may be logits itself; 0 in ignored rows; NULL = not wanted */
} gk_cross_entropy_more_args;

#define GK_CROSS_ENTROPY_MORE_ARGS_INIT \
    {.fwd = {.size = sizeof(gk_cross_entropy_more_args), .logit_scale = 1.0, .ignore_index = -100}}

/* Of gk_cross_entropy_bwd. */
typedef struct gk_cross_entropy_bwd_more_args {
    gk_cross_entropy_bwd_args bwd; /* size: of the whole struct */
    double z_loss;
    /* logits are V of num_classes, from first_class on, while target, weight [num_classes] and lse
     * are of all; 0 = they are all */
    int64_t first_class, num_classes;
} gk_cross_entropy_bwd_more_args;

#define GK_CROSS_ENTROPY_BWD_MORE_ARGS_INIT                 \
    {                                                       \
        .bwd = {                                            \
            .size = sizeof(gk_cross_entropy_bwd_more_args), \
            .fwd = GK_CROSS_ENTROPY_ARGS_INIT               \
        }                                                   \
    }

/* What stands behind the arguments of a call, or what is meant where nothing does. */
typedef struct gk_loss_more {
    double z_loss;
    const gk_tensor *dlogits;
    int64_t first_class, num_classes;
} gk_loss_more;

static inline int64_t gk_classes_of(const gk_cross_entropy_args *a) {
    return a->logits.ndim > 0 && a->logits.ndim <= GK_MAX_DIMS ? a->logits.shape[a->logits.ndim - 1]
                                                               : 0;
}

static inline gk_loss_more gk_more_of_fwd(const gk_cross_entropy_args *a) {
    gk_loss_more more = {0, NULL, 0, gk_classes_of(a)};
    if (a->size < sizeof(gk_cross_entropy_more_args)) return more;
    const gk_cross_entropy_more_args *x = (const gk_cross_entropy_more_args *)a;
    more.z_loss = x->z_loss;
    more.dlogits = x->dlogits;
    return more;
}

static inline gk_loss_more gk_more_of_bwd(const gk_cross_entropy_bwd_args *b) {
    gk_loss_more more = {0, &b->dlogits, 0, gk_classes_of(&b->fwd)};
    if (b->size < sizeof(gk_cross_entropy_bwd_more_args)) return more;
    const gk_cross_entropy_bwd_more_args *x = (const gk_cross_entropy_bwd_more_args *)b;
    more.z_loss = x->z_loss;
    more.first_class = x->first_class;
    if (x->num_classes) more.num_classes = x->num_classes;
    return more;
}

#ifdef __cplusplus
}
#endif
#endif
