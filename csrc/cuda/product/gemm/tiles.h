/* SPDX-License-Identifier: BSD-3-Clause */
/* tiles.h: the tiles of instances.def as types, with which kernels are instantiated, and the tuned
 * numbers that only kernels read, with the measurement behind each. */
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
    /* Tiles of a cluster that lie in a row; 0: the plan chooses all or one for each call. */
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
/* Registers a thread of the producer and of the consumers. Three warpgroups start with 168 each. */
constexpr int producer_regs(bool ping_pong) { return ping_pong ? 40 : 56; }
constexpr int consumer_regs(bool ping_pong) { return ping_pong ? 232 : 224; }
static_assert(producer_regs(false) + 2 * consumer_regs(false) <= 3 * 168 &&
                  producer_regs(true) + 2 * consumer_regs(true) <= 3 * 168,
              "setmaxnreg.inc would wait for ever");

/* Largest ring in bytes: 227 KiB less the panels and split-K's exchange buffers. */
constexpr int MOST_RING = 4 * 48 * 1024;

/* ---- gemm_realign_sm90a ---------------------------------------------------------------------- */
/* With 32 registers an SM holds 2048 threads, which keep 32 KB of loads in flight. */
constexpr int REALIGN_THREADS = 256, REALIGN_PER_SM = 8;
/* Transposed tiles of 32-bit elements: 64 rows of 256 bytes are read and 64 written. 16 KiB of
 * shared memory, 16 loads in flight a thread. */
constexpr int REALIGN_TRANSPOSE = 64;

/* ---- gemm_skinny ----------------------------------------------------------------------------- */
/* 100 KB in flight on every SM hide memory's latency at 4.2 TB/s. More than 8 stages hide
 * nothing more. */
constexpr int stages_in(int bytes, int stage_bytes, int most) {
    return bytes / stage_bytes < most ? bytes / stage_bytes : most;
}
constexpr int skinny_stages(int stage_bytes, int other_bytes) {
    return stages_in(200 * 1024 - other_bytes, stage_bytes, 8);
}

#endif
