/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_dq_sm80.cuh: the kernel that computes dq alone, by rows, in bfloat16 and float16 on the
 * tensor cores (mma.sync). Deterministic calls use it. It is the kernel of flash_attn_bwd_dq_sm80
 * and, with DROP, of flash_attn_bwd_dq_drop_sm80 (Dao 2023, arXiv:2307.08691, Algorithm 2, with its
 * loops exchanged). The equations are in bwd.cuh.
 *
 * Reads q, grad_out [B, Hq, Sq, D | Dv], k, v [B, Hkv, Sk, D | Dv], or packed, with rows aligned to
 * 16 bytes, and the stats of the pre-pass. Writes dq, rounded once.
 *
 * Work split: a block owns BQ rows of one query head, a warp BQ / WARPS of them. The block loops
 * over the keys that its rows see, BKV at a time. S = Q K^T and dP = dO V^T are computed again. dS
 * goes from the accumulators into A operands in registers, for dQ += dS K. DqSmem<Tile> below is
 * the layout of shared memory. A step: wait for K_j V_j | barrier | copy K_j+1 V_j+1 | S P dP dS dQ
 *
 * Not handled: dk and dv (flash_attn_bwd_sm80); unaligned rows. */
#ifndef GPUKERN_CUDA_BWD_DQ_SM80_CUH
#define GPUKERN_CUDA_BWD_DQ_SM80_CUH

#include "bwd_mma.cuh"
#include "../drop.cuh"

namespace {

/* ---- 1. shapes ------------------------------------------------------------------------------- */
template <class Tile> struct DqSmem {
    static constexpr int M = Tile::bq / Tile::warps / 16, THREADS = Tile::warps * 32;
    /* Q, dO [BQ][D]; dQ is staged here at the end */
    typedef smem_tile<Tile::bq, Tile::head_dim * 2> Queries;
    typedef smem_tile<Tile::bkv, Tile::head_dim * 2> Keys; /* K, V [BKV][D] */
    static constexpr int q = 0, grad_out = q + Queries::bytes;
    /* two stages of each */
    static constexpr int k = grad_out + Queries::bytes, v = k + 2 * Keys::bytes;
    static constexpr int bytes = v + 2 * Keys::bytes;
    static_assert(bytes == Tile::smem_bytes, "what the other pass asks for before it is taken");
    static_assert(M * 16 * Tile::warps == Tile::bq && Tile::bkv % 16 == 0,
                  "warps share the rows evenly");
};

/* The number of bank conflicts when dQ is stored to shared memory. A warp stores c[0] and c[1] of
 * an accumulator as 4 bytes of a row. These are 8 rows and 4 neighbours of a 16-byte chunk. */
template <class Queries> constexpr int store_ways() {
    int at[32] = {};
    for (int lane = 0; lane < 32; ++lane)
        at[lane] = Queries::offset_of(frag_c(lane, 0).row, frag_c(lane, 0).col, 2);
    return ways(at, 4);
}
static_assert(store_ways<DqSmem<BwdDq64>::Queries>() == 1 &&
                  store_ways<DqSmem<BwdDq128>::Queries>() == 1 &&
                  store_ways<DqSmem<BwdDq256>::Queries>() == 1 &&
                  store_ways<DqSmem<BwdDq256Small>::Queries>() == 1,
              "stores of dQ meet no bank conflicts");

/* ---- 2. dQ ----------------------------------------------------------------------------------- */
/* Applies dropout to dP: dropped pairs become 0, others are multiplied by 1 / (1 - p). row: the
 * lane's first row in the sequence; key0: the tile's first key. */
template <int M, int N>
__device__ __forceinline__ void drop_dp(float (&dp)[M][N][4], const Dropping<Bwd> &g, int b,
                                        int head, int q0, int row, int key0) {
    drop_keys(dp, g.drop, drop_row0(g.p, b, head, q0 + row), g.p.lse.row, key0);
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) dp[m][n][r] *= g.drop.factor;
}
template <int M, int N>
__device__ __forceinline__ void drop_dp(float (&)[M][N][4], const Bwd &, int, int, int, int, int) {}

/* Stores a warp's dQ. 16-bit results are rounded into the shared tile of Q, whose rows must no
 * longer be read; float32 results are stored from registers. to: the block's first row. */
template <class T, class Tile, class Grad, int M, int N>
__device__ __forceinline__ void store_dq(Grad *to, int64_t row_stride, smem_addr smem_s,
                                         const float (&dq)[M][N][4], float scale, int lane_row,
                                         int rows, int columns) {
    typedef DqSmem<Tile> S;
    typedef typename S::Queries Queries;
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(Grad) == 4) {
        store_sums(to, row_stride, dq, scale, lane_row, lane % 4 * 2, rows, columns);
    } else {
        const smem_addr at = smem_s + S::q + Queries::offset(lane_row, 0) + lane % 4 * 4;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const smem_addr at_n = Queries::down(Queries::along(at, n), 16 * m);
                st_shared_32(at_n, pack2<T>(dq[m][n][0] * scale, dq[m][n][1] * scale));
                st_shared_32(Queries::down(at_n, 8),
                             pack2<T>(dq[m][n][2] * scale, dq[m][n][3] * scale));
            }
        __syncthreads(); /* all rows are complete */
        copy_tile_out<Queries, S::THREADS>(to, row_stride, smem_s + S::q, rows, columns,
                                           threadIdx.x);
    }
}

