// SPDX-License-Identifier: BSD-3-Clause
// opaque: hides the origin of a value from the compiler. Any thread; no architecture.
#ifndef GPUKERN_PTX_OPAQUE_CUH
#define GPUKERN_PTX_OPAQUE_CUH

#include <stdint.h>

// Emits no instruction. The compiler must treat x as a new value from here on, so it neither
// moves computations with x before this point nor merges them with equal ones.
static __device__ __forceinline__ void opaque(float &x) { asm volatile("" : "+f"(x)); }
static __device__ __forceinline__ void opaque(uint32_t &x) { asm volatile("" : "+r"(x)); }

// mov.b32 of 0 at this point of the code, not where x is first used.
static __device__ __forceinline__ void zero_here(float &x) {
    asm volatile("mov.b32 %0, 0;" : "=f"(x));
}

#endif
