// SPDX-License-Identifier: BSD-3-Clause
// flag_sys: flags by which GPUs of one host signal each other, and the clock that limits a wait.
// Checked against PTX ISA 9.0; sm_70.
#ifndef GPUKERN_PTX_FLAG_SYS_CUH
#define GPUKERN_PTX_FLAG_SYS_CUH

// st.release.sys: stores the value. Whoever acquires it sees what this thread did before, and
// what other threads of its block did before a barrier with it: causality order is transitive
// (PTX ISA, Memory Consistency Model).
static __device__ __forceinline__ void st_release_sys(unsigned *flag_g, unsigned value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(flag_g)),
                 "r"(value)
                 : "memory");
}

// ld.acquire.sys
static __device__ __forceinline__ unsigned ld_acquire_sys(const unsigned *flag_g) {
    unsigned value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                 : "=r"(value)
                 : "l"(__cvta_generic_to_global(flag_g))
                 : "memory");
    return value;
}

// %globaltimer: nanoseconds, the same on all SMs of a GPU. It advances in steps of about a
// microsecond.
static __device__ __forceinline__ uint64_t mov_globaltimer() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}

#endif