template <class T, class Tile, bool MODIFIED, bool DROP, class Grad = T>
__global__ void __launch_bounds__(Tile::warps * 32, Tile::blocks)
    bwd_dq_kernel(const __grid_constant__ typename dropping_if<Bwd, DROP>::type g) {
    typedef DqSmem<Tile> S;
    typedef typename S::Queries Queries;
    typedef typename S::Keys Keys;
    constexpr int D = Tile::head_dim, BQ = Tile::bq, BKV = Tile::bkv, M = S::M, N = BKV / 8;
    extern __shared__ __align__(128) unsigned char smem[];
    const smem_addr smem_s = cvta_to_shared(smem);
    const Problem &p = g.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    /* 2.1 The block's rows and the keys that they see. The last rows start first, because under a
     * causal mask they see the most keys. */
    const int tiles = (p.seq_q + BQ - 1) / BQ;
    const int i0 = (tiles - 1 - blockIdx.x % tiles) * BQ;
    const int head = blockIdx.x / tiles % p.heads_q, b = blockIdx.x / tiles / p.heads_q,
              kv_head = head / p.group;
    const Sequence s = sequence_of(p, b);
    if (i0 >= s.seq_q) return;
    const Interval seen = seen_keys(s);
    Interval rows = {0, 0};
    /* rows that see no key may hold anything */
    if (seen.lo < seen.hi) rows = seeing_rows(s, seen.lo, seen.hi);
    const int row_lo = max(i0, rows.lo), row_hi = min(i0 + BQ, rows.hi);
    const int j_lo = row_lo < row_hi ? s.span.lo(row_lo) : 0,
              j_hi = row_lo < row_hi ? s.span.hi(row_hi - 1) : 0;
    /* keys that every row sees */
    const int full_lo = s.span.lo(min(i0 + BQ, s.seq_q) - 1), full_hi = s.span.hi(i0);

    const T *k_g = (const T *)p.k.data + b * p.k.batch + kv_head * p.k.head + s.k0 * p.k.row;
    const T *v_g = (const T *)p.v.data + b * p.v.batch + kv_head * p.v.head + s.k0 * p.v.row;
    if (j_lo < j_hi) {
        const T *q_g =
            (const T *)p.q.data + b * p.q.batch + head * p.q.head + ((int64_t)s.q0 + i0) * p.q.row;
        const T *grad_out_g = (const T *)g.grad_out.data + b * g.grad_out.batch +
                              head * g.grad_out.head + ((int64_t)s.q0 + i0) * g.grad_out.row;
        copy_rows<Queries, S::THREADS>(smem_s + S::q, q_g, p.q.row, rows.lo - i0, rows.hi - i0,
                                       p.head_dim);
        copy_rows<Queries, S::THREADS>(smem_s + S::grad_out, grad_out_g, g.grad_out.row,
                                       rows.lo - i0, rows.hi - i0, p.head_dim_v);
        copy_rows<Keys, S::THREADS>(smem_s + S::k, k_g + j_lo * p.k.row, p.k.row, seen.lo - j_lo,
                                    seen.hi - j_lo, p.head_dim);
        copy_rows<Keys, S::THREADS>(smem_s + S::v, v_g + j_lo * p.v.row, p.v.row, seen.lo - j_lo,
                                    seen.hi - j_lo, p.head_dim_v);
    }
    cp_async_commit_group();
    /* 2.2 lse and delta of the lane's rows */
    const int lane_row = warp * M * 16 + lane / 4;
    float lse[M][2], delta[M][2];
    const float2 *stats = (const float2 *)g.stats +
                          ((int64_t)head * g.row_tiles + row_tile_of(g, s, b)) * g.tile_rows;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = i0 + lane_row + m * 16 + half * 8;
            const float2 x = i < s.seq_q ? stats[i] : make_float2(INFINITY, 0);
            lse[m][half] = x.x;
            delta[m][half] = x.y;
        }

    const smem_addr q_base = frag_a_base<Queries>(smem_s + S::q, lane, warp * M * 16);
    const smem_addr k_base = frag_b_base<Keys>(smem_s + S::k, lane);
    const smem_addr k_trans_base = frag_b_trans_base<Keys>(smem_s + S::k, lane);
    const Score score = score_of(p, s, b, head);
    const float scale_log2 = score.scale * LOG2_E;
    const unsigned width = s.span.hi_off - s.span.lo_off;
    float dq[M][D / 8][4] = {};
    int stage = 0;

