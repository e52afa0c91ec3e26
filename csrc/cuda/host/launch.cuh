/* SPDX-License-Identifier: BSD-3-Clause */
/* launch.cuh: the one way to launch a kernel. It sets the shared-memory limit and the stream,
 * and names the op in a failure. A kernel takes one struct by value. Nothing here waits, and the
 * first launch may happen inside a stream capture. */
#ifndef GPUKERN_CUDA_LAUNCH_CUH
#define GPUKERN_CUDA_LAUNCH_CUH

#include "../kernels.h"

#include <cuda_runtime.h>

/* Allows a kernel more than 48 KiB of shared memory in a block, its static part included. CUDA
 * requires this once for each kernel and device. Static parts are below 8 KiB. asked: a bit for
 * each device. */
inline cudaError_t allow_smem(const void *kernel, uint64_t *asked, int32_t device,
                              size_t smem_bytes) {
    const uint64_t bit = uint64_t(1) << (device & 63);
    if (smem_bytes <= 40 * 1024 || (__atomic_load_n(asked, __ATOMIC_ACQUIRE) & bit))
        return cudaSuccess;
    /* The call loads the kernel's module, which a capture in this thread would forbid. */
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    int most = 0;
    cudaError_t error =
        cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaFuncAttributes attributes;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     most - (int)attributes.sharedSizeBytes);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (error == cudaSuccess) __atomic_fetch_or(asked, bit, __ATOMIC_RELEASE);
    return error;
}

/* The part of `launch` that is compiled once for all kernels of a file. With hundreds of instances,
 * compile time matters. */
inline gk_status launch_any(const char *op, const gk_context *ctx, const void *kernel,
                            uint64_t *asked, dim3 grid, unsigned threads, size_t smem_bytes,
                            const void *params, bool after_previous, int cluster) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return GK_OK;
    cudaError_t error = allow_smem(kernel, asked, ctx->index, smem_bytes);
    if (error == cudaSuccess) {
        cudaLaunchAttribute attributes[2] = {};
        unsigned count = 0;
        if (after_previous) {
            attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attributes[count++].val.programmaticStreamSerializationAllowed = 1;
        }
        if (cluster > 1) {
            attributes[count].id = cudaLaunchAttributeClusterDimension;
            attributes[count].val.clusterDim.x = (unsigned)cluster;
            attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
            ++count;
        }
        cudaLaunchConfig_t config = {};
        config.gridDim = grid;
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = smem_bytes;
        config.stream = (cudaStream_t)ctx->stream;
        config.attrs = attributes;
        config.numAttrs = count;
        void *args[] = {(void *)params};
        error = cudaLaunchKernelExC(&config, kernel, args);
    }
    if (error == cudaSuccess) return GK_OK;
    (void)cudaGetLastError(); /* clear it, or the next launch would report it again */
    return gk_fail(GK_ERR_DEVICE,
                   "a kernel of %s, %u x %u x %u blocks of %u threads, could not be launched: %s",
                   op, grid.x, grid.y, grid.z, threads, cudaGetErrorString(error));
}

/* Launches a kernel. after_previous: the kernel may start while the previous one on the stream
 * still runs. It must call griddepcontrol_wait() (ptx/) before it accesses memory. cluster:
 * blocks of a cluster along x. */
template <auto KERNEL, class Params>
inline gk_status launch(const char *op, const gk_context *ctx, dim3 grid, unsigned threads,
                        size_t smem_bytes, const Params &params, bool after_previous = false,
                        int cluster = 1) {
    static uint64_t asked;
    constexpr void (*kernel)(Params) = KERNEL; /* checks that the kernel takes these params */
    return launch_any(op, ctx, (const void *)kernel, &asked, grid, threads, smem_bytes, &params,
                      after_previous, cluster);
}

/* Zeros memory on the stream. */
inline gk_status clear_memory(const char *op, const gk_context *ctx, void *memory, size_t bytes) {
    const cudaError_t error = cudaMemsetAsync(memory, 0, bytes, (cudaStream_t)ctx->stream);
    if (error == cudaSuccess) return GK_OK;
    (void)cudaGetLastError();
    return gk_fail(GK_ERR_DEVICE, "%zu bytes of workspace of %s could not be cleared: %s", bytes,
                   op, cudaGetErrorString(error));
}

/* True if every row along the last dimension begins at a multiple of 16 bytes, which kernels
 * that copy 16 bytes at a time need. */
inline bool rows_aligned(const gk_tensor &t) {
    if ((uintptr_t)t.data % 16 != 0) return false;
    for (int d = 0; d < t.ndim - 1; ++d)
        if (t.shape[d] > 1 && !gk_whole_chunks(t.dtype, t.stride[d])) return false;
    return true;
}

/* The plan function of instances that serve every call and need no workspace. */
inline bool plan_any(const gk_cuda_instance *, const gk_context *, const void *, gk_plan *) {
    return true;
}

/* True if a block may have this much shared memory. Devices of 8.6 and 8.9 have less than the
 * largest tiles need. */
inline bool smem_fits(const gk_context *ctx, int bytes) {
    return gk_gpu_of(ctx->index)->smem_per_block >= bytes;
}

/* Blocks of a kernel that one SM holds at once; for `explain`. */
template <auto KERNEL> inline int blocks_per_sm(unsigned threads, size_t smem_bytes) {
    int n = 0;
    if (cudaOccupancyMaxActiveBlocksPerMultiprocessor(&n, KERNEL, (int)threads, smem_bytes) !=
        cudaSuccess)
        return 1;
    return n > 0 ? n : 1;
}

/* Define the functions that GK_LAUNCH and GK_BLOCKS name. The last argument is the function that
 * they call. */
#define GK_DEFINE_LAUNCH(id, ...)                                                \
    extern "C" gk_status gk_launch_##id(const gk_context *ctx, const void *args, \
                                        const gk_plan *plan, void *workspace) {  \
        return __VA_ARGS__(ctx, args, plan, workspace);                          \
    }
#define GK_DEFINE_BLOCKS(id, ...) \
    extern "C" int gk_blocks_##id(void) { return __VA_ARGS__(); }

/* Kernels report bad contents of index tensors here; see gk_device_error. */
__device__ __forceinline__ void report(uint8_t *error_word, gk_device_error kind) {
    if (error_word) *(volatile uint8_t *)(error_word + kind) = 1;
}

#endif
