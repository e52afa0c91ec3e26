/* SPDX-License-Identifier: BSD-3-Clause */
/* latent.h: writes into a cache of latent attention, as ops/ and the C API do them: the check of
 * the whole call, then gk_kv_cache_write of the two parts of each row. */
#ifndef GPUKERN_CORE_LATENT_H
#define GPUKERN_CORE_LATENT_H

#include "../formats/latent_row.h"
#include "gpukern_latent.h"
#include "internal.h"
#include "io.h"

#ifdef __cplusplus
extern "C" {
#endif

/* api/paged_attn.c */
gk_status gk_check_kv_cache_write_latent(const gk_context *ctx, const gk_kv_cache_write_args *w,
                                         gk_io *io);

/* Makes k_cache, the whole cache, and v_cache the parts of its rows that k and v go to. Parts of
 * GK_U8 rows have 528 and 128 bytes; the kernels know by them what they store. */
static inline void gk_latent_parts(gk_kv_cache_write_args *w) {
    gk_tensor *k = &w->k_cache, *v = &w->v_cache;
    const int64_t first = k->dtype == GK_U8 ? GK_LATENT_ROPE_AT : GK_LATENT_DIM;
    *v = *k;
    k->shape[3] = first;
    v->shape[3] -= first;
    v->data = gk_at(v->data, first * v->stride[3] * (int64_t)gk_dtype_bytes(v->dtype));
    w->k_scale = w->v_scale = NULL;
}

#ifdef __cplusplus
}
#endif
#endif
