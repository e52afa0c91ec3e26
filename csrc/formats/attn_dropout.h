/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_dropout.h: which probabilities attention's dropout keeps. The law, for every kernel, tile
 * and device:
 *
 *   The row of a query is the number of its element in lse: of [B, Hq, Sq], or packed of [Tq, Hq],
 *   in row-major order. Keys 8 g .. 8 g + 7 of a row, counted within their sequence, share one call
 *   of Philox4x32-10 (philox.h) with key seed[0] and counter (row 2^29 + g, seed[1]). Key 8 g + e
 *   has the low (e even) or high (e odd) half of word e / 2. It is kept where that half is below
 *   round((1 - p) 2^16), at least 1.
 *
 * So the mask of a row is a prefix of its mask for more keys, and eight neighbours cost one call.
 * torch_gpukern/ops/attn_dropout.py says it again in tensors, as the judge of the kernels. */
#ifndef GPUKERN_ATTN_DROPOUT_H
#define GPUKERN_ATTN_DROPOUT_H

#include "philox.h"

#if defined(__CUDACC__)
#define GK_DROP_FN __host__ __device__ static inline
#else
#define GK_DROP_FN static inline
#endif

/* A half in the upper 16 bits of a word, whatever the lower are, is kept where the word is at most
 * this. */
GK_DROP_FN uint32_t gk_attn_keep_most(double p) {
    const uint32_t below = (uint32_t)((1 - p) * 65536 + 0.5);
    return ((below > 0 ? below : 1) - 1) << 16 | 0xffffu;
}

/* The low and the high word of a counter's first half. */
GK_DROP_FN uint32_t gk_attn_counter_low(int64_t row, uint32_t g) { return (uint32_t)row << 29 | g; }
GK_DROP_FN uint32_t gk_attn_counter_high(int64_t row) { return (uint32_t)(row >> 3); }

/* The dropout of a call on the CPU; most 0: there is none. */
typedef struct gk_attn_keep {
    uint64_t seed, offset;
    uint32_t most;
    double factor; /* of what is kept */
} gk_attn_keep;

static inline gk_attn_keep gk_attn_keep_of(const gk_flash_attn_args *a) {
    gk_attn_keep d = {0, 0, 0, 1};
    if (!(a->dropout_p > 0)) return d;
    d.seed = gk_seed_word(a->dropout_seed, 0);
    d.offset = gk_seed_word(a->dropout_seed, 1);
    d.most = gk_attn_keep_most(a->dropout_p);
    d.factor = gk_keep_scale(a->dropout_p);
    return d;
}

/* Bit e: whether key 8 g + e is kept. */
static inline uint32_t gk_attn_keep8(const gk_attn_keep *d, int64_t row, uint32_t g) {
    uint32_t word[4], bits = 0;
    gk_philox(d->seed, d->offset,
              (uint64_t)gk_attn_counter_high(row) << 32 | gk_attn_counter_low(row, g), word);
    for (int e = 0; e < 8; ++e)
        bits |= (uint32_t)((e % 2 ? word[e / 2] : word[e / 2] << 16) <= d->most) << e;
    return bits;
}

static inline bool gk_attn_kept(const gk_attn_keep *d, int64_t row, int64_t key) {
    return d->most == 0 || (gk_attn_keep8(d, row, (uint32_t)(key / 8)) >> key % 8 & 1);
}

#endif
