/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_keys.cuh: the Keys policy of fwd_consumer.cuh. It says which keys the rows of a consumer
 * warpgroup see, and which key blocks need no mask. The keys of a row are an interval (SpanKeys) or
 * given by a stored mask (ListedKeys). */
#ifndef GPUKERN_CUDA_FWD_KEYS_CUH
#define GPUKERN_CUDA_FWD_KEYS_CUH

#include "../../tile/release_reads.cuh"
#include "fwd_masked.cuh"
#include "fwd_results.cuh" /* own_row */

/* The keys of a row are those of its span: causal, windows, padding. */
template <class Tile, bool MODIFIED> struct SpanKeys {
    static constexpr bool MARKED = false;

    /* True if some row does not see all keys of step j. */
    static __device__ __forceinline__ bool is_partial(const FwdTile &t, int j) {
        const int block = block_at<MODIFIED>(t, j);
        return block < t.keys.plain_first || block >= t.keys.plain_end;
    }
    /* The number of consecutive steps from j on, below end, whose keys every row sees. */
    static __device__ __forceinline__ int plain_run(const FwdTile &t, int j, int end) {
        const int block = block_at<MODIFIED>(t, j), first = t.keys.plain_first,
                  plain_end = t.keys.plain_end;
        if (block < first || block >= plain_end) return 0;
        const bool down = MODIFIED && j <= t.nearest;
        /* if the keys are split, plain_first may be negative */
        return min(down ? block - max(first, 0) + 1 : plain_end - block, end - j);
    }
    /* The keys of a block that a lane's two rows see. */
    static __device__ __forceinline__ KeptColumns columns(const FwdHopperParams &x,
                                                          const FwdTile &t, smem_addr, int block) {
        KeptColumns y;
        const int key0 = t.keys.lo + block * Tile::BKV + frag_col(mov_tid_x() % 32, 0),
                  last = t.seq.seq_q - 1;
        const Span span = t.seq.span;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            /* rows past the end of the sequence use the mask of its last row */
            const int i = min(row_of(x, t, own_row() + 8 * r).i, last);
            y.kept[r] = columns_in<Tile::BKV / 4>(span.lo(i) - key0, span.hi(i) - key0);
        }
        if (Smem<Tile>::SCORED) { /* no vote of the warp, for the reason in ListedKeys */
            y.some = ~0u;
            y.whole = 0;
        } else if (!MODIFIED) {
            y.agree();
        }
        return y;
    }
};

/* A stored mask. A tile takes the blocks of its list, and FwdMarks has a bit for each partial one.
 * The producer loads the mask words of partial blocks. */
template <class Tile> struct ListedKeys {
    typedef Smem<Tile> S;
    static constexpr bool MARKED = true;

    int words_taken = 0; /* the number of stages of the ring of words that have been read */

    static __device__ __forceinline__ bool is_partial(const FwdTile &t, int j) {
        return S::marks_of(t).is_partial(j / S::STEPS);
    }
    /* At most the steps of the 32 entries in one word of marks. */
    static __device__ __forceinline__ int plain_run(const FwdTile &t, int j, int end) {
        const int entry = j / S::STEPS;
        const uint32_t partial = S::marks_of(t).partial[entry / 32] >> entry % 32;
        const int whole = partial ? __ffs(partial) - 1 : 32 - entry % 32;
        /* this is -1 in the second step of a partial block */
        return min(whole * S::STEPS - j % S::STEPS, end - j);
    }
    __device__ __forceinline__ KeptColumns columns(const FwdHopperParams &, const FwdTile &t,
                                                   smem_addr smem_s, int block) {
        KeptColumns y;
        const tma_steps<S::WORDS_STAGES> ring = {smem_s + S::WORDS_RING};
        ring.wait_full(words_taken);
        const uint2 two = ld_shared_64(smem_s + S::WORDS_AT +
                                       ring.stage(words_taken) * S::WORDS_BYTES + mov_tid_x() * 8);
        const int half = block % S::STEPS;
        /* The warp does not compute which columns all or none of its rows see. The two
         * reductions and their branches cost more than they save (measured: 1.86 us a block,
         * 1.55 us without). */
        y.kept[0] = two.x >> 16 * half;
        y.kept[1] = two.y >> 16 * half;
        y.some = ~0u;
        y.whole = 0;
        /* the block's second step reads the same words */
        if (half < S::STEPS - 1 && block < t.steps.blocks - 1) return y;
        release_reads(ring.empty(words_taken));
        ++words_taken;
        return y;
    }
};

/* The Keys policy of a tile's kernel. */
template <class Tile, bool MODIFIED, bool LISTED = Smem<Tile>::MASK> struct KeysOf {
    typedef SpanKeys<Tile, MODIFIED> type;
};
template <class Tile> struct KeysOf<Tile, false, true> {
    typedef ListedKeys<Tile> type;
};

#endif
