/* SPDX-License-Identifier: BSD-3-Clause */
/* ladder.h: one product, eighteen times. Each rung of learn/ladder.md computes out = a b and adds
 * one idea to the rung before. Rungs 14 to 18 stand between or behind earlier ones.
 *
 * a [m][k], b [k][n] and out [m][n] are bfloat16 or float32 with dense rows, 16-byte aligned. Sums
 * are float32, and results are rounded once. m, n and k are multiples of 8, at most
 * LADDER_MOST_SIZE.
 *
 * The ladder is a library of its own for tests and benchmarks; libgpukern contains none of it.
 * Rungs 7 and 13 are instances of libgpukern's tables. */
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
    const char *change;      /* what changed against the rung before */
    const char *source;      /* ladder/X.cu in learn/, or gemm/X.cu in csrc/cuda/product/ */
    double predicted_tflops; /* at 4096 cubed on one H200, by learn/benchmarks/ladder_model.py,
                                before it was measured */
    int32_t after; /* of rungs 14 to 18, the rung that it stands behind; 0 for the others */
    int32_t arch;  /* 80: compute capability 8.0 and later; 90: 9.0 only */
} gk_ladder_rung;

/* The table of the rungs; rung 1 is element 0. */
GK_API const gk_ladder_rung *gk_ladder_rungs(int32_t *count);

/* Bytes of workspace that rungs 7 and 13 need at a size; 0 for the other rungs. */
GK_API size_t gk_ladder_workspace_bytes(int32_t rung, int64_t m, int64_t n, int64_t k);

/* Launches a rung on `stream` of the current device and returns without waiting. If it refuses the
 * call, gk_last_error() says why. */
GK_API gk_status gk_ladder_gemm(int32_t rung, const void *a, const void *b, void *out, int64_t m,
                                int64_t n, int64_t k, void *workspace, void *stream);

/* The same for float32 matrices. Only the rungs without tensor cores serve it: 1 to 5, 14, 15. */
GK_API gk_status gk_ladder_gemm_f32(int32_t rung, const void *a, const void *b, void *out,
                                    int64_t m, int64_t n, int64_t k, void *stream);

#ifdef __cplusplus
}
#endif
#endif
