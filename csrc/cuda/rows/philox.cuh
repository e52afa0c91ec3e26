// SPDX-License-Identifier: BSD-3-Clause
/* philox.cuh: Philox4x32-10 on the device. It gives the same words as csrc/formats/philox.h, which
 * names the source. All threads of a grid have the same keys, so a round costs a thread two wide
 * products and two three-way logical operations. adamw.cu, dropout.cu and attention's dropout use
 * it. */
#ifndef GPUKERN_CUDA_ROWS_PHILOX_CUH
#define GPUKERN_CUDA_ROWS_PHILOX_CUH

#include "../../formats/philox.h"

struct PhiloxSeed {
    uint64_t seed, offset;
    /* from a tensor [2] int64 with stride `stride` */
    __device__ __forceinline__ PhiloxSeed(const int64_t *at, int64_t stride)
        : seed((uint64_t)at[0]), offset((uint64_t)at[stride]) {}
};

/* The four words of counter (index, offset). */
__device__ __forceinline__ uint4 philox(const PhiloxSeed &s, uint64_t index) {
    uint32_t k0 = (uint32_t)s.seed, k1 = (uint32_t)(s.seed >> 32);
    uint4 c = make_uint4((uint32_t)index, (uint32_t)(index >> 32), (uint32_t)s.offset,
                         (uint32_t)(s.offset >> 32));
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = (uint64_t)GK_PHILOX_A * c.x, b = (uint64_t)GK_PHILOX_B * c.z;
        c = make_uint4((uint32_t)(b >> 32) ^ c.y ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ c.w ^ k1,
                       (uint32_t)a);
        k0 += GK_PHILOX_KEY_A;
        k1 += GK_PHILOX_KEY_B;
    }
    return c;
}

__device__ __forceinline__ uint32_t philox_word(const uint4 &c, int i) {
    return i == 0 ? c.x : i == 1 ? c.y : i == 2 ? c.z : c.w;
}

#endif
