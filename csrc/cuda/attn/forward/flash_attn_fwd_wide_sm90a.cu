/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_fwd_wide_sm90a: flash_attn_fwd_sm90a if head_dim of q or v is from 257 to 512. The
 * equations and the kernel are those of flash_attn_fwd_sm90a (fwd_kernel.cuh), with K and V in
 * halves (fwd_wide.cuh):
 *
 *  S = Q K^T   P = 2^(score(S) - m)   O[:, c : c + 256] = P V[:, c : c + 256] / sum P   lse
 *
 * q [.., Sq, D], k [.., Sk, D], v [.., Sk, Dv], out [.., Sq, Dv] of 16 bits, dense or packed, with
 * strides that TMA can describe; out may be float32; lse [.., Sq] float32.
 *
 * Work split: O of 512 columns does not fit in the registers of a warpgroup. So the kernel runs
 * once for each 256 columns of v, and each run computes the scores again. With D = Dv = 512 that is
 * 1.5 times the products of the call. Each run gives the same bits as a call with these columns of
 * v alone. The first run writes lse. The runs use the same workspace, one after the other.
 *
 * Not handled: dropout, a mask, biases, and results that accumulate. (The first run would overwrite
 * the old lse, which the second one needs.) flash_attn_fwd_plain and flash_attn_fwd_partial_plain
 * serve those. */
#include "fwd_wide.cuh"

namespace {

/* ---- 1. some columns of a call --------------------------------------------------------------- */
void take_columns(gk_tensor *t, int64_t col, int64_t columns) {
    t->data = (char *)t->data + col * (int64_t)gk_dtype_bytes(t->dtype);
    t->shape[t->ndim - 1] = columns;
}

/* The call with the columns of v and out from `col` on, as many as a tile has. */
template <class Tile> gk_flash_attn_args columns_of(const gk_flash_attn_args *a, int64_t col) {
    gk_flash_attn_args part = *a;
    part.size = sizeof part; /* without the fields of longer structs, which this kernel refuses */
    const int64_t columns = gk_min_i64(a->v.shape[a->v.ndim - 1] - col, (int64_t)Tile::HEAD_DIM_V);
    take_columns(&part.v, col, columns);
    take_columns(&part.out, col, columns);
    if (col > 0) part.lse.data = NULL;
    return part;
}

/* ---- 2. plan and run ------------------------------------------------------------------------- */
template <class Tile>
bool plan_wide(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
               gk_plan *to) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    const int last = a->q.ndim - 1;
    if (gk_max_i64(a->q.shape[last], a->v.shape[last]) <= FwdHopper256::HEAD_DIM ||
        gk_accumulates(a))
        return false;
    const gk_flash_attn_args part = columns_of<Tile>(a, 0);
    return plan<Tile>(instance, ctx, &part, to);
}

template <class T, class Tile, bool MODIFIED>
gk_status run_wide(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_flash_attn_args *a = (const gk_flash_attn_args *)args;
    const int last = a->v.ndim - 1;
    gk_status status = GK_OK;
    for (int64_t col = 0; col < a->v.shape[last] && status == GK_OK; col += Tile::HEAD_DIM_V) {
        const gk_flash_attn_args part = columns_of<Tile>(a, col);
        gk_plan own = *plan; /* the schedule and the splits are the same for all columns */
        Problem &p = gk_own<FwdHopperParams>(&own).fwd.problem;
        p.v = rows_of(part.v);
        p.out = rows_of(part.out);
        p.lse.data = part.lse.data;
        p.head_dim_v = (int)part.v.shape[last];
        status = run<T, Tile, MODIFIED>(ctx, &part, &own, workspace);
    }
    return status;
}

/* ---- 3. table -------------------------------------------------------------------------------- */
#define INSTANCE(name, T, dtype, TILE, MODIFIED)                                      \
    {name,                                                                            \
     dtype,                                                                           \
     plan_wide<TILE>,                                                                 \
     run_wide<T, TILE, MODIFIED>,                                                     \
     {TILE::HEAD_DIM, TILE::HEAD_DIM_V, MODIFIED, Smem<TILE>::BYTES, Smem<TILE>::BQ}, \
     NULL}

const gk_cuda_instance instances[] = {
    INSTANCE("flash_attn_fwd_wide_sm90a_bf16_d512", __nv_bfloat16, GK_BF16, FwdHopper512, false),
    INSTANCE("flash_attn_fwd_wide_sm90a_f16_d512", __half, GK_F16, FwdHopper512, false),
    INSTANCE("flash_attn_fwd_wide_sm90a_bf16_d512_score", __nv_bfloat16, GK_BF16, FwdHopper512,
             true),
    INSTANCE("flash_attn_fwd_wide_sm90a_f16_d512_score", __half, GK_F16, FwdHopper512, true)};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_fwd_wide_sm90a_table = {
    instances, sizeof instances / sizeof instances[0], 90, NULL};
