/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_weights.cuh: the Weights policy of fwd_consumer.cuh for calls whose scores need nothing but
 * the scale. It computes the weights P = 2^(S - m) of a key block from its scores S. fwd_bias.cuh
 * and fwd_modified.cuh serve the other calls. `c` is the consumer, whose registers a policy uses. A
 * policy leaves the weights in c.w and each row's sum of them in c.sum. Its members:
 *
 *   HIDES_SCORES   the consumer replaces hidden scores by -inf before `next`
 *   finish_scores  the first block of a tile: adds a bias or a modifier to the scores
 *   unit           the factor from finished scores to log2 units
 *   begin          a later block: does the work that does not need S, while S is multiplied
 *   next           weights of a later block, with m as it is
 *   again          the same with a new m for the rows that left float's range; factor: by which
 *                  O of these rows must be multiplied */
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
