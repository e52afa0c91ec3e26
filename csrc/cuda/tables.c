/* SPDX-License-Identifier: BSD-3-Clause */
/* tables.c: for each op, the tables of instances from its CUDA kernel files, best first.
 * dispatch.c asks them in this order and skips those for other architectures. A table with a
 * plan function chooses among its own instances. In other tables, the first instance that serves
 * the call is used.
 *
 * gemm's tables are C files, so every build has them, and `explain gemm --arch` answers without
 * nvcc. The other tables are in the .cu files of their kernels. A build without nvcc lacks them. */
#include "../core/dispatch.h"
#include "../core/invariant.h"
#include "gpukern.h"
#include "product/gemm/tables.h"

/* A build for sm_80 alone (GPUKERN_CUDA_ARCHS) has none of the _sm90a.cu files. */
#if defined(GPUKERN_HAS_CUDA) && !defined(GPUKERN_HAS_SM90A)
#define LACKS_SM90A
#endif

static const gk_cuda_table *const gemm_tables[] = {
#ifndef LACKS_SM90A
    &gk_gemm_sm90a_table,      &gk_gemm_pingpong_sm90a_table, &gk_gemm_swapab_sm90a_table,
    &gk_gemm_tf32_sm90a_table,
#endif
    &gk_gemm_skinny_table,     &gk_gemm_sm80_table,           &gk_gemm_plain_table};

#ifdef GPUKERN_HAS_CUDA
extern const gk_cuda_table gk_gemm_act_bwd_table;
extern const gk_cuda_table gk_flash_attn_fp8_sm90a_table, gk_flash_attn_fp8_decoded_table,
    gk_flash_attn_fp8_sm80_table;
extern const gk_cuda_table gk_kv_cache_write_table, gk_kv_cache_write_latent_table,
    gk_rope_kv_write_table, gk_rope_kv_write_sm90a_table;
extern const gk_cuda_table gk_attn_merge_table;
extern const gk_cuda_table gk_quantize_sm90a_table, gk_quantize_table, gk_dequantize_table;
extern const gk_cuda_table gk_scaled_gemm_swapab_sm90a_table, gk_scaled_gemm_sm90a_table,
    gk_scaled_gemm_sm80_table;
extern const gk_cuda_table gk_scaled_gemm_decoded_sm90a_table, gk_scaled_gemm_decoded_table,
    gk_scaled_gemm_mx_sm90a_table, gk_scaled_gemm_plain_table;
extern const gk_cuda_table gk_grouped_gemm_sm90a_table, gk_grouped_gemm_fp8_sm90a_table,
    gk_grouped_gemm_int8_sm90a_table;
extern const gk_cuda_table gk_grouped_gemm_sm80_table, gk_grouped_gemm_plain_table,
    gk_sparse_pack_table, gk_sparse_gemm_sm90a_table, gk_sparse_gemm_sm80_table,
    gk_sparse_gemm_plain_table;
extern const gk_cuda_table gk_pack_weight_table, gk_unpack_weight_table, gk_weight_gemm_plain_table;
extern const gk_cuda_table gk_weight_mma_4bit_table, gk_weight_mma_8bit_table;
extern const gk_cuda_table gk_weight_wgmma_4bit_table, gk_weight_wgmma_8bit_table;
extern const gk_cuda_table gk_weight_decoded_table, gk_weight_invariant_table;
extern const gk_cuda_table gk_weight_grouped_mma_table, gk_weight_grouped_wgmma_table;
extern const gk_cuda_table gk_weight_gemm_4bit_sm80_table, gk_weight_gemm_8bit_sm80_table;
extern const gk_cuda_table gk_norm_fwd_table, gk_norm_fwd_sm90a_table, gk_norm_fwd_looped_table;
extern const gk_cuda_table gk_norm_bwd_table, gk_norm_bwd_sm90a_table, gk_norm_bwd_looped_table,
    gk_norm_bwd_ring_sm90a_table;
extern const gk_cuda_table gk_softmax_fwd_table, gk_softmax_fwd_sm90a_table,
    gk_softmax_fwd_looped_table, gk_softmax_fwd_ring_sm90a_table;
extern const gk_cuda_table gk_softmax_bwd_table, gk_softmax_bwd_sm90a_table,
    gk_softmax_bwd_looped_table, gk_softmax_bwd_ring_sm90a_table;
extern const gk_cuda_table gk_glu_fwd_sm90a_table, gk_glu_fwd_table, gk_glu_bwd_table,
    gk_rope_table;
