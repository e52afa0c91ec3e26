/* SPDX-License-Identifier: BSD-3-Clause */
/* divisor.h: division by a number known before the launch. It takes one multiplication instead
 * of a chain of 30 instructions (Granlund and Montgomery, 1994). C, so that plans hold divisors. */
#ifndef GPUKERN_TILE_DIVISOR_H
#define GPUKERN_TILE_DIVISOR_H

#include <stdint.h>

#ifdef __cplusplus
#include "../layout/layout.cuh"
#endif

/* n / by for n < 2^31. */
typedef struct Divisor {
    uint32_t by, factor, shift; /* factor = 2^shift / by, rounded up */
#ifdef __cplusplus
    GK_HD uint32_t into(uint32_t n) const { return (uint32_t)((uint64_t)n * factor >> shift); }
#endif
} Divisor;

static inline Divisor divisor_of(uint32_t by) {
    uint32_t shift = 31;
    while (((uint64_t)1 << (shift - 31)) < by) ++shift;
    const Divisor d = {by, (uint32_t)((((uint64_t)1 << shift) + by - 1) / by), shift};
    return d;
}

#endif
