/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_cache.h: the page of the C API for what stands between a projection and a paged cache.
 * gpukern.h has the conventions; include this page beside it. */
#ifndef GPUKERN_CACHE_H
#define GPUKERN_CACHE_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What gk_norm_fwd (RMS, of each head), gk_rope and gk_kv_cache_write do of new tokens, in one
 * pass:
 *   q = rotate(norm(q)) to out_q,   rotate(norm(k)) / k_scale and v / v_scale to row slots[t] of the caches
 * float32 inside (float64 for GK_F64), rounded once: to q's dtype, and to the caches'. A token with
 * a negative slot is not written, its query is rotated all the same. A slot past the cache and a
 * position past cos: GK_ERR_INDEX on the CPU before anything is written; on CUDA the token is
 * skipped, or has the last position, and GK_BAD_SLOTS, GK_BAD_POSITIONS. A q, k or v that shares
 * memory with a row that is written must be copied first. */
typedef struct gk_rope_kv_write_args {
    size_t size;
    gk_tensor q; /* [T, Hq, D] */
    gk_tensor k,
        v; /* [T, Hkv, D], [T, Hkv, Dv], q's dtype; the last dimension of all three dense */
    gk_tensor cos, sin;  /* [P, R / 2] GK_F32, R <= D; with GK_F64 that too; last dimension dense */
    gk_tensor positions; /* [T] int32 or int64: rows of cos and sin */
    gk_tensor k_cache, v_cache; /* [num_blocks, block_size, Hkv, D], [..., Dv]; q's dtype or 8-bit
                                   codes; written */
    gk_tensor slots;            /* [T] int64 or int32; negative = skip */
    const gk_tensor *q_weight, *k_weight; /* [D] q's dtype or GK_F32; NULL = no norm */
    const gk_tensor *k_scale, *v_scale;   /* as of gk_kv_cache_write_args */
    gk_tensor out_q;                      /* like q */
    double eps;                           /* of the norms */
    int32_t interleaved;                  /* as of gk_rope_args */
} gk_rope_kv_write_args;
#define GK_ROPE_KV_WRITE_ARGS_INIT {.size = sizeof(gk_rope_kv_write_args), .eps = 1e-6}
GK_API gk_status gk_rope_kv_write(const gk_context *, const gk_rope_kv_write_args *);
GK_API gk_status gk_explain_rope_kv_write(const gk_context *, const gk_rope_kv_write_args *,
                                          gk_explanation *);

#ifdef __cplusplus
}
#endif
#endif
