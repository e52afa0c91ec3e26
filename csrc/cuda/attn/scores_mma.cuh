/* SPDX-License-Identifier: BSD-3-Clause */
/* scores_mma.cuh: the mask and the biases of an attention call (scores.cuh) for tiles of scores in
 * mma accumulators. The mma.sync kernels fwd_sm80.cuh and bwd_sm80.cuh use it. It adds the biases
 * to the scores, and the score of a hidden pair becomes -inf.
 *
 * A tile lies in one block of a stored mask (../../core/attn_mask.h). A lane reads the mask bits of
 * a row as one 32-bit word, in the order of the lane's accumulators: bit 2 n + e is column 8 n + 2
 * (lane % 4) + e of the block. Biases may have any strides. They are read directly from global
 * memory. */
#ifndef GPUKERN_CUDA_SCORES_MMA_CUH
#define GPUKERN_CUDA_SCORES_MMA_CUH

#include "drop.cuh"
#include "forward/fwd_score.cuh" /* columns_in */
#include "scores.cuh"
#include "softmax.cuh"

struct MmaScores : Scores {
    int tiles_k;
    float least; /* a bias of at most this value hides the key */
    bool wide;   /* the bias is float32; otherwise it has the dtype of q */
    bool paired; /* elements 2 i and 2 i + 1 of a row of the bias can be read by one aligned load */
};

/* The parameters of a kernel with a mask or a bias: those of the kernel without (P), and scores. */
template <class P> struct Scored : P {
    MmaScores scores;
    /* Forward only: one byte in the workspace for each tile of queries, cleared before the launch.
     * The kernel sets it if the tile's result holds a NaN or inf (fwd_mend.cuh). */
    uint8_t *spoilt;
};

template <class P> __host__ __device__ inline float drop_factor(const Scored<P> &p) {
    return drop_factor((const P &)p);
}

__device__ __forceinline__ const int32_t *mask_of(const MmaScores &x, int b, int head) {
    return x.mask + b * x.mask_batch + head * x.mask_head;
}

/* The flag of the mask's block that holds query i and key j. data: what mask_of returns. */
__device__ __forceinline__ int block_flag(const MmaScores &x, const int32_t *data, int i, int j) {
    return __ldg((const uint8_t *)(data + x.at.flags) + i / GK_MASK_TILE * x.tiles_k +
                 j / GK_MASK_TILE);
}

/* ---- bits of a partial block ----------------------------------------------------------------- */
/* Bit 2 n + e of the result is 1 if query i sees key `first` + 8 n + e. first: the block's first
 * key plus 2 (lane % 4). */
__device__ __forceinline__ uint32_t bits_of_query(const MmaScores &x, const int32_t *data, int flag,
                                                  int i, int first) {
    if ((flag & 3) == GK_BLOCK_WORDS) {
        const int64_t tile = i / GK_MASK_TILE, place = x.store == GK_MASK_DENSE
                                                           ? tile * x.tiles_k + first / GK_MASK_TILE
                                                           : tile * GK_MASK_KEPT + (flag >> 2);
        return (uint32_t)__ldg(data + x.at.words + place * GK_MASK_BLOCK_INTS +
                               gk_mask_word_of(i % GK_MASK_TILE) + first % GK_MASK_TILE);
    }
    const int4 *source = (const int4 *)(data + x.at.source);
    if (x.store == GK_MASK_RANGES) {
        const int4 a = __ldg(source + min(i, x.seq_q - 1));
        return columns_in<32>(a.x - first, a.y - first) | columns_in<32>(a.z - first, a.w - first);
    }
    uint32_t bits = 0;
#pragma unroll 1
    for (int c = 0; c < 32; ++c) {
        const int4 y = __ldg(source + min(first + c / 2 * 8 + c % 2, x.seq_k - 1));
        const bool hidden = (i >= y.x && i < y.y) || (i >= y.z && i < y.w);
        bits |= (uint32_t)!hidden << c;
    }
    return bits;
}

/* Bit 2 n + e of the result is 1 if query `first` + 8 n + e sees key j. Only a dense store has a
 * fixed place for the transposed words of every block. The other stores keep few of them, and only
 * the transposed lists say which, so the bits are computed from `source` instead. */
