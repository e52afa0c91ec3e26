/* SPDX-License-Identifier: BSD-3-Clause */
/* scores.cuh: the mask and the biases of an attention call (gk_attn_scores), read one pair (i, j)
 * of query and key at a time.
 *
 *   s_ij = score(q_i k_j) + bias_ij + distance_bias[j - i + Sq - 1]
 *
 * A pair is hidden if the mask hides it, or if one of its biases is -inf or the lowest finite
 * number of the bias's dtype. The plain kernels use this file, and the mma.sync kernels extend
 * Scores in scores_mma.cuh. Dense calls only. */
#ifndef GPUKERN_CUDA_SCORES_CUH
#define GPUKERN_CUDA_SCORES_CUH

#include "../../core/attn_mask.h"
#include "../tile/convert.cuh"
#include "problem.cuh"

#include <float.h>

struct Scores {
    const int32_t *mask;           /* NULL = none */
    int64_t mask_batch, mask_head; /* strides of the mask; 0 where it broadcasts */
    gk_mask_layout at;
    gk_mask_store store;
    int seq_q, seq_k;
    const void *bias; /* NULL = none; strides are 0 where it broadcasts */
    int64_t bias_stride[4];
    gk_dtype bias_dtype;
    const void *distance; /* distance_bias, NULL = none; float, or double for float64 */
    int64_t distance_head, distance_step;
    bool any; /* the call has a mask or a bias */
};

/* The mask and the biases of one head of one sequence. */
template <class W> struct HeadScores {
    gk_mask mask; /* flags NULL = none */
    const char *bias;
    int64_t row, col; /* strides of bias */
    gk_dtype dtype;
    const W *distance; /* the element for j = i */
    int64_t distance_step;

    /* Reads the bias of row i and key j. Returns false if the bias hides the key. */
    __device__ __forceinline__ bool read_bias(int i, int j, W *value) const {
        const int64_t at = i * row + j * col;
        switch (dtype) {
        case GK_F32:
            *value = (W)((const float *)bias)[at];
            return *value > (W)-FLT_MAX || *value != *value;
        case GK_F64:
            *value = (W)((const double *)bias)[at];
            return *value > (W)-DBL_MAX || *value != *value;
        case GK_F16: *value = (W)to_acc(((const __half *)bias)[at]); return !(*value <= (W)-65504);
        case GK_BF16:
            *value = (W)to_acc(((const __nv_bfloat16 *)bias)[at]);
            return !(*value <= (W)-0x1.fep127);
        default: return false; /* check_scores refuses other dtypes */
        }
    }
    /* Adds the biases of row i and key j to s. Returns false if the key is hidden. */
    __device__ __forceinline__ bool add(int i, int j, W *s) const {
        if (mask.flags && !gk_mask_sees(&mask, i, j)) return false;
        W value;
        if (bias) {
            if (!read_bias(i, j, &value)) return false;
            *s += value;
        }
        if (distance) {
            value = distance[(j - i) * distance_step];
            if (value <= (sizeof(W) == 8 ? (W)-DBL_MAX : (W)-FLT_MAX)) return false;
            *s += value;
        }
        return true;
    }
};

__device__ __forceinline__ size_t bytes_of_bias(gk_dtype dtype) {
    return dtype == GK_F64 ? 8 : dtype == GK_F32 ? 4 : 2;
}

template <class W>
__device__ __forceinline__ HeadScores<W> head_scores(const Scores &x, int b, int head) {
    HeadScores<W> y = {};
    if (x.mask) {
        const int32_t *data = x.mask + b * x.mask_batch + head * x.mask_head;
        y.mask = gk_mask_at(data, &x.at, x.store, x.seq_q, x.seq_k);
    }
    if (x.bias) {
        y.bias = (const char *)x.bias +
                 (b * x.bias_stride[0] + head * x.bias_stride[1]) * bytes_of_bias(x.bias_dtype);
        y.row = x.bias_stride[2];
        y.col = x.bias_stride[3];
        y.dtype = x.bias_dtype;
    }
    if (x.distance) {
        y.distance =
            (const W *)x.distance + head * x.distance_head + (x.seq_q - 1) * x.distance_step;
        y.distance_step = x.distance_step;
    }
    return y;
}

/* ---- host ------------------------------------------------------------------------------------ */
inline Scores scores_of(const gk_attn_scores *x, int64_t seq_q, int64_t seq_k) {
    Scores y = {};
    if (!x) return y;
    y.any = true;
    y.seq_q = (int)seq_q;
    y.seq_k = (int)seq_k;
    const auto step = [](const gk_tensor *t, int d) {
        return t->shape[d] == 1 ? (int64_t)0 : t->stride[d];
    };
    if (x->mask) {
        y.mask = (const int32_t *)x->mask->data;
        y.store = x->store;
        y.mask_batch = step(x->mask, 0);
        y.mask_head = step(x->mask, 1);
        y.at = gk_mask_layout_of(x->store, seq_q, seq_k, false);
    }
    if (x->bias) {
        y.bias = x->bias->data;
        y.bias_dtype = x->bias->dtype;
        for (int d = 0; d < 4; ++d) y.bias_stride[d] = step(x->bias, d);
    }
    if (x->distance_bias) {
        y.distance = x->distance_bias->data;
        y.distance_head = step(x->distance_bias, 0);
        y.distance_step = x->distance_bias->stride[1];
    }
    return y;
}

#endif
