/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_wide.cuh: the consumers of flash_attn_bwd_wide_sm90a and flash_attn_bwd_masked_wide_sm90a,
 * for head_dim from 129 to 256.
 *
 * Work split: a block owns 64 keys of one kv head and loops over the rows that see them, BQ at a
 * time. Warpgroup 0 computes S^T, P^T and dV, warpgroup 1 dP^T, dS^T and dK, so that P^T and dS^T
 * in registers are already A operands. P^T goes from warpgroup 0 to 1 through shared memory, in
 * float32. flash_attn_bwd_wide_sm90a.cu says which calls the kernels refuse.
 *
 * Two blocks of neighbouring keys form a pair, which is a cluster, and take the same steps. Each
 * sends its dS^T to the other and computes half of the columns of dQ^T = K^T dS^T over the keys of
 * both, 64 columns a warpgroup. The warpgroups add dQ to memory directly from their accumulators.
 * In this way dQ is added half as often as without pairs, and the additions of dQ were what limited
 * a kernel without pairs.
 *
 *  A step                                          (tensor cores work in the background)
 *    warpgroup 0                                       warpgroup 1
 *    issue S^T;  wait for it                           issue dP^T;  wait for it
 *    P^T, also to shared memory                        wait for P^T
 *    issue dV                                          dS^T to shared memory and the other block
 *    wait for dS^T;  issue dQ of its own keys          issue dK, dQ of its own keys
 *    wait for dS^T of the other block;  issue dQ of its keys
 *    wait for dQ, add it to memory                     likewise */
#ifndef GPUKERN_CUDA_BWD_WIDE_CUH
#define GPUKERN_CUDA_BWD_WIDE_CUH

#include "../../ptx/movmatrix.cuh"
#include "../../ptx/opaque.cuh"
#include "bwd_consumer.cuh"

namespace {

/* Packs P^T in calls with softcap or ALiBi. Replaces S^T by P^T times the softcap's derivative: dS
 * is that times (dP - delta). key, row: those of element 0. */
template <class T, int M>
__device__ __forceinline__ void modified_weights(float (&s)[M], uint32_t (&p)[M / 2],
                                                 smem_addr lse_s, const Score &score,
                                                 const Sequence &seq, int key, int row) {
    const BwdMask mask(seq, key, row);
    const float distance0 = (float)(row + score.position0 - key);
#pragma unroll
    for (int n = 0; n < M / 4; ++n) {
        const uint2 lse = ld_shared_64(lse_s + n * 32);
        float w[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float derivative;
            const float logit = score_fast(score, s[4 * n + e],
                                           distance0 + (8 * n + e % 2 - e / 2 * 8), &derivative);
            w[e] = mask.sees(n, e)
                       ? ex2_approx_ftz(logit * LOG2_E - __uint_as_float(e & 1 ? lse.y : lse.x))
                       : 0;
            s[4 * n + e] = w[e] * derivative;
        }
        p[2 * n] = pack2<T>(w[0], w[1]);
        p[2 * n + 1] = pack2<T>(w[2], w[3]);
    }
}

/* Values of BIAS of a tile: a bias [.., Sq or 1, Sk] in T; a bias by distance */
constexpr int BWD_BIAS = 1, BWD_DISTANCE = 3;

/* ---- 1. the two consumer warpgroups ---------------------------------------------------------- */
template <class T, class Tile_, bool MODIFIED, bool ORDERED_>
struct BwdWideConsumer : BwdUnmasked<Tile_, ORDERED_> {
    typedef Tile_ Tile;
    typedef T Element, Grad;
    static constexpr bool ORDERED = ORDERED_;
    static constexpr int BIAS = ScoresOf<Tile_>::BIAS;
    typedef BwdSmem<Tile> S;
    static constexpr int BQ = Tile::BQ, BKV = Tile::BKV, D = Tile::HEAD_DIM, N = BQ / 8;
    static constexpr uint32_t ALL_SEEN = (1ull << 2 * N) - 1;
    static constexpr int BIAS_REGISTERS = BIAS == BWD_DISTANCE ? 2 * N + 2 : BIAS ? 2 * N : 1;
    static_assert(D == Tile::HEAD_DIM_V && BKV == 64 && D > 128 && Tile::PAIR,
                  "dV and dK are made alike; of four blocks of 64 of d each of four warpgroups "
                  "makes one of dQ");
    float sum[D / 2]; /* dV in warpgroup 0, dK in warpgroup 1 */

