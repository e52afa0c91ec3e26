/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_keys.cuh: a consumer warpgroup of the Hopper backward for head_dim up to 128. It owns 64 of
 * the block's 128 keys and keeps their dK and dV in registers. flash_attn_bwd_sm90a.cu describes
 * the steps. flash_attn_bwd_drop_sm90a, flash_attn_bwd_masked_sm90a and
 * flash_attn_bwd_partial_sm90a derive from it. */
#ifndef GPUKERN_CUDA_BWD_KEYS_CUH
#define GPUKERN_CUDA_BWD_KEYS_CUH

#include "bwd_consumer.cuh"

namespace {

/* Dropout. This is the version without; bwd_drop.cuh has the other. */
template <class Tile> struct DropOf {
    static constexpr bool ON = false;
    template <class Params> __device__ __forceinline__ DropOf(const Params &) {}
};

template <class T, class Tile_, bool MODIFIED, bool ORDERED_>
struct BwdConsumer : BwdUnmasked<Tile_, ORDERED_> {
    typedef Tile_ Tile;
    typedef T Element, Grad;
    static constexpr bool ORDERED = ORDERED_;
    typedef BwdSmem<Tile> S;
    typedef DqShape<Tile> Dq;
    static constexpr bool BIAS = ScoresOf<Tile>::BIAS, DROP = DropOf<Tile>::ON;
    static constexpr int BQ = Tile::BQ, BKV = Tile::BKV, D = Tile::HEAD_DIM, DV = Tile::HEAD_DIM_V,
                         N = BQ / 8;
    float dk[D / 2], dv[DV / 2];

    /* Stores dS [BQ][64 keys of this warpgroup]; stmatrix transposes it. */
    static __device__ __forceinline__ void store_ds(smem_addr ds_s, const uint32_t (&ds)[N * 2]) {
        const coord c = ds_place(mov_tid_x(), 0);
        const smem_addr at = ds_s + S::Scores::offset_of(c.row, c.col);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            const uint32_t four[4] = {ds[2 * n], ds[2 * n + 1], ds[2 * n + 2], ds[2 * n + 3]};
            stmatrix_x4_trans(at + n * 8 * WGMMA_ROW_BYTES, four);
        }
    }

    /* Loads the warp's 16 keys of K or V as register operands of S^T or dP^T. */
    template <class Panels, int M>
    static __device__ __forceinline__ void load_rows(uint32_t (&a)[M], smem_addr tile_s) {
        const int lane = laneid(), row = mov_tid_x() / 32 * 16 + lane % 16;
#pragma unroll
        for (int kk = 0; kk < M * 4; kk += 16)
            ldmatrix_x4(a + kk / 4, tile_s + Panels::offset_of(row, kk + lane / 16 * 8));
    }

    template <class Params>
    __device__ __forceinline__ void run(const Params &x, const BwdWork &w,
                                        const unsigned char *smem, smem_addr smem_s,
                                        int warpgroup) {
        const Bwd &g = x.g;
        const bool signals = threadIdx.x % 128 == 0;
        const int steps = steps_of<Tile>(g, w);
        const float scale_log2 = (float)g.p.rules.scale * LOG2_E;
        const tma_steps<Tile::STAGES> ring = {smem_s + S::RING};
        const BwdTileOf *tiles = (const BwdTileOf *)(smem + S::TILES);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) dk[i] = 0;
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) dv[i] = 0;

        mbarrier_wait(smem_s + S::KV_FULL, 0);
        uint32_t k_frag[Tile::K_REGISTERS ? D / 4 : 1];
        if (Tile::K_REGISTERS) load_rows<typename S::K>(k_frag, smem_s + S::K_AT);
        if (steps > 0) ring.wait_full(0);
        const smem_addr tiles_s = smem_s + S::TILES;
        /* tile and edge of this step's BwdTileOf */
        uint2 now = steps > 0 ? ld_shared_64(tiles_s) : make_uint2(0, 0);
        DropOf<Tile> dropout(x);
        if constexpr (DROP)
            if (steps > 0) {
                dropout.find(x, w, tiles_s, now.x, warpgroup);
                dropout.draw(x);
            }
