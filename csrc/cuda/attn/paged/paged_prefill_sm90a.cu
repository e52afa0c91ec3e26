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
 * Work split: as in flash_attn_fwd_sm90a, in tiles of 128 queries of a head. If sequences have few
 * queries, a tile has queries of several heads of a group.
 *
 * Refused: pages that are not a multiple of 8 keys; head_dim other than 64, 128 and (bfloat16) 256;
 * right windows; scales; ALiBi with a left window or kv_start and no causal rule.
 * paged_prefill_decoded_sm90a serves 8-bit pages. Calls with few tokens a sequence are bound by
 * reading the cache, so paged_attn_sm90a and paged_attn_sm80 serve them. */
#include "../../ptx/cluster.cuh"
#include "../../ptx/griddepcontrol.cuh"
#include "../forward/fwd_loop.cuh"
#include "prefill_launch.cuh"

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
template <class Tile>
bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    const gk_attn_rules &r = a->rules;
    const bool modified = r.softcap > 0 || r.alibi_slopes, late = r.window_left >= 0 || r.kv_start;
    const bool to_right = a->flags & GK_PAGED_WINDOW_RIGHT && r.window_right >= 0,
               causal = prefill_is_causal(a);
    if (modified != (instance->key[PrefillKey::MODIFIED] != 0) || (to_right && !causal) ||
        (r.alibi_slopes && late && !causal))
        return false;
    return prefill_plan<Tile>(ctx, a, instance->key[PrefillKey::SMEM], to);
}

template <class T, class Tile, bool MODIFIED>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    static const char op[] = "gk_paged_attn";
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    PrefillParams x = gk_own<PrefillParams>(plan);
    if (a->q.shape[0] == 0 || a->q.shape[1] == 0) return GK_OK;
    gk_status status = prefill_place<Tile>(op, a, workspace, &x);
    if (status != GK_OK) return status;
    status = launch<paged_prefill_sm90a_kernel<T, Tile, MODIFIED>>(
        op, ctx, dim3((unsigned)x.f.schedule.blocks), Smem<Tile>::THREADS, Smem<Tile>::BYTES, x,
        true);
    return status == GK_OK ? prefill_finish<T>(op, ctx, x.f.fwd) : status;
}

#define INSTANCE(NAME, DTYPE, T, TILE, MODIFIED)    \
    {"paged_prefill_sm90a_" NAME,                   \
     DTYPE,                                         \
     plan<PagedTile<TILE>>,                         \
     run<T, PagedTile<TILE>, MODIFIED>,             \
     {TILE::HEAD_DIM, Smem<TILE>::BYTES, MODIFIED}, \
     NULL}
#define INSTANCES(LABEL, DTYPE, T, TILE) \
    INSTANCE(LABEL, DTYPE, T, TILE, false), INSTANCE(LABEL "_score", DTYPE, T, TILE, true)

const gk_cuda_instance instances[] = {
    INSTANCES("bf16_d64", GK_BF16, __nv_bfloat16, FwdHopper64Short),
    INSTANCES("f16_d64", GK_F16, __half, FwdHopper64Short),
    INSTANCES("bf16_d128", GK_BF16, __nv_bfloat16, FwdHopper128),
    INSTANCES("f16_d128", GK_F16, __half, FwdHopper128),
    INSTANCES("bf16_d256", GK_BF16, __nv_bfloat16, FwdHopper256)};
#undef INSTANCES
#undef INSTANCE

/* Serves calls with many rows. */
bool plan_many(const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_paged_attn_args *a = (const gk_paged_attn_args *)args;
    if (!prefill_has_many(a)) return false;
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