    /* Addresses, and the role of the thread, which both warpgroups use. */
    struct Block {
        smem_addr smem_s;
        int warpgroup, dq_block; /* index of the 64 columns of dQ that this warpgroup computes */
        bool signals;            /* this thread arrives for its warpgroup */

        __device__ __forceinline__ tma_steps<Tile::STAGES> ring() const {
            return {smem_s + S::RING};
        }
        __device__ __forceinline__ tma_steps<Tile::O_STAGES> o_ring() const {
            return {smem_s + S::O_RING};
        }
        __device__ __forceinline__ smem_addr q(int n) const {
            return smem_s + S::Q_AT + ring().stage(n) * S::Q::bytes;
        }
        __device__ __forceinline__ smem_addr o(int n) const {
            return smem_s + S::O_AT + o_ring().stage(n) * S::O::bytes;
        }
        __device__ __forceinline__ smem_addr ds(int n) const {
            return smem_s + S::DS_AT + (n & 1) * S::Scores::bytes;
        }
        __device__ __forceinline__ smem_addr peer_ds(int n) const {
            return smem_s + S::PEER_DS_AT + (n & 1) * S::Scores::bytes;
        }
        /* Address of this lane's first four elements of P^T; the next four are 2 KiB further. */
        __device__ __forceinline__ smem_addr own_p() const {
            return smem_s + S::P_AT + mov_tid_x() % 128 * 16;
        }
    };

