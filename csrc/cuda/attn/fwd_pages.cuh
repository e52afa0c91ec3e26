/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_pages.cuh: the producer of paged_prefill_sm90a: where a sequence's keys end, and the loads of K and V by TMA, page by page,
 * into tiles as flash_attn_fwd_sm90a's consumers read them.
 *
 *   a tile of BKV keys       panels of 64 columns, one behind the other; 2^box_log2 rows of a panel are a box, which lies in one page
 *   a warp for K, one for V  a lane for each box, whose page it looks up and which it copies
 *   behind the last key      a box without a page: outside the tensor, which TMA fills with zeros */
#ifndef GPUKERN_CUDA_FWD_PAGES_CUH
#define GPUKERN_CUDA_FWD_PAGES_CUH

#include "fwd_producer.cuh"

struct PrefillParams {
    FwdHopperParams f; /* k, v: pages as pages_shape has them. Of the problem seq_k is what a row of the table holds */
    const int32_t *table, *lens;
    int64_t lens_step;
    int table_row, table_entry; /* 32 bits hold the place of every entry */
    int num_blocks;
    Divisor by_block; /* block_size */
    int box_log2;     /* rows of a box */
};

/* Sequence b. What is wrong in lengths is reported and clamped. */
__device__ __forceinline__ Sequence prefill_sequence(const PrefillParams &x, int b) {
    const Problem &p = x.f.fwd.problem;
    Sequence s;
    bool good = true;
    int tokens = p.seq_q;
    s.q0 = s.k0 = 0, s.seq_q = p.seq_q;
    if (p.cu_q) {
        const int q0 = p.cu_q[b * p.cu_q_step], q1 = p.cu_q[(b + 1) * p.cu_q_step];
        s.q0 = min(max(q0, 0), p.total_q), tokens = min(max(q1, s.q0), p.total_q) - s.q0;
        s.seq_q = min(tokens, p.seq_q);
        good = s.q0 == q0 && s.q0 + s.seq_q == q1 && (b > 0 || q0 == 0);
    }
    const int length = x.lens[b * x.lens_step];
    s.seq_k = min(max(length, 0), p.seq_k);
    if (!good || s.seq_k != length || (length > 0 && length < tokens)) report(p.error_word, GK_BAD_SEQ_LENS);
    if (p.rules.right < 0 && s.seq_k < tokens) s.seq_k = 0; /* a query before the first key sees none, causal or not */
    s.diagonal = s.seq_k - tokens;
    s.span = span_make(s.seq_k, s.diagonal, p.rules.left, p.rules.right);
    return s;
}

/* Reports what is wrong in lengths, also of sequences that have no tile, and in the entries of the table that some tile reads. One warp of
 * each block; a block has the sequences blockIdx.x, blockIdx.x + gridDim.x, .. */
__device__ __forceinline__ void check_prefill(const PrefillParams &x) {
#pragma unroll 1
    for (int b = blockIdx.x; b < x.f.fwd.problem.batch; b += gridDim.x) {
        const Sequence s = prefill_sequence(x, b);
        const int keys = s.seq_q > 0 ? s.span.hi(s.seq_q - 1) : 0;
        const int entries = (int)x.by_block.into((unsigned)(keys + x.by_block.by - 1));
#pragma unroll 4
        for (int e = laneid(); e < entries; e += 32)
            if ((unsigned)x.table[b * x.table_row + e * x.table_entry] >= (unsigned)x.num_blocks)
                report(x.f.fwd.problem.error_word, GK_BAD_BLOCK_TABLE);
    }
}

/* The page of the box whose first key is `key`; num_blocks, which TMA knows as outside the cache, where no row of the tile sees any of its
 * keys, or where the table names none. */
__device__ __forceinline__ int prefill_page(const PrefillParams &x, const FwdTile &t, int key) {
    unsigned page = (unsigned)x.num_blocks;
    if (key < t.keys.hi)
        page =
            min(page, (unsigned)x.table[t.work.b * x.table_row + (int)x.by_block.into((unsigned)key) * x.table_entry]);
    return (int)page;
}

/* One warp loads K, and the Q of the next tile behind its third block of K; another one loads V. Registers are few: what a lane's box is
 * follows from the thread's number each time. */
template <class Tile, bool OF_K> struct PageLoader {
    typedef Smem<Tile> S;
    typedef typename S::K Panels;
    static_assert(Tile::Q_BUFFERS == 2, "the next Q has a place of its own");
    static_assert(Tile::HEAD_DIM == Tile::HEAD_DIM_V, "tiles of K and of V are alike");
    static_assert(Panels::panel_bytes == Tile::BKV * 128, "rows of all panels lie one behind the other");
    static constexpr int AT = OF_K ? S::K_AT : S::V_AT, RING = OF_K ? S::K_RING : S::V_RING;
    const PrefillParams &x;
    const smem_addr smem_s;

    /* The first row of this lane's box, counted on through the panels of a tile. */
    __device__ __forceinline__ int row() const { return (mov_tid_x() % 32) << x.box_log2; }
    __device__ __forceinline__ int key_of(const FwdTile &t, int block) const {
        return t.keys.lo + block * Tile::BKV + row() % Tile::BKV;
    }

    /* The page is looked up while the stage is still read. */
    __device__ __forceinline__ void load(const FwdTile &t, int at, int block) const {
        const tma_steps<Tile::STAGES> ring = {smem_s + RING};
        const int page = prefill_page(x, t, key_of(t, block));
        ring.wait_empty(at);
        if (elect_one()) mbarrier_arrive_expect_tx(ring.full(at), Panels::bytes);
        __syncwarp(); /* the bytes are announced */
        if (row() < Panels::panels * Tile::BKV) {
            const unsigned key = (unsigned)key_of(t, block);
            const int in_page = (int)(key - x.by_block.into(key) * x.by_block.by);
            tma_load_5d(smem_s + AT + ring.stage(at) * Panels::bytes + row() * 128, OF_K ? &x.f.k : &x.f.v,
                        {{0, in_page, row() / Tile::BKV, t.from.head_kv, page}}, ring.full(at));
        }
        __syncwarp();
    }

    __device__ __forceinline__ void all(const FwdTile *tiles) const {
        const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
        int n = 0, step = 0; /* step: blocks of keys of earlier tiles */
        described.wait_full(0);
        if (OF_K && elect_one()) load_q<Tile>(x.f, tiles[0], smem_s, 0);
#pragma unroll 1
        for (; tiles[n % S::TILE_STAGES].steps.blocks >= 0; ++n) {
            const FwdTile &t = tiles[n % S::TILE_STAGES];
#pragma unroll 1
            for (int j = 0; j <= t.steps.blocks; ++j) {
                if (j < t.steps.blocks) load(t, step + j, j);
                if (OF_K && j == min(2, t.steps.blocks)) {
                    unsigned then = n + 1;
                    opaque(then); /* or where the next tile and its Q lie would be carried through the loop */
                    described.wait_full((int)then);
                    if (elect_one()) load_q<Tile>(x.f, tiles[then % S::TILE_STAGES], smem_s, (int)then);
                    __syncwarp();
                }
            }
            step += t.steps.blocks;
            __syncwarp(); /* all lanes have read t */
            if (elect_one()) mbarrier_arrive(described.empty(n));
            if (!OF_K) described.wait_full(n + 1);
        }
    }
};

#endif
