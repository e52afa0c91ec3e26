// SPDX-License-Identifier: BSD-3-Clause
// bulk_reduce: a copy from shared to global memory that adds. Checked against PTX ISA 9.0; sm_90.
#ifndef GPUKERN_PTX_BULK_REDUCE_CUH
#define GPUKERN_PTX_BULK_REDUCE_CUH

#include "smem.cuh"

// cp.reduce.async.bulk.add.f32. Adds contiguous floats to those at dst_g. Each addition is
// atomic; their order is undefined. Both addresses and `bytes` are multiples of 16. As with
// bulk_store, what other threads stored must precede a fence_proxy_async and a barrier, and the
// copy belongs to the thread's next group.
static __device__ __forceinline__ void bulk_reduce_add_f32(float *dst_g, smem_addr src_s,
                                                           unsigned bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(dst_g)),
                 "r"(src_s), "r"(bytes)
                 : "memory");
}

#endif
