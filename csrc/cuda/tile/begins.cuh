/* SPDX-License-Identifier: BSD-3-Clause */
/* begins.cuh: how a kernel begins. A kernel with such a policy as a template argument calls
 * `begin` first, in all threads of every block, and is launched with after_previous = `overlaps`.
 * tile/begins_sm90a.cuh has Hopper's. */
#ifndef GPUKERN_CUDA_TILE_BEGINS_CUH
#define GPUKERN_CUDA_TILE_BEGINS_CUH

/* After the previous kernel has ended. */
struct BeginsAlone {
    static constexpr bool overlaps = false;
    static __device__ __forceinline__ void begin() {}
};

#endif
