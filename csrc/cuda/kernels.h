/* SPDX-License-Identifier: BSD-3-Clause */
/* kernels.h: the interface between dispatch.c and the CUDA kernels. Each kernel file ends with one
 * table of its compiled instances. tables.c lists the tables of every op. This header is C, so that
 * dispatch.c and the .cu files share it. */
#ifndef GPUKERN_CUDA_KERNELS_H
#define GPUKERN_CUDA_KERNELS_H

#include "../core/internal.h"
#include "../core/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Properties of a GPU that plans, launches and `explain` need. They are constants of the device,
 * read once. */
typedef struct gk_gpu {
    int32_t arch; /* 10 * major + minor: 80, 86, 89, 90, .. */
    int32_t num_sms;
    int32_t smem_per_block; /* bytes a block may opt in to */
    int64_t l2_bytes;
    double clock_khz, memory_gbs; /* SM clock; peak bandwidth of device memory in GB/s */
    char name[64];
    uint64_t name_hash; /* gk_name_hash: selects the preferred instances of this GPU */
} gk_gpu;

enum {
    MAX_GPUS = 64,                /* of this machine */
    GK_FIRST_DESCRIBED_GPU = 1000 /* from here on: GPUs that are only described by their data */
};

/* The GPU of an index (host/described.c). Returns NULL if there is no such GPU; gk_last_error()
 * then says why. A build without nvcc has only the described GPUs. */
const gk_gpu *gk_gpu_of(int32_t index);
/* The index of a described GPU by its architecture, such as "sm_90"; -1 if there is none. */
int32_t gk_described_gpu(const char *arch);

/* The next functions are in host/device.cu, so only a build with nvcc has them. gk_gpu_there
 * returns a GPU of this machine without the limit on its SMs, or NULL as gk_gpu_of. */
const gk_gpu *gk_gpu_there(int32_t index);
int32_t gk_gpu_count(void);

/* Makes `index` the current device. Returns the previous device, which gk_gpu_leave restores, or
 * -1 and a failure text. */
int32_t gk_gpu_enter(int32_t index);
void gk_gpu_leave(int32_t before);

/* True if a grid may have this many blocks along x. Plans refuse larger calls with it. */
static inline bool gk_grid_fits(int64_t blocks) { return blocks <= INT32_MAX; }

/* The number of clusters of `blocks` blocks that run at once, if `held` blocks run at once. It
 * is at least 1, because a limit on SMs may leave fewer blocks than a cluster has. */
static inline int64_t gk_clusters_of(int64_t held, int64_t blocks) {
    return gk_max_i64(1, held / blocks);
}

/* One instance of a kernel. `args` is the op's argument struct of gpukern.h. It has been
 * checked, and no tensor is empty unless the op allows it. */
typedef struct gk_cuda_instance gk_cuda_instance;
struct gk_cuda_instance {
    const char *name; /* the whole name: "gemm_sm80_bf16_128x256x32" */
    gk_dtype dtype;
    /* Plans the call with this instance, even if another would be faster: fills in
     * workspace_bytes, tile, tasks, chunks, waves, and the file's own part. Reads no device
     * memory. Returns false if the instance cannot serve the call. */
    bool (*plan)(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                 gk_plan *plan);
    /* Launches the planned work on ctx->stream without waiting and returns launch failures.
     * workspace has the planned size. */
    gk_status (*run)(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace);
    int32_t key[8]; /* private to the kernel file: head_dim, tile sizes and so on */
    int (*blocks_per_sm)(
        void); /* blocks that an SM runs at once, for `explain` if a plan has no waves; NULL = 1 */
};

/* If a plan is in a C file, its instances are in the tables of every build. The file of their
 * kernel defines the functions `run`, which GK_LAUNCH names, and `blocks_per_sm`, which
 * GK_BLOCKS names. A build without nvcc has neither, and gk_dispatch_run refuses there. */
#ifdef GPUKERN_HAS_CUDA
#define GK_LAUNCH(id) gk_launch_##id
#define GK_BLOCKS(id) gk_blocks_##id
#else
#define GK_LAUNCH(id) NULL
#define GK_BLOCKS(id) gk_blocks_unknown
#endif
#define GK_DECLARE_LAUNCH(id)                                                              \
    gk_status gk_launch_##id(const gk_context *ctx, const void *args, const gk_plan *plan, \
                             void *workspace);
#define GK_DECLARE_BLOCKS(id) int gk_blocks_##id(void);
#define GK_DECLARE_LAUNCH_16(file, type) \
    GK_DECLARE_LAUNCH(file##_bf16_##type) GK_DECLARE_LAUNCH(file##_f16_##type)
int gk_blocks_unknown(void); /* returns 1; gk_dispatch_explain ignores it for a described GPU */

/* The instances of one kernel file, best first. */
typedef struct gk_cuda_table {
    const gk_cuda_instance *instances;
    int num_instances;
    int arch; /* 80: this architecture and all later ones; 90: only this one (sm_90a code) */
    /* Plans the call with the best instance and sets plan->kernel. NULL: the first instance that
     * can serve the call is used. */
    bool (*plan)(const gk_context *ctx, const void *args, gk_plan *plan);
} gk_cuda_table;

#ifdef __cplusplus
}
#endif
#endif
