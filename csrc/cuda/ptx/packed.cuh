// SPDX-License-Identifier: BSD-3-Clause
// packed: instructions that only the products of packed weights use. Checked against PTX ISA
// 9.0; sm_90, wgmma sm_90a.
#ifndef GPUKERN_PTX_PACKED_CUH
#define GPUKERN_PTX_PACKED_CUH

#include "cluster.cuh"
#include "smem.cuh"
#include "wgmma.cuh"

// bulk_load (tma.cuh) with an L2 policy.
static __device__ __forceinline__ void bulk_load_by(smem_addr dst_s, const void *src_g,
                                                    unsigned bytes, smem_addr barrier_s,
                                                    uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(dst_s),
                 "l"(__cvta_generic_to_global(src_g)), "r"(bytes), "r"(barrier_s), "l"(policy)
                 : "memory");
}

// ld.shared.u8, sm_20.
static __device__ __forceinline__ uint32_t ld_shared_8(smem_addr at_s) {
    uint32_t x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(at_s) : "memory");
    return x;
}

// %clusterid.x: the index of this block's cluster in the grid; in a launch without clusters, the
// block's index.
static __device__ __forceinline__ unsigned clusterid_x() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}

// st.async.v2.f32: as st_async_128 (cluster.cuh), with 8 bytes.
static __device__ __forceinline__ void st_async_64(uint32_t at, float a, float b,
                                                   uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(at),
        "f"(a), "f"(b), "r"(barrier)
        : "memory");
}

// ld.shared::cluster.v4.f32: loads 16 bytes at an address from mapa.
static __device__ __forceinline__ float4 ld_cluster_f32x4(uint32_t at) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

// wgmma_rs (wgmma.cuh) for a K-major b and 32 columns.
template <class T> struct wgmma_rs_32;
#define GK_RS_32(T, TYPE)                                                                   \
    template <> struct wgmma_rs_32<T> {                                                     \
        static __device__ __forceinline__ void run(float (&d)[16], const uint32_t *a,       \
                                                   uint64_t b) {                            \
            asm volatile(                                                                   \
                "{\n\t.reg .pred p;\n\tsetp.eq.u32 p, 0, 0;\n\t"                            \
                "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                 \
                " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
                "{%16, %17, %18, %19}, %20, p, 1, 1, 0;\n\t}"                               \
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),   \
                  "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
                  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                        \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                      \
        }                                                                                   \
    };
GK_RS_32(__nv_bfloat16, "bf16")
GK_RS_32(__half, "f16")
#undef GK_RS_32

// d += a b, where b lies [n][k].
template <class T, int N>
static __device__ __forceinline__ void wgmma_rs_add(float (&d)[N / 2], const uint32_t *a,
                                                    uint64_t b) {
    if constexpr (N == 32)
        wgmma_rs_32<T>::run(d, a, b);
    else
        wgmma_rs<T, N, 0>(d, a, b, true);
}

#endif
