// SPDX-License-Identifier: BSD-3-Clause
// tma: copies boxes of tensors between global and shared memory; one thread issues a copy.
// Checked against PTX ISA 9.0; sm_90. The tensor map is a kernel parameter (__grid_constant__),
// so its address is a generic one.
#ifndef GPUKERN_PTX_TMA_CUH
#define GPUKERN_PTX_TMA_CUH

#include "smem.cuh"

// Where a box begins. Dimension 0 is the dense one and must begin at a multiple of 16 bytes;
// otherwise the kernel ends with an illegal instruction. Elements outside the tensor are read as
// zeros and not written.
struct tma_at {
    int c[5];
};

// cp.async.bulk.tensor.5d, global to shared: copies a box to dst_s; its bytes count at the
// barrier. One thread.
static __device__ __forceinline__ void tma_load_5d(smem_addr dst_s, const void *map,
                                                   const tma_at &at, smem_addr barrier_s) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(dst_s),
                 "l"(map), "r"(barrier_s), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]),
                 "r"(at.c[4])
                 : "memory");
}

// cp.async.bulk.prefetch.tensor.5d: brings a box into L2. One thread; nothing waits for it.
static __device__ __forceinline__ void tma_prefetch_5d(const void *map, const tma_at &at) {
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
        "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]), "r"(at.c[4])
        : "memory");
}

// cp.async.bulk, global to shared: copies `bytes`, which count at the barrier. `bytes` and both
// addresses are multiples of 16. Any thread.
static __device__ __forceinline__ void bulk_load(smem_addr dst_s, const void *src_g, unsigned bytes,
                                                 smem_addr barrier_s) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(dst_s),
        "l"(__cvta_generic_to_global(src_g)), "r"(bytes), "r"(barrier_s)
        : "memory");
}

// cp.async.bulk.prefetch: brings `bytes` into L2, a multiple of 16 as the address is. Any thread;
// nothing waits for it.
static __device__ __forceinline__ void bulk_prefetch(const void *src_g, unsigned bytes) {
    asm volatile(
        "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(src_g)),
        "r"(bytes)
        : "memory");
}

// L2 eviction policies for accesses that take one (createpolicy.fractional.L2). First out: for
// data that is read once. Last out: for data that is read again soon.
static __device__ __forceinline__ uint64_t l2_first_out() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

static __device__ __forceinline__ uint64_t l2_last_out() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// tma_load_5d with such a policy.
static __device__ __forceinline__ void tma_load_5d_by(smem_addr dst_s, const void *map,
                                                      const tma_at &at, smem_addr barrier_s,
                                                      uint64_t policy) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
                 "L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst_s),
                 "l"(map), "r"(barrier_s), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]),
                 "r"(at.c[4]), "l"(policy)
                 : "memory");
}

// tma_load_5d into every block of the cluster whose bit is set in `blocks`. The destination and
// the barrier have the same addresses in each block.
static __device__ __forceinline__ void tma_load_5d_multicast(smem_addr dst_s, const void *map,
                                                             const tma_at &at, smem_addr barrier_s,
                                                             uint16_t blocks) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
                 "multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst_s),
                 "l"(map), "r"(barrier_s), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]),
                 "r"(at.c[4]), "h"(blocks)
                 : "memory");
}

// cp.async.bulk.tensor.5d, shared to global. What other threads stored in the box must precede a
// fence_proxy_async and a barrier. One thread; the copy belongs to its next group. If a row ends
// within a 16-byte chunk, TMA writes the whole chunk (seen on an H200). So rows of a stored
// tensor must be multiples of 16 bytes.
static __device__ __forceinline__ void tma_store_5d(const void *map, const tma_at &at,
                                                    smem_addr src_s) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, "
                 "%6}], [%1];" ::"l"(map),
                 "r"(src_s), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]), "r"(at.c[4])
                 : "memory");
}

// cp.async.bulk, shared to global: contiguous bytes. Both addresses and `bytes` are multiples of
// 16. Ordered as tma_store_5d.
static __device__ __forceinline__ void bulk_store(void *dst_g, smem_addr src_s, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(dst_g)),
                 "r"(src_s), "r"(bytes)
                 : "memory");
}

// cp.async.bulk.commit_group: this thread's stores since its last commit form a group.
static __device__ __forceinline__ void tma_store_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group.read: waits until shared memory has been read for all but PENDING of
// this thread's newest groups.
template <int PENDING> static __device__ __forceinline__ void tma_store_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// cp.async.bulk.wait_group: waits until all but PENDING of this thread's newest groups have been
// written and are visible to this thread.
template <int PENDING> static __device__ __forceinline__ void tma_store_wait_group() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

// fence.proxy.async.shared::cta: orders this thread's stores to shared memory before later TMA
// copies and WGMMA that read it.
static __device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// prefetch.tensormap: brings the map's 128 bytes into TMA's cache.
static __device__ __forceinline__ void prefetch_tensormap(const void *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

#endif
