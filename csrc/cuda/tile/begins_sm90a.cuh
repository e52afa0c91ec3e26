/* SPDX-License-Identifier: BSD-3-Clause */
/* begins_sm90a.cuh: the policy (begins.cuh) by which a kernel's launch overlaps the end of the
 * previous kernel, and lets the launch of the next kernel overlap its own work. It uses Hopper's
 * programmatic dependent launch. A small kernel between two products takes little longer than a
 * launch, so this hides most of its time. The product after it sets up its barriers, and may
 * prefetch its weights, while the small kernel runs. If the kernel is launched without the
 * attribute, it behaves as with BeginsAlone. */
#ifndef GPUKERN_CUDA_TILE_BEGINS_SM90A_CUH
#define GPUKERN_CUDA_TILE_BEGINS_SM90A_CUH

#include "../ptx/griddepcontrol.cuh"

/* `begin` allows the next launch, then waits until the previous kernel's results are visible. */
struct BeginsOverlapped {
    static constexpr bool overlaps = true;
    static __device__ __forceinline__ void begin() {
        griddepcontrol_launch_dependents();
        griddepcontrol_wait();
    }
};

#endif
