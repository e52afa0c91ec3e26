/* SPDX-License-Identifier: BSD-3-Clause */
/* nvtx.h: ranges for Nsight Systems' timeline around what the host does for a call, named by the
 * kernel instance that serves it.
 *
 * cmake -DGPUKERN_NVTX=ON turns them on; without it the macro is the call alone, and no symbol of
 * NVTX is in the library. NVTX 3 is headers alone: it looks for a profiler at the first range, and
 * where none is attached a range costs a few ns. */
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
