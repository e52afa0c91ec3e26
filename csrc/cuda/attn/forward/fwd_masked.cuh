/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_masked.cuh: the additional work of the producer warpgroup in flash_attn_fwd_masked_sm90a and
 * flash_attn_fwd_masked_wide_sm90a. It finds tiles by a stored mask (../../../core/attn_mask.h),
 * loads the mask words of partial blocks into shared memory, and loads a bias.
 *
 * Warp 0 of the producer loads Q, K and V, warp 1 finds tiles, warp 2 loads mask words, and warp 3
 * loads the bias. Mask words have a ring of their own. They cannot be in the stages of K, because
 * one thread of a warpgroup releases K before the other warps have read their words. The barriers
 * of the words and of a bias [.., Sq, Sk]:
 *
 *   words.full[s]    1 arrival, by the bytes of a bulk copy or after warp 2's own stores
 *   words.empty[s]   8 arrivals, one for each warp of the consumers
 *   bias[w].full     1 arrival and the bytes of TMA
 *   bias[w].empty    4 arrivals, one for each warp of warpgroup w */
#ifndef GPUKERN_CUDA_FWD_MASKED_CUH
#define GPUKERN_CUDA_FWD_MASKED_CUH

#include "../../tile/release_reads.cuh"
#include "../mask_words.cuh"
#include "fwd_producer.cuh"

/* The list of a tile's blocks of keys. An entry is 4 block + kind. */
__device__ __forceinline__ const uint16_t *list_of(const FwdMaskParams &m, const FwdMarks &y) {
    return (const uint16_t *)(y.data + m.at.lists) + (int64_t)y.tile * m.tiles_k;
}

/* The first key of step j of a masked tile, divided by BKV. */
template <class Tile>
__device__ __forceinline__ int listed_keys(const FwdMaskParams &m, const FwdTile &t, int j) {
    typedef Smem<Tile> S;
    const int block = __ldg(list_of(m, S::marks_of(t)) + j / S::STEPS) >> 2;
    return block * S::STEPS + j % S::STEPS;
}

/* The block of keys of each step of a masked tile, for load_tiles. The list is read one entry at a
 * time, because the producer has only 24 registers. 64 entries lie in one line of L1. */
template <class Tile> struct ListedBlocks {
    const FwdMaskParams &mask;
    __device__ __forceinline__ explicit ListedBlocks(const FwdMaskParams &m) : mask(m) {}
    __device__ __forceinline__ int key(const FwdTile &t, int j) const {
        return listed_keys<Tile>(mask, t, j);
    }
    __device__ __forceinline__ int value(const FwdTile &t, int j) const { return key(t, j); }
};

/* Finds tile number `unit` in the order that FwdMaskParams describes. flat: its head, counted over
 * the whole batch. rank: its index among the head's tiles, sorted by the length of their lists. */
__device__ __forceinline__ void place_of(const FwdMaskParams &m, int unit, int *flat, int *rank) {
    if (unit < m.first * m.tiles_q) {
        *rank = (int)m.by_first.into((unsigned)unit);
        *flat = unit - *rank * m.first;
    } else {
        const int u = unit - m.first * m.tiles_q;
        const int group = (int)m.by_units.into((unsigned)u);
        const int r = u - group * (int)m.by_units.by;
        *rank = (int)m.by_width.into((unsigned)r);
        *flat = m.first + group * (int)m.by_width.by + r - *rank * (int)m.by_width.by;
    }
}

/* The number of steps that the blocks of a tile's list take. tile: the tile's entry in `tiles`. */
template <class Tile>
__device__ __forceinline__ int listed_steps(const FwdMaskedParams &x, const int32_t *data,
                                            const int4 &tile) {
    const FwdMaskParams &m = x.mask;
    if (Smem<Tile>::STEPS == 1 || tile.x == 0) return tile.x;
    const uint16_t *list = (const uint16_t *)(data + m.at.lists) + (int64_t)tile.z * m.tiles_k;
    /* the last half of the last block may have no key of the sequence */
    const bool ends = __ldg(list + tile.x - 1) >> 2 == m.incomplete_block &&
                      x.seq.seq_k - m.incomplete_block * GK_MASK_TILE <= Tile::BKV;
    return tile.x * Smem<Tile>::STEPS - ends;
}

