/* SPDX-License-Identifier: BSD-3-Clause */
/* grouped_balance.cuh: which cluster takes which of the last tasks of a grouped product.
 *
 * A task has one to four blocks of 64 rows. If each cluster took every clusters-th task, some
 * clusters would get the tall tasks and end late, and a few tasks more than whole rounds would
 * cost a whole round (8 groups of about 700 rows, 336 tasks, 66 clusters: 22 % more than the mean).
 * So only the first rounds are taken in turn. The tasks after them are assigned in their order,
 * each to the cluster with the least cost so far. There are fewer than twice as many of them as
 * clusters. The last of these tasks may be cut in two halves of their rows. Of three ways, the
 * first is taken unless another ends 3 % earlier: all tasks in turn, by cost, by cost with halves.
 *
 *   task     0 .. C - 1     C .. 2C - 1     ..     rounds C .. tasks - 1
 *   taken    in turn        in turn                by cost; a cluster takes 0 to BALANCE_TURNS
 *
 * The order stays, so that tasks that share columns of b still run at the same time.
 *
 * One warp of each block computes this while the first rounds are multiplied, from the groups'
 * ends alone. All blocks find the same, without any communication between them. The sum of a result
 * does not depend on the cluster or on the height of the tile that computes it.
 *
 * The warp is slow, probably because WGMMA's reads of shared memory go first. If it is not ready
 * when the first rounds end, all wait for it (measured: 170 us instead of 146, 8 groups of about
 * 287 rows, 4096 x 4096, H200). So balance_pays, on the host, leaves out calls with short first
 * rounds.
 *
 * Called by grouped.cuh. State: a Balance in shared memory, and a barrier with one arrival, which
 * comes when the Balance is complete. */
#ifndef GPUKERN_CUDA_PRODUCT_GROUPED_BALANCE_CUH
#define GPUKERN_CUDA_PRODUCT_GROUPED_BALANCE_CUH

#include "../ptx/laneid.cuh"
#include "quant/groups.cuh"

enum {
    BALANCE_TURNS = 4,      /* most tasks of a cluster among those assigned by cost */
    BALANCE_CLUSTERS = 160, /* most clusters: five a lane */
    BALANCE_TASKS = 1 << 20,
    BALANCE_MIN_STEPS = 32, /* rounds taken in turn times steps of k; balance_pays asks for more */
    /* Steps of k of all rounds taken in turn, less those of a round in which the warp reads the
     * costs of its tasks. */
    BALANCE_PAYS = 240,
    BALANCE_READS = 20,
    BALANCE_ROUNDS = 16 /* with more, the last one is too small a part of the time */
};

/* Parts of a task. */
enum {
    BALANCE_WHOLE,
    BALANCE_TOP,
    BALANCE_BOTTOM,
    BALANCE_PARTS = 4
};

/* Ways to assign the last tasks. */
enum {
    BALANCE_IN_TURN,
    BALANCE_BY_COST,
    BALANCE_HALVES,
    BALANCE_WAYS
};

struct Balance {
    int first;     /* the first task that is assigned by cost; INT32_MAX if none is */
    unsigned ends; /* clusters times turns, those without a task included */
    int chosen;    /* which `mine` counts */
    int count;     /* tasks assigned by cost */
    int mine[BALANCE_WAYS][BALANCE_TURNS]; /* task * BALANCE_PARTS + part, or -1 */
    unsigned end[BALANCE_WAYS];         /* the highest cost of a cluster, of those that get one */
    unsigned before[BALANCE_CLUSTERS];  /* a cluster's cost of the tasks taken in turn */
    unsigned load[BALANCE_CLUSTERS];    /* cost << 8 | cluster; ~0: takes no more tasks */
    uint8_t turns[BALANCE_CLUSTERS];    /* tasks that a cluster has been assigned */
    uint8_t cost[4 * BALANCE_CLUSTERS]; /* of two halves for each task; a whole task is the first */
};

/* Host: true if a call is long enough for the warp, and short enough for the last round to count.
 * The number of tasks is estimated: half a tile of each group is empty. */
inline bool balance_pays(int64_t m, int groups, int across, int clusters, int steps) {
    const int64_t tasks = (2 * gk_ceil_div(m, GROUPED_BM) + groups) * across / 2,
                  rounds = tasks / clusters - 1;
    return rounds <= BALANCE_ROUNDS && rounds * (steps - BALANCE_READS) >= BALANCE_PAYS;
}

/* Sets `first`, `ends` and `count`. steps: of k. One thread. The divisions stand here because they
 * took 600 ns of each tile (H200). */
__device__ __forceinline__ void balance_begin(Balance &balance, int tasks, int clusters,
                                              int steps) {
    const int rounds = max(1, tasks / clusters - 1);
    balance.first = INT32_MAX;
    balance.ends = (unsigned)tasks;
    if (tasks <= clusters || clusters > BALANCE_CLUSTERS || tasks > BALANCE_TASKS ||
        rounds * steps < BALANCE_MIN_STEPS)
        return;
    balance.first = rounds * clusters;
    balance.ends = (unsigned)((rounds + BALANCE_TURNS) * clusters);
    balance.count = tasks - rounds * clusters;
}

