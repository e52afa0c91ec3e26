/* SPDX-License-Identifier: BSD-3-Clause */
/* dispatch.c: plans a call whose arguments are checked, with the first kernel that serves it, and
 * runs the plan.
 *
 * The entry points in csrc/api/ call it, and ops/ calls it through them. It is the only file that
 * knows every directory of kernels: ref/, cpu/ and cuda/. A build without nvcc has no CUDA kernels
 * but gemm's tables and plans (cuda/tables.c). With these it explains gemm on a described GPU. */
#include "dispatch.h"
#include "checks.h"
#include "invariant.h"
#include "../cpu/kernels.h"
#include "nvtx.h"
#include "prefer.h"

#include <stdio.h>
#include <stdlib.h>

/* ---- counters that the tests read ------------------------------------------------------------ */
static _Thread_local int64_t num_plans;        /* calls that were planned */
static _Thread_local int64_t num_kernel_plans; /* plans that a kernel made */
static _Thread_local int64_t num_asked;        /* kernels that were asked for a plan */

void gk_count_calls(gk_call_counts *counts) {
    counts->checks = gk_num_checks();
    counts->plans = num_plans;
    counts->kernel_plans = num_kernel_plans;
}

int64_t gk_count_asked(void) { return num_asked; }

/* ---- the CPU's plan -------------------------------------------------------------------------- */
static gk_status find_isa(const gk_context *ctx, gk_isa *isa) {
    const char *asked = ctx->cpu_isa ? ctx->cpu_isa : gk_cpu_isa();
    for (int i = 0; i < GK_NUM_ISAS; ++i)
        if (strcmp(asked, gk_isa_names[i]) == 0 && gk_cpu_has((gk_isa)i)) {
            *isa = (gk_isa)i;
            return GK_OK;
        }
    return gk_fail(GK_ERR_DEVICE, "the instruction set asked for is \"%s\"; this machine has %s",
                   asked, gk_cpu_isas());
}

/* Whether an instance compiled for `own` serves calls on the instruction set `isa`. On AMX machines
 * VDPBF16PS is slow, so the avx512bf16 instances are skipped: a call that AMX does not serve uses
 * avx512. */
static bool runs_with_isa(gk_isa own, gk_isa isa) {
    if (isa <= GK_ISA_AVX512BF16) return own <= isa;
    return own == isa || own <= GK_ISA_AVX512;
}

static gk_status plan_cpu(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                          gk_plan *plan) {
    gk_isa isa = GK_ISA_BASE;
    int n;
    GK_TRY(find_isa(ctx, &isa));
    const gk_cpu_instance *instances = gk_cpu_instances(op, &n);
    for (int i = 0; i < n; ++i)
        if (instances[i].dtype == dtype && runs_with_isa(instances[i].isa, isa)) {
            ++num_asked;
            if (!instances[i].kernel->plan(ctx, args, gk_plan_begin(plan, &instances[i]))) continue;
            ++num_kernel_plans;
            return GK_OK;
        }
    return gk_fail(GK_ERR_UNSUPPORTED,
                   "no kernel for %s; supported are float32, bfloat16, float16, float64",
                   gk_dtype_name(dtype));
}

static bool workspace_fits(const void *workspace, size_t workspace_bytes, size_t needed) {
    return needed == 0 ||
           (needed <= workspace_bytes && workspace && (uintptr_t)workspace % 64 == 0);
}

/* ---- the GPU's plan -------------------------------------------------------------------------- */
#ifdef GPUKERN_HAS_CUDA
#define NO_TABLES "no kernel on CUDA; supported is the CPU"
#else
#define NO_TABLES                                                                             \
    "this library was built without CUDA kernels, so it can explain only gemm on a GPU; run " \
    "`make build GPUKERN_CUDA=1`, which needs nvcc and no GPU, and ask again"
uint8_t *gk_cuda_error_word(void) { return NULL; }
#endif

/* Code for sm_90a runs only on that architecture. Code for compute_80 runs on every one from 80
 * on. */
static bool runs_on(const gk_cuda_table *table, const gk_gpu *gpu) {
    return table->arch == 90 ? gpu->arch == 90 : gpu->arch >= table->arch;
}

const gk_gpu *gk_dispatch_gpu(const gk_context *ctx) {
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    if (!gpu) gk_fail(GK_ERR_DEVICE, "there is no CUDA device %d", (int)ctx->index);
    return gpu;
}

static bool plan_instance(const gk_cuda_instance *instance, const gk_context *ctx, const void *args,
                          gk_plan *plan) {
    ++num_asked;
    if (!instance->plan(instance, ctx, args, gk_plan_begin(plan, instance))) return false;
    ++num_kernel_plans;
    return true;
}

