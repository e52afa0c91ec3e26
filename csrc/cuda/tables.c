/* SPDX-License-Identifier: BSD-3-Clause */
/* tables.c: for each op, the tables of instances from its CUDA kernel files, best first.
 * dispatch.c asks them in this order, skipping those for other architectures. A table with a
 * plan function chooses among its own instances; otherwise the first instance that can serve the
 * call is used.
 *
 * Tables made by C files are in every build, so that `explain --arch` answers without nvcc: gemm's.
 * The other tables stand in their kernels' .cu files, and a build without nvcc lacks them. */
#include "../core/dispatch.h"
#include "gpukern.h"
#include "product/gemm/tables.h"

static const gk_cuda_table *const gemm_tables[] = {
    &gk_gemm_sm90a_table,      &gk_gemm_pingpong_sm90a_table, &gk_gemm_swapab_sm90a_table,
    &gk_gemm_tf32_sm90a_table, &gk_gemm_skinny_table,         &gk_gemm_sm80_table,
    &gk_gemm_plain_table};

#ifdef GPUKERN_HAS_CUDA
extern const gk_cuda_table gk_gemm_act_bwd_table;
extern const gk_cuda_table gk_flash_attn_fwd_sm90a_table;
extern const gk_cuda_table gk_flash_attn_fwd_sm80_table, gk_flash_attn_fwd_simt_table,
    gk_flash_attn_fwd_plain_table;
extern const gk_cuda_table gk_flash_attn_fwd_drop_sm80_table, gk_flash_attn_bwd_drop_sm80_table;
extern const gk_cuda_table gk_flash_attn_fwd_partial_sm90a_table,
    gk_flash_attn_fwd_partial_plain_table;
extern const gk_cuda_table gk_flash_attn_bwd_partial_sm90a_table,
    gk_flash_attn_bwd_partial_sm80_table, gk_flash_attn_bwd_partial_plain_table;
extern const gk_cuda_table gk_flash_attn_fp8_sm90a_table, gk_flash_attn_fp8_relay_table,
    gk_flash_attn_fp8_sm80_table;
extern const gk_cuda_table gk_flash_attn_bwd_sm90a_table, gk_flash_attn_bwd_wide_sm90a_table;
extern const gk_cuda_table gk_flash_attn_bwd_sm80_table, gk_flash_attn_bwd_simt_table,
    gk_flash_attn_bwd_plain_table;
extern const gk_cuda_table gk_paged_prefill_sm90a_table, gk_paged_prefill_relay_sm90a_table,
    gk_paged_attn_sm90a_table, gk_paged_attn_sm80_table, gk_paged_attn_f32_table,
    gk_paged_attn_plain_table;
extern const gk_cuda_table gk_kv_cache_write_table, gk_rope_kv_write_table;
extern const gk_cuda_table gk_attn_merge_table;
extern const gk_cuda_table gk_quantize_sm90a_table, gk_quantize_table, gk_dequantize_table;
extern const gk_cuda_table gk_scaled_gemm_swapab_sm90a_table, gk_scaled_gemm_sm90a_table,
    gk_scaled_gemm_sm80_table;
extern const gk_cuda_table gk_scaled_gemm_decoded_table, gk_scaled_gemm_mx_sm90a_table,
    gk_scaled_gemm_plain_table;
extern const gk_cuda_table gk_grouped_gemm_sm90a_table, gk_grouped_gemm_fp8_sm90a_table;
extern const gk_cuda_table gk_grouped_gemm_sm80_table, gk_grouped_gemm_plain_table,
    gk_sparse_pack_table, gk_sparse_gemm_sm90a_table, gk_sparse_gemm_sm80_table,
    gk_sparse_gemm_plain_table;
extern const gk_cuda_table gk_pack_weight_table, gk_unpack_weight_table, gk_weight_gemm_plain_table;
extern const gk_cuda_table gk_weight_mma_4bit_table, gk_weight_mma_8bit_table;
extern const gk_cuda_table gk_weight_wgmma_4bit_table, gk_weight_wgmma_8bit_table;
extern const gk_cuda_table gk_weight_decoded_table;
extern const gk_cuda_table gk_weight_gemm_4bit_sm80_table, gk_weight_gemm_8bit_sm80_table;
extern const gk_cuda_table gk_norm_fwd_table, gk_norm_fwd_sm90a_table, gk_norm_fwd_walk_table;
extern const gk_cuda_table gk_norm_bwd_table, gk_norm_bwd_sm90a_table, gk_norm_bwd_walk_table;
extern const gk_cuda_table gk_softmax_fwd_table, gk_softmax_fwd_sm90a_table,
    gk_softmax_fwd_walk_table;
