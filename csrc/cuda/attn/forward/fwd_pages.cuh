/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_pages.cuh: the producer of paged_prefill_sm90a. It finds where a sequence's keys end and
 * loads K and V by TMA, page by page, into tiles that the consumers of flash_attn_fwd_sm90a read.
 *
 *  a tile of BKV keys       panels of 64 columns, one after the other; a box is 2^box_log2 rows of
 *                           a panel and lies in one page
 *  a warp for K, one for V  each lane looks up the page of one box and copies it
 *  after the last key       a box of a page outside the tensor, which TMA fills with zeros
 *  before the first key     a tile begins at a box boundary; consumers clear the rows of V that no
 *                           row of the sequence sees */
#ifndef GPUKERN_CUDA_FWD_PAGES_CUH
#define GPUKERN_CUDA_FWD_PAGES_CUH

#include "fwd_producer.cuh"
#include "../paged/prefill_call.cuh"

/* A tile of the dense forward whose keys are in pages. */
template <class Tile> struct PagedTile : Tile {};
template <class Tile> struct InBoxes<PagedTile<Tile>> {
    static constexpr bool value = true;
};

/* True if the formulas of fwd_score.cuh hold for the call's scale and softcap. */
inline bool plain_scores(const gk_attn_rules &r) {
    return score_units(r.scale, r.softcap, r.alibi_slopes != NULL).plain;
}

struct PrefillParams {
    /* f.k and f.v are the pages, as pages_shape describes them. problem.seq_k is the number of keys
     * that a row of the block table has room for. */
    FwdHopperParams f;
    PrefillPages pages;
};

/* Reports errors in the lengths, also of sequences without a tile, and in the block-table entries
 * that some tile reads. One warp of each block runs this; block c checks sequences c,
 * c + gridDim.x, and so on. */
__device__ __forceinline__ void check_prefill(const PrefillParams &x) {
#pragma unroll 1
    for (int b = blockIdx.x; b < x.f.fwd.problem.batch; b += gridDim.x) {
        const Sequence s = prefill_sequence(x.f.fwd.problem, x.pages, b);
        const int from = s.span.lo(0), end = s.seq_q > 0 ? s.span.hi(s.seq_q - 1) : 0;
        if (end <= from) continue;
        const Divisor &by_block = x.pages.by_block;
        const int entries = (int)by_block.into((unsigned)(end + by_block.by - 1));
#pragma unroll 4
        for (int e = (int)by_block.into((unsigned)from) + laneid(); e < entries; e += 32)
            if ((unsigned)x.pages.table[b * x.pages.table_row + e * x.pages.table_entry] >=
                (unsigned)x.pages.num_blocks)
                report(x.f.fwd.problem.error_word, GK_BAD_BLOCK_TABLE);
    }
}

/* The page of the box whose first key is `key`. If no row of the tile sees the box, or if the table
 * entry is out of range, it is num_blocks, a page outside the tensor. */
__device__ __forceinline__ int prefill_page(const PrefillPages &x, const FwdTile &t, int key) {
    unsigned page = (unsigned)x.num_blocks;
    if (key < t.keys.hi)
        page = min(page, (unsigned)x.table[t.work.b * x.table_row +
                                           (int)x.by_block.into((unsigned)key) * x.table_entry]);
    return (int)page;
}

/* One warp loads K and Q (OF_K), another warp loads V. With two Q buffers, the next tile's Q
 * follows after an early key block of this tile. Registers are few, so a lane's box is computed
 * from the thread index each time. */
template <class Tile, bool MODIFIED, bool OF_K> struct PageLoader {
    typedef Smem<Tile> S;
    typedef typename S::K Panels;
    static constexpr bool AHEAD = Tile::Q_BUFFERS == 2;
    /* AHEAD: the next tile's Q follows after this key block. If there are only two tile
     * descriptions, the next tile is found only after the consumers have finished the previous one.
     * K of this tile must not wait for that, so Q follows later. */
    static constexpr int Q_BEHIND = S::TILE_STAGES > 2 ? 2 : 6;
    static_assert(Tile::HEAD_DIM == Tile::HEAD_DIM_V, "tiles of K and of V are alike");
    static_assert(Panels::panel_bytes == Tile::BKV * 128,
                  "rows of all panels lie one behind the other");
    static constexpr int AT = OF_K ? S::K_AT : S::V_AT, RING = OF_K ? S::K_RING : S::V_RING;
    const PrefillParams &x;
    const smem_addr smem_s;

    /* The first row of this lane's box; rows continue from one panel of the tile to the next. */
    __device__ __forceinline__ int row() const { return (mov_tid_x() % 32) << x.f.box_log2; }
    __device__ __forceinline__ int key_of(const FwdTile &t, int block) const {
        return t.keys.lo + block * Tile::BKV + row() % Tile::BKV;
    }

    /* Loads this lane's box of key block number `at`. It looks up the page before it waits for the
     * stage. */
    __device__ __forceinline__ void load(const FwdTile &t, int at, int block) const {
        const tma_steps<Tile::STAGES> ring = {smem_s + RING};
        const int page = prefill_page(x.pages, t, key_of(t, block));
        ring.wait_empty(at);
        if (elect_one()) mbarrier_arrive_expect_tx(ring.full(at), Panels::bytes);
        __syncwarp(); /* the expected bytes are set before any copy starts */
        if (row() < Panels::panels * Tile::BKV) {
            const unsigned key = (unsigned)key_of(t, block);
            const int in_page = (int)(key - x.pages.by_block.into(key) * x.pages.by_block.by);
            tma_load_5d(smem_s + AT + ring.stage(at) * Panels::bytes + row() * 128,
                        OF_K ? &x.f.k : &x.f.v,
                        {{0, in_page, row() / Tile::BKV, t.from.head_kv, page}}, ring.full(at));
        }
        __syncwarp();
    }

    __device__ __forceinline__ void load_its_q(const FwdTile *tiles, int n) const {
        if (elect_one()) load_q<Tile>(x.f, tiles[n % S::TILE_STAGES], smem_s, n);
        __syncwarp();
    }

    __device__ __forceinline__ void all(const FwdTile *tiles) const {
        const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
        int n = 0, step = 0; /* step: key blocks of earlier tiles */
        described.wait_full(0);
        if (OF_K && AHEAD) load_its_q(tiles, 0);
#pragma unroll 1
        for (; tiles[n % S::TILE_STAGES].steps.blocks >= 0; ++n) {
            const FwdTile &t = tiles[n % S::TILE_STAGES];
#pragma unroll 1
            for (int j = 0; j <= t.steps.blocks; ++j) {
                if (j < t.steps.blocks) load(t, step + j, block_at<MODIFIED>(t, j));
                if (OF_K && !AHEAD && j == 0) load_its_q(tiles, n);
                if (OF_K && AHEAD && j == min(Q_BEHIND, t.steps.blocks)) {
                    unsigned then = n + 1;
                    /* keeps the compiler from carrying the next tile's addresses through the
                     * loop */
                    opaque(then);
                    described.wait_full((int)then);
                    load_its_q(tiles, (int)then);
                }
            }
            step += t.steps.blocks;
            __syncwarp(); /* all lanes have read t */
            if (elect_one()) mbarrier_arrive(described.empty(n));
            if (!OF_K || !AHEAD) described.wait_full(n + 1);
        }
        if (OF_K && !AHEAD) load_its_q(tiles, n); /* signals the end to the consumers */
    }
};

#endif
