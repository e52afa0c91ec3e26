// SPDX-License-Identifier: BSD-3-Clause
// bulk_cluster: a copy from this block's shared memory to that of another block of the cluster.
// Checked against PTX ISA 9.0; sm_90.
#ifndef GPUKERN_PTX_BULK_CLUSTER_CUH
#define GPUKERN_PTX_BULK_CLUSTER_CUH

#include "smem.cuh"

// cp.async.bulk, shared::cta to shared::cluster: `bytes`, a multiple of 16 as all addresses are,
// count at the barrier, which lies in the same block as the destination; both are addresses of
// mapa. What other threads stored at src_s must be behind fence_proxy_async and a barrier. One
// thread. The source may be overwritten, and its block leave, once the other block has seen the
// barrier's phase.
static __device__ __forceinline__ void bulk_copy_cluster(uint32_t dst, smem_addr src_s,
                                                         unsigned bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], "
                 "[%1], %2, [%3];" ::"r"(dst),
                 "r"(src_s), "r"(bytes), "r"(barrier)
                 : "memory");
}

#endif
