/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_train.h: the ops that only training needs: dropout, a step of AdamW, and more arguments
 * of cross entropy. gpukern.h has the conventions. */
#ifndef GPUKERN_TRAIN_H
#define GPUKERN_TRAIN_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- dropout --------------------------------------------------------------------------------- */
/* Dropout, where keep is 0 or 1 for each element:
 *   forward             out = keep / (1 - p) act(x + bias) + residual
 *   backward (grad_out) out = keep / (1 - p) grad_out act'(x + bias), the gradient of x + bias
 *
 * Element i of x, counted in row-major order, is kept if its random word is less than
 * (1 - p) 2^32. That is word i % 4 of Philox4x32-10 (Salmon et al. 2011) with key seed[0] and
 * counter (i / 4, seed[1]), 64 bits each, low word first. So the mask depends only on the shape, p
 * and the seed, and it is the same on every device and in both passes. A dropped value is 0, even
 * if x is NaN. */
typedef struct gk_dropout_args {
    size_t size;
    gk_tensor x;               /* [..., N], N >= 0 */
    const gk_tensor *bias;     /* [N] x's dtype; NULL = 0 */
    const gk_tensor *residual; /* like x; NULL = none; not with grad_out */
    const gk_tensor *grad_out; /* like x; NULL: the forward pass */
    gk_tensor seed;            /* [2] int64: seed and offset, read on the device */
    gk_tensor out;             /* like x; may be the memory of x, residual or grad_out */
    double p;                  /* 0 <= p <= 1 */
    gk_activation activation;  /* GK_ACT_NONE, GK_ACT_GELU or GK_ACT_GELU_TANH */
} gk_dropout_args;
#define GK_DROPOUT_ARGS_INIT {.size = sizeof(gk_dropout_args)}
GK_API gk_status gk_dropout(const gk_context *, const gk_dropout_args *);
GK_API gk_status gk_explain_dropout(const gk_context *, const gk_dropout_args *, gk_explanation *);

/* ---- AdamW ----------------------------------------------------------------------------------- */
/* One step of AdamW (Loshchilov and Hutter 2019) for each of num parameters:
 *   g = grad / grad_scale * clip, negated if maximize
 *   w = w (1 - lr weight_decay)
 *   m = beta1 m + (1 - beta1) g
 *   v = beta2 v + (1 - beta2) g^2
 *   u = v, or with amsgrad u = max = max(max, v)
 *   w = w - lr / (1 - beta1^step) m / (sqrt(u) / sqrt(1 - beta2^step) + eps)
 * Computed in float32 (GK_F64: float64). If there are master weights, w is the master weight, and
 * the parameter receives its rounding.
 *
 * A list is an array of num tensors; NULL = none. All tensors of one parameter have the same shape
 * and strides, and are dense in some order of their dimensions. Scalars are tensors [] float32 that
 * the device reads; NULL means 1, and 0 for found_inf. */
typedef struct gk_adamw_args {
    size_t size;
    int64_t num;
    const gk_tensor *params; /* written; all of one dtype */
    const gk_tensor *grads;  /* params' dtype */
    /* m and v, written; one dtype: that of params, or GK_F32 if params have 16 bits */
    const gk_tensor *exp_avgs, *exp_avg_sqs;
    const gk_tensor *max_exp_avg_sqs; /* max, written, m's dtype; makes it amsgrad */
    const gk_tensor *masters;         /* written, GK_F32; needs 16-bit params and GK_F32 m */
    const gk_tensor *steps;           /* [] each: the number of this step, 1 for the first */
    const gk_tensor *lr_tensor;       /* replaces lr */
    const gk_tensor *grad_scale, *clip;
    const gk_tensor *found_inf; /* if it is not 0, nothing is written */
    /* [2] int64: rounds bfloat16 params stochastically; needs GK_F32 m and no masters */
    const gk_tensor *seed;
    double lr, beta1, beta2, eps, weight_decay;
    int32_t maximize;
} gk_adamw_args;
#define GK_ADAMW_ARGS_INIT \
    {.size = sizeof(gk_adamw_args), .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}
GK_API gk_status gk_adamw(const gk_context *, const gk_adamw_args *);
GK_API gk_status gk_explain_adamw(const gk_context *, const gk_adamw_args *, gk_explanation *);

/* ---- cross entropy: z-loss, the gradient in the same pass, a slice of V ---------------------- */
/* More arguments of gk_cross_entropy_fwd. Pass &x.fwd; fwd.size tells that the longer struct
 * follows. */
typedef struct gk_cross_entropy_more_args {
    gk_cross_entropy_args fwd; /* fwd.size: sizeof the whole struct */
    double z_loss;             /* adds z_loss lse^2 to the loss of each row that is not ignored */
    /* Receives the gradient of the sum of losses, in the same pass. Like logits, or 16-bit if
     * logits are GK_F32; may be logits itself; 0 in ignored rows; NULL = not wanted. */
    const gk_tensor *dlogits;
} gk_cross_entropy_more_args;

#define GK_CROSS_ENTROPY_MORE_ARGS_INIT \
    {.fwd = {.size = sizeof(gk_cross_entropy_more_args), .logit_scale = 1.0, .ignore_index = -100}}

/* More arguments of gk_cross_entropy_bwd, which takes &x.bwd. */
typedef struct gk_cross_entropy_bwd_more_args {
    gk_cross_entropy_bwd_args bwd; /* bwd.size: sizeof the whole struct */
    double z_loss;
    /* A rank may hold a slice of the vocabulary: logits are then the columns from first_class on,
     * out of num_classes. target, weight [num_classes] and lse refer to all of them. num_classes 0:
     * logits hold all of them. */
    int64_t first_class, num_classes;
} gk_cross_entropy_bwd_more_args;

#define GK_CROSS_ENTROPY_BWD_MORE_ARGS_INIT                 \
    {                                                       \
        .bwd = {                                            \
            .size = sizeof(gk_cross_entropy_bwd_more_args), \
            .fwd = GK_CROSS_ENTROPY_ARGS_INIT               \
        }                                                   \
    }

/* The further arguments of a call, or their defaults if the caller passed the short struct. */
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