    /* ---- products; each is one WGMMA group ---- */
    /* S^T or dP^T. */
    static __device__ __forceinline__ void issue_scores(float (&s)[N * 4], smem_addr keys_s,
                                                        smem_addr rows_s) {
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < D; kk += 16)
            wgmma_ss<T, BQ, 0, 0>(s, S::K::k_major(keys_s, 0, kk), S::Q::k_major(rows_s, 0, kk),
                                  kk > 0);
        wgmma_commit_group();
    }
    /* Adds to dV = P^T dO or dK = dS^T Q. left: P^T or dS^T; rows_s: dO or Q. */
    __device__ __forceinline__ void issue_sum(const uint32_t (&left)[N * 2], smem_addr rows_s) {
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < BQ; kk += 16)
            wgmma_rs<T, D, 1>(sum, left + kk / 4, S::Q::mn_major(rows_s, kk), true);
        wgmma_commit_group();
    }
    /* 64 columns of dQ^T over the keys of one block. panel_s: the panel of K with these columns. At
     * head_dim 192 a fourth panel would lie after K; the product with it is not added to memory. */
    static __device__ __forceinline__ void issue_dq(float (&dq)[BQ / 2], smem_addr panel_s,
                                                    smem_addr ds_s, bool add) {
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < BKV; kk += 16) {
            /* dS is [rows][keys], because TMA also stores it as the bias's gradient */
            if constexpr (BIAS)
                wgmma_ss<T, BQ, 1, 0>(dq, S::K::mn_major(panel_s, kk),
                                      S::Scores::k_major(ds_s, 0, kk), add || kk > 0);
            else
                wgmma_ss<T, BQ, 1, 1>(dq, S::K::mn_major(panel_s, kk),
                                      S::Scores::mn_major(ds_s, kk), add || kk > 0);
        }
        wgmma_commit_group();
    }

    /* ---- the bias ---- */
    /* Loads the bias of a step for this warp's 16 keys; rows and keys after the end get 0.
     *
     * A bias [.., Sq or 1, Sk]: register 2 n + r has row 8 n + lane / 4 and the keys 8 r + 2 (lane
     * % 4) and the next, relative to the warp's first. bias_addends transposes it.
     *
     * A bias by distance: register 2 m + e has the distance 8 (m - N + 1) - e, relative to the
     * distance of the lane's first pair. */
    template <class Params>
    static __device__ __forceinline__ void load_bias(uint32_t (&bias)[BIAS_REGISTERS],
                                                     const Params &x, const BwdWork &w,
                                                     const BwdTileOf &t) {
        const bool whole = t.i0 + BQ <= w.seq.seq_q && w.j0 + BKV <= w.seq.seq_k;
        const char *from = bias_of(x, w, __float_as_int(t.slope));
        const int lane = laneid(), own = own_key(w, 0);
        if constexpr (BIAS == BWD_DISTANCE) {
            const int first = own - t.i0 - lane % 4 * 2;
            if (whole) {
                const uint32_t *at = (const uint32_t *)from + (first - 8 * (N - 1));
#pragma unroll
                for (int i = 0; i < BIAS_REGISTERS; ++i) bias[i] = __ldg(at + i / 2 * 8 - i % 2);
            } else {
#pragma unroll
                for (int i = 0; i < BIAS_REGISTERS; ++i) {
                    const int d = first + 8 * (i / 2 - N + 1) - i % 2;
                    bias[i] = __ldg((const uint32_t *)from +
                                    max(min(d, w.seq.seq_k - 1), 1 - w.seq.seq_q));
                }
            }
        } else {
            const int row = t.i0 + lane / 4, key = own - lane / 4 + lane % 4 * 2;
            from += row * x.bias_row + key * 2;
            const auto pair = [&](int r) { return __ldg((const uint32_t *)(from + 16 * r)); };
            if (whole) {
#pragma unroll
                for (int n = 0; n < N; ++n, from += 8 * x.bias_row) {
                    bias[2 * n] = pair(0);
                    bias[2 * n + 1] = pair(1);
                }
            } else {
#pragma unroll
                for (int n = 0; n < N; ++n, from += 8 * x.bias_row) {
                    const bool inside = row + 8 * n < w.seq.seq_q;
                    bias[2 * n] = inside && key < w.seq.seq_k ? pair(0) : 0;
                    bias[2 * n + 1] = inside && key + 8 < w.seq.seq_k ? pair(1) : 0;
                }
            }
        }
#pragma unroll
        /* keeps the compiler from moving the loads down */
        for (int i = 0; i < BIAS_REGISTERS; ++i) opaque(bias[i]);
    }
    /* Computes the addends of the exponents, bias log2(e) - lse. A pair that the bias hides loses
     * its bit of `seen`. */
    static __device__ __forceinline__ void bias_addends(float (&w)[N * 4], uint32_t (&seen)[2],
                                                        const uint32_t (&bias)[BIAS_REGISTERS],
                                                        smem_addr lse_s, float least) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const uint2 lse = ld_shared_64(lse_s + n * 32);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float2 b;
                if constexpr (BIAS == BWD_DISTANCE)
                    b = make_float2(__uint_as_float(bias[2 * (r - n + N - 1)]),
                                    __uint_as_float(bias[2 * (r - n + N - 1) + 1]));
                else
                    b = unpack2<T>(movmatrix_trans(bias[2 * n + r]));
                w[4 * n + 2 * r] = fmaf(b.x, LOG2_E, -__uint_as_float(lse.x));
                w[4 * n + 2 * r + 1] = fmaf(b.y, LOG2_E, -__uint_as_float(lse.y));
                if (b.x <= least) seen[r] &= ~(1u << 2 * n);
                if (b.y <= least) seen[r] &= ~(2u << 2 * n);
            }
        }
