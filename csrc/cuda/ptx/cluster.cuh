// SPDX-License-Identifier: BSD-3-Clause
// cluster: blocks that run on neighbouring SMs and access each other's shared memory; and
// setmaxnreg, which moves registers between warpgroups. Checked against PTX ISA 9.0; sm_90,
// setmaxnreg sm_90a.
#ifndef GPUKERN_PTX_CLUSTER_CUH
#define GPUKERN_PTX_CLUSTER_CUH

#include <stdint.h>

// %cluster_ctarank: this block's index in its cluster.
static __device__ __forceinline__ unsigned cluster_ctarank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// barrier.cluster.arrive.relaxed and .wait: waits until all threads of the cluster have arrived.
// It does not order memory. Writes that others must see need a separate fence before it.
static __device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

static __device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

static __device__ __forceinline__ void barrier_cluster() {
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

// mapa: the address that corresponds to at_s in block `rank` of the cluster.
static __device__ __forceinline__ uint32_t mapa(uint32_t at_s, unsigned rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at_s), "r"(rank));
    return there;
}

// st.async.v4.f32: stores 16 bytes at an address from mapa. The bytes count at the barrier,
// which must lie in the same block as the destination. Whoever waits for the barrier's phase
// sees them. Without a cluster, or in a cluster of one block, it is an illegal instruction.
static __device__ __forceinline__ void st_async_128(uint32_t at, float a, float b, float c, float d,
                                                    uint32_t barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, "
                 "%3, %4}, [%5];" ::"r"(at),
                 "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier)
                 : "memory");
}

// setmaxnreg: sets the number of registers of each thread of this warpgroup, a multiple of 8 from
// 24 to 256. All of its warps execute it. inc waits until other warpgroups have released enough.
// The kernel must have launch bounds.
template <int REGISTERS> static __device__ __forceinline__ void setmaxnreg_inc() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256,
                  "what setmaxnreg takes");
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS> static __device__ __forceinline__ void setmaxnreg_dec() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256,
                  "what setmaxnreg takes");
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

#endif
