/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_scales.h: the scales of 8-bit q, k and v. Every kernel of flash_attn_fp8 finds a token's
 * scale with it. */
#ifndef GPUKERN_ATTN_SCALES_H
#define GPUKERN_ATTN_SCALES_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GK_ATTN_SCALE_TOKENS = 128 /* tokens that share a scale, if a head has more than one */
};

/* Strides in elements; a stride is 0 if all share one scale along its dimension. data NULL: all
 * scales are 1. */
typedef struct gk_attn_scale {
    const float *data;
    int64_t batch, head, block;
} gk_attn_scale;

/* From a checked tensor [], [1], [H], [B, H] or [B, H, blocks]. */
static inline gk_attn_scale gk_attn_scale_of(const gk_tensor *t) {
    gk_attn_scale s = {0, 0, 0, 0};
    if (!t) return s;
    s.data = (const float *)t->data;
    if (t->ndim == 1 && t->shape[0] > 1) s.head = t->stride[0];
    if (t->ndim >= 2) {
        s.batch = t->stride[0];
        s.head = t->stride[1];
    }
    if (t->ndim == 3) s.block = t->stride[2];
    return s;
}

/* The values to add to v, [Hkv, Dv] or [B, Hkv, Dv]. data NULL: 0. */
typedef struct gk_attn_mean {
    const float *data;
    int64_t batch, head, column;
} gk_attn_mean;

static inline gk_attn_mean gk_attn_mean_of(const gk_tensor *t) {
    gk_attn_mean m = {0, 0, 0, 0};
    if (!t) return m;
    m.data = (const float *)t->data;
    m.batch = t->ndim == 3 ? t->stride[0] : 0;
    m.head = t->stride[t->ndim - 2];
    m.column = t->stride[t->ndim - 1];
    return m;
}

#ifdef __cplusplus
}
#endif
#endif
