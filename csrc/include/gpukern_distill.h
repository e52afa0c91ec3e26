/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_distill.h: the divergence of two rows of logits, the loss of distillation. gpukern.h has
 * the conventions. */
#ifndef GPUKERN_DISTILL_H
#define GPUKERN_DISTILL_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The divergence of a student's and a teacher's distribution over V columns, for each row. With
 * S = softmax(logits / temperature) and T = softmax(teacher_logits / temperature):
 *   beta 0      loss = KL(T || S) = sum T (log T - log S)
 *   beta 1      loss = KL(S || T)
 *   between     loss = beta KL(T || M) + (1 - beta) KL(S || M),  M = beta T + (1 - beta) S
 * The last is the generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649). A
 * column that has probability 0 under a distribution adds nothing to its sum, also if its logit is
 * -inf on both sides.
 *
 * dlogits receives the gradient of the sum of losses by the student's logits. */
typedef struct gk_kl_div_args {
    size_t size;
    gk_tensor logits;         /* [..., V], V >= 1: the student's */
    gk_tensor teacher_logits; /* like logits */
    const gk_tensor *mask;    /* [...] uint8; a row with 0 has loss 0 and gradient 0, and is not
                                 read; NULL: all rows count */
    gk_tensor loss;           /* [...] float32, float64 for GK_F64 */
    /* Like logits, or 16-bit if logits are GK_F32; may be logits itself; NULL = not wanted. */
    const gk_tensor *dlogits;
    double beta;        /* 0 <= beta <= 1 */
    double temperature; /* positive and finite */
} gk_kl_div_args;
#define GK_KL_DIV_ARGS_INIT {.size = sizeof(gk_kl_div_args), .temperature = 1.0}
GK_API gk_status gk_kl_div(const gk_context *, const gk_kl_div_args *);
GK_API gk_status gk_explain_kl_div(const gk_context *, const gk_kl_div_args *, gk_explanation *);

#ifdef __cplusplus
}
#endif
#endif
