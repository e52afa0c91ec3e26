/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_weights.cuh: from the scores S of a key block to its weights P = 2^(S - m), in a call whose
 * scores need nothing but the scale. fwd_bias.cuh and fwd_modified.cuh serve other calls in its
 * place. `c` is the consumer, whose registers they use. They leave weights in c.w and each row's
 * sum of them in c.sum.
 *
 *   HIDES_SCORES   the consumer replaces hidden scores by -inf before `next`
 *   finish_scores  the first block of a tile: adds what belongs to the scores
 *   unit           what the scores are then multiplied by
 *   begin          a later block: computes what does not need S, while S is still running
 *   next           weights of a later block, with m as it is
 *   again          the same with a new m for the rows that left the number range. factor: what O of
 *                  these rows is to be multiplied by */
#ifndef GPUKERN_CUDA_FWD_WEIGHTS_CUH
#define GPUKERN_CUDA_FWD_WEIGHTS_CUH

#include "fwd_results.cuh" /* own_row */

/* Scores without softcap, ALiBi or a bias that is added to exponents. */
struct PlainWeights {
    static constexpr bool HIDES_SCORES = true;

    template <class C>
    static __device__ __forceinline__ void finish_scores(C &, bool, const KeptColumns &) {}
    template <class C> static __device__ __forceinline__ float unit(const C &c) {
        return c.x.units.unit_log2;
    }
    template <class C>
    static __device__ __forceinline__ void begin(C &, const FwdTile &, int, bool,
                                                 const KeptColumns &) {}
    template <class C>
    static __device__ __forceinline__ void next(C &c, const FwdTile &, int, bool edge,
                                                const KeptColumns &columns) {
        if (edge && C::PACK_LATE) /* the other instances have no registers for it */
            c.softmax.weights_kept(c.s, c.x.units.unit_log2, columns, c.w, c.sum);
        else
            c.softmax.weights(c.s, c.x.units.unit_log2, c.w, c.sum);
    }
    template <class C>
    static __device__ __forceinline__ void again(C &c, const FwdTile &, int, bool,
                                                 float (&factor)[2]) {
        c.softmax.redo(c.s, c.x.units.unit_log2, c.w, c.sum, factor);
        if (!C::OVERLAP) c.softmax.pack(c.w, c.p);
    }
};

#endif
