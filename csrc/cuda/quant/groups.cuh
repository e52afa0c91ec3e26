/* SPDX-License-Identifier: BSD-3-Clause */
/* groups.cuh: the tiles of a grouped product, found on the device from where its groups end.
 *
 * A task is the tile, or the `pair` tiles side by side, that a cluster of blocks takes. Tasks are numbered group by group; within
 * a group in the order of order.cuh. A block scans the ends once, into shared memory, and then finds each task by a binary search:
 *
 *   ends       300      300      1000     of rows, tiles of 256, 2 tasks across, M = 1100
 *   begin   0  300      300      1000
 *   first   0  4        4        10  12   where a group's tasks begin; behind the groups, rows of none, which become zeros
 *
 * Ends that decrease or pass the last row are clamped and reported. */
#ifndef GPUKERN_CUDA_QUANT_GROUPS_CUH
#define GPUKERN_CUDA_QUANT_GROUPS_CUH

#include "../gemm/order.cuh"
#include "../host/launch.cuh"
#include "tiles.h"

struct Groups {
    const int32_t *ends;
    int64_t step;  /* of ends */
    int64_t total; /* rows of a, or k */
    int count;
    int tiles_m, across; /* groups of k: rows of tiles of each; tasks side by side */
    uint8_t *error_word;
};

/* In shared memory. */
struct GroupList {
    int begin[GROUPED_MOST + 1]; /* of group g, and the last's end */
    int first[GROUPED_MOST + 2]; /* tasks before group g */
};

struct Task {
    int group, begin, end; /* its rows or k; group: x.count: rows of none */
    TilePlace at;          /* in the group */
};

template <bool BY_K, int BM> __device__ __forceinline__ int tasks_of(const Groups &x, int rows) {
    return (BY_K ? x.tiles_m : (rows + BM - 1) / BM) * x.across;
}

/* One warp, all lanes: each has some neighbouring groups. */
template <bool BY_K, int BM> __device__ __forceinline__ void list_groups(const Groups &x, GroupList &list, int lane) {
    const int each = (x.count + 31) / 32, from = min(lane * each, x.count), to = min(from + each, x.count);
    const int total = (int)x.total;
    int most = 0;
#pragma unroll 4
    for (int g = from; g < to; ++g) {
        const int end = __ldg(x.ends + g * x.step);
        list.begin[g + 1] = end;
        most = max(most, end);
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
        most = max(most, __shfl_up_sync(~0u, most, d)); /* its own where there is none before */
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
        list.first[x.count] = before + tasks, list.first[x.count + 1] = before + tasks + rest;
    }
}

__device__ __forceinline__ int tasks_in(const Groups &x, const GroupList &list) { return list.first[x.count + 1]; }

template <bool BY_K, int BM>
__device__ __forceinline__ Task find_task(const Groups &x, const GroupList &list, int task) {
    int low = 0, high = x.count; /* first[low] <= task < first[high + 1] */
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (list.first[middle] <= task)
            low = middle;
        else
            high = middle - 1;
    }
    const int begin = list.begin[low], end = low < x.count ? list.begin[low + 1] : (int)x.total;
    const int tiles_m = BY_K ? x.tiles_m : (end - begin + BM - 1) / BM;
    return {low, begin, end, tile_place(task - list.first[low], tiles_m, x.across, GROUPED_ROWS)};
}

#endif
