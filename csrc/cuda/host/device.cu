/* SPDX-License-Identifier: BSD-3-Clause */
/* device.cu: properties of the GPUs of this machine as the runtime reports them, the current
 * device, and the pinned word that kernels report errors to. */
#include "gpukern.h"
#include "../../core/prefer.h"
#include "../kernels.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

static int32_t attribute(cudaDeviceAttr what, int32_t index) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, what, index) == cudaSuccess ? value : 0;
}

int32_t gk_gpu_count(void) {
    int n = 0;
    if (cudaGetDeviceCount(&n) == cudaSuccess) return n;
    (void)cudaGetLastError(); /* no driver or no GPU: clear the error, or the next launch reports it
                               */
    return 0;
}

const gk_gpu *gk_gpu_there(int32_t index) {
    /* Threads that fill the same entry write the same bytes. `ready` is set after them. */
    static gk_gpu gpus[MAX_GPUS];
    static int ready[MAX_GPUS];
    if (index >= 0 && index < MAX_GPUS && __atomic_load_n(&ready[index], __ATOMIC_ACQUIRE))
        return &gpus[index];
    if (index < 0 || index >= MAX_GPUS || index >= gk_gpu_count()) {
        gk_fail(GK_ERR_DEVICE, "there is no CUDA device %d; this machine has %d", (int)index,
                (int)gk_gpu_count());
        return NULL;
    }
    gk_gpu *gpu = &gpus[index];
    gk_gpu found = {};
    found.arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor, index) +
                 attribute(cudaDevAttrComputeCapabilityMinor, index);
    found.num_sms = attribute(cudaDevAttrMultiProcessorCount, index);
    found.smem_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    found.l2_bytes = attribute(cudaDevAttrL2CacheSize, index);
    found.clock_khz = attribute(cudaDevAttrClockRate, index);
    /* Two transfers per clock. */
    found.memory_gbs = 2e3 * attribute(cudaDevAttrMemoryClockRate, index) *
                       (attribute(cudaDevAttrGlobalMemoryBusWidth, index) / 8) / 1e9;
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, index) == cudaSuccess)
        snprintf(found.name, sizeof found.name, "%.63s", properties.name);
    found.name_hash = gk_name_hash(found.name);
    *gpu = found;
    __atomic_store_n(&ready[index], 1, __ATOMIC_RELEASE);
    return gpu;
}

int32_t gk_gpu_enter(int32_t index) {
    int before = 0;
    cudaError_t error = cudaGetDevice(&before);
    if (error == cudaSuccess && before != index) error = cudaSetDevice(index);
    if (error == cudaSuccess) return before;
    gk_fail(GK_ERR_DEVICE, "cuda:%d cannot be used: %s", (int)index, cudaGetErrorString(error));
    return -1;
}

void gk_gpu_leave(int32_t before) {
    int now = 0;
    if (cudaGetDevice(&now) == cudaSuccess && now != before) (void)cudaSetDevice(before);
}

uint8_t *gk_cuda_error_word(void) {
    static uint8_t *word;
    uint8_t *known = __atomic_load_n(&word, __ATOMIC_ACQUIRE);
    if (known || gk_gpu_count() == 0) return known;
    /* A capture in this thread would forbid the allocation, although it does not concern the
     * captured stream. */
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    void *made = NULL;
    if (cudaHostAlloc(&made, GK_NUM_DEVICE_ERRORS, cudaHostAllocPortable | cudaHostAllocMapped) ==
        cudaSuccess)
        memset(made, 0, GK_NUM_DEVICE_ERRORS);
    else
        (void)cudaGetLastError();
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    uint8_t *expected = NULL;
    if (__atomic_compare_exchange_n(&word, &expected, (uint8_t *)made, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        return (uint8_t *)made;
    if (made) (void)cudaFreeHost(made); /* another thread was first */
    return expected;
}
