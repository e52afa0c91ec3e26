// SPDX-License-Identifier: BSD-3-Clause
// bulk_cluster: a copy from this block's shared memory to that of another block of the cluster.
// Checked against PTX ISA 9.0; sm_90.
#ifndef GPUKERN_PTX_BULK_CLUSTER_CUH
#define GPUKERN_PTX_BULK_CLUSTER_CUH

#include "smem.cuh"

// cp.async.bulk, shared::cta to shared::cluster. Copies `bytes`, which count at the barrier.
// `bytes` and all addresses are multiples of 16. The barrier lies in the same block as the
// destination; both are addresses from mapa. What other threads stored at src_s must precede a
// fence_proxy_async and a barrier. One thread. Once the other block has seen the barrier's
// phase, the source may be overwritten and its block may exit.
static __device__ __forceinline__ void bulk_copy_cluster(uint32_t dst, smem_addr src_s,
                                                         unsigned bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], "
                 "[%1], %2, [%3];" ::"r"(dst),
                 "r"(src_s), "r"(bytes), "r"(barrier)
                 : "memory");
}

#endif
