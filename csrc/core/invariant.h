/* SPDX-License-Identifier: BSD-3-Clause */
/* invariant.h: the switch of batch invariance (docs/numerics.md). It belongs to the process.
 *
 * While it is on, the bits of a row of a product, a norm or an attention depend on that row and
 * what it is multiplied by. Plans then choose as for every number of rows, and split k by K and N.
 */
#ifndef GPUKERN_INVARIANT_H
#define GPUKERN_INVARIANT_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

extern int32_t gk_invariant_on;
static inline bool gk_batch_invariant(void) {
    return __atomic_load_n(&gk_invariant_on, __ATOMIC_RELAXED) != 0;
}

/* Returns the state before. */
bool gk_set_batch_invariant(bool on);

#ifdef __cplusplus
}
#endif
#endif
