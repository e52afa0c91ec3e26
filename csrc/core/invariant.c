/* SPDX-License-Identifier: BSD-3-Clause */
#include "invariant.h"

int32_t gk_invariant_on;

bool gk_set_batch_invariant(bool on) {
    return __atomic_exchange_n(&gk_invariant_on, on, __ATOMIC_RELAXED) != 0;
}
