/* SPDX-License-Identifier: BSD-3-Clause */
/* tables.c: every CPU kernel by op, dtype and instruction set, best set first. dispatch.c takes
 * the first instance that serves a call; gk_context.cpu_isa hides the better sets.
 *
 * The symbols, for grep, are gk_<stem>_<isa>. DECLARE lists the stems for base, avx2, avx512 and
 * avx512bf16, DECLARE_AMX those for amx and amx_emulated. A table need not use all of them:
 * flash_attn_fp8 has no instance for avx512bf16, because its cells are float32.
 *
 * float32 instances compute in float32. bfloat16 and float16 instances convert tile by tile.
 * avx512bf16 multiplies pairs of bfloat16; on Intel's cores that is slower than converting, so
 * the default there is avx512 (measured, see features.c). float64 is served by ref/. GK_X86_ISAS
 * is defined if the build compiled more than the base set. */
#include "kernels.h"

/* ---- float64 --------------------------------------------------------------------------------- */
static bool plan_ref(const gk_context *ctx, const void *args, gk_plan *plan) {
    (void)ctx, (void)args;
    plan->tasks = 1;
    return true;
}
#define OP(NAME, stem, arguments, first)                                                 \
    static void ref_##stem(const gk_context *ctx, const void *args, const gk_plan *plan, \
                           void *workspace) {                                            \
        (void)plan, (void)workspace;                                                     \
        gk_ref_##stem(ctx, (const arguments *)args);                                     \
    }                                                                                    \
    static const gk_cpu_kernel stem##_ref = {plan_ref, ref_##stem};
#include "../core/ops.def"
#define REF_INSTANCE(stem) {#stem "_ref", GK_F64, GK_ISA_BASE, &stem##_ref}

/* ---- the instances --------------------------------------------------------------------------- */
#define DECLARE(stem)                                                                  \
    extern const gk_cpu_kernel gk_##stem##_base, gk_##stem##_avx2, gk_##stem##_avx512, \
        gk_##stem##_avx512bf16;
#define DECLARE_AMX(stem) extern const gk_cpu_kernel gk_##stem##_amx, gk_##stem##_amx_emulated;
DECLARE_AMX(gemm_packed)
DECLARE_AMX(flash_attn_fwd)
DECLARE_AMX(flash_attn_bwd)
DECLARE_AMX(paged_attn)
DECLARE_AMX(scaled_gemm)
DECLARE_AMX(sparse_gemm)
DECLARE(gemm_packed)
DECLARE(gemm_skinny)
DECLARE(gemm_act_bwd)
DECLARE(flash_attn_fwd)
DECLARE(flash_attn_bwd)
DECLARE(flash_attn_fp8)
DECLARE(paged_attn)
DECLARE(kv_cache_write)
DECLARE(rope_kv_write)
DECLARE(attn_merge)
DECLARE(quantize)
DECLARE(dequantize)
DECLARE(scaled_gemm)
DECLARE(scaled_gemm_vnni)
DECLARE(weight_gemm)
DECLARE(weight_skinny)
DECLARE(grouped_gemm)
DECLARE(grouped_gemm_vnni)
DECLARE(sparse_gemm)
DECLARE(sparse_gemm_vnni)
DECLARE(norm_fwd)
DECLARE(norm_bwd)
DECLARE(softmax_fwd)
DECLARE(softmax_bwd)
DECLARE(glu_fwd)
DECLARE(glu_bwd)
DECLARE(rope)
DECLARE(cross_entropy_fwd)
DECLARE(cross_entropy_bwd)
DECLARE(kl_div)
DECLARE(moe_unpermute)
DECLARE(moe_unpermute_bwd)
DECLARE(dropout)
DECLARE(adamw)

#define INSTANCE(stem, dtype, ISA, isa) {#stem, dtype, ISA, &gk_##stem##_##isa}
#define THREE(stem, ISA, isa)                                            \
    INSTANCE(stem, GK_F32, ISA, isa), INSTANCE(stem, GK_BF16, ISA, isa), \
        INSTANCE(stem, GK_F16, ISA, isa)
