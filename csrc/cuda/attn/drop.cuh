/* SPDX-License-Identifier: BSD-3-Clause */
/* drop.cuh: attention's dropout on the device. csrc/formats/attn_dropout.h defines which
 * probabilities are kept.
 *
 * One call of Philox gives the bits of eight keys of a row. Kernels zero the probabilities that are
 * dropped and multiply a row by 1 / (1 - p) at its end. In the backward, the bits and the factor
 * apply to dP. The mma.sync kernels and the plain kernels use this file; the Hopper kernels draw
 * with drop_pairs.cuh. */
#ifndef GPUKERN_CUDA_DROP_CUH
#define GPUKERN_CUDA_DROP_CUH

#include "../../formats/attn_dropout.h"
#include "../rows/philox.cuh"
#include "problem.cuh"

struct Dropout {
    const int64_t *seed; /* [2] */
    int64_t seed_step;
    /* a key is kept if its half, in the upper 16 bits of a word, is at most this; 0: no dropout */
    uint32_t most;
    float factor; /* 1 / (1 - p); 1 without dropout */
    double wide_factor;
};

inline Dropout dropout_of(const gk_flash_attn_args *a) {
    Dropout d = {NULL, 0, 0, 1, 1};
    if (!(a->dropout_p > 0)) return d;
    d.seed = (const int64_t *)a->dropout_seed->data;
    d.seed_step = a->dropout_seed->stride[0];
    d.most = gk_attn_keep_most(a->dropout_p);
    d.wide_factor = gk_keep_scale(a->dropout_p);
    d.factor = (float)d.wide_factor;
    return d;
}

/* The parameters of a kernel with dropout: those of the kernel without it, and the dropout. */
template <class P> struct Dropping : P {
    Dropout drop;
};
template <class P, bool DROP> struct dropping_if {
    typedef P type;
};
template <class P> struct dropping_if<P, true> {
    typedef Dropping<P> type;
};
template <class P> __host__ __device__ inline float drop_factor(const Dropping<P> &p) {
    return p.drop.factor;
}
template <class P> __host__ __device__ inline float drop_factor(const P &) { return 1; }

/* The number of a head's query q0 in the Philox counter. It is the index of the query's lse. */
__device__ __forceinline__ int64_t drop_row0(const Problem &p, int b, int head, int q0) {
    return b * p.lse.batch + head * p.lse.head + (int64_t)q0 * p.lse.row;
}
/* The first token of sequence b; 0 in a dense call. */
__device__ __forceinline__ int drop_q0(const Problem &p, int b) {
    return p.cu_q ? min(max(p.cu_q[b * p.cu_q_step], 0), p.total_q) : 0;
}

/* Bit e of the result is 1 if the row keeps key 8 g + e. */
__device__ __forceinline__ uint32_t drop_eight(const PhiloxSeed &seed, uint32_t most, int64_t row,
                                               int g) {
    const uint4 c = philox(seed, (uint64_t)gk_attn_counter_high(row) << 32 |
                                     gk_attn_counter_low(row, (uint32_t)g));
    uint32_t bits = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const uint32_t word = philox_word(c, e);
        if (word << 16 <= most) bits |= 1u << 2 * e;
        if (word <= most) bits |= 2u << 2 * e;
    }
    return bits;
}

/* The factor of one probability: 0 or 1 / (1 - p); 1 without dropout. */
template <class W> __device__ __forceinline__ W drop_of(const Dropout &d, int64_t row, int key) {
    if (d.most == 0) return 1;
    const uint32_t bits = drop_eight(PhiloxSeed(d.seed, d.seed_step), d.most, row, key / 8);
    return bits >> key % 8 & 1 ? (W)d.wide_factor : 0;
}

/* The bitwise or of x over the four lanes of a quad. */
__device__ __forceinline__ uint32_t quad_or(uint32_t x) {
    x |= __shfl_xor_sync(0xffffffffu, x, 1);
    return x | __shfl_xor_sync(0xffffffffu, x, 2);
}

/* Zeroes the elements of s [M][N][4] that are dropped. Rows are queries, columns are keys. row0:
 * the number of the lane's first row; row_step: from one row's number to the next; key0: the key of
 * the tile's column 0. */
template <int M, int N>
__device__ __forceinline__ void drop_keys(float (&s)[M][N][4], const Dropout &d, int64_t row0,
                                          int64_t row_step, int key0) {
    constexpr int WORDS = (N + 3) / 4;
    const PhiloxSeed seed(d.seed, d.seed_step);
    const int quad = threadIdx.x % 4, g = key0 / 8, skip = key0 % 8;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int64_t row = row0 + (16 * m + 8 * r) * row_step;
            uint32_t w[WORDS + 1];
#pragma unroll
            for (int i = 0; i < WORDS; ++i)
                w[i] = quad_or(drop_eight(seed, d.most, row, g + 4 * i + quad) << 8 * quad);
            /* this word is the same in all lanes */
            w[WORDS] = skip ? drop_eight(seed, d.most, row, g + 4 * WORDS) : 0;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                /* bit 0 is the lane's first column */
                w[i] = __funnelshift_r(w[i], w[i + 1], skip) >> 2 * quad;
#pragma unroll
                for (int n = 4 * i; n < 4 * i + 4 && n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e)
                        s[m][n][2 * r + e] =
                            w[i] & 1u << (8 * (n % 4) + e) ? s[m][n][2 * r + e] : 0;
            }
        }
}

/* The kept bits for accumulators whose rows are M x 16 keys and whose columns are queries. Returns
 * the bits of the lane's two queries in the n-th group of eight. Bit 16 m + 8 (r / 2) belongs to
 * accumulator [m][n][r]. row0: the number of the query in column 0; key0: the warp's first key, a
 * multiple of 16. */
template <int M>
__device__ __forceinline__ uint2 keep_of_rows(const Dropout &d, int64_t row0, int64_t row_step,
                                              int key0, int n) {
    constexpr int GROUPS = 2 * M < 4 ? 2 * M : 4;
    static_assert(M <= 2, "a word is 32 keys");
    const int lane = threadIdx.x % 32, quad = lane % 4, part = quad % GROUPS;
    const PhiloxSeed seed(d.seed, d.seed_step);
    const uint32_t mine =
        quad_or(drop_eight(seed, d.most, row0 + (8 * n + lane / 4) * row_step, key0 / 8 + part)
                << 8 * part);
    return make_uint2(__shfl_sync(0xffffffffu, mine, 8 * quad) >> lane / 4,
                      __shfl_sync(0xffffffffu, mine, 8 * quad + 4) >> lane / 4);
}

#endif
