// SPDX-License-Identifier: BSD-3-Clause
// release_reads: releases a stage of a ring (tma_ring.cuh) that has been read by ordinary loads.
#ifndef GPUKERN_TILE_RELEASE_READS_CUH
#define GPUKERN_TILE_RELEASE_READS_CUH

#include "../ptx/laneid.cuh"
#include "../ptx/mbarrier.cuh"
#include "../ptx/tma.cuh"

// Releases a stage to the copy that refills it, after this warp has read the stage by ordinary
// loads. All lanes call it. arrives: true in the lane that arrives for the warp.
//
// The fence is needed. Without it, loads may still be in flight when the arrival is counted. While
// WGMMA uses shared memory they can wait for longer than the copy takes
// (docs/worklog/flash_attn.md).
static __device__ __forceinline__ void release_reads(smem_addr barrier_s, bool arrives) {
    fence_proxy_async();
    __syncwarp();
    if (arrives) mbarrier_arrive(barrier_s);
}
static __device__ __forceinline__ void release_reads(smem_addr barrier_s) {
    release_reads(barrier_s, laneid() == 0);
}

#endif