__device__ __forceinline__ uint32_t bits_of_key(const MmaScores &x, const int32_t *data, int j,
                                                int first) {
    if (x.store == GK_MASK_DENSE) {
        const int64_t place = (int64_t)(j / GK_MASK_TILE) * x.at.tiles_q + first / GK_MASK_TILE;
        return (uint32_t)__ldg(data + x.at.words_t + place * GK_MASK_BLOCK_INTS +
                               gk_mask_word_of(j % GK_MASK_TILE) + first % GK_MASK_TILE);
    }
    const int4 *source = (const int4 *)(data + x.at.source);
    if (x.store == GK_MASK_COLUMNS) {
        const int4 c = __ldg(source + min(j, x.seq_k - 1));
        return ~(columns_in<32>(c.x - first, c.y - first) |
                 columns_in<32>(c.z - first, c.w - first));
    }
    uint32_t bits = 0;
#pragma unroll 1
    for (int c = 0; c < 32; ++c) {
        const int4 y = __ldg(source + min(first + c / 2 * 8 + c % 2, x.seq_q - 1));
        bits |= (uint32_t)((j >= y.x && j < y.y) || (j >= y.z && j < y.w)) << c;
    }
    return bits;
}

/* ---- biases ---------------------------------------------------------------------------------- */
template <class T>
__device__ __forceinline__ const char *bias_of(const MmaScores &x, int b, int h) {
    return (const char *)x.bias +
           (b * x.bias_stride[0] + h * x.bias_stride[1]) * (x.wide ? 4 : (int)sizeof(T));
}
template <class T>
__device__ __forceinline__ float bias_at(const MmaScores &x, const char *from, int64_t at) {
    return x.wide ? __ldg((const float *)from + at) : to_f32(((const T *)from)[at]);
}
/* Reads elements `at` and `at` + 1 by one load. */
template <class T>
__device__ __forceinline__ float2 bias_pair(const MmaScores &x, const char *from, int64_t at) {
    return x.wide ? __ldg((const float2 *)((const float *)from + at))
                  : unpack2<T>(__ldg((const unsigned *)((const T *)from + at)));
}

/* The element of a head's distance bias for j = i. */
__device__ __forceinline__ const float *distances_of(const MmaScores &x, int head) {
    return (const float *)x.distance + head * x.distance_head + (x.seq_q - 1) * x.distance_step;
}

/* ---- forward: rows are queries --------------------------------------------------------------- */
/* Adds the biases to the scores s [M][N][4] in natural units, and sets hidden pairs to -inf. row0,
 * key0: query and key of the lane's s[0][0][0]. Rows and keys past the end read the last one's
 * bias: these keys are hidden already, and these rows are not stored. */
template <class T, int M, int N>
__device__ __forceinline__ void add_scores(float (&s)[M][N][4], const MmaScores &x, int b, int head,
                                           int row0, int key0) {
    if (x.distance) {
        const float *from = distances_of(x, head);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = min(row0 + 16 * m + 8 * r, x.seq_q - 1);
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const int j = min(key0 + 8 * n + e, x.seq_k - 1);
                        const float v = __ldg(from + (j - i) * x.distance_step);
                        float &y = s[m][n][2 * r + e];
                        y = v <= -FLT_MAX ? -INFINITY : y + v;
                    }
            }
    }
    if (x.bias && x.bias_stride[2] == 0) { /* the bias is the same for all queries */
        const char *from = bias_of<T>(x, b, head);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int j = min(key0 + 8 * n + e, x.seq_k - 1);
                const float v = bias_at<T>(x, from, j * x.bias_stride[3]);
                const bool hides = v <= x.least;
#pragma unroll
                for (int m = 0; m < M; ++m)
#pragma unroll
                    for (int r = 0; r < 2; ++r) {
                        float &y = s[m][n][2 * r + e];
                        y = hides ? -INFINITY : y + v;
                    }
            }
    } else if (x.bias) {
        const char *from = bias_of<T>(x, b, head);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = min(row0 + 16 * m + 8 * r, x.seq_q - 1);
                const int64_t row = i * x.bias_stride[2];
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    float2 v;
                    if (x.paired) {
                        v = bias_pair<T>(x, from, row + min(key0 + 8 * n, x.seq_k - 2));
                    } else {
                        const int j = key0 + 8 * n, last = x.seq_k - 1;
                        v.x = bias_at<T>(x, from, row + min(j, last) * x.bias_stride[3]);
                        v.y = bias_at<T>(x, from, row + min(j + 1, last) * x.bias_stride[3]);
                    }
                    float *y = &s[m][n][2 * r];
                    y[0] = v.x <= x.least ? -INFINITY : y[0] + v.x;
                    y[1] = v.y <= x.least ? -INFINITY : y[1] + v.y;
                }
            }
    }
    if (x.mask) {
        const int32_t *data = mask_of(x, b, head);
        const int flag = block_flag(x, data, row0, key0);
        if ((flag & 3) > GK_BLOCK_FULL) {
            const int first = key0 / GK_MASK_TILE * GK_MASK_TILE + key0 % 8,
                      skip = key0 % GK_MASK_TILE / 8 * 2;
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const uint32_t bits =
                        bits_of_query(x, data, flag, row0 + 16 * m + 8 * r, first) >> skip;
#pragma unroll
                    for (int n = 0; n < N; ++n)
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            s[m][n][2 * r + e] =
                                bits >> (2 * n + e) & 1 ? s[m][n][2 * r + e] : -INFINITY;
                }
        }
    }
}

