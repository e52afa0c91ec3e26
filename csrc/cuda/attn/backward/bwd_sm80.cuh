/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_sm80.cuh: the kernel of flash_attn_bwd_sm80, with DROP of flash_attn_bwd_drop_sm80, and with
 * SCORES of flash_attn_bwd_scores_sm80. It computes the gradients of attention in bfloat16 and
 * float16 with mma.sync (Dao 2023, arXiv:2307.08691, Algorithm 2). The equations are in bwd.cuh.
 *
 * Reads q, grad_out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv], or packed, with rows aligned to
 * 16 bytes, and the stats of the pre-pass. Writes dk and dv, rounded once. Adds dq into dq_sum
 * (float32), which the post-pass scales, rounds and writes.
 *
 * Work split: a block owns BKV keys of one kv head. It loops over the rows that see them, BQ at a
 * time, for every query head of the group. dK and dV stay in registers. A step of the loop, with
 * keys as rows of all tiles:
 *
 *   S^T  = K Q^T            recomputed
 *   P^T  = 2^(S^T - lse)    lse is known, so no maximum and no sum is needed
 *   dP^T = V dO^T
 *   dS^T = P^T (dP^T - delta)
 *   dV  += P^T dO
 *   dK  += dS^T Q
 *   dQ  += dS K             to dq_sum by atomic adds in no fixed order
 *
 * P^T and dS^T in accumulators are already A operands of dV and dK. Only dQ sums over the keys of
 * all warps, so dS^T goes through shared memory for it. With large head_dims several warps share
 * the same keys, and P^T goes through shared memory, too. bwd_sm80_steps.cuh has the three orders
 * of a step; the copies of step j + 1 run under step j.
 *
 * A hidden row or key may hold NaN. P and dS are 0 there, but 0 times NaN is NaN. So NaN and inf in
 * the elements of dO, Q and K are replaced by finite numbers before the products with P and dS, if
 * the call has a mask or biases (SCORES). A NaN of dO in a visible pair still reaches the
 * gradients, because it makes delta of its row NaN.
 *
 * In deterministic calls flash_attn_bwd_dq_sm80 computes dq and this kernel leaves it out (ADD
 * false). Not handled: float32 (flash_attn_bwd_simt); float64 and unaligned rows
 * (flash_attn_bwd_plain). */
#ifndef GPUKERN_CUDA_BWD_SM80_CUH
#define GPUKERN_CUDA_BWD_SM80_CUH

#include "bwd_sm80_steps.cuh"

namespace {

constexpr const char *OP = "gk_flash_attn_bwd";

/* ---- 1. dK and dV at the end ----------------------------------------------------------------- */
/* Stores a warp's dK and dV. 16-bit results are rounded into the shared tiles of K and V, whose
 * rows must no longer be read; float32 results are stored from registers. */
template <class T, class Tile, class Grad, class G, int M, int N>
__device__ __forceinline__ void store_keys(const G &g, smem_addr smem_s, const float (&dk)[M][N][4],
                                           const float (&dv)[M][N][4], int warp_kv, int sharer,
                                           int lane) {
    typedef Shape<Tile> X;
    typedef Smem<Tile> S;
    typedef typename X::Keys Keys;
    const float f = (float)g.p.rules.scale, f_v = drop_factor(g);
    if constexpr (sizeof(Grad) == 4) {
        const uint4 target = ld_shared_128(smem_s + S::target);
        const int key = warp_kv * M * 16 + lane / 4, col = sharer * X::COLS_W + lane % 4 * 2,
                  keys = ld_shared_32(smem_s + S::target + 24);
        store_sums(first_of<float>(target), g.dk.row, dk, f, key, col, keys, g.p.head_dim);
        store_sums(second_of<float>(target), g.dv.row, dv, f_v, key, col, keys, g.p.head_dim_v);
    } else {
        const smem_addr k_at = smem_s + S::k +
                               Keys::offset(warp_kv * M * 16 + lane / 4, sharer * X::COLS_W / 8) +
                               lane % 4 * 4;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const smem_addr at = Keys::down(Keys::along(k_at, n), 16 * m),
                                at_v = at + (S::v - S::k);
                st_shared_32(at, pack2<T>(dk[m][n][0] * f, dk[m][n][1] * f));
                st_shared_32(Keys::down(at, 8), pack2<T>(dk[m][n][2] * f, dk[m][n][3] * f));
                st_shared_32(at_v, pack2<T>(dv[m][n][0] * f_v, dv[m][n][1] * f_v));
                st_shared_32(Keys::down(at_v, 8), pack2<T>(dv[m][n][2] * f_v, dv[m][n][3] * f_v));
            }
        __syncthreads(); /* all rows are complete */
        const uint4 target = ld_shared_128(smem_s + S::target);
        const int rows_valid = ld_shared_32(smem_s + S::target + 24);
        copy_tile_out<Keys, X::THREADS>(first_of<T>(target), g.dk.row, smem_s + S::k, rows_valid,
                                        g.p.head_dim, threadIdx.x);
        copy_tile_out<Keys, X::THREADS>(second_of<T>(target), g.dv.row, smem_s + S::v, rows_valid,
                                        g.p.head_dim_v, threadIdx.x);
    }
}

