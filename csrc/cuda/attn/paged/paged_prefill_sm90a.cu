/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_prefill_sm90a: attention with many query tokens a sequence over a paged cache, on Hopper's
 * tensor cores, 16 bits: prefill and chunked prefill. It combines the consumers of
 * flash_attn_fwd_sm90a, whose file describes the algorithm, with a producer that loads pages
 * (fwd_pages.cuh).
 *
 *  out[t] = sum_j softmax_j(score(scale q[t] k[j]), sink) v[j]         j in [lo(t), hi(t))
 *
 * q [T, Hq, D]; k_cache, v_cache [num_blocks, block_size, Hkv, D]; block_table [B, max_blocks],
 * seq_lens [B], cu_seqlens_q [B + 1] int32; out [T, Hq, D], lse [T, Hq]. Pages: Kwon et al. 2023.
 *
 * Work split: as in flash_attn_fwd_sm90a, in tiles of 128 queries of a head, or of several heads of
 * a group if sequences have few queries.
 *
 * Not handled: pages that are not a multiple of 8 keys; head_dim other than 64, 128 and (bfloat16)
 * 256; right windows; scales; ALiBi with a left window or kv_start and no causal rule; 8-bit pages,
 * which paged_prefill_relay_sm90a decodes first; few tokens a sequence, which are bound by reading
 * the cache (paged_attn_sm90a, paged_attn_sm80). */
#include "../../ptx/cluster.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "../forward/fwd_loop.cuh"
#include "../forward/fwd_pages.cuh"
#include "../kv.cuh"
#include "paged_tiles.h"
#include "prefill_tiles.h"

namespace {

/* ---- 1. the kernel --------------------------------------------------------------------------- */
template <class T, class Tile, bool MODIFIED>
__global__ void __launch_bounds__(Smem<Tile>::THREADS, 1)
    paged_prefill_sm90a_kernel(const __grid_constant__ PrefillParams a) {
    typedef Smem<Tile> S;
    extern __shared__ __align__(1024) unsigned char smem[];
    const FwdHopperParams &x = a.f;
    const smem_addr smem_s = cvta_to_shared(smem);
    FwdTile *tiles = (FwdTile *)(smem + S::TILES);
    /* the shuffle tells the compiler that the value is uniform over the warp */
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    begin_block<Tile, 2>(x, smem_s);
    griddepcontrol_launch_dependents();
    __syncthreads();
    if (warpgroup == Tile::WARPGROUPS) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 1) {
            find_tiles<Tile, MODIFIED>(x, smem, smem_s, [&](int b) {
                return prefill_sequence(x.fwd.problem, a.pages, b);
            });
        } else if (warp == 0) {
            if (elect_one()) {
                prefetch_tensormap(&x.q);
                prefetch_tensormap(&x.k);
                prefetch_tensormap(&x.v);
            }
            /* wait until the previous kernel has written its results and read `out` */
            griddepcontrol_wait();
            PageLoader<Tile, MODIFIED, true>{a, smem_s}.all(tiles);
        } else if (warp == 3) {
            griddepcontrol_wait();
            PageLoader<Tile, MODIFIED, false>{a, smem_s}.all(tiles);
        } else if (warp == 2) {
            griddepcontrol_wait();
            check_prefill(a);
        }
    } else {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        consume<T, Tile, MODIFIED>(x, smem_s, tiles, warpgroup);
    }
}

/* ---- 2. launcher and table ------------------------------------------------------------------- */
/* The TMA shape of a cache: columns of a panel, keys, panels, heads, pages. */
TensorShape pages_shape(const gk_tensor &t) {
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
int box_log2(int64_t block_size, int bkv) {
    int n = 3;
    while (1 << n < bkv && block_size % (2 << n) == 0) ++n;
    return n;
}

/* An instance's key. */
struct PrefillKey {
    enum {
        HEAD_DIM,
        SMEM,    /* bytes of shared memory */
        MODIFIED /* softcap or ALiBi */
    };
};

template <class Tile>
bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const gk_attn_rules &r = a->rules;
    const bool modified = r.softcap > 0 || r.alibi_slopes, late = r.window_left >= 0 || r.kv_start;
    const bool to_right = a->flags & GK_PAGED_WINDOW_RIGHT && r.window_right >= 0,
               causal = prefill_is_causal(a);
    if (a->k_cache.dtype != a->q.dtype || a->q.shape[2] != Tile::HEAD_DIM ||
        a->v_cache.shape[3] != Tile::HEAD_DIM ||
        modified != (instance->key[PrefillKey::MODIFIED] != 0) || a->k_cache.shape[1] % 8 != 0 ||
        a->k_cache.shape[0] >= INT32_MAX || a->k_cache.shape[2] == 0 ||
        a->q.shape[0] * a->q.shape[1] > INT32_MAX || (to_right && !causal) ||
        (r.alibi_slopes && late && !causal) || !plain_scores(r) || a->k_scale || a->v_scale ||
        !in_32_bits(a->block_table))
        return false;
    const gk_flash_attn_args flash = as_flash(a);
    if (!tensor_map_fits(attn_shape(flash.q)) || !tensor_map_fits(attn_shape(flash.out)) ||
        !tensor_map_fits(pages_shape(a->k_cache)) || !tensor_map_fits(pages_shape(a->v_cache)) ||
        !smem_fits(ctx, instance->key[PrefillKey::SMEM]))
        return false;
    PrefillParams &x = gk_own<PrefillParams>(to) = {};
    x.f = fwd_hopper_params<Tile>(ctx, &flash);
    x.f.reads = true;
    as_paged(&x.f.fwd.problem, a);
    x.pages = prefill_pages(a);
    x.f.box_log2 = box_log2(a->k_cache.shape[1], late ? PREFILL_LATE_BOX : Tile::BKV);
    fwd_plan(ctx, x.f.fwd, Smem<Tile>::BQ, Tile::BKV, 1, fwd_blocks(x.f.fwd) / x.f.tile_heads, to);
    return true;
}

