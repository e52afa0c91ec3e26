/* SPDX-License-Identifier: BSD-3-Clause */
/* weight_skinny.h: the parts of weight_skinny.c that weight_gemm.c uses for small groups: the plan
 * of a product, the reordering of its activations, and its tasks. */
#ifndef GPUKERN_CPU_WEIGHT_SKINNY_H
#define GPUKERN_CPU_WEIGHT_SKINNY_H

#include "vec.h"

enum {
    /* most rows of a; at 16 rows weight_gemm is as fast, because it decodes once for 128 rows */
    SKINNY_ROWS = 8
};

typedef struct skinny_plan {
    int64_t m, n, k, tiles_k;
    int64_t row_bytes, worker_bytes; /* of one row of the reordered a, and of each worker */
    int group_log2;
} skinny_plan;

typedef struct skinny_job {
    const gk_weight_gemm_args *g;
    skinny_plan p;
    float *a; /* [m][tile of k][vector of 4][WORDS] */
    float global_scale;
} skinny_job;

typedef struct gk_skinny_isa {
    /* Plans the product of m rows of g->a. False if another kernel must serve it. */
    bool (*plan)(const gk_weight_gemm_args *g, int64_t m, skinny_plan *p);
    void (*order_row)(const skinny_job *jb, int64_t i);
    /* Columns [64 t, 64 t + 64) of the result. memory: a worker's, of worker_bytes. */
    void (*task)(const skinny_job *jb, int64_t t, char *memory);
} gk_skinny_isa;
extern const gk_skinny_isa SYM(gk_skinny_isa);

#endif
