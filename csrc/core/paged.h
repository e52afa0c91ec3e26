/* SPDX-License-Identifier: BSD-3-Clause */
/* paged.h: what the checks, the kernels and the reference of paged_attn agree on. */
#ifndef GPUKERN_CORE_PAGED_H
#define GPUKERN_CORE_PAGED_H

#include "internal.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The largest head_dim of a paged cache: a row of latent attention has 512 elements, and 64 more
 * that carry the rotary position. */
#define GK_CACHE_HEAD_DIM 576

/* True if every value row is the beginning of its key row, as in latent attention: v_cache is then
 * a view of k_cache. */
static inline bool gk_is_latent(const gk_paged_attn_args *a) {
    const gk_tensor *k = &a->k_cache, *v = &a->v_cache;
    if (v->data != k->data || v->dtype != k->dtype || v->shape[3] > k->shape[3]) return false;
    for (int d = 0; d < 3; ++d)
        if (k->shape[d] > 1 && v->stride[d] != k->stride[d]) return false;
    return true;
}

#ifdef __cplusplus
}
#endif
#endif
