/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_attn_fp8.h: the fourth page of the C API, attention of 8-bit floats. gpukern.h has the
 * conventions; include this page beside it. */
#ifndef GPUKERN_ATTN_FP8_H
#define GPUKERN_ATTN_FP8_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How P V is summed. Tensor cores of 8-bit floats keep 14 bits of a running sum and cut off the
 * rest, so that what the values of v have in common is lost over thousands of keys. Kernels that
 * multiply 16 or 32 bits sum in float32 whatever is asked for. */
typedef enum gk_attn_accumulate {
    GK_ATTN_AUTO = 0,   /* fast with a v_mean, precise without */
    GK_ATTN_FAST = 1,   /* one sum over all keys */
    GK_ATTN_PRECISE = 2 /* the sums of at most 128 keys are added in float32 */
} gk_attn_accumulate;

/* out = softmax(scale (q q_scale) (k k_scale)^T) (v v_scale + v_mean), forward alone. A scale is
 * one number, [H], [B, H], or [B, H, ceil(S / 128)]: one for each 128 tokens of a sequence, of a
 * packed call counted from the sequence's first token, S the longest's bound. NULL is 1. */
typedef struct gk_flash_attn_fp8_args {
    size_t size;
    gk_flash_attn_args fwd; /* q, k, v GK_E4M3; out bfloat16, float16 or float32; its size and
                             * workspace are not read; rules.sinks float32 or out's dtype */
    const gk_tensor *q_scale, *k_scale, *v_scale; /* float32, any strides; H is Hq, Hkv, Hkv */
    const gk_tensor *v_mean; /* [Hkv, Dv] or [B, Hkv, Dv] float32, any strides; NULL = 0 */
    gk_attn_accumulate accumulate;
    void *workspace;
    size_t workspace_bytes;
} gk_flash_attn_fp8_args;

#define GK_FLASH_ATTN_FP8_ARGS_INIT \
    {.size = sizeof(gk_flash_attn_fp8_args), .fwd = GK_FLASH_ATTN_ARGS_INIT}

/* Whether the sums of 128 keys are added in float32: what `accumulate` comes to. */
static inline int gk_attn_is_precise(const gk_flash_attn_fp8_args *a) {
    return a->accumulate == GK_ATTN_PRECISE || (a->accumulate == GK_ATTN_AUTO && !a->v_mean);
}

GK_API size_t gk_flash_attn_fp8_workspace_bytes(const gk_context *, const gk_flash_attn_fp8_args *);
GK_API gk_status gk_flash_attn_fp8(const gk_context *, const gk_flash_attn_fp8_args *);
GK_API gk_status gk_explain_flash_attn_fp8(const gk_context *, const gk_flash_attn_fp8_args *,
                                           gk_explanation *);

#ifdef __cplusplus
}
#endif
#endif
