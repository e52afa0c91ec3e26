/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_consumer.cuh: a consumer warpgroup's work on one tile of flash_attn_fwd_sm90a. In
 * flash_attn_fwd_masked_sm90a and flash_attn_fwd_masked_wide_sm90a it also reads mask words (MASK)
 * and a bias (BIAS) from shared memory. In flash_attn_fwd_drop_sm90a it drops weights (DROP).
 *
 * The warpgroup owns 64 rows of queries. For each block of BKV keys it computes S = Q K^T, the
 * weights P = 2^(S - m) and O += P V. S, P and O stay in registers. The row reference m changes
 * only when a row's sum leaves the number range (stale_softmax.cuh).
 *
 * fwd_loop.cuh calls, for each tile: first_block, other_blocks, last_values, and `pass` for key
 * blocks that this warpgroup's rows do not see. S of block j and O of block j - 1 are issued
 * together. With OVERLAP the weights of block j are computed while O of block j - 1 runs. */
#ifndef GPUKERN_CUDA_FWD_CONSUMER_CUH
#define GPUKERN_CUDA_FWD_CONSUMER_CUH

#include "../../ptx/ldmatrix.cuh"
#include "fwd_masked.cuh"
#include "fwd_products.cuh"
#include "fwd_results.cuh"

/* The dropout of the tile's kernel: fwd_drop.cuh. */
template <class Tile> struct DropOf {
    static constexpr bool ON = false;
    template <class Params> __device__ __forceinline__ DropOf(const Params &) {}
};

