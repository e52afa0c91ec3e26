/* SPDX-License-Identifier: BSD-3-Clause */
/* check_cuda_attn_fp8.h: check_cuda's random problems for flash_attn_fp8: those of
 * flash_attn_fwd with codes, every form of scales, and means of v.
 *
 * size: sum p |v| |v_scale| + |v_mean|, every term positive. loss, precise: that of float16
 * attention, because codes are multiplied as float16; q and k with scales of blocks are rounded
 * to it. loss, fast: products may be 8-bit: 2^-4 for probabilities with three bits, and sums of
 * 14 bits in k / 32 steps. */
#ifndef GPUKERN_CHECK_CUDA_ATTN_FP8_H
#define GPUKERN_CHECK_CUDA_ATTN_FP8_H

#include "formats/attn_scales.h"

static struct {
    gk_flash_attn_fp8_args args;
    check_tensor q_scale, k_scale, v_scale, v_mean;
} e8;

/* [], [H], [B, H] or one for each 128 tokens; values up to `most`. */
static check_tensor fp8_scales(int ndim, int64_t num_heads, int64_t tokens, double most) {
    const int64_t all[3] = {f.batch, num_heads, gk_ceil_div(tokens, GK_ATTN_SCALE_TOKENS)};
    return make_stats(GK_F32, ndim, ndim == 1 ? all + 1 : all, most / 8, most, false);
}

static void attn_fp8_draw(gk_dtype dtype, bool large) {
    if (dtype != GK_E4M3) return; /* other dtypes have no instance */
    flash_draw(dtype, large, false, false);
    const int form = check_below(3) ? (int)check_below(4) : 2 + (int)check_below(2);
    const int64_t mean[3] = {f.batch, f.heads_kv, f.dim_v}, by_batch = check_below(2);
    gk_flash_attn_fp8_args *a = &e8.args;
    *a = (gk_flash_attn_fp8_args){.size = sizeof *a, .fwd = f.args.fwd};
    e8.q_scale =
        fp8_scales(form, f.heads_q, a->fwd.cu_seqlens_q ? a->fwd.max_seqlen_q : f.seq_q, 1);
    e8.k_scale =
        fp8_scales(form, f.heads_kv, a->fwd.cu_seqlens_q ? a->fwd.max_seqlen_k : f.seq_k, 1);
    e8.v_scale =
        fp8_scales(form, f.heads_kv, a->fwd.cu_seqlens_q ? a->fwd.max_seqlen_k : f.seq_k, 2);
    e8.v_mean = check_dense(GK_F32, by_batch ? 3 : 2, by_batch ? mean : mean + 1);
    for (int64_t i = 0; i < gk_numel(&e8.v_mean.t); ++i)
        check_set(&e8.v_mean.t, i, check_uniform(-2, 2));
    mirror(&e8.q_scale, "q_scale", false);
    mirror(&e8.k_scale, "k_scale", false);
    mirror(&e8.v_scale, "v_scale", false);
    mirror(&e8.v_mean, "v_mean", false);
    a->q_scale = check_below(4) ? &e8.q_scale.t : NULL;
    a->k_scale = check_below(4) ? &e8.k_scale.t : NULL;
    a->v_scale = check_below(4) ? &e8.v_scale.t : NULL;
    a->v_mean = check_below(3) ? &e8.v_mean.t : NULL;
    a->accumulate = check_below(3) ? GK_ATTN_FAST : check_below(2) ? GK_ATTN_AUTO : GK_ATTN_PRECISE;
    say(" scales %d%s out %s", form, gk_attn_is_precise(a) ? " precise" : "",
        gk_dtype_name(f.out.t.dtype));
    TO_DEVICE(*a);
}

static void attn_fp8_expect(void) {
    check_fill_normal(&f.q, 1);
    check_fill_normal(&f.k, 1);
    check_fill_normal(&f.v, 1);
    /* scales of q and k are at most 1 */
    const double most = flash_max_logit(), terms = (double)f.seq_k;
    const bool fast = !gk_attn_is_precise(&e8.args);
    /* the error of one score */
    const double score = most * (fast ? 0x1p-13 * ((double)f.dim / 32 + 1) : 0x1p-9);
    poison_unseen(false);
    result *out = expected(&f.out, 2 * score + attn_loss(GK_F16, f.dim, most, terms, 1.25) +
                                       (fast ? 0x1p-4 + 0x1p-13 * (terms / 32 + 1) : 0x1p-9));
    out->floor = attn_floor(GK_F16, terms) + (fast ? 0x1p-16 * terms * 8 : 0);
    gk_flash_attn_fp8_args ref = e8.args;
    if (ref.fwd.lse.data) {
        result *lse = expected(&f.lse, score + attn_loss(GK_F32, f.dim, most, 0, 0));
        check_fill(&lse->size, 1);
        ref.fwd.lse = lse->exact.t;
    }
    check_tensor abs_v = check_map(&f.v, fabs), abs_mean = check_map(&e8.v_mean, fabs);
    ref.fwd.v = abs_v.t;
    ref.fwd.out = out->size.t;
    if (ref.v_mean) ref.v_mean = &abs_mean.t;
    gk_ref_flash_attn_fp8(&ref_ctx, &ref);
    ref.fwd.v = f.v.t;
    ref.fwd.out = out->exact.t;
    ref.v_mean = e8.args.v_mean;
    gk_ref_flash_attn_fp8(&ref_ctx, &ref);
}

#endif