extern const gk_cuda_table gk_cross_entropy_fwd_table, gk_cross_entropy_fwd_sm90a_table,
    gk_cross_entropy_bwd_table;
extern const gk_cuda_table gk_dropout_table, gk_adamw_table, gk_attn_mask_table,
    gk_sample_tokens_table, gk_sample_tokens_sm90a_table, gk_kl_div_table, gk_kl_div_sm90a_table,
    gk_moe_unpermute_table, gk_moe_unpermute_bwd_table;

/* The features that an attention call may need and not every table has. */
enum {
    PARTIAL = 1,   /* a result or gradients wider than q, or a result that accumulates into out */
    DROPS = 2,     /* dropout */
    SCORES = 4,    /* a mask or a bias */
    INVARIANT = 8, /* the bits of a sequence do not depend on the other sequences of the call */
    LATENT_8 = 16, /* a cache of latents in 8 bits */
    NEW_MASK = 32  /* a mask over new tokens */
};

/* The tables of attention, best first: X(name, needs, allows). A table serves a call whose features
 * contain all of `needs` and nothing beyond `allows`. */
#define FLASH_ATTN_FWD(X)                                           \
    X(flash_attn_fwd_masked_sm90a, SCORES, SCORES | PARTIAL)        \
    X(flash_attn_fwd_masked_wide_sm90a, SCORES, SCORES | PARTIAL)   \
    X(flash_attn_fwd_scores_sm80, SCORES, SCORES | DROPS | PARTIAL) \
    X(flash_attn_fwd_partial_sm90a, PARTIAL, PARTIAL)               \
    X(flash_attn_fwd_sm90a, 0, PARTIAL)                             \
    X(flash_attn_fwd_wide_sm90a, 0, PARTIAL)                        \
    X(flash_attn_fwd_sm80, 0, PARTIAL)                              \
    X(flash_attn_fwd_drop_sm90a, DROPS, DROPS)                      \
    X(flash_attn_fwd_drop_sm80, DROPS, DROPS | PARTIAL)             \
    X(flash_attn_fwd_simt, 0, PARTIAL)                              \
    X(flash_attn_fwd_plain, 0, DROPS | SCORES)                      \
    X(flash_attn_fwd_partial_plain, PARTIAL, DROPS | PARTIAL | SCORES)
#define FLASH_ATTN_BWD(X)                                 \
    X(flash_attn_bwd_masked_sm90a, SCORES, SCORES)        \
    X(flash_attn_bwd_masked_wide_sm90a, SCORES, SCORES)   \
    X(flash_attn_bwd_scores_sm80, SCORES, SCORES | DROPS) \
    X(flash_attn_bwd_sm90a, 0, 0)                         \
    X(flash_attn_bwd_wide_sm90a, 0, 0)                    \
    X(flash_attn_bwd_sm80, 0, 0)                          \
    X(flash_attn_bwd_drop_sm90a, DROPS, DROPS)            \
    X(flash_attn_bwd_drop_sm80, DROPS, DROPS)             \
    X(flash_attn_bwd_simt, 0, 0)                          \
    X(flash_attn_bwd_gemms, 0, 0)                         \
    X(flash_attn_bwd_plain, 0, DROPS | SCORES)            \
    X(flash_attn_bwd_partial_sm90a, PARTIAL, PARTIAL)     \
    X(flash_attn_bwd_partial_sm80, PARTIAL, PARTIAL)      \
    X(flash_attn_bwd_partial_plain, PARTIAL, DROPS | PARTIAL)
#define PAGED_ATTN(X)                                   \
    X(paged_prefill_sm90a, 0, 0)                        \
    X(paged_prefill_decoded_sm90a, 0, 0)                \
    X(paged_attn_sm90a, 0, INVARIANT)                   \
    X(paged_latent_sm90a, 0, 0)                         \
    X(paged_attn_sm80, 0, 0)                            \
    X(paged_attn_f32, 0, 0)                             \
    X(paged_codes_sm80, 0, 0)                           \
    X(paged_attn_plain, 0, INVARIANT)                   \
    X(paged_latent_fp8, LATENT_8, LATENT_8 | INVARIANT) \
    X(paged_tree_sm90a, NEW_MASK, NEW_MASK)             \
    X(paged_tree, NEW_MASK, NEW_MASK | INVARIANT | LATENT_8)

