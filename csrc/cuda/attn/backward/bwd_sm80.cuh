/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_sm80.cuh: the kernel of flash_attn_bwd_sm80, of flash_attn_bwd_drop_sm80 (DROP) and of
 * flash_attn_bwd_scores_sm80 (SCORES). It computes the gradients of attention in bfloat16 and
 * float16 with mma.sync (Dao 2023, arXiv:2307.08691, Algorithm 2). The equations are in bwd.cuh.
 *
 * Reads q, grad_out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv], or packed, with rows aligned to
 * 16 bytes, and the stats of the pre-pass. Writes dk and dv, rounded once. Adds dq into dq_sum
 * (float32), which the post-pass scales, rounds and writes.
 *
 * Work split: a block owns BKV keys of one kv head. It loops over the rows that see them, BQ at a
 * time, for every query head of the group. dK and dV stay in registers. A step of the loop
 * computes, with keys as the rows of S^T, P^T, dP^T and dS^T:
 *
 *   S^T  = K Q^T            recomputed
 *   P^T  = 2^(S^T - lse)    lse is known, so no maximum and no sum is needed
 *   dP^T = V dO^T
 *   dS^T = P^T (dP^T - delta)
 *   dV  += P^T dO
 *   dK  += dS^T Q
 *   dQ  += dS K             to dq_sum by atomic adds in no fixed order
 *
 * The accumulators of P^T and dS^T already have the layout of A operands of dV and dK. Only dQ sums
 * over the keys of all warps, so dS^T goes through shared memory for it. With large head_dims,
 * SHARERS warps have the same keys. Each of them has a part of the rows in S and dP and a part of
 * the columns in dK and dV, so P^T goes through shared memory, too. The order of a step for tile j:
 *
 *  wait for Q_j dO_j | barrier | copy Q_j+1 dO_j+1 ..............................................
 *    1 sharer     | dQ_j-1 from dS_j-1 | S | dP, P | dV, dS | dK
 *    2 sharers    | S | dP, P | barrier of the pair | dV, dS | barrier | dK | dQ
 *    more         | S | dP, P | dS | barrier | dV | dK | dQ
 *
 * A hidden row or key may hold NaN. P and dS are 0 there, but 0 times NaN is NaN. In calls with a
 * mask or biases (SCORES), the kernel therefore replaces NaN and inf in dO, Q and K by finite
 * numbers before the products with P and dS. A NaN of dO in a visible pair still reaches the
 * gradients, because it makes delta of its row NaN.
 *
 * In deterministic calls flash_attn_bwd_dq_sm80 computes dq and this kernel leaves it out (ADD
 * false). Not handled: float32 (flash_attn_bwd_simt); float64 and unaligned rows
 * (flash_attn_bwd_plain). */
#ifndef GPUKERN_CUDA_BWD_SM80_CUH
#define GPUKERN_CUDA_BWD_SM80_CUH

#include "../../ptx/bar.cuh"
#include "../../ptx/laneid.cuh"
#include "bwd_sm80_bias.cuh"
#include "bwd_sm80_products.cuh"

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
/* MODIFIED: softcap, ALiBi, or a scale that is not positive. ADD: the kernel adds to dq_sum; if
 * false, another kernel computes dq. DROP: dropout; requires MODIFIED. Grad: the type of dK and dV,
 * T or float. SCORES: a mask or biases; requires MODIFIED. */
template <class T, class Tile, bool MODIFIED, bool ADD, bool DROP, class Grad = T,
          bool SCORES = false>
