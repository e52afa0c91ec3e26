/* SPDX-License-Identifier: BSD-3-Clause */
/* sm_limit.c: the limit on the number of SMs that persistent kernels use, one for the process.
 * gk_gpu_of (cuda/host/described.c) describes the GPU to every planner as if it had only so many
 * SMs. */
#include "checks.h"
#include "gpukern.h"

static int32_t limit; /* 0: no limit */

int32_t gk_sm_limit(void) { return __atomic_load_n(&limit, __ATOMIC_RELAXED); }

static gk_status limit_sms(int32_t sms) {
    GK_REQUIRE(sms >= 0, "sms must be 0 (all) or more, got %d", (int)sms);
    __atomic_store_n(&limit, sms, __ATOMIC_RELAXED);
    return GK_OK;
}

gk_status gk_limit_sms(int32_t sms) { return gk_named("gk_limit_sms", limit_sms(sms)); }
