/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_wide.cuh: shared memory, loads and products of the tile FwdHopper512, whose K and V are
 * loaded in halves. flash_attn_fwd_wide_sm90a.cu is its only user.
 *
 * Q takes 128 KiB of an SM's 227. The rest holds one block of 64 keys: K in two stages of 256
 * columns each, and V in two stages of 32 keys each. So there is only one block of K and of V at a
 * time, but each half is loaded again as soon as its own products are complete:
 *
 *  A step of a consumer, key block j
 *    wait for K_j[:, :256], issue S_j = Q[:, :256] K_j[:, :256]^T
 *    wait for K_j[:, 256:], issue S_j += Q[:, 256:] K_j[:, 256:]^T
 *    wait for V_(j-1),      issue O += P_(j-1) V_(j-1)
 *    wait for the first half of S_j, release its K; wait for the second, release its K
 *    P_j = 2^(S_j - m)                                      runs under O += P_(j-1) V_(j-1)
 *    wait for O, release V_(j-1)
 *
 * Half h of step n is in stage h of a ring, and the ring counts it as 2 n + h. Everything else is
 * as in fwd_consumer.cuh. */
#ifndef GPUKERN_CUDA_FWD_WIDE_CUH
#define GPUKERN_CUDA_FWD_WIDE_CUH

#include "../wide_tiles.h"
#include "fwd_kernel.cuh"

/* ---- 1. shared memory ------------------------------------------------------------------------ */
/* A stage has as many bytes as half of the keys with all columns, which is a stage of
 * Fwd512Memory. */
template <> struct Smem<FwdHopper512> : Smem<Fwd512Memory> {
    static constexpr int COLUMNS = FwdHopper512::HEAD_DIM / 2, KEYS = FwdHopper512::BKV / 2;
    typedef wgmma_panels<FwdHopper512::BKV, COLUMNS> K;     /* half of the columns */
    typedef wgmma_panels<KEYS, FwdHopper512::HEAD_DIM_V> V; /* half of the keys */
    static_assert(K::bytes == Smem<Fwd512Memory>::K::bytes, "K's stages");
    static_assert(V::bytes == Smem<Fwd512Memory>::V::bytes, "V's stages");
};

/* ---- 2. the loader --------------------------------------------------------------------------- */
template <bool MODIFIED>
__device__ __forceinline__ void load_halves(const FwdHopperParams &x, const FwdTile *tiles,
                                            smem_addr smem_s) {
    typedef FwdHopper512 Tile;
    typedef Smem<Tile> S;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const tma_steps<2> k = {smem_s + S::K_RING}, v = {smem_s + S::V_RING};
    described.wait_full(0);
    int n = 0, step = 0; /* step: key blocks of earlier tiles */
#pragma unroll 1
    for (; tiles[n % S::TILE_STAGES].steps.blocks >= 0; ++n) {
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int blocks = t.steps.blocks;
#pragma unroll 1
        for (int j = 0; j <= blocks; ++j) {
            if (j < blocks) {
                const int at = 2 * (step + j);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    k.wait_empty(at + h);
                    mbarrier_arrive_expect_tx(k.full(h), S::K::bytes);
                    load_panels<typename S::K>(smem_s + S::K_AT + h * S::K::bytes, &x.k,
                                               t.from.k_row + block_at<MODIFIED>(t, j) * Tile::BKV,
                                               t.from.head_kv, t.from.b, k.full(h), h * S::COLUMNS);
                }
            }
            if (j == 0) load_q<Tile>(x, t, smem_s, n);
            if (j > 0) {
                const int at = 2 * (step + j - 1);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    v.wait_empty(at + h);
                    mbarrier_arrive_expect_tx(v.full(h), S::V::bytes);
                    load_panels<typename S::V>(
                        smem_s + S::V_AT + h * S::V::bytes, &x.v,
                        t.from.k_row + block_at<MODIFIED>(t, j - 1) * Tile::BKV + h * S::KEYS,
                        t.from.head_kv, t.from.b, v.full(h));
                }
            }
        }
        step += blocks;
        mbarrier_arrive(described.empty(n));
        described.wait_full(n + 1);
    }
    /* signals the end to the consumers */
    load_q<Tile>(x, tiles[n % S::TILE_STAGES], smem_s, n);
}

template <>
__device__ __forceinline__ void
load_tiles<FwdHopper512, false>(const FwdHopperParams &x, const FwdTile *tiles, smem_addr smem_s,
                                OrderedBlocks<false>) {
    load_halves<false>(x, tiles, smem_s);
}
template <>
__device__ __forceinline__ void
load_tiles<FwdHopper512, true>(const FwdHopperParams &x, const FwdTile *tiles, smem_addr smem_s,
                               OrderedBlocks<true>) {
    load_halves<true>(x, tiles, smem_s);
}

/* ---- 3. the products of a consumer ----------------------------------------------------------- */
/* The Stages policy of this tile: K and V in stages of half a block each, in place of WholeStages
 * (fwd_stages.cuh). */