static bool plan_table(const gk_cuda_table *table, const gk_context *ctx, gk_dtype dtype,
                       const void *args, gk_plan *plan) {
    if (table->plan) {
        ++num_asked;
        if (!table->plan(ctx, args, gk_plan_begin(plan, NULL))) return false;
        ++num_kernel_plans;
        return true;
    }
    for (int i = 0; i < table->num_instances; ++i)
        if (table->instances[i].dtype == dtype &&
            plan_instance(&table->instances[i], ctx, args, plan))
            return true;
    return false;
}

static bool has_dtype(const gk_cuda_table *table, gk_dtype dtype) {
    for (int i = 0; i < table->num_instances; ++i)
        if (table->instances[i].dtype == dtype) return true;
    return false;
}

/* Plans the call with the first instance of the first table that serves it. The second loop only
 * finds the reason for a refusal: the sizes, if a table has instances of this dtype, otherwise the
 * dtype. */
gk_status gk_dispatch_plan_default(const gk_context *ctx, gk_op op, gk_dtype dtype,
                                   const void *args, gk_plan *plan) {
    const gk_gpu *gpu = gk_dispatch_gpu(ctx);
    if (!gpu) return GK_ERR_DEVICE;
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(op, &num_tables);
    for (int t = 0; t < num_tables; ++t)
        if (runs_on(tables[t], gpu) && gk_cuda_takes(op, t, args) &&
            plan_table(tables[t], ctx, dtype, args, plan))
            return GK_OK;
    if (num_tables == 0) return gk_fail(GK_ERR_UNSUPPORTED, NO_TABLES);
    for (int t = 0; t < num_tables; ++t)
        if (runs_on(tables[t], gpu) && has_dtype(tables[t], dtype) && gk_cuda_takes(op, t, args))
            return gk_fail(GK_ERR_UNSUPPORTED,
                           "no kernel for %s on cuda:%d (%s) serves a call of these sizes; "
                           "use smaller ones",
                           gk_dtype_name(dtype), (int)ctx->index, gpu->name);
    return gk_fail(GK_ERR_UNSUPPORTED,
                   "no kernel for %s on cuda:%d (%s, compute capability %d.%d); supported are "
                   "float32, bfloat16, float16, float64 from compute capability 8.0 on",
                   gk_dtype_name(dtype), (int)ctx->index, gpu->name, gpu->arch / 10,
                   gpu->arch % 10);
}

bool gk_dispatch_plan_gemm_instance(const gk_cuda_instance *instance, const gk_context *ctx,
                                    const gk_gpu *gpu, const gk_gemm_args *args, gk_plan *plan) {
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(GK_OP_GEMM, &num_tables);
    for (int t = 0; t < num_tables; ++t)
        if (instance >= tables[t]->instances &&
            instance < tables[t]->instances + tables[t]->num_instances)
            return runs_on(tables[t], gpu) && instance->dtype == args->a.dtype &&
                   plan_instance(instance, ctx, args, plan);
    return false;
}

/* Plans the call with the instance that gk_gemm_prefer named for its tuning key. Returns false if
 * there is none or if it does not serve this call. Batch-invariant calls ignore it: a row's bits
 * must not depend on M, and a tuning key contains M. */
static bool plan_preferred(const gk_context *ctx, gk_op op, const void *args, gk_plan *plan) {
    if (op != GK_OP_GEMM || !gk_any_preferred() || gk_batch_invariant()) return false;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    if (!gpu) return false;
    gk_gemm_key key;
    gk_gemm_key_of(gpu->name_hash, args, &key);
    const gk_cuda_instance *instance = gk_preferred(&key);
    if (!instance || !gk_dispatch_plan_gemm_instance(instance, ctx, gpu, args, plan)) return false;
    plan->preferred = true;
    return true;
}

/* FLOPs per clock of one SM: tensor cores for 16-bit types, plain multiply-adds for 32 bits, the
 * faster of both for 64 bits. 0 for other widths and for architectures that are not listed: their
 * calls are bounded by bytes alone. Source: NVIDIA's data sheets, dense rates over SMs and boost
 * clock. */
static double flops_per_clock(int arch, gk_dtype dtype) {
    static const struct {
        int arch;
        double of_16_bits, of_32_bits, of_64_bits;
    } rates[] = {
        {80, 2048, 128, 128}, {86, 1024, 256, 4},    {87, 2048, 256, 4},  {89, 1024, 256, 4},
        {90, 4096, 256, 256}, {100, 8192, 256, 128}, {103, 8192, 256, 4}, {110, 8192, 256, 4},
        {120, 1024, 256, 4},  {121, 1024, 256, 4},
    };
    for (size_t i = 0; i < sizeof rates / sizeof *rates; ++i) {
        if (rates[i].arch != arch) continue;
        switch (gk_type_of(dtype)->bits) {
        case 16: return rates[i].of_16_bits;
        case 32: return rates[i].of_32_bits;
        case 64: return rates[i].of_64_bits;
        default: return 0;
        }
    }
    return 0;
}

