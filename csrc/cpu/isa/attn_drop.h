/* SPDX-License-Identifier: BSD-3-Clause */
/* attn_drop.h: what attention's dropout keeps (csrc/formats/attn_dropout.h) of W rows at once: bits
 * of 32 keys a word. */
#ifndef GPUKERN_CPU_ATTN_DROP_H
#define GPUKERN_CPU_ATTN_DROP_H

#include "../../formats/attn_dropout.h"
#include "philox_vec.h"

/* Words of keys [first, first + n), n > 0, of W rows: bit e of the w-th word is key 32 (first / 32
 * + w) + e. Words stand `step` vectors apart. */
INLINE void attn_keep_words(const gk_attn_keep *d, const int64_t row[W], int64_t first, int64_t n,
                            vi *to, int64_t step) {
    vu low, high;
    for (int i = 0; i < W; ++i) {
        low[i] = gk_attn_counter_low(row[i], 0);
        high[i] = gk_attn_counter_high(row[i]);
    }
    const vu most = (vu){0} + d->most;
    for (int64_t w = first / 32; 32 * w < first + n; ++w, to += step) {
        vu bits = {0};
        for (int64_t g = 4 * w; g < 4 * w + 4; ++g) {
            if (8 * g + 8 <= first || 8 * g >= first + n) continue;
            vu word[4];
            philox_words(d->seed, d->offset, low | (uint32_t)g, high, word);
#pragma GCC unroll 4
            for (int e = 0; e < 4; ++e) {
                const vu even = (vu)(word[e] << 16 <= most) & 1u, odd = (vu)(word[e] <= most) & 2u;
                bits |= (even | odd) << (uint32_t)(8 * (g % 4) + 2 * e);
            }
        }
        *to = (vi)bits;
    }
}

/* All bits of a lane where it keeps `key`, else none; first: as above. */
INLINE vi attn_keeps(const vi *words, int64_t step, int64_t first, int64_t key) {
    return words[(key / 32 - first / 32) * step] << (31 - (int32_t)(key % 32)) >> 31;
}

#endif
