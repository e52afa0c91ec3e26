// SPDX-License-Identifier: BSD-3-Clause
// mbarrier: barriers in shared memory that count arrivals and the bytes of copies. Checked
// against PTX ISA 9.0; sm_90.
//
// A barrier is 8 bytes, aligned to 8. A phase ends when `count` arrivals have come and as many
// bytes as they announced. The next phase has the same count. A waiter names the parity of the
// phase that it waits for: 0 for the first, 1 for the second, and so on alternately.
#ifndef GPUKERN_PTX_MBARRIER_CUH
#define GPUKERN_PTX_MBARRIER_CUH

#include "smem.cuh"

// mbarrier.init: one thread, before any other use. Others see it after fence_mbarrier_init and a
// barrier.
static __device__ __forceinline__ void mbarrier_init(smem_addr barrier_s, unsigned count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier_s), "r"(count) : "memory");
}

// fence.mbarrier_init.release.cluster: makes the inits before it visible to copies, and to the
// other blocks of the cluster once they have passed the cluster's barrier.
static __device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive: one arrival. Whoever waits for the phase sees what this thread wrote before.
// Loads of this thread from shared memory may still be in flight, because they wait while WGMMA
// reads there. If a copy will overwrite what they read, fence_proxy_async must come before the
// arrival.
static __device__ __forceinline__ void mbarrier_arrive(smem_addr barrier_s) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier_s) : "memory");
}

// mapa and a remote mbarrier.arrive: one arrival at the barrier at the same address in block
// `rank` of the cluster, which may be this block. It signals that what this thread has read from
// shared memory and used may be overwritten. .release.cluster would also order what comes before
// it, but it would wait for the thread's writes to global memory, too (0.6 us).
static __device__ __forceinline__ void mbarrier_arrive_cluster(smem_addr barrier_s, unsigned rank) {
    asm volatile("{\n\t"
                 ".reg .b32 there;\n\t"
                 "mapa.shared::cluster.u32 there, %0, %1;\n\t"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t"
                 "}" ::"r"(barrier_s),
                 "r"(rank)
                 : "memory");
}

// mbarrier.arrive.expect_tx: one arrival. The phase ends only after `bytes` more have been
// copied.
static __device__ __forceinline__ void mbarrier_arrive_expect_tx(smem_addr barrier_s,
                                                                 unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_s),
                 "r"(bytes)
                 : "memory");
}

// mbarrier.try_wait.parity: returns true if the phase of this parity has ended; otherwise it
// sleeps for up to a time that the hardware sets.
static __device__ __forceinline__ bool mbarrier_try_wait_parity(smem_addr barrier_s,
                                                                unsigned parity) {
    uint32_t ended;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t"
                 "}"
                 : "=r"(ended)
                 : "r"(barrier_s), "r"(parity)
                 : "memory");
    return ended;
}

#endif