/* vnni: int8 with VPDPBUSD. The set's name does not imply VPDPBUSD, so the kernel checks for it. */
#define CODES_VNNI(stem, ISA, isa) INSTANCE(stem##_vnni, GK_I8, ISA, isa), CODES(stem, ISA, isa)
#define CODES(stem, ISA, isa)                                             \
    INSTANCE(stem, GK_E4M3, ISA, isa), INSTANCE(stem, GK_E5M2, ISA, isa), \
        INSTANCE(stem, GK_I8, ISA, isa)
#if defined(GK_X86_ISAS)
/* avx512bf16 multiplies 8-bit codes as pairs of bfloat16 */
#define EVERY_ISA_OF_INT8(stem)                                                               \
    CODES_VNNI(stem, GK_ISA_AVX512BF16, avx512bf16), CODES_VNNI(stem, GK_ISA_AVX512, avx512), \
        CODES_VNNI(stem, GK_ISA_AVX2, avx2), CODES(stem, GK_ISA_BASE, base)
#define EVERY_ISA_OF_E4M3(stem)                             \
    INSTANCE(stem, GK_E4M3, GK_ISA_AVX512BF16, avx512bf16), \
        INSTANCE(stem, GK_E4M3, GK_ISA_AVX512, avx512),     \
        INSTANCE(stem, GK_E4M3, GK_ISA_AVX2, avx2), INSTANCE(stem, GK_E4M3, GK_ISA_BASE, base)
/* codes that are multiplied as float32 */
#define EVERY_ISA_OF_FLOATS(stem)                                                               \
    INSTANCE(stem, GK_E4M3, GK_ISA_AVX512, avx512), INSTANCE(stem, GK_E4M3, GK_ISA_AVX2, avx2), \
        INSTANCE(stem, GK_E4M3, GK_ISA_BASE, base)
#define EVERY_ISA(stem)                                                                         \
    INSTANCE(stem, GK_BF16, GK_ISA_AVX512BF16, avx512bf16), THREE(stem, GK_ISA_AVX512, avx512), \
        THREE(stem, GK_ISA_AVX2, avx2), THREE(stem, GK_ISA_BASE, base)
/* For each instruction set `first` comes before `second`, so it serves the calls that it can plan.
 */
#define EITHER(first, second)                                                      \
    INSTANCE(first, GK_BF16, GK_ISA_AVX512BF16, avx512bf16),                       \
        INSTANCE(second, GK_BF16, GK_ISA_AVX512BF16, avx512bf16),                  \
        THREE(first, GK_ISA_AVX512, avx512), THREE(second, GK_ISA_AVX512, avx512), \
        THREE(first, GK_ISA_AVX2, avx2), THREE(second, GK_ISA_AVX2, avx2),         \
        THREE(first, GK_ISA_BASE, base), THREE(second, GK_ISA_BASE, base)
#else
#define EVERY_ISA_OF_INT8(stem) CODES(stem, GK_ISA_BASE, base)
#define EVERY_ISA_OF_E4M3(stem) INSTANCE(stem, GK_E4M3, GK_ISA_BASE, base)
#define EVERY_ISA_OF_FLOATS(stem) INSTANCE(stem, GK_E4M3, GK_ISA_BASE, base)
#define EVERY_ISA(stem) THREE(stem, GK_ISA_BASE, base)
#define EITHER(first, second) THREE(first, GK_ISA_BASE, base), THREE(second, GK_ISA_BASE, base)
#endif

/* Products on AMX tiles, and on their emulation. */
#if defined(GK_HAS_AMX)
#define TILES_OF(stem, dtype)               \
    INSTANCE(stem, dtype, GK_ISA_AMX, amx), \
        INSTANCE(stem, dtype, GK_ISA_AMX_EMULATED, amx_emulated),
