/* SPDX-License-Identifier: BSD-3-Clause */
/* bwd_order.cuh: the schedule of the Hopper backward. It says which task each block of the grid
 * has, in which order a block takes its steps, and where dS, P and dQ lie in shared memory and in
 * dq_sum.
 *
 * Everything here is a plain function, which tests/csrc/check_attn_sm90a.cpp also runs on the CPU.
 * A thread index counts over both consumer warpgroups. */
#ifndef GPUKERN_CUDA_BWD_ORDER_CUH
#define GPUKERN_CUDA_BWD_ORDER_CUH

#include "../../layout/layout.cuh"
#include "../../tile/divisor.h"

/* ---- the order of a grid's blocks ------------------------------------------------------------ */
/* The kinds of task. A work unit is one kv head of one batch entry, with all query heads of its
 * group. BWD_ROWS: lse, delta and zeros of dQ, for some tiles of rows. BWD_KEYS: the products of
 * one tile of keys. BWD_ROUND: scales and rounds dQ of some tiles of rows. */
enum BwdKind : unsigned char {
    BWD_ROWS,
    BWD_KEYS,
    BWD_ROUND
};

struct BwdTask {
    BwdKind kind;
    /* rows and rounding only: the task is cut into `parts` equal parts */
    unsigned char part, parts;
    int unit, index;
};

/* The order of a grid's tasks. `keys` and `rows` are tasks of one unit; there are as many rounding
 * tasks as rows tasks. If rows is 0, other kernels do both, and the grid has keys tasks only.
 *
 * Units are scheduled in sets of `together` units. Within a set, the first key tile of every unit
 * comes first. Under a causal mask these blocks are the longest, and they must not start last. The
 * last set may be incomplete; tasks of missing units exit at once.
 *
 * Blocks start in the order of their numbers, and a block waits only for blocks with lower numbers.
 * The grid begins with the rows tasks of `lead` sets. Then come the keys tasks, set after set.
 * Spread among the keys tasks of set n are the rows tasks of set n + lead and the rounding tasks of
 * set n - lag. The grid ends with the rounding tasks of the last `lag` sets. lead and lag are
 * between 1 and sets(); without rows tasks both are 0.
 *
 * The rows tasks at the beginning and the rounding tasks at the end are cut into PARTS blocks each,
 * because nothing else runs then. */
struct BwdGrid {
    static constexpr int PARTS = 4;
    int units, keys, rows, together, lead, lag;
    /* prepare() sets the members below. */
    int last; /* the first set that has no rows tasks among its keys tasks */
    Divisor by_together;
    /* by the number of a set's tasks: rows, keys, keys + rows, keys + rows + rounding */
    Divisor by_rows, by_keys, by_keys_rows, by_all;

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
    /* Task x of one kind in a set. Consecutive x go through the units of the set, then to the next
     * index. */
    GK_HD BwdTask of_set(BwdKind kind, int set, int x) const {
        const int index = (int)by_together.into((uint32_t)x);
        return {kind, 0, 1, set * together + x - index * together, index};
    }
    /* Part x of the rows or rounding tasks of the sets from `first` on. */
    GK_HD BwdTask of_part(BwdKind kind, int first, int x) const {
        const int whole = x / PARTS, set = (int)by_rows.into((uint32_t)whole);
        BwdTask t = of_set(kind, first + set, whole - set * (int)by_rows.by);
        t.part = (unsigned char)(x % PARTS);
        t.parts = PARTS;
        return t;
    }
    /* The task of cluster x. A set's keys tasks may have rows tasks, rounding tasks or both among
     * them. */
    GK_HD BwdTask task(int x) const {
        const int k = keys * together, r = rows * together;
        if (x < lead * r * PARTS) return of_part(BWD_ROWS, 0, x);
        x -= lead * r * PARTS;
        /* Sets before a and sets from b on have either rows or rounding tasks among their keys
         * tasks. Sets from a to b - 1 have neither if `few` is true, otherwise both. */
        const bool few = last < lag;
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
        /* the other tasks are spread evenly over the set's blocks */
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

/* The steps of a keys task. For each head of the group it takes tiles [lo, lo + tiles), beginning
 * at lo + start and wrapping around. */
struct BwdStep {
    int head, tile;

    constexpr GK_HD void next(int lo, int tiles, int start) {
        if (++tile == lo + tiles) tile = lo;
        if (tile == lo + start) ++head;
    }
};

/* The steps of an ordered keys task. For each tile of rows it takes every head of the group. Blocks
 * add to a tile of dQ one after the other, in the order in which the blocks start.
 *
 * up is true for large grids with causal or a right window. The blocks of the last keys start
 * first, and each block begins at the first tile whose rows see its keys. No other block has added
 * there yet, and from then on the previous block stays one step ahead. If up is false, the blocks
 * of the first keys start first, and each begins at the last tile. In both cases a block seldom
 * waits for the previous one. */
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

/* ---- coordinates ----------------------------------------------------------------------------- */
/* The row and column that a lane passes to stmatrix.x4 for groups of eight columns n and n + 1
 * of its accumulators. dS^T [128 keys][rows] is stored transposed, as dS [rows][keys]. */
constexpr GK_HD coord ds_place(int thread, int n) {
    const int lane = thread & 31;
    return {8 * n + (lane >> 4) * 8 + (lane & 7), (thread >> 5) * 16 + (lane >> 3 & 1) * 8};
}

/* The same for the wide kernel (bwd_wide.cuh), which stores dS^T [64 keys][rows] without a
 * transpose. Only warpgroup 1 calls it. */
constexpr GK_HD coord scores_place(int thread, int n) {
    const int lane = thread & 31;
    return {(thread >> 5 & 3) * 16 + (lane & 15), 8 * n + (lane >> 4) * 8};
}

/* The row and column of dQ that a lane of a rounding task passes to stmatrix, which transposes
 * pairs of eight rows. A block of dq_sum is dQ^T [16 of d][n rows] of one warp. by_d: a block has
 * all rows of the tile; otherwise blocks 4 to 7 have the second half of the rows. */
constexpr GK_HD coord dq_place(int lane, int block, int pair, int rows, bool by_d) {
    return {(by_d ? 0 : (block >> 2) * rows) + 16 * pair + (lane >> 4) * 8 + (lane & 7),
            16 * (by_d ? block : block & 3) + (lane >> 3 & 1) * 8};
}

/* Row and column of the first of the four sums (x, y, z, w) that a lane has of eight rows of a
 * block. x and y are consecutive rows. z and w are the same rows, 8 columns further. */
constexpr GK_HD coord dq_sum_place(int lane, int block, int eight, int rows, bool by_d) {
    return {(by_d ? 0 : (block >> 2) * rows) + 8 * eight + (lane & 3) * 2,
            16 * (by_d ? block : block & 3) + (lane >> 2)};
}

#endif