/* An OnlineSoftmax that decides for each row alone whether its maximum changes. OnlineSoftmax
 * changes the maxima of all rows of a warp if one has grown. With a mask, the bits of a row would
 * then depend on the masks of other rows. */
template <int M> struct LoneSoftmax : OnlineSoftmax<M> {
    template <int N, int ND>
    __device__ __forceinline__ void step(float (&s)[M][N][4], float (&o)[M][ND][4]) {
        float highest[M][2];
        bool grown = false;
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float x = s[m][0][2 * r];
#pragma unroll
                for (int n = 0; n < N; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                const float before = this->peak[m][r], top = fmaxf(quad_max(x), before);
                /* -inf - -inf is NaN, which counts as not grown */
                const bool own = (top - before) * LOG2_E > SOFTMAX_SLACK_LOG2;
                highest[m][r] = own ? top : before;
                grown |= own;
            }
        if (__any_sync(0xffffffffu, grown)) this->rescale(highest, o, LOG2_E);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float peak = this->peak[m][r],
                            shift = peak == -INFINITY ? 0.f : peak * LOG2_E;
                float sum0 = 0, sum1 = 0;
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    s[m][n][2 * r] = ex2_approx_ftz(fmaf(s[m][n][2 * r], LOG2_E, -shift));
                    s[m][n][2 * r + 1] = ex2_approx_ftz(fmaf(s[m][n][2 * r + 1], LOG2_E, -shift));
                    sum0 += s[m][n][2 * r];
                    sum1 += s[m][n][2 * r + 1];
                }
                this->total[m][r] += sum0 + sum1;
            }
    }
};

/* ---- backward: rows are keys ----------------------------------------------------------------- */
/* Computes the addends of the scores of the n-th group of eight queries: the sum of the biases, or
 * -inf for a hidden pair.
 *
 * i, j: query and key of the lane's first pair in the group. bits: the mask bits of the lane's
 * keys; bit 2 n belongs to query i. of_keys: the bias of each key, if it is the same for all
 * queries. */
template <class T, int M>
__device__ __forceinline__ void addends_of(float (&add)[M][4], const MmaScores &x, int b, int head,
                                           int i, int j, const uint32_t (&bits)[M][2],
                                           const float (&of_keys)[M][2], int n) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) add[m][r] = of_keys[m][r / 2];
    if (x.bias && x.bias_stride[2] != 0) {
        const char *from = bias_of<T>(x, b, head);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int row = min(i + r % 2, x.seq_q - 1),
                          key = min(j + 16 * m + r / 2 * 8, x.seq_k - 1);
                const float v =
                    bias_at<T>(x, from, row * x.bias_stride[2] + key * x.bias_stride[3]);
                add[m][r] += v <= x.least ? -INFINITY : v;
            }
    }
    if (x.distance) {
        const float *from = distances_of(x, head);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int row = min(i + r % 2, x.seq_q - 1),
                          key = min(j + 16 * m + r / 2 * 8, x.seq_k - 1);
                const float v = __ldg(from + (key - row) * x.distance_step);
                add[m][r] += v <= -FLT_MAX ? -INFINITY : v;
            }
    }
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r)
            if (!(bits[m][r / 2] >> (2 * n + r % 2) & 1)) add[m][r] = -INFINITY;
}

/* ---- host ------------------------------------------------------------------------------------ */
inline MmaScores mma_scores_of(const gk_attn_scores *x, int64_t seq_q, int64_t seq_k) {
    MmaScores y = {};
    (Scores &)y = scores_of(x, seq_q, seq_k);
    if (x->mask) y.at = gk_mask_layout_of(x->store, seq_q, seq_k, true);
    y.tiles_k = (int)y.at.tiles_k;
    if (x->bias) {
        const gk_tensor &t = *x->bias;
        y.wide = t.dtype == GK_F32;
        y.least = y.wide ? -FLT_MAX : t.dtype == GK_F16 ? -65504.f : -0x1.fep127f;
        const int64_t *s = y.bias_stride;
        y.paired = s[3] == 1 && seq_k % 2 == 0 && (s[0] | s[1] | s[2]) % 2 == 0 &&
                   (uintptr_t)t.data % (y.wide ? 8 : 4) == 0;
    }
    return y;
}

#endif
