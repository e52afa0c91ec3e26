/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_order.cuh: what the blocks of the Hopper backward do, in which order a block takes its steps,
 * and where its warps put dS, P and dQ. Plain functions, which a CPU test walks too
 * (tests/csrc/check_attn_sm90a.cpp). A thread counts over both warpgroups. */
#ifndef GPUKERN_CUDA_BWD_ORDER_CUH
#define GPUKERN_CUDA_BWD_ORDER_CUH

#include "../../layout/layout.cuh"
#include "../../tile/divisor.cuh"

/* ---- the order of a grid's blocks ------------------------------------------------------------ */
/* What a block does for a unit, a kv head of a batch entry with the query heads of its group: rows:
 * lse, delta and zeros of dQ for some tiles; keys: the products of one tile of keys; round: dQ of
 * some tiles, scaled and rounded. */
enum BwdKind : unsigned char {
    BWD_ROWS,
    BWD_KEYS,
    BWD_ROUND
};

struct BwdTask {
    BwdKind kind;
    /* of rows and of rounding: which of how many equal parts of the task */
    unsigned char part, parts;
    int unit, index;
};

/* keys, rows: tasks a unit; as many of round as of rows. rows 0: other kernels do both, and the
 * grid is keys alone. `together` units are a set, whose first keys come first: where a mask makes
 * blocks of one unit differ, the long ones of the last units must not be the last. The last set may
 * lack units: its tasks are of units that are not there.
 * Blocks start in the order of their numbers, and a block waits for blocks of lower numbers alone.
 * A grid begins with the rows of `lead` sets. Then, set after set, come its keys; spread among them
 * the rows of the set `lead` on, and the rounding of the set `lag` before. It ends with the
 * rounding of `lag` sets. Both are 1 to sets(); with rows 0 both are 0. What it begins and ends
 * with is in PARTS, a block each, since nothing else runs then. */
struct BwdGrid {
    static constexpr int PARTS = 4;
    int units, keys, rows, together, lead, lag;
    /* prepare(): */
    int last;            /* sets from `last` on bring no rows */
    Divisor by_together; /* and of a set: */
    Divisor by_rows, by_keys, by_keys_rows,
        by_all; /* its rows, its keys, both, and its keys with rows and rounding */

    GK_HD int sets() const { return (units + together - 1) / together; }
    GK_HD int blocks() const {
        return sets() * together * (keys + 2 * rows) + (PARTS - 1) * (lead + lag) * together * rows;
    }
    void prepare() {
        const uint32_t k = (uint32_t)(keys * together), r = (uint32_t)(rows * together);
        last = sets() - lead;
        by_together = divisor_of((uint32_t)together);
        by_rows = divisor_of(r ? r : 1);
        by_keys = divisor_of(k ? k : 1);
        by_keys_rows = divisor_of(k + r ? k + r : 1);
        by_all = divisor_of(k + 2 * r ? k + 2 * r : 1);
    }

    /* x * n / by for x <= by. */
    static GK_HD int share(const Divisor &by, int x, int n) {
        const uint64_t whole = (uint64_t)x * (uint32_t)n;
        return (int)(whole < (uint64_t)1 << 31 ? by.into((uint32_t)whole) : whole / by.by);
    }
    GK_HD BwdTask of_set(BwdKind kind, int set, int x) const {
        const int index = (int)by_together.into((uint32_t)x);
        return {kind, 0, 1, set * together + x - index * together, index};
    }
    /* Part x of the rows, or of the rounding, of sets from `first` on. */
    GK_HD BwdTask of_part(BwdKind kind, int first, int x) const {
        const int whole = x / PARTS, set = (int)by_rows.into((uint32_t)whole);
        BwdTask t = of_set(kind, first + set, whole - set * (int)by_rows.by);
        t.part = (unsigned char)(x % PARTS);
        t.parts = PARTS;
        return t;
    }
    GK_HD BwdTask task(int x) const {
        const int k = keys * together, r = rows * together;
        if (x < lead * r * PARTS) return of_part(BWD_ROWS, 0, x);
        x -= lead * r * PARTS;
        const bool few = last < lag; /* some sets have neither rows nor rounding among their keys,
                                        else some have both */
        const int a = few ? last : lag, b = few ? lag : last, middle = few ? k : k + 2 * r;
        int set = 0;
        if (x < a * (k + r)) {
            set = (int)by_keys_rows.into((uint32_t)x);
            x -= set * (k + r);
        } else if ((x -= a * (k + r)) < (b - a) * middle) {
            const int n = (int)(few ? by_keys : by_all).into((uint32_t)x);
            set = a + n;
            x -= n * middle;
        } else if ((x -= (b - a) * middle) < (last + lead - b) * (k + r)) {
            const int n = (int)by_keys_rows.into((uint32_t)x);
            set = b + n;
            x -= n * (k + r);
        } else {
            return of_part(BWD_ROUND, last + lead - lag, x - (last + lead - b) * (k + r));
        }
        /* of the set's blocks, evenly spread */
        const int others = (set < last ? r : 0) + (set >= lag ? r : 0);
        if (others == 0) return of_set(BWD_KEYS, set, x);
        const Divisor &by = others == r ? by_keys_rows : by_all;
        const int before = share(by, x, others);
        if (share(by, x + 1, others) == before) return of_set(BWD_KEYS, set, x - before);
        if (set < last && before < r) return of_set(BWD_ROWS, set + lead, before);
        return of_set(BWD_ROUND, set - lag, set < last ? before - r : before);
    }
};

