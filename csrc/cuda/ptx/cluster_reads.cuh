// SPDX-License-Identifier: BSD-3-Clause
// cluster_reads: reads of other blocks' shared memory in a cluster, and the barrier that orders
// them. Checked against PTX ISA 9.0; sm_90.
#ifndef GPUKERN_PTX_CLUSTER_READS_CUH
#define GPUKERN_PTX_CLUSTER_READS_CUH

#include <stdint.h>

// barrier.cluster.arrive.release and .wait.acquire: waits until all threads of the cluster have
// arrived. They then see what each stored to shared memory before.
static __device__ __forceinline__ void barrier_cluster_ordered() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// ld.shared::cluster.v4.u32: loads 16 bytes at an address from mapa.
static __device__ __forceinline__ uint4 ld_cluster_128(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

#endif
