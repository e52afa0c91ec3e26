/* SPDX-License-Identifier: BSD-3-Clause */
/* gpukern_mask.h: any mask of attention, in the one form that the attention kernels read. gpukern.h
 * has the conventions; include this page beside it. */
#ifndef GPUKERN_MASK_H
#define GPUKERN_MASK_H

#include "gpukern_ranks.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a mask is made of. A query sees a key where the mask says so. */
typedef enum gk_mask_source {
    GK_MASK_OF_BOOL = 0, /* mask [B, H, Sq, Sk] uint8: 0 hides the key */
    GK_MASK_OF_BITS = 1, /* mask [B, H, Sq, ceil(Sk / 8)] uint8: bit j % 8 of byte j / 8 is key j */
    GK_MASK_OF_RANGES =
        2, /* rows [B, H, Sq, 2 or 4] int32 x, y (, z, w): keys [x, y) and [z, w), cut to [0, Sk) */
    GK_MASK_OF_COLUMNS =
        3, /* rows [B, H, Sk, 1, 2 or 4] int32: from which rows key j is hidden (see below) */
    GK_MASK_OF_BLOCKS = 4 /* lists of blocks of 128 x 128 */
} gk_mask_source;

/* How a mask is stored: csrc/core/attn_mask.h has the layout. */
typedef enum gk_mask_store {
    GK_MASK_DENSE = 1, /* words of every block */
    GK_MASK_RANGES =
        2, /* words of a few blocks of each tile; the others are made from ranges of keys */
    GK_MASK_COLUMNS = 3 /* likewise, from ranges of rows */
} gk_mask_store;

/* Builds a mask. B and H are those of the mask, 1 or the batch and the query heads of the attention
 * that reads it. Any strides.
 *
 * Columns follow FlashMask (Wang et al. 2024, arXiv:2410.01359), startend_row_indices of n numbers
 * c0 .. for each key:
 *   is_causal  n = 1   key j is seen by rows j <= i < c0           n = 2   rows i >= j that are not in [c0, c1)
 *   else       n = 2   rows c1 <= i < c0                           n = 4   rows that are neither in [c0, c1) nor in [c2, c3)
 *
 * Blocks follow FlexAttention: num_blocks [B, H, nq] int32, blocks [B, H, nq, n] int32 with nq =
 * ceil(Sq / 128): of each tile of queries the blocks of keys that are seen in part, in any order;
 * num_full and full: those that are seen whole. `mask`, of bytes or bits, says what is seen of the
 * partial ones; without it they are seen whole. Entries past a count are not read. A count or an
 * index out of range is GK_ERR_INDEX on the CPU; on CUDA it is skipped and sets GK_BAD_MASK_BLOCKS
 * in the error word. */
typedef struct gk_attn_mask_args {
    size_t size;
    gk_mask_source source;
    const gk_tensor *mask; /* of bool and bits; of blocks optional */
    const gk_tensor *rows; /* of ranges and columns */
    const gk_tensor *num_blocks, *blocks, *num_full, *full;
    int32_t is_bits;    /* blocks: mask holds bits */
    int32_t is_causal;  /* columns */
    int32_t transposed; /* 1: the tables by keys, which the backward of CUDA reads, are made too */
    int64_t seq_q, seq_k;
    gk_tensor out; /* [B, H, gk_attn_mask_ints] int32, contiguous */
} gk_attn_mask_args;
#define GK_ATTN_MASK_ARGS_INIT {.size = sizeof(gk_attn_mask_args)}

GK_API gk_status gk_attn_mask(const gk_context *, const gk_attn_mask_args *);
GK_API gk_status gk_explain_attn_mask(const gk_context *, const gk_attn_mask_args *,
                                      gk_explanation *);

/* int32 elements of one head of a stored mask. */
GK_API int64_t gk_attn_mask_ints(gk_mask_store store, int64_t seq_q, int64_t seq_k,
                                 int32_t transposed);

