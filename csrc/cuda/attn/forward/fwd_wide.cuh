/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_wide.cuh: shared memory, loads and consumer of the tile FwdHopper512, whose K and V are
 * loaded in halves. flash_attn_fwd_wide_sm90a.cu is its only user.
 *
 * Q takes 128 KiB of an SM's 227. The rest holds one block of 64 keys: K in two stages of 256
 * columns each, and V in two stages of 32 keys each. So the stages of K and of V are one block, but
 * each half is loaded again as soon as its own products are complete:
 *
 *  A step of a consumer, key block j
 *    wait for K_j[:, :256], issue S_j = Q[:, :256] K_j[:, :256]^T
 *    wait for K_j[:, 256:], issue S_j += Q[:, 256:] K_j[:, 256:]^T
 *    wait for V_(j-1),      issue O += P_(j-1) V_(j-1)
 *    wait for the first half of S_j, release its K; wait for the second, release its K
 *    P_j = 2^(S_j - m)                                      runs under O += P_(j-1) V_(j-1)
 *    wait for O, release V_(j-1)
 *
 * Half h of step n is stage h of a ring, at its count 2 n + h. Everything else is that of
 * fwd_consumer.cuh. */
#ifndef GPUKERN_CUDA_FWD_WIDE_CUH
#define GPUKERN_CUDA_FWD_WIDE_CUH

#include "../wide_tiles.h"
#include "fwd_kernel.cuh"

/* ---- 1. shared memory ------------------------------------------------------------------------ */
/* A stage has as many bytes as one of half of the keys with all columns (Fwd512Memory). */
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

/* ---- 3. the consumer ------------------------------------------------------------------------- */
/* The same tile for the parts of Consumer that do not know the stages: masks, scores, weights. */
struct Fwd512Weights : FwdHopper512 {};
template <> struct Smem<Fwd512Weights> : Smem<FwdHopper512> {};

template <class T, bool MODIFIED>
struct Consumer<T, FwdHopper512, MODIFIED> : Consumer<T, Fwd512Weights, MODIFIED> {
    typedef FwdHopper512 Tile;
    typedef Consumer<T, Fwd512Weights, MODIFIED> Base;
    typedef Smem<Tile> S;
    typedef typename Base::At At;
    typedef tma_steps<2> Steps;
    using Base::Base;
    using Base::o;
    using Base::p;
    using Base::s;
    using Base::smem_s;
    using Base::softmax;
    using Base::sum;
    using Base::w;
    using Base::warpgroup;
    using Base::x;
    static_assert(Base::OVERLAP && !Base::AHEAD && !Base::EARLY && Base::SPLIT, "as below");

    __device__ __forceinline__ Steps k_ring() const { return {smem_s + S::K_RING}; }
    __device__ __forceinline__ Steps v_ring() const { return {smem_s + S::V_RING}; }