__global__ void __launch_bounds__(Tile::warps * 32, Tile::blocks)
    bwd_sm80_kernel(const __grid_constant__ typename ParamsOf<DROP, SCORES>::type g) {
    typedef Shape<Tile> X;
    typedef Smem<Tile> S;
    typedef typename X::Keys Keys;
    typedef typename X::Queries Queries;
    typedef typename X::Scores Scores;
    constexpr int BQ = X::BQ, BKV = X::BKV, NQ = X::ROWS_W / 8, NC = X::COLS_W / 8,
                  KEYS_W = X::M * 16;
    constexpr bool SHARED = X::SHARERS > 1;
    /* a warp of two sharers has enough scores to be worth one more barrier (2.6) */
    constexpr bool PAIRS = X::SHARERS == 2;
    static_assert(Tile::stages == 2, "a step computes on one stage while the other fills");
    extern __shared__ __align__(128) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    const Problem &p = g.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_kv = warp % X::WARPS_KV, sharer = warp / X::WARPS_KV;

    /* 2.1 which keys, which rows */
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
        store_pair(smem_s + S::target,
                   (Grad *)g.dk.data + b * g.dk.batch + kv_head * g.dk.head +
                       ((int64_t)s.k0 + j0) * g.dk.row,
                   (Grad *)g.dv.data + b * g.dv.batch + kv_head * g.dv.head +
                       ((int64_t)s.k0 + j0) * g.dv.row);
        st_shared_128(smem_s + S::target + 16, make_uint4(full.lo, full.hi, s.seq_k - j0, 0));
        st_shared_128(smem_s + S::range,
                      make_uint4(tile_lo, tile_hi, (kv_head + 1) * p.group, row_tile));
        store_span(smem_s + S::span, s.span);
        store_source(smem_s + S::source, (const T *)p.q.data + b * p.q.batch + s.q0 * p.q.row,
                     (const T *)g.grad_out.data + b * g.grad_out.batch + s.q0 * g.grad_out.row,
                     rows_all, span_clamp(s.diagonal), b);
    }
    __syncthreads(); /* the values above are visible to all threads */
    /* 2.2 a lane's addresses */
    const smem_addr k_base = frag_a_base<Keys>(smem_s + S::k, lane, warp_kv * KEYS_W);
    const smem_addr q_base = frag_b_base<Queries>(smem_s + S::q, lane, sharer * X::ROWS_W);
    const smem_addr scores_base =
        smem_s + S::scores + Scores::offset(warp_kv * KEYS_W + lane / 4, sharer * X::ROWS_W / 8) +
        lane % 4 * 4;
    /* row and key of the lane's first accumulator of S^T */
    const int lane_row = sharer * X::ROWS_W + lane % 4 * 2;
    const int lane_key = j0 + warp_kv * KEYS_W + lane / 4;

    float dk[X::M][NC][4] = {}, dv[X::M][NC][4] = {};
    int head = kv_head * p.group, tile = tile_lo, stage = 0;
    static_assert(!SCORES || (GK_MASK_TILE % BQ == 0 && GK_MASK_TILE % BKV == 0),
                  "a step lies in one block of a mask");
    bool more = tile_lo < tile_hi;
    if constexpr (SCORES)
        more = more &&
               seen_step<Tile>(g, b, j0, tile_lo, tile_hi, (kv_head + 1) * p.group, &head, &tile);
    int last_dq = -1; /* the tile of dq_sum of the previous step; -1 before the first step */
    const float scale_log2 = (float)p.rules.scale * LOG2_E;

    if (more) {
        copy_rows<Keys, X::THREADS>(smem_s + S::k,
                                    (const T *)p.k.data + b * p.k.batch + kv_head * p.k.head +
                                        ((int64_t)s.k0 + j0) * p.k.row,
                                    p.k.row, seen.lo - j0, seen.hi - j0, p.head_dim);
        copy_rows<Keys, X::THREADS>(smem_s + S::v,
                                    (const T *)p.v.data + b * p.v.batch + kv_head * p.v.head +
                                        ((int64_t)s.k0 + j0) * p.v.row,
                                    p.v.row, seen.lo - j0, seen.hi - j0, p.head_dim_v);
        copy_step<T, Tile>(g, smem_s, 0, head, tile, head * g.row_tiles + row_tile + tile);
    }
    cp_async_commit_group();

