/* bwd_order.cuh: in which order a block of the Hopper backward takes its steps, and where its warps put dS, P and dQ. Plain
 * functions, which a CPU test walks too (tests/csrc/check_attn_sm90a.cpp). A thread counts over both warpgroups. */
#ifndef GPUKERN_CUDA_BWD_ORDER_CUH
#define GPUKERN_CUDA_BWD_ORDER_CUH

#include "../tile/layout.cuh"

/* Head after head of a group, of each the tiles [lo, lo + tiles) from lo + start on and around. */
struct BwdStep {
    int head, tile;

    constexpr GK_HD void next(int lo, int tiles, int start) {
        if (++tile == lo + tiles) tile = lo;
        if (tile == lo + start) ++head;
    }
};

/* The row and the column that a lane gives to stmatrix.x4 for eight columns n and n + 1 of its accumulators.
 * dS^T [128 keys][rows] is stored transposed, as dS [rows][keys]. */
constexpr GK_HD coord ds_place(int thread, int n) {
    const int lane = thread & 31;
    return {8 * n + (lane >> 4) * 8 + (lane & 7), (thread >> 5) * 16 + (lane >> 3 & 1) * 8};
}

/* P^T and dS^T [64 keys][rows] of the wide kernel lie as they are; a warpgroup has `rows` of the rows. */
constexpr GK_HD coord scores_place(int thread, int n, int rows) {
    const int lane = thread & 31;
    return {(thread >> 5 & 3) * 16 + (lane & 15), (thread >> 7) * rows + 8 * n + (lane >> 4) * 8};
}

/* dQ^T of a warp is [16 of d][n rows], a block of dq_sum; the last pass stores pairs of eight rows transposed. by_d: blocks
 * are of all rows, else blocks 4 .. 7 are of the second half of the rows. Row and column of dQ. */
constexpr GK_HD coord dq_place(int lane, int block, int pair, int rows, bool by_d) {
    return {(by_d ? 0 : (block >> 2) * rows) + 16 * pair + (lane >> 4) * 8 + (lane & 7),
            16 * (by_d ? block : block & 3) + (lane >> 3 & 1) * 8};
}

#endif
