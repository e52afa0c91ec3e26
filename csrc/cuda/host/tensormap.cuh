/* SPDX-License-Identifier: BSD-3-Clause */
/* tensormap.cuh: makes tensor maps, which describe tensors to TMA. The host makes them and passes
 * them to a kernel by value. */
#ifndef GPUKERN_CUDA_TENSORMAP_CUH
#define GPUKERN_CUDA_TENSORMAP_CUH

#include <cuda.h> /* CUtensorMap and its enums; nothing of the driver is linked */

#include "tensor_shape.cuh"

/* Makes a tensor map whose boxes have the layout `box` in shared memory. Elements outside the
 * tensor are read as zeros. */
gk_status make_tensor_map(const char *op, const TensorShape &shape, const smem_box &box,
                          CUtensorMap *map);

#endif
