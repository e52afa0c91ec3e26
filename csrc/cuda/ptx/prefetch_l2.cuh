// SPDX-License-Identifier: BSD-3-Clause
// prefetch_l2: what lies at an address brought into L2. Any thread; checked against PTX ISA 9.0.
#ifndef GPUKERN_PTX_PREFETCH_L2_CUH
#define GPUKERN_PTX_PREFETCH_L2_CUH

// prefetch.global.L2, sm_20: the line that holds *p_g, or no more of it than its sector. Nothing
// waits for it. Volatile: stays where it stands.
static __device__ __forceinline__ void prefetch_l2(const void *p_g) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p_g)));
}

#endif
