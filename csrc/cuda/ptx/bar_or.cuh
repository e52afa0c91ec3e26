// SPDX-License-Identifier: BSD-3-Clause
// bar_or: a barrier of some of a block's warps that also returns the OR of a condition over all
// of their threads. Checked against PTX ISA 9.0.
#ifndef GPUKERN_PTX_BAR_OR_CUH
#define GPUKERN_PTX_BAR_OR_CUH

// bar.red.or.pred p, a, b, c; sm_20. A bar_sync of whole warps. Returns, in every thread,
// whether `holds` is non-zero in any thread.
static __device__ __forceinline__ bool bar_or(int id, int threads, int holds) {
    int any;
    asm volatile("{\n\t.reg .pred p, q;\n\tsetp.ne.b32 p, %3, 0;\n\t"
                 "bar.red.or.pred q, %1, %2, p;\n\tselp.b32 %0, 1, 0, q;\n\t}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"(holds)
                 : "memory");
    return any;
}

#endif
