// SPDX-License-Identifier: BSD-3-Clause
// griddepcontrol: kernels that begin while the one before them on the stream drains. Checked
// against PTX ISA 9.0; sm_90.
#ifndef GPUKERN_PTX_GRIDDEPCONTROL_CUH
#define GPUKERN_PTX_GRIDDEPCONTROL_CUH

// griddepcontrol.wait: until the kernels that this one was launched after have ended and all they
// wrote is seen by this grid. Before the first access to global memory, of this thread or of who
// waits for it; at once where the launch asked for no overlap. Every block must, or the kernel
// could end before the one it follows.
static __device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// griddepcontrol.launch_dependents: when all blocks have said so or ended, the next kernel's blocks
// may begin. Promises nothing of what this kernel wrote.
static __device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#endif