#define DECLARED(name, needs, allows) extern const gk_cuda_table gk_##name##_table;
FLASH_ATTN_FWD(DECLARED)
FLASH_ATTN_BWD(DECLARED)
PAGED_ATTN(DECLARED)
#undef DECLARED
#define LISTED(name, needs, allows) &gk_##name##_table,
static const gk_cuda_table *const flash_attn_fwd_tables[] = {FLASH_ATTN_FWD(LISTED)};
static const gk_cuda_table *const flash_attn_bwd_tables[] = {FLASH_ATTN_BWD(LISTED)};
static const gk_cuda_table *const paged_attn_tables[] = {PAGED_ATTN(LISTED)};
#undef LISTED
#define FEATURES(name, needs, allows) {needs, allows},
typedef struct features {
    int needs, allows;
} features;
static const features flash_attn_fwd_features[] = {FLASH_ATTN_FWD(FEATURES)};
static const features flash_attn_bwd_features[] = {FLASH_ATTN_BWD(FEATURES)};
static const features paged_attn_features[] = {PAGED_ATTN(FEATURES)};
#undef FEATURES

#ifdef LACKS_SM90A
/* Empty tables, which replace those that _sm90a.cu files would define. */
#define NONE(name) const gk_cuda_table gk_##name##_table = {NULL, 0, 90, NULL};
NONE(flash_attn_bwd_drop_sm90a)
NONE(flash_attn_bwd_masked_sm90a)
NONE(flash_attn_bwd_masked_wide_sm90a)
NONE(flash_attn_bwd_partial_sm90a)
NONE(flash_attn_bwd_sm90a)
NONE(flash_attn_bwd_wide_sm90a)
NONE(rope_kv_write_sm90a)
NONE(flash_attn_fp8_sm90a)
NONE(flash_attn_fwd_drop_sm90a)
NONE(flash_attn_fwd_masked_sm90a)
NONE(flash_attn_fwd_masked_wide_sm90a)
NONE(flash_attn_fwd_partial_sm90a)
NONE(flash_attn_fwd_sm90a)
NONE(flash_attn_fwd_wide_sm90a)
NONE(paged_attn_sm90a)
NONE(paged_latent_sm90a)
NONE(paged_prefill_decoded_sm90a)
NONE(paged_prefill_sm90a)
NONE(paged_tree_sm90a)
NONE(grouped_gemm_fp8_sm90a)
NONE(grouped_gemm_int8_sm90a)
NONE(grouped_gemm_sm90a)
NONE(quantize_sm90a)
NONE(sparse_gemm_sm90a)
NONE(scaled_gemm_decoded_sm90a)
NONE(scaled_gemm_mx_sm90a)
NONE(scaled_gemm_sm90a)
NONE(scaled_gemm_swapab_sm90a)
NONE(weight_decoded)
NONE(weight_grouped_mma)
NONE(weight_grouped_wgmma)
NONE(weight_mma_4bit)
NONE(weight_mma_8bit)
NONE(weight_wgmma_4bit)
NONE(weight_wgmma_8bit)
NONE(cross_entropy_fwd_sm90a)
NONE(glu_fwd_sm90a)
NONE(kl_div_sm90a)
NONE(norm_fwd_sm90a)
NONE(norm_bwd_sm90a)
NONE(norm_bwd_ring_sm90a)
NONE(sample_tokens_sm90a)
NONE(softmax_fwd_sm90a)
NONE(softmax_fwd_ring_sm90a)
NONE(softmax_bwd_sm90a)
NONE(softmax_bwd_ring_sm90a)
#undef NONE
#endif

static const gk_cuda_table *const gemm_act_bwd_tables[] = {&gk_gemm_act_bwd_table};
static const gk_cuda_table *const flash_attn_fp8_tables[] = {&gk_flash_attn_fp8_sm90a_table,
                                                             &gk_flash_attn_fp8_decoded_table,
                                                             &gk_flash_attn_fp8_sm80_table};
/* kv_cache_write would take the bytes of latents for codes */
static const gk_cuda_table *const kv_cache_write_tables[] = {&gk_kv_cache_write_latent_table,
                                                             &gk_kv_cache_write_table};
static const gk_cuda_table *const rope_kv_write_tables[] = {&gk_rope_kv_write_sm90a_table,
                                                            &gk_rope_kv_write_table};
static const gk_cuda_table *const attn_merge_tables[] = {&gk_attn_merge_table};
static const gk_cuda_table *const quantize_tables[] = {&gk_quantize_sm90a_table,
                                                       &gk_quantize_table};
