/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_ranks.h: what work that is spread over GPUs asks for: attention that joins what is there
 * already, and kernels that leave SMs to others. gpukern.h has the conventions; include this page
 * beside it. */
#ifndef GPUKERN_RANKS_H
#define GPUKERN_RANKS_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The arguments of gk_flash_attn_fwd, whose out and lse hold the attention over other keys and
 * become that over both, as gk_attn_merge gives it: out = out_held e^(lse_held - lse) + out_new
 * e^(lse_new - lse). out is float32 (GK_F64: float64), with any leading strides; lse is a must.
 * Dense calls without dropout. A caller passes &x.fwd, and fwd.size says that the rest stands
 * behind it. */
typedef struct gk_flash_attn_accumulate_args {
    gk_flash_attn_args fwd; /* size: of the whole struct */
    int32_t accumulates;    /* 1; 0: as gk_flash_attn_args alone */
} gk_flash_attn_accumulate_args;

#define GK_FLASH_ATTN_ACCUMULATE_ARGS_INIT                                                \
    {.fwd = {.size = sizeof(gk_flash_attn_accumulate_args), .rules = GK_ATTN_RULES_INIT}, \
     .accumulates = 1}

/* Whether the call joins what out and lse hold. */
static inline int32_t gk_accumulates(const gk_flash_attn_args *a) {
    return a->size >= sizeof(gk_flash_attn_accumulate_args) &&
           ((const gk_flash_attn_accumulate_args *)a)->accumulates;
}

/* From now on kernels whose blocks stay on their SM are planned for so many SMs, on every GPU and
 * by every thread of this process, so that kernels of other streams find SMs free: the persistent
 * ones of gemm, the quantised products, flash_attn forward and paged_attn. The backward of
 * attention and small kernels launch as many blocks as they have work. 0: all. Bits may follow the
 * limit where it changes how keys or k are split. Workspace that was sized before a change may be
 * too small, which a call refuses. */
GK_API gk_status gk_limit_sms(int32_t sms);
GK_API int32_t gk_sm_limit(void);

/* gk_flash_attn_bwd_args.is_part on the CPU: dsinks, where sinks are given, is what these keys add
 * to the gradient of sinks, with which the rounding of out does not count. Of delta = dO . O - dlse
 * and p = exp(sink - lse) that gradient is
 * -sum p (delta (1 - p) - dlse), over all rows, + the shares of all keys, -sum p sum_j P_j (dP_j -
 * delta).
 * On CUDA kernels take delta as it is, and sinks are refused: there the gradient is -sum p
 * delta. */

#ifdef __cplusplus
}
#endif
#endif
