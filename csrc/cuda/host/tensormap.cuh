/* SPDX-License-Identifier: BSD-3-Clause */
/* tensormap.cuh: descriptions of tensors for TMA. The host makes them and passes them to a
 * kernel by value. */
#ifndef GPUKERN_CUDA_TENSORMAP_CUH
#define GPUKERN_CUDA_TENSORMAP_CUH

#include <cuda.h> /* CUtensorMap and its enums; nothing of the driver is linked */

#include "tensor_shape.cuh"

/* Makes a map whose boxes have the layout `box` in shared memory, with zeros outside the tensor. */
gk_status make_tensor_map(const char *op, const TensorShape &shape, const smem_box &box,
                          CUtensorMap *map);

#endif
