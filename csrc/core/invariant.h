/* SPDX-License-Identifier: BSD-3-Clause */
/* invariant.h: the switch of batch-invariant products on the CPU (docs/numerics.md).
 *
 * While it is on, the bits of a row of gemm and weight_gemm depend on that row and the other
 * operand, not on the number of rows. It belongs to the process: plans read it, any thread may. */
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