    /* S (+)= Q K^T of half H of the columns, as a group of products. */
    template <int H> __device__ __forceinline__ void issue_half(smem_addr q_s) {
        smem_addr k_s = smem_s + S::K_AT + H * S::K::bytes;
        opaque(k_s); /* as q_s in first_block */
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < S::COLUMNS; kk += 16)
            wgmma_ss<T, Tile::BKV, 0, 0>(s, S::Q::k_major(q_s, 64 * warpgroup, H * S::COLUMNS + kk),
                                         S::K::k_major(k_s, 0, kk), H > 0 || kk > 0);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void issue_both(smem_addr q_s, int step) {
        issue_half<0>(q_s);
        k_ring().wait_full(2 * step + 1);
        issue_half<1>(q_s);
    }
    __device__ __forceinline__ void wait_values(int step) const {
        v_ring().wait_full(2 * step);
        v_ring().wait_full(2 * step + 1);
    }
    __device__ __forceinline__ void issue_sums() {
        smem_addr v_s = smem_s + S::V_AT;
        opaque(v_s); /* as q_s in first_block */
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < Tile::BKV; kk += 16)
            wgmma_rs<T, Tile::HEAD_DIM_V, 1>(
                o, p + kk / 4, S::V::mn_major(v_s + kk / S::KEYS * S::V::bytes, kk % S::KEYS),
                true);
        wgmma_commit_group();
    }
    __device__ __forceinline__ void release_values(int step) const {
        Base::release(v_ring().empty(2 * step));
        Base::release(v_ring().empty(2 * step + 1));
    }
    /* S is complete. */
    __device__ __forceinline__ void scores_over(const At &at, int j) {
        wgmma_pin(s);
        Base::release(k_ring().empty(2 * (at.step + j) + 1));
        if (j == at.end - 1) Base::release_q(smem_s + S::Q_RING + 8 * Tile::Q_BUFFERS);
    }

    /* Clears rows [from, BKV) of V. */
    __device__ __forceinline__ void clear_values(int from) const {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (from < (h + 1) * S::KEYS)
                clear_rows<Tile>(smem_s + S::V_AT + h * S::V::bytes, max(from - h * S::KEYS, 0),
                                 warpgroup, S::KEYS);
    }

    __device__ __forceinline__ void first_block(const FwdTile &t, const At &at) {
        const int step = at.step + at.from, block = block_at<MODIFIED>(t, at.from);
        const bool edge = block < t.keys.plain_first || block >= t.keys.plain_end;
        KeptColumns columns = {};
        if (!MODIFIED && edge) columns = this->columns_of(t, block);
        smem_addr q_s = at.q_s;
        opaque(q_s); /* keeps descriptors of this fixed address out of registers */
        k_ring().wait_full(2 * step);
        turn_begin<Tile>(warpgroup);
        issue_both(q_s, step);
        turn_end<Tile>(warpgroup);
        wgmma_wait_group<0>();
        Base::release(k_ring().empty(2 * step));
        scores_over(at, at.from);
        clear(o);
        if (MODIFIED) {
            this->weigh_first(t, block, edge);
        } else {
            if (edge) keep_columns(s, columns);
            softmax.template refer<false>(s, x.units.unit_log2);
            softmax.weights(s, x.units.unit_log2, w, sum);
        }
        softmax.total[0] = sum[0];
        softmax.total[1] = sum[1];
        softmax.pack(w, p);
        if (MODIFIED && t.incomplete > 0 && block == t.keys.tiles - 1) {
            wait_values(step);
            clear_values(t.incomplete);
        }
    }

    __device__ __forceinline__ bool take_block(const FwdTile &t, const At &at, int j, bool edge) {
        const int step = at.step + j;
        smem_addr q_s = at.q_s;
        opaque(q_s);
        k_ring().wait_full(2 * step);
        turn_begin<Tile>(warpgroup);
        issue_both(q_s, step);
        wait_values(step - 1);
        issue_sums();
        turn_end<Tile>(warpgroup);
        const int block = block_at<MODIFIED>(t, j);
        KeptColumns columns = {};
        if (!MODIFIED && edge) columns = this->columns_of(t, block);
        if (MODIFIED) this->begin_weights(t, block, edge);
        wgmma_wait_group<2>();
        Base::release(k_ring().empty(2 * step));
        wgmma_wait_group<1>();
        scores_over(at, j);
        if (MODIFIED) {
            this->weigh_next(t, block, edge);
        } else {
            if (edge) keep_columns(s, columns);
            softmax.weights(s, x.units.unit_log2, w, sum);
        }
        const bool again = __any_sync(0xffffffffu, softmax.out_of_range(sum));
        mbarrier_wait(smem_s + S::OVER, 0); /* ends a basic block, as in Base::take_block */
        wgmma_wait_group<0>();
        wgmma_pin(o);
        release_values(step - 1);
        return again;
    }

    __device__ __forceinline__ void other_blocks(const FwdTile &t, const At &at) {
#pragma unroll 1
        for (int j = at.from + 1; j < at.end;) {
            bool again = false;
            const int plain = j + Base::plain_run(t, j, at.end);
#pragma unroll 1
            for (; j < plain; ++j) {
                again = take_block(t, at, j, false);
                if (again) break;
                this->block_taken();
            }
            if (again) {
                this->take_again(t, j, false);
                this->block_taken();
                ++j;
                continue;
            }
            if (j >= at.end) break;
            if (take_block(t, at, j, true)) this->take_again(t, j, true);
            this->block_taken();
            ++j;
        }
    }

    template <class Store>
    __device__ __forceinline__ void last_values(const FwdTile &t, const At &at, smem_addr,
                                                const Store &) {
        const int last = at.step + at.end - 1;
        wait_values(last);
        if (t.incomplete > 0 && block_at<MODIFIED>(t, at.end - 1) == t.keys.tiles - 1)
            clear_values(t.incomplete);
        turn_begin<Tile>(warpgroup);
        issue_sums();
        turn_end<Tile>(warpgroup);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        release_values(last);
    }

    /* K must be released before the turn, since the other warpgroup may need K of the next block in
     * its own turn, and that K takes the place of this one. V is loaded behind it. */
    __device__ __forceinline__ void pass(int step, int blocks) const {
#pragma unroll 1
        for (int j = step; j < step + blocks; ++j) {
            k_ring().wait_full(2 * j);
            k_ring().wait_full(2 * j + 1);
            bar_sync(4 + warpgroup, 128); /* all four warps have seen the stages full */
            Base::release(k_ring().empty(2 * j));
            Base::release(k_ring().empty(2 * j + 1));
            turn_begin<Tile>(warpgroup);
            turn_end<Tile>(warpgroup);
            wait_values(j);
            bar_sync(4 + warpgroup, 128); /* likewise */
            release_values(j);
        }
    }
};

#endif
