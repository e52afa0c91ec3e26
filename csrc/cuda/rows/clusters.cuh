/* SPDX-License-Identifier: BSD-3-Clause */
/* clusters.cuh: how many clusters of a kernel run at once on a GPU. Persistent kernels of this
 * folder size their grids by it. */
#ifndef GPUKERN_CUDA_ROWS_CLUSTERS_CUH
#define GPUKERN_CUDA_ROWS_CLUSTERS_CUH

#include "../host/launch.cuh"

/* Clusters of KERNEL, of `size` blocks each, that the GPU runs at once. This is not the number of
 * SMs divided by size: a cluster lies in one GPC, and a GPC's SMs beyond whole clusters stay idle.
 * A grid of one cluster more would take a second wave. The driver is asked once per device. For a
 * GPU that is only described, not present, and if the driver refuses, the result is an estimate. */
template <auto KERNEL>
inline int clusters_at_once(const gk_context *ctx, unsigned threads, size_t smem_bytes, int size) {
    static int known[64];
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const int guess = (int)gk_max_i64(1, gpu->num_sms / size * 7 / 8);
    if (ctx->index >= GK_FIRST_DESCRIBED_GPU) return guess;
    int n = __atomic_load_n(&known[ctx->index & 63], __ATOMIC_RELAXED);
    if (n > 0) return n;
    static uint64_t asked;
    const int32_t before = gk_gpu_enter(ctx->index);
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = (unsigned)size;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.gridDim = dim3((unsigned)size);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    /* The call may load the kernel's module, which a global-mode stream capture would refuse. */
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    cudaError_t error = allow_smem((const void *)KERNEL, &asked, ctx->index, smem_bytes);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&n, KERNEL, &config);
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (before >= 0) gk_gpu_leave(before);
    if (error != cudaSuccess || n < 1) (void)cudaGetLastError(), n = guess;
    __atomic_store_n(&known[ctx->index & 63], n, __ATOMIC_RELAXED);
    return n;
}

#endif
