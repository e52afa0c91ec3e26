/* SPDX-License-Identifier: BSD-3-Clause */
/* ladder.h: one product, eighteen times: each rung of learn/ladder.md computes out = a b by one
 * idea more than the one before; rungs 14 to 18 stand between others.
 *
 * a [m][k]  b [k][n]  out [m][n]   bfloat16 or float32, dense rows, 16-byte aligned; float32 sums, one rounding
 * m, n, k: multiples of 8, at most LADDER_MOST_SIZE. A library of its own, for tests and
 * benchmarks: nothing of it is in libgpukern, and rungs 7 and 13 are rows of libgpukern's
 * tables. */
#ifndef GPUKERN_CUDA_LADDER_H
#define GPUKERN_CUDA_LADDER_H

#include "gpukern.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LADDER_MOST_SIZE = 1 << 20
};

typedef struct gk_ladder_rung {
    const char *name;
    const char *change;      /* against the rung before */
    const char *source;      /* file, from csrc/cuda/ */
    double predicted_tflops; /* at 4096 cubed on one H200, by learn/benchmarks/ladder_model.py,
                                before it was measured */
    int32_t after; /* 14 to 18: the rung that it stands behind; 0 for those that stand in order */
    int32_t arch;  /* 80: this and later ones; 90: this one alone */
} gk_ladder_rung;

/* Rung 1 is rungs[0]. */
GK_API const gk_ladder_rung *gk_ladder_rungs(int32_t *count);

/* What rungs 7 and 13 want for a size; 0 for the others. */
GK_API size_t gk_ladder_workspace_bytes(int32_t rung, int64_t m, int64_t n, int64_t k);

/* On the current device; launches on `stream` and never waits. gk_last_error() says why it
 * refused. */
GK_API gk_status gk_ladder_gemm(int32_t rung, const void *a, const void *b, void *out, int64_t m,
                                int64_t n, int64_t k, void *workspace, void *stream);

/* The same of float32 matrices, by rungs 1 to 5, 14 and 15: those without tensor cores. */
GK_API gk_status gk_ladder_gemm_f32(int32_t rung, const void *a, const void *b, void *out,
                                    int64_t m, int64_t n, int64_t k, void *stream);

#ifdef __cplusplus
}
#endif
#endif
