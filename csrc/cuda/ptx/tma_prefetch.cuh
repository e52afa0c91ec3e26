// SPDX-License-Identifier: BSD-3-Clause
// tma_prefetch: boxes of tensors brought into L2. Checked against PTX ISA 9.0; sm_90.
#ifndef GPUKERN_PTX_TMA_PREFETCH_CUH
#define GPUKERN_PTX_TMA_PREFETCH_CUH

#include "tma.cuh"

// cp.async.bulk.prefetch.tensor.5d.L2: the box of a tma_load_5d that comes later. One thread. All
// blocks write through L2, so it may stand before griddepcontrol_wait.
static __device__ __forceinline__ void tma_prefetch_5d(const void *map, const tma_at &at) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
        "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]), "r"(at.c[4])
        : "memory");
}

#endif
