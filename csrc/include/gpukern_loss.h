/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_loss.h: what calls of cross entropy may ask for beyond their arguments in gpukern.h,
 * which has the conventions; include this page beside it. A caller passes &x.fwd or &x.bwd, whose
 * size says that the rest stands behind it. */
#ifndef GPUKERN_LOSS_H
#define GPUKERN_LOSS_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

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
