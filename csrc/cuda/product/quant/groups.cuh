/* SPDX-License-Identifier: BSD-3-Clause */
/* groups.cuh: schedules the tiles of a grouped product on the device, from the groups' ends.
 *
 * A task is the tile, or the `pair` of tiles side by side, that a cluster of blocks takes. Tasks
 * are numbered group by group. A block scans the ends once into shared memory and then finds
 * each task by binary search:
 *
 *   ends       300      300      1000          groups of rows, tiles of up to 256
 *   begin   0  300      300      1000          2 tasks across, M = 1100
 *   first   0  4        4        10  12        each group's first task
 * The last tasks, 10 and 11, zero the rows of no group.
 *
 * A group's tiles have equal height, a multiple of 64, so that none is nearly empty. Within a
 * group, tasks run as in order.cuh: up to GROUPED_ROWS consecutive tiles share columns of b.
 *
 * A cluster takes every `clusters`-th task. If the number of clusters and of a group's tiles had
 * a common divisor, a cluster could get the short last tile of every group, or of none. So the
 * tile that comes first in a column rotates from round to round.
 *
 * Ends that decrease or exceed the last row are clamped and reported. */
#ifndef GPUKERN_CUDA_QUANT_GROUPS_CUH
#define GPUKERN_CUDA_QUANT_GROUPS_CUH

#include "../../host/launch.cuh"
#include "tiles.h"

struct Groups {
    const int32_t *ends;
    int64_t step;  /* stride of ends */
    int64_t total; /* rows of a, or k */
    int count;
    int m, across; /* groups of k: rows of each result; tasks side by side */
    uint8_t *error_word;
};

/* In shared memory. MOST: most groups. */
template <int MOST> struct GroupListOf {
    int begin[MOST + 1]; /* begin of group g; one more for the last group's end */
    int first[MOST + 2]; /* number of tasks before group g */
};
typedef GroupListOf<GROUPED_MOST> GroupList;

struct Task {
    int group, begin, end; /* the group's rows or k; group = x.count: rows of no group */
    int row, limit, col;   /* the tile: rows [row, limit) of the group; col counts tasks */
};

template <int BM> __device__ __forceinline__ int tiles_in(int rows) { return (rows + BM - 1) / BM; }
template <bool BY_K, int BM> __device__ __forceinline__ int tasks_of(const Groups &x, int rows) {
    return tiles_in<BM>(BY_K ? x.m : rows) * x.across;
}

/* Runs in one full warp; each lane takes some neighbouring groups. */
template <bool BY_K, int BM, class List>
__device__ __forceinline__ void list_groups(const Groups &x, List &list, int lane) {
    const int each = (x.count + 31) / 32, from = min(lane * each, x.count),
              to = min(from + each, x.count);
    const int total = (int)x.total;
    int most = 0;
#pragma unroll 4
    for (int g = from; g < to; ++g) {
        const int end = __ldg(x.ends + g * x.step);
        list.begin[g + 1] = end;
        most = max(most, end);
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) /* If lane < d, the shuffle returns the lane's own value. */
        most = max(most, __shfl_up_sync(~0u, most, d));
    int end = __shfl_up_sync(~0u, most, 1), tasks = 0;
    end = lane == 0 ? 0 : min(end, total);
    for (int g = from; g < to; ++g) {
        const int begin = end, given = list.begin[g + 1];
        if (blockIdx.x == 0 && (given < end || given > total)) report(x.error_word, GK_BAD_OFFS);
        list.begin[g + 1] = end = min(max(end, given), total);
        list.first[g] = tasks;
        tasks += tasks_of<BY_K, BM>(x, end - begin);
    }
    int before = tasks;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, before, d);
        before += lane >= d ? other : 0;
    }
    before -= tasks;
    for (int g = from; g < to; ++g) list.first[g] += before;
    if (lane == 31) {
        const int rest = BY_K ? 0 : tasks_of<false, BM>(x, total - min(most, total));
        list.begin[0] = 0;
        list.first[x.count] = before + tasks;
        list.first[x.count + 1] = before + tasks + rest;
    }
}

template <class List> __device__ __forceinline__ int tasks_in(const Groups &x, const List &list) {
    return list.first[x.count + 1];
}

/* The group of a task; x.count: rows of no group. */
template <class List>
__device__ __forceinline__ int group_of(const Groups &x, const List &list, int task) {
    int low = 0, high = x.count; /* first[low] <= task < first[high + 1] */
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (list.first[middle] <= task)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

template <bool BY_K, int BM>
__device__ __forceinline__ Task find_task(const Groups &x, const GroupList &list, int task,
                                          int clusters) {
    const int low = group_of(x, list, task);
    const int begin = list.begin[low], end = low < x.count ? list.begin[low + 1] : (int)x.total;
    const int rows = BY_K ? x.m : end - begin, tiles = tiles_in<BM>(rows);
    const int height = ((rows + tiles - 1) / tiles + 63) / 64 * 64;
    const int in_group = task - list.first[low],
              strip = in_group / (GROUPED_ROWS * x.across) * GROUPED_ROWS;
    const int rest = in_group - strip * x.across, down = min(GROUPED_ROWS, tiles - strip),
              col = rest / down;
    const int turn = (task - rest + col * down) / clusters; /* round of the column's first task */
    const int row = (strip + (rest - col * down + turn) % down) * height;
    return {low, begin, end, row, min(row + height, rows), col};
}

#endif
