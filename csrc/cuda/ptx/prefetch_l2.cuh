// SPDX-License-Identifier: BSD-3-Clause
// prefetch_l2: brings an address's line into L2. Any thread. Checked against PTX ISA 9.0.
#ifndef GPUKERN_PTX_PREFETCH_L2_CUH
#define GPUKERN_PTX_PREFETCH_L2_CUH

// prefetch.global.L2, sm_20: fetches the line of *p_g, or only its sector. Nothing waits for it.
// Volatile, so that it stays in place.
static __device__ __forceinline__ void prefetch_l2(const void *p_g) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p_g)));
}

#endif
