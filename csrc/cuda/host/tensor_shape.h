/* SPDX-License-Identifier: BSD-3-Clause */
/* tensor_shape.h: a tensor as TMA sees it. This header is C, because plans hold a TensorShape. */
#ifndef GPUKERN_CUDA_TENSOR_SHAPE_H
#define GPUKERN_CUDA_TENSOR_SHAPE_H

#include "../../core/internal.h"

enum {
    TENSOR_DIMS = 5
};

/* Dimension 0 has stride 1. Strides of dimensions 1 to 4 are in elements. Strides of dimensions of
 * size 1 are ignored. */
typedef struct TensorShape {
    const void *data;
    gk_dtype dtype;
    int64_t size[TENSOR_DIMS], stride[TENSOR_DIMS];
    bool tf32; /* float32 is rounded to tf32 while it is copied to shared memory */
} TensorShape;

/* True if the hardware can describe the tensor: multiples of 16 bytes, and sizes and strides
 * within its fields. */
static inline bool tensor_map_fits(TensorShape x) {
    const int64_t bits = gk_bits_of(x.dtype);
    bool good = (uintptr_t)x.data % 16 == 0;
    for (int d = 0; d < TENSOR_DIMS; ++d) {
        good = good && x.size[d] >= 1 && x.size[d] <= (int64_t)1 << 31;
        if (d == 0 || x.size[d] == 1) continue;
        good = good && x.stride[d] > 0 && x.stride[d] * bits % 128 == 0 &&
               x.stride[d] * bits < (int64_t)8 << 40;
    }
    return good;
}

#endif
