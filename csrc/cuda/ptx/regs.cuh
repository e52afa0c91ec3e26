// SPDX-License-Identifier: BSD-3-Clause
// regs: arithmetic and conversions for which C has no name, and global loads and stores with cache
// hints. Any thread. Checked against PTX ISA 9.0. Functions that are not volatile use registers
// only.
#ifndef GPUKERN_PTX_REGS_CUH
#define GPUKERN_PTX_REGS_CUH

#include <stdint.h>

// ex2.approx.ftz.f32, sm_20: 2^x, relative error 2^-22.5. 2^-inf is 0; subnormal results are 0.
static __device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// lg2.approx.ftz.f32, sm_20: log2(x), absolute error 2^-22 near 1; log2 of 0 is -inf.
static __device__ __forceinline__ float lg2_approx_ftz(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// rcp.approx.ftz.f32, sm_20: 1 / x, relative error 2^-23; 1 / inf is 0.
static __device__ __forceinline__ float rcp_approx_ftz(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// max.NaN.f32, sm_80: NaN if one of the two is NaN.
static __device__ __forceinline__ float max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// tanh.approx.f32, sm_75: relative error 2^-11, which only suffices for results of 16 bits.
static __device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// cvt.rn.bf16x2.f32 and cvt.rn.f16x2.f32, sm_80: two floats to nearest even; lo goes to the low
// half.
static __device__ __forceinline__ uint32_t cvt_rn_bf16x2(float lo, float hi) {
    uint32_t y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

static __device__ __forceinline__ uint32_t cvt_rn_f16x2(float lo, float hi) {
    uint32_t y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

// cvt.rna.tf32.f32, sm_80: float bits rounded to 10 mantissa bits, ties away from zero.
static __device__ __forceinline__ uint32_t cvt_rna_tf32(float x) {
    uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// prmt.b32, sm_20: byte i of the result is byte (selector >> 4i) & 7 of the eight bytes b:a (a
// is bytes 0 to 3).
static __device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
    return y;
}

// mov.u32 of %tid.x, sm_20. Volatile, so that it is read where it is used. It is for rarely run
// code behind a loop that has no register left for the value.
static __device__ __forceinline__ uint32_t mov_tid_x() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// Emits no instruction. It forces x to be computed or loaded before this point, not where it is
// first used.
static __device__ __forceinline__ void have(int x) { asm volatile("" ::"r"(x) : "memory"); }
static __device__ __forceinline__ void have(int64_t x) { asm volatile("" ::"l"(x) : "memory"); }
static __device__ __forceinline__ void have(double x) { asm volatile("" ::"d"(x) : "memory"); }
static __device__ __forceinline__ void have(const void *x) { asm volatile("" ::"l"(x) : "memory"); }

// red.relaxed.gpu.global.add.v4.f32, sm_90: four atomic additions, in undefined order, BYTES
// after `at`. at: a global address; the sum is a multiple of 16.
template <int BYTES>
static __device__ __forceinline__ void red_add_128(uint64_t at, float a, float b, float c,
                                                   float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0 + %5], {%1, %2, %3, %4};" ::"l"(at), "f"(a),
                 "f"(b), "f"(c), "f"(d), "n"(BYTES)
                 : "memory");
}

// ---- global memory, 16 bytes; the address is a multiple of 16 -----------------------------------

// ld.global.u8 whose value is not used. It brings the sector into L1. Nothing waits for it.
static __device__ __forceinline__ void prefetch_l1(const void *p_g) {
    asm volatile(
        "{\n\t.reg .u8 x;\n\tld.global.u8 x, [%0];\n\t}" ::"l"(__cvta_generic_to_global(p_g))
        : "memory");
}

// ld.global.v4.u32 if `really`, else zeros. Volatile, so that consecutive loads are all issued
// before the first value is used.
static __device__ __forceinline__ uint4 ld_global_if_128(const void *p_g, bool really) {
    uint4 v;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "setp.ne.u32 p, %5, 0;\n\t"
                 "mov.b32 %0, 0;\n\t"
                 "mov.b32 %1, 0;\n\t"
                 "mov.b32 %2, 0;\n\t"
                 "mov.b32 %3, 0;\n\t"
                 "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t"
                 "}"
                 : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
                 : "l"(__cvta_generic_to_global(p_g)), "r"((uint32_t)really)
                 : "memory");
    return v;
}

// st.global.v4.u32, sm_20.
static __device__ __forceinline__ void st_global_128(void *p_g, uint4 v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p_g)),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// The same with an L2 policy (tma.cuh), sm_80.
static __device__ __forceinline__ void st_global_128_by(void *p_g, uint4 v, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(
                     __cvta_generic_to_global(p_g)),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
}

#endif
