/* SPDX-License-Identifier: BSD-3-Clause */
/* rules.h: makes a gk_attn_rules from bytes, for fuzz_flash_attn and fuzz_paged_attn. */
#ifndef GPUKERN_FUZZ_RULES_H
#define GPUKERN_FUZZ_RULES_H

#include "fuzz.h"

typedef struct fz_rules {
    gk_tensor slopes, sinks;
    double scores; /* about the largest possible score */
} fz_rules;

/* Window sizes and diagonals: around the sequence lengths, or huge. */
static int64_t fz_span(void) {
    static const int64_t far[] = {INT64_MAX, INT64_C(1) << 62, INT64_C(1) << 31, 1000};
    const int64_t n = fz_int(0, 43);
    return n < 40 ? n : far[n - 40];
}

/* Values for kv_start, kv_end or q_start. */
static gk_tensor fz_bounds_make(int64_t batch) {
    gk_tensor t = fz_make(GK_I32, 1, &batch, FZ_RESULT);
    for (int64_t b = 0; b < batch; ++b) {
        const int64_t x = fz_int(0, 50);
        fz_set(&t, b, x == 50 ? INT32_MIN : x == 49 ? INT32_MAX : (double)(x - 4));
    }
    fz_all[fz_count - 1].result = false;
    return t;
}

static gk_attn_rules fz_rules_make(fz_rules *own, gk_dtype dtype, int64_t batch, int64_t heads,
                                   int64_t head_dim) {
    gk_attn_rules r = GK_ATTN_RULES_INIT;
    static const double scales[] = {0, 1, -0.3, 2};
    const int64_t scale = fz_int(0, 7), kind = fz_int(0, 127);
    r.scale = scale < 4 ? 1 / sqrt((double)gk_max_i64(1, head_dim)) : scales[scale - 4];
    own->scores = fabs(r.scale) * (double)head_dim;
    if (kind & 1) r.is_causal = 1;
    if (kind & 2) r.window_left = fz_span();
    if (kind & 4) r.window_right = fz_span();
    if (kind & 8) r.softcap = (double)fz_int(1, 30);
    if (kind & 16) {
        const int64_t shape[2] = {batch, heads};
        const int two = (int)fz_int(0, 1);
        own->slopes = fz_make(fz_stats(dtype), 1 + two, shape + 1 - two, FZ_INPUT);
        r.alibi_slopes = &own->slopes;
        own->scores += 200;
    }
    if (kind & 32) {
        own->sinks = fz_make(kind & 64 ? dtype : fz_stats(dtype), 1, &heads, FZ_INPUT);
        r.sinks = &own->sinks;
    }
    if (kind & 32 && heads > 0 && fz_one_in(4)) fz_set(&own->sinks, 0, -INFINITY);
    return r;
}

#endif
