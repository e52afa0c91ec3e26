/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_moe.h: the end of a mixture of experts, which gathers, weights and sums each token's
 * rows. gpukern.h has the conventions. */
#ifndef GPUKERN_MOE_H
#define GPUKERN_MOE_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* out[t] = sum over j of weight[t][j] rows[place[t][j]], in the order of j.
 *
 * A place below 0 adds nothing, whatever its weight, and no row is read for it. A place that is not
 * below R is an error: GK_ERR_INDEX on the CPU. A CUDA kernel treats such a place as one below 0
 * and reports GK_BAD_SLOTS. */
typedef struct gk_moe_unpermute_args {
    size_t size;
    gk_tensor rows;   /* [R, H] */
    gk_tensor place;  /* [T, J] int32 or int64 */
    gk_tensor weight; /* [T, J] float32 or the dtype of rows */
    gk_tensor out;    /* [T, H], the dtype of rows */
} gk_moe_unpermute_args;
#define GK_MOE_UNPERMUTE_ARGS_INIT {.size = sizeof(gk_moe_unpermute_args)}
GK_API gk_status gk_moe_unpermute(const gk_context *, const gk_moe_unpermute_args *);
GK_API gk_status gk_explain_moe_unpermute(const gk_context *, const gk_moe_unpermute_args *,
                                          gk_explanation *);

/* The gradients of gk_moe_unpermute:
 *   drows[r]      = sum of weight[t][j] grad_out[t] over all (t, j) with place[t][j] = r, in the
 *                   order of t and then of j; 0 if there are none
 *   dweight[t][j] = sum over H of grad_out[t] rows[place[t][j]]; 0 if the place is below 0
 * A row that no place names is not read. Places are as above. */
typedef struct gk_moe_unpermute_bwd_args {
    size_t size;
    gk_tensor grad_out;       /* [T, H] */
    gk_tensor rows;           /* [R, H], the dtype of grad_out */
    gk_tensor place;          /* [T, J] int32 or int64 */
    gk_tensor weight;         /* [T, J] float32 or the dtype of grad_out */
    const gk_tensor *drows;   /* [R, H], the dtype of grad_out; NULL = not wanted */
    const gk_tensor *dweight; /* [T, J] float32, float64 for GK_F64; NULL = not wanted */
    void *workspace;          /* gk_moe_unpermute_bwd_workspace_bytes() */
    size_t workspace_bytes;
} gk_moe_unpermute_bwd_args;
#define GK_MOE_UNPERMUTE_BWD_ARGS_INIT {.size = sizeof(gk_moe_unpermute_bwd_args)}
GK_API size_t gk_moe_unpermute_bwd_workspace_bytes(const gk_context *,
                                                   const gk_moe_unpermute_bwd_args *);
GK_API gk_status gk_moe_unpermute_bwd(const gk_context *, const gk_moe_unpermute_bwd_args *);
GK_API gk_status gk_explain_moe_unpermute_bwd(const gk_context *, const gk_moe_unpermute_bwd_args *,
                                              gk_explanation *);

#ifdef __cplusplus
}
#endif
#endif