#elif defined(GK_X86_ISAS)
#define TILES_OF(stem, dtype) INSTANCE(stem, dtype, GK_ISA_AMX_EMULATED, amx_emulated),
#else
#define TILES_OF(stem, dtype)
#endif
#define ON_TILES(stem) TILES_OF(stem, GK_BF16)

static const gk_cpu_instance gemm_instances[] = {
    ON_TILES(gemm_packed) EITHER(gemm_skinny, gemm_packed), REF_INSTANCE(gemm)};
static const gk_cpu_instance gemm_act_bwd_instances[] = {EVERY_ISA(gemm_act_bwd),
                                                         REF_INSTANCE(gemm_act_bwd)};
static const gk_cpu_instance flash_attn_fwd_instances[] = {
    ON_TILES(flash_attn_fwd) EVERY_ISA(flash_attn_fwd), REF_INSTANCE(flash_attn_fwd)};
static const gk_cpu_instance flash_attn_bwd_instances[] = {
    ON_TILES(flash_attn_bwd) EVERY_ISA(flash_attn_bwd), REF_INSTANCE(flash_attn_bwd)};
static const gk_cpu_instance flash_attn_fp8_instances[] = {EVERY_ISA_OF_FLOATS(flash_attn_fp8)};
/* ref/ also serves masks over new tokens, in every dtype. It is for C programs: torch_gpukern makes
 * such a call of two other ones. */
static const gk_cpu_instance paged_attn_instances[] = {
    ON_TILES(paged_attn) EVERY_ISA(paged_attn),
    REF_INSTANCE(paged_attn),
    {"paged_attn_ref", GK_F32, GK_ISA_BASE, &paged_attn_ref},
    {"paged_attn_ref", GK_BF16, GK_ISA_BASE, &paged_attn_ref},
    {"paged_attn_ref", GK_F16, GK_ISA_BASE, &paged_attn_ref}};
static const gk_cpu_instance kv_cache_write_instances[] = {EVERY_ISA(kv_cache_write),
                                                           REF_INSTANCE(kv_cache_write)};
static const gk_cpu_instance rope_kv_write_instances[] = {EVERY_ISA(rope_kv_write),
                                                          REF_INSTANCE(rope_kv_write)};
static const gk_cpu_instance attn_merge_instances[] = {EVERY_ISA(attn_merge),
                                                       REF_INSTANCE(attn_merge)};
static const gk_cpu_instance quantize_instances[] = {EVERY_ISA(quantize), REF_INSTANCE(quantize)};
static const gk_cpu_instance dequantize_instances[] = {EVERY_ISA(dequantize),
                                                       REF_INSTANCE(dequantize)};
static const gk_cpu_instance scaled_gemm_instances[] = {TILES_OF(scaled_gemm, GK_I8)
                                                            EVERY_ISA_OF_INT8(scaled_gemm)};
/* packing involves no arithmetic, so ref/ is fast enough for every dtype */
static const gk_cpu_instance pack_weight_instances[] = {
    {"pack_weight", GK_I8, GK_ISA_BASE, &pack_weight_ref},
    {"pack_weight", GK_U8, GK_ISA_BASE, &pack_weight_ref},
    {"pack_weight", GK_E4M3, GK_ISA_BASE, &pack_weight_ref}};
static const gk_cpu_instance unpack_weight_instances[] = {
    {"unpack_weight", GK_U8, GK_ISA_BASE, &unpack_weight_ref}};
static const gk_cpu_instance weight_gemm_instances[] = {EITHER(weight_skinny, weight_gemm),
                                                        EVERY_ISA_OF_E4M3(weight_gemm)};
static const gk_cpu_instance grouped_gemm_instances[] = {EVERY_ISA(grouped_gemm),
                                                         EVERY_ISA_OF_INT8(grouped_gemm)};