#pragma unroll 1
    while (more) {
        /* 2.3 wait: this step's tiles have arrived, the previous step's may be overwritten, and its
         * dS^T is complete; then copy the next step's tiles */
        cp_async_wait_group<0>();
        __syncthreads();
        const StepRange range = load_range(smem_s + S::range);
        const bool last_tile = tile + 1 == range.tile_hi;
        int next_tile = last_tile ? range.tile_lo : tile + 1,
            next_head = last_tile ? head + 1 : head;
        if constexpr (SCORES)
            more = seen_step<Tile>(g, load_batch(smem_s + S::source), j0, range.tile_lo,
                                   range.tile_hi, range.head_end, &next_head, &next_tile);
        else
            more = next_head < range.head_end;
        if (more)
            copy_step<T, Tile>(g, smem_s, stage ^ 1, next_head, next_tile,
                               next_head * g.row_tiles + range.row_tile + next_tile);
        cp_async_commit_group();
        if (ADD && !SHARED && last_dq >= 0)
            add_dq<Tile, T, SCORES>(g.dq_sum, last_dq,
                                    smem_s + S::scores + (stage ^ 1) * Scores::bytes, smem_s + S::k,
                                    warp, lane);
        last_dq = head * g.row_tiles + range.row_tile + tile;
        /* 2.4 S^T = K Q^T, hidden pairs -inf */
        const smem_addr q_s = stage * Queries::bytes, grad_out_s = q_s + (S::grad_out - S::q);
        const smem_addr stats_s = smem_s + S::stats + stage * (BQ * 8) + lane_row * 8;
        const smem_addr ds_at = scores_base + (SHARED ? 1 : stage) * Scores::bytes;
        float sc[X::M][NQ][4] = {}, dp[X::M][NQ][4] = {};
        add_scores<X, T>(sc, k_base, q_base + q_s);
        const Interval full = load_full(smem_s + S::target);
        if (!MODIFIED && (tile < full.lo || tile >= full.hi))
            mask_scores(sc, load_mask(smem_s + S::span, lane_key, tile * BQ + lane_row));

        /* 2.5 dP^T = V dO^T, and between its products P^T = 2^(S^T - lse). MODIFIED: P^T and dS^T
         * after them */
        if constexpr (MODIFIED)
            add_scores<X, T>(dp, k_base + (S::v - S::k), q_base + grad_out_s);
        else
            add_dp<X, T>(dp, k_base + (S::v - S::k), q_base + grad_out_s, [&](int n) {
                probabilities(sc, n, ld_shared_128(stats_s + n * 64), scale_log2);
                if (PAIRS) store_scores<Scores, T>(scores_base, sc, n);
            });
        if constexpr (MODIFIED) {
            const Mask mask = load_mask(smem_s + S::span, lane_key, tile * BQ + lane_row);
            const Score score = load_score(smem_s + S::source, g, head);
            /* for element [0][0][0] */
            const float distance0 = (float)(mask.row + score.position0 - mask.key);
            typename StepOf<X::M, SCORES>::type step;
            if constexpr (SCORES)
                step = step_scores<T, X::M>(g, load_batch(smem_s + S::source), head, mask,
                                            tile >= full.lo && tile < full.hi);
#pragma unroll
            for (int n = 0; n < NQ; ++n) {
                const uint2 keep = keep_eight<X::M>(g, smem_s + S::source, head, n, mask);
                if constexpr (SCORES) {
                    uint4 stats = ld_shared_128(stats_s + n * 64);
                    /* carries a NaN of dO into the weights through delta (see the head of this
                     * file) */
                    stats.x = __float_as_uint(
                        fmaf(__uint_as_float(stats.y), 0.f, __uint_as_float(stats.x)));
                    stats.z = __float_as_uint(
                        fmaf(__uint_as_float(stats.w), 0.f, __uint_as_float(stats.z)));
                    if (!DROP && step.whole) {
                        probabilities(sc, n, stats, scale_log2);
                        score_gradients(sc, dp, n, stats);
                    } else {
                        scored_gradients<T, DROP>(g, sc, dp, n, stats, score, distance0, mask, keep,
                                                  drop_factor(g), load_batch(smem_s + S::source),
                                                  head, step);
                    }
                } else
                    modified_gradients<DROP>(sc, dp, n, ld_shared_128(stats_s + n * 64), score,
                                             distance0, mask, keep, drop_factor(g));
                if (PAIRS) store_scores<Scores, T>(scores_base, sc, n);
            }
        }

        /* 2.6 dV += P^T dO; dS^T = P^T (dP^T - delta); dK += dS^T Q; dQ += dS K */
        /* recomputed, so that the address takes no register elsewhere */
        const int lane_here = SHARED ? lane : laneid();
        const smem_addr q_trans_base =
            frag_b_trans_base<Queries>(smem_s + S::q, lane_here, 0, sharer * X::COLS_W / 8);
        /* P^T and dS^T stay in registers; dQ follows in the next step */
        if constexpr (X::SHARERS == 1) {
#pragma unroll
            for (int kk = 0; kk < NQ / 2; ++kk) {
                uint32_t a[X::M][4];
                pack_scores<T>(a, sc, kk);
                mma_columns<Queries, T, SCORES>(dv, a,
                                                Queries::down(q_trans_base + grad_out_s, 16 * kk));
#pragma unroll
                for (int n = 2 * kk; n < 2 * kk + 2; ++n) {
                    if (!MODIFIED) score_gradients(sc, dp, n, ld_shared_128(stats_s + n * 64));
                    if (ADD) store_scores<Scores, T>(ds_at, dp, n);
                }
            }
#pragma unroll
            for (int kk = 0; kk < NQ / 2; ++kk) {
                uint32_t a[X::M][4];
                pack_scores<T>(a, dp, kk);
                mma_columns<Queries, T, SCORES>(dk, a, Queries::down(q_trans_base + q_s, 16 * kk));
            }
        } else {
            const smem_addr p_base =
                frag_a_base<Scores>(smem_s + S::scores, lane, warp_kv * KEYS_W);
            /* P^T is in shared memory; dS^T is computed between the products of dV */
            if constexpr (PAIRS) {
                bar_sync(1 + warp_kv, X::SHARERS * 32); /* P^T of the pair is complete */
#pragma unroll
                for (int kk = 0; kk < BQ / 16; ++kk) {
                    uint32_t a[X::M][4];
                    load_scores<Scores>(a, p_base, kk);
                    mma_columns<Queries, T, SCORES>(
                        dv, a, Queries::down(q_trans_base + grad_out_s, 16 * kk));
#pragma unroll
                    for (int n = NQ * kk / (BQ / 16); n < NQ * (kk + 1) / (BQ / 16); ++n) {
                        if (!MODIFIED) score_gradients(sc, dp, n, ld_shared_128(stats_s + n * 64));
                        store_scores<Scores, T>(ds_at, dp, n);
                    }
                }
                /* dS^T of all warps is complete; dK needs that of two warps, dQ all */
                __syncthreads();
            } else { /* a warp has few scores, so all of them are stored at once */
#pragma unroll
                for (int n = 0; n < NQ; ++n) {
                    store_scores<Scores, T>(scores_base, sc, n);
                    if (!MODIFIED) score_gradients(sc, dp, n, ld_shared_128(stats_s + n * 64));
                    store_scores<Scores, T>(ds_at, dp, n);
                }
                /* P^T and dS^T of all warps are complete; dV and dK need those of the sharers, dQ
                 * all */
                __syncthreads();
#pragma unroll
                for (int kk = 0; kk < BQ / 16; ++kk) {
                    uint32_t a[X::M][4];
                    load_scores<Scores>(a, p_base, kk);
                    mma_columns<Queries, T, SCORES>(
                        dv, a, Queries::down(q_trans_base + grad_out_s, 16 * kk));
                }
            }
#pragma unroll
            for (int kk = 0; kk < BQ / 16; ++kk) {
                uint32_t a[X::M][4];
                load_scores<Scores>(a, p_base + Scores::bytes, kk);
                mma_columns<Queries, T, SCORES>(dk, a, Queries::down(q_trans_base + q_s, 16 * kk));
            }
            if (ADD)
                add_dq<Tile, T, SCORES>(g.dq_sum, last_dq, smem_s + S::scores + Scores::bytes,
                                        smem_s + S::k, warp, lane);
        }
        tile = next_tile;
        head = next_head;
        stage ^= 1;
    }
    /* 2.7 the last dQ; dK and dV through the tiles of K and V */
    cp_async_wait_group<0>();
    __syncthreads(); /* the last dS^T is complete */
    if (ADD && !SHARED && last_dq >= 0) {
        add_dq<Tile, T, SCORES>(g.dq_sum, last_dq, smem_s + S::scores + (stage ^ 1) * Scores::bytes,
                                smem_s + S::k, warp, lane);
        __syncthreads(); /* K is no longer read */
    }
    store_keys<T, Tile, Grad>(g, smem_s, dk, dv, warp_kv, sharer, lane);
}

} // namespace

#endif
