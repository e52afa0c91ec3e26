/* SPDX-License-Identifier: BSD-3-Clause */
/* described.c: finds the GPU that a plan is for. It is a GPU of this machine (device.cu), or one
 * that is only described by its data, so that `explain` works without it. Every build has the
 * described GPUs. */
#include "../kernels.h"

#include <stdio.h>
#include <stdlib.h>

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

/* Returns the GPU. If there is a limit on SMs, it returns a copy of the GPU with that many SMs.
 * Planners compare pointers, so there is one copy for each number of SMs, which is never freed. */
static const gk_gpu *within_limit(const gk_gpu *gpu, int32_t place) {
    static gk_gpu *sizes[MAX_GPUS + NUM_DESCRIBED];
    const int32_t sms = gk_sm_limit();
    if (sms == 0 || sms >= gpu->num_sms) return gpu;
    gk_gpu *known = __atomic_load_n(&sizes[place], __ATOMIC_ACQUIRE);
    if (known) return known + sms;
    gk_gpu *made = malloc((size_t)gpu->num_sms * sizeof *made);
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
    const int32_t number = index - GK_FIRST_DESCRIBED_GPU;
    if (number >= 0 && number < NUM_DESCRIBED)
        return within_limit(&described[number], MAX_GPUS + number);
#ifdef GPUKERN_HAS_CUDA
    const gk_gpu *gpu = gk_gpu_there(index);
    return gpu ? within_limit(gpu, index) : NULL;
#else
    gk_fail(GK_ERR_DEVICE, "this library was built without CUDA kernels");
    return NULL;
#endif
}

int gk_blocks_unknown(void) { return 1; }
