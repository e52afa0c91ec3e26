/* SPDX-License-Identifier: BSD-3-Clause */
/* kernels.h: what the CUDA room offers to dispatch.c: per op some tables (../op.h), each the end of
 * one kernel file, of compiled instances. C, so that dispatch.c and the .cu files read the same
 * page. */
#ifndef GPUKERN_CUDA_KERNELS_H
#define GPUKERN_CUDA_KERNELS_H

#include "../core/internal.h"
#include "../core/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* host/device.cu: what a kernel's launcher and `explain` ask of a GPU. Constants of the device,
 * read once. */
typedef struct gk_gpu {
    int32_t arch; /* 10 * major + minor: 80, 86, 89, 90, .. */
    int32_t num_sms;
    int32_t smem_per_block; /* bytes a block may opt in to */
    int64_t l2_bytes;
    double clock_khz, memory_gbs; /* SM clock; peak bandwidth of device memory in GB/s */
    char name[64];
    uint64_t name_hash; /* gk_name_hash: whose preferred rows are ours */
} gk_gpu;

/* NULL where the index is none of a GPU; gk_last_error() then says why. */
const gk_gpu *gk_gpu_of(int32_t index);
int32_t gk_gpu_count(void);

enum {
    GK_FIRST_DESCRIBED_GPU =
        1000 /* indices from here on are of GPUs that are described, not there */
};
/* The index of a described GPU by its architecture, "sm_90"; -1 where there is none. */
int32_t gk_described_gpu(const char *arch);

/* Makes `index` the current device; returns the one before, or -1 and a failure text. gk_gpu_leave
 * restores it. */
int32_t gk_gpu_enter(int32_t index);
void gk_gpu_leave(int32_t before);

/* One instance of a kernel. `args` is the op's argument struct of gpukern.h, already checked,
 * nothing empty but what the op allows. */
typedef struct gk_cuda_instance gk_cuda_instance;
struct gk_cuda_instance {
    const char *name; /* the whole name: "gemm_sm80_bf16_128x256x32" */
    gk_dtype dtype;
    /* Plans the call by this instance, whether or not it is the best that can: fills
     * workspace_bytes, tile, tasks, chunks, waves, and the file's own part. Reads no device memory.
     * false: it cannot serve the call. */
    bool (*plan)(const gk_cuda_instance *row, const gk_context *ctx, const void *args,
                 gk_plan *plan);
    /* Launches on ctx->stream what was planned for these args, never waits, and returns launch
     * failures; workspace is of the planned size. */
    gk_status (*run)(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace);
    int32_t key[8]; /* what the file's own functions read: head_dim, tile sizes, .. */
    int (*blocks_per_sm)(
        void); /* that run at once, for `explain` where a plan has no waves; NULL = 1 */
};

/* The instances of one kernel file, best first. */
typedef struct gk_cuda_table {
    const gk_cuda_instance *instances;
    int num_instances;
    int arch; /* 80: this arch and every later one; 90: this one alone (sm_90a code) */
    /* Plans the call by the best instance for it, plan->kernel, without asking one by one; NULL =
     * by the first that can. */
    bool (*plan)(const gk_context *ctx, const void *args, gk_plan *plan);
} gk_cuda_table;

#ifdef __cplusplus
}
#endif
#endif