extern const gk_cuda_table gk_softmax_bwd_table, gk_softmax_bwd_sm90a_table,
    gk_softmax_bwd_walk_table;
extern const gk_cuda_table gk_glu_fwd_table, gk_glu_bwd_table, gk_rope_table;
extern const gk_cuda_table gk_cross_entropy_fwd_table, gk_cross_entropy_fwd_sm90a_table,
    gk_cross_entropy_bwd_table;
extern const gk_cuda_table gk_dropout_table, gk_adamw_table, gk_attn_mask_table;

static const gk_cuda_table *const gemm_act_bwd_tables[] = {&gk_gemm_act_bwd_table};
static const gk_cuda_table *const flash_attn_fwd_tables[] = {
    &gk_flash_attn_fwd_partial_sm90a_table, &gk_flash_attn_fwd_sm90a_table,
    &gk_flash_attn_fwd_sm80_table,          &gk_flash_attn_fwd_drop_sm80_table,
    &gk_flash_attn_fwd_simt_table,          &gk_flash_attn_fwd_plain_table,
    &gk_flash_attn_fwd_partial_plain_table};
static const gk_cuda_table *const flash_attn_bwd_tables[] = {
    &gk_flash_attn_bwd_sm90a_table,         &gk_flash_attn_bwd_wide_sm90a_table,
    &gk_flash_attn_bwd_sm80_table,          &gk_flash_attn_bwd_drop_sm80_table,
    &gk_flash_attn_bwd_simt_table,          &gk_flash_attn_bwd_plain_table,
    &gk_flash_attn_bwd_partial_sm90a_table, &gk_flash_attn_bwd_partial_sm80_table,
    &gk_flash_attn_bwd_partial_plain_table};
static const gk_cuda_table *const flash_attn_fp8_tables[] = {
    &gk_flash_attn_fp8_sm90a_table, &gk_flash_attn_fp8_relay_table, &gk_flash_attn_fp8_sm80_table};
static const gk_cuda_table *const paged_attn_tables[] = {
    &gk_paged_prefill_sm90a_table, &gk_paged_prefill_relay_sm90a_table,
    &gk_paged_attn_sm90a_table,    &gk_paged_attn_sm80_table,
    &gk_paged_attn_f32_table,      &gk_paged_attn_plain_table};
static const gk_cuda_table *const kv_cache_write_tables[] = {&gk_kv_cache_write_table};
static const gk_cuda_table *const rope_kv_write_tables[] = {&gk_rope_kv_write_table};
static const gk_cuda_table *const attn_merge_tables[] = {&gk_attn_merge_table};
static const gk_cuda_table *const quantize_tables[] = {&gk_quantize_sm90a_table,
                                                       &gk_quantize_table};
static const gk_cuda_table *const dequantize_tables[] = {&gk_dequantize_table};
static const gk_cuda_table *const scaled_gemm_tables[] = {
    &gk_scaled_gemm_swapab_sm90a_table, &gk_scaled_gemm_sm90a_table, &gk_scaled_gemm_decoded_table,
    &gk_scaled_gemm_mx_sm90a_table,     &gk_scaled_gemm_sm80_table,  &gk_scaled_gemm_plain_table};
static const gk_cuda_table *const pack_weight_tables[] = {&gk_pack_weight_table};
static const gk_cuda_table *const unpack_weight_tables[] = {&gk_unpack_weight_table};
static const gk_cuda_table *const grouped_gemm_tables[] = {
    &gk_grouped_gemm_sm90a_table, &gk_grouped_gemm_fp8_sm90a_table, &gk_grouped_gemm_sm80_table,
    &gk_grouped_gemm_plain_table};
static const gk_cuda_table *const sparse_pack_tables[] = {&gk_sparse_pack_table};
static const gk_cuda_table *const sparse_gemm_tables[] = {
    &gk_sparse_gemm_sm90a_table, &gk_sparse_gemm_sm80_table, &gk_sparse_gemm_plain_table};
