// SPDX-License-Identifier: BSD-3-Clause
// bar: barriers of some of a block's warps. Checked against PTX ISA 9.0.
#ifndef GPUKERN_PTX_BAR_CUH
#define GPUKERN_PTX_BAR_CUH

// bar.sync a, b; sm_20. Waits at barrier `id` (1 to 15; 0 is __syncthreads) until `threads`
// threads, a multiple of 32, have arrived. All of them then see what the others wrote to shared
// memory before.
static __device__ __forceinline__ void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive a, b; sm_20. Arrives at the barrier without waiting.
static __device__ __forceinline__ void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif
