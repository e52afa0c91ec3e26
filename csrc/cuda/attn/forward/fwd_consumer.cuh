/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_consumer.cuh: the work of a consumer warpgroup on one tile of queries in Hopper's forward
 * kernels (Shah et al. 2024, arXiv:2407.08608, Algorithm 2).
 *
 * The warpgroup owns 64 rows of queries. S, P and O stay in registers. For key block j it computes
 *
 *   S_j = Q K_j^T                          WGMMA, in the background
 *   O  += P_(j-1) V_(j-1)                  WGMMA, issued together with S_j
 *   hide the keys that a row does not see  only in blocks with a mask
 *   P_j = 2^(S_j - m), sums of its rows    with OVERLAP while O is still running
 *   if a row's sum leaves float's range: a new m, P_j again, O times 2^(old m - new m)
 *
 * m is the row's reference. FlashAttention updates it in every block; here it changes only when it
 * must (stale_softmax.cuh).
 *
 * For each tile, fwd_loop.cuh calls first_block, other_blocks and last_values, and `pass` for key
 * blocks that this warpgroup's rows do not see. Kernels differ in four policies:
 *
 *   Stages   the products, and the stages of K and V: fwd_stages.cuh, fwd_wide.cuh
 *   Keys     which keys a row sees, by its span or by a stored mask: fwd_keys.cuh
 *   Weights  P from S: fwd_weights.cuh, fwd_modified.cuh (softcap, ALiBi), fwd_bias.cuh
 *   DropOf   dropout: fwd_drop.cuh, or none, below */
#ifndef GPUKERN_CUDA_FWD_CONSUMER_CUH
#define GPUKERN_CUDA_FWD_CONSUMER_CUH

#include "fwd_bias.cuh"
#include "fwd_keys.cuh"
#include "fwd_modified.cuh"
#include "fwd_stages.cuh"

/* Dropout. This is the version without; fwd_drop.cuh has the other. */
template <class Tile> struct DropOf {
    static constexpr bool ON = false;
    template <class Params> __device__ __forceinline__ DropOf(const Params &) {}
};

/* The policy by which the scores of a tile's kernel become weights. */
template <class T, class Tile, bool MODIFIED, bool BIAS = Smem<Tile>::BIAS> struct WeightsOf {
    typedef PlainWeights type;
};
template <class T, class Tile> struct WeightsOf<T, Tile, true, false> {
    typedef ModifiedWeights type;
};
template <class T, class Tile> struct WeightsOf<T, Tile, false, true> {
    typedef BiasWeights<T, Tile> type;
};

template <class T, class Tile, bool MODIFIED> struct Consumer {
    typedef T Element;
    typedef Smem<Tile> S;
    typedef TileSteps At;
    typedef typename ParamsOf<Tile>::type Params;
    typedef typename StagesOf<T, Tile>::type Stages;
    typedef typename KeysOf<Tile, MODIFIED>::type Keys;
    typedef typename WeightsOf<T, Tile, MODIFIED>::type Weights;
    static constexpr int BKV = Tile::BKV, N = BKV / 8, ND = Tile::HEAD_DIM_V / 8;
    static constexpr bool OVERLAP = Tile::OVERLAP;
    /* There are two Q buffers, and the next tile's Q arrives while this tile is multiplied. */
    static constexpr bool AHEAD = Tile::Q_BUFFERS == 2;
    /* Weights stay in float32 until the next S is issued, and are packed to 16 bits while it
     * runs. */
    static constexpr bool PACK_LATE = OVERLAP && AHEAD;
    /* Key blocks without a mask run in a loop of their own. */
    static constexpr bool SPLIT = !MODIFIED || OVERLAP;
    /* The first S of the next tile may be issued directly after the last P V of this tile. */
    static constexpr bool EARLY = OVERLAP && AHEAD && !MODIFIED;
    static constexpr bool BIAS = S::BIAS, DROP = DropOf<Tile>::ON;
    /* True if a warpgroup passes the first key blocks of a tile when its rows see none of their
     * keys. With a mask or a bias it takes them instead, because pass() would leave the bias in its
     * ring. */
    static constexpr bool LEADS = MODIFIED || (!S::SCORED && S::BQ - 64 >= BKV);
    static_assert(!S::MASK || SPLIT, "other_blocks ends a run of whole blocks at a partial one");
    static_assert(!BIAS || !LEADS, "pass() would leave the bias of a block in its ring");
    static_assert(!DROP || !OVERLAP, "weights are dropped as soon as they are packed");

    const Params &x;
    const smem_addr smem_s;
    const int warpgroup;
    StaleSoftmax<T, BKV> softmax;
    /* S; P; O; the sum of each row's weights in the present block */
    float s[N * 4], w[N * 4], o[ND * 4], sum[2];
    uint32_t p[N * 2]; /* P in 16 bits, the A operand of P V */
    bool ready;        /* s already holds the scores of the tile's first key block */
    Keys keys;
    Weights weights;
    DropOf<Tile> dropout;

    __device__ __forceinline__ Consumer(const Params &x, smem_addr smem_s, int warpgroup)
        : x(x), smem_s(smem_s), warpgroup(warpgroup), ready(false), dropout(x) {}

    /* The object is made at each use. As a member it changed which registers ptxas gives to the
     * sums. */
    __device__ __forceinline__ Stages stages() const { return {smem_s, warpgroup}; }

    /* ---- 1. masks ---- */
    /* Which keys of a block the lane's two rows see. */
    __device__ __forceinline__ KeptColumns columns_of(const FwdTile &t, int block) {
        return keys.columns(x, t, smem_s, block);
    }
    /* Clears the rows of V past the end of the sequence, if step j takes the last key block. */
    __device__ __forceinline__ void clear_tail(const FwdTile &t, int step, int j) const {
        if (t.incomplete > 0 && block_at<MODIFIED>(t, j) == t.keys.tiles - 1)
            stages().clear_values(step + j, t.incomplete);
    }
    /* Clears the rows of V before the first key that any row of the sequence sees. Only paged
     * tiles have such rows, since they begin at a box boundary. */
    __device__ __forceinline__ void clear_head(const FwdTile &t, int step, int block) const {
        if constexpr (InBoxes<Tile>::value) {
            const int unseen = t.seq.span.lo(0) - t.keys.lo;
            if (block > 0 || unseen <= 0) return;
            stages().wait_values(step);
            clear_rows<Tile>(stages().v_at(step), 0, warpgroup, unseen);
        }
    }

    /* ---- 2. the key blocks of a tile ---- */
    /* The tile's first key block: computes S, sets m and computes the weights. */
    __device__ __forceinline__ void first_block(const FwdTile &t, const At &at) {
        const int step = at.step + at.from, block = block_at<MODIFIED>(t, at.from);
        bool edge = block < t.keys.plain_first || block >= t.keys.plain_end;
        if constexpr (S::MASK) edge = Keys::is_partial(t, at.from);
        KeptColumns columns = {};
        if (!MODIFIED && edge) columns = columns_of(t, block);
        if (!EARLY || !ready) {
            stages().wait_keys(step);
            smem_addr q_s = at.q_s;
            /* keeps the compiler from holding the descriptors of this fixed address in registers */
            if (!AHEAD && Tile::HEAD_DIM > 192) opaque(q_s);
            stages().begin_scores(s, step);
            turn_begin<Tile>(warpgroup);
            stages().issue_scores(s, q_s, step);
            turn_end<Tile>(warpgroup);
            if constexpr (DROP) draw(t, block);
            stages().template wait_scores<0>(s, at, at.from);
        }
        clear(o);
        if constexpr (MODIFIED) {
            weights.first(*this, t, block, edge);
        } else if constexpr (S::SCORED) {
            weights.finish_scores(*this, edge, columns);
            const float unit = Weights::unit(*this);
            if (edge && Weights::HIDES_SCORES) keep_columns(s, columns);
            /* All scores set m. With a sample of them, the bits of a row would depend on the masks
             * of other rows. */
            softmax.template refer<false>(s, unit);
            softmax.weights(s, unit, w, sum);
        } else {
            if (edge) keep_columns(s, columns);
            if (EARLY && !edge)
                softmax.template refer<true>(s, x.units.unit_log2);
            else /* in a masked block, the keys that a row sees may all lie outside the sample */
                softmax.template refer<false>(s, x.units.unit_log2);
            softmax.weights(s, x.units.unit_log2, w, sum);
            if (EARLY && __any_sync(0xffffffffu, softmax.out_of_range(sum))) {
                float none[2];
                softmax.redo(s, x.units.unit_log2, w, sum, none);
            }
        }
        softmax.total[0] = sum[0];
        softmax.total[1] = sum[1];
        if (!PACK_LATE) softmax.pack(w, p);
        if constexpr (DROP) dropout.drop(p);
        /* the previous tile's store has had a whole step by now to read O from the space of Q */
        if (AHEAD) stages().release_q(at.q_empty);
        if (MODIFIED && t.incomplete > 0 && block == t.keys.tiles - 1) {
            stages().wait_values(step);
            stages().clear_values(step, t.incomplete);
        }
        clear_head(t, step, block);
    }

    /* Step j > from of the tile: S of this block and P V of the previous one, then this block's
     * weights. edge: some row does not see all keys of the block. Returns true if some row left the
     * range, so that the caller must call take_again. */
    __device__ __forceinline__ bool take_block(const FwdTile &t, const At &at, int j, bool edge) {
        const int step = at.step + j;
        smem_addr q_s = at.q_s;
        /* S = Q K^T and O += P V, in the background */
        stages().wait_keys(step);
        /* keeps descriptors out of registers, because no register is left */
        if (MODIFIED || Tile::HEAD_DIM > 256) opaque(q_s);
        stages().begin_scores(s, step);
        turn_begin<Tile>(warpgroup);
        stages().issue_scores(s, q_s, step);
        if (PACK_LATE) {
            wgmma_pin(w); /* keeps the packing after the issue of S */
            softmax.pack(w, p);
        }
        stages().wait_values(step - 1);
        stages().issue_values(o, p, step - 1);
        turn_end<Tile>(warpgroup);

        /* the work that does not need S */
        const int block = block_at<MODIFIED>(t, j);
        KeptColumns columns = {};
        if (!MODIFIED && edge) columns = columns_of(t, block);
        weights.begin(*this, t, block, edge, columns);
        if constexpr (DROP) draw(t, block);

        /* S is complete; mask and softmax */
        stages().template wait_scores<OVERLAP>(s, at, j);
        if (!OVERLAP) stages().values_over(o, step - 1);
        if (edge && Weights::HIDES_SCORES) keep_columns(s, columns);
        weights.next(*this, t, block, edge, columns);
        if (!OVERLAP) softmax.pack(w, p);
        if constexpr (DROP) dropout.drop(p);
        const bool again = __any_sync(0xffffffffu, softmax.out_of_range(sum));

        /* O is complete */
        if (OVERLAP) {
            end_basic_block(); /* otherwise ptxas moves the exponentials to after the wait for O */
            wgmma_wait_group<0>();
            stages().values_over(o, step - 1);
        }
        return again;
    }

    /* Recomputes step j with a new m for the rows that left the range, and rescales O. */
    __device__ __forceinline__ void take_again(const FwdTile &t, int j, bool edge) {
        float factor[2];
        weights.again(*this, t, j, edge, factor);
        if constexpr (DROP) dropout.drop(p);
#pragma unroll
        for (int i = 0; i < ND * 4; ++i) o[i] *= factor[i / 2 & 1];
    }

    /* Adds the sums of a block whose weights are final. */
    __device__ __forceinline__ void block_taken() {
        if (OVERLAP && !PACK_LATE) softmax.pack(w, p);
        softmax.total[0] += sum[0];
        softmax.total[1] += sum[1];
    }

    /* All key blocks after the first. The inner loop serves blocks whose keys every row sees. It
     * contains neither masking nor redo code. A block with a mask, or a redo, leaves the loop and
     * re-enters it. */
    __device__ __forceinline__ void other_blocks(const FwdTile &t, const At &at) {
#pragma unroll 1
        for (int j = at.from + 1; j < at.end;) {
            bool again = false;
            const int run = Keys::plain_run(t, j, at.end), plain = SPLIT ? j + run : j;
#pragma unroll 1
            for (; j < plain; ++j) {
                again = take_block(t, at, j, false);
                if (again) break;
                block_taken();
            }
            if (again) {
                take_again(t, j, false);
                block_taken();
                ++j;
                continue;
            }
            if (j >= at.end) break;
            /* plain_run stopped at the end of a word of marks; look at the next word */
            if constexpr (Keys::MARKED)
                if (!Keys::is_partial(t, j)) continue;
            if (take_block(t, at, j, SPLIT || run == 0)) take_again(t, j, SPLIT || run == 0);
            block_taken();
            ++j;
        }
    }

    /* The last P V of the tile. If next_s is not 0, it is the address of the next tile's Q. The
     * next tile's first S is then issued directly after P V, and store() runs while that S is
     * multiplied. */
    template <class Store>
    __device__ __forceinline__ void last_values(const FwdTile &t, const At &at, smem_addr next_s,
                                                const Store &store) {
        const int last = at.step + at.end - 1, next = at.step + t.steps.blocks;
        if (PACK_LATE) softmax.pack(w, p);
        ready = EARLY && next_s;
        /* The code from issue to wait stays inside one branch. Otherwise ptxas serialises the
         * WGMMAs (C7515). */
        if (ready) {
            stages().pass(at.step + at.end, t.steps.blocks - at.end);
            stages().wait_values(last);
            clear_tail(t, at.step, at.end - 1);
            stages().begin_scores(s, next);
            turn_begin<Tile>(warpgroup);
            stages().issue_values(o, p, last);
            stages().wait_keys(next);
            stages().issue_scores(s, next_s, next);
            turn_end<Tile>(warpgroup);
            wgmma_wait_group<1>();
            stages().values_over(o, last);
            store();
            stages().wait_next_scores(s, next);
            return;
        }
        stages().wait_values(last);
        clear_tail(t, at.step, at.end - 1);
        /* with ALiBi the first keys may come last */
        if (MODIFIED) clear_head(t, last, block_at<MODIFIED>(t, at.end - 1));
        turn_begin<Tile>(warpgroup);
        stages().issue_values(o, p, last);
        turn_end<Tile>(warpgroup);
        wgmma_wait_group<0>();
        stages().values_over(o, last);
        if constexpr (DROP) dropout.scale(x, softmax.total, o);
    }

    /* ---- 3. key blocks that this warpgroup's rows do not see ---- */
    __device__ __forceinline__ void pass(int step, int blocks) const {
        stages().pass(step, blocks);
    }
    /* With ALiBi the key block nearest to the queries comes first (fwd_block). */
    static __device__ __forceinline__ bool from_nearest(const FwdHopperParams &x) {
        return MODIFIED && x.units.has_alibi;
    }
    /* The number of steps at the beginning of a tile whose keys this warpgroup's rows do not see.
     * own: the number of key blocks that they see. */
    __device__ __forceinline__ int lead(const FwdTile &t, int own) const {
        if (from_nearest(x)) return max(t.nearest - own + 1, 0);
        if (S::BQ - 64 < BKV || x.fwd.problem.rules.left < 0 || x.tile_heads > 1) return 0;
        const int unseen = max(t.seq.span.lo(t.work.i0 + 64 * warpgroup) - t.keys.lo, 0) / BKV;
        return unseen < own ? unseen : 0;
    }

    /* ---- 4. helpers ---- */
    /* Draws the dropout bits of a key block while its products run. Without the end of a basic
     * block, ptxas would draw after the wait for the products. */
    __device__ __forceinline__ void draw(const FwdTile &t, int block) {
        dropout.draw(x, t, block);
        end_basic_block();
    }
    /* Ends a basic block, across which ptxas moves no instruction: the wait is a loop. It never
     * blocks, because the barrier completed its only phase at the start of the kernel. */
    __device__ __forceinline__ void end_basic_block() const { mbarrier_wait(smem_s + S::OVER, 0); }

    /* Sets the tile's `spoilt` if its result holds a NaN or inf, so that fwd_mend.cuh computes its
     * rows again. The cause may be V of a hidden key: 0 times NaN is NaN. */
    __device__ __forceinline__ void note_spoilt(const FwdTile &t) {
        if constexpr (S::SCORED) {
            if (BIAS && StaleRange<T>::LIMIT < 0x1p16f) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (softmax.m[r] > STALE_NOTHING && softmax.m[r] < LOWEST_BIAS)
                        /* makes the row's result NaN; in o, because the row's factor may be 0 */
                        o[2 * r] = NAN;
            }
            /* four independent sums, because consecutive additions wait for each other */
            float none[4] = {softmax.total[0] * 0.f, softmax.total[1] * 0.f, 0, 0};
#pragma unroll
            for (int i = 0; i < ND * 4; ++i) none[i % 4] = fmaf(o[i], 0.f, none[i % 4]);
            const float all = (none[0] + none[1]) + (none[2] + none[3]);
            if (all != all)
                x.spoilt[(t.work.b * (int)x.by_batch.by + t.work.head) * x.fwd.tiles_q +
                         t.work.i0 / S::BQ] = 1;
        }
    }
};

#endif
