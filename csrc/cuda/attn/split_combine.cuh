/* SPDX-License-Identifier: BSD-3-Clause */
/* split_combine.cuh: merges attention over parts of the keys. See split_combine.cu. */
#ifndef GPUKERN_CUDA_SPLIT_COMBINE_CUH
#define GPUKERN_CUDA_SPLIT_COMBINE_CUH

#include "../host/launch.cuh"

/* The index of a row in lse, which is dense, is (x * size_y + y) * size_z + z. The offsets of out
 * and of the sink follow from x, y and z. */
struct SplitCombine {
    /* [splits][rows][head_dim_v], each normalised; not read if its lse is -inf */
    const float *out_splits;
    const float *lse_splits; /* [splits][rows], natural logarithm, without the sink */
    int splits;
    int64_t rows;
    int head_dim_v;
    void *out;  /* float32, bfloat16 or float16; columns dense */
    float *lse; /* NULL = not wanted */
    int size_y, size_z;
    int64_t out_x, out_y, out_z; /* strides of out, elements */
    const void *sinks;           /* one for each head; NULL = none */
    gk_dtype sinks_dtype;        /* float32 or out's */
    int64_t sink_y, sink_z;      /* strides; one of them is 0 */
    /* float32 only: out and lse hold one more part, which comes first */
    bool accumulates;
};

gk_status split_combine(const char *op, const gk_context *ctx, gk_dtype dtype,
                        const SplitCombine &p);

/* Bytes of the splits in the workspace: out_splits first, then lse_splits. */
inline size_t split_combine_bytes(int64_t splits, int64_t rows, int64_t head_dim_v) {
    return (size_t)(splits * rows * (head_dim_v + 1)) * sizeof(float);
}

#endif
