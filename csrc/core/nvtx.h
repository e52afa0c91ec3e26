/* SPDX-License-Identifier: BSD-3-Clause */
/* nvtx.h: ranges on Nsight Systems' timeline around the host work of a call, named by the kernel
 * instance that serves it.
 *
 * cmake -DGPUKERN_NVTX=ON turns them on. Without it the macro is the call alone and the library
 * has no symbol of NVTX. NVTX 3 is header-only: it looks for a profiler at the first range, and
 * without one a range costs a few ns. */
#ifndef GPUKERN_NVTX_H
#define GPUKERN_NVTX_H

#ifdef GPUKERN_NVTX
#include <nvtx3/nvToolsExt.h>
/* Evaluates `call`, a gk_status, inside a range of this name. */
#define GK_IN_RANGE(status, name, call) \
    do {                                \
        nvtxRangePushA(name);           \
        (status) = (call);              \
        nvtxRangePop();                 \
    } while (0)
#else
#define GK_IN_RANGE(status, name, call) ((status) = (call))
#endif

#endif
