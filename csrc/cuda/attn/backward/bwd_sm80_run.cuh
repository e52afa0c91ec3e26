/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_sm80_run.cuh: the plan and launch of the kernels of bwd_sm80.cuh, and the kernel that scales
 * and rounds dq after them. The sections continue the numbers of bwd_sm80.cuh. */
#ifndef GPUKERN_CUDA_BWD_SM80_RUN_CUH
#define GPUKERN_CUDA_BWD_SM80_RUN_CUH

#include "bwd_sm80.cuh"

namespace {

/* ---- 4. dq = scale * dq_sum ------------------------------------------------------------------ */
template <class T, class Tile>
__global__ void __launch_bounds__(Tile::warps * 32)
    bwd_round_kernel(const __grid_constant__ Bwd g) {
    typedef Shape<Tile> X;
    typedef typename X::Queries Queries;
    extern __shared__ __align__(128) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tile = blockIdx.x % g.tiles, head = blockIdx.x / g.tiles % g.p.heads_q,
              b = blockIdx.x / g.tiles / g.p.heads_q;
    const Sequence s = sequence_of(g.p, b);
    const int i0 = tile * X::BQ;
    if (i0 >= s.seq_q) return;
    const float *from =
        g.dq_sum + ((int64_t)head * g.row_tiles + row_tile_of(g, s, b) + tile) * (X::BQ * X::D) +
        threadIdx.x;
    const int row = warp % Tile::dq_warps * X::DQ_ROWS, col = warp / Tile::dq_warps * X::DQ_COLS;
    const smem_addr at_base = smem_s + Queries::offset(row + lane / 4, col / 8) + lane % 4 * 4;
    const float scale = (float)g.p.rules.scale;
#pragma unroll
    for (int m = 0; m < X::DQ_M; ++m)
#pragma unroll
        for (int n = 0; n < X::DQ_N; ++n) {
            float c[4];
#pragma unroll
            for (int r = 0; r < 4; ++r)
                c[r] = from[((m * X::DQ_N + n) * 4 + r) * X::THREADS] * scale;
            const smem_addr at = Queries::down(Queries::along(at_base, n), 16 * m);
            st_shared_32(at, pack2<T>(c[0], c[1]));
            st_shared_32(Queries::down(at, 8), pack2<T>(c[2], c[3]));
        }
    __syncthreads(); /* all rows are complete */
    copy_tile_out<Queries, X::THREADS>((T *)g.dq.data + b * g.dq.batch + head * g.dq.head +
                                           ((int64_t)s.q0 + i0) * g.dq.row,
                                       g.dq.row, smem_s, s.seq_q - i0, g.p.head_dim, threadIdx.x);
}

/* ---- 5. launch ------------------------------------------------------------------------------- */
template <class Tile> int64_t blocks_of(const Problem &p) {
    return gk_ceil_div(p.seq_k, Tile::bkv) * p.heads_kv * p.batch;
}

template <class Tile, class DqTile>
bool plan(const gk_cuda_instance *, const gk_context *ctx, const void *args, gk_plan *to) {
    constexpr int bytes =
        Smem<Tile>::bytes > DqTile::smem_bytes ? Smem<Tile>::bytes : DqTile::smem_bytes;
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    if (!tile_takes(ctx, a, Tile::head_dim, bytes)) return false;
    Bwd &g = gk_own<Bwd>(to) = bwd_of(ctx, a, Tile::bq, Tile::head_dim);
    g.lse_factor = LOG2_E;
    to->tile[0] = Tile::bq;
    to->tile[1] = Tile::bkv;
    to->tasks = blocks_of<Tile>(g.p);
    to->workspace_bytes = stats_bytes(g, sizeof(float)) + (a->deterministic ? 0 : dq_sum_bytes(g));
    return true;
}

inline void take_dropout(Bwd &, const gk_flash_attn_bwd_args *) {}
inline void take_dropout(Dropping<Bwd> &g, const gk_flash_attn_bwd_args *a) {
    g.drop = dropout_of(&a->fwd);
}

/* Scales that are not positive use the modified kernel, because hide() requires a positive
 * scale. */
template <class T, class Tile, bool ADD> gk_status launch_dkv(const gk_context *ctx, const Bwd &g) {
    const dim3 grid((unsigned)blocks_of<Tile>(g.p));
    return g.p.rules.modified || !(g.p.rules.scale > 0)
               ? launch<bwd_sm80_kernel<T, Tile, true, ADD, false>>(
                     OP, ctx, grid, Shape<Tile>::THREADS, Smem<Tile>::bytes, g)
               : launch<bwd_sm80_kernel<T, Tile, false, ADD, false>>(
                     OP, ctx, grid, Shape<Tile>::THREADS, Smem<Tile>::bytes, g);
}
template <class T, class Tile, bool ADD>
gk_status launch_dkv(const gk_context *ctx, const Dropping<Bwd> &g) {
    return launch<bwd_sm80_kernel<T, Tile, true, ADD, true>>(
        OP, ctx, dim3((unsigned)blocks_of<Tile>(g.p)), Shape<Tile>::THREADS, Smem<Tile>::bytes, g);
}

template <class T, class Tile, class DqTile, bool DROP>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const gk_flash_attn_bwd_args *a = (const gk_flash_attn_bwd_args *)args;
    typename dropping_if<Bwd, DROP>::type g;
    (Bwd &)g = gk_own<Bwd>(plan);
    take_dropout(g, a);
    g.stats = workspace;
    if (!a->deterministic) g.dq_sum = (float *)((char *)workspace + stats_bytes(g, sizeof(float)));
    gk_status status = bwd_pre(ctx, element<T>::dtype, g, a->dq.dtype);
    if (status != GK_OK) return status;
    if (a->deterministic) {
        status = launch_dkv<T, Tile, false>(ctx, g);
        return status == GK_OK ? bwd_dq<DqTile>(ctx, element<T>::dtype, g) : status;
    }
    status = launch_dkv<T, Tile, true>(ctx, g);
    if (status != GK_OK) return status;
    const dim3 grid((unsigned)((int64_t)g.tiles * g.p.heads_q * g.p.batch));
    return launch<bwd_round_kernel<T, Tile>>(OP, ctx, grid, Shape<Tile>::THREADS,
                                             Shape<Tile>::Queries::bytes, (const Bwd &)g);
}

} // namespace

#endif
