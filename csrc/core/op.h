/* SPDX-License-Identifier: BSD-3-Clause */
/* op.h: for every op of ops.def its number and the functions named by its stem. */
#ifndef GPUKERN_OP_H
#define GPUKERN_OP_H

#include "gpukern_distill.h"
#include "gpukern_moe.h"
#include "gpukern_quant.h"
#include "gpukern_sample.h"
#include "gpukern_train.h"
#include "io.h"
#include "plan.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gk_op {
#define OP(NAME, stem, arguments, first) GK_OP_##NAME,
#include "ops.def"
    GK_NUM_OPS
} gk_op;

/* gk_check_<op>     api/<op>.c: checks the call and finds its results.
 *                   A failure's text does not name the entry point.
 * gk_cost_<op>      api/<op>.c: bytes and FLOPs of a checked call.
 * gk_ref_<op>       ref/: plain loops with double accumulation, for every dtype, without workspace.
 *                   The tests compare with it, and it serves float64.
 * gk_plan_<op>      plans a checked call.
 * gk_run_<op>       runs that plan with the same arguments. It ignores their workspace.
 * gk_describe_<op>  what gk_explain_<op> does after its checks. */
#define OP(NAME, stem, arguments, first)                                                       \
    gk_status gk_check_##stem(const gk_context *ctx, const arguments *args, gk_io *io);        \
    void gk_cost_##stem(const gk_context *ctx, const arguments *args, gk_explanation *out);    \
    void gk_ref_##stem(const gk_context *ctx, const arguments *args);                          \
    gk_status gk_plan_##stem(const gk_context *ctx, const arguments *args, gk_plan *plan);     \
    gk_status gk_run_##stem(const gk_context *ctx, const arguments *args, const gk_plan *plan, \
                            void *work, size_t work_bytes);                                    \
    gk_status gk_describe_##stem(const gk_context *ctx, const arguments *args, gk_explanation *out);
#include "ops.def"

#ifdef __cplusplus
}
#endif
#endif
