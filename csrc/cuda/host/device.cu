/* SPDX-License-Identifier: BSD-3-Clause */
/* device.cu: properties of the GPUs as the runtime reports them, the current device, and the
 * pinned word that kernels report errors to. */
#include "gpukern.h"
#include "../../core/prefer.h"
#include "../kernels.h"

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    MAX_GPUS = 64
};

/* One described GPU for each architecture: what gk_gpu_of would return, from the vendor's data
 * sheet. */
static const gk_gpu described[] = {
    {80, 108, 166912, 41943040, 1410e3, 2039, "A100 SXM 80GB (described)", 0},
    {86, 82, 101376, 6291456, 1695e3, 936, "RTX 3090 (described)", 0},
    {89, 142, 101376, 100663296, 2520e3, 864, "L40S (described)", 0},
    {90, 132, 232448, 52428800, 1980e3, 3352, "H100 SXM (described)", 0},
};

enum {
    NUM_DESCRIBED = sizeof described / sizeof *described
};

int32_t gk_described_gpu(const char *arch) {
    for (int32_t i = 0; i < NUM_DESCRIBED; ++i) {
        char name[8];
        snprintf(name, sizeof name, "sm_%d", described[i].arch % 1000);
        if (strcmp(arch, name) == 0) return GK_FIRST_DESCRIBED_GPU + i;
    }
    return -1;
}

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

/* Returns the GPU, or under a limit of SMs a copy of it with that many. Planners compare
 * pointers, so there is one object for each size of each GPU, which is never freed. */
static const gk_gpu *within_limit(const gk_gpu *gpu, int32_t place) {
    static gk_gpu *sizes[MAX_GPUS + NUM_DESCRIBED];
    const int32_t sms = gk_sm_limit();
    if (sms == 0 || sms >= gpu->num_sms) return gpu;
    gk_gpu *known = __atomic_load_n(&sizes[place], __ATOMIC_ACQUIRE);
    if (known) return known + sms;
    gk_gpu *made = (gk_gpu *)malloc((size_t)gpu->num_sms * sizeof *made);
    if (!made) return gpu;
    for (int32_t n = 0; n < gpu->num_sms; ++n) {
        made[n] = *gpu;
        made[n].num_sms = n;
    }
    if (__atomic_compare_exchange_n(&sizes[place], &known, made, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE))
        return made + sms;
    free(made); /* another thread was first */
    return known + sms;
}

const gk_gpu *gk_gpu_of(int32_t index) {
    /* Threads that fill the same entry write the same bytes. `ready` is set after them. */
    static gk_gpu gpus[MAX_GPUS];
    static int ready[MAX_GPUS];
    const int32_t number = index - GK_FIRST_DESCRIBED_GPU;
    if (number >= 0 && number < NUM_DESCRIBED)
        return within_limit(&described[number], MAX_GPUS + number);
    if (index >= 0 && index < MAX_GPUS && __atomic_load_n(&ready[index], __ATOMIC_ACQUIRE))
        return within_limit(&gpus[index], index);
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
    return within_limit(gpu, index);
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
