/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_consumer.cuh: what a consumer warpgroup of flash_attn_fwd_sm90a does with a tile: 64 rows of S, of weights and of O, block of
 * keys after block. */
#ifndef GPUKERN_CUDA_FWD_CONSUMER_CUH
#define GPUKERN_CUDA_FWD_CONSUMER_CUH

#include "fwd_products.cuh"
#include "fwd_results.cuh"
#include "mask.cuh"

template <class T, class Tile, bool MODIFIED> struct Consumer {
    typedef Smem<Tile> S;
    typedef tma_steps<Tile::STAGES> Steps;
    static constexpr int BKV = Tile::BKV, N = BKV / 8, ND = Tile::HEAD_DIM_V / 8;
    static constexpr bool OVERLAP = Tile::OVERLAP;
    /* The next tile's Q has a place of its own. */
    static constexpr bool AHEAD = Tile::Q_BUFFERS == 2;
    /* Weights wait in float32 until the next scores are issued, and are packed under them. */
    static constexpr bool PACK_LATE = OVERLAP && AHEAD;
    /* Blocks that every row sees whole have a loop of their own. */
    static constexpr bool SPLIT = !MODIFIED || OVERLAP;
    /* The next tile's first scores are issued behind this tile's last values. */
    static constexpr bool EARLY = OVERLAP && AHEAD && !MODIFIED;

    const FwdHopperParams &x;
    const smem_addr smem_s;
    const int warpgroup;
    StaleSoftmax<T, BKV> softmax;
    float s[N * 4], w[N * 4], o[ND * 4], sum[2]; /* scores, weights and their sums by row, O */
    float shift[2];                              /* of the block's scores */
    uint32_t p[N * 2];                           /* weights as an operand */
    bool ready;                                  /* s holds the scores of the tile's first block */

    __device__ __forceinline__ Consumer(const FwdHopperParams &x, smem_addr smem_s, int warpgroup)
        : x(x), smem_s(smem_s), warpgroup(warpgroup), ready(false) {}

    /* Where a tile's steps lie among all of the block's, and its Q. */
    struct At {
        int step;          /* of the tile's first block */
        int from, end;     /* the steps, counted from the tile's first, of which this warpgroup's rows see keys */
        smem_addr q_s;     /* this tile's Q */
        smem_addr q_empty; /* AHEAD: that of the tile before, released after the first weights; 0: none */
    };

    /* What a lane's two rows make of a block of keys, found while the products run. */
    struct Rows {
        uint32_t kept[2];
        float slope[2], ahead[2];
        int side; /* 1: all keys lie before all rows, -1: behind, 0: neither */
        int row0, key0;
    };
    __device__ __forceinline__ bool asks_rows(bool edge) const {
        return edge || (MODIFIED && (x.units.sloped || !x.units.plain));
    }
    __device__ __forceinline__ Rows rows_of_block(const FwdTile &t, int block, bool edge) const {
        Rows y = {};
        if (!asks_rows(edge)) return y;
        const int key0 = t.keys.lo + block * BKV + frag_col(mov_tid_x() % 32, 0);
        if (edge) {
            const Span span = t.seq.span;
            const int last = t.seq.seq_q - 1;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i =
                    min(row_of(x, t, own_row() + 8 * r).i, last); /* those past it see what its last row sees */
                y.kept[r] = columns_in<BKV / 4>(span.lo(i) - key0, span.hi(i) - key0);
            }
        }
        if (!MODIFIED || (x.units.plain && !x.units.sloped)) return y;
        y.row0 = t.work.i0 + own_row(), y.key0 = key0;
        if (x.stacked == 1) {
            y.slope[0] = y.slope[1] = t.score.slope * x.units.per_slope;
            y.ahead[0] = (float)(y.row0 + t.score.position0 - key0), y.ahead[1] = y.ahead[0] + 8;
            const int key = t.keys.lo + block * BKV - t.score.position0; /* row 0 stands at key 0 */
            y.side = !x.units.plain                          ? 0
                     : key + BKV - 1 <= t.work.i0            ? 1
                     : key >= t.work.i0 + Smem<Tile>::BQ - 1 ? -1
                                                             : 0;
        } else { /* each of the heads has its own */
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const FwdRow row = row_of(x, t, own_row() + 8 * r);
                y.slope[r] = slope_of<float>(x.fwd.problem.rules, t.work.b, row.head) * x.units.per_slope;
                y.ahead[r] = (float)(row.i + t.score.position0 - key0);
                if (r == 0) y.row0 = row.i;
            }
        }
        return y;
    }

    /* Scores of a block, before the softmax: what the products cannot do. */
    __device__ __forceinline__ void finish_scores(const FwdTile &t, const Rows &rows, bool edge) {
        if (MODIFIED && x.units.capped && x.units.plain) cap_scores(s, x.units);
        if (MODIFIED && !x.units.plain)
            modify(*(float (*)[1][N][4]) & s, t.score, rows.row0, rows.key0);
        else if (MODIFIED && x.units.sloped && rows.side == 0)
            lean_scores(s, rows.slope, rows.ahead);
        shift[0] = shift[1] = 0;
        if (MODIFIED && rows.side != 0) {
            const float slope[2] = {rows.slope[0] * rows.side, rows.slope[1] * rows.side};
            lean_one_side(s, slope);
#pragma unroll
            for (int r = 0; r < 2; ++r) shift[r] = slope[r] * rows.ahead[r] * x.units.unit_log2;
        }
        if (edge) keep_columns(s, rows.kept);
    }

    __device__ __forceinline__ smem_addr k_at(int step) const {
        return smem_s + S::K_AT + Steps::stage(step) * S::K::bytes;
    }
    __device__ __forceinline__ smem_addr v_at(int step) const {
        return smem_s + S::V_AT + Steps::stage(step) * S::V::bytes;
    }

    /* This warp's rows of a Q that its store has read may be loaded anew; barrier 0: there is none. */
    static __device__ __forceinline__ void release_q(smem_addr barrier_s) {
        if (!barrier_s || laneid() != 0) return;
        if (AHEAD) tma_store_wait_group_read<0>();
        mbarrier_arrive(barrier_s);
    }

    __device__ __forceinline__ Steps k_ring() const { return {smem_s + S::K_RING}; }
    __device__ __forceinline__ Steps v_ring() const { return {smem_s + S::V_RING}; }
    /* One thread of a warpgroup releases what its product has read. */
    static __device__ __forceinline__ void release(smem_addr barrier_s) {
        if (mov_tid_x() % 128 == 0) mbarrier_arrive(barrier_s);
    }

    /* How many blocks from step j on, before step `end`, every row sees all keys of. */
    static __device__ __forceinline__ int plain_run(const FwdTile &t, int j, int end) {
        const int block = block_at<MODIFIED>(t, j), first = t.keys.plain_first, plain_end = t.keys.plain_end;
        if (block < first || block >= plain_end) return 0;
        const bool down = MODIFIED && j <= t.nearest;
        return min(down ? block - first + 1 : plain_end - block, end - j);
    }

    /* V's rows past the sequence, where the tile's step j is that of the last block. */
    __device__ __forceinline__ void clear_tail(const FwdTile &t, int step, int j) const {
        if (t.ragged > 0 && block_at<MODIFIED>(t, j) == t.keys.tiles - 1)
            clear_rows<Tile>(v_at(step + j), t.ragged, warpgroup);
    }

    /* The block's scores are there: K is free, and Q after the tile's last. */
    __device__ __forceinline__ void scores_over(const At &at, int j) {
        wgmma_pin(s);
        release(k_ring().empty(at.step + j));
        if (!AHEAD && j == at.end - 1) release_q(smem_s + S::Q_RING + 8 * Tile::Q_BUFFERS);
    }

    /* Weights of the tile's first block, which set the reference. */
    __device__ __forceinline__ void first_block(const FwdTile &t, const At &at) {
        const int step = at.step + at.from, block = block_at<MODIFIED>(t, at.from);
        const bool edge = block < t.keys.plain_first || block >= t.keys.plain_end;
        const Rows rows = rows_of_block(t, block, edge);
        if (!EARLY || !ready) {
            k_ring().wait_full(step);
            smem_addr q_s = at.q_s;
            if (!AHEAD && Tile::HEAD_DIM > 192)
                opaque(q_s); /* always the same, so its descriptors would stay in registers */
            turn_begin<Tile>(warpgroup);
            issue_scores<T, Tile>(s, q_s, k_at(step), 64 * warpgroup);
            turn_end<Tile>(warpgroup);
            wgmma_wait_group<0>();
            scores_over(at, at.from);
        }
        clear(o);
        finish_scores(t, rows, edge);
        softmax.template refer<EARLY>(s, x.units.unit_log2, shift);
        softmax.weights(s, x.units.unit_log2, shift, w, sum);
        if (EARLY && __any_sync(0xffffffffu, softmax.out_of_range(sum))) {
            float none[2];
            softmax.redo(s, x.units.unit_log2, shift, w, sum, none);
        }
        softmax.total[0] = sum[0], softmax.total[1] = sum[1];
        if (!PACK_LATE) softmax.pack(w, p);
        if (AHEAD) release_q(at.q_empty); /* the store of the tile before has had the time of a block */
        if (MODIFIED && t.ragged > 0 && block == t.keys.tiles - 1) {
            v_ring().wait_full(step);
            clear_rows<Tile>(v_at(step), t.ragged, warpgroup);
        }
    }

    /* Step j of the tile, behind its first: its weights, and O of the block before. Whether a row must take the block again. */
    __device__ __forceinline__ bool take_block(const FwdTile &t, const At &at, int j, bool edge) {
        const Steps k = k_ring(), v = v_ring();
        const int step = at.step + j;
        smem_addr q_s = at.q_s;
        k.wait_full(step);
        if (MODIFIED) opaque(q_s); /* or its descriptors stay in registers, where there are none left */
        turn_begin<Tile>(warpgroup);
        issue_scores<T, Tile>(s, q_s, k_at(step), 64 * warpgroup);
        if (PACK_LATE) {
            wgmma_pin(w); /* not before the scores are issued */
            softmax.pack(w, p);
        }
        v.wait_full(step - 1);
        issue_values<T, Tile>(o, p, v_at(step - 1));
        turn_end<Tile>(warpgroup);
        Rows rows = {};
        rows = rows_of_block(t, block_at<MODIFIED>(t, j), edge);
        wgmma_wait_group<OVERLAP>();
        scores_over(at, j);
        if (!OVERLAP) {
            wgmma_pin(o);
            release(v.empty(step - 1));
        }
        finish_scores(t, rows, edge);
        softmax.weights(s, x.units.unit_log2, shift, w, sum);
        if (!OVERLAP) softmax.pack(w, p);
        const bool again = __any_sync(0xffffffffu, softmax.out_of_range(sum));
        if (OVERLAP) {
            /* over for ever: ends a basic block, or ptxas moves the powers past the wait below */
            mbarrier_wait(smem_s + S::OVER, 0);
            wgmma_wait_group<0>();
            wgmma_pin(o);
            release(v.empty(step - 1));
        }
        return again;
    }

    /* The block once more, for the rows that are out of range. */
    __device__ __forceinline__ void take_again() {
        float factor[2];
        softmax.redo(s, x.units.unit_log2, shift, w, sum, factor);
        if (!OVERLAP) softmax.pack(w, p);
#pragma unroll
        for (int i = 0; i < ND * 4; ++i) o[i] *= factor[i / 2 & 1];
    }

    __device__ __forceinline__ void block_taken() {
        if (OVERLAP && !PACK_LATE) softmax.pack(w, p);
        softmax.total[0] += sum[0], softmax.total[1] += sum[1];
    }

    /* The blocks behind the first one. The loop over blocks that every row sees whole has neither masks nor redos: either one leaves
     * it and comes back. */
    __device__ __forceinline__ void other_blocks(const FwdTile &t, const At &at) {
#pragma unroll 1
        for (int j = at.from + 1; j < at.end;) {
            bool again = false;
            const int run = plain_run(t, j, at.end), plain = SPLIT ? j + run : j;
#pragma unroll 1
            for (; j < plain; ++j) {
                again = take_block(t, at, j, false);
                if (again) break;
                block_taken();
            }
            if (again) {
                take_again();
                block_taken();
                ++j;
                continue;
            }
            if (j >= at.end) break;
            if (take_block(t, at, j, SPLIT || run == 0)) take_again();
            block_taken();
            ++j;
        }
    }

    /* The last values. next_s: the next tile's Q, whose first scores follow at once, and store() runs under them; 0: not so. */
    template <class Store>
    __device__ __forceinline__ void last_values(const FwdTile &t, const At &at, smem_addr next_s, const Store &store) {
        const Steps k = k_ring(), v = v_ring();
        const int last = at.step + at.end - 1, next = at.step + t.steps.blocks;
        if (PACK_LATE) softmax.pack(w, p);
        ready = EARLY && next_s;
        if (ready) { /* the whole way from issue to wait stands in a branch */
            pass(at.step + at.end, t.steps.blocks - at.end);
            v.wait_full(last);
            clear_tail(t, at.step, at.end - 1);
            turn_begin<Tile>(warpgroup);
            issue_values<T, Tile>(o, p, v_at(last));
            k.wait_full(next);
            issue_scores<T, Tile>(s, next_s, k_at(next), 64 * warpgroup);
            turn_end<Tile>(warpgroup);
            wgmma_wait_group<1>();
            wgmma_pin(o);
            release(v.empty(last));
            store();
            wgmma_wait_group<0>();
            wgmma_pin(s);
            release(k.empty(next));
            return;
        }
        v.wait_full(last);
        clear_tail(t, at.step, at.end - 1);
        turn_begin<Tile>(warpgroup);
        issue_values<T, Tile>(o, p, v_at(last));
        turn_end<Tile>(warpgroup);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        release(v.empty(last));
    }

    /* Blocks from step on that only other warpgroups read; turns are taken all the same. */
    __device__ __forceinline__ void pass(int step, int blocks) const {
        const Steps k = k_ring(), v = v_ring();
#pragma unroll 1
        for (int j = step; j < step + blocks; ++j) {
            k.wait_full(j), v.wait_full(j);
            turn_begin<Tile>(warpgroup); /* brings the four warps together: all have seen the stages full */
            turn_end<Tile>(warpgroup);
            if (threadIdx.x % 128 == 0) mbarrier_arrive(k.empty(j)), mbarrier_arrive(v.empty(j));
        }
    }
};

#endif