/* Writes one tile description after another. One warp. It takes a tile from the global counter only
 * when a stage is free, so that a busy block leaves the tile to an idle one. */
template <class Tile>
__device__ __forceinline__ void find_masked(const FwdMaskedParams &x, unsigned char *smem,
                                            smem_addr smem_s) {
    typedef Smem<Tile> S;
    const FwdMaskParams &m = x.mask;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const smem_addr count_s = smem_s + S::COUNTS;
    st_shared_32(count_s, 0);
#pragma unroll 1
    for (;;) {
        int n = (int)ld_shared_32(count_s);
        described.wait_empty(n);
        FwdTile &t = ((FwdTile *)(smem + S::TILES))[n % S::TILE_STAGES];
        int unit = laneid() == 0 ? atomicAdd(m.next, 1) : 0;
        unit = __shfl_sync(0xffffffffu, unit, 0);
        if (unit >= m.units) {
            if (laneid() == 0) {
                t.steps.blocks = -1;
                mbarrier_arrive(described.full(n));
            }
            break;
        }
        FwdMarks &marks = S::marks_of(t);
        int flat, rank;
        place_of(m, unit, &flat, &rank);
        const int b = (int)x.by_batch.into((unsigned)flat);
        const int head = flat - b * (int)x.by_batch.by;
        const int32_t *data = m.data + b * m.batch + head * m.head;
        const int4 d = __ldg((const int4 *)(data + m.at.tiles) + rank);
        const int blocks = listed_steps<Tile>(x, data, d);
        if (laneid() == 0) {
            const int i0 = d.z * S::BQ;
            marks.data = data;
            marks.tile = d.z;
            t.work = {b, head, i0, 0};
            t.seq = x.seq;
            t.keys.lo = 0;
            t.keys.hi = x.seq.seq_k;
            t.keys.tiles = blocks;
            t.keys.plain_first = 0;
            t.keys.plain_end = 0;
            t.rows = min(x.seq.seq_q - i0, S::BQ);
            t.nearest = 0;
            t.incomplete = 0;
            t.from = {i0, 0, (int)x.by_group.into((unsigned)head), b};
            /* Both warpgroups take part in every block, even one without rows, because both must
             * release the same stages of words. */
            t.steps.own[0] = blocks;
            t.steps.own[1] = blocks;
            t.steps.own[2] = 0;
            t.steps.blocks = blocks;
        }
        const uint16_t *list = (const uint16_t *)(data + m.at.lists) + (int64_t)d.z * m.tiles_k;
#pragma unroll 1
        for (int j = 0; j < d.x; j += 32) { /* a word has one bit for each of 32 entries */
            const int entry = j + laneid() < d.x ? __ldg(list + j + laneid()) : 0;
            const bool cut = entry && entry >> 2 == m.incomplete_block;
            const uint32_t partial = __ballot_sync(0xffffffffu, (entry & 3) > GK_BLOCK_FULL || cut);
            if (laneid() == 0) marks.partial[j / 32] = partial;
        }
        __syncwarp();
        n = (int)ld_shared_32(count_s);
        if (laneid() == 0) mbarrier_arrive(described.full(n));
        __syncwarp(); /* all lanes have read the count */
        st_shared_32(count_s, n + 1);
    }
}

/* ---- mask words ---- */
/* Computes the words of a block and stores them at to_s. Two kinds of block need this: a partial
 * block whose words are not stored, and a full block (`full`) within which the keys end. One
 * warp. */