template <class T, class Tile, bool MODIFIED> struct Consumer {
    typedef Smem<Tile> S;
    typedef tma_steps<Tile::STAGES> Steps;
    static constexpr int BKV = Tile::BKV, N = BKV / 8, ND = Tile::HEAD_DIM_V / 8;
    static constexpr bool OVERLAP = Tile::OVERLAP;
    /* There are two Q buffers, so the next tile's Q arrives while this tile is multiplied. */
    static constexpr bool AHEAD = Tile::Q_BUFFERS == 2;
    /* Weights stay in float32 until the next S is issued, and are packed to 16 bits while it
     * runs. */
    static constexpr bool PACK_LATE = OVERLAP && AHEAD;
    /* Key blocks without a mask run in a loop of their own. */
    static constexpr bool SPLIT = !MODIFIED || OVERLAP;
    /* The first S of the next tile may be issued right behind the last P V of this tile. */
    static constexpr bool EARLY = OVERLAP && AHEAD && !MODIFIED;

    /* A warpgroup's rows may see no key of a tile's first blocks, and pass them. With a mask or a
     * bias they take them, because pass() would leave the bias in its ring. */
    static constexpr bool LEADS = MODIFIED || (!S::SCORED && S::BQ - 64 >= BKV);

    static constexpr bool MASK = S::MASK, BIAS = S::BIAS;
    static_assert(!MASK || SPLIT, "other_blocks ends a run of whole blocks at a partial one");
    static_assert(!BIAS || !LEADS, "pass() would leave the bias of a block in its ring");
    static constexpr bool DROP = DropOf<Tile>::ON;
    static_assert(!DROP || !OVERLAP, "weights are dropped as soon as they are packed");
    typedef typename ParamsOf<Tile>::type Params;

    const Params &x;
    const smem_addr smem_s;
    const int warpgroup;
    StaleSoftmax<T, BKV> softmax;
    /* scores; weights; output; each row's sum of this block's weights */
    float s[N * 4], w[N * 4], o[ND * 4], sum[2];
    uint32_t p[N * 2];             /* weights in 16 bits, the A operand of P V */
    bool ready;                    /* s already holds the scores of the tile's first key block */
    int words_taken, biases_taken; /* MASK; BIAS: stages of their rings that were read so far */
    DropOf<Tile> dropout;

    __device__ __forceinline__ Consumer(const Params &x, smem_addr smem_s, int warpgroup)
        : x(x), smem_s(smem_s), warpgroup(warpgroup), ready(false), dropout(x) {
        if (MASK) words_taken = 0;
        if (BIAS) biases_taken = 0;
    }

    /* A tile's place in the block's sequence of K and V stages. */
    struct At {
        int step; /* ring step of the tile's first key block */
        /* key blocks that this warpgroup's rows see, counted from the tile's first */
        int from, end;
        smem_addr q_s; /* this tile's Q */
        /* two Q buffers: the barrier that frees the previous tile's Q after the first weights;
         * 0: none */
        smem_addr q_empty;
    };

    /* With ALiBi the key block nearest to the queries comes first (fwd_block). */
    static __device__ __forceinline__ bool from_nearest(const FwdHopperParams &x) {
        return MODIFIED && x.units.has_alibi;
    }
    /* The number of leading steps of a tile whose keys this warpgroup's rows do not see. own:
     * key blocks that they do see. */
    __device__ __forceinline__ int lead(const FwdTile &t, int own) const {
        if (from_nearest(x)) return max(t.nearest - own + 1, 0);
        if (S::BQ - 64 < BKV || x.fwd.problem.rules.left < 0 || x.tile_heads > 1) return 0;
        const int unseen = max(t.seq.span.lo(t.work.i0 + 64 * warpgroup) - t.keys.lo, 0) / BKV;
        return unseen < own ? unseen : 0;
    }

    /* The keys of a block that a lane's two rows see. */
    __device__ __forceinline__ KeptColumns columns_of(const FwdTile &t, int block) {
        KeptColumns y;
        if constexpr (MASK) {
            const tma_steps<S::WORDS_STAGES> ring = {smem_s + S::WORDS_RING};
            ring.wait_full(words_taken);
            const uint2 two = ld_shared_64(
                smem_s + S::WORDS_AT + ring.stage(words_taken) * S::WORDS_BYTES + mov_tid_x() * 8);
            const int half = block % S::STEPS;
            /* The warp does not vote on columns that all or none of its rows see. The two
             * reductions and their branches cost more than they save (measured: 1.86 us a block,
             * 1.55 us without). */
            y.kept[0] = two.x >> 16 * half;
            y.kept[1] = two.y >> 16 * half;
            y.some = ~0u;
            y.whole = 0;
            /* the block's other step reads the same words */
            if (half < S::STEPS - 1 && block < t.steps.blocks - 1) return y;
            release_reads(ring.empty(words_taken));
            ++words_taken;
            return y;
        }
        const int key0 = t.keys.lo + block * BKV + frag_col(mov_tid_x() % 32, 0),
                  last = t.seq.seq_q - 1;
        const Span span = t.seq.span;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            /* rows past the sequence use the mask of its last row */
            const int i = min(row_of(x, t, own_row() + 8 * r).i, last);
            y.kept[r] = columns_in<BKV / 4>(span.lo(i) - key0, span.hi(i) - key0);
        }
        if (S::SCORED) { /* without a vote, as above */
            y.some = ~0u;
            y.whole = 0;
        } else if (!MODIFIED) {
            y.agree();
        }
        return y;
    }

    /* ---- a bias [.., Sq, Sk] ---- */
    /* A bias without a stored mask, steps of 128 keys: hidden keys get an addend of -inf. Replacing
     * their scores instead would keep `columns` in registers across the wait for the products, and
     * spill. With steps of 64 keys, it is the addends that spill. */
    static constexpr bool HIDES = BIAS && !MASK && BKV == 128;

    /* A bias of float16's lowest number hides a key. Its addend of -94502 makes the weight 0,
     * unless every key of the row is hidden in this way. Then m is below LOWEST, and note_spoilt
     * marks the row to be computed again. */
    static constexpr float LOWEST = -60000.f * LOG2_E;

    /* The addend of an exponent of 2: bias log2(e) - m. */
    __device__ __forceinline__ float addend_of(float bias, float m) const {
        return fmaf(bias, LOG2_E, -m);
    }
    /* Reads the bias of a block from shared memory and writes the addends to w. edge: the block has
     * keys that a row does not see. */
    __device__ __forceinline__ void bias_addends(const float (&m)[2], bool edge,
                                                 const KeptColumns &columns) {
        typedef typename S::Bias B;
        const int tid = mov_tid_x();
        const tma_steps<1> ring = {smem_s + S::BIAS_RING + 16 * warpgroup};
        const smem_addr first_s = smem_s + S::BIAS_AT + warpgroup * B::bytes +
                                  B::offset_of(tid % 128 / 32 * 16 + tid % 16, tid % 32 / 16 * 8);
        ring.wait_full(biases_taken);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t four[4];
            ldmatrix_x4(four, B::along(first_s, n));
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 two = unpack2<T>(four[e]);
                w[4 * n + 2 * e] = addend_of(two.x, m[e & 1]);
                w[4 * n + 2 * e + 1] = addend_of(two.y, m[e & 1]);
            }
        }
        if (HIDES && edge) keep_columns(w, columns);
        release_reads(ring.empty(biases_taken));
        ++biases_taken;
    }
    /* Turns the scores into exponents of 2, with the addends in w. */
    __device__ __forceinline__ void add_bias() {
#pragma unroll
        for (int i = 0; i < N * 4; ++i) s[i] = fmaf(s[i], x.units.unit_log2, w[i]);
    }
    /* Two elements of the bias from global memory. add_bias_again uses it for a block that is taken
     * again, because the block's stage has been released. */
    __device__ __forceinline__ static uint32_t bias_word(const Params &x, const FwdTile &t, int row,
                                                         int col) {
        if (col >= t.seq.seq_k) return 0;
        return *(const uint32_t *)((const T *)x.bias.data + t.work.b * x.bias.batch +
                                   t.work.head * x.bias.head +
                                   min(row, t.seq.seq_q - 1) * x.bias.row + col);
    }
    __device__ __forceinline__ void add_bias_again(const FwdTile &t, int j, bool edge) {
        int block = j;
        if constexpr (MASK) block = listed_keys<Tile>(x.mask, t, j);
        const int col = t.keys.lo + block * BKV + frag_col(mov_tid_x() % 32, 0),
                  row = t.work.i0 + own_row();
#pragma unroll
        for (int n = 0; n < N * 2; ++n) {
            const float2 v = unpack2<T>(bias_word(x, t, row + 8 * (n & 1), col + n / 2 * 8));
            s[2 * n] = fmaf(s[2 * n], x.units.unit_log2, addend_of(v.x, 0));
            s[2 * n + 1] = fmaf(s[2 * n + 1], x.units.unit_log2, addend_of(v.y, 0));
        }
        if (HIDES && edge) keep_columns(s, columns_of(t, block_at<MODIFIED>(t, j)));
    }
    /* Weights of a block that is taken again, for the rows that left the range: those of
     * first_block, because other rows' masks decide whether a row's first keys are in the tile's
     * first block. The other rows keep the weights of take_block, whose exponents are rounded in
     * another order. */
    __device__ __forceinline__ void weigh_biased_again(const FwdTile &t, int j, bool edge,
                                                       float (&factor)[2]) {
        add_bias_again(t, j, edge);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            opaque(sum[r]); /* without it take_block keeps its comparison in a register */
            const bool left =
                softmax.refer_row_again(r, softmax.row_top(s, 1, r), sum[r], factor[r]);
            const float m = softmax.m[r];
            float part[2] = {0, 0};
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int i = 4 * n + 2 * r;
                const float w0 = ex2_approx_ftz(s[i] - m), w1 = ex2_approx_ftz(s[i + 1] - m);
                part[0] += w0;
                part[1] += w1;
                if (OVERLAP) {
                    w[i] = left ? w0 : w[i];
                    w[i + 1] = left ? w1 : w[i + 1];
                } else {
                    p[i / 2] = left ? pack2<T>(w0, w1) : p[i / 2];
                }
            }
            sum[r] = left ? part[0] + part[1] : sum[r];
        }
    }

    /* ---- a bias by distance ---- */
    /* S begins as the bias over the scale, and the products are added to it. A pair of columns is
     * one aligned load in one of the block's two copies and serves two rows: it has the distances
     * of row 0, and for the columns 8 further those of row 8. Its ring is counted as K's. */
    __device__ __forceinline__ void begin_scores(int step) {
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

    /* ALiBi terms of a lane's two rows in one key block. The slopes are 0 without ALiBi. */
    struct AlibiRows {
        float slope[2], ahead[2];
        int side; /* 1: all keys come before all rows; -1: all come after; 0: mixed */
    };
    __device__ __forceinline__ AlibiRows alibi_of(const FwdTile &t, int block) const {
        AlibiRows y = {};
        if (!x.units.has_alibi) return y;
        /* position of the block's first key, row 0 being 0 */
        const int key = t.keys.lo + block * BKV - t.score.position0;
        const int key0 = key + frag_col(mov_tid_x() % 32, 0);
        if (x.tile_heads == 1) {
            y.slope[0] = y.slope[1] = t.score.slope * LOG2_E;
            y.ahead[0] = (float)(t.work.i0 + own_row() - key0);
            y.ahead[1] = y.ahead[0] + 8;
            y.side = key + BKV - 1 <= t.work.i0              ? 1
                     : key >= t.work.i0 + Smem<Tile>::BQ - 1 ? -1
                                                             : 0;
        } else { /* each head of the tile has its own slope */
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const FwdRow row = row_of(x, t, own_row() + 8 * r);
                y.slope[r] = slope_of<float>(x.fwd.problem.rules, t.work.b, row.head) * LOG2_E;
                y.ahead[r] = (float)(row.i - key0);
            }
        }
        return y;
    }

    /* ---- weights of a call with softcap or ALiBi ---- */
    /* Calls take(i, e0, e1) with the exponents of scores i and i + 1: score in log2 units minus
     * m. */
    template <class Take>
    __device__ __forceinline__ void visit(const FwdTile &t, int block, bool edge,
                                          const float (&m)[2], const Take &take) {
        const ScoreUnits &u = x.units;
        const AlibiRows alibi = alibi_of(t, block);
        KeptColumns columns = {};
        if (edge) columns = columns_of(t, block);
        const auto kept = [&](int i, float e) { return !edge || columns.has(i) ? e : -INFINITY; };
        if (u.capped) {
#pragma unroll
            for (int at = 0; at < N * 2; ++at) { /* row by row, which needs fewer registers */
                const int i = at / N * 2 + at % N * 4;
                float e[2];
                cap_exponents(s, i, u, alibi.slope[0], alibi.ahead[0], m, e);
                take(i, kept(i, e[0]), kept(i + 1, e[1]));
            }
        } else if (!edge && alibi.side != 0) {
            /* the same arithmetic as alibi_addends, so the same bits */
            const OneSidedAlibi of = one_sided_alibi(alibi.slope, alibi.ahead, alibi.side, m);
#pragma unroll
            for (int i = 0; i < N * 4; i += 2)
                take(i, fmaf(s[i], u.unit_log2, of.addend(i)),
                     fmaf(s[i + 1], u.unit_log2, of.addend(i + 1)));
        } else {
            const auto e = [&](int i) {
                return fmaf(s[i], u.unit_log2, alibi_addend(i, alibi.slope, alibi.ahead, m));
            };
#pragma unroll
            for (int i = 0; i < N * 4; i += 2) take(i, kept(i, e(i)), kept(i + 1, e(i + 1)));
        }
    }
    /* Weights of any key block, packed at once. While P and O are operands of running products,
     * no registers are left for float32 weights beside their temporaries. */
    __device__ __forceinline__ void weigh_any(const FwdTile &t, int block, bool edge) {
        uint32_t packed[N * 2];
        sum[0] = sum[1] = 0;
        visit(t, block, edge, softmax.m, [&](int i, float e0, float e1) {
            const float w0 = ex2_approx_ftz(e0), w1 = ex2_approx_ftz(e1);
            sum[i / 2 & 1] += w0;
            sum[i / 2 & 1] += w1;
            packed[i / 2] = pack2<T>(w0, w1);
        });
#pragma unroll
        for (int i = 0; i < N * 2; ++i) {
            const float2 two = unpack2<T>(packed[i]);
            w[2 * i] = two.x;
            w[2 * i + 1] = two.y;
        }
    }

    /* True if every score of the warp is small enough for the softcap polynomial (cap_factor).
     * With OVERLAP the squares of the scores stay in w. */
    __device__ __forceinline__ bool all_near() {
        if (OVERLAP) {
            uint32_t bits = 0;
#pragma unroll
            for (int i = 0; i < N * 4; i += 2) {
                w[i] = cap_square(s[i], x.units);
                w[i + 1] = cap_square(s[i + 1], x.units);
                bits |= __float_as_uint(w[i]) | __float_as_uint(w[i + 1]);
            }
            return __all_sync(0xffffffffu, bits < __float_as_uint(x.units.end));
        }
        float top[2] = {0, 0}; /* two chains, to shorten the dependency */
#pragma unroll
        for (int i = 0; i < N * 4; ++i) top[i & 1] = max_nan(top[i & 1], fabsf(s[i]));
        return __all_sync(0xffffffffu, max_nan(top[0], top[1]) < x.units.limit);
    }

    /* Without OVERLAP the registers hold s or w, not both. The exponents before m is subtracted
     * overwrite the scores. */
    __device__ __forceinline__ void finish_scores(const FwdTile &t, int block, bool edge) {
        if (!edge && x.units.capped && !x.units.has_alibi && all_near()) {
#pragma unroll
            for (int i = 0; i < N * 4; ++i) s[i] *= cap_factor(cap_square(s[i], x.units), x.units);
            return;
        }
        const float none[2] = {0, 0};
        visit(t, block, edge, none, [&](int i, float e0, float e1) {
            s[i] = e0;
            s[i + 1] = e1;
        });
    }

    /* Weights of a tile's first key block, which also sets m. */
    __device__ __forceinline__ void weigh_first(const FwdTile &t, int block, bool edge) {
        if (OVERLAP) {
            const float none[2] = {0, 0};
            visit(t, block, edge, none, [&](int i, float e0, float e1) {
                w[i] = e0;
                w[i + 1] = e1;
            });
            softmax.template refer<false>(w, 1);
            softmax.weights(w, 1, w, sum);
        } else {
            finish_scores(t, block, edge);
            softmax.template refer<false>(s, 1);
            softmax.weights(s, 1, w, sum);
        }
    }

    /* begin_weights and weigh_next compute the weights of a later block. begin_weights fills w
     * with the ALiBi addends while the product runs. */
    __device__ __forceinline__ void begin_weights(const FwdTile &t, int block, bool edge) {
        if (!OVERLAP || edge || x.units.capped) return;
        const AlibiRows alibi = alibi_of(t, block);
        alibi_addends(w, alibi.slope, alibi.ahead, alibi.side, softmax.m);
    }
    __device__ __forceinline__ void weigh_next(const FwdTile &t, int block, bool edge) {
        const ScoreUnits &u = x.units;
        if (!OVERLAP) {
            finish_scores(t, block, edge);
            softmax.weights(s, 1, w, sum);
        } else if (!edge && !u.capped) {
            softmax.weights_of([&](int i) { return fmaf(s[i], u.unit_log2, w[i]); }, w, sum);
        } else if (!edge && !u.has_alibi && all_near()) {
            softmax.weights_of(
                [&](int i) { return fmaf(s[i], cap_factor(w[i], u), -softmax.m[i / 2 & 1]); }, w,
                sum);
        } else {
            weigh_any(t, block, edge);
        }
    }
    /* Recomputes a block's weights after choosing a new m for the rows that left the range. */
    __device__ __forceinline__ void weigh_again(const FwdTile &t, int block, bool edge,
                                                float (&factor)[2]) {
        if (!OVERLAP) {
            softmax.redo(s, 1, w, sum, factor);
            return;
        }
        const float none[2] = {0, 0};
        float top[2] = {-INFINITY, -INFINITY};
        visit(t, block, edge, none, [&](int i, float e0, float e1) {
            top[i / 2 & 1] = fmaxf(top[i / 2 & 1], fmaxf(e0, e1));
        });
        top[0] = quad_max(top[0]);
        top[1] = quad_max(top[1]);
        softmax.refer_again(top, sum, factor);
        weigh_any(t, block, edge);
    }

    __device__ __forceinline__ smem_addr lift_at(int step) const {
        return smem_s + S::LIFT_AT + k_ring().stage(step) * S::LIFT_BYTES;
    }
    __device__ __forceinline__ smem_addr k_at(int step) const {
        return smem_s + S::K_AT + Steps::stage(step) * S::K::bytes;
    }
    __device__ __forceinline__ smem_addr v_at(int step) const {
        return smem_s + S::V_AT + Steps::stage(step) * S::V::bytes;
    }

    /* Releases this warp's rows of Q to the loader, once the TMA store has read O from them.
     * barrier_s of 0: there is nothing to release. */
    static __device__ __forceinline__ void release_q(smem_addr barrier_s) {
        if (!barrier_s || laneid() != 0) return;
        if (AHEAD) tma_store_wait_group_read<0>();
        mbarrier_arrive(barrier_s);
    }

    __device__ __forceinline__ Steps k_ring() const { return {smem_s + S::K_RING}; }
    __device__ __forceinline__ Steps v_ring() const { return {smem_s + S::V_RING}; }
    /* One thread releases a stage for its warpgroup, after the product that read it is complete. */
    static __device__ __forceinline__ void release(smem_addr barrier_s) {
        if (mov_tid_x() % 128 == 0) mbarrier_arrive(barrier_s);
    }

    /* MASK: whether step j takes keys of a partial block. */
    static __device__ __forceinline__ bool is_partial(const FwdTile &t, int j) {
        return S::marks_of(t).is_partial(j / S::STEPS);
    }

    /* The number of consecutive steps in [j, end) whose keys every row sees, so that no mask is
     * needed. */
    static __device__ __forceinline__ int plain_run(const FwdTile &t, int j, int end) {
        if constexpr (MASK) { /* at most the steps of one word of marks, 32 entries */
            const int entry = j / S::STEPS;
            const uint32_t partial = S::marks_of(t).partial[entry / 32] >> entry % 32;
            const int whole = partial ? __ffs(partial) - 1 : 32 - entry % 32;
            /* -1 in the second step of a partial block */
            return min(whole * S::STEPS - j % S::STEPS, end - j);
        }
        const int block = block_at<MODIFIED>(t, j), first = t.keys.plain_first,
                  plain_end = t.keys.plain_end;
        if (block < first || block >= plain_end) return 0;
        const bool down = MODIFIED && j <= t.nearest;
        /* with split keys, plain_first may be negative */
        return min(down ? block - max(first, 0) + 1 : plain_end - block, end - j);
    }

    /* Clears the rows of V past the sequence if step j is that of the last key block. */
    __device__ __forceinline__ void clear_tail(const FwdTile &t, int step, int j) const {
        if (t.incomplete > 0 && block_at<MODIFIED>(t, j) == t.keys.tiles - 1)
            clear_rows<Tile>(v_at(step + j), t.incomplete, warpgroup);
    }

    /* Clears the rows of V before the first key that any row of the sequence sees. Only paged
     * tiles have such rows, since they begin at a box boundary. */
    __device__ __forceinline__ void clear_head(const FwdTile &t, int step, int block) const {
        if constexpr (InBoxes<Tile>::value) {
            const int unseen = t.seq.span.lo(0) - t.keys.lo;
            if (block > 0 || unseen <= 0) return;
            v_ring().wait_full(step);
            clear_rows<Tile>(v_at(step), 0, warpgroup, unseen);
        }
    }

    /* S is complete: releases the stage of K and, after the tile's last S with one Q buffer, Q. */
    __device__ __forceinline__ void scores_over(const At &at, int j) {
        wgmma_pin(s);
        release(k_ring().empty(at.step + j));
        if (!AHEAD && j == at.end - 1) release_q(smem_s + S::Q_RING + 8 * Tile::Q_BUFFERS);
    }

    /* Draws the bits of a key block while its products run. The barrier ends the basic block as in
     * take_block, or ptxas would draw after the wait for the products. */
    __device__ __forceinline__ void draw(const FwdTile &t, int block) {
        dropout.draw(x, t, block);
        mbarrier_wait(smem_s + S::OVER, 0);
    }

    /* S and weights of the tile's first key block, which set m. */
    __device__ __forceinline__ void first_block(const FwdTile &t, const At &at) {
        const int step = at.step + at.from, block = block_at<MODIFIED>(t, at.from);
        bool edge = block < t.keys.plain_first || block >= t.keys.plain_end;
        if constexpr (MASK) edge = is_partial(t, at.from);
        KeptColumns columns = {};
        if (!MODIFIED && edge) columns = columns_of(t, block);
        if (!EARLY || !ready) {
            k_ring().wait_full(step);
            smem_addr q_s = at.q_s;
            /* keeps the compiler from holding descriptors of this fixed address in registers */
            if (!AHEAD && Tile::HEAD_DIM > 192) opaque(q_s);
            begin_scores(step);
            turn_begin<Tile>(warpgroup);
            issue_scores<T, Tile>(s, q_s, k_at(step), 64 * warpgroup, lift_at(step),
                                  smem_s + S::ONES_AT);
            turn_end<Tile>(warpgroup);
            if constexpr (DROP) draw(t, block);
            wgmma_wait_group<0>();
            scores_over(at, at.from);
        }
        clear(o);
        if (MODIFIED) {
            weigh_first(t, block, edge);
        } else if constexpr (S::SCORED) {
            if constexpr (BIAS) {
                const float none[2] = {0, 0};
                bias_addends(none, edge, columns);
                add_bias();
            }
            const float unit = BIAS ? 1.f : x.units.unit_log2;
            if (edge && !HIDES) keep_columns(s, columns);
            /* all scores set m: with a sample, a row's bits would depend on other rows' masks */
            softmax.template refer<false>(s, unit);
            softmax.weights(s, unit, w, sum);
        } else {
            if (edge) keep_columns(s, columns);
            if (EARLY && !edge)
                softmax.template refer<true>(s, x.units.unit_log2);
            else /* in a masked block a row may see keys, but none of the sample */
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
        /* by now the previous tile's store has had a whole step to read Q */
        if (AHEAD) release_q(at.q_empty);
        if (MODIFIED && t.incomplete > 0 && block == t.keys.tiles - 1) {
            v_ring().wait_full(step);
            clear_rows<Tile>(v_at(step), t.incomplete, warpgroup);
        }
        clear_head(t, step, block);
    }

    /* Step j > from of the tile: issues S of this block and P V of the previous one, then
     * computes the weights. Returns true if some row left the range, so that the block must be
     * redone. */
    __device__ __forceinline__ bool take_block(const FwdTile &t, const At &at, int j, bool edge) {
        const Steps k = k_ring(), v = v_ring();
        const int step = at.step + j;
        smem_addr q_s = at.q_s;
        k.wait_full(step);
        /* keeps descriptors out of registers, of which none are left */
        if (MODIFIED) opaque(q_s);
        begin_scores(step);
        turn_begin<Tile>(warpgroup);
        issue_scores<T, Tile>(s, q_s, k_at(step), 64 * warpgroup, lift_at(step),
                              smem_s + S::ONES_AT);
        if (PACK_LATE) {
            wgmma_pin(w); /* keeps the packing behind the issue of S */
            softmax.pack(w, p);
        }
        v.wait_full(step - 1);
        issue_values<T, Tile>(o, p, v_at(step - 1));
        turn_end<Tile>(warpgroup);
        const int block = block_at<MODIFIED>(t, j);
        KeptColumns columns = {};
        if (!MODIFIED && edge) columns = columns_of(t, block);
        if (MODIFIED) begin_weights(t, block, edge);
        if constexpr (BIAS) bias_addends(softmax.m, edge, columns);
        if constexpr (DROP) draw(t, block);
        wgmma_wait_group<OVERLAP>();
        scores_over(at, j);
        if (!OVERLAP) {
            wgmma_pin(o);
            release(v.empty(step - 1));
        }
        if (MODIFIED) {
            weigh_next(t, block, edge);
        } else {
            if (edge && !HIDES) keep_columns(s, columns);
            if constexpr (BIAS)
                softmax.weights_of([&](int i) { return fmaf(s[i], x.units.unit_log2, w[i]); }, w,
                                   sum);
            else if (edge && PACK_LATE) /* the other instances have no registers for it */
                softmax.weights_kept(s, x.units.unit_log2, columns, w, sum);
            else
                softmax.weights(s, x.units.unit_log2, w, sum);
        }
        if (!OVERLAP) softmax.pack(w, p);
        if constexpr (DROP) dropout.drop(p);
        const bool again = __any_sync(0xffffffffu, softmax.out_of_range(sum));
        if (OVERLAP) {
            /* This barrier completed its only phase at the start, so the wait never blocks. Its
             * loop ends a basic block: without that, ptxas moves the exponentials below the wait
             * for O. */
            mbarrier_wait(smem_s + S::OVER, 0);
            wgmma_wait_group<0>();
            wgmma_pin(o);
            release(v.empty(step - 1));
        }
        return again;
    }

    /* Recomputes step j with a new m for the rows that left the range, and rescales O. */
    __device__ __forceinline__ void take_again(const FwdTile &t, int j, bool edge) {
        float factor[2];
        if (MODIFIED)
            weigh_again(t, block_at<MODIFIED>(t, j), edge, factor);
        else if constexpr (BIAS)
            weigh_biased_again(t, j, edge, factor);
        else
            softmax.redo(s, x.units.unit_log2, w, sum, factor);
        if (!OVERLAP && !BIAS) softmax.pack(w, p);
        if constexpr (DROP) dropout.drop(p);
#pragma unroll
        for (int i = 0; i < ND * 4; ++i) o[i] *= factor[i / 2 & 1];
    }

    __device__ __forceinline__ void block_taken() {
        if (OVERLAP && !PACK_LATE) softmax.pack(w, p);
        softmax.total[0] += sum[0];
        softmax.total[1] += sum[1];
    }

    /* All key blocks after the first. The inner loop serves blocks without a mask and contains
     * neither masking nor redo code. A masked block or a redo leaves the loop and re-enters it. */
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
                take_again(t, j, false);
                block_taken();
                ++j;
                continue;
            }
            if (j >= at.end) break;
            if constexpr (MASK) /* plain_run ended with its word of marks; look at the next one */
                if (!is_partial(t, j)) continue;
            if (take_block(t, at, j, SPLIT || run == 0)) take_again(t, j, SPLIT || run == 0);
            block_taken();
            ++j;
        }
    }

    /* The last P V of the tile. If next_s is not 0, it is the next tile's Q: the next tile's
     * first S is issued right behind, and store() runs while that S does. */
    template <class Store>
    __device__ __forceinline__ void last_values(const FwdTile &t, const At &at, smem_addr next_s,
                                                const Store &store) {
        const Steps k = k_ring(), v = v_ring();
        const int last = at.step + at.end - 1, next = at.step + t.steps.blocks;
        if (PACK_LATE) softmax.pack(w, p);
        ready = EARLY && next_s;
        /* the code from issue to wait stays inside one branch, or ptxas serialises the WGMMAs
         * (C7515) */
        if (ready) {
            pass(at.step + at.end, t.steps.blocks - at.end);
            v.wait_full(last);
            clear_tail(t, at.step, at.end - 1);
            begin_scores(next);
            turn_begin<Tile>(warpgroup);
            issue_values<T, Tile>(o, p, v_at(last));
            k.wait_full(next);
            issue_scores<T, Tile>(s, next_s, k_at(next), 64 * warpgroup, lift_at(next),
                                  smem_s + S::ONES_AT);
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
        /* with ALiBi the first keys may come last */
        if (MODIFIED) clear_head(t, last, block_at<MODIFIED>(t, at.end - 1));
        turn_begin<Tile>(warpgroup);
        issue_values<T, Tile>(o, p, v_at(last));
        turn_end<Tile>(warpgroup);
        wgmma_wait_group<0>();
        wgmma_pin(o);
        release(v.empty(last));
        if constexpr (DROP) dropout.scale(x, softmax.total, o);
    }

    /* Marks the tile if its result holds a NaN or inf (fwd_mend.cuh): V of a hidden key may hold
     * one, and 0 times NaN is NaN. */
    __device__ __forceinline__ void note_spoilt(const FwdTile &t) {
        if constexpr (S::SCORED) {
            if (BIAS && StaleRange<T>::LIMIT < 0x1p16f) {
#pragma unroll
                for (int r = 0; r < 2; ++r)
                    if (softmax.m[r] > STALE_NOTHING && softmax.m[r] < LOWEST)
                        o[2 * r] = NAN; /* the row's result, because its factor may be 0 */
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

    /* Releases key blocks that only other warpgroups read. The warpgroup still takes its turn
     * for each of them, because turns are counted. */
    __device__ __forceinline__ void pass(int step, int blocks) const {
        const Steps k = k_ring(), v = v_ring();
#pragma unroll 1
        for (int j = step; j < step + blocks; ++j) {
            k.wait_full(j);
            v.wait_full(j);
            /* synchronises the four warps: all of them have seen both stages full */
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

#endif
