/* tensormap.cuh: descriptions of tensors for tma, made on the host and handed to a kernel by value. */
#ifndef GPUKERN_CUDA_TENSORMAP_CUH
#define GPUKERN_CUDA_TENSORMAP_CUH

#include <cuda.h> /* CUtensorMap and its enums; nothing of the driver is linked */

#include "../kernels.h"

enum {
    TENSOR_DIMS = 5
};

/* Dimension 0 is dense. Strides in elements, of dimensions 1 .. 4; those of size 1 may be anything. */
struct TensorShape {
    const void *data;
    gk_dtype dtype;
    int64_t size[TENSOR_DIMS], stride[TENSOR_DIMS];
    bool tf32; /* float32 is rounded to tf32 on its way to shared memory */
};

/* Boxes of box0 x box1 x box2 elements; zeros outside the tensor. Rows of 128 or 64 bytes lie swizzled by as many, others not. */
gk_status make_tensor_map(const char *op, const TensorShape &shape, int box0, int box1, CUtensorMap *map, int box2 = 1);

/* Whether the hardware can describe it: 16-byte multiples, and sizes and strides within its fields. */
inline bool tensor_map_fits(const TensorShape &x) {
    const int64_t bytes = (int64_t)gk_dtype_bytes(x.dtype);
    bool good = (uintptr_t)x.data % 16 == 0;
    for (int d = 0; d < TENSOR_DIMS; ++d) {
        good = good && x.size[d] >= 1 && x.size[d] <= (int64_t)1 << 31;
        if (d == 0 || x.size[d] == 1) continue;
        good = good && x.stride[d] > 0 && x.stride[d] * bytes % 16 == 0 && x.stride[d] * bytes < (int64_t)1 << 40;
    }
    return good;
}

#endif
