// SPDX-License-Identifier: BSD-3-Clause
// laneid: reads a thread's lane again, and elects one thread of a warp. Checked against PTX ISA
// 9.0.
#ifndef GPUKERN_PTX_LANEID_CUH
#define GPUKERN_PTX_LANEID_CUH

#include <stdint.h>

// mov.u32 of %laneid, sm_20. Volatile, so that values derived from it are computed where they are
// used. They then occupy no register in a loop before, which may have none to spare.
static __device__ __forceinline__ int laneid() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// elect.sync, sm_90. All threads of a warp call it; it is true in one of them. The code behind
// it is compiled for one thread. That matters for TMA, which takes its operands from uniform
// registers: behind any other condition the compiler emits a loop over the warp's threads.
static __device__ __forceinline__ bool elect_one() {
    uint32_t one;
    asm volatile("{\n\t"
                 ".reg .pred p;\n\t"
                 "elect.sync _|p, 0xffffffff;\n\t"
                 "selp.u32 %0, 1, 0, p;\n\t"
                 "}"
                 : "=r"(one));
    return one;
}

#endif