__device__ __forceinline__ void make_words(const FwdMaskParams &m, const Sequence &seq,
                                           const FwdMarks &y, int block, bool full,
                                           smem_addr to_s) {
    const int j0 = block * GK_MASK_TILE, i0 = y.tile * GK_MASK_TILE;
    const int4 *source = (const int4 *)(y.data + m.at.source);
    if (full || m.store == GK_MASK_RANGES) {
        words_of_rows(to_s, [&](int r) {
            const int first = j0 + laneid() % 4 * 2;
            if (full) return columns_in<32>(0, seq.seq_k - first);
            const int4 a = __ldg(source + min(i0 + r, seq.seq_q - 1));
            return columns_in<32>(a.x - first, a.y - first) |
                   columns_in<32>(a.z - first, a.w - first);
        });
    } else {
        words_of_columns(to_s, [&](int c, int r) {
            if (j0 + c >= seq.seq_k) return 0u;
            const int4 a = __ldg(source + j0 + c);
            return ~(rows_in(a.x, a.y, i0 + r) | rows_in(a.z, a.w, i0 + r));
        });
    }
    fence_proxy_async(); /* orders these stores before a later bulk copy into the stage */
    __syncwarp();
}

/* Loads the words of each tile's partial blocks into the ring, by a bulk copy if they are stored.
 * Otherwise make_words computes them. One warp. */
template <class Tile>
__device__ __forceinline__ void load_words(const FwdMaskedParams &x, const FwdTile *tiles,
                                           smem_addr smem_s) {
    typedef Smem<Tile> S;
    const FwdMaskParams &m = x.mask;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const tma_steps<S::WORDS_STAGES> ring = {smem_s + S::WORDS_RING};
    const smem_addr count_s = smem_s + S::COUNTS + 4;
    st_shared_32(count_s, 0);
    int taken = 0;
#pragma unroll 1
    for (;;) {
        int n = (int)ld_shared_32(count_s);
        described.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const FwdMarks &y = S::marks_of(t);
        if (t.steps.blocks < 0) break;
        int kept = 0;
#pragma unroll 1
        for (int j = 0; j < (t.steps.blocks + S::STEPS - 1) / S::STEPS; ++j) {
            if (!y.is_partial(j)) continue;
            const int entry = __ldg(list_of(m, y) + j);
            const smem_addr to_s = smem_s + S::WORDS_AT + ring.stage(taken) * S::WORDS_BYTES;
            ring.wait_empty(taken);
            if ((entry & 3) == GK_BLOCK_WORDS) {
                const int64_t place = m.store == GK_MASK_DENSE
                                          ? (int64_t)y.tile * m.tiles_k + (entry >> 2)
                                          : (int64_t)y.tile * GK_MASK_KEPT + kept;
                ++kept;
                if (laneid() == 0) {
                    mbarrier_arrive_expect_tx(ring.full(taken), S::WORDS_BYTES);
                    bulk_load(to_s, y.data + m.at.words + place * GK_MASK_BLOCK_INTS,
                              S::WORDS_BYTES, ring.full(taken));
                }
            } else {
                make_words(m, x.seq, y, entry >> 2, (entry & 3) == GK_BLOCK_FULL, to_s);
                if (laneid() == 0) mbarrier_arrive(ring.full(taken));
            }
            ++taken;
            __syncwarp();
        }
        __syncwarp(); /* all lanes have read t */
        n = (int)ld_shared_32(count_s);
        if (laneid() == 0) mbarrier_arrive(described.empty(n));
        __syncwarp(); /* all lanes have read the count */
        st_shared_32(count_s, n + 1);
    }
}

/* ---- bias ---- */
/* Loads a bias [.., Sq, Sk] by TMA: for each warpgroup 64 rows x the keys of a step. One thread. */
template <class Tile>
__device__ __forceinline__ void load_bias(const FwdMaskedParams &x, const FwdTile *tiles,
                                          smem_addr smem_s) {
    typedef Smem<Tile> S;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    int taken[2] = {0, 0};
#pragma unroll 1
    for (int n = 0;; ++n) {
        described.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int4 steps = *(const int4 *)&t.steps;
        if (steps.w < 0) break;
        const int b = t.from.b * x.bias.of_batch, head = t.work.head * x.bias.of_head;
#pragma unroll 1
        for (int j = 0; j < steps.w; ++j) {
            int block = j;
            if constexpr (S::MASK) block = listed_keys<Tile>(x.mask, t, j);
            const int col = t.keys.lo + block * Tile::BKV;
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                if (j >= (w ? steps.y : steps.x)) continue;
                const tma_steps<1> ring = {smem_s + S::BIAS_RING + 16 * w};
                ring.wait_empty(taken[w]);
                mbarrier_arrive_expect_tx(ring.full(taken[w]), S::Bias::bytes);
                load_panels<typename S::Bias>(smem_s + S::BIAS_AT + w * S::Bias::bytes, &x.bias_map,
                                              t.work.i0 + 64 * w, head, b, ring.full(taken[w]),
                                              col);
                ++taken[w];
            }
        }
        mbarrier_arrive(described.empty(n));
    }
}

