/* fwd_schedule.cuh: which tiles of queries a block of the Hopper forward kernel takes, one after the other.
 * A unit is what a block takes at once: one tile of one head, or under a causal rule the two tiles i and n - 1 - i, whose
 * keys add up to the same number for every i. Block c takes units c, c + blocks, c + 2 blocks, ..: no counter in memory,
 * and the order follows from shapes alone. Units of one head are neighbours, so that blocks that run together read the
 * same keys from L2. Plain functions, which a CPU test walks too (tests/csrc/check_attn_sm90a.cpp). */
#ifndef GPUKERN_CUDA_FWD_SCHEDULE_CUH
#define GPUKERN_CUDA_FWD_SCHEDULE_CUH

#include "../layout/algebra.cuh" /* GK_HD */

struct FwdSchedule {
    int tiles;  /* of a head; of a packed call: of its longest sequence */
    int splits; /* parts of the keys of a tile, each a unit */
    int paired; /* 1: a unit is tiles i and n - 1 - i */
    int heads;  /* over batch and heads; of a packed call those of one sequence */
    int units;  /* of all heads; of a packed call an upper bound */
};

struct FwdUnit {
    int head; /* over batch and heads */
    int split;
    int tile[2]; /* -1: none */
};

constexpr GK_HD int fwd_units_of(int tiles, int paired) { return paired ? (tiles + 1) / 2 : tiles; }

/* Tiles come longest first where a causal rule makes the last one longest. Where pairs leave a tile in the middle over,
 * those of all heads come last: half a unit each, they would fall to the same blocks time and again. */
constexpr GK_HD FwdUnit fwd_unit(const FwdSchedule &s, int unit) {
    const int split = unit % s.splits, rest = unit / s.splits;
    if (!s.paired) return {rest / s.tiles, split, {s.tiles - 1 - rest % s.tiles, -1}};
    const int pairs = s.tiles / 2, alone = rest - s.heads * pairs;
    if (alone >= 0) return {alone, split, {pairs, -1}};
    return {rest / pairs, split, {s.tiles - 1 - rest % pairs, rest % pairs}};
}

/* Which block of a tile's keys comes at step `at`. With ALiBi the nearest one first, since weights fall from there: towards
 * it they would grow by more than a stale reference takes. 0: from the first to the last. */
constexpr GK_HD int fwd_block(int at, int nearest) { return at <= nearest ? nearest - at : at; }

#endif
