/* SPDX-License-Identifier: BSD-3-Clause */
/* dispatch.h: what dispatch.c offers to the files of csrc/api/ once a call's arguments are
 * checked. args points to the op's argument struct of gpukern.h. */
#ifndef GPUKERN_DISPATCH_H
#define GPUKERN_DISPATCH_H

#include "internal.h"
#include "op.h"
#include "../cuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans the call with the kernel preferred for it, or else with the first kernel that serves it. */
gk_status gk_dispatch_plan(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                           gk_plan *plan);
gk_status gk_dispatch_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                          void *workspace, size_t workspace_bytes);

/* For callers that size the workspace in one call and run in another. The size is enough for the
 * preferred kernel and for the default one; the call runs the one its workspace is enough for. */
gk_status gk_dispatch_workspace(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                                size_t *bytes);
gk_status gk_dispatch_call(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                           void *workspace, size_t workspace_bytes);

/* Fills an explanation except for bytes, flops and bound_us. gk_dispatch_bound computes bound_us
 * from bytes and flops. */
gk_status gk_dispatch_explain(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                              gk_explanation *out);
void gk_dispatch_bound(const gk_context *ctx, gk_dtype dtype, gk_explanation *out);

/* Number of times this thread asked a kernel or a table of kernels for a plan, whether or not it
 * gave one. For the tests. */
GK_API int64_t gk_count_asked(void);

/* 0 if the result is not wanted. */
static inline double gk_tensor_bytes(const gk_tensor *t) {
    return t->data ? (double)gk_bytes_of(t->dtype, gk_numel(t)) : 0;
}

/* cuda/tables.c: the tables of an op, best first. The first table that plans a call on the device's
 * architecture serves it. A build without nvcc has none for most ops. */
const gk_cuda_table *const *gk_cuda_tables(gk_op op, int *num_tables);
/* True if the kernels of a table, by its place in gk_cuda_tables, are for this kind of call: calls
 * with dropout, for example, have kernels of their own. */
bool gk_cuda_takes(gk_op op, int table, const void *args);
/* NULL with a failure text if the context's device does not exist. */
const gk_gpu *gk_dispatch_gpu(const gk_context *ctx);
gk_status gk_dispatch_plan_default(const gk_context *ctx, gk_op op, gk_dtype dtype,
                                   const void *args, gk_plan *plan);
/* Plans the call with this one instance of gemm. False if the instance does not serve it. */
bool gk_dispatch_plan_gemm_instance(const gk_cuda_instance *instance, const gk_context *ctx,
                                    const gk_gpu *gpu, const gk_gemm_args *args, gk_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
