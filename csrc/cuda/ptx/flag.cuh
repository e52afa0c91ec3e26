// SPDX-License-Identifier: BSD-3-Clause
// flag: counters in global memory by which blocks of one grid signal each other. Checked against
// PTX ISA 9.0; sm_70.
#ifndef GPUKERN_PTX_FLAG_CUH
#define GPUKERN_PTX_FLAG_CUH

// red.release.gpu: adds `amount`. Whoever acquires the count sees what this thread did before,
// and what other threads of its block did before a barrier with it: causality order is
// transitive (PTX ISA, Memory Consistency Model).
static __device__ __forceinline__ void red_add_release(unsigned *counter_g, unsigned amount = 1) {
    asm volatile(
        "red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(counter_g)),
        "r"(amount)
        : "memory");
}

// atom.acq_rel.gpu: adds one and returns the count before. A thread that counts later sees what
// this thread did before, and what others of its block did before a barrier with it. Others of
// the later thread's block see it after a barrier (PTX ISA, Memory Consistency Model).
static __device__ __forceinline__ unsigned atom_inc_acq_rel(unsigned *counter_g) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(counter_g))
                 : "memory");
    return before;
}

// ld.acquire.gpu
static __device__ __forceinline__ unsigned ld_acquire(const unsigned *counter_g) {
    unsigned value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                 : "=r"(value)
                 : "l"(__cvta_generic_to_global(counter_g))
                 : "memory");
    return value;
}

// fence.proxy.async.global: orders what this thread saw of global memory before its TMA copies.
static __device__ __forceinline__ void fence_proxy_async_global() {
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Waits until the counter has reached `count`.
static __device__ __forceinline__ void wait_count(const unsigned *counter_g, unsigned count) {
    while (ld_acquire(counter_g) < count) __nanosleep(64);
}

#endif
