/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_sample.h: the op that draws a token from each row of logits. gpukern.h has the
 * conventions. */
#ifndef GPUKERN_SAMPLE_H
#define GPUKERN_SAMPLE_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Draws a token from each of R rows of V logits.
 *
 * Penalties come first, in float64, for rows with a slot s >= 0. n is counts[s][t] and the number
 * of times that the row of `drafted` has token t:
 *   y = logit
 *   y = y > 0 ? y / repetition : y * repetition    if n > 0 or prompt[s][t]
 *   y = y - frequency n - presence (n > 0)
 * A row whose temperature is not above 0 gets the token with the largest y. NaN is larger than any
 * number. Equal values: the lowest token. Every other row gets a token by weight:
 *   x = (y - max y) (1 / temperature)
 *   weight = e^x 2^43, rounded to an integer (csrc/formats/sample_weight.h); 0 where e^x < min_p
 * top_k keeps the k largest x. top_p then keeps a token if the weights of the tokens before it, in
 * the order of x, have a sum below top_p times the sum of the tokens that top_k keeps; the first
 * one stays in any case. Among equal x lower tokens come first. The row's token is the first one
 * whose weights up to and with it, in the order of tokens, exceed number times the sum of all. If
 * no token has a weight, the row gets the token with the largest y.
 *
 * Weights are integers, so their sums do not depend on an order. Every operation before is one of
 * IEEE 754. So a row's token depends on its own arguments alone, and it is the same on every
 * device.
 *
 * Vectors have the dtype GK_F64 or GK_F32. NULL: off. */
typedef struct gk_sample_tokens_args {
    size_t size;
    gk_tensor logits;         /* [R, V], 1 <= V < 2^20 */
    gk_tensor temperature;    /* [R] */
    gk_tensor number;         /* [R] uniform in [0, 1) */
    const gk_tensor *top_k;   /* [R] int64 or int32; below 1, or V and more: off */
    const gk_tensor *top_p;   /* [R]; 1 and more: off */
    const gk_tensor *min_p;   /* [R] */
    const gk_tensor *counts;  /* [S, V] int32; needs slots */
    const gk_tensor *prompt;  /* [S, V] uint8, 0 or not; needs counts */
    const gk_tensor *slots;   /* [R] int64 or int32: rows of counts; -1: the row has no penalties */
    const gk_tensor *drafted; /* [R, D] int64 or int32 tokens, -1: none; needs counts */
    const gk_tensor *presence, *frequency, *repetition; /* [R]; need counts */
    gk_tensor out;                                      /* [R] int64 */
} gk_sample_tokens_args;
#define GK_SAMPLE_TOKENS_ARGS_INIT {.size = sizeof(gk_sample_tokens_args)}
GK_API gk_status gk_sample_tokens(const gk_context *, const gk_sample_tokens_args *);
GK_API gk_status gk_explain_sample_tokens(const gk_context *, const gk_sample_tokens_args *,
                                          gk_explanation *);

#ifdef __cplusplus
}
#endif
#endif
