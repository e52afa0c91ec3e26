// laneid: this thread's place in its warp, read anew. Checked against PTX ISA 9.0.
#ifndef GPUKERN_PTX_LANEID_CUH
#define GPUKERN_PTX_LANEID_CUH

// mov.u32 of %laneid, sm_20. Volatile: what is computed from it is computed where it is used, and holds no register in a
// loop that has none to spare.
static __device__ __forceinline__ int laneid() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

#endif