template <class T> struct HalfStages {
    typedef FwdHopper512 Tile;
    typedef Smem<Tile> S;
    typedef tma_steps<2> Steps;
    static constexpr int N = Tile::BKV / 8, ND = Tile::HEAD_DIM_V / 8;

    const smem_addr smem_s;
    const int warpgroup;

    __device__ __forceinline__ Steps k_ring() const { return {smem_s + S::K_RING}; }
    __device__ __forceinline__ Steps v_ring() const { return {smem_s + S::V_RING}; }

    static __device__ __forceinline__ void release(smem_addr barrier_s) {
        WholeStages<T, Tile>::release(barrier_s);
    }
    static __device__ __forceinline__ void release_q(smem_addr barrier_s) {
        WholeStages<T, Tile>::release_q(barrier_s);
    }

    /* Half H of the columns of S = Q K^T, as one group of WGMMAs. The second half is added to the
     * first. */
    template <int H>
    __device__ __forceinline__ void issue_half(float (&s)[N * 4], smem_addr q_s) const {
        smem_addr k_s = smem_s + S::K_AT + H * S::K::bytes;
        opaque(k_s); /* for the reason of q_s in Consumer::first_block */
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < S::COLUMNS; kk += 16)
            wgmma_ss<T, Tile::BKV, 0, 0>(s, S::Q::k_major(q_s, 64 * warpgroup, H * S::COLUMNS + kk),
                                         S::K::k_major(k_s, 0, kk), H > 0 || kk > 0);
        wgmma_commit_group();
    }
    /* Waits for the first half of K. */
    __device__ __forceinline__ void wait_keys(int step) const { k_ring().wait_full(2 * step); }
    __device__ __forceinline__ void begin_scores(float (&)[N * 4], int) const {}
    __device__ __forceinline__ void issue_scores(float (&s)[N * 4], smem_addr q_s, int step) const {
        issue_half<0>(s, q_s);
        k_ring().wait_full(2 * step + 1);
        issue_half<1>(s, q_s);
    }
    /* If PENDING is 0, no other product runs, and one wait serves both halves. */
    template <int PENDING>
    __device__ __forceinline__ void wait_scores(float (&s)[N * 4], const TileSteps &at,
                                                int j) const {
        wgmma_wait_group<PENDING ? PENDING + 1 : 0>();
        release(k_ring().empty(2 * (at.step + j)));
        if (PENDING) wgmma_wait_group<PENDING>();
        wgmma_pin(s);
        release(k_ring().empty(2 * (at.step + j) + 1));
        if (j == at.end - 1) release_q(smem_s + S::Q_RING + 8 * Tile::Q_BUFFERS);
    }
    __device__ __forceinline__ void wait_next_scores(float (&)[N * 4], int) const {
    } /* never called, because there is one Q buffer */

    __device__ __forceinline__ void wait_values(int step) const {
        v_ring().wait_full(2 * step);
        v_ring().wait_full(2 * step + 1);
    }
    __device__ __forceinline__ void issue_values(float (&o)[ND * 4], const uint32_t (&p)[N * 2],
                                                 int) const {
        smem_addr v_s = smem_s + S::V_AT;
        opaque(v_s); /* for the reason of q_s in Consumer::first_block */
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < Tile::BKV; kk += 16)
            wgmma_rs<T, Tile::HEAD_DIM_V, 1>(
                o, p + kk / 4, S::V::mn_major(v_s + kk / S::KEYS * S::V::bytes, kk % S::KEYS),
                true);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void release_values(int step) const {
        release(v_ring().empty(2 * step));
        release(v_ring().empty(2 * step + 1));
    }
    __device__ __forceinline__ void values_over(float (&o)[ND * 4], int step) const {
        wgmma_pin(o);
        release_values(step);
    }
    __device__ __forceinline__ void clear_values(int, int from) const {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (from < (h + 1) * S::KEYS)
                clear_rows<Tile>(smem_s + S::V_AT + h * S::V::bytes, max(from - h * S::KEYS, 0),
                                 warpgroup, S::KEYS);
    }

    /* K must be released before turn_begin. The other warpgroup may need K of the next block before
     * it calls turn_end, and that K is loaded into the space of this one. V is loaded after it. */
    __device__ __forceinline__ void pass(int step, int blocks) const {
#pragma unroll 1
        for (int j = step; j < step + blocks; ++j) {
            k_ring().wait_full(2 * j);
            k_ring().wait_full(2 * j + 1);
            bar_sync(4 + warpgroup, 128); /* all four warps have seen the stages full */
            release(k_ring().empty(2 * j));
            release(k_ring().empty(2 * j + 1));
            turn_begin<Tile>(warpgroup);
            turn_end<Tile>(warpgroup);
            wait_values(j);
            bar_sync(4 + warpgroup, 128); /* all four warps have seen V's stages full */
            release_values(j);
        }
    }
};
template <class T> struct StagesOf<T, FwdHopper512> {
    typedef HalfStages<T> type;
};

#endif