/* ---- plan and run ---------------------------------------------------------------------------- */
gk_status gk_dispatch_plan(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                           gk_plan *plan) {
    ++num_plans;
    if (ctx->device == GK_CUDA)
        return plan_preferred(ctx, op, args, plan)
                   ? GK_OK
                   : gk_dispatch_plan_default(ctx, op, dtype, args, plan);
    return plan_cpu(ctx, op, dtype, args, plan);
}

static gk_status run_cpu(const gk_context *ctx, const void *args, const gk_plan *plan,
                         void *workspace) {
    ((const gk_cpu_instance *)plan->kernel)->kernel->run(ctx, args, plan, workspace);
    return GK_OK;
}

static gk_status run_cuda(const gk_context *ctx, const void *args, const gk_plan *plan,
                          void *workspace) {
#ifdef GPUKERN_HAS_CUDA
    gk_status status;
    const int32_t before = gk_gpu_enter(ctx->index);
    if (before < 0) return GK_ERR_DEVICE;
    const gk_cuda_instance *instance = plan->kernel;
    GK_IN_RANGE(status, instance->name, instance->run(ctx, args, plan, workspace));
    gk_gpu_leave(before);
    return status;
#else
    (void)ctx, (void)args, (void)plan, (void)workspace;
    return gk_fail(GK_ERR_UNSUPPORTED,
                   "this library was built without CUDA kernels: it explains what a GPU would run, "
                   "and runs nothing there");
#endif
}

gk_status gk_dispatch_run(const gk_context *ctx, const void *args, const gk_plan *plan,
                          void *workspace, size_t workspace_bytes) {
    gk_status status;
    if (!workspace_fits(workspace, workspace_bytes, plan->workspace_bytes))
        return gk_fail(GK_ERR_WORKSPACE,
                       "workspace of %zu bytes at %p, expected %zu bytes, 64-byte aligned",
                       workspace_bytes, workspace, plan->workspace_bytes);
    if (ctx->device == GK_CUDA) return run_cuda(ctx, args, plan, workspace);
    GK_IN_RANGE(status, ((const gk_cpu_instance *)plan->kernel)->name,
                run_cpu(ctx, args, plan, workspace));
    return status;
}

gk_status gk_dispatch_workspace(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                                size_t *bytes) {
    gk_plan plan;
    GK_TRY(gk_dispatch_plan(ctx, op, dtype, args, &plan));
    *bytes = plan.workspace_bytes;
    if (plan.preferred && gk_dispatch_plan_default(ctx, op, dtype, args, &plan) == GK_OK)
        *bytes = plan.workspace_bytes > *bytes ? plan.workspace_bytes : *bytes;
    return GK_OK;
}

gk_status gk_dispatch_call(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                           void *workspace, size_t workspace_bytes) {
    gk_plan plan;
    GK_TRY(gk_dispatch_plan(ctx, op, dtype, args, &plan));
    /* If the instance was preferred after the workspace was sized, the workspace may be too
     * small; then the default kernel runs. */
    if (plan.preferred && !workspace_fits(workspace, workspace_bytes, plan.workspace_bytes))
        GK_TRY(gk_dispatch_plan_default(ctx, op, dtype, args, &plan));
    return gk_dispatch_run(ctx, args, &plan, workspace, workspace_bytes);
}

/* ---- what a call would do -------------------------------------------------------------------- */
static void name_cpu_kernel(const gk_cpu_instance *instance, gk_explanation *out) {
    const bool reference = instance->dtype == GK_F64;
    snprintf(out->instance, sizeof out->instance, reference ? "%s_%s" : "%s_%s_%s", instance->name,
             gk_type_of(instance->dtype)->short_name, gk_isa_names[instance->isa]);
    snprintf(out->isa, sizeof out->isa, "%s", reference ? "ref" : gk_isa_names[instance->isa]);
}

/* Blocks of the instance that an SM of this machine's GPU holds at once. */
static gk_status find_blocks(const gk_context *ctx, const gk_cuda_instance *instance, int *blocks) {
    *blocks = 1;
#ifdef GPUKERN_HAS_CUDA
    if (!instance->blocks_per_sm) return GK_OK;
    const int32_t before = gk_gpu_enter(ctx->index);
    if (before < 0) return GK_ERR_DEVICE;
    *blocks = instance->blocks_per_sm();
    gk_gpu_leave(before);
#else
    (void)ctx, (void)instance;
#endif
    return GK_OK;
}