#pragma unroll 1
    for (int j0 = j_lo; j0 < j_hi; j0 += BKV) {
        /* 2.3 wait: the keys of this step have arrived, and the previous stage may be
         * overwritten */
        cp_async_wait_group<0>();
        __syncthreads();
        const int next = j0 + BKV;
        if (next < j_hi) {
            const int other = (stage ^ 1) * Keys::bytes;
            copy_rows<Keys, S::THREADS>(smem_s + S::k + other, k_g + next * p.k.row, p.k.row,
                                        seen.lo - next, seen.hi - next, p.head_dim);
            copy_rows<Keys, S::THREADS>(smem_s + S::v + other, v_g + next * p.v.row, p.v.row,
                                        seen.lo - next, seen.hi - next, p.head_dim_v);
        }
        cp_async_commit_group();

        /* 2.4 S, P, dP, dS */
        const int at = stage * Keys::bytes;
        const bool edge = j0 < full_lo || j0 + BKV > full_hi;
        float sc[M][N][4] = {}, dp[M][N][4] = {};
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk)
            mma_rows<Queries, Keys, T>(sc, Queries::along(q_base, 2 * kk),
                                       Keys::along(k_base + at, 2 * kk));
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk)
            mma_rows<Queries, Keys, T>(dp, Queries::along(q_base + (S::grad_out - S::q), 2 * kk),
                                       Keys::along(k_base + (S::v - S::k) + at, 2 * kk));
        drop_dp(dp, g, b, head, s.q0, i0 + lane_row, j0);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int i = i0 + lane_row + m * 16 + r / 2 * 8,
                              j = j0 + lane % 4 * 2 + n * 8 + r % 2;
                    float derivative = 1, logit_log2 = sc[m][n][r] * scale_log2;
                    if (MODIFIED)
                        logit_log2 = score_fast(score, sc[m][n][r],
                                                (float)(i + score.position0 - j), &derivative) *
                                     LOG2_E;
                    const float w = ex2_approx_ftz(logit_log2 - lse[m][r / 2]);
                    dp[m][n][r] = w * (dp[m][n][r] - delta[m][r / 2]) * derivative;
                }
        if (edge) {
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int r = 0; r < 4; ++r) {
                        const int i = i0 + lane_row + m * 16 + r / 2 * 8,
                                  j = j0 + lane % 4 * 2 + n * 8 + r % 2;
                        const bool sees = j >= s.span.key_lo && j < s.span.key_hi &&
                                          (unsigned)(j - i - s.span.lo_off) < width;
                        dp[m][n][r] = sees ? dp[m][n][r] : 0;
                    }
        }

        /* 2.5 dQ += dS K */
#pragma unroll
        for (int kk = 0; kk < N / 2; ++kk) {
            uint32_t a[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) acc_to_a<T>(a[m], dp[m][2 * kk], dp[m][2 * kk + 1]);
            mma_columns<Keys, T>(dq, a, Keys::down(k_trans_base + at, 16 * kk));
        }
        stage ^= 1;
    }
    /* 2.6 dQ through the tile of Q */
    cp_async_wait_group<0>();
    __syncthreads(); /* Q is no longer read */
    Grad *to =
        (Grad *)g.dq.data + b * g.dq.batch + head * g.dq.head + ((int64_t)s.q0 + i0) * g.dq.row;
    store_dq<T, Tile, Grad>(to, g.dq.row, smem_s, dq, score.scale, lane_row, s.seq_q - i0,
                            p.head_dim);
}

/* ---- 3. launch ------------------------------------------------------------------------------- */
template <class T, class Tile> gk_status dq_run(const gk_context *ctx, const Bwd &g, dim3 grid) {
    const char *op = "gk_flash_attn_bwd";
    return g.p.rules.modified
               ? launch<bwd_dq_kernel<T, Tile, true, false>>(op, ctx, grid, DqSmem<Tile>::THREADS,
                                                             DqSmem<Tile>::bytes, g)
               : launch<bwd_dq_kernel<T, Tile, false, false>>(op, ctx, grid, DqSmem<Tile>::THREADS,
                                                              DqSmem<Tile>::bytes, g);
}
template <class T, class Tile>
gk_status dq_run(const gk_context *ctx, const Dropping<Bwd> &g, dim3 grid) {
    return launch<bwd_dq_kernel<T, Tile, true, true>>(
        "gk_flash_attn_bwd", ctx, grid, DqSmem<Tile>::THREADS, DqSmem<Tile>::bytes, g);
}

} // namespace

template <class Tile, class G> gk_status bwd_dq(const gk_context *ctx, gk_dtype dtype, const G &g) {
    const dim3 grid((unsigned)(gk_ceil_div(g.p.seq_q, Tile::bq) * g.p.heads_q * g.p.batch));
    return dtype == GK_BF16 ? dq_run<__nv_bfloat16, Tile>(ctx, g, grid)
                            : dq_run<__half, Tile>(ctx, g, grid);
}

#endif