/* ---- the order of a block's steps ------------------------------------------------------------ */

/* Head after head of a group, of each the tiles [lo, lo + tiles) from lo + start on and around. */
struct BwdStep {
    int head, tile;

    constexpr GK_HD void next(int lo, int tiles, int start) {
        if (++tile == lo + tiles) tile = lo;
        if (tile == lo + start) ++head;
    }
};

/* Where dQ must be added in one order: tile after tile, of each every head of the group. Blocks of
 * keys add to a tile one after the other, in the order in which they start. `up`, in large grids
 * under a bound on the right: the last keys start first, and each block at the first tile that sees
 * it, where no other has been; the block before is ahead of it from there on. Else down: the first
 * keys start first, each at the last tile. So a turn seldom has to be waited for. */
struct BwdOrderedStep {
    int head, tile;

    constexpr GK_HD void next(int first_head, int group, bool up) {
        if (++head == first_head + group) {
            head = first_head;
            tile += up ? 1 : -1;
        }
    }
};

template <bool ORDERED> struct BwdSteps {
    typedef BwdStep type;
};
template <> struct BwdSteps<true> {
    typedef BwdOrderedStep type;
};

/* ---- places ---------------------------------------------------------------------------------- */
/* The row and the column that a lane gives to stmatrix.x4 for eight columns n and n + 1 of its
 * accumulators.
 * dS^T [128 keys][rows] is stored transposed, as dS [rows][keys]. */
constexpr GK_HD coord ds_place(int thread, int n) {
    const int lane = thread & 31;
    return {8 * n + (lane >> 4) * 8 + (lane & 7), (thread >> 5) * 16 + (lane >> 3 & 1) * 8};
}

/* dS^T [64 keys][rows] of the wide kernel lies as it is: it is warpgroup 1's alone. */
constexpr GK_HD coord scores_place(int thread, int n) {
    const int lane = thread & 31;
    return {(thread >> 5 & 3) * 16 + (lane & 15), 8 * n + (lane >> 4) * 8};
}

/* dQ^T of a warp is [16 of d][n rows], a block of dq_sum; the last pass stores pairs of eight rows
 * transposed. by_d: blocks are of all rows, else blocks 4 .. 7 are of the second half of the rows.
 * Row and column of dQ. */
constexpr GK_HD coord dq_place(int lane, int block, int pair, int rows, bool by_d) {
    return {(by_d ? 0 : (block >> 2) * rows) + 16 * pair + (lane >> 4) * 8 + (lane & 7),
            16 * (by_d ? block : block & 3) + (lane >> 3 & 1) * 8};
}

/* The first of a lane's four sums of eight rows of a block: x, y of rows one after the other, z, w
 * of the column eight on. */
constexpr GK_HD coord dq_sum_place(int lane, int block, int eight, int rows, bool by_d) {
    return {(by_d ? 0 : (block >> 2) * rows) + 8 * eight + (lane & 3) * 2,
            16 * (by_d ? block : block & 3) + (lane >> 2)};
}

#endif
