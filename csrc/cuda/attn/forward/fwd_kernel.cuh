/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_kernel.cuh: the kernel of flash_attn_fwd_sm90a, flash_attn_fwd_wide_sm90a and
 * flash_attn_fwd_partial_sm90a, with its plan and launch. flash_attn_fwd_sm90a.cu has the equations
 * and the steps. The kernels differ in the type of out and in the store (PARTIAL). serves() says
 * which calls they refuse. */
#ifndef GPUKERN_CUDA_FWD_KERNEL_CUH
#define GPUKERN_CUDA_FWD_KERNEL_CUH

#include "fwd_loop.cuh"

namespace {

/* ---- 1. the kernel --------------------------------------------------------------------------- */
/* PARTIAL: out is float32 and is stored from registers. */
template <class T, class Tile, bool MODIFIED, bool PARTIAL = false>
__global__ void __launch_bounds__(Smem<Tile>::THREADS, 1)
    flash_attn_fwd_sm90a_kernel(const __grid_constant__ FwdHopperParams x) {
    run_block<Tile>([&](smem_addr smem_s) { begin_block<Tile>(x, smem_s); },
                    [&](unsigned char *smem, smem_addr smem_s, const FwdTile *tiles) {
                        const int warp = threadIdx.x / 32 % 4;
                        if (warp == 1) {
                            find_tiles<Tile, MODIFIED>(x, smem, smem_s, [&](int b) {
                                return sequence_of(x.fwd.problem, b);
                            });
                        } else if (warp == 0 && elect_one()) {
                            prefetch_tensormap(&x.q);
                            prefetch_tensormap(&x.k);
                            prefetch_tensormap(&x.v);
                            /* wait until the previous kernel has written its results and has read
                             * `out` */
                            griddepcontrol_wait();
                            load_tiles<Tile, MODIFIED>(x, tiles, smem_s);
                        } else if (warp == 2 && blockIdx.x == 0 && x.fwd.problem.cu_q) {
                            griddepcontrol_wait();
                            check_sequences(x.fwd.problem);
                        }
                    },
                    [&](smem_addr smem_s, const FwdTile *tiles, int warpgroup) {
                        consume<T, Tile, MODIFIED, PARTIAL>(x, smem_s, tiles, warpgroup);
                    });
}

/* ---- 2. launcher ----------------------------------------------------------------------------- */
/* An instance's key. */
struct FwdKey {
    enum {
        HEAD_DIM,
        HEAD_DIM_V,
        MODIFIED, /* softcap or ALiBi */
        SMEM,     /* bytes of shared memory */
        BQ        /* rows of a tile */
    };
};

/* True if an instance can run the call. */
bool serves(const gk_cuda_instance *instance, const gk_context *ctx, const gk_flash_attn_args *a) {
    const int last = a->q.ndim - 1;
    const bool modified = a->rules.softcap > 0 || a->rules.alibi_slopes;
    return score_units(a->rules.scale, a->rules.softcap, a->rules.alibi_slopes != NULL).plain &&
           a->q.shape[last] <= instance->key[FwdKey::HEAD_DIM] &&
           a->v.shape[last] <= instance->key[FwdKey::HEAD_DIM_V] &&
           modified == (instance->key[FwdKey::MODIFIED] != 0) &&
           tensor_map_fits(attn_shape(a->q)) && tensor_map_fits(attn_shape(a->k)) &&
           tensor_map_fits(attn_shape(a->v)) &&
           (fwd_by_parts(a) || tensor_map_fits(attn_shape(a->out))) &&
           smem_fits(ctx, instance->key[FwdKey::SMEM]);
}

template <class Tile, bool PARTIAL = false>
bool plan(const gk_cuda_instance *instance, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    if (!serves(instance, ctx, a)) return false;
    FwdHopperParams &x = gk_own<FwdHopperParams>(to) = fwd_hopper_params<Tile>(ctx, a);
    if (PARTIAL && x.fwd.splits > 1) return false;
    if (PARTIAL) x.simple = x.tile_heads == 1 && !a->rules.sinks;
    fwd_plan(ctx, x.fwd, Smem<Tile>::BQ, Tile::BKV, 1, x.schedule.units, to);
    if (!PARTIAL && fwd_by_parts(a))
        to->workspace_bytes =
            fwd_is_part(a, x.fwd)
                ? 0
                : split_combine_bytes(x.fwd.splits, x.fwd.split_rows, x.fwd.problem.head_dim_v);
    return true;
}

template <class T, class Tile, bool MODIFIED, bool PARTIAL = false>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    typedef Smem<Tile> S;
    static const char op[] = "gk_flash_attn_fwd";
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    FwdHopperParams x = gk_own<FwdHopperParams>(plan);
    const int splits = x.fwd.splits;
    const bool parts = fwd_by_parts(a);
    if (PARTIAL)
        x.fwd.lse_splits = gk_accumulates(a) ? (float *)a->lse.data : NULL;
    else if (fwd_is_part(a, x.fwd)) {
        x.fwd.out_splits = (float *)a->out.data;
        x.fwd.lse_splits = (float *)a->lse.data;
    } else
        fwd_place(&x.fwd, workspace);
    gk_status status = make_tensor_map(op, attn_shape(a->q), q_box<Tile>(x), &x.q);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->k), S::K::box(), &x.k);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->v), S::V::box(), &x.v);
    if (status == GK_OK && !parts)
        status = make_tensor_map(op, attn_shape(a->out), wgmma_box(2, 16), &x.out);
    if (status != GK_OK) return status;
    /* with splits > 1 the kernel chooses store_part; by_splits still divides by one */
    if (!PARTIAL && parts && splits == 1) x.fwd.splits = 2;
    status = launch<flash_attn_fwd_sm90a_kernel<T, Tile, MODIFIED, PARTIAL>>(
        op, ctx, dim3((unsigned)x.schedule.blocks), Smem<Tile>::THREADS, Smem<Tile>::BYTES, x,
        true);
    x.fwd.splits = splits;
    if (PARTIAL) return status == GK_OK ? clear_unowned<float>(op, ctx, x.fwd.problem) : status;
    return status == GK_OK ? fwd_finish<T>(op, ctx, a, x.fwd) : status;
}

} // namespace

#endif