#pragma unroll 1
        for (int n = 0; n < steps; ++n) {
            const smem_addr q_s = smem_s + S::Q_AT + ring.stage(n) * S::Q::bytes;
            const smem_addr o_s = smem_s + S::O_AT + ring.stage(n) * S::O::bytes;
            const smem_addr ds_s = smem_s + S::DS_AT + (n & 1) * S::Scores::bytes;
            const BwdTileOf &t = tiles[ring.stage(n)];
            /* 1. S^T = K Q^T and dP^T = V dO^T */
            float s[N * 4], dp[N * 4];
            uint32_t p[N * 2], ds[N * 2];
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < D; kk += 16) {
                if constexpr (Tile::K_REGISTERS)
                    wgmma_rs<T, BQ, 0>(s, k_frag + kk / 4, S::Q::k_major(q_s, 0, kk), kk > 0);
                else
                    wgmma_ss<T, BQ, 0, 0>(s, S::K::k_major(smem_s + S::K_AT, 64 * warpgroup, kk),
                                          S::Q::k_major(q_s, 0, kk), kk > 0);
            }
            wgmma_commit_group();
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < DV; kk += 16)
                wgmma_ss<T, BQ, 0, 0>(dp, S::V::k_major(smem_s + S::V_AT, 64 * warpgroup, kk),
                                      S::O::k_major(o_s, 0, kk), kk > 0);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            wgmma_pin(s);
            uint32_t seen[2]; /* 2. P^T. With a bias: which of the lane's pairs are visible */
            if constexpr (BIAS) {
                seen_by_words<Tile>(seen, smem_s, n, now.y);
                biased_weights<T, typename S::Scores>(
                    s, own_stats<Tile>(smem_s, n), scale_log2,
                    smem_s + S::BIAS_AT + ring.stage(n) * S::Scores::bytes, x.least, seen);
            } else if (!MODIFIED) {
                if (!bwd_masked<Tile> && now.y)
                    hide(s, w.seq, own_key(w, 64 * warpgroup), t.i0 + laneid() % 4 * 2);
                weights(s, own_stats<Tile>(smem_s, n), scale_log2);
            }
            /* This barrier completed long ago, so the wait costs nothing. Its loop ends a basic
             * block, and ptxas moves no instruction past it. */
            mbarrier_wait(smem_s + S::KV_FULL, 0);
            /* Q and dO of the previous step are released here and not sooner. Sooner, the address
             * would get the registers of the additions of dQ, and the products would wait for
             * those. */
            if (n > 0 && signals) mbarrier_arrive(ring.empty(n - 1));
            wgmma_wait_group<0>();
            wgmma_pin(dp);
            /* 3. dS^T */
            const smem_addr stats_s = own_stats<Tile>(smem_s, n);
            if (MODIFIED) {
                const Score score = {g.scale, g.softcap, t.slope, span_clamp(w.seq.diagonal)};
                modified_gradients<T>(s, dp, p, ds, stats_s, stats_s + BQ * 4, score, w.seq,
                                      own_key(w, 64 * warpgroup), t.i0 + laneid() % 4 * 2);
            } else if constexpr (DROP) {
                dropout.template gradients<T>(s, dp, p, ds, stats_s + BQ * 4, x.drop.factor);
            } else {
                gradients<T>(s, dp, p, ds, stats_s + BQ * 4);
                if constexpr (BIAS) {
                    if ((seen[0] & seen[1]) != 0xffffffffu) hide_pairs(p, ds, seen);
                } else if (bwd_masked<Tile> && now.y) {
                    seen_by_words<Tile>(seen, smem_s, n, now.y);
                    hide_pairs(p, ds, seen);
                }
            }
            store_ds(ds_s, ds);

            /* 4. dV, dQ and dK. The first rows of dV keep the tensor cores busy during the barrier.
             * The rest of dV and dK run while dQ goes to memory. */
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < Tile::DV_FIRST; kk += 16)
                wgmma_rs<T, DV, 1>(dv, p + kk / 4, S::O::mn_major(o_s, kk), true);
            wgmma_commit_group();
            if constexpr (BIAS) {
                if (threadIdx.x == 0) tma_store_wait_group_read<0>();
            }
            consumers_sync(); /* dS is complete, and dS of the previous step is no longer read */
            if constexpr (BIAS) {
                if (threadIdx.x == 0 && x.with_dbias)
                    store_dbias<typename S::Scores>(x, w, t, ds_s);
            }
            float dq[Dq::N / 2];
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < BKV; kk += 16)
                wgmma_ss<T, Dq::N, 1, 0>(
                    dq,
                    S::K::mn_major(
                        smem_s + S::K_AT + (Dq::BY_D ? warpgroup * S::K::panel_bytes : 0), kk),
                    S::Scores::k_major(ds_s, Dq::BY_D ? 0 : warpgroup * Dq::N, kk), kk > 0);
            wgmma_commit_group();
            wgmma_fence();
#pragma unroll
            for (int kk = Tile::DV_FIRST; kk < BQ; kk += 16)
                wgmma_rs<T, DV, 1>(dv, p + kk / 4, S::O::mn_major(o_s, kk), true);
            wgmma_commit_group();
            wgmma_wait_group<1>();
            wgmma_pin(dq);
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < BQ; kk += 16)
                wgmma_rs<T, D, 1>(dk, ds + kk / 4, S::Q::mn_major(q_s, kk), true);
            wgmma_commit_group();
            if (ORDERED) wait_turn<Tile>(smem_s, n);
            /* Read the next step's description before the additions of dQ, which fill the queue to
             * memory that these reads would wait in. */
            const int next = min(n + 1, steps - 1);
            ring.wait_full(next);
            const uint2 then = ld_shared_64(tiles_s + ring.stage(next) * (int)sizeof(BwdTileOf));
            if constexpr (DROP)
                dropout.find(x, w, tiles_s + ring.stage(next) * (int)sizeof(BwdTileOf), then.x,
                             warpgroup);
            const int block = mov_tid_x() / 32; /* 4 x warpgroup + warp */
            const uint64_t to = own_dq<Tile>(g, now.x, block);
            if (Dq::BLOCKS == 8 || block < Dq::BLOCKS) add_dq<0>(to, dq);
            if (ORDERED) pass_turn<Tile>(smem_s);
            if constexpr (DROP) { /* draw the bits of the next step while dK's product runs */
                dropout.draw(x);
                mbarrier_wait(smem_s + S::KV_FULL, 0); /* ends a basic block, as in 2 */
            }
            wgmma_wait_group<0>();
            wgmma_pin(dv);
            wgmma_pin(dk);
            now = then;
        }
        if constexpr (BIAS) {
            if (threadIdx.x == 0) tma_store_wait_group_read<0>();
        }
    }

    __device__ __forceinline__ void store(const BwdHopperParams &x, const BwdWork &w,
                                          smem_addr smem_s, int warpgroup) const {
        const float scale = (float)x.g.p.rules.scale;
        store_rows<T, typename S::K>(x.g.dk, w, smem_s + S::K_AT, dk, scale, x.g.p.head_dim,
                                     64 * warpgroup);
        store_rows<T, typename S::V>(x.g.dv, w, smem_s + S::V_AT, dv, 1.f, x.g.p.head_dim_v,
                                     64 * warpgroup);
    }
};

} // namespace

#endif
