/* SPDX-License-Identifier: BSD-3-Clause */
/* plan.h: a call that is planned once. ops/ and the entry points plan it, find the memory that the
 * plan asks for, and run it; nothing is decided twice. Not installed: what a plan holds may change
 * with every version. */
#ifndef GPUKERN_PLAN_H
#define GPUKERN_PLAN_H

#include "gpukern.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    GK_PLAN_OWN_BYTES = 1536
};

/* What one kernel will do for one call. Plain data, valid as long as the call's arguments are. */
typedef struct gk_plan {
    /* the instance: a gk_cpu_instance (cpu/kernels.h) or a gk_cuda_instance (cuda/kernels.h) */
    const void *kernel;
    size_t workspace_bytes; /* what run takes, aligned to 64 bytes */
    double us;              /* expected time; 0 where the kernels of this family have no estimate */
    /* for gk_explanation */
    int64_t tile[4], tasks, chunks;
    double waves;   /* 0: tasks over the blocks that run at once */
    bool preferred; /* the instance is the one that gk_gemm_prefer asked for */
    /* the kernel's own: the problem, where operands are read, the grid; of the type that its file
     * declares. Tensor maps ask for the alignment */
#ifdef __cplusplus
    alignas(128)
#else
    _Alignas(128)
#endif
        unsigned char own[GK_PLAN_OWN_BYTES];
} gk_plan;

/* An empty plan, by `kernel`; NULL: the family that plans it names one. */
static inline gk_plan *gk_plan_begin(gk_plan *plan, const void *kernel) {
    plan->kernel = kernel;
    plan->workspace_bytes = 0;
    plan->us = 0;
    for (int i = 0; i < 4; ++i) plan->tile[i] = 0;
    plan->tasks = 0;
    plan->chunks = 1;
    plan->waves = 0;
    plan->preferred = false;
    return plan;
}

/* A plan's own part as `type`, which must be plain data and fit: GK_PLAN_HOLDS at the head of the
 * file that declares it. */
#ifdef __cplusplus
}
template <class Own> inline Own &gk_own(gk_plan *plan) {
    static_assert(sizeof(Own) <= GK_PLAN_OWN_BYTES && alignof(Own) <= alignof(gk_plan),
                  "a plan holds it");
    return *reinterpret_cast<Own *>(plan->own);
}
template <class Own> inline const Own &gk_own(const gk_plan *plan) {
    return gk_own<Own>(const_cast<gk_plan *>(plan));
}
extern "C" {
#else
#define GK_PLAN_HOLDS(type) \
    _Static_assert(sizeof(type) <= GK_PLAN_OWN_BYTES, "a plan holds a " #type)
#define GK_OWN(type, plan) ((type *)(void *)(plan)->own)
#define GK_OWN_CONST(type, plan) ((const type *)(const void *)(plan)->own)
#endif

/* How often this thread checked a call's arguments, planned a call, and asked a kernel or family
 * for a plan that it gave; tests hold each to once a call. */
typedef struct gk_call_counts {
    int64_t checks, plans, kernel_plans;
} gk_call_counts;
GK_API void gk_count_calls(gk_call_counts *counts);

#ifdef __cplusplus
}
#endif
#endif
