/* SPDX-License-Identifier: BSD-3-Clause */
/* tensor_shape.cuh: computes the fields of a tensor map for TMA. It needs no CUDA, so tests run
 * it on the CPU. */
#ifndef GPUKERN_CUDA_TENSOR_SHAPE_CUH
#define GPUKERN_CUDA_TENSOR_SHAPE_CUH

#include "../kernels.h"
#include "../layout/tma_box.cuh"
#include "tensor_shape.h"

/* The fields of a tensor map. */
struct TensorMapFields {
    uint64_t size[TENSOR_DIMS], stride_bytes[TENSOR_DIMS - 1]; /* strides of dimensions 1 to 4 */
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