#define SPARSE_PACK(dtype) {"sparse_pack", dtype, GK_ISA_BASE, &sparse_pack_ref}
static const gk_cpu_instance sparse_pack_instances[] = {SPARSE_PACK(GK_BF16), SPARSE_PACK(GK_F16),
                                                        SPARSE_PACK(GK_E4M3), SPARSE_PACK(GK_E5M2),
                                                        SPARSE_PACK(GK_I8)};
static const gk_cpu_instance sparse_gemm_instances[] = {
    TILES_OF(sparse_gemm, GK_I8) EVERY_ISA(sparse_gemm), EVERY_ISA_OF_INT8(sparse_gemm)};
static const gk_cpu_instance norm_fwd_instances[] = {EVERY_ISA(norm_fwd), REF_INSTANCE(norm_fwd)};
static const gk_cpu_instance norm_bwd_instances[] = {EVERY_ISA(norm_bwd), REF_INSTANCE(norm_bwd)};
static const gk_cpu_instance softmax_fwd_instances[] = {EVERY_ISA(softmax_fwd),
                                                        REF_INSTANCE(softmax_fwd)};
static const gk_cpu_instance softmax_bwd_instances[] = {EVERY_ISA(softmax_bwd),
                                                        REF_INSTANCE(softmax_bwd)};
static const gk_cpu_instance glu_fwd_instances[] = {EVERY_ISA(glu_fwd), REF_INSTANCE(glu_fwd)};
static const gk_cpu_instance glu_bwd_instances[] = {EVERY_ISA(glu_bwd), REF_INSTANCE(glu_bwd)};
static const gk_cpu_instance rope_instances[] = {EVERY_ISA(rope), REF_INSTANCE(rope)};
static const gk_cpu_instance cross_entropy_fwd_instances[] = {EVERY_ISA(cross_entropy_fwd),
                                                              REF_INSTANCE(cross_entropy_fwd)};
static const gk_cpu_instance cross_entropy_bwd_instances[] = {EVERY_ISA(cross_entropy_bwd),
                                                              REF_INSTANCE(cross_entropy_bwd)};
static const gk_cpu_instance kl_div_instances[] = {EVERY_ISA(kl_div), REF_INSTANCE(kl_div)};
static const gk_cpu_instance moe_unpermute_instances[] = {EVERY_ISA(moe_unpermute),
                                                          REF_INSTANCE(moe_unpermute)};
static const gk_cpu_instance moe_unpermute_bwd_instances[] = {EVERY_ISA(moe_unpermute_bwd),
                                                              REF_INSTANCE(moe_unpermute_bwd)};
static const gk_cpu_instance dropout_instances[] = {EVERY_ISA(dropout), REF_INSTANCE(dropout)};
/* no arithmetic either, so ref/ serves it */
static const gk_cpu_instance attn_mask_instances[] = {
    {"attn_mask", GK_I32, GK_ISA_BASE, &attn_mask_ref}};
/* ref/ serves every dtype, because its bits are what the op promises */
#define SAMPLE_TOKENS(dtype) {"sample_tokens", dtype, GK_ISA_BASE, &sample_tokens_ref}
static const gk_cpu_instance sample_tokens_instances[] = {
    SAMPLE_TOKENS(GK_F32), SAMPLE_TOKENS(GK_BF16), SAMPLE_TOKENS(GK_F16), SAMPLE_TOKENS(GK_F64)};
static const gk_cpu_instance adamw_instances[] = {EVERY_ISA(adamw), REF_INSTANCE(adamw)};

const gk_cpu_instance *gk_cpu_instances(gk_op op, int *num_instances) {
    switch (op) {
#define OP(NAME, stem, arguments, first)                                              \
    case GK_OP_##NAME:                                                                \
        *num_instances = (int)(sizeof stem##_instances / sizeof stem##_instances[0]); \
        return stem##_instances;
#include "../core/ops.def"
    default: *num_instances = 0; return NULL;
    }
}
