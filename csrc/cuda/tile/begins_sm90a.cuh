/* SPDX-License-Identifier: BSD-3-Clause */
/* begins_sm90a.cuh: a kernel whose launch, and that of the kernel behind it, overlap the end of the
 * kernel in front. Small kernels between products take little longer than a launch, so this hides
 * most of what they cost: the product behind one sets up its barriers, and may fetch its weight,
 * while the small kernel runs. Launches without the attribute behave as with BeginsAlone. */
#ifndef GPUKERN_CUDA_TILE_BEGINS_SM90A_CUH
#define GPUKERN_CUDA_TILE_BEGINS_SM90A_CUH

#include "../ptx/griddepcontrol.cuh"

struct BeginsOverlapped {
    static constexpr bool overlaps = true;
    static __device__ __forceinline__ void begin() {
        griddepcontrol_launch_dependents();
        griddepcontrol_wait();
    }
};

#endif
