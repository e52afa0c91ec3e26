/* SPDX-License-Identifier: BSD-3-Clause */
/* ladder.cu: the C entry points of the gemm ladder, the table of its rungs and the argument checks.
 * Rungs 7 and 13 have no kernel of their own: they call instances of the library. */
#include "ladder.h"

#include <string.h>

#include "rungs.cuh"

extern "C" const gk_cuda_table gk_gemm_sm80_table, gk_gemm_sm90a_table;

namespace {

gk_context context(void *stream) {
    gk_context ctx = {};
    ctx.size = sizeof ctx;
    ctx.device = GK_CUDA;
    ctx.num_threads = 1;
    ctx.stream = stream;
    if (cudaGetDevice(&ctx.index) != cudaSuccess) ctx.index = 0;
    return ctx;
}

/* ---- rungs 7 and 13: instances of the library ------------------------------------------------ */
gk_tensor matrix(const bf16 *data, int64_t rows, int64_t cols) {
    gk_tensor t = {};
    t.data = (void *)data;
    t.dtype = GK_BF16;
    t.ndim = 2;
    t.shape[0] = rows;
    t.shape[1] = cols;
    t.stride[0] = cols;
    t.stride[1] = 1;
    return t;
}

gk_gemm_args gemm_args(const Product &p) {
    gk_gemm_args args = {};
    args.size = sizeof args;
    args.alpha = 1;
    args.a = matrix(p.a, p.m, p.k);
    args.b = matrix(p.b, p.k, p.n);
    args.out = matrix(p.out, p.m, p.n);
    return args;
}

/* Plans rung 7 or 13. Rung 7 always uses the same instance. Rung 13 uses the instance that the
 * library chooses. Returns false if no instance can serve the call. */
bool plan_of(int32_t rung, const gk_context *ctx, const gk_gemm_args *args, gk_plan *plan) {
    if (rung == 7) {
        for (int i = 0; i < gk_gemm_sm80_table.num_instances; ++i) {
            const gk_cuda_instance *row = &gk_gemm_sm80_table.instances[i];
            if (!strcmp(row->name, "gemm_sm80_bf16_256x128x64"))
                return row->plan(row, ctx, args, gk_plan_begin(plan, row));
        }
        return false;
    }
    return gk_gemm_sm90a_table.plan(ctx, args, gk_plan_begin(plan, NULL)) ||
           gk_gemm_sm80_table.plan(ctx, args, gk_plan_begin(plan, NULL));
}

/* ---- the table ------------------------------------------------------------------------------- */
const gk_ladder_rung rungs[] = {
    {"naive", "a thread per element of out, neighbours down the rows", "ladder/01_naive.cu", 0.492,
     0, 80},
    {"coalesced", "neighbours along the columns", "ladder/02_coalesced.cu", 4.18, 0, 80},
    {"shared", "squares of a and b in shared memory", "ladder/03_shared.cu", 11.6, 0, 80},
    {"registers", "8 x 8 sums a thread", "ladder/04_registers.cu", 40.4, 0, 80},
    {"vectorised", "16 bytes an access, no bank conflict", "ladder/05_vectorised.cu", 61.2, 0, 80},
    {"mma", "tensor cores by mma.sync, fed by cp.async and ldmatrix", "ladder/06_mma_sm80.cu", 408,
     0, 80},
    {"pipelined", "a ring of three stages, copies ahead of the products", "gemm/gemm_sm80.cu", 473,
     0, 80},
    {"wgmma", "tma and wgmma, a tile a block", "ladder/08_wgmma_sm90a.cu", 611, 0, 90},
    {"cluster", "pairs of blocks share b by multicast", "ladder/09_cluster_sm90a.cu", 691, 0, 90},
    {"persistent", "clusters that stay and take tile after tile", "ladder/10_persistent_sm90a.cu",
     702, 0, 90},
    {"overlap", "results leave by stmatrix and tma under the next tile",
     "ladder/10_persistent_sm90a.cu", 739, 0, 90},
    {"raster", "tiles in groups of 8 rows, for L2", "ladder/10_persistent_sm90a.cu", 739, 0, 90},
    {"tuned", "the library's choice: tiles by size, registers moved, launches that overlap",
     "gemm/gemm_sm90a.cu", 743, 0, 90},
    {"column", "8 sums of a column a thread", "ladder/14_column.cu", 35.7, 3, 80},
    {"warp_tile", "a warp's tile as large as its registers hold", "ladder/15_warp_tile.cu", 62.1, 5,
     80},
    {"wmma", "tensor cores by nvcuda::wmma", "ladder/16_wmma_sm80.cu", 354, 5, 80},
    {"double_buffer", "a second stage: the next copies run under the products",
     "ladder/17_double_buffer_sm80.cu", 478, 6, 80},
    {"short", "the same in fifty lines: whoever multiplies copies", "ladder/18_short_sm90a.cu", 611,
     8, 90},
};
const int32_t num_rungs = sizeof rungs / sizeof rungs[0];
LadderRun *const runs[] = {ladder_naive,
                           ladder_coalesced,
                           ladder_shared,
                           ladder_registers,
                           ladder_vectorised,
                           ladder_mma,
                           NULL,
                           ladder_wgmma,
                           ladder_cluster,
                           ladder_persistent,
                           ladder_overlap,
                           ladder_raster,
                           NULL, /* rung 13 calls an instance of the library, as rung 7 does */
                           ladder_column,
                           ladder_warp_tile,
                           ladder_wmma,
                           ladder_double_buffer,
                           ladder_short};
static_assert(sizeof runs / sizeof runs[0] == num_rungs, "a launcher for each rung");

/* NULL: the rung uses tensor cores and takes only bfloat16 */
LadderRunF32 *const runs_f32[num_rungs] = {ladder_naive,
                                           ladder_coalesced,
                                           ladder_shared,
                                           ladder_registers,
                                           ladder_vectorised,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           ladder_column,
                                           ladder_warp_tile,
                                           NULL,
                                           NULL,
                                           NULL};

gk_status refusal(int32_t rung, int64_t m, int64_t n, int64_t k, const gk_context *ctx) {
    if (rung < 1 || rung > num_rungs)
        return gk_fail(GK_ERR_ARGUMENT, "gk_ladder_gemm: rung is %d; there are rungs 1 to %d", rung,
                       num_rungs);
    const int64_t sizes[] = {m, n, k};
    for (int i = 0; i < 3; ++i)
        if (sizes[i] < 8 || sizes[i] > LADDER_MOST_SIZE || sizes[i] % 8 != 0)
            return gk_fail(
                GK_ERR_UNSUPPORTED,
                "gk_ladder_gemm: %c is %lld; the ladder takes multiples of 8 from 8 to %d",
                "mnk"[i], (long long)sizes[i], LADDER_MOST_SIZE);
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    if (!gpu) return GK_ERR_DEVICE;
    const int32_t arch = rungs[rung - 1].arch;
    if (arch == 90 ? gpu->arch != 90 : gpu->arch < arch)
        return gk_fail(
            GK_ERR_UNSUPPORTED,
            "gk_ladder_gemm: rung %d (%s) needs compute capability %d.%d%s; %s has %d.%d", rung,
            rungs[rung - 1].name, arch / 10, arch % 10, arch == 90 ? "" : " or later", gpu->name,
            gpu->arch / 10, gpu->arch % 10);
    return GK_OK;
}

gk_status misplaced(const void *a, const void *b, const void *out) {
    const void *const data[] = {a, b, out};
    const char *const names[] = {"a", "b", "out"};
    for (int i = 0; i < 3; ++i)
        if (!data[i] || (uintptr_t)data[i] % 16 != 0)
            return gk_fail(GK_ERR_ARGUMENT,
                           "gk_ladder_gemm: %s is at %p; the ladder takes 16-byte aligned matrices",
                           names[i], data[i]);
    return GK_OK;
}

} // namespace

