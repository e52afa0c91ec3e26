/* SPDX-License-Identifier: BSD-3-Clause */
/* prefill_launch.cuh: the host side of paged_prefill_sm90a and paged_tree_sm90a: which calls they
 * serve, the plan, the tensor maps, and what follows the kernel. */
#ifndef GPUKERN_CUDA_PREFILL_LAUNCH_CUH
#define GPUKERN_CUDA_PREFILL_LAUNCH_CUH

#include "../forward/fwd_loop.cuh"
#include "../forward/fwd_pages.cuh"
#include "../kv.cuh"
#include "paged_tiles.h"
#include "prefill_tiles.h"

namespace {

/* ---- 1. plan --------------------------------------------------------------------------------- */
/* An instance's key. */
struct PrefillKey {
    enum {
        HEAD_DIM,
        SMEM,    /* bytes of shared memory */
        MODIFIED /* softcap or ALiBi; paged_prefill_sm90a only */
    };
};

/* The TMA shape of a cache: columns of a panel, keys, panels, heads, pages. */
inline TensorShape pages_shape(const gk_tensor &t) {
    TensorShape x = {};
    x.data = t.data;
    x.dtype = t.dtype;
    x.size[0] = 64;
    x.size[1] = t.shape[1];
    x.size[2] = t.shape[3] / 64;
    x.size[3] = t.shape[2];
    x.size[4] = t.shape[0];
    x.stride[1] = t.stride[1];
    x.stride[2] = 64;
    x.stride[3] = t.stride[2];
    x.stride[4] = t.stride[0];
    return x;
}

/* log2 of the keys of a box: the largest power of 2 that divides a page, at most a tile. */
inline int box_log2(int64_t block_size, int bkv) {
    int n = 3;
    while (1 << n < bkv && block_size % (2 << n) == 0) ++n;
    return n;
}

/* True if a call has many tokens a sequence, on average if the call is packed. If it is not packed,
 * many rows of a kv head suffice. */
inline bool prefill_has_many(const gk_paged_attn_args *a) {
    const int64_t batch = a->seq_lens.shape[0], tokens = paged_seq_q(a),
                  group = a->k_cache.shape[2] ? a->q.shape[1] / a->k_cache.shape[2] : 1;
    const bool many = tokens >= PREFILL_TOKENS && a->q.shape[0] >= batch * PREFILL_TOKENS;
    return many || (!a->cu_seqlens_q && tokens * group >= PREFILL_ROWS);
}

/* Plans a call whose rules the caller has checked. The plan keeps PrefillParams. smem_bytes: what a
 * block needs. */
template <class Tile>
bool prefill_plan(const gk_context *ctx, const gk_paged_attn_args *a, int smem_bytes, gk_plan *to) {
    const gk_attn_rules &r = a->rules;
    if (a->k_cache.dtype != a->q.dtype || a->q.shape[2] != Tile::HEAD_DIM ||
        a->v_cache.shape[3] != Tile::HEAD_DIM || a->k_cache.shape[1] % 8 != 0 ||
        a->k_cache.shape[0] >= INT32_MAX || a->k_cache.shape[2] == 0 ||
        a->q.shape[0] * a->q.shape[1] > INT32_MAX || !plain_scores(r) || a->k_scale || a->v_scale ||
        !in_32_bits(a->block_table))
        return false;
    const gk_flash_attn_args flash = as_flash(a);
    if (!tensor_map_fits(attn_shape(flash.q)) || !tensor_map_fits(attn_shape(flash.out)) ||
        !tensor_map_fits(pages_shape(a->k_cache)) || !tensor_map_fits(pages_shape(a->v_cache)) ||
        !smem_fits(ctx, smem_bytes))
        return false;
    const bool late = r.window_left >= 0 || r.kv_start;
    PrefillParams &x = gk_own<PrefillParams>(to) = {};
    x.f = fwd_hopper_params<Tile>(ctx, &flash);
    x.f.reads = true;
    as_paged(&x.f.fwd.problem, a);
    x.pages = prefill_pages(a);
    x.f.box_log2 = box_log2(a->k_cache.shape[1], late ? PREFILL_LATE_BOX : Tile::BKV);
    fwd_plan(ctx, x.f.fwd, Smem<Tile>::BQ, Tile::BKV, 1, fwd_blocks(x.f.fwd) / x.f.tile_heads, to);
    return true;
}

/* ---- 2. run ---------------------------------------------------------------------------------- */
/* Completes a plan's parameters: addresses in the workspace, and tensor maps. */
template <class Tile>
gk_status prefill_place(const char *op, const gk_paged_attn_args *a, void *workspace,
                        PrefillParams *x) {
    const gk_flash_attn_args flash = as_flash(a);
    fwd_place(&x->f.fwd, workspace);
    const smem_box pages = wgmma_box(2, 1 << x->f.box_log2);
    gk_status status = make_tensor_map(op, attn_shape(flash.q), q_box<Tile>(x->f), &x->f.q);
    if (status == GK_OK) status = make_tensor_map(op, pages_shape(a->k_cache), pages, &x->f.k);
    if (status == GK_OK) status = make_tensor_map(op, pages_shape(a->v_cache), pages, &x->f.v);
    if (status == GK_OK)
        status = make_tensor_map(op, attn_shape(flash.out), wgmma_box(2, 16), &x->f.out);
    return status;
}

/* Merges the splits; a row of a split is one head of one token, whether the call is packed or not.
 * Then zeroes the results of tokens that belong to no sequence. */
template <class T>
gk_status prefill_finish(const char *op, const gk_context *ctx, const FwdParams &f) {
    const Problem &p = f.problem;
    if (f.splits > 1 && f.split_rows > 0) {
        SplitCombine c = fwd_combine(f);
        c.sink_z = p.rules.sink_head;
        c.size_y = (int)(f.split_rows / p.heads_q);
        c.size_z = p.heads_q;
        c.out_y = p.out.row;
        c.out_z = p.out.head;
        const gk_status status = split_combine(op, ctx, element<T>::dtype, c);
        if (status != GK_OK) return status;
    }
    return clear_unowned<T>(op, ctx, p);
}

} // namespace

#endif
