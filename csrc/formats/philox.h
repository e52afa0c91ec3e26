/* SPDX-License-Identifier: BSD-3-Clause */
/* philox.h: Philox4x32-10, a counter-based random generator (Salmon, Moraes, Dror and Shaw 2011,
 * "Parallel random numbers: as easy as 1, 2, 3"). It makes four 32-bit words from a 128-bit
 * counter and a 64-bit key. cuda/rows/philox.cuh gives the same bits. */
#ifndef GPUKERN_PHILOX_H
#define GPUKERN_PHILOX_H

#include "../core/internal.h"

#define GK_PHILOX_A 0xD2511F53u
#define GK_PHILOX_B 0xCD9E8D57u
#define GK_PHILOX_KEY_A 0x9E3779B9u
#define GK_PHILOX_KEY_B 0xBB67AE85u

static inline void gk_philox(uint64_t seed, uint64_t offset, uint64_t index, uint32_t word[4]) {
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    uint32_t c[4] = {(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)offset,
                     (uint32_t)(offset >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = (uint64_t)GK_PHILOX_A * c[0], b = (uint64_t)GK_PHILOX_B * c[2];
        const uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k0, (uint32_t)b,
                                  (uint32_t)(a >> 32) ^ c[3] ^ k1, (uint32_t)a};
        memcpy(c, next, sizeof c);
        k0 += GK_PHILOX_KEY_A;
        k1 += GK_PHILOX_KEY_B;
    }
    memcpy(word, c, sizeof c);
}

/* Dropout keeps an element if its word is below this, (1 - p) 2^32. */
static inline uint64_t gk_keep_below(double p) { return (uint64_t)((1 - p) * 4294967296.0 + 0.5); }
/* The factor of kept elements. */
static inline double gk_keep_scale(double p) { return p < 1 ? 1 / (1 - p) : 0; }

/* Word i of a seed tensor [2] int64 in host memory. */
static inline uint64_t gk_seed_word(const gk_tensor *seed, int i) {
    return (uint64_t)((const int64_t *)seed->data)[i * seed->stride[0]];
}

/* ---- AdamW: stochastic rounding to bfloat16 -------------------------------------------------- */
/* The counter of elements 4 q .. 4 q + 3 of a tensor of the call. No tensor has 2^46 elements,
 * so counters are distinct. */
#if defined(__CUDACC__)
__host__ __device__
#endif
    static inline uint64_t gk_adamw_counter(int64_t tensor, int64_t q) {
    return ((uint64_t)tensor << 46) ^ (uint64_t)q;
}

/* Rounds x up or down to bfloat16 with probabilities by distance, so that the expected value is
 * x. `word` is uniform. */
static inline uint16_t gk_f32_to_bf16_stochastic(float x, uint32_t word) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7f800000u) == 0x7f800000u) return gk_f32_to_bf16(x); /* inf, NaN */
    return (uint16_t)((u + (word & 0xffff)) >> 16);
}

#endif
