/* SPDX-License-Identifier: BSD-3-Clause */
/* philox_vec.h: the words of csrc/formats/philox.h for W counters at once. */
#ifndef GPUKERN_PHILOX_VEC_H
#define GPUKERN_PHILOX_VEC_H

#include "../../formats/philox.h"
#include "vec.h"

typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint64_t vul __attribute__((vector_size(8 * W)));

enum {
    PHILOX_BLOCK = 4 * W /* words of one call */
};

/* The four words of W counters; low and high are the counters' halves. */
INLINE void philox_words(uint64_t seed, uint64_t offset, vu low, vu high, vu word[4]) {
    const vu zero = {0};
    vu c0 = low, c1 = high, c2 = zero + (uint32_t)offset, c3 = zero + (uint32_t)(offset >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        const vul a = __builtin_convertvector(c0, vul) * (uint64_t)GK_PHILOX_A;
        const vul b = __builtin_convertvector(c2, vul) * (uint64_t)GK_PHILOX_B;
        c0 = __builtin_convertvector(b >> 32, vu) ^ c1 ^ k0;
        c1 = __builtin_convertvector(b, vu);
        c2 = __builtin_convertvector(a >> 32, vu) ^ c3 ^ k1;
        c3 = __builtin_convertvector(a, vu);
        k0 += GK_PHILOX_KEY_A;
        k1 += GK_PHILOX_KEY_B;
    }
    word[0] = c0;
    word[1] = c1;
    word[2] = c2;
    word[3] = c3;
}

/* The four words of each of the counters [index, index + W), in order. */
INLINE void philox_block(uint64_t seed, uint64_t offset, uint64_t index,
                         uint32_t to[PHILOX_BLOCK]) {
    vul at;
    for (int i = 0; i < W; ++i) at[i] = index + (uint64_t)i;
    vu word[4];
    philox_words(seed, offset, __builtin_convertvector(at, vu),
                 __builtin_convertvector(at >> 32, vu), word);
    for (int i = 0; i < W; ++i)
        for (int e = 0; e < 4; ++e) to[4 * i + e] = word[e][i];
}

#endif
