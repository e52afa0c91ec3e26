// SPDX-License-Identifier: BSD-3-Clause
// bar: barriers of some of a block's warps. Checked against PTX ISA 9.0.
#ifndef GPUKERN_PTX_BAR_CUH
#define GPUKERN_PTX_BAR_CUH

// bar.sync a, b; sm_20. The warps that name barrier `id` (1 to 15; 0 is __syncthreads) wait until
// `threads` of them, a multiple of 32, have come; what they wrote to shared memory before is seen
// by all of them after it.
static __device__ __forceinline__ void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive a, b; sm_20. These warps count at the barrier and go on.
static __device__ __forceinline__ void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#endif
