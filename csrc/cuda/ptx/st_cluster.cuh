// SPDX-License-Identifier: BSD-3-Clause
// st_cluster: stores into the shared memory of the other blocks of a cluster, and the barrier
// after which they are visible. Checked against PTX ISA 9.0; sm_90.
#ifndef GPUKERN_PTX_ST_CLUSTER_CUH
#define GPUKERN_PTX_ST_CLUSTER_CUH

#include "cluster.cuh"

// barrier.cluster.arrive.release and .wait.acquire: all threads that have waited see what a
// thread stored before it arrived, also in other blocks' shared memory.
static __device__ __forceinline__ void barrier_cluster_arrive_release() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

static __device__ __forceinline__ void barrier_cluster_wait_acquire() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// st.shared::cluster.f32: stores at an address from mapa. Visible after a cluster barrier with
// .release and .acquire.
static __device__ __forceinline__ void st_shared_cluster_f32(uint32_t at, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}

#endif
