/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_schedule.cuh: the order in which the blocks of flash_attn_fwd_sm90a take tiles of queries.
 *
 * The order depends on shapes alone, and there is no counter in memory. A work unit is one tile of
 * one head. Under a causal mask a unit is a pair of tiles, i and n - 1 - i: the keys of a pair add
 * up to the same number for every i. Block c takes units c, c + blocks, c + 2 blocks, and so on.
 * Consecutive units belong to one head, so blocks that run at the same time read the same keys from
 * L2.
 *
 * An incomplete last round of pairs would take as long as a full one. So the tiles of the last one
 * or two rounds are scheduled one by one instead, and so is the middle tile of an odd number of
 * tiles. The longest come first. They go to block 0, 1, .. up to the last block, then from the last
 * block back to block 0. With a sliding window, the first few tiles of a head are shorter than all
 * the others. They come last, scheduled in the same way.
 *
 * Everything here is a plain function that tests/csrc/check_attn_sm90a.cpp also runs on the CPU. */
#ifndef GPUKERN_CUDA_FWD_SCHEDULE_CUH
#define GPUKERN_CUDA_FWD_SCHEDULE_CUH

#include "../../layout/layout.cuh" /* GK_HD */
#include "../../tile/divisor.h"

/* A group of tiles that are scheduled one by one: `count` tiles, longest first. For each length it
 * has one tile of each of the last `heads` heads. `tile` is the index of the longest tile. */
struct FwdSingles {
    int count, heads, tile;
    Divisor by_heads;
};

struct FwdSchedule {
    int tiles;  /* tiles of a head; packed call: of its longest sequence */
    int splits; /* parts into which a tile's keys are split; each part is a unit */
    int paired; /* 1: a unit is the pair of tiles i and n - 1 - i */
    /* the number of a head's first tiles, which see fewer keys and are scheduled last; 0 with
     * pairs */
    int short_tiles;
    int heads;  /* batch x heads; packed call: heads of one sequence */
    int units;  /* of all heads; packed call: an upper bound */
    int blocks; /* size of the grid */
    /* Dense calls only: */
    Divisor by_splits, by_unit; /* splits; units of a head */
    int rounds;                 /* full rounds of units; the remaining tiles are in `singles` */
    FwdSingles singles[5];
};

struct FwdUnit {
    int head; /* over batch and heads */
    int split;
    int tile[2]; /* -1: none */
};

constexpr GK_HD int fwd_units_of(int tiles, int paired) { return paired ? (tiles + 1) / 2 : tiles; }

/* Work unit `unit` of a sequence of `tiles` tiles, in a packed call. The last tile comes first,
 * because under a causal mask it is the longest. With pairs, the middle tile of an odd number is
 * half a unit. The middle tiles of all heads come last, so that they do not go to the same blocks
 * in every round. */
constexpr GK_HD FwdUnit fwd_unit(int tiles, const FwdSchedule &s, int unit) {
    const int split = unit % s.splits, rest = unit / s.splits;
    if (!s.paired) return {rest / tiles, split, {tiles - 1 - rest % tiles, -1}};
    const int pairs = tiles / 2, alone = rest - s.heads * pairs;
    if (alone >= 0) return {alone, split, {pairs, -1}};
    return {rest / pairs, split, {tiles - 1 - rest % pairs, rest % pairs}};
}

struct FwdPlace {
    int head, tile, split; /* head -1: no tile */
};

/* Tile number `at` among those of a dense call that are scheduled one by one, longest first. */
inline GK_HD FwdPlace fwd_single(const FwdSchedule &s, int at) {
#ifdef __CUDACC__
#pragma unroll 1 /* the caller has few registers */
#endif
    for (int i = 0; i < 5; ++i) {
        const FwdSingles &of = s.singles[i];
        if (at < of.count) {
            const int shorter = (int)of.by_heads.into((uint32_t)at);
            return {s.heads - of.heads + at - shorter * of.heads, of.tile - shorter, 0};
        }
        at -= of.count;
    }
    return {-1, 0, 0};
}

/* The i-th tile of block c in a dense call. */
inline GK_HD FwdPlace fwd_place_of(const FwdSchedule &s, int c, int i) {
    /* the round among the tiles that are scheduled one by one */
    const int last = i - (s.paired ? 2 * s.rounds : s.rounds);
    if (last >= 0) return fwd_single(s, last * s.blocks + (last % 2 ? s.blocks - 1 - c : c));
    const int unit = c + (s.paired ? i / 2 : i) * s.blocks;
    if (unit >= s.units) return {-1, 0, 0};
    const int whole = (int)s.by_splits.into((uint32_t)unit),
              head = (int)s.by_unit.into((uint32_t)whole);
    const int rest = whole - head * (int)s.by_unit.by;
    return {head, s.paired && i % 2 ? rest : s.tiles - 1 - rest, unit - whole * s.splits};
}

/* Heads with fewer tiles than this come from short sequences, which are bound by memory.
 * One-by-one tiles read each head's keys at several times, so only the incomplete round is
 * scheduled that way. Measured, speed with one-by-one tiles over pairs only: 0.87 to 0.97 at 4
 * and 8 tiles, 0.99 to 1.01 at 16 tiles, 1.02 from 32 tiles on. */
constexpr int FWD_SINGLES = 20;

/* Fills in the units, the grid and the one-by-one tiles of a dense call on `sms` SMs. */
inline void fwd_make_schedule(FwdSchedule *s, int sms) {
    const int64_t of_head = s->paired ? s->tiles / 2 : s->tiles - s->short_tiles,
                  units = s->heads * of_head;
    const int64_t tiles = (int64_t)s->heads * s->tiles * s->splits, all = s->paired ? units : tiles;
    s->units = (int)(all < INT32_MAX ? all : INT32_MAX);
    s->blocks = (int)(tiles < sms ? tiles : sms);
    s->by_splits = divisor_of((uint32_t)s->splits);
    s->by_unit = divisor_of((uint32_t)(of_head > 1 ? of_head : 1));
    s->rounds = INT32_MAX / 2;
    if ((!s->paired && s->short_tiles == 0) || s->blocks == 0) return;
    const int whole = (int)(units / s->blocks);
    s->rounds = !s->paired || s->tiles < FWD_SINGLES || whole == 0 ? whole : whole - 1;
    /* The full rounds take all units of the heads before `first`, and the units before u0 of head
     * `first`. */
    const int64_t scheduled = (int64_t)s->rounds * s->blocks;
    const int first = of_head ? (int)(scheduled / of_head) : s->heads,
              u0 = of_head ? (int)(scheduled % of_head) : 0;
    const int part = s->heads - first - 1, rest = s->heads - first, left = (int)of_head - u0;
    const int middle = s->paired ? s->tiles % 2 : s->short_tiles;
    const int lengths[5] = {u0, left, middle, s->paired ? left : 0, s->paired ? u0 : 0};
    const int heads[5] = {part, rest, s->heads, rest, part};
    for (int i = 0, tile = s->tiles - 1; i < 5; tile -= lengths[i++]) {
        const bool any = lengths[i] > 0 && heads[i] > 0;
        s->singles[i] = {any ? lengths[i] * heads[i] : 0, heads[i], tile,
                         divisor_of((uint32_t)(any ? heads[i] : 1))};
    }
}

/* The key block that a tile takes at step `at`. With ALiBi it first takes the block nearest to its
 * queries, because weights fall with the distance from it. In the other direction they would grow
 * by more than a stale reference allows. If `nearest` is 0, the order is first to last. */
constexpr GK_HD int fwd_block(int at, int nearest) { return at <= nearest ? nearest - at : at; }

#endif
