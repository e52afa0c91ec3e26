/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: the tiles of instances.def as types, with which gemm's kernels are instantiated. It also
 * has the tuned numbers that only kernels read, with the measurement behind each one. prices.h has
 * those that plans read. */
#ifndef GPUKERN_CUDA_GEMM_TILES_H
#define GPUKERN_CUDA_GEMM_TILES_H

#include "prices.h"

#include <stdint.h>

/* ---- types of tiles; instances.def says what their numbers mean ------------------------------ */
template <int M, int N, int K, int S, int WARP_M, int WARP_N, int BLOCKS> struct SmTile {
    static constexpr int BM = M, BN = N, BK = K, STAGES = S, WM = WARP_M, WN = WARP_N;
    static constexpr int THREADS = M / WARP_M * (N / WARP_N) * 32;
    static constexpr int PER_SM = BLOCKS; /* blocks that registers let an SM hold */
};
#define SM80_16(type, name, BM, BN, BK, STAGES, WM, WN, PER_SM, ...) \
    typedef SmTile<BM, BN, BK, STAGES, WM, WN, PER_SM> type;
#define SM80_TF32 SM80_16

template <int M, int N, int S, int WARPGROUPS, int WARP_PANELS, int CLUSTER, int OF_K, int STEPS>
struct HopperTile {
    static constexpr int BM = M, BN = N, STAGES = S, WGS = WARPGROUPS, PANELS = WARP_PANELS;
    static constexpr int TILES = CLUSTER, SPLITS = OF_K, K64 = STEPS;
    /* Columns of tiles of a cluster. 0: the plan chooses for each call whether the tiles of a
     * cluster form a row or a column. */
    static constexpr int ACROSS = CLUSTER == 8 ? 2 : 0;
    static constexpr bool SWAP_AB = false, PING_PONG = false;
};
#define SM90_COOP(type, name, BM, BN, STAGES, WGS, PANELS, TILES, SPLITS, K64, ...) \
    struct type : HopperTile<BM, BN, STAGES, WGS, PANELS, TILES, SPLITS, K64> {};
#define SM90_NARROW SM90_COOP
#define SM90_PING_PONG(type, name, BM, BN, STAGES, WGS, PANELS, TILES, SPLITS, K64, ...) \
    struct type : HopperTile<BM, BN, STAGES, WGS, PANELS, TILES, SPLITS, K64> {          \
        static constexpr bool PING_PONG = true;                                          \
    };
#define SM90_SWAP_AB(type, name, BM, BN, STAGES, WGS, PANELS, TILES, SPLITS, K64, ...) \
    struct type : HopperTile<BM, BN, STAGES, WGS, PANELS, TILES, SPLITS, K64> {        \
        static constexpr bool SWAP_AB = true;                                          \
    };
#define SM90_TF32 SM90_COOP
#define SM90_TF32_SWAP_AB SM90_SWAP_AB

#define PLAIN(type, name, dtype, T, M, N, K, S, IN_M, IN_N, BLOCKS, SUMS, ...)                   \
    struct type {                                                                                \
        static constexpr int BM = M, BN = N, BK = K, STAGES = S, WARPS_M = IN_M, WARPS_N = IN_N, \
                             PER_SM = BLOCKS;                                                    \
        static constexpr bool TWO_SUMS = SUMS;                                                   \
    };
#include "instances.def"

/* ---- Hopper's gemm --------------------------------------------------------------------------- */
/* Registers of a thread of the producer and of the consumers, for setmaxnreg. A thread of three
 * warpgroups starts with 168. */
constexpr int producer_regs(bool ping_pong) { return ping_pong ? 40 : 56; }
constexpr int consumer_regs(bool ping_pong) { return ping_pong ? 232 : 224; }
static_assert(producer_regs(false) + 2 * consumer_regs(false) <= 3 * 168 &&
                  producer_regs(true) + 2 * consumer_regs(true) <= 3 * 168,
              "setmaxnreg.inc would wait for ever");

/* Largest ring in bytes: 227 KiB less the panels and split-K's exchange buffers. */
constexpr int MOST_RING = 4 * 48 * 1024;

/* ---- gemm_realign_sm90a ---------------------------------------------------------------------- */
/* The kernel has 32 registers, so an SM holds 2048 threads. They keep 32 KB of loads in flight. */
constexpr int REALIGN_THREADS = 256, REALIGN_PER_SM = 8;
/* Rows and columns of a tile of 32-bit elements that is transposed. A tile reads 64 rows of 256
 * bytes and writes as many. It needs 16 KiB of shared memory, and each thread has 16 loads in
 * flight. */
constexpr int REALIGN_TRANSPOSE = 64;

/* ---- gemm_skinny ----------------------------------------------------------------------------- */
/* Stages of a warp's ring. 100 KB in flight on every SM hide the latency of memory at 4.2 TB/s.
 * More than 8 stages gain nothing. */
constexpr int stages_in(int bytes, int stage_bytes, int most) {
    return bytes / stage_bytes < most ? bytes / stage_bytes : most;
}
constexpr int skinny_stages(int stage_bytes, int other_bytes) {
    return stages_in(200 * 1024 - other_bytes, stage_bytes, 8);
}

#endif
