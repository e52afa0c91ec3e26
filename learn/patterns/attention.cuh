// SPDX-License-Identifier: BSD-3-Clause
// attention: what the two files of the attention ladder share. The input holds q, k and v as
// [3][heads][length][64]; out is [heads][length][64].
#ifndef ATTENTION_CUH
#define ATTENTION_CUH

#include "measure.cuh"

enum {
    D = 64 // head_dim
};
static constexpr float SCALE = 0.125f; // 1 / sqrt(D)
static constexpr float LOG2E = 1.44269504f;

// The pattern's size encodes the problem: rows is the length, cols is 3 * D * heads.
static inline int heads_of(int cols) { return cols / (3 * D); }
static inline int out_size(int rows, int cols) { return rows * cols / 3; }
static inline double flops_of(int rows, int cols) { return 4.0 * rows * rows * D * heads_of(cols); }

struct Head {
    const float *q, *k, *v;
};
static __host__ __device__ inline Head head_of(const float *in, int length, int heads, int head) {
    const size_t one = (size_t)length * D;
    return {in + head * one, in + (heads + head) * one, in + (2 * heads + head) * one};
}

// Inputs are multiples of 1 / 16 in -1 .. 1, which bfloat16 represents exactly.
static inline float number(int i) {
    return (float)((int)((unsigned)i * 2654435761u >> 27) - 15) / 16;
}

template <int MILLIONTHS> static bool good(const float *in, const float *out, int rows, int cols) {
    double *weight = (double *)malloc(rows * sizeof *weight), worst = 0;
    for (int h = 0; h < heads_of(cols); ++h) {
        const Head x = head_of(in, rows, heads_of(cols), h);
        for (int i = 0; i < rows; ++i) {
            double sum = 0;
            for (int j = 0; j < rows; ++j) {
                double score = 0;
                for (int d = 0; d < D; ++d) score += x.q[i * D + d] * x.k[j * D + d];
                sum += weight[j] = exp(score * SCALE);
            }
            for (int d = 0; d < D; ++d) {
                double o = 0;
                for (int j = 0; j < rows; ++j) o += weight[j] * x.v[j * D + d];
                const double error = fabs(out[((size_t)h * rows + i) * D + d] - o / sum);
                if (!(error <= worst)) worst = error; // NaN too
            }
        }
    }
    free(weight);
    return within(worst, MILLIONTHS * 1e-6);
}

#endif
