/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_stages.cuh: the Stages policy of fwd_consumer.cuh: the two products of a consumer warpgroup,
 * S = Q K^T and O += P V, and the stages of K and V that they read. In WholeStages a stage is one
 * block of keys. fwd_wide.cuh has another form for head_dim 512, in which a stage is half a block.
 *
 * A product runs in the background. Its function `issue_..` starts it. The warpgroup waits for it
 * later and then releases its stage to the loader. */
#ifndef GPUKERN_CUDA_FWD_STAGES_CUH
#define GPUKERN_CUDA_FWD_STAGES_CUH

#include "../../tile/release_reads.cuh"
#include "fwd_products.cuh"
#include "fwd_results.cuh" /* own_row */

/* The key blocks of a tile that a warpgroup takes. */
struct TileSteps {
    int step; /* number of the tile's first key block, counted over all tiles of the block */
    /* this warpgroup's rows see key blocks from .. end - 1, counted from the tile's first */
    int from, end;
    smem_addr q_s; /* this tile's Q */
    /* With two Q buffers, the barrier that releases the previous tile's Q after this tile's first
     * weights. 0: there is nothing to release. */
    smem_addr q_empty;
};

template <class T, class Tile> struct WholeStages {
    typedef Smem<Tile> S;
    typedef tma_steps<Tile::STAGES> Steps;
    static constexpr int N = Tile::BKV / 8, ND = Tile::HEAD_DIM_V / 8;
    static constexpr bool AHEAD = Tile::Q_BUFFERS == 2;

    const smem_addr smem_s;
    const int warpgroup;

    __device__ __forceinline__ Steps k_ring() const { return {smem_s + S::K_RING}; }
    __device__ __forceinline__ Steps v_ring() const { return {smem_s + S::V_RING}; }
    __device__ __forceinline__ smem_addr k_at(int step) const {
        return smem_s + S::K_AT + Steps::stage(step) * S::K::bytes;
    }
    __device__ __forceinline__ smem_addr v_at(int step) const {
        return smem_s + S::V_AT + Steps::stage(step) * S::V::bytes;
    }
    /* LIFT: the 16 additional columns of K. */
    __device__ __forceinline__ smem_addr lift_at(int step) const {
        return smem_s + S::LIFT_AT + k_ring().stage(step) * S::LIFT_BYTES;
    }

    /* Releases a stage to the loader, after the product that read it is complete. One thread
     * arrives for its warpgroup. */
    static __device__ __forceinline__ void release(smem_addr barrier_s) {
        if (mov_tid_x() % 128 == 0) mbarrier_arrive(barrier_s);
    }
    /* Releases this warp's rows of Q to the loader, once the TMA store has read O from them. If
     * barrier_s is 0, there is nothing to release. */
    static __device__ __forceinline__ void release_q(smem_addr barrier_s) {
        if (!barrier_s || laneid() != 0) return;
        if (AHEAD) tma_store_wait_group_read<0>();
        mbarrier_arrive(barrier_s);
    }

    /* ---- 1. S = Q K^T ---- */
    __device__ __forceinline__ void wait_keys(int step) const { k_ring().wait_full(step); }
    /* TABLE: S starts as the bias by distance divided by the scale, and the product is added to it.
     *
     * Each load takes the biases of two neighbouring columns, from the copy in which they are
     * aligned. They serve two rows: they are the biases of row 0, and 8 columns further those of
     * row 8. The ring advances with K's. */
    __device__ __forceinline__ void begin_scores(float (&s)[N * 4], int step) const {
        if constexpr (S::TABLE) {
            const tma_steps<S::TABLE_STAGES> ring = {smem_s + S::BIAS_RING};
            const int first = 128 + frag_col(mov_tid_x() % 32, 0) - own_row();
            const smem_addr at_s = smem_s + S::BIAS_AT +
                                   (2 * ring.stage(step) + (first & 1)) * S::COPY_BYTES +
                                   (first & ~1) * 4;
            ring.wait_full(step);
#pragma unroll
            for (int n = N - 1; n >= -1; --n) {
                const uint2 two = ld_shared_64(at_s + 32 * n);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float bias = __uint_as_float(e ? two.y : two.x);
                    if (n >= 0) s[4 * n + e] = bias;
                    if (n + 1 < N) s[4 * (n + 1) + 2 + e] = bias;
                }
            }
            release_reads(ring.empty(step));
        }
    }
    __device__ __forceinline__ void issue_scores(float (&s)[N * 4], smem_addr q_s, int step) const {
        ::issue_scores<T, Tile>(s, q_s, k_at(step), 64 * warpgroup, lift_at(step),
                                smem_s + S::ONES_AT);
    }
    /* Waits for S while PENDING later products may still run. Releases K. With one Q buffer it also
     * releases Q, after the last product that reads it. */
    template <int PENDING>
    __device__ __forceinline__ void wait_scores(float (&s)[N * 4], const TileSteps &at,
                                                int j) const {
        wgmma_wait_group<PENDING>();
        wgmma_pin(s);
        release(k_ring().empty(at.step + j));
        if (!AHEAD && j == at.end - 1) release_q(smem_s + S::Q_RING + 8 * Tile::Q_BUFFERS);
    }
    /* The same for the first S of the next tile, which is issued directly after this tile's last P
     * V. */
    __device__ __forceinline__ void wait_next_scores(float (&s)[N * 4], int step) const {
        wgmma_wait_group<0>();
        wgmma_pin(s);
        release(k_ring().empty(step));
    }

    /* ---- 2. O += P V ---- */
    __device__ __forceinline__ void wait_values(int step) const { v_ring().wait_full(step); }
    __device__ __forceinline__ void issue_values(float (&o)[ND * 4], const uint32_t (&p)[N * 2],
                                                 int step) const {
        ::issue_values<T, Tile>(o, p, v_at(step));
    }
    /* O is complete. */
    __device__ __forceinline__ void values_over(float (&o)[ND * 4], int step) const {
        wgmma_pin(o);
        release(v_ring().empty(step));
    }
    /* Zeroes rows [from, BKV) of V, because a weight of 0 times NaN would be NaN. */
    __device__ __forceinline__ void clear_values(int step, int from) const {
        clear_rows<Tile>(v_at(step), from, warpgroup);
    }

    /* ---- 3. key blocks that only other warpgroups read ---- */
    /* Releases these blocks. The warpgroup still calls turn_begin and turn_end for each of them,
     * because these barriers count. */
    __device__ __forceinline__ void pass(int step, int blocks) const {
        const Steps k = k_ring(), v = v_ring();
#pragma unroll 1
        for (int j = step; j < step + blocks; ++j) {
            k.wait_full(j);
            v.wait_full(j);
            /* turn_begin also synchronises the four warps: all of them have seen both stages
             * full */
            turn_begin<Tile>(warpgroup);
            turn_end<Tile>(warpgroup);
            if (threadIdx.x % 128 == 0) {
                mbarrier_arrive(k.empty(j));
                mbarrier_arrive(v.empty(j));
            }
            if constexpr (S::TABLE) {
                const tma_steps<S::TABLE_STAGES> distances = {smem_s + S::BIAS_RING};
                distances.wait_full(j);
                __syncwarp();
                if (laneid() == 0) mbarrier_arrive(distances.empty(j));
            }
        }
    }
};

/* The Stages policy of a tile's kernel. */
template <class T, class Tile> struct StagesOf {
    typedef WholeStages<T, Tile> type;
};

#endif