/* The cost of a tile. Its first block of rows counts more, since every tile copies as much of b. */
__device__ __forceinline__ unsigned balance_cost(int blocks) { return 2 * blocks + 1; }

/* The cost of a task, 1 to 9. Rows of no group cost 1. */
template <int BM>
__device__ __forceinline__ unsigned balance_task_cost(const Groups &x, const GroupList &list,
                                                      int task, int clusters) {
    const Task t = find_task<false, BM>(x, list, task, clusters);
    return t.group == x.count ? 1 : balance_cost((t.limit - t.row + 63) / 64);
}

/* Assigns the tasks of balance.cost to clusters. me: this cluster. Runs in one full warp, which has
 * 24 registers. */
__device__ __forceinline__ void balance_assign(Balance &balance, int way, int clusters, int me) {
    const int lane = laneid();
#pragma unroll 1
    for (int c = lane; c < BALANCE_CLUSTERS; c += 32) {
        balance.load[c] = c < clusters ? balance.before[c] << 8 | c : ~0u;
        balance.turns[c] = 0;
    }
    if (lane < BALANCE_TURNS) balance.mine[way][lane] = -1;
    if (lane == 0) balance.end[way] = 0;
    __syncwarp();
#pragma unroll 1
    for (int half = 0; half < 2 * balance.count; ++half) {
        const unsigned cost = balance.cost[half];
        if (cost == 0) continue;
        unsigned least = ~0u;
#pragma unroll
        for (int c = 0; c < BALANCE_CLUSTERS; c += 32) least = min(least, balance.load[c + lane]);
        least = __reduce_min_sync(~0u, least);
        if (lane == 0) {
            const int cluster = least & 255, turn = balance.turns[cluster]++;
            least += cost << 8;
            balance.load[cluster] = turn + 1 == BALANCE_TURNS ? ~0u : least;
            balance.end[way] = max(balance.end[way], least >> 8);
            if (cluster == me) {
                const int part = half % 2                 ? BALANCE_BOTTOM
                                 : balance.cost[half + 1] ? BALANCE_TOP
                                                          : BALANCE_WHOLE;
                balance.mine[way][turn] = (balance.first + half / 2) * BALANCE_PARTS + part;
            }
        }
        __syncwarp();
    }
    __syncwarp(); /* the costs have been read */
}

/* Runs in one full warp. me: this cluster. */
template <int BM>
__device__ __forceinline__ void balance_tasks(const Groups &x, const GroupList &list, int clusters,
                                              int me, Balance &balance) {
    const int lane = laneid();
#pragma unroll 1
    for (int c = lane; c < clusters; c += 32) {
        unsigned cost = 0;
#pragma unroll 1
        for (int t = c; t < balance.first; t += clusters)
            cost += balance_task_cost<BM>(x, list, t, clusters);
        balance.before[c] = cost;
    }
#pragma unroll 1
    for (int j = lane; j < balance.count; j += 32) {
        const int task = balance.first + j;
        balance.cost[2 * j] = (uint8_t)balance_task_cost<BM>(x, list, task, clusters);
        balance.cost[2 * j + 1] = 0;
    }
    __syncwarp();
    unsigned end = 0;
#pragma unroll 1
    for (int c = lane; c < clusters; c += 32) {
        unsigned cost = balance.before[c];
        for (int j = c; j < balance.count; j += clusters) cost += balance.cost[2 * j];
        end = max(end, cost);
    }
    end = __reduce_max_sync(~0u, end);
    if (lane < BALANCE_TURNS) {
        const int j = me + lane * clusters;
        balance.mine[BALANCE_IN_TURN][lane] =
            j < balance.count ? (balance.first + j) * BALANCE_PARTS : -1;
    }
    if (lane == 0) balance.end[BALANCE_IN_TURN] = end;
    balance_assign(balance, BALANCE_BY_COST, clusters, me);
#pragma unroll 1
    for (int j = max(balance.count - clusters / 4, 0) + lane; j < balance.count; j += 32) {
        const int blocks = balance.cost[2 * j] / 2; /* 0: rows of no group */
        if (blocks < 3) continue;
        balance.cost[2 * j] = (uint8_t)balance_cost((blocks + 1) / 2);
        balance.cost[2 * j + 1] = (uint8_t)balance_cost(blocks / 2);
    }
    __syncwarp();
    balance_assign(balance, BALANCE_HALVES, clusters, me);
    if (lane == 0) {
        int chosen = BALANCE_IN_TURN;
        for (int way = BALANCE_BY_COST; way < BALANCE_WAYS; ++way)
            if (33 * balance.end[way] < 32 * balance.end[chosen]) chosen = way;
        balance.chosen = chosen;
    }
    __syncwarp();
}

#endif
