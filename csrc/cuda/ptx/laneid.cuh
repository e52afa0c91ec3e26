// SPDX-License-Identifier: BSD-3-Clause
// laneid: this thread's place in its warp, read anew, and one thread of a warp. Checked against PTX
// ISA 9.0.
#ifndef GPUKERN_PTX_LANEID_CUH
#define GPUKERN_PTX_LANEID_CUH

#include <stdint.h>

// mov.u32 of %laneid, sm_20. Volatile: what is computed from it is computed where it is used, and
// holds no register in a loop that has none to spare.
static __device__ __forceinline__ int laneid() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// elect.sync, sm_90. All of a warp's threads: true in one of them. What stands behind it is
// compiled for one thread: tma takes its operands from registers of the warp, which for any other
// condition means a loop over its threads.
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
