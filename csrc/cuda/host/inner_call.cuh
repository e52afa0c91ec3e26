/* SPDX-License-Identifier: BSD-3-Clause */
/* inner_call.cuh: lets one call (the outer call) run another call's kernel as one of its steps (the
 * inner call). An example is a gemm of operands that an earlier step has decoded into the
 * workspace.
 *
 * The workspace's address is unknown while planning. So the inner call is planned with
 * `unplaced_workspace()`, an address that is aligned but otherwise meaningless. At run time the
 * inner call is planned again. Its workspace follows the first `front` bytes of the outer call's.
 */
#ifndef GPUKERN_CUDA_HOST_INNER_CALL_CUH
#define GPUKERN_CUDA_HOST_INNER_CALL_CUH

#include "../kernels.h"
#include "../../core/op.h"

constexpr int64_t WORKSPACE_ALIGN = 1024;

inline char *unplaced_workspace() { return (char *)WORKSPACE_ALIGN; }

/* Places the operands of an inner call in the workspace, one behind the other. */
struct InnerOperands {
    char *base;
    size_t bytes = 0;

    void *take(int64_t size) {
        void *at = base + bytes;
        bytes += (size_t)gk_round_up(size, WORKSPACE_ALIGN);
        return at;
    }
};

/* Copies the inner plan's tiles and tasks to the outer plan, which `explain` shows. */
inline void plan_around(const gk_plan &inner, size_t front, gk_plan *to) {
    for (int i = 0; i < 4; ++i) to->tile[i] = inner.tile[i];
    to->tasks = inner.tasks;
    to->chunks = inner.chunks;
    to->waves = inner.waves;
    to->workspace_bytes = front + inner.workspace_bytes;
}

/* True if the plan made at run time needs no more workspace than the first one. */
inline bool inner_fits(const gk_plan &inner, size_t front, const gk_plan *outer) {
    return front + inner.workspace_bytes <= outer->workspace_bytes;
}

inline gk_status run_inner(const gk_context *ctx, const void *args, const gk_plan &inner,
                           void *workspace, size_t front) {
    return ((const gk_cuda_instance *)inner.kernel)
        ->run(ctx, args, &inner, (char *)workspace + front);
}

#endif