/* A described GPU cannot be asked how many blocks it holds, so there the waves of some instances
 * stay unknown. */
static gk_status explain_cuda(const gk_context *ctx, const gk_plan *plan, gk_explanation *out) {
    const gk_cuda_instance *instance = plan->kernel;
    const bool described = ctx->index >= GK_FIRST_DESCRIBED_GPU;
    snprintf(out->instance, sizeof out->instance, "%s", instance->name);
    snprintf(out->isa, sizeof out->isa, "%s",
             strstr(instance->name, "_sm90a") ? "sm_90a" : "sm_80");
    out->preferred = plan->preferred;
    out->waves = plan->waves;
    if (plan->waves == 0 && !(instance->blocks_per_sm && described)) {
        int blocks;
        GK_TRY(find_blocks(ctx, instance, &blocks));
        out->waves = (double)plan->tasks / ((double)blocks * gk_gpu_of(ctx->index)->num_sms);
    }
    return GK_OK;
}

gk_status gk_dispatch_explain(const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                              gk_explanation *out) {
    /* `preferred` was added later; a caller built before it passes a struct that ends in front
     * of it */
    GK_REQUIRE(out && out->size >= offsetof(gk_explanation, preferred),
               "explanation.size is not sizeof(gk_explanation)");
    gk_explanation found = {.size = out->size};
    gk_plan plan;
    GK_TRY(gk_dispatch_plan(ctx, op, dtype, args, &plan));
    memcpy(found.tile, plan.tile, sizeof found.tile);
    found.tasks = plan.tasks;
    found.chunks = plan.chunks;
    found.workspace_bytes = (int64_t)plan.workspace_bytes;
    if (ctx->device == GK_CUDA) {
        GK_TRY(explain_cuda(ctx, &plan, &found));
        if (plan.preferred) {
            size_t bytes;
            GK_TRY(gk_dispatch_workspace(ctx, op, dtype, args, &bytes));
            found.workspace_bytes = (int64_t)bytes;
        }
    } else {
        name_cpu_kernel(plan.kernel, &found);
    }
    memcpy(out, &found, out->size < sizeof found ? out->size : sizeof found);
    return GK_OK;
}

void gk_dispatch_bound(const gk_context *ctx, gk_dtype dtype, gk_explanation *out) {
    const gk_gpu *gpu = ctx->device == GK_CUDA ? gk_gpu_of(ctx->index) : NULL;
    if (!gpu) return;
    const double flops_per_us =
        flops_per_clock(gpu->arch, dtype) * gpu->num_sms * gpu->clock_khz / 1e3;
    out->bound_us = out->bytes / (gpu->memory_gbs * 1e3);
    if (flops_per_us > 0) out->bound_us = fmax(out->bound_us, out->flops / flops_per_us);
}

static gk_status find_arch(const char *arch, int32_t *index) {
    GK_REQUIRE(arch && index, "arch or the place for the index is NULL");
    *index = gk_described_gpu(arch);
    GK_REQUIRE(*index >= 0, "arch is \"%.40s\"; expected sm_80, sm_86, sm_89 or sm_90", arch);
    return GK_OK;
}

gk_status gk_cuda_arch(const char *arch, int32_t *index) {
    return gk_named("gk_cuda_arch", find_arch(arch, index));
}

#ifdef GPUKERN_HAS_CUDA
/* Writes the names of all CUDA instances to `to`, separated by commas. If `to` is NULL, it writes
 * nothing. Returns the bytes of the text with its final 0. */
static size_t list_cuda_kernels(char *to) {
    size_t length = 0;
    for (int op = 0; op < GK_NUM_OPS; ++op) {
        int num_tables;
        const gk_cuda_table *const *tables = gk_cuda_tables((gk_op)op, &num_tables);
        for (int t = 0; t < num_tables; ++t)
            for (int i = 0; i < tables[t]->num_instances; ++i) {
                const char *name = tables[t]->instances[i].name;
                const size_t size = strlen(name) + 1;
                if (to) memcpy(to + length, name, size);
                length += size;
                if (to) to[length - 1] = ',';
            }
    }
    if (to && length) to[length - 1] = 0;
    return length;
}
#endif

const char *gk_cuda_kernels(void) {
#ifdef GPUKERN_HAS_CUDA
    static char *list; /* atomic; made by the first call and kept */
    char *found = __atomic_load_n(&list, __ATOMIC_ACQUIRE);
    if (found) return found;
    char *made = calloc(1, list_cuda_kernels(NULL) + 1);
    if (!made) return "";
    list_cuda_kernels(made);
    if (__atomic_compare_exchange_n(&list, &found, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return made;
    free(made); /* another thread was first */
    return found;
#else
    return "";
#endif
}
