/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_sm90a: attention on Hopper's tensor cores, 16-bit, dense and packed, every modifier.
 * FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608) with a reference for the softmax that may be stale (stale_softmax.cuh):
 *   S = Q K^T   s = score(S) or -inf where the row does not see the key   P = 2^(s - m)   O = O + P V
 *   out = O / (sum P + 2^(sink - m))   lse = m + log(sum P + 2^(sink - m))
 * q [.., Sq, D]  k [.., Sk, D]  v [.., Sk, Dv]  out [.., Sq, Dv], as TMA can describe them;  lse [.., Sq] float32.
 * D, Dv: multiples of 8 up to HEAD_DIM, HEAD_DIM_V; TMA fills the columns after them with zeros.
 *
 * Work split: a block stays on its SM and takes units of tiles (fwd_schedule.cuh). Of the producer warpgroup one warp
 * finds the tiles and one thread loads Q, K and V by TMA; each consumer warpgroup owns 64 rows of S and O. Where tiles
 * would not fill the GPU the keys of a tile are split; parts go through the workspace.
 *
 * A step of a consumer: block j of the keys                        (tensor cores work in the background)
 *   issue S_j = Q K_j^T
 *   issue O  += P_(j-1) V_(j-1)
 *   wait for S_j alone, release K_j
 *   P_j = 2^(S_j - m)                                              runs under O += P_(j-1) V_(j-1)
 *   wait for O, release V_(j-1); rows that are out of range take the block again
 *
 * Not handled, served by flash_attn_fwd_sm80: strides, offsets and scales that TMA or a stale reference cannot take. */
#include "../ptx/cluster.cuh"
#include "../ptx/griddepcontrol.cuh"
#include "fwd_loop.cuh"

namespace {

/* ---- 1. the kernel -------------------------------------------------------------------------------------- */
template <class T, class Tile, bool MODIFIED>
__global__ void __launch_bounds__(Smem<Tile>::THREADS, 1)
    flash_attn_fwd_sm90a_kernel(const __grid_constant__ FwdHopperParams x) {
    typedef Smem<Tile> S;
    extern __shared__ __align__(1024) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    FwdTile *tiles = (FwdTile *)(smem + S::TILES);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0); /* the compiler sees that lanes agree */
    begin_block<Tile>(x, smem_s);
    griddepcontrol_launch_dependents();
    __syncthreads();
    if (warpgroup == Tile::WARPGROUPS) {
        setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 1) {
            find_tiles<Tile, MODIFIED>(x, smem, smem_s, [&](int b) { return sequence_of(x.fwd.problem, b); });
        } else if (warp == 0 && elect_one()) {
            prefetch_tensormap(&x.q), prefetch_tensormap(&x.k), prefetch_tensormap(&x.v);
            griddepcontrol_wait(); /* what the kernel before wrote is there, and nobody reads out any more */
            load_tiles<Tile, MODIFIED>(x, tiles, smem_s);
        } else if (warp == 2 && blockIdx.x == 0 && x.fwd.problem.cu_q) {
            griddepcontrol_wait();
            check_sequences(x.fwd.problem);
        }
    } else {
        setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();
        consume<T, Tile, MODIFIED>(x, smem_s, tiles, warpgroup);
    }
}

/* ---- 2. launcher and table ------------------------------------------------------------------------------ */
bool serves(const gk_cuda_instance *row, const gk_context *ctx, const gk_flash_attn_args *a) {
    const int last = a->q.ndim - 1;
    const bool modified = a->rules.softcap > 0 || a->rules.alibi_slopes;
    return score_units(a->rules.scale, a->rules.softcap, a->rules.alibi_slopes != NULL).plain &&
           a->q.shape[last] <= row->key[0] && a->v.shape[last] <= row->key[1] && modified == (row->key[2] != 0) &&
           tensor_map_fits(attn_shape(a->q)) && tensor_map_fits(attn_shape(a->k)) &&
           tensor_map_fits(attn_shape(a->v)) && tensor_map_fits(attn_shape(a->out)) && smem_fits(ctx, row->key[3]);
}

template <class Tile> bool plan(const gk_cuda_instance *row, const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    if (!serves(row, ctx, a)) return false;
    const FwdHopperParams &x = gk_own<FwdHopperParams>(to) = fwd_hopper_params<Tile>(ctx, a);
    fwd_plan(ctx, x.fwd, Smem<Tile>::BQ, Tile::BKV, 1, x.schedule.units, to);
    return true;
}

template <class T, class Tile, bool MODIFIED>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    typedef Smem<Tile> S;
    static const char op[] = "gk_flash_attn_fwd";
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    FwdHopperParams x = gk_own<FwdHopperParams>(plan);
    fwd_place(&x.fwd, workspace);
    gk_status status = make_tensor_map(op, attn_shape(a->q), q_box<Tile>(x), &x.q);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->k), S::K::box(), &x.k);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->v), S::V::box(), &x.v);
    if (status == GK_OK) status = make_tensor_map(op, attn_shape(a->out), wgmma_box(2, 16), &x.out);
    if (status != GK_OK) return status;
    status = launch<flash_attn_fwd_sm90a_kernel<T, Tile, MODIFIED>>(op, ctx, dim3((unsigned)x.schedule.blocks),
                                                                    Smem<Tile>::THREADS, Smem<Tile>::BYTES, x, true);
    return status == GK_OK ? fwd_finish<T>(op, ctx, x.fwd) : status;
}

#define ROW(name, T, dtype, TILE, MODIFIED)                                           \
    {name,                                                                            \
     dtype,                                                                           \
     plan<TILE>,                                                                      \
     run<T, TILE, MODIFIED>,                                                          \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, MODIFIED, Smem<TILE>::BYTES, Smem<TILE>::BQ}, \
     NULL}
#define ROWS(label, TILE)                                                                     \
    ROW("flash_attn_fwd_sm90a_bf16_" label, __nv_bfloat16, GK_BF16, TILE, false),             \
        ROW("flash_attn_fwd_sm90a_f16_" label, __half, GK_F16, TILE, false),                  \
        ROW("flash_attn_fwd_sm90a_bf16_" label "_score", __nv_bfloat16, GK_BF16, TILE, true), \
        ROW("flash_attn_fwd_sm90a_f16_" label "_score", __half, GK_F16, TILE, true)

const gk_cuda_instance instances[] = {ROWS("d64", FwdHopper64),           ROWS("d64_short", FwdHopper64Short),
                                      ROWS("d96", FwdHopper96),           ROWS("d128", FwdHopper128),
                                      ROWS("d192_128", FwdHopper192v128), ROWS("d192", FwdHopper192),
                                      ROWS("d256", FwdHopper256)};

/* By the first row that serves the call, but for short sequences one whose tiles waste less. */
bool plan_best(const gk_context *ctx, const void *args, gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    const int64_t seq_q = a->cu_seqlens_q ? a->max_seqlen_q : a->q.shape[2];
    const bool wasteful = seq_q <= (a->rules.is_causal ? FWD_SHORT_CAUSAL : FWD_SHORT);
    for (const gk_cuda_instance &row : instances) {
        if (row.dtype != a->q.dtype || (row.key[4] > 128 && wasteful) || !row.plan(&row, ctx, args, to)) continue;
        to->kernel = &row;
        return true;
    }
    return false;
}

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_sm90a_table = {instances, sizeof instances / sizeof instances[0], 90,
                                                                plan_best};