extern "C" {

const gk_ladder_rung *gk_ladder_rungs(int32_t *count) {
    *count = num_rungs;
    return rungs;
}

size_t gk_ladder_workspace_bytes(int32_t rung, int64_t m, int64_t n, int64_t k) {
    const gk_context ctx = context(NULL);
    if (refusal(rung, m, n, k, &ctx) != GK_OK || runs[rung - 1]) return 0;
    const gk_gemm_args args = gemm_args({NULL, NULL, NULL, (int)m, (int)n, (int)k});
    gk_plan plan;
    return plan_of(rung, &ctx, &args, &plan) ? plan.workspace_bytes : 0;
}

gk_status gk_ladder_gemm(int32_t rung, const void *a, const void *b, void *out, int64_t m,
                         int64_t n, int64_t k, void *workspace, void *stream) {
    const gk_context ctx = context(stream);
    const gk_status status = refusal(rung, m, n, k, &ctx);
    if (status != GK_OK) return status;
    const gk_status placed = misplaced(a, b, out);
    if (placed != GK_OK) return placed;
    const Product p = {(const bf16 *)a, (const bf16 *)b, (bf16 *)out, (int)m, (int)n, (int)k};
    if (runs[rung - 1]) return runs[rung - 1](&ctx, p);

    const gk_gemm_args args = gemm_args(p);
    gk_plan plan;
    if (!plan_of(rung, &ctx, &args, &plan))
        return gk_fail(GK_ERR_UNSUPPORTED,
                       "gk_ladder_gemm: no instance of the library serves rung %d", rung);
    if (plan.workspace_bytes > 0 && !workspace)
        return gk_fail(GK_ERR_WORKSPACE, "gk_ladder_gemm: rung %d needs a workspace of %zu bytes",
                       rung, plan.workspace_bytes);
    return ((const gk_cuda_instance *)plan.kernel)->run(&ctx, &args, &plan, workspace);
}

gk_status gk_ladder_gemm_f32(int32_t rung, const void *a, const void *b, void *out, int64_t m,
                             int64_t n, int64_t k, void *stream) {
    const gk_context ctx = context(stream);
    const gk_status status = refusal(rung, m, n, k, &ctx);
    if (status != GK_OK) return status;
    if (!runs_f32[rung - 1])
        return gk_fail(GK_ERR_UNSUPPORTED,
                       "gk_ladder_gemm_f32: rung %d (%s) uses tensor cores and takes only bfloat16",
                       rung, rungs[rung - 1].name);
    const gk_status placed = misplaced(a, b, out);
    if (placed != GK_OK) return placed;
    return runs_f32[rung - 1](
        &ctx, {(const float *)a, (const float *)b, (float *)out, (int)m, (int)n, (int)k});
}
}