/* ---- attention with a mask or a bias --------------------------------------------------------- */
/* What hides scores and what is added to them, beside gk_attn_rules. A bias is added to scale q k^T
 * behind softcap and ALiBi. Where it is -inf or the lowest finite number of its dtype, the key is
 * hidden from the query. A pair that is hidden, by these or by the rules, takes no part: k and v of
 * it may hold NaN or inf. */
typedef struct gk_attn_scores {
    const gk_tensor *mask; /* as gk_attn_mask made it, [B or 1, Hq or 1, n]; NULL = none */
    gk_mask_store store;
    int64_t mask_seq_q, mask_seq_k; /* of the mask: Sq and Sk */
    const gk_tensor *bias; /* [B or 1, Hq or 1, Sq or 1, Sk or 1] q's dtype or float32, any strides;
                              NULL = none */
    const gk_tensor *distance_bias; /* [Hq or 1, Sq + Sk - 1] float32 (float64 with GK_F64): entry j
                                       - i + Sq - 1; not with q_start */
} gk_attn_scores;

/* The arguments of gk_flash_attn_fwd with a mask or a bias: a caller passes &x.fwd, and fwd.size
 * says that the rest stands behind it. Dense calls whose results do not accumulate. */
typedef struct gk_flash_attn_masked_args {
    gk_flash_attn_args fwd; /* size: of the whole struct */
    int32_t accumulates;    /* 0 */
    gk_attn_scores scores;
} gk_flash_attn_masked_args;
#define GK_FLASH_ATTN_MASKED_ARGS_INIT                                                   \
    {                                                                                    \
        .fwd = {.size = sizeof(gk_flash_attn_masked_args), .rules = GK_ATTN_RULES_INIT } \
    }

/* Likewise of gk_flash_attn_bwd: &x.bwd, and bwd.size. Gradients are summed in float32 (GK_F64:
 * float64) over what broadcasts. */
typedef struct gk_flash_attn_masked_bwd_args {
    gk_flash_attn_bwd_args bwd; /* size: of the whole struct; bwd.fwd.size: sizeof bwd.fwd */
    gk_attn_scores scores;
    const gk_tensor *dbias;          /* contiguous, bias's shape and dtype; NULL = not wanted */
    const gk_tensor *ddistance_bias; /* likewise of distance_bias */
} gk_flash_attn_masked_bwd_args;
#define GK_FLASH_ATTN_MASKED_BWD_ARGS_INIT                                                      \
    {                                                                                           \
        .bwd = {.size = sizeof(gk_flash_attn_masked_bwd_args), .fwd = GK_FLASH_ATTN_ARGS_INIT } \
    }

/* NULL where the call has none. */
static inline const gk_attn_scores *gk_scores_of(const gk_flash_attn_args *a) {
    if (a->size < sizeof(gk_flash_attn_masked_args)) return NULL;
    const gk_attn_scores *x = &((const gk_flash_attn_masked_args *)a)->scores;
    return x->mask || x->bias || x->distance_bias ? x : NULL;
}
static inline const gk_attn_scores *gk_scores_of_bwd(const gk_flash_attn_bwd_args *a) {
    if (a->size < sizeof(gk_flash_attn_masked_bwd_args)) return NULL;
    const gk_attn_scores *x = &((const gk_flash_attn_masked_bwd_args *)a)->scores;
    return x->mask || x->bias || x->distance_bias ? x : NULL;
}
static inline const gk_tensor *gk_dbias_of(const gk_flash_attn_bwd_args *a) {
    return gk_scores_of_bwd(a) ? ((const gk_flash_attn_masked_bwd_args *)a)->dbias : NULL;
}
static inline const gk_tensor *gk_ddistance_of(const gk_flash_attn_bwd_args *a) {
    return gk_scores_of_bwd(a) ? ((const gk_flash_attn_masked_bwd_args *)a)->ddistance_bias : NULL;
}

#ifdef __cplusplus
}
#endif
#endif
