/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_codes: decodes keys and values of 8-bit pages to rows of q's dtype.
 *
 * Every code of e4m3, e5m2 and int8 is also a value of bfloat16, float16 and float32, so decoding a
 * code rounds nothing. If each page and head has a scale, the row is multiplied by it here, which
 * rounds once. A scale for a whole head, or for the whole cache, is not applied here: attention
 * multiplies the scores and the sum of values by it, in float32.
 *
 * Rows of latents (GK_U8, formats/latent_row.h) contain their own scales, which round once, too. A
 * latent row is decoded once: the value row is the beginning of the key row. */
#ifndef GPUKERN_CPU_PAGED_CODES_H
#define GPUKERN_CPU_PAGED_CODES_H

#include "../../formats/latent_row.h"
#include "attn_tile.h"
#include "codes_vec.h"

typedef struct paged_codes {
    gk_dtype code, dtype; /* of the pages; of the decoded rows */
    int64_t head_dim, head_dim_v;
    const gk_tensor *k_scale, *v_scale; /* [num_blocks, Hkv]; NULL: pages have no scales */
} paged_codes;

INLINE paged_codes paged_codes_of(const gk_paged_attn_args *a) {
    return (paged_codes){a->k_cache.dtype,
                         a->q.dtype,
                         a->q.shape[2],
                         a->v_cache.shape[3],
                         a->k_scale && a->k_scale->ndim == 2 ? a->k_scale : NULL,
                         a->v_scale && a->v_scale->ndim == 2 ? a->v_scale : NULL};
}

/* The bytes of a key and a value in q's dtype; 0 if the pages have that dtype. */
INLINE int64_t paged_decoded_bytes(const gk_paged_attn_args *a) {
    if (!gk_is_code(a->k_cache.dtype)) return 0;
    const int64_t values = a->k_cache.dtype == GK_U8 ? 0 : a->v_cache.shape[3];
    return (int64_t)gk_dtype_bytes(a->q.dtype) * (a->q.shape[2] + values);
}

INLINE void decode_row(const void *from, gk_dtype code, void *to, gk_dtype dtype, int64_t n,
                       float scale) {
    for (int64_t d = 0; d < n; d += W)
        vf_store_dtype(to, dtype, d, vf_load_code(from, code, d, n - d) * scale, n - d);
}

static __attribute__((noinline)) void decode_e4m3(const void *from, void *to, gk_dtype dtype,
                                                  int64_t n, float scale) {
    decode_row(from, GK_E4M3, to, dtype, n, scale);
}
static __attribute__((noinline)) void decode_e5m2(const void *from, void *to, gk_dtype dtype,
                                                  int64_t n, float scale) {
    decode_row(from, GK_E5M2, to, dtype, n, scale);
}
static __attribute__((noinline)) void decode_i8(const void *from, void *to, gk_dtype dtype,
                                                int64_t n, float scale) {
    decode_row(from, GK_I8, to, dtype, n, scale);
}

static __attribute__((noinline)) void decode_latent(const char *from, char *to, gk_dtype dtype) {
    const int64_t bytes = (int64_t)gk_dtype_bytes(dtype);
    for (int64_t d = 0; d < GK_LATENT_DIM; d += GK_LATENT_BLOCK)
        decode_row(from + d, GK_E4M3, to + d * bytes, dtype, GK_LATENT_BLOCK,
                   gk_latent_scale_at(from, d));
    for (int64_t d = 0; d < GK_LATENT_ROPE; d += W)
        vf_store_dtype(to, dtype, GK_LATENT_DIM + d,
                       vf_load_dtype(from + GK_LATENT_ROPE_AT, GK_BF16, d, W), W);
}

/* Decodes rows of K or of V, those of keys j .. j + n and of `heads` heads, to `to`. at[i] is the
 * address of key j + i's first head: in the pages before the call, in `to` after it. Returns the
 * end of the decoded rows. */
static char *decode_keys(const attn_keys *keys, int64_t j, int64_t n, int64_t heads,
                         const gk_tensor *scale, int64_t head_bytes, int64_t dim, const char **at,
                         char *to) {
    const paged_codes *c = keys->codes;
    void (*const decode)(const void *, void *, gk_dtype, int64_t, float) =
        c->code == GK_E4M3   ? decode_e4m3
        : c->code == GK_E5M2 ? decode_e5m2
                             : decode_i8;
    const int64_t bytes = (int64_t)gk_dtype_bytes(c->dtype) * dim;
    for (int64_t i = 0; i < n; ++i) {
        const char *from = at[i];
        const float *scales = NULL;
        if (scale)
            scales = (const float *)scale->data + keys->head * scale->stride[1] +
                     keys->pages[(j + i) / keys->page_size * keys->pages_step] * scale->stride[0];
        at[i] = to;
        for (int64_t h = 0; h < heads; ++h, to += bytes)
            decode(from + h * head_bytes, to, c->dtype, dim,
                   scales ? scales[h * scale->stride[1]] : 1);
    }
    return to;
}

/* Decodes n keys and values of `heads` heads, beginning with keys->head. */
static void paged_decode_heads(const attn_keys *keys, int64_t j, int64_t n, int64_t heads,
                               int64_t k_head, int64_t v_head, const char **k, const char **v,
                               char *to) {
    const paged_codes *c = keys->codes;
    if (c->code == GK_U8) { /* one head */
        for (int64_t i = 0; i < n; ++i, to += (int64_t)gk_dtype_bytes(c->dtype) * c->head_dim) {
            decode_latent(k[i], to, c->dtype);
            k[i] = v[i] = to;
        }
        return;
    }
    to = decode_keys(keys, j, n, heads, c->k_scale, k_head, c->head_dim, k, to);
    decode_keys(keys, j, n, heads, c->v_scale, v_head, c->head_dim_v, v, to);
}

static void paged_decode(const attn_keys *keys, int64_t j, int64_t n, const char **k,
                         const char **v, char *to) {
    paged_decode_heads(keys, j, n, 1, 0, 0, k, v, to);
}

#endif
