/* SPDX-License-Identifier: BSD-3-Clause */
/* tensor_shape.cuh: a tensor as TMA sees it, and the numbers of its tensor map. Needs no CUDA. */
#ifndef GPUKERN_CUDA_TENSOR_SHAPE_CUH
#define GPUKERN_CUDA_TENSOR_SHAPE_CUH

#include "../kernels.h"
#include "../layout/tma_box.cuh"

enum {
    TENSOR_DIMS = 5
};

/* Dimension 0 is dense. Strides of dimensions 1 to 4 are in elements; those of dimensions of
 * size 1 are ignored. */
struct TensorShape {
    const void *data;
    gk_dtype dtype;
    int64_t size[TENSOR_DIMS], stride[TENSOR_DIMS];
    bool tf32; /* float32 is rounded to tf32 while it is copied to shared memory */
};

/* True if the hardware can describe the tensor: multiples of 16 bytes, and sizes and strides
 * within its fields. */
inline bool tensor_map_fits(const TensorShape &x) {
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

/* The fields of a tensor map. */
struct TensorMapFields {
    uint64_t size[TENSOR_DIMS], stride_bytes[TENSOR_DIMS - 1]; /* strides: of dimensions 1 .. 4 */
    uint32_t box[TENSOR_DIMS], step[TENSOR_DIMS];
    int swizzle_bytes; /* 0, 64 or 128 */
};

/* The fields for boxes with the layout `box` in shared memory. Its elements are the tensor's. */
inline TensorMapFields tensor_map_fields(const TensorShape &shape, const tma_box &box) {
    TensorMapFields f = {};
    for (int d = 0; d < TENSOR_DIMS; ++d) {
        f.size[d] = (uint64_t)shape.size[d];
        f.box[d] = d < 3 ? (uint32_t)box.size[d] : 1;
        f.step[d] = 1;
        /* A dimension of one element repeats the previous stride. */
        if (d > 0)
            f.stride_bytes[d - 1] = shape.size[d] > 1
                                        ? (uint64_t)gk_bytes_of(shape.dtype, shape.stride[d])
                                    : d > 1 ? f.stride_bytes[d - 2]
                                            : 16;
    }
    f.swizzle_bytes = box.swizzle_bytes;
    return f;
}

#endif
