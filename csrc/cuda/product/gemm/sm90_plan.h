/* SPDX-License-Identifier: BSD-3-Clause */
/* sm90_plan.h: the plan of a gemm on Hopper. sm90_plan.c fills it in, and hopper_launch.cuh
 * launches it. The key of an instance is explained here, too. */
#ifndef GPUKERN_CUDA_GEMM_SM90_PLAN_H
#define GPUKERN_CUDA_GEMM_SM90_PLAN_H

#include "operands.h"

enum {
    SM90_ROW_BYTES = 128 /* bytes of k in a row of an operand's tile in shared memory */
};

enum { /* key of an instance; BM, BN and BK are the tile's rows, columns and k of a stage */
    KEY_BM,
    KEY_BN,
    KEY_TILES,   /* tiles of a cluster */
    KEY_PERCENT, /* percent of the dense peak that the products reach */
    KEY_SMEM,    /* bytes of shared memory */
    KEY_SPLITS,  /* blocks of a cluster that split k */
    KEY_TRAITS,
    KEY_BK
};
typedef enum Trait {
    SWAPAB = 1,
    PING_PONG = 2,
    NARROW = 4, /* narrow tiles, for small N */
    HALVES = 8, /* the tiles of the last wave may be halved along k */
    GRID = 16   /* a cluster has two columns of tiles and shares both operands */
} Trait;

/* Traits of a cooperative instance with wgs consumer warpgroups and clusters of `tiles` tiles. */
#define COOP_TRAITS(wgs, tiles) \
    (((wgs) == 2 && (tiles) == 2 ? HALVES : 0) | ((tiles) == 8 ? GRID : 0))

static inline bool is(const gk_cuda_instance *instance, Trait trait) {
    return instance->key[KEY_TRAITS] & trait;
}

/* Blocks of one cluster of an instance. */
static inline int cluster_of(const gk_cuda_instance *instance) {
    return instance->key[KEY_TILES] * instance->key[KEY_SPLITS];
}

/* The result, or with `preact` the pre-activation, as a tensor that TMA writes. */
static inline TensorShape result_of(const GemmProblem *p, bool swapab, bool preact) {
    const GemmEpilogue *const e = &p->epilogue;
    return operand_of(preact ? e->preact : e->out, e->out_dtype, swapab ? p->n : p->m,
                      swapab ? p->m : p->n, preact ? e->preact_row : e->out_row, 1, p,
                      preact ? p->preact_batch : p->out_batch, false);
}

/* True if results have the operands' dtype and rows of whole chunks of 16 bytes. If the last column
 * ended within a chunk, TMA would write beyond it. */
static inline bool whole_chunks(const GemmProblem *p, gk_dtype dtype, bool swapab) {
    const GemmEpilogue *const e = &p->epilogue;
    return e->out_dtype == dtype && e->out_vectors && gk_whole_chunks(dtype, swapab ? p->m : p->n);
}

/* The part of gk_plan that Hopper's gemm defines. */
typedef struct HopperPlan {
    Operands operands; /* operands.p has the numbers of tiles */
    unsigned clusters; /* clusters to launch */
    /* The first `whole` tiles of clusters are one task each. Every later one is halved along k and
     * is two tasks. */
    unsigned whole;
    bool in_row; /* the tiles of a cluster form a row */
} HopperPlan;

#endif
