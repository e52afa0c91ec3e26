/* SPDX-License-Identifier: BSD-3-Clause */
/* invariant.c: the switch of batch-invariant products, one for the process (invariant.h). */
#include "invariant.h"

int32_t gk_invariant_on;

bool gk_set_batch_invariant(bool on) {
    return __atomic_exchange_n(&gk_invariant_on, on, __ATOMIC_RELAXED) != 0;
}