static const gk_cuda_table *const dequantize_tables[] = {&gk_dequantize_table};
static const gk_cuda_table *const scaled_gemm_tables[] = {
    &gk_scaled_gemm_swapab_sm90a_table,  &gk_scaled_gemm_sm90a_table,
    &gk_scaled_gemm_decoded_sm90a_table, &gk_scaled_gemm_decoded_table,
    &gk_scaled_gemm_mx_sm90a_table,      &gk_scaled_gemm_sm80_table,
    &gk_scaled_gemm_plain_table};
static const gk_cuda_table *const pack_weight_tables[] = {&gk_pack_weight_table};
static const gk_cuda_table *const unpack_weight_tables[] = {&gk_unpack_weight_table};
static const gk_cuda_table *const grouped_gemm_tables[] = {
    &gk_grouped_gemm_sm90a_table, &gk_grouped_gemm_fp8_sm90a_table,
    &gk_grouped_gemm_int8_sm90a_table, &gk_grouped_gemm_sm80_table, &gk_grouped_gemm_plain_table};
static const gk_cuda_table *const sparse_pack_tables[] = {&gk_sparse_pack_table};
static const gk_cuda_table *const sparse_gemm_tables[] = {
    &gk_sparse_gemm_sm90a_table, &gk_sparse_gemm_sm80_table, &gk_sparse_gemm_plain_table};
static const gk_cuda_table *const weight_gemm_tables[] = {
    &gk_weight_invariant_table,      &gk_weight_grouped_mma_table, &gk_weight_grouped_wgmma_table,
    &gk_weight_mma_4bit_table,       &gk_weight_mma_8bit_table,    &gk_weight_wgmma_4bit_table,
    &gk_weight_wgmma_8bit_table,     &gk_weight_decoded_table,     &gk_weight_gemm_4bit_sm80_table,
    &gk_weight_gemm_8bit_sm80_table, &gk_weight_gemm_plain_table};
static const gk_cuda_table *const norm_fwd_tables[] = {&gk_norm_fwd_sm90a_table, &gk_norm_fwd_table,
                                                       &gk_norm_fwd_looped_table};
static const gk_cuda_table *const norm_bwd_tables[] = {&gk_norm_bwd_ring_sm90a_table,
                                                       &gk_norm_bwd_sm90a_table, &gk_norm_bwd_table,
                                                       &gk_norm_bwd_looped_table};
static const gk_cuda_table *const softmax_fwd_tables[] = {
    &gk_softmax_fwd_ring_sm90a_table, &gk_softmax_fwd_sm90a_table, &gk_softmax_fwd_table,
    &gk_softmax_fwd_looped_table};
static const gk_cuda_table *const softmax_bwd_tables[] = {
    &gk_softmax_bwd_ring_sm90a_table, &gk_softmax_bwd_sm90a_table, &gk_softmax_bwd_table,
    &gk_softmax_bwd_looped_table};
static const gk_cuda_table *const glu_fwd_tables[] = {&gk_glu_fwd_sm90a_table, &gk_glu_fwd_table};
static const gk_cuda_table *const glu_bwd_tables[] = {&gk_glu_bwd_table};
static const gk_cuda_table *const rope_tables[] = {&gk_rope_table};
static const gk_cuda_table *const cross_entropy_fwd_tables[] = {&gk_cross_entropy_fwd_sm90a_table,
                                                                &gk_cross_entropy_fwd_table};
static const gk_cuda_table *const cross_entropy_bwd_tables[] = {&gk_cross_entropy_bwd_table};
static const gk_cuda_table *const dropout_tables[] = {&gk_dropout_table};
static const gk_cuda_table *const adamw_tables[] = {&gk_adamw_table};
static const gk_cuda_table *const attn_mask_tables[] = {&gk_attn_mask_table};
static const gk_cuda_table *const sample_tokens_tables[] = {&gk_sample_tokens_sm90a_table,
                                                            &gk_sample_tokens_table};
static const gk_cuda_table *const kl_div_tables[] = {&gk_kl_div_sm90a_table, &gk_kl_div_table};
static const gk_cuda_table *const moe_unpermute_tables[] = {&gk_moe_unpermute_table};
static const gk_cuda_table *const moe_unpermute_bwd_tables[] = {&gk_moe_unpermute_bwd_table};

