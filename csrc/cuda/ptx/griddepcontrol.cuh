// SPDX-License-Identifier: BSD-3-Clause
// griddepcontrol: lets a kernel start while the previous one on the stream drains. Checked
// against PTX ISA 9.0; sm_90.
#ifndef GPUKERN_PTX_GRIDDEPCONTROL_CUH
#define GPUKERN_PTX_GRIDDEPCONTROL_CUH

// griddepcontrol.wait: waits until the kernels that this launch depends on have ended and
// everything they wrote is visible to this grid. It returns at once if the launch asked for no
// overlap. It must precede the thread's first access to global memory, or the thread must wait
// for one that called it. Every block must call it, or this kernel could end before the one it
// follows.
static __device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// griddepcontrol.launch_dependents: once all blocks have called it or ended, the next kernel's
// blocks may start. It says nothing about the visibility of what this kernel wrote.
static __device__ __forceinline__ void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#endif
