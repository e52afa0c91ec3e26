/* SPDX-License-Identifier: BSD-3-Clause */
/* fwd_schedule.cuh: which tiles of queries a block of flash_attn_fwd_sm90a takes, one after the
 * other. No counter in memory: the order follows from shapes alone. Units of one head are
 * neighbours, so that blocks that run together read the same keys from L2. Plain functions, which a
 * CPU test walks too (tests/csrc/check_attn_sm90a.cpp).
 *
 * A unit is one tile of one head, or under a causal rule the two tiles i and n - 1 - i, whose keys
 * add up to the same number for every i. Block c takes units c, c + blocks, c + 2 blocks, .. A part
 * of a round would take a whole pair's time: the last one to two rounds of pairs, and the tiles in
 * the middle of an odd number, are dealt as single tiles instead, longest first, from block 0 to
 * the last and back. In a window all tiles but a head's first ones are equally long: those come
 * last, in the same way. */
#ifndef GPUKERN_CUDA_FWD_SCHEDULE_CUH
#define GPUKERN_CUDA_FWD_SCHEDULE_CUH

#include "../../layout/layout.cuh" /* GK_HD */
#include "../../tile/divisor.cuh"

/* Tiles that are dealt one by one: `count` tiles, of the last `heads` heads one of each length, the
 * longest `tile`. */
struct FwdSingles {
    int count, heads, tile;
    Divisor by_heads;
};

struct FwdSchedule {
    int tiles;  /* of a head; of a packed call: of its longest sequence */
    int splits; /* parts of the keys of a tile, each a unit */
    int paired; /* 1: a unit is tiles i and n - 1 - i */
    int young;  /* a head's first tiles that see fewer keys than those behind them, where these come
                   last; not paired */
    int heads;  /* over batch and heads; of a packed call those of one sequence */
    int units;  /* of all heads; of a packed call an upper bound */
    int blocks; /* of the grid */
    /* Dense calls alone: */
    Divisor by_splits, by_unit; /* splits; units of a head */
    int rounds; /* of units that are dealt in order; the other tiles are dealt one by one: */
    FwdSingles singles[5];
};

struct FwdUnit {
    int head; /* over batch and heads */
    int split;
    int tile[2]; /* -1: none */
};

constexpr GK_HD int fwd_units_of(int tiles, int paired) { return paired ? (tiles + 1) / 2 : tiles; }

/* A unit of a packed call, within its sequence of so many tiles. Tiles come longest first where a
 * causal rule makes the last one longest. Where pairs leave a tile in the middle over, those of all
 * heads come last: half a unit each, they would fall to the same blocks time and again. */
constexpr GK_HD FwdUnit fwd_unit(int tiles, const FwdSchedule &s, int unit) {
    const int split = unit % s.splits, rest = unit / s.splits;
    if (!s.paired) return {rest / tiles, split, {tiles - 1 - rest % tiles, -1}};
    const int pairs = tiles / 2, alone = rest - s.heads * pairs;
    if (alone >= 0) return {alone, split, {pairs, -1}};
    return {rest / pairs, split, {tiles - 1 - rest % pairs, rest % pairs}};
}

struct FwdPlace {
    int head, tile, split; /* head -1: there is none */
};

/* Single tile `at` of a dense call, longest first. */
inline GK_HD FwdPlace fwd_single(const FwdSchedule &s, int at) {
#ifdef __CUDACC__
#pragma unroll 1 /* registers are few where it is called */
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

/* The tile that block c of a dense call takes at its step i. */
inline GK_HD FwdPlace fwd_place_of(const FwdSchedule &s, int c, int i) {
    const int last = i - (s.paired ? 2 * s.rounds : s.rounds); /* rounds of single tiles */
    if (last >= 0) return fwd_single(s, last * s.blocks + (last % 2 ? s.blocks - 1 - c : c));
    const int unit = c + (s.paired ? i / 2 : i) * s.blocks;
    if (unit >= s.units) return {-1, 0, 0};
    const int whole = (int)s.by_splits.into((uint32_t)unit),
              head = (int)s.by_unit.into((uint32_t)whole);
    const int rest = whole - head * (int)s.by_unit.by;
    return {head, s.paired && i % 2 ? rest : s.tiles - 1 - rest, unit - whole * s.splits};
}

/* Heads of fewer tiles are short sequences, which live off memory: single tiles longest first would
 * read each head's keys at several times, so only a part of a round is dealt so. Measured, tiles
 * against pairs alone: 0.87 to 0.97 at 4 and 8 tiles, 0.99 to 1.01 at 16, 1.02 from 32 on. */
constexpr int FWD_SINGLES = 20;

/* units and blocks of a dense call on so many SMs, and how its units end. */
inline void fwd_deal(FwdSchedule *s, int sms) {
    const int64_t of_head = s->paired ? s->tiles / 2 : s->tiles - s->young,
                  units = s->heads * of_head;
    const int64_t tiles = (int64_t)s->heads * s->tiles * s->splits, all = s->paired ? units : tiles;
    s->units = (int)(all < INT32_MAX ? all : INT32_MAX);
    s->blocks = (int)(tiles < sms ? tiles : sms);
    s->by_splits = divisor_of((uint32_t)s->splits);
    s->by_unit = divisor_of((uint32_t)(of_head > 1 ? of_head : 1));
    s->rounds = INT32_MAX / 2;
    if ((!s->paired && s->young == 0) || s->blocks == 0) return;
    const int whole = (int)(units / s->blocks);
    s->rounds = !s->paired || s->tiles < FWD_SINGLES || whole == 0 ? whole : whole - 1;
    /* of head `first` the units before u0 are dealt, of the heads behind it none */
    const int64_t dealt = (int64_t)s->rounds * s->blocks;
    const int first = of_head ? (int)(dealt / of_head) : s->heads,
              u0 = of_head ? (int)(dealt % of_head) : 0;
    const int part = s->heads - first - 1, rest = s->heads - first, left = (int)of_head - u0;
    const int middle = s->paired ? s->tiles % 2 : s->young;
    const int lengths[5] = {u0, left, middle, s->paired ? left : 0, s->paired ? u0 : 0};
    const int heads[5] = {part, rest, s->heads, rest, part};
    for (int i = 0, tile = s->tiles - 1; i < 5; tile -= lengths[i++]) {
        const bool any = lengths[i] > 0 && heads[i] > 0;
        s->singles[i] = {any ? lengths[i] * heads[i] : 0, heads[i], tile,
                         divisor_of((uint32_t)(any ? heads[i] : 1))};
    }
}

/* Which block of a tile's keys comes at step `at`. With ALiBi the nearest one first, since weights
 * fall from there: towards it they would grow by more than a stale reference takes. 0: from the
 * first to the last. */
constexpr GK_HD int fwd_block(int at, int nearest) { return at <= nearest ? nearest - at : at; }

#endif
