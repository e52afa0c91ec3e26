/* SPDX-License-Identifier: BSD-3-Clause */
/* span.cuh: which keys a row sees by causal, window and padding, and which rows see a key. It is
 * the device counterpart of gk_span (internal.h), in 32 bits. Row i of a sequence is at key
 * position i + diagonal and sees keys [lo(i), hi(i)). Neither bound ever falls as i grows. */
#ifndef GPUKERN_CUDA_SPAN_CUH
#define GPUKERN_CUDA_SPAN_CUH

#include "../layout/layout.cuh" /* GK_HD */

#include <stdint.h>

struct Span {
    int key_lo, key_hi; /* bounds that hold for every row */
    int lo_off, hi_off; /* the row's own interval is [i + lo_off, i + hi_off) */

    __device__ __forceinline__ int lo(int i) const { return min(max(i + lo_off, key_lo), key_hi); }
    __device__ __forceinline__ int hi(int i) const { return min(max(i + hi_off, key_lo), key_hi); }

    /* Rows [row_lo(j), row_hi(j, seq_q)) see key j, if key_lo <= j < key_hi. */
    __device__ __forceinline__ int row_lo(int j) const { return max(j - hi_off + 1, 0); }
    __device__ __forceinline__ int row_hi(int j, int seq_q) const {
        return min(j - lo_off + 1, seq_q);
    }
};

/* Lengths are at most 2^30, so the sum of a row and an offset fits 32 bits. */
constexpr int SPAN_FAR = 1 << 30;

inline GK_HD int span_clamp(int64_t x) {
    return (int)(x < -SPAN_FAR ? -SPAN_FAR : x > SPAN_FAR ? SPAN_FAR : x);
}

/* left, right: -1 = unbounded. right already includes is_causal. */
inline GK_HD Span span_make(int seq_k, int64_t diagonal, int64_t left, int64_t right) {
    Span s;
    s.key_lo = 0;
    s.key_hi = seq_k;
    s.lo_off = left < 0 ? -SPAN_FAR : span_clamp(diagonal - left);
    s.hi_off = right < 0 ? SPAN_FAR : span_clamp(diagonal + right + 1);
    return s;
}

#endif