const gk_cuda_table *const *gk_cuda_tables(gk_op op, int *num_tables) {
    switch (op) {
#define OP(NAME, stem, arguments, first)                                     \
    case GK_OP_##NAME:                                                       \
        *num_tables = (int)(sizeof stem##_tables / sizeof stem##_tables[0]); \
        return stem##_tables;
#include "../core/ops.def"
    default: *num_tables = 0; return NULL;
    }
}

/* Tables that choose an instance by the number of rows, so that the number of rows changes bits.
 * Batch-invariant calls do not use them. weight_invariant then plans weight_gemm, and other tables
 * serve scaled_gemm. */
static bool looks_at_rows(const gk_cuda_table *t) {
    return t == &gk_weight_mma_4bit_table || t == &gk_weight_mma_8bit_table ||
           t == &gk_weight_wgmma_4bit_table || t == &gk_weight_wgmma_8bit_table ||
           t == &gk_weight_decoded_table || t == &gk_weight_grouped_mma_table ||
           t == &gk_weight_gemm_4bit_sm80_table || t == &gk_weight_gemm_8bit_sm80_table ||
           t == &gk_scaled_gemm_decoded_sm90a_table || t == &gk_scaled_gemm_decoded_table;
}

/* Kernels that compute the transposed result and activate two neighbours at once. Two rows of the
 * result then share a reciprocal, which may change a last bit. Batch-invariant calls with a 16-bit
 * result and such an activation do not use these kernels. */
static bool activates_two_rows(const gk_cuda_table *t, gk_activation activation, gk_dtype out) {
    return (out == GK_BF16 || out == GK_F16) && activation > GK_ACT_RELU &&
           (t == &gk_sparse_gemm_sm90a_table || t == &gk_scaled_gemm_swapab_sm90a_table ||
            t == &gk_scaled_gemm_mx_sm90a_table);
}

bool gk_cuda_takes(gk_op op, int table, const void *args) {
    int asked = 0; /* the features that the call needs */
    const features *x;
    if (op == GK_OP_FLASH_ATTN_FWD) {
        const gk_flash_attn_args *a = args;
        x = &flash_attn_fwd_features[table];
        if (a->out.dtype != a->q.dtype || gk_accumulates(a)) asked |= PARTIAL;
        if (a->dropout_p > 0) asked |= DROPS;
        if (gk_scores_of(a)) asked |= SCORES;
    } else if (op == GK_OP_FLASH_ATTN_BWD) {
        const gk_flash_attn_bwd_args *g = args;
        x = &flash_attn_bwd_features[table];
        if (g->dq.dtype != g->fwd.q.dtype) asked |= PARTIAL;
        if (g->fwd.dropout_p > 0) asked |= DROPS;
        if (gk_scores_of_bwd(g)) asked |= SCORES;
    } else if (op == GK_OP_PAGED_ATTN) {
        const gk_paged_attn_args *a = args;
        x = &paged_attn_features[table];
        if (a->flags & GK_PAGED_BATCH_INVARIANT) asked |= INVARIANT;
        if (a->k_cache.dtype == GK_U8) asked |= LATENT_8;
        if (gk_paged_mask_of(a)) asked |= NEW_MASK;
    } else if (op == GK_OP_WEIGHT_GEMM) {
        return !(gk_batch_invariant() && looks_at_rows(weight_gemm_tables[table]));
    } else if (op == GK_OP_SCALED_GEMM) {
        const gk_scaled_gemm_args *g = args;
        const gk_cuda_table *t = scaled_gemm_tables[table];
        return !(gk_batch_invariant() &&
                 (looks_at_rows(t) || activates_two_rows(t, g->activation, g->out.dtype)));
    } else if (op == GK_OP_SPARSE_GEMM) {
        const gk_sparse_gemm_args *g = args;
        return !(gk_batch_invariant() &&
                 activates_two_rows(sparse_gemm_tables[table], g->activation, g->out.dtype));
    } else {
        return true;
    }
    return (asked & x->needs) == x->needs && (asked & ~x->allows) == 0;
}
#else
const gk_cuda_table *const *gk_cuda_tables(gk_op op, int *num_tables) {
    *num_tables = op == GK_OP_GEMM ? (int)(sizeof gemm_tables / sizeof gemm_tables[0]) : 0;
    return op == GK_OP_GEMM ? gemm_tables : NULL;
}

bool gk_cuda_takes(gk_op op, int table, const void *args) {
    (void)op, (void)table, (void)args;
    return true;
}
#endif
