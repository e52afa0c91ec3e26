/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_modified.cuh: the Weights policy of fwd_consumer.cuh for calls with softcap or ALiBi, in
 * place of PlainWeights (fwd_weights.cuh). The arithmetic is in fwd_score.cuh.
 *
 * The exponent of a weight is one multiply-add of the product, so that the next products hide its
 * latency. In three cases the complete score is computed first: a tile's first key block, a block
 * with a mask, and a block that is redone. */
#ifndef GPUKERN_CUDA_FWD_MODIFIED_CUH
#define GPUKERN_CUDA_FWD_MODIFIED_CUH

#include "fwd_weights.cuh"

struct ModifiedWeights {
    static constexpr bool HIDES_SCORES = false; /* visit() hides keys */

    /* The ALiBi terms of a lane's two rows in one key block. The slopes are 0 without ALiBi. */
    struct AlibiRows {
        float slope[2], ahead[2];
        int side; /* 1: all keys come before all rows; -1: all come after; 0: mixed */
    };
    template <class C>
    static __device__ __forceinline__ AlibiRows alibi_of(const C &c, const FwdTile &t, int block) {
        AlibiRows y = {};
        if (!c.x.units.has_alibi) return y;
        /* the position of the block's first key, relative to that of row 0 */
        const int key = t.keys.lo + block * C::BKV - t.score.position0;
        const int key0 = key + frag_col(mov_tid_x() % 32, 0);
        if (c.x.tile_heads == 1) {
            y.slope[0] = y.slope[1] = t.score.slope * LOG2_E;
            y.ahead[0] = (float)(t.work.i0 + own_row() - key0);
            y.ahead[1] = y.ahead[0] + 8;
            y.side = key + C::BKV - 1 <= t.work.i0 ? 1 : key >= t.work.i0 + C::S::BQ - 1 ? -1 : 0;
        } else { /* each head of the tile has its own slope */
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const FwdRow row = row_of(c.x, t, own_row() + 8 * r);
                y.slope[r] = slope_of<float>(c.x.fwd.problem.rules, t.work.b, row.head) * LOG2_E;
                y.ahead[r] = (float)(row.i - key0);
            }
        }
        return y;
    }

    /* Calls take(i, e0, e1) with the exponents of scores i and i + 1: each score in log2 units,
     * minus m. */
    template <class C, class Take>
    static __device__ __forceinline__ void visit(C &c, const FwdTile &t, int block, bool edge,
                                                 const float (&m)[2], const Take &take) {
        constexpr int N = C::N;
        const ScoreUnits &u = c.x.units;
        const AlibiRows alibi = alibi_of(c, t, block);
        KeptColumns columns = {};
        if (edge) columns = c.columns_of(t, block);
        const auto kept = [&](int i, float e) { return !edge || columns.has(i) ? e : -INFINITY; };
        if (u.capped) {
#pragma unroll
            /* one row after the other, which needs fewer registers */
            for (int at = 0; at < N * 2; ++at) {
                const int i = at / N * 2 + at % N * 4;
                float e[2];
                cap_exponents(c.s, i, u, alibi.slope[0], alibi.ahead[0], m, e);
                take(i, kept(i, e[0]), kept(i + 1, e[1]));
            }
        } else if (!edge && alibi.side != 0) {
            /* the same arithmetic as alibi_addends, so the same bits */
            const OneSidedAlibi of = one_sided_alibi(alibi.slope, alibi.ahead, alibi.side, m);
#pragma unroll
            for (int i = 0; i < N * 4; i += 2)
                take(i, fmaf(c.s[i], u.unit_log2, of.addend(i)),
                     fmaf(c.s[i + 1], u.unit_log2, of.addend(i + 1)));
        } else {
            const auto e = [&](int i) {
                return fmaf(c.s[i], u.unit_log2, alibi_addend(i, alibi.slope, alibi.ahead, m));
            };
#pragma unroll
            for (int i = 0; i < N * 4; i += 2) take(i, kept(i, e(i)), kept(i + 1, e(i + 1)));
        }
    }
    /* Computes and packs the weights of any key block. While P and O are operands of running
     * products, there are not enough registers for float32 weights and the temporaries. */
    template <class C>
    static __device__ __forceinline__ void weigh_any(C &c, const FwdTile &t, int block, bool edge) {
        constexpr int N = C::N;
        uint32_t packed[N * 2];
        c.sum[0] = c.sum[1] = 0;
        visit(c, t, block, edge, c.softmax.m, [&](int i, float e0, float e1) {
            const float w0 = ex2_approx_ftz(e0), w1 = ex2_approx_ftz(e1);
            c.sum[i / 2 & 1] += w0;
            c.sum[i / 2 & 1] += w1;
            packed[i / 2] = pack2<typename C::Element>(w0, w1);
        });
#pragma unroll
        for (int i = 0; i < N * 2; ++i) {
            const float2 two = unpack2<typename C::Element>(packed[i]);
            c.w[2 * i] = two.x;
            c.w[2 * i + 1] = two.y;
        }
    }

    /* True if every score of the warp is small enough for the softcap polynomial (cap_factor).
     * With OVERLAP the squares of the scores stay in w. */
    template <class C> static __device__ __forceinline__ bool all_near(C &c) {
        constexpr int N = C::N;
        if (C::OVERLAP) {
            uint32_t bits = 0;
#pragma unroll
            for (int i = 0; i < N * 4; i += 2) {
                c.w[i] = cap_square(c.s[i], c.x.units);
                c.w[i + 1] = cap_square(c.s[i + 1], c.x.units);
                bits |= __float_as_uint(c.w[i]) | __float_as_uint(c.w[i + 1]);
            }
            return __all_sync(0xffffffffu, bits < __float_as_uint(c.x.units.end));
        }
        /* two maxima, because consecutive instructions on one wait for each other */
        float top[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < N * 4; ++i) top[i & 1] = max_nan(top[i & 1], fabsf(c.s[i]));
        return __all_sync(0xffffffffu, max_nan(top[0], top[1]) < c.x.units.limit);
    }

    /* Replaces the scores by complete scores in log2 units, before m is subtracted. Without OVERLAP
     * the registers hold s or w, not both. */
    template <class C>
    static __device__ __forceinline__ void finish_scores(C &c, const FwdTile &t, int block,
                                                         bool edge) {
        if (!edge && c.x.units.capped && !c.x.units.has_alibi && all_near(c)) {
#pragma unroll
            for (int i = 0; i < C::N * 4; ++i)
                c.s[i] *= cap_factor(cap_square(c.s[i], c.x.units), c.x.units);
            return;
        }
        const float none[2] = {0, 0};
        visit(c, t, block, edge, none, [&](int i, float e0, float e1) {
            c.s[i] = e0;
            c.s[i + 1] = e1;
        });
    }

    /* All weights of a tile's first block, and its m. Used in place of finish_scores. */
    template <class C>
    static __device__ __forceinline__ void first(C &c, const FwdTile &t, int block, bool edge) {
        if (C::OVERLAP) {
            const float none[2] = {0, 0};
            visit(c, t, block, edge, none, [&](int i, float e0, float e1) {
                c.w[i] = e0;
                c.w[i + 1] = e1;
            });
            c.softmax.template refer<false>(c.w, 1);
            c.softmax.weights(c.w, 1, c.w, c.sum);
        } else {
            finish_scores(c, t, block, edge);
            c.softmax.template refer<false>(c.s, 1);
            c.softmax.weights(c.s, 1, c.w, c.sum);
        }
    }
    /* Fills w with the ALiBi addends while the product runs. */
    template <class C>
    static __device__ __forceinline__ void begin(C &c, const FwdTile &t, int block, bool edge,
                                                 const KeptColumns &) {
        if (!C::OVERLAP || edge || c.x.units.capped) return;
        const AlibiRows alibi = alibi_of(c, t, block);
        alibi_addends(c.w, alibi.slope, alibi.ahead, alibi.side, c.softmax.m);
    }
    template <class C>
    static __device__ __forceinline__ void next(C &c, const FwdTile &t, int block, bool edge,
                                                const KeptColumns &) {
        const ScoreUnits &u = c.x.units;
        if (!C::OVERLAP) {
            finish_scores(c, t, block, edge);
            c.softmax.weights(c.s, 1, c.w, c.sum);
        } else if (!edge && !u.capped) {
            c.softmax.weights_of([&](int i) { return fmaf(c.s[i], u.unit_log2, c.w[i]); }, c.w,
                                 c.sum);
        } else if (!edge && !u.has_alibi && all_near(c)) {
            c.softmax.weights_of(
                [&](int i) { return fmaf(c.s[i], cap_factor(c.w[i], u), -c.softmax.m[i / 2 & 1]); },
                c.w, c.sum);
        } else {
            weigh_any(c, t, block, edge);
        }
    }
    template <class C>
    static __device__ __forceinline__ void again(C &c, const FwdTile &t, int j, bool edge,
                                                 float (&factor)[2]) {
        if (!C::OVERLAP) {
            c.softmax.redo(c.s, 1, c.w, c.sum, factor);
            c.softmax.pack(c.w, c.p);
            return;
        }
        const int block = block_at<true>(t, j);
        const float none[2] = {0, 0};
        float top[2] = {-INFINITY, -INFINITY};
        visit(c, t, block, edge, none, [&](int i, float e0, float e1) {
            top[i / 2 & 1] = fmaxf(top[i / 2 & 1], fmaxf(e0, e1));
        });
        top[0] = quad_max(top[0]);
        top[1] = quad_max(top[1]);
        c.softmax.refer_again(top, c.sum, factor);
        weigh_any(c, t, block, edge);
    }
};

#endif
