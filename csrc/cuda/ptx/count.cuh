// SPDX-License-Identifier: BSD-3-Clause
// A count of blocks that have come, in global memory. Checked against PTX ISA 9.0; sm_70.
#ifndef GPUKERN_PTX_COUNT_CUH
#define GPUKERN_PTX_COUNT_CUH

// atom.acq_rel.gpu: adds one; returns the count before. What this thread did before, and others of its block before a barrier with
// it, is seen by whoever counts later, and by others of that block behind a barrier (PTX ISA, Memory Consistency Model).
static __device__ __forceinline__ unsigned atom_inc_acq_rel(unsigned *count_g) {
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(count_g))
                 : "memory");
    return before;
}

#endif
