// SPDX-License-Identifier: BSD-3-Clause
// pipeline: a ring of STAGES stages that cp.async fills ahead of the arithmetic, one group of
// copies per stage.
//
//   cp_ring<STAGES> ring                                        before the loop, STAGES = 3
//   for j in 0 .. STAGES - 2                                    stage    0    1    2
//       if (j < steps) copy step j into stage j                 holds    j=0  j=1  -
//       ring.commit()
//   for j in 0 .. steps - 1
//       ring.wait()                                             step j has arrived, for all threads
//       if (j + STAGES - 1 < steps) copy that step into stage ring.write
//       ring.commit()                                           always: wait counts groups
//       compute on stage ring.read
//       ring.advance()
//
// The one barrier per step closes both hazards. After it, copies of step j are visible to every
// thread. And every thread has finished reading the stage that is written next.
#ifndef GPUKERN_TILE_PIPELINE_CUH
#define GPUKERN_TILE_PIPELINE_CUH

#include "../ptx/cp_async.cuh"

template <int STAGES> struct cp_ring {
    static_assert(STAGES >= 2, "a stage to read and a stage to fill");
    int read = 0, write = STAGES - 1;

    __device__ __forceinline__ void commit() { cp_async_commit_group(); }

    // For rings that the whole block fills and reads.
    __device__ __forceinline__ void wait() {
        cp_async_wait_group<STAGES - 2>();
        __syncthreads();
    }

    // For rings of a single warp; no other warp waits.
    __device__ __forceinline__ void wait_warp() {
        cp_async_wait_group<STAGES - 2>();
        __syncwarp();
    }

    __device__ __forceinline__ void advance() {
        write = read;
        read = read + 1 == STAGES ? 0 : read + 1;
    }
};

#endif
