// SPDX-License-Identifier: BSD-3-Clause
// smem: addresses of shared memory, and loads and stores with them. Checked against PTX ISA 9.0.
#ifndef GPUKERN_PTX_SMEM_CUH
#define GPUKERN_PTX_SMEM_CUH

#include <stdint.h>

// A byte address in shared memory. 32 bits take half the registers of a pointer, and ldmatrix
// and cp.async take 32 bits.
typedef uint32_t smem_addr;

// cvta.to.shared.u64, sm_20. Any thread; orders nothing. p must point into this block's shared
// memory.
static __device__ __forceinline__ smem_addr cvta_to_shared(const void *p) {
    return (smem_addr)__cvta_generic_to_shared(p);
}

// ld.shared.{u16, u32, v2.u32, v4.u32}, sm_20. Any thread. The address is a multiple of the
// width. Sees what other threads stored before the last barrier.
static __device__ __forceinline__ uint16_t ld_shared_16(smem_addr at_s) {
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at_s) : "memory");
    return x;
}

static __device__ __forceinline__ uint32_t ld_shared_32(smem_addr at_s) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(at_s) : "memory");
    return x;
}

static __device__ __forceinline__ uint2 ld_shared_64(smem_addr at_s) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at_s) : "memory");
    return v;
}

static __device__ __forceinline__ uint4 ld_shared_128(smem_addr at_s) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at_s)
                 : "memory");
    return v;
}

// The same as floats. Loading WGMMA accumulators as integers would make the compiler move them
// while WGMMA still runs.
static __device__ __forceinline__ float ld_shared_f32(smem_addr at_s) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at_s) : "memory");
    return x;
}

// st.shared.{u8, u16, u32, v2.u32, v4.u32}, sm_20. Any thread. The address is a multiple of the
// width. Other threads see it after the next barrier.
static __device__ __forceinline__ void st_shared_8(smem_addr at_s, uint8_t x) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(at_s), "r"((unsigned)x) : "memory");
}

static __device__ __forceinline__ void st_shared_16(smem_addr at_s, uint16_t x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at_s), "h"(x) : "memory");
}

static __device__ __forceinline__ void st_shared_32(smem_addr at_s, uint32_t x) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at_s), "r"(x) : "memory");
}

static __device__ __forceinline__ void st_shared_64(smem_addr at_s, uint2 v) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(at_s), "r"(v.x), "r"(v.y) : "memory");
}

// The same as floats: storing WGMMA accumulators as integers would make the compiler move them.
static __device__ __forceinline__ void st_shared_f32(smem_addr at_s, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at_s), "f"(x) : "memory");
}

static __device__ __forceinline__ void st_shared_64(smem_addr at_s, float2 v) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at_s), "f"(v.x), "f"(v.y) : "memory");
}

static __device__ __forceinline__ void st_shared_128(smem_addr at_s, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at_s), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}

static __device__ __forceinline__ void st_shared_128(smem_addr at_s, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at_s), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

#endif