static const gk_cuda_table *const weight_gemm_tables[] = {
    &gk_weight_mma_4bit_table,       &gk_weight_mma_8bit_table,  &gk_weight_wgmma_4bit_table,
    &gk_weight_wgmma_8bit_table,     &gk_weight_decoded_table,   &gk_weight_gemm_4bit_sm80_table,
    &gk_weight_gemm_8bit_sm80_table, &gk_weight_gemm_plain_table};
static const gk_cuda_table *const norm_fwd_tables[] = {&gk_norm_fwd_sm90a_table, &gk_norm_fwd_table,
                                                       &gk_norm_fwd_walk_table};
static const gk_cuda_table *const norm_bwd_tables[] = {&gk_norm_bwd_sm90a_table, &gk_norm_bwd_table,
                                                       &gk_norm_bwd_walk_table};
static const gk_cuda_table *const softmax_fwd_tables[] = {
    &gk_softmax_fwd_sm90a_table, &gk_softmax_fwd_table, &gk_softmax_fwd_walk_table};
static const gk_cuda_table *const softmax_bwd_tables[] = {
    &gk_softmax_bwd_sm90a_table, &gk_softmax_bwd_table, &gk_softmax_bwd_walk_table};
static const gk_cuda_table *const glu_fwd_tables[] = {&gk_glu_fwd_table};
static const gk_cuda_table *const glu_bwd_tables[] = {&gk_glu_bwd_table};
static const gk_cuda_table *const rope_tables[] = {&gk_rope_table};
static const gk_cuda_table *const cross_entropy_fwd_tables[] = {&gk_cross_entropy_fwd_sm90a_table,
                                                                &gk_cross_entropy_fwd_table};
static const gk_cuda_table *const cross_entropy_bwd_tables[] = {&gk_cross_entropy_bwd_table};
static const gk_cuda_table *const dropout_tables[] = {&gk_dropout_table};
static const gk_cuda_table *const adamw_tables[] = {&gk_adamw_table};
static const gk_cuda_table *const attn_mask_tables[] = {&gk_attn_mask_table};

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

/* Partial results: a result wider than q, or merged with the contents of out. In the forward
 * pass, every kernel except the plain one can make them. Gradients of partial results have
 * kernels of their own. */
static bool takes_partial(const gk_cuda_table *table, const gk_flash_attn_args *a,
                          const gk_flash_attn_bwd_args *g) {
    if (!g) {
        const bool partial = gk_accumulates(a) || a->out.dtype != a->q.dtype;
        if (table == &gk_flash_attn_fwd_plain_table) return !partial;
        const bool own = table == &gk_flash_attn_fwd_partial_sm90a_table ||
                         table == &gk_flash_attn_fwd_partial_plain_table;
        return partial || !own;
    }
    const bool own = table == &gk_flash_attn_bwd_partial_sm90a_table ||
                     table == &gk_flash_attn_bwd_partial_sm80_table ||
                     table == &gk_flash_attn_bwd_partial_plain_table;
    return own == (g->dq.dtype != a->q.dtype);
}

bool gk_cuda_takes(const gk_cuda_table *table, gk_op op, const void *args) {
    const bool forward = op == GK_OP_FLASH_ATTN_FWD;
    if (!forward && op != GK_OP_FLASH_ATTN_BWD) return true;
    const gk_flash_attn_bwd_args *g = forward ? NULL : args;
    const gk_flash_attn_args *a = forward ? args : &g->fwd;
    if (!takes_partial(table, a, g)) return false;
    const bool drops =
        table == &gk_flash_attn_fwd_drop_sm80_table || table == &gk_flash_attn_bwd_drop_sm80_table;
    const bool either = table == &gk_flash_attn_fwd_plain_table ||
                        table == &gk_flash_attn_bwd_plain_table ||
                        table == &gk_flash_attn_fwd_partial_plain_table ||
                        table == &gk_flash_attn_bwd_partial_plain_table;
    return either || drops == (a->dropout_p > 0);
}
#else
const gk_cuda_table *const *gk_cuda_tables(gk_op op, int *num_tables) {
    *num_tables = op == GK_OP_GEMM ? (int)(sizeof gemm_tables / sizeof gemm_tables[0]) : 0;
    return op == GK_OP_GEMM ? gemm_tables : NULL;
}

bool gk_cuda_takes(const gk_cuda_table *table, gk_op op, const void *args) {
    (void)table, (void)op, (void)args;
    return true;
}
#endif
