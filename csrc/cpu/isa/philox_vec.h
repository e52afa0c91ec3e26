/* SPDX-License-Identifier: BSD-3-Clause */
/* philox_vec.h: the words of csrc/philox.h for W counters at once. */
#ifndef GPUKERN_PHILOX_VEC_H
#define GPUKERN_PHILOX_VEC_H

#include "../../philox.h"
#include "vec.h"

typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint64_t vul __attribute__((vector_size(8 * W)));

enum {
    PHILOX_BLOCK = 4 * W /* words that one call gives */
};

/* Words of counters [index, index + W), four of each, in order. */
INLINE void philox_block(uint64_t seed, uint64_t offset, uint64_t index, uint32_t to[PHILOX_BLOCK]) {
    vul at;
    for (int i = 0; i < W; ++i) at[i] = index + (uint64_t)i;
    const vu zero = {0};
    vu c0 = __builtin_convertvector(at, vu), c1 = __builtin_convertvector(at >> 32, vu);
    vu c2 = zero + (uint32_t)offset, c3 = zero + (uint32_t)(offset >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        const vul a = __builtin_convertvector(c0, vul) * (uint64_t)GK_PHILOX_A;
        const vul b = __builtin_convertvector(c2, vul) * (uint64_t)GK_PHILOX_B;
        c0 = __builtin_convertvector(b >> 32, vu) ^ c1 ^ k0, c1 = __builtin_convertvector(b, vu);
        c2 = __builtin_convertvector(a >> 32, vu) ^ c3 ^ k1, c3 = __builtin_convertvector(a, vu);
        k0 += GK_PHILOX_KEY_A, k1 += GK_PHILOX_KEY_B;
    }
    for (int i = 0; i < W; ++i) to[4 * i] = c0[i], to[4 * i + 1] = c1[i], to[4 * i + 2] = c2[i], to[4 * i + 3] = c3[i];
}

#endif
