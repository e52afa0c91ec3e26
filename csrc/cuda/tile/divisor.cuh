/* SPDX-License-Identifier: BSD-3-Clause */
/* divisor.cuh: division by a number known before the launch. It takes one multiplication instead
 * of a chain of 30 instructions (Granlund and Montgomery, 1994). */
#ifndef GPUKERN_TILE_DIVISOR_CUH
#define GPUKERN_TILE_DIVISOR_CUH

#include <stdint.h>

#include "../layout/layout.cuh"

/* n / by for n < 2^31. */
struct Divisor {
    uint32_t by, factor, shift; /* factor = 2^shift / by, rounded up */
    GK_HD uint32_t into(uint32_t n) const { return (uint32_t)((uint64_t)n * factor >> shift); }
};

inline Divisor divisor_of(uint32_t by) {
    uint32_t shift = 31;
    while (((uint64_t)1 << (shift - 31)) < by) ++shift;
    return {by, (uint32_t)((((uint64_t)1 << shift) + by - 1) / by), shift};
}

#endif
