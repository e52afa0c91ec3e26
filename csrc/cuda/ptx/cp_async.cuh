// SPDX-License-Identifier: BSD-3-Clause
// cp_async: asynchronous copies from global to shared memory. Checked against PTX ISA 9.0;
// sm_80.
//
// The thread that issued a copy sees it after its wait_group, other threads after a barrier that
// follows that wait. Any thread may issue. Both addresses are multiples of the width.
#ifndef GPUKERN_PTX_CP_ASYNC_CUH
#define GPUKERN_PTX_CP_ASYNC_CUH

#include "smem.cuh"

// cp.async.cg, 16 bytes, cached in L2 only. Reads the first src_bytes (0 to 16) and writes zeros
// for the rest. With 0, nothing is read and src may point anywhere.
static __device__ __forceinline__ void cp_async_cg_16(smem_addr dst_s, const void *src_g,
                                                      int src_bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst_s),
                 "l"(__cvta_generic_to_global(src_g)), "r"(src_bytes)
                 : "memory");
}

static __device__ __forceinline__ void cp_async_cg_16(smem_addr dst_s, const void *src_g) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst_s),
                 "l"(__cvta_generic_to_global(src_g))
                 : "memory");
}

// The same with L2::128B: L2 may fetch the whole 128 bytes around the address. For rows that are
// read to their end.
static __device__ __forceinline__ void cp_async_cg_16_l2_128b(smem_addr dst_s, const void *src_g,
                                                              int src_bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst_s),
                 "l"(__cvta_generic_to_global(src_g)), "r"(src_bytes)
                 : "memory");
}

static __device__ __forceinline__ void cp_async_cg_16_l2_128b(smem_addr dst_s, const void *src_g) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(dst_s),
                 "l"(__cvta_generic_to_global(src_g))
                 : "memory");
}

// cp.async.ca, BYTES = 4, 8 or 16, cached in L1 too. Writes zeros after src_bytes, as above.
template <int BYTES>
static __device__ __forceinline__ void cp_async_ca(smem_addr dst_s, const void *src_g,
                                                   int src_bytes = BYTES) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async.ca copies 4, 8 or 16 bytes");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst_s),
                 "l"(__cvta_generic_to_global(src_g)), "n"(BYTES), "r"(src_bytes)
                 : "memory");
}

// cp.async.commit_group: this thread's copies since its last commit form a group, which may be
// empty.
static __device__ __forceinline__ void cp_async_commit_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group: waits until at most PENDING of this thread's newest groups are in flight.
template <int PENDING> static __device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif
