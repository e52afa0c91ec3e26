/* SPDX-License-Identifier: BSD-3-Clause */
/* flash_attn_bwd_scores_sm80: the gradients of attention with a mask, a bias or a distance bias, in
 * bfloat16 and float16 on tensor cores by mma.sync, dense, with every modifier. The kernel is in
 * bwd_sm80.cuh.
 *
 * Writes dq, dk, dv as flash_attn_bwd_sm80 does. Writes dbias [.., Sq, Sk] in the bias's dtype,
 * summed in float32 over the dimensions that broadcast, and ddistance [Hq or 1, Sq + Sk - 1] in
 * float32.
 *
 * Workspace: the stats of the pre-pass, dq_sum, and the float32 sums of a 16-bit bias that
 * broadcasts, which a last kernel rounds.
 *
 * Not handled, served by flash_attn_bwd_plain: deterministic calls, float32, float64, unaligned
 * rows. */
#include "../scores_tiles.h"
#include "bwd_sm80_run.cuh"

namespace {

/* True if several pairs of query and key have the same element of the bias. */
bool broadcasts(const gk_flash_attn_bwd_args *a) {
    const gk_tensor *t = gk_dbias_of(a);
    if (!t) return false;
    return t->shape[0] < a->fwd.q.shape[0] || t->shape[1] < a->fwd.q.shape[1] ||
           t->shape[2] < a->fwd.q.shape[2] || t->shape[3] < a->fwd.k.shape[2];
}

/* Bytes of the float32 sums, which only a 16-bit bias that broadcasts needs. */
size_t sums_bytes(const gk_flash_attn_bwd_args *a) {
    const gk_tensor *t = gk_dbias_of(a);
    return broadcasts(a) && t->dtype != GK_F32 ? (size_t)gk_numel(t) * sizeof(float) : 0;
}

template <class Tile, class DqTile, bool DROP>
bool plan_scores(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *to) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    if (!gk_scores_of_bwd(a) || a->deterministic || (a->fwd.dropout_p > 0) != DROP ||
        !plan<Tile, DqTile>(instance, ctx, args, to))
        return false;
    to->workspace_bytes += sums_bytes(a);
    return true;
}

/* ---- the rounding of dbias ---- */
constexpr int ROUND_THREADS = 256;
struct RoundParams {
    const float *from;
    void *to;
    int64_t n;
};
template <class T>
__global__ void __launch_bounds__(ROUND_THREADS)
    dbias_round_kernel(const __grid_constant__ RoundParams x) {
    const int64_t at = (int64_t)blockIdx.x * ROUND_THREADS + threadIdx.x;
    if (at < x.n) ((T *)x.to)[at] = from_f32<T>(x.from[at]);
}

template <class T, class Tile, bool DROP>
gk_status run_scores(const gk_context *ctx, const void *args, const gk_plan *plan,
                     void *workspace) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    typename ParamsOf<DROP, true>::type g = {};
    (Bwd &)g = gk_own<Bwd>(plan);
    take_dropout(g, a);
    const Problem &p = g.p;
    g.scores = mma_scores_of(gk_scores_of_bwd(a), p.seq_q, p.seq_k);
    g.stats = workspace;
    g.dq_sum = (float *)((char *)workspace + stats_bytes(g, sizeof(float)));
    const gk_tensor *dbias = gk_dbias_of(a), *ddistance = gk_ddistance_of(a);
    const size_t sums = sums_bytes(a);
    gk_status status = GK_OK;
    if (dbias) {
        g.sums = broadcasts(a);
        g.dbias = sums ? (char *)workspace + (plan->workspace_bytes - sums) : dbias->data;
        int64_t dense = 1;
        for (int d = 3; d >= 0; dense *= dbias->shape[d--])
            g.dbias_stride[d] = dbias->shape[d] == 1 ? 0 : dense;
        status = clear_memory(OP, ctx, g.dbias,
                              sums ? sums : (size_t)dense * gk_dtype_bytes(dbias->dtype));
    }
    if (status == GK_OK && ddistance) {
        g.ddistance = (float *)ddistance->data;
        g.ddistance_head = ddistance->shape[0] == 1 ? 0 : ddistance->shape[1];
        status = clear_memory(OP, ctx, g.ddistance, (size_t)gk_numel(ddistance) * sizeof(float));
    }
    if (status == GK_OK) status = bwd_pre(ctx, element<T>::dtype, g, a->dq.dtype);
    if (status == GK_OK)
        status = launch<bwd_sm80_kernel<T, Tile, true, true, DROP, T, true>>(
            OP, ctx, dim3((unsigned)blocks_of<Tile>(p)), Shape<Tile>::THREADS, Smem<Tile>::bytes,
            g);
    if (status != GK_OK) return status;
    const dim3 grid((unsigned)((int64_t)g.tiles * p.heads_q * p.batch));
    status = launch<bwd_round_kernel<T, Tile>>(OP, ctx, grid, Shape<Tile>::THREADS,
                                               Shape<Tile>::Queries::bytes, (const Bwd &)g);
    if (status != GK_OK || !sums) return status;
    const RoundParams x = {(const float *)g.dbias, dbias->data, gk_numel(dbias)};
    const dim3 blocks((unsigned)gk_ceil_div(x.n, ROUND_THREADS));
    return launch<dbias_round_kernel<T>>(OP, ctx, blocks, ROUND_THREADS, 0, x);
}

#define INSTANCE(NAME, DTYPE, T, TILE, DQ_TILE, DROP) \
    {NAME,                                            \
     DTYPE,                                           \
     plan_scores<TILE, DQ_TILE, DROP>,                \
     run_scores<T, TILE, DROP>,                       \
     {TILE::head_dim, TILE::bq, TILE::bkv},           \
     NULL}
#define INSTANCES(label, TILE, DQ_TILE, DROP)                                                 \
    INSTANCE("flash_attn_bwd_scores_sm80_bf16_" label, GK_BF16, __nv_bfloat16, TILE, DQ_TILE, \
             DROP),                                                                           \
        INSTANCE("flash_attn_bwd_scores_sm80_f16_" label, GK_F16, __half, TILE, DQ_TILE, DROP)

const gk_cuda_instance table[] = {
    INSTANCES("d64", BwdScores64, BwdDq64, false),
    INSTANCES("d128", BwdScores128, BwdDq128, false),
    INSTANCES("d128_small", Bwd128Drop, BwdDq128, false),
    INSTANCES("d256", BwdScores256, BwdDq256, false),
    INSTANCES("d64_drop", Bwd64Drop, BwdDq64, true),
    INSTANCES("d128_drop", Bwd128Drop, BwdDq128, true),
    INSTANCES("d256_drop", Bwd256Drop, BwdDq256, true),
};

} // namespace

extern "C" const gk_cuda_table gk_flash_attn_bwd_scores_sm80_table = {
    table, sizeof table / sizeof table[0], 80, NULL};