#pragma unroll
        /* keeps the compiler from moving the sums down: they run while S^T is multiplied */
        for (int i = 0; i < N * 4; ++i) opaque(w[i]);
    }

    /* ---- P and dS ---- */
    /* All bits set; no bit set if the weight is -0, which marks a hidden pair. */
    static __device__ __forceinline__ uint32_t shown(uint32_t weight) {
        return ~(uint32_t)((int)weight >> 31);
    }
    /* Computes P^T from S^T and packs it. S^T is replaced by P^T, with softcap times the cap's
     * derivative, of which dS is a multiple. With a stored mask or a bias, P of a hidden pair is
     * stored as -0, so that make_ds recognises it. */
    template <class Params>
    static __device__ __forceinline__ void
    weigh(float (&s)[N * 4], uint32_t (&p)[N * 2], const Params &x, const BwdWork &w,
          const BwdTileOf &t, smem_addr lse_s, const uint32_t (&seen)[2],
          const float (&addends)[BIAS ? N * 4 : 1]) {
        const Bwd &g = x.g;
        const int row = t.i0 + laneid() % 4 * 2;
        if (MODIFIED) {
            const Score score = {g.scale, g.softcap, t.slope, span_clamp(w.seq.diagonal)};
            modified_weights<T>(s, p, lse_s, score, w.seq, own_key(w, 0), row);
        } else {
            if (!bwd_masked<Tile> && t.edge) hide(s, w.seq, own_key(w, 0), row);
            const float scale_log2 = (float)g.p.rules.scale * LOG2_E;
            if constexpr (BIAS) {
#pragma unroll
                for (int i = 0; i < N * 4; ++i)
                    s[i] = ex2_approx_ftz(fmaf(s[i], scale_log2, addends[i]));
            } else {
                weights(s, lse_s, scale_log2);
            }
            const bool hides = BIAS ? (seen[0] & seen[1] & ALL_SEEN) != ALL_SEEN : t.edge != 0;
            if (bwd_masked<Tile> && hides) {
#pragma unroll
                for (int i = 0; i < N * 4; ++i)
                    if (!(seen[i / 2 & 1] >> (i / 4 * 2 + i % 2) & 1)) s[i] = -0.f;
            }
#pragma unroll
            for (int i = 0; i < N * 2; ++i) p[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
        }
    }
    static __device__ __forceinline__ void store_p(smem_addr own_s, const float (&s)[N * 4]) {
#pragma unroll
        for (int n = 0; n < N; ++n)
            st_shared_128(own_s + n * 2048,
                          make_uint4(__float_as_uint(s[4 * n]), __float_as_uint(s[4 * n + 1]),
                                     __float_as_uint(s[4 * n + 2]), __float_as_uint(s[4 * n + 3])));
    }
    /* Computes dS^T from P^T, which warpgroup 0 has stored, and packs it. edge: P of some pairs may
     * be -0, which happens with a stored mask or a bias. dS of these pairs becomes 0, even if dP or
     * delta is NaN. */
    static __device__ __forceinline__ void make_ds(uint32_t (&ds)[N * 2], const float (&dp)[N * 4],
                                                   smem_addr own_s, smem_addr delta_s, bool edge) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const uint2 delta = ld_shared_64(delta_s + n * 32);
            const uint4 p = ld_shared_128(own_s + n * 2048);
            const float d0 = __uint_as_float(delta.x), d1 = __uint_as_float(delta.y);
            ds[2 * n] = pack2<T>(__uint_as_float(p.x) * (dp[4 * n] - d0),
                                 __uint_as_float(p.y) * (dp[4 * n + 1] - d1));
            ds[2 * n + 1] = pack2<T>(__uint_as_float(p.z) * (dp[4 * n + 2] - d0),
                                     __uint_as_float(p.w) * (dp[4 * n + 3] - d1));
            if (bwd_masked<Tile> && edge) {
                ds[2 * n] &= shown(p.x) & 0xffffu | shown(p.y) << 16;
                ds[2 * n + 1] &= shown(p.z) & 0xffffu | shown(p.w) << 16;
            }
        }
    }
    /* Stores dS^T [64 keys][rows], or with a bias its transpose dS [rows][64 keys]. */
    static __device__ __forceinline__ void store_ds(smem_addr ds_s, const uint32_t (&ds)[N * 2]) {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const uint32_t four[4] = {ds[2 * n], ds[2 * n + 1], ds[2 * n + 2], ds[2 * n + 3]};
            if constexpr (BIAS) {
                const coord c = ds_place(mov_tid_x() % 128, n);
                stmatrix_x4_trans(ds_s + S::Scores::offset_of(c.row, c.col), four);
                continue;
            }
            const coord c = scores_place(mov_tid_x(), n);
            stmatrix_x4(ds_s + S::Scores::offset_of(c.row, c.col), four);
        }
    }

    /* ---- the end of a step: dQ of `tile` ---- */
    /* Computes dQ of step n and adds it to memory. The caller has waited until dS is complete. On
     * return no product is in flight and the next step's Q has arrived. In warpgroup 0, ahead(step)
     * loads from memory what the next step needs, before the additions of dQ begin. */
    template <class Ahead>
    __device__ __forceinline__ void make_dq(const Block &k, const Bwd &g, int n, int steps,
                                            int tile, const Ahead &ahead) {
        float dq[BQ / 2];
        issue_dq(dq, k.smem_s + S::K_AT + k.dq_block * S::K::panel_bytes, k.ds(n), false);
        if (k.warpgroup == 0) { /* dV is complete: the next dO can be loaded */
            wgmma_wait_group<1>();
            if (k.signals) mbarrier_arrive(k.o_ring().empty(n));
            ahead(min(n + 1, steps - 1));
        }
        mbarrier_wait(k.smem_s + S::peer_full(n), n / 2 & 1);
        issue_dq(dq, k.smem_s + S::PEER_K_AT + k.warpgroup * S::PeerK::panel_bytes, k.peer_ds(n),
                 true);
        if (ORDERED) wait_turn<Tile>(k.smem_s, n);
        /* Wait for the next step's Q before the additions of dQ, which fill the queue to memory
         * that this wait would stand in. */
        k.ring().wait_full(min(n + 1, steps - 1));
        wgmma_wait_group<0>();
        wgmma_pin(dq);
        wgmma_pin(sum);
        if (k.signals) mbarrier_arrive(k.ring().empty(n));
        if (D == 256 || k.dq_block < D / 64)
            add_dq<0>(own_dq<Tile>(g, tile, 4 * k.dq_block + mov_tid_x() / 32 % 4), dq);
        if (ORDERED) pass_turn<Tile>(k.smem_s);
    }

    /* ---- the warpgroups ---- */
    /* Warpgroup 0: S^T, P^T, dV and its half of the block's columns of dQ. */
    template <class Params>
    __device__ __forceinline__ void run_weights(const Block &k, const Params &x, const BwdWork &w,
                                                const BwdTileOf *tiles, int steps) {
        uint32_t bias[BIAS_REGISTERS];
        const auto ahead = [&](int n) {
            if constexpr (BIAS) {
                k.ring().wait_full(n);
                load_bias(bias, x, w, tiles[k.ring().stage(n)]);
            }
        };
        if (BIAS && steps > 0) ahead(0);
#pragma unroll 1
        for (int n = 0; n < steps; ++n) {
            const BwdTileOf &t = tiles[k.ring().stage(n)];
            const int tile = t.tile;
            float s[N * 4];
            uint32_t p[N * 2];
            uint32_t seen[2] = {BIAS ? ~0u : 0, BIAS ? ~0u : 0};
            float addends[BIAS ? N * 4 : 1];
            issue_scores(s, k.smem_s + S::K_AT, k.q(n));
            if constexpr (ScoresOf<Tile>::MASK) {
                if (t.edge) seen_by_mask(seen, x, w, t);
            } else if constexpr (BIAS) {
                if (t.edge) seen_by_rules(seen, x, w, t);
            }
            if constexpr (BIAS) {
                bias_addends(addends, seen, bias, own_stats<Tile>(k.smem_s, n), x.least);
                /* This barrier completed long ago. Its loop ends a basic block, so that the
                 * transposes of the bias are not moved past the wait for S^T. */
                mbarrier_wait(k.smem_s + S::KV_FULL, 0);
            }
            wgmma_wait_group<0>();
            wgmma_pin(s);
            weigh(s, p, x, w, t, own_stats<Tile>(k.smem_s, n), seen, addends);
            store_p(k.own_p(), s);
            bar_arrive(BAR_P, 256);
            k.o_ring().wait_full(n);
            issue_sum(p, k.o(n));
            bar_sync(BAR_DS, 256);
            make_dq(k, x.g, n, steps, tile, ahead);
        }
    }

    /* Warpgroup 1: dP^T, dS^T, dK and its half of the block's columns of dQ. */
    template <class Params>
    __device__ __forceinline__ void run_gradients(const Block &k, const Params &x, const BwdWork &w,
                                                  const BwdTileOf *tiles, int steps) {
#pragma unroll 1
        for (int n = 0; n < steps; ++n) {
            const int tile = tiles[k.ring().stage(n)].tile;
            const bool edge = BIAS || (bwd_masked<Tile> && tiles[k.ring().stage(n)].edge);
            float dp[N * 4];
            uint32_t ds[N * 2];
            k.o_ring().wait_full(n);
            issue_scores(dp, k.smem_s + S::V_AT, k.o(n));
            wgmma_wait_group<0>();
            wgmma_pin(dp);
            if (k.signals) mbarrier_arrive(k.o_ring().empty(n));
            /* P is complete, and warpgroup 0 no longer reads dS of step n - 2 */
            bar_sync(BAR_P, 256);
            if constexpr (bwd_collects<Tile>) {
                const BwdTileOf &t = tiles[k.ring().stage(n)];
                const smem_addr to_s = k.smem_s + S::COLLECT + 8 * (n & 1);
                if (k.signals) {
                    st_shared_32(to_s, (uint32_t)t.i0);
                    st_shared_32(to_s + 4, __float_as_uint(t.slope));
                }
            }
            make_ds(ds, dp, k.own_p(), own_stats<Tile>(k.smem_s, n) + BQ * 4, edge);
            store_ds(k.ds(n), ds);
            fence_proxy_async();
            bar_arrive(BAR_SENT_DS + (n & 1), BWD_SENT_DS<Tile>);
            /* warpgroup 0 stores the next P only after this barrier, when this P has been read */
            bar_arrive(BAR_DS, 256);
            /* TMA has read dS of the previous step, so the next step may overwrite it. */
            if (BIAS && k.signals) tma_store_wait_group_read<0>();
            bar_sync(BAR_OWN_DS, 128);
            if constexpr (BIAS) {
                if (k.signals && x.with_dbias)
                    store_dbias<typename S::Scores>(x, w, tiles[k.ring().stage(n)], k.ds(n));
            }
            issue_sum(ds, k.q(n));
            make_dq(k, x.g, n, steps, tile, [](int) {});
        }
        if (BIAS && k.signals) tma_store_wait_group_read<0>();
    }

    template <class Params>
    __device__ __forceinline__ void run(const Params &x, const BwdWork &w,
                                        const unsigned char *smem, smem_addr smem_s,
                                        int warpgroup) {
        const int steps = steps_of<Tile>(x.g, w);
        const Block k = {smem_s, warpgroup, 2 * w.rank + warpgroup, threadIdx.x % 128 == 0};
        const BwdTileOf *tiles = (const BwdTileOf *)(smem + S::TILES);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) sum[i] = 0;
        mbarrier_wait(smem_s + S::KV_FULL, 0);
        if (steps > 0) k.ring().wait_full(0);
        if (warpgroup == 0)
            run_weights(k, x, w, tiles, steps);
        else
            run_gradients(k, x, w, tiles, steps);
    }

    __device__ __forceinline__ void store(const BwdHopperParams &x, const BwdWork &w,
                                          smem_addr smem_s, int warpgroup) const {
        const Bwd &g = x.g;
        if (warpgroup == 0)
            store_rows<T, typename S::V>(g.dv, w, smem_s + S::V_AT, sum, 1.f, g.p.head_dim_v, 0);
        else
            store_rows<T, typename S::K>(g.dk, w, smem_s + S::K_AT, sum, (float)g.p.rules.scale,
                                         g.p.head_dim, 0);
    }
};

} // namespace

#endif
