/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_drop_sm90a: the gradients of attention with dropout on Hopper's tensor cores,
 * 16-bit, dense and packed, head_dim up to 128. The steps, the tasks and the workspace are those of
 * flash_attn_bwd_sm90a. Two equations differ:
 *
 *  dS^T = P^T (Z^T dP^T / (1 - p) - delta)   dV = Z^T P^T dO / (1 - p)
 *
 * Z is 1 for pairs that are kept and 0 for others (csrc/formats/attn_dropout.h). A consumer warp
 * draws the bits of the next step in registers, while dK's product runs (bwd_drop.cuh).
 *
 * Not handled: softcap, ALiBi, head_dim above 128, 2^31 rows or more, strides and offsets that TMA
 * cannot describe. flash_attn_bwd_drop_sm80 serves those. */
#include "bwd_drop.cuh"

namespace {

/* ---- 1. the consumer ------------------------------------------------------------------------- */
template <class T, class Tile_, bool ORDERED>
struct BwdDropConsumer : BwdConsumer<T, Tile_, false, ORDERED> {
    typedef Tile_ Tile;
    typedef BwdDropParams Params;
    typedef BwdSmem<Tile> S;

    __device__ __forceinline__ void store(const Params &x, const BwdWork &w, smem_addr smem_s,
                                          int warpgroup) const {
        store_rows<T, typename S::K>(x.g.dk, w, smem_s + S::K_AT, this->dk, x.g.scale,
                                     x.g.p.head_dim, 64 * warpgroup);
        store_rows<T, typename S::V>(x.g.dv, w, smem_s + S::V_AT, this->dv, x.drop.factor,
                                     x.g.p.head_dim_v, 64 * warpgroup);
    }
};

/* ---- 2. launcher ----------------------------------------------------------------------------- */
template <class Tile>
bool plan_drop(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
               gk_plan *to) {
    return drop_rows_fit(&((const gk_flash_attn_bwd_args *)args)->fwd) &&
           plan<Tile>(instance, ctx, args, to);
}

template <class T, class Tile, bool ORDERED>
gk_status run_drop(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    typedef BwdDropConsumer<T, Tile, ORDERED> Consumer;
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    BwdDropParams x = {};
    const gk_status status = hopper_params<Consumer>(ctx, a, plan, workspace, &x);
    x.drop = dropout_of(&a->fwd);
    x.by_row_tiles = divisor_of((uint32_t)gk_max_i64(x.g.row_tiles, 1));
    return status == GK_OK ? run_kernels<T, Consumer>(ctx, a, plan, x) : status;
}

/* ---- 3. table -------------------------------------------------------------------------------- */
#define INSTANCE(name, T, dtype, TILE, ORDERED)                                       \
    {name,                                                                            \
     dtype,                                                                           \
     plan_drop<TILE>,                                                                 \
     run_drop<T, TILE, ORDERED>,                                                      \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, 2 * ORDERED, BwdSmem<TILE>::BYTES, TILE::BQ}, \
     NULL}
#define INSTANCES(label, TILE, ORDERED)                                                       \
    INSTANCE("flash_attn_bwd_drop_sm90a_bf16_" label, __nv_bfloat16, GK_BF16, TILE, ORDERED), \
        INSTANCE("flash_attn_bwd_drop_sm90a_f16_" label, __half, GK_F16, TILE, ORDERED)

typedef BwdDrop<BwdDropHopper64, 2> Drop64;
typedef BwdDrop<BwdHopper96Score, 4> Drop96;
typedef BwdDrop<BwdHopper128Score, 4> Drop128;

const gk_cuda_instance instances[] = {
    INSTANCES("d64", Drop64, false),   INSTANCES("d64_ordered", Drop64, true),
    INSTANCES("d96", Drop96, false),   INSTANCES("d96_ordered", Drop96, true),
    INSTANCES("d128", Drop128, false), INSTANCES("d128_ordered", Drop128, true)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_drop_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
