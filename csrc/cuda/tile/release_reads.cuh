// SPDX-License-Identifier: BSD-3-Clause
// release_reads: releases a stage of a ring (tma_ring.cuh) that has been read by ordinary loads.
#ifndef GPUKERN_TILE_RELEASE_READS_CUH
#define GPUKERN_TILE_RELEASE_READS_CUH

#include "../ptx/laneid.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"

// Releases a stage that this warp has read by ordinary loads to the copy that refills it. Without
// the fence the loads may still be on their way when the arrival is counted: they wait while WGMMA
// uses shared memory, for longer than the copy takes (docs/worklog/flash_attn.md). All lanes.
// arrives: the lane that arrives for the warp.
static __device__ __forceinline__ void release_reads(smem_addr barrier_s, bool arrives) {
    fence_proxy_async();
    __syncwarp();
    if (arrives) mbarrier_arrive(barrier_s);
}
static __device__ __forceinline__ void release_reads(smem_addr barrier_s) {
    release_reads(barrier_s, laneid() == 0);
}

#endif
