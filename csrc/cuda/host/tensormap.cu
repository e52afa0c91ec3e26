/* SPDX-License-Identifier: BSD-3-Clause */
/* tensormap.cu: encodes tensor maps. It calls the only driver function that the library uses,
 * whose address it gets from the runtime. */
#include "tensormap.cuh"

#include <cuda_runtime.h>

typedef CUresult (*Encode)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                           const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Every thread that looks it up finds the same address. */
static Encode encoder() {
    static Encode known;
    Encode found = __atomic_load_n(&known, __ATOMIC_ACQUIRE);
    if (found) return found;
    void *address = NULL;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, 12000,
                                         cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    found = (Encode)address;
    __atomic_store_n(&known, found, __ATOMIC_RELEASE);
    return found;
}

static gk_status find_type(const char *op, const TensorShape &x, CUtensorMapDataType *type) {
    switch (x.dtype) {
    case GK_BF16: *type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16; return GK_OK;
    case GK_F16: *type = CU_TENSOR_MAP_DATA_TYPE_FLOAT16; return GK_OK;
    case GK_F32:
        *type = x.tf32 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
        return GK_OK;
    case GK_E4M3:
    case GK_E5M2:
    case GK_I8:
    case GK_U8: *type = CU_TENSOR_MAP_DATA_TYPE_UINT8; return GK_OK;
    default: return gk_no_case(op, x.dtype);
    }
}

static CUtensorMapSwizzle swizzle_of(int bytes) {
    return bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
           : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                         : CU_TENSOR_MAP_SWIZZLE_NONE;
}

gk_status make_tensor_map(const char *op, const TensorShape &shape, const smem_box &smem,
                          CUtensorMap *map) {
    CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const gk_status known = find_type(op, shape, &type);
    if (known != GK_OK) return known;
    const Encode encode = encoder();
    if (!encode)
        return gk_fail(GK_ERR_DEVICE,
                       "this driver has no cuTensorMapEncodeTiled (CUDA 12.0), which %s needs", op);
    const tma_box box = tma_box_of(smem);
    if (!box.ok)
        return gk_fail(GK_ERR_DEVICE, "TMA lays no box of %s so in shared memory (dimension %d)",
                       op, box.mode);
    const TensorMapFields f = tensor_map_fields(shape, box);
    const auto fill = [&] {
        /* L2 fetches lines of 128 bytes. With 256, boxes narrower than their tensor's rows fetch
         * neighbouring lines too early: 59.4 us instead of 56.9 (16 x 28672 x 4096, b N-major).
         * Products that fit L2 take equally long. */
        return encode(map, type, TENSOR_DIMS, (void *)shape.data, f.size, f.stride_bytes, f.box,
                      f.step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(f.swizzle_bytes),
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    };
    CUresult result = fill();
    int device = 0;
    /* Unlike the runtime, the driver needs a current context. A thread gets one with its first
     * runtime call that needs it. In an autograd thread, this call may come before that. */
    if (result == CUDA_ERROR_INVALID_CONTEXT && cudaGetDevice(&device) == cudaSuccess &&
        cudaSetDevice(device) == cudaSuccess)
        result = fill();
    if (result == CUDA_SUCCESS) return GK_OK;
    return gk_fail(GK_ERR_DEVICE, "the driver refused a tensor map of %s (error %d)", op,
                   (int)result);
}
