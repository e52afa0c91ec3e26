/* SPDX-License-Identifier: BSD-3-Clause */
/* dispatch.h: what the files of csrc/api/ ask of dispatch.c once a call's arguments are checked.
 * `args` is the op's argument struct of gpukern.h. */
#ifndef GPUKERN_DISPATCH_H
#define GPUKERN_DISPATCH_H

#include "internal.h"
#include "op.h"
#ifdef GPUKERN_HAS_CUDA
#include "../cuda/kernels.h"
#endif

/* The call's plan: by the kernel that was preferred for it, else by the first family that serves
 * it. */
gk_status gk_dispatch_plan(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                           gk_plan *plan);
gk_status gk_dispatch_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                          void *workspace, size_t workspace_bytes);

/* For callers that size the workspace in one call and run in another. The size is enough for the
 * preferred kernel and for the default one. The run takes whichever of the two fits the workspace.
 */
gk_status gk_dispatch_workspace(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                                size_t *bytes);
gk_status gk_dispatch_call(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                           void *workspace, size_t workspace_bytes);

/* All of an explanation but bytes, flops and bound_us, which gk_dispatch_bound adds from the other
 * two. */
gk_status gk_dispatch_explain(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                              gk_explanation *out);
void gk_dispatch_bound(const gk_context *ctx, gk_dtype dtype, gk_explanation *out);

/* How often this thread asked a kernel or a table of kernels for a plan, also in vain. For tests.
 */
GK_API int64_t gk_count_asked(void);

/* 0 for a result that is not wanted. */
static inline double gk_tensor_bytes(const gk_tensor *t) {
    return t->data ? (double)gk_bytes_of(t->dtype, gk_numel(t)) : 0;
}

#ifdef GPUKERN_HAS_CUDA
/* cuda/tables.c: the tables of an op, best first. The first table that plans a call on the device's
 * architecture serves it. */
const gk_cuda_table *const *gk_cuda_tables(gk_op op, int *num_tables);
/* Whether a table is asked for a plan of this call. Attention with dropout, and attention whose
 * results are wider than q, have tables of their own. */
bool gk_cuda_takes(const gk_cuda_table *table, gk_op op, const void *args);
/* NULL and a failure text where the context's device is none. */
const gk_gpu *gk_dispatch_gpu(const gk_context *ctx);
gk_status gk_dispatch_plan_default(const gk_context *ctx, gk_op op, gk_dtype dtype,
                                   const void *args, gk_plan *plan);
/* Plans the call by one instance of gemm alone; false: it does not serve it. */
bool gk_dispatch_plan_gemm_instance(const gk_cuda_instance *row, const gk_context *ctx,
                                    const gk_gpu *gpu, const gk_gemm_args *args, gk_plan *plan);
#endif

#endif
