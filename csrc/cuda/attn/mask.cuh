/* SPDX-License-Identifier: BSD-3-Clause */
/* mask.cuh: applies causal, window and padding (mask) and softcap and ALiBi (modify) to a tile of
 * scores, between the product and the softmax of the mma.sync forward kernels. The scores are mma
 * accumulators: s[m][n][2 r + e] is row 16 m + 8 r and column 8 n + e, relative to the lane's
 * first. */
#ifndef GPUKERN_CUDA_MASK_CUH
#define GPUKERN_CUDA_MASK_CUH

#include "score.cuh"

/* Sets the scores of keys that a row does not see to -inf. row0, key0: the row and key of
 * s[0][0][0]. Rows past the end of the sequence use the mask of its last row. */
template <int M, int N>
__device__ __forceinline__ void mask(float (&s)[M][N][4], const Sequence &seq, int row0, int key0) {
    const Span span = seq.span;
    const int seq_q = seq.seq_q;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = min(row0 + 16 * m + 8 * r, seq_q - 1), lo = span.lo(i);
            const int from = lo - key0;
            const unsigned keys = max(span.hi(i) - lo, 0);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if ((unsigned)(8 * n + e - from) >= keys) s[m][n][2 * r + e] = -INFINITY;
        }
    }
}

/* Applies scale, softcap and ALiBi, which makes S scores in natural units. Calls with softcap,
 * ALiBi or a scale that is not positive use it. Distances from the tile's first key up to 2^24 are
 * exact; larger ones are rounded to float. */
template <int M, int N>
__device__ __forceinline__ void modify(float (&s)[M][N][4], const Score &kept, int row0, int key0) {
    const Score x = kept;
    if (x.softcap > 0) {
        const float factor = x.scale / x.softcap;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[m][n][e] = x.softcap * tanh_fine(s[m][n][e] * factor);
    } else {
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) s[m][n][e] *= x.scale;
    }
    if (x.slope == 0) return;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float ahead = (float)(row0 + 16 * m + 8 * r + x.position0 - key0);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    s[m][n][2 * r + e] =
                        fmaf(-x.slope, fabsf(ahead - (float)(8 * n + e)), s[m][n][2 * r + e]);
        }
}

#endif