/* Merges the splits. A row of a split is one head of one token, packed or not. Then clears the
 * tokens that belong to no sequence. */
template <class T> gk_status finish(const char *op, const gk_context *ctx, const FwdParams &f) {
    const Problem &p = f.problem;
    if (f.splits > 1 && f.split_rows > 0) {
        SplitCombine c = {};
        c.out_splits = f.out_splits;
        c.lse_splits = f.lse_splits;
        c.splits = f.splits;
        c.rows = f.split_rows;
        c.head_dim_v = p.head_dim_v;
        c.out = (void *)p.out.data;
        c.lse = (float *)p.lse.data;
        c.sinks = p.rules.sinks;
        c.sinks_dtype = p.rules.sinks_dtype;
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

template <class T, class Tile, bool MODIFIED>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static const char op[] = "gk_paged_attn";
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const gk_flash_attn_args flash = as_flash(a);
    PrefillParams x = gk_own<PrefillParams>(plan);
    if (a->q.shape[0] == 0 || a->q.shape[1] == 0) return GK_OK;
    fwd_place(&x.f.fwd, workspace);
    const smem_box pages = wgmma_box(2, 1 << x.f.box_log2);
    gk_status status = make_tensor_map(op, attn_shape(flash.q), q_box<Tile>(x.f), &x.f.q);
    if (status == GK_OK) status = make_tensor_map(op, pages_shape(a->k_cache), pages, &x.f.k);
    if (status == GK_OK) status = make_tensor_map(op, pages_shape(a->v_cache), pages, &x.f.v);
    if (status == GK_OK)
        status = make_tensor_map(op, attn_shape(flash.out), wgmma_box(2, 16), &x.f.out);
    if (status != GK_OK) return status;
    status = launch<paged_prefill_sm90a_kernel<T, Tile, MODIFIED>>(
        op, ctx, dim3((unsigned)x.f.schedule.blocks), Smem<Tile>::THREADS, Smem<Tile>::BYTES, x,
        true);
    return status == GK_OK ? finish<T>(op, ctx, x.f.fwd) : status;
}

#define ROW(NAME, DTYPE, T, TILE, MODIFIED)         \
    {"paged_prefill_sm90a_" NAME,                   \
     DTYPE,                                         \
     plan<PagedTile<TILE>>,                         \
     run<T, PagedTile<TILE>, MODIFIED>,             \
     {TILE::HEAD_DIM, Smem<TILE>::BYTES, MODIFIED}, \
     NULL}
#define ROWS(LABEL, DTYPE, T, TILE) \
    ROW(LABEL, DTYPE, T, TILE, false), ROW(LABEL "_score", DTYPE, T, TILE, true)

const gk_cuda_instance instances[] = {ROWS("bf16_d64", GK_BF16, __nv_bfloat16, FwdHopper64Short),
                                      ROWS("f16_d64", GK_F16, __half, FwdHopper64Short),
                                      ROWS("bf16_d128", GK_BF16, __nv_bfloat16, FwdHopper128),
                                      ROWS("f16_d128", GK_F16, __half, FwdHopper128),
                                      ROWS("bf16_d256", GK_BF16, __nv_bfloat16, FwdHopper256)};
#undef ROWS
#undef ROW

/* Serves calls with many tokens a sequence, on average if the call is packed. If it is not packed,
 * many rows of a kv head suffice. */
bool plan_many(const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const int64_t batch = a->seq_lens.shape[0], tokens = paged_seq_q(a),
                  group = a->k_cache.shape[2] ? a->q.shape[1] / a->k_cache.shape[2] : 1;
    const bool many = tokens >= PREFILL_TOKENS && a->q.shape[0] >= batch * PREFILL_TOKENS;
    if (!many && (a->cu_seqlens_q || tokens * group < PREFILL_ROWS)) return false;
    for (const gk_cuda_instance &instance : instances) {
        if (instance.dtype != a->q.dtype || !instance.plan(&instance, ctx, args, to)) continue;
        to->kernel = &instance;
        return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_paged_prefill_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, plan_many};
