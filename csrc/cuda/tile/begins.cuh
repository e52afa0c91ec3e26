/* SPDX-License-Identifier: BSD-3-Clause */
/* begins.cuh: policies that say when a kernel starts relative to the previous one. A kernel takes a
 * policy as a template argument. It calls the policy's `begin` first, in all threads of every
 * block, and is launched with after_previous = `overlaps`. begins_sm90a.cuh has the policy that
 * overlaps. */
#ifndef GPUKERN_CUDA_TILE_BEGINS_CUH
#define GPUKERN_CUDA_TILE_BEGINS_CUH

/* The kernel starts after the previous kernel has ended. */
struct BeginsAlone {
    static constexpr bool overlaps = false;
    static __device__ __forceinline__ void begin() {}
};

#endif
