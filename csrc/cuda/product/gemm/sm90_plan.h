/* SPDX-License-Identifier: BSD-3-Clause */
/* sm90_plan.h: what the plan of a gemm on Hopper (sm90_plan.c) hands to its launch
 * (hopper_launch.cuh). */
#ifndef GPUKERN_CUDA_GEMM_SM90_PLAN_H
#define GPUKERN_CUDA_GEMM_SM90_PLAN_H

#include "operands.h"

enum {
    SM90_ROW_BYTES = 128 /* bytes of k in a row of an operand's tile in shared memory */
};

enum {      /* key of an instance */
    KEY_BM, /* rows and columns of a tile */
    KEY_BN,
    KEY_TILES,   /* tiles of a cluster */
    KEY_PERCENT, /* of the dense peak */
    KEY_SMEM,    /* bytes of shared memory */
    KEY_SPLITS,  /* blocks of a cluster that split k */
    KEY_TRAITS,
    KEY_BK
};
typedef enum Trait {
    SWAPAB = 1,
    PING_PONG = 2,
    NARROW = 4, /* for small N */
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

/* The result, or preact, as a tensor that TMA writes. */
static inline TensorShape result_of(const GemmProblem *p, bool swapab, bool preact) {
    const GemmEpilogue *const e = &p->epilogue;
    return operand_of(preact ? e->preact : e->out, e->out_dtype, swapab ? p->n : p->m,
                      swapab ? p->m : p->n, preact ? e->preact_row : e->out_row, 1, p,
                      preact ? p->preact_batch : p->out_batch, false);
}

/* True if results have the operands' dtype and rows of whole chunks of 16 bytes. TMA would write
 * beyond a last column that ends within a chunk. */
static inline bool whole_chunks(const GemmProblem *p, gk_dtype dtype, bool swapab) {
    const GemmEpilogue *const e = &p->epilogue;
    return e->out_dtype == dtype && e->out_vectors && gk_whole_chunks(dtype, swapab ? p->m : p->n);
}

/* The plan's own part. */
typedef struct HopperPlan {
    Operands operands; /* its p has the number of tiles */
    unsigned clusters; /* clusters to launch */
    /* Clusters' tiles that are one task each. Every other one is two tasks, halved along k. */
    unsigned whole;
    bool in_row; /* the tiles of a cluster form a row */
} HopperPlan;

#endif
