/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_sm80_steps.cuh: a step of a warp in bwd_sm80.cuh, which is one tile of rows against the
 * block's keys: the products as functions, and the three orders in which a step takes them.
 *
 * Which order serves depends on how many warps share the same keys (Shape::SHARERS):
 *
 *  1     step_own_keys. P^T and dS^T stay in registers as A operands of dV and dK.
 *  2     step_paired_keys. A warp has half of the rows in S and dP and half of the columns in dK and
 *        dV, so P^T and dS^T go through shared memory. Stores lie between products, for which the
 *        pair needs one more barrier.
 *  more  step_shared_keys. The same with all stores in one place, because a warp has few scores. */
#ifndef GPUKERN_CUDA_BWD_SM80_STEPS_CUH
#define GPUKERN_CUDA_BWD_SM80_STEPS_CUH

#include "../../ptx/bar.cuh"
#include "../../ptx/laneid.cuh"
#include "bwd_sm80_bias.cuh"

namespace {

/* What a kernel is compiled for. MODIFIED: softcap, ALiBi or what they entail. ADD: the kernel adds
 * dQ up; otherwise another kernel computes it. DROP: dropout. SCORES: a mask or biases. */
template <class T_, class Tile_, bool MODIFIED_, bool ADD_, bool DROP_, bool SCORES_>
struct BwdForm {
    typedef T_ T;
    typedef Tile_ Tile;
    typedef typename ParamsOf<DROP_, SCORES_>::type Params;
    static constexpr bool MODIFIED = MODIFIED_, ADD = ADD_, DROP = DROP_, SCORES = SCORES_;
    static_assert(MODIFIED || !(DROP || SCORES), "dropout, masks and biases need MODIFIED");
};

/* A tile of rows of one query head. */
struct BwdStep {
    int tile, head;
};

template <int M, bool SCORES> struct StepOf {
    struct type {};
};
template <int M> struct StepOf<M, true> {
    typedef StepScores<M> type;
};

/* A warp's part of the block, and the addresses that its lanes read and write. The sums dK and dV
 * are not members: nvcc splits a struct with arrays into registers only after it has moved code out
 * of the loop. */
template <class F> struct BwdWarp {
    typedef typename F::T T;
    typedef typename F::Tile Tile;
    typedef Shape<Tile> X;
    typedef Smem<Tile> S;
    typedef typename X::Keys Keys;
    typedef typename X::Queries Queries;
    typedef typename X::Scores Scores;
    static constexpr int D = X::D, BQ = X::BQ, M = X::M, KEYS_W = M * 16;
    static constexpr int NQ = X::ROWS_W / 8; /* groups of eight rows in S^T and dP^T */
    static constexpr int NC = X::COLS_W / 8; /* groups of eight columns in dK and dV */

    const typename F::Params &g;
    const smem_addr smem_s;
    const int lane, warp;
    const int warp_kv, sharer; /* which of the keys; which of the warps with the same keys */
    const int chunk;           /* the warp's first column of dK and dV, in chunks of 8 */
    smem_addr k_base, q_base;  /* the A operands of K, the B operands of Q */
    smem_addr p_at;            /* the lane's first element of P^T */
    int lane_row, lane_key;    /* row and key of the lane's first element of S^T */
    float scale_log2;

    /* of the step */
    int head, tile;
    int q_stage, grad_out_stage; /* byte offsets from the first stage of Q */
    smem_addr stats_s, ds_at;    /* {lse, delta} of the lane's rows; where its dS^T goes */

    __device__ __forceinline__ BwdWarp(const typename F::Params &g, smem_addr smem_s)
        : g(g), smem_s(smem_s), lane(threadIdx.x % 32), warp(threadIdx.x / 32),
          warp_kv(warp % X::WARPS_KV), sharer(warp / X::WARPS_KV), chunk(sharer * X::COLS_W / 8) {}

    /* j0: the block's first key. */
    __device__ __forceinline__ void start(int j0) {
        k_base = frag_a_base<Keys>(smem_s + S::k, lane, warp_kv * KEYS_W);
        q_base = frag_b_base<Queries>(smem_s + S::q, lane, sharer * X::ROWS_W);
        p_at = smem_s + S::scores +
               Scores::offset(warp_kv * KEYS_W + lane / 4, sharer * X::ROWS_W / 8) + lane % 4 * 4;
        lane_row = sharer * X::ROWS_W + lane % 4 * 2;
        lane_key = j0 + warp_kv * KEYS_W + lane / 4;
    }

    __device__ __forceinline__ void begin(const BwdStep &now, int stage) {
        head = now.head;
        tile = now.tile;
        q_stage = stage * Queries::bytes;
        grad_out_stage = q_stage + (S::grad_out - S::q);
        stats_s = smem_s + S::stats + stage * (BQ * 8) + lane_row * 8;
        ds_at = p_at + (X::SHARERS > 1 ? 1 : stage) * Scores::bytes;
    }
    /* The step's place in dq_sum, in tiles. */
    __device__ __forceinline__ int dq_tile(const BwdStep &now, int row_tile) const {
        return now.head * g.row_tiles + row_tile + now.tile;
    }

    /* ---- 1. S^T, P^T, dP^T, dS^T ---- */
    /* S^T += K Q^T. */
    __device__ __forceinline__ void add_scores(float (&s)[M][NQ][4]) const {
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk)
            mma_rows<Keys, Queries, T>(s, Keys::along(k_base, 2 * kk),
                                       Queries::along(q_base + q_stage, 2 * kk));
    }
    /* dP^T += V dO^T. Calls between(n) for each group n of eight rows, between the products. */
    template <class Between>
    __device__ __forceinline__ void add_dp(float (&dp)[M][NQ][4], const Between &between) const {
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk) {
            mma_rows<Keys, Queries, T>(dp, Keys::along(k_base + (S::v - S::k), 2 * kk),
                                       Queries::along(q_base + grad_out_stage, 2 * kk));
#pragma unroll
            for (int n = NQ * kk / (D / 16); n < NQ * (kk + 1) / (D / 16); ++n) between(n);
        }
    }
    __device__ __forceinline__ uint4 stats_of(int n) const {
        return ld_shared_128(stats_s + n * 64);
    }
    __device__ __forceinline__ Mask mask() const {
        return load_mask(smem_s + S::span, lane_key, tile * BQ + lane_row);
    }
    /* full: the tiles of rows that see all keys of the block. */
    __device__ __forceinline__ void hide(float (&s)[M][NQ][4], Interval full) const {
        if (!F::MODIFIED && (tile < full.lo || tile >= full.hi)) mask_scores(s, mask());
    }
    /* Group n of P^T, in place of S^T. MODIFIED: see modify. */
    __device__ __forceinline__ void to_p(float (&s)[M][NQ][4], int n) const {
        if (!F::MODIFIED) probabilities(s, n, stats_of(n), scale_log2);
    }
    /* Group n of dS^T, in place of dP^T. MODIFIED: see modify. */
    __device__ __forceinline__ void to_ds(const float (&p)[M][NQ][4], float (&dp)[M][NQ][4],
                                          int n) const {
        if (!F::MODIFIED) score_gradients(p, dp, n, stats_of(n));
    }
    /* MODIFIED: P^T and dS^T, in place of S^T and dP^T. Calls done(n) behind group n. */
    template <class Done>
    __device__ __forceinline__ void modify(float (&s)[M][NQ][4], float (&dp)[M][NQ][4],
                                           Interval full, const Done &done) const {
        if constexpr (F::MODIFIED) {
            const smem_addr source_s = smem_s + S::source;
            const Mask mask = this->mask();
            const Score score = load_score(source_s, g, head);
            /* for element [0][0][0] */
            const float distance0 = (float)(mask.row + score.position0 - mask.key);
            typename StepOf<M, F::SCORES>::type step;
            if constexpr (F::SCORES)
                step = step_scores<T, M>(g, load_batch(source_s), head, mask,
                                         tile >= full.lo && tile < full.hi);
#pragma unroll
            for (int n = 0; n < NQ; ++n) {
                const uint2 keep = keep_eight<M>(g, source_s, head, n, mask);
                if constexpr (F::SCORES) {
                    uint4 stats = stats_of(n);
                    /* carries a NaN of dO into P by delta (see the head of bwd_sm80.cuh) */
                    stats.x = __float_as_uint(
                        fmaf(__uint_as_float(stats.y), 0.f, __uint_as_float(stats.x)));
                    stats.z = __float_as_uint(
                        fmaf(__uint_as_float(stats.w), 0.f, __uint_as_float(stats.z)));
                    if (!F::DROP && step.whole) {
                        probabilities(s, n, stats, scale_log2);
                        score_gradients(s, dp, n, stats);
                    } else {
                        scored_gradients<T, F::DROP>(g, s, dp, n, stats, score, distance0, mask,
                                                     keep, drop_factor(g), load_batch(source_s),
                                                     head, step);
                    }
                } else {
                    modified_gradients<F::DROP>(s, dp, n, stats_of(n), score, distance0, mask, keep,
                                                drop_factor(g));
                }
                done(n);
            }
        }
    }
    __device__ __forceinline__ void store_p(const float (&p)[M][NQ][4], int n) const {
        store_scores<Scores, T>(p_at, p, n);
    }
    __device__ __forceinline__ void store_ds(const float (&ds)[M][NQ][4], int n) const {
        store_scores<Scores, T>(ds_at, ds, n);
    }

    /* ---- 2. dV, dK, dQ ---- */
    /* The B operands of dV and dK: the first stage of Q by columns. */
    __device__ __forceinline__ smem_addr columns_of_q(int lane) const {
        return frag_b_trans_base<Queries>(smem_s + S::q, lane, 0, chunk);
    }
    /* c += A B: dV += P^T dO or dK += dS^T Q, with A of all sharers from shared memory. b_base and
     * b_stage: columns_of_q, and the stage of dO or Q. Calls between(n) for each group n of eight
     * rows, between the products. */
    template <class Between>
    __device__ __forceinline__ void add_shared(float (&c)[M][NC][4], smem_addr a_base,
                                               smem_addr b_base, int b_stage,
                                               const Between &between) const {
#pragma unroll
        for (int kk = 0; kk < BQ / 16; ++kk) {
            uint32_t a[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m)
                load_frag_a(a[m], Scores::down(Scores::along(a_base, 2 * kk), 16 * m));
            mma_columns<Queries, T, F::SCORES>(c, a, Queries::down(b_base + b_stage, 16 * kk));
#pragma unroll
            for (int n = NQ * kk / (BQ / 16); n < NQ * (kk + 1) / (BQ / 16); ++n) between(n);
        }
    }
    /* The same with A from registers. */
    template <class Between>
    __device__ __forceinline__ void add_own(float (&c)[M][NC][4], const float (&from)[M][NQ][4],
                                            smem_addr b_base, int b_stage,
                                            const Between &between) const {
#pragma unroll
        for (int kk = 0; kk < NQ / 2; ++kk) {
            uint32_t a[M][4];
#pragma unroll
            for (int m = 0; m < M; ++m) acc_to_a<T>(a[m], from[m][2 * kk], from[m][2 * kk + 1]);
            mma_columns<Queries, T, F::SCORES>(c, a, Queries::down(b_base + b_stage, 16 * kk));
#pragma unroll
            for (int n = 2 * kk; n < 2 * kk + 2; ++n) between(n);
        }
    }
    /* dQ [BQ][D] = dS K of a tile, added into dq_sum. at: the tile's place in sum_g. ds_s: dS^T of
     * all warps. The threads of a warp add to 128 contiguous bytes. */
    __device__ __forceinline__ void add_dq(float *sum_g, int at, smem_addr ds_s) const {
        float c[X::DQ_M][X::DQ_N][4] = {};
        const int row = warp % Tile::dq_warps * X::DQ_ROWS,
                  col = warp / Tile::dq_warps * X::DQ_COLS;
        const smem_addr a_base = frag_a_trans_base<Scores>(ds_s, lane, 0, row / 8);
        const smem_addr b_base = frag_b_trans_base<Keys>(smem_s + S::k, lane, 0, col / 8);
#pragma unroll
        for (int kk = 0; kk < X::BKV / 16; ++kk) {
            uint32_t a[X::DQ_M][4];
#pragma unroll
            for (int m = 0; m < X::DQ_M; ++m)
                load_frag_a_trans(a[m], Scores::down(Scores::along(a_base, 2 * m), 16 * kk));
            mma_columns<Keys, T, F::SCORES>(c, a, Keys::down(b_base, 16 * kk));
        }
        float *to = sum_g + (int64_t)at * (BQ * D) + threadIdx.x;
#pragma unroll
        for (int m = 0; m < X::DQ_M; ++m)
#pragma unroll
            for (int n = 0; n < X::DQ_N; ++n)
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    atomicAdd(to + ((m * X::DQ_N + n) * 4 + r) * X::THREADS, c[m][n][r]);
    }

    /* ---- 3. a step ---- */
    /* This warp alone has its keys. dQ needs dS^T of all warps, so it is one step late: the barrier
     * at the beginning of this step is also that of the previous step's dS^T. last_dq: the previous
     * step's dq_tile, -1 at first. Returns this step's. */
    __device__ __forceinline__ int step_own_keys(const BwdStep &now, int stage, int row_tile,
                                                 int last_dq, float (&dk)[M][NC][4],
                                                 float (&dv)[M][NC][4]) {
        const auto nothing = [](int) {};
        add_last_dq(stage, last_dq);
        const int own_dq = dq_tile(now, row_tile);
        begin(now, stage);
        float s[M][NQ][4] = {}, dp[M][NQ][4] = {};
        add_scores(s); /* S^T = K Q^T */
        const Interval full = load_full(smem_s + S::target);
        hide(s, full);
        /* dP^T = V dO^T, and P^T = 2^(S^T - lse) between its products */
        add_dp(dp, [&](int n) { to_p(s, n); });
        modify(s, dp, full, nothing);
        /* the lane is read again, so that the address takes no register elsewhere */
        const smem_addr columns = columns_of_q(laneid());
        /* dV += P^T dO, and dS^T = P^T (dP^T - delta) between its products */
        add_own(dv, s, columns, grad_out_stage, [&](int n) {
            to_ds(s, dp, n);
            if (F::ADD) store_ds(dp, n);
        });
        add_own(dk, dp, columns, q_stage, nothing); /* dK += dS^T Q */
        return own_dq;
    }
    __device__ __forceinline__ void add_last_dq(int stage, int last_dq) const {
        if (F::ADD && last_dq >= 0)
            add_dq(g.dq_sum, last_dq, smem_s + S::scores + (stage ^ 1) * Scores::bytes);
    }

    /* Two warps have the same keys. */
    __device__ __forceinline__ void step_paired_keys(const BwdStep &now, int stage, int row_tile,
                                                     float (&dk)[M][NC][4], float (&dv)[M][NC][4]) {
        const int own_dq = dq_tile(now, row_tile);
        begin(now, stage);
        float s[M][NQ][4] = {}, dp[M][NQ][4] = {};
        add_scores(s); /* S^T = K Q^T */
        const Interval full = load_full(smem_s + S::target);
        hide(s, full);
        /* dP^T = V dO^T, and P^T = 2^(S^T - lse) between its products */
        add_dp(dp, [&](int n) {
            to_p(s, n);
            if (!F::MODIFIED) store_p(s, n);
        });
        modify(s, dp, full, [&](int n) { store_p(s, n); });
        const smem_addr columns = columns_of_q(lane);
        bar_sync(1 + warp_kv, X::SHARERS * 32); /* P^T of the pair is complete */
        const smem_addr p_base = frag_a_base<Scores>(smem_s + S::scores, lane, warp_kv * KEYS_W);
        /* dV += P^T dO, and dS^T = P^T (dP^T - delta) between its products */
        add_shared(dv, p_base, columns, grad_out_stage, [&](int n) {
            to_ds(s, dp, n);
            store_ds(dp, n);
        });
        __syncthreads(); /* dS^T of the pair is complete; for dQ, that of all warps */
        /* dK += dS^T Q; dQ += dS K */
        add_shared(dk, p_base + Scores::bytes, columns, q_stage, [](int) {});
        if (F::ADD) add_dq(g.dq_sum, own_dq, smem_s + S::scores + Scores::bytes);
    }

    /* More than two warps have the same keys. */
    __device__ __forceinline__ void step_shared_keys(const BwdStep &now, int stage, int row_tile,
                                                     float (&dk)[M][NC][4], float (&dv)[M][NC][4]) {
        const auto nothing = [](int) {};
        const int own_dq = dq_tile(now, row_tile);
        begin(now, stage);
        float s[M][NQ][4] = {}, dp[M][NQ][4] = {};
        add_scores(s); /* S^T = K Q^T */
        const Interval full = load_full(smem_s + S::target);
        hide(s, full);
        /* dP^T = V dO^T, and P^T = 2^(S^T - lse) between its products */
        add_dp(dp, [&](int n) { to_p(s, n); });
        modify(s, dp, full, nothing);
        const smem_addr columns = columns_of_q(lane);
#pragma unroll
        for (int n = 0; n < NQ; ++n) {
            store_p(s, n);
            to_ds(s, dp, n);
            store_ds(dp, n);
        }
        __syncthreads(); /* P^T and dS^T of the sharers are complete; for dQ, those of all warps */
        const smem_addr p_base = frag_a_base<Scores>(smem_s + S::scores, lane, warp_kv * KEYS_W);
        /* dV += P^T dO; dK += dS^T Q; dQ += dS K */
        add_shared(dv, p_base, columns, grad_out_stage, nothing);
        add_shared(dk, p_base + Scores::bytes, columns, q_stage, nothing);
        if (F::ADD) add_dq(g.dq_sum, own_dq, smem_s + S::scores + Scores::bytes);
    }
};

} // namespace

#endif
