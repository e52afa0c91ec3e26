// SPDX-License-Identifier: BSD-3-Clause
// opaque: values that the compiler must take as they are. Any thread; no architecture.
#ifndef GPUKERN_PTX_OPAQUE_CUH
#define GPUKERN_PTX_OPAQUE_CUH

#include <stdint.h>

// No instruction: x is another value from here on, so nothing made of it is moved to before this or
// merged with its like.
static __device__ __forceinline__ void opaque(float &x) { asm volatile("" : "+f"(x)); }
static __device__ __forceinline__ void opaque(uint32_t &x) { asm volatile("" : "+r"(x)); }

// mov.b32 of 0 where it stands, not where x is first used.
static __device__ __forceinline__ void zero_here(float &x) {
    asm volatile("mov.b32 %0, 0;" : "=f"(x));
}

#endif