/* Copies the biases of each block's distances into both copies, from the tables that
 * prepare_distances_kernel has written. One thread. */
template <class Tile>
__device__ __forceinline__ void load_distances(const FwdMaskedParams &x, const FwdTile *tiles,
                                               smem_addr smem_s) {
    typedef Smem<Tile> S;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const tma_steps<S::TABLE_STAGES> ring = {smem_s + S::BIAS_RING};
    int taken = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
        described.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int blocks = t.steps.blocks;
        if (blocks < 0) break;
        const int first = t.keys.lo - t.work.i0 + x.bias.zero - 128;
        const float *from = (const float *)x.bias.data + t.work.head * x.bias.head + first;
#pragma unroll 1
        for (int j = 0; j < blocks; ++j, from += Tile::BKV, ++taken) {
            const smem_addr to_s = smem_s + S::BIAS_AT + ring.stage(taken) * 2 * S::COPY_BYTES,
                            full_s = ring.full(taken);
            ring.wait_empty(taken);
            mbarrier_arrive_expect_tx(full_s, 2 * S::COPY_BYTES);
            bulk_load(to_s, from, S::COPY_BYTES, full_s);
            bulk_load(to_s + S::COPY_BYTES, from + x.bias.row, S::COPY_BYTES, full_s);
        }
        mbarrier_arrive(described.empty(n));
    }
}

/* Copies the bias of each block's keys, as 16 additional columns of K, from where lift_keys_kernel
 * has written them. One thread. */
template <class Tile>
__device__ __forceinline__ void load_lifted(const FwdMaskedParams &x, const FwdTile *tiles,
                                            smem_addr smem_s) {
    typedef Smem<Tile> S;
    const tma_steps<S::TILE_STAGES> described = {smem_s + S::TILE_RING};
    const tma_steps<Tile::STAGES> k = {smem_s + S::K_RING};
    int step = 0;
#pragma unroll 1
    for (int n = 0;; ++n) {
        described.wait_full(n);
        const FwdTile &t = tiles[n % S::TILE_STAGES];
        const int blocks = t.steps.blocks;
        if (blocks < 0) break;
        const char *from = (const char *)x.bias.data + t.work.b * x.bias.batch +
                           t.work.head * x.bias.head +
                           (int64_t)t.keys.lo * (S::LIFT_BYTES / Tile::BKV);
#pragma unroll 1
        for (int j = 0; j < blocks; ++j, ++step, from += S::LIFT_BYTES) {
            k.wait_empty(step);
            mbarrier_arrive_expect_tx(k.full(step), S::LIFT_BYTES);
            bulk_load(smem_s + S::LIFT_AT + k.stage(step) * S::LIFT_BYTES, from, S::LIFT_BYTES,
                      k.full(step));
        }
        mbarrier_arrive(described.empty(n));
    }
}

/* Writes the other operand of K's additional columns: `one` in three columns. The caller
 * synchronises the block. */
template <class Tile> __device__ __forceinline__ void write_ones(uint32_t one, smem_addr smem_s) {
    typedef Smem<Tile> S;
    if (threadIdx.x < S::ONES_BYTES / 16)
        st_shared_128(smem_s + S::ONES_AT + threadIdx.x * 16,
                      threadIdx.x < 8 ? make_uint4(one | one << 16, one, 0, 0)
                                      : make_uint4(0, 0, 0, 0));
    fence_proxy_async();
}

#endif