/* ---- 2. the kernel --------------------------------------------------------------------------- */
/* Grad: the type of dK and dV, T or float. The other parameters are those of BwdForm. */
template <class T, class Tile, bool MODIFIED, bool ADD, bool DROP, class Grad = T,
          bool SCORES = false>
__global__ void __launch_bounds__(Tile::warps * 32, Tile::blocks)
    bwd_sm80_kernel(const __grid_constant__ typename ParamsOf<DROP, SCORES>::type g) {
    typedef BwdForm<T, Tile, MODIFIED, ADD, DROP, SCORES> Form;
    typedef Shape<Tile> X;
    typedef Smem<Tile> S;
    typedef typename X::Keys Keys;
    constexpr int BQ = X::BQ, BKV = X::BKV;
    static_assert(Tile::stages == 2, "a step computes on one stage while the other fills");
    static_assert(!SCORES || (GK_MASK_TILE % BQ == 0 && GK_MASK_TILE % BKV == 0),
                  "a step lies in one block of a mask");
    extern __shared__ __align__(128) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    const Problem &p = g.p;
    BwdWarp<Form> own(g, smem_s);

    /* 2.1 the block's keys, and the rows that see them */
    const int kv_tiles = (p.seq_k + BKV - 1) / BKV;
    const int j0 = blockIdx.x % kv_tiles * BKV;
    const int kv_head = blockIdx.x / kv_tiles % p.heads_kv, b = blockIdx.x / kv_tiles / p.heads_kv;
    const Sequence s = sequence_of(p, b);
    if (j0 >= s.seq_k) return;
    const Interval seen = seen_keys(s);
    const int j_lo = max(j0, seen.lo), j_hi = min(j0 + BKV, seen.hi);
    /* rows that see these keys; rows that see any key */
    Interval rows = {0, 0}, rows_all = {0, 0};
    if (j_lo < j_hi) {
        rows = seeing_rows(s, j_lo, j_hi);
        rows_all = seeing_rows(s, seen.lo, seen.hi);
    }
    const int tile_lo = rows.lo / BQ,
              tile_hi = rows.hi > rows.lo ? (rows.hi + BQ - 1) / BQ : tile_lo;
    const int row_tile = row_tile_of(g, s, b);
    if (threadIdx.x == 0) {
        const Interval full = full_tiles(s, j0, BKV, BQ);
        store_target(smem_s + S::target,
                     (Grad *)g.dk.data + b * g.dk.batch + kv_head * g.dk.head +
                         ((int64_t)s.k0 + j0) * g.dk.row,
                     (Grad *)g.dv.data + b * g.dv.batch + kv_head * g.dv.head +
                         ((int64_t)s.k0 + j0) * g.dv.row,
                     full, s.seq_k - j0);
        store_range(smem_s + S::range, {tile_lo, tile_hi, (kv_head + 1) * p.group, row_tile});
        store_span(smem_s + S::span, s.span);
        store_source(smem_s + S::source, (const T *)p.q.data + b * p.q.batch + s.q0 * p.q.row,
                     (const T *)g.grad_out.data + b * g.grad_out.batch + s.q0 * g.grad_out.row,
                     rows_all, span_clamp(s.diagonal), b);
    }
    __syncthreads(); /* the values above are visible to all threads */

    /* 2.2 the copies of K, V and the first step */
    own.start(j0);
    float dk[X::M][X::COLS_W / 8][4] = {}, dv[X::M][X::COLS_W / 8][4] = {};
    BwdStep now = {tile_lo, kv_head * p.group};
    int stage = 0;
    bool more = tile_lo < tile_hi;
    if constexpr (SCORES)
        more = more && seen_step<Tile>(g, b, j0, tile_lo, tile_hi, (kv_head + 1) * p.group,
                                       &now.head, &now.tile);
    int last_dq = -1; /* own keys: where the previous step's dQ belongs, in tiles of dq_sum */
    own.scale_log2 = (float)p.rules.scale * LOG2_E;
    if (more) {
        copy_rows<Keys, X::THREADS>(smem_s + S::k,
                                    (const T *)p.k.data + b * p.k.batch + kv_head * p.k.head +
                                        ((int64_t)s.k0 + j0) * p.k.row,
                                    p.k.row, seen.lo - j0, seen.hi - j0, p.head_dim);
        copy_rows<Keys, X::THREADS>(smem_s + S::v,
                                    (const T *)p.v.data + b * p.v.batch + kv_head * p.v.head +
                                        ((int64_t)s.k0 + j0) * p.v.row,
                                    p.v.row, seen.lo - j0, seen.hi - j0, p.head_dim_v);
        copy_step<T, Tile>(g, smem_s, 0, now.head, now.tile, own.dq_tile(now, row_tile));
    }
    cp_async_commit_group();

    /* 2.3 the loop over tiles of rows */
#pragma unroll 1
    while (more) {
        cp_async_wait_group<0>(); /* this step's Q and dO have arrived */
        __syncthreads();          /* the previous step's stage is free, its dS^T complete */
        const StepRange range = load_range(smem_s + S::range);
        const bool last_tile = now.tile + 1 == range.tile_hi;
        BwdStep next = {last_tile ? range.tile_lo : now.tile + 1,
                        last_tile ? now.head + 1 : now.head};
        if constexpr (SCORES)
            more = seen_step<Tile>(g, load_batch(smem_s + S::source), j0, range.tile_lo,
                                   range.tile_hi, range.head_end, &next.head, &next.tile);
        else
            more = next.head < range.head_end;
        if (more)
            copy_step<T, Tile>(g, smem_s, stage ^ 1, next.head, next.tile,
                               own.dq_tile(next, range.row_tile));
        cp_async_commit_group();
        if constexpr (X::SHARERS == 1)
            last_dq = own.step_own_keys(now, stage, range.row_tile, last_dq, dk, dv);
        else if constexpr (X::SHARERS == 2)
            own.step_paired_keys(now, stage, range.row_tile, dk, dv);
        else
            own.step_shared_keys(now, stage, range.row_tile, dk, dv);
        now = next;
        stage ^= 1;
    }

    /* 2.4 the last dQ, then dK and dV through the tiles of K and V */
    cp_async_wait_group<0>();
    __syncthreads(); /* the last dS^T is complete */
    if (X::SHARERS == 1 && ADD && last_dq >= 0) {
        own.add_last_dq(stage, last_dq);
        __syncthreads(); /* K is no longer read */
    }
    store_keys<T, Tile, Grad>(g, smem_s, dk, dv, own.warp_kv, own.sharer, own.lane);
}

} // namespace

#endif
