/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_prefer: lists the kernel instances that serve a gemm call on CUDA, and records which one
 * the caller prefers (prefer.h). */
#include "../core/checks.h"
#include "../core/dispatch.h"
#include "../core/prefer.h"

#include <stdio.h>

static gk_status check_cuda_gemm(const gk_context *ctx, const gk_gemm_args *args,
                                 const void *result) {
    gk_io io;
    gk_io_begin(&io, GK_DATA);
    GK_REQUIRE(result, "the place for the result is NULL");
    GK_REQUIRE(args, "args is NULL");
    GK_TRY(gk_check_context(ctx, args->size, sizeof *args));
    GK_TRY(gk_check_gemm(ctx, args, &io));
    if (ctx->device != GK_CUDA)
        return gk_fail(GK_ERR_UNSUPPORTED, "expected a CUDA context, got a CPU one, where dtype "
                                           "and instruction set decide the instance");
    return gk_dispatch_gpu(ctx) ? GK_OK : GK_ERR_DEVICE;
}

static gk_status list_instances(const gk_context *ctx, const gk_gemm_args *args,
                                const char **instances) {
    static _Thread_local char text[4096];
    gk_plan plan;
    GK_TRY(check_cuda_gemm(ctx, args, instances));
    GK_TRY(gk_dispatch_plan_default(ctx, GK_OP_GEMM, args->a.dtype, args, &plan));
    const gk_cuda_instance *const first = plan.kernel;
    size_t length = (size_t)snprintf(text, sizeof text, "%s", first->name);
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(GK_OP_GEMM, &num_tables);
    for (int t = 0; t < num_tables; ++t)
        for (int i = 0; i < tables[t]->num_instances; ++i) {
            const gk_cuda_instance *r = &tables[t]->instances[i];
            if (r == first ||
                !gk_dispatch_plan_gemm_instance(r, ctx, gk_gpu_of(ctx->index), args, &plan))
                continue;
            if (length + strlen(r->name) + 2 > sizeof text)
                return gk_fail(GK_ERR_UNSUPPORTED, "the instances' names take more than %zu bytes",
                               sizeof text);
            length += (size_t)snprintf(text + length, sizeof text - length, ",%s", r->name);
        }
    *instances = text;
    return GK_OK;
}

static gk_status key_text(const gk_context *ctx, const gk_gemm_args *args,
                          const char **gemm_class) {
    static _Thread_local char text[GK_KEY_TEXT_BYTES];
    gk_gemm_key key;
    GK_TRY(check_cuda_gemm(ctx, args, gemm_class));
    gk_gemm_key_of(0, args, &key);
    gk_gemm_key_write(&key, text);
    *gemm_class = text;
    return GK_OK;
}

static gk_status device_name(int32_t index, const char **name) {
    GK_REQUIRE(name, "the place for the result is NULL");
    const gk_gpu *gpu = gk_gpu_of(index);
    if (!gpu) return GK_ERR_DEVICE;
    *name = gpu->name;
    return GK_OK;
}

#ifdef GPUKERN_HAS_CUDA
static const gk_cuda_instance *gemm_instance_named(const char *name) {
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(GK_OP_GEMM, &num_tables);
    for (int t = 0; t < num_tables; ++t)
        for (int i = 0; i < tables[t]->num_instances; ++i)
            if (strcmp(tables[t]->instances[i].name, name) == 0) return &tables[t]->instances[i];
    return NULL;
}

static gk_status prefer(const gk_context *ctx, const gk_gemm_args *args, const char *instance) {
    const char *others;
    GK_TRY(check_cuda_gemm(ctx, args, ""));
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const gk_cuda_instance *found = instance ? gemm_instance_named(instance) : NULL;
    gk_plan plan;
    if (instance && !(found && gk_dispatch_plan_gemm_instance(found, ctx, gpu, args, &plan))) {
        GK_TRY(list_instances(ctx, args, &others));
        return gk_fail(GK_ERR_ARGUMENT,
                       "instance '%.80s' %s; on cuda:%d (%s) these take the call: %s", instance,
                       found ? "does not take this call" : "does not exist", (int)ctx->index,
                       gpu->name, others);
    }
    gk_gemm_key key;
    gk_gemm_key_of(gpu->name_hash, args, &key);
    return gk_prefer(&key, found);
}

static gk_status prefer_key(const char *device, const char *gemm_class, const char *instance) {
    gk_gemm_key key;
    GK_REQUIRE(device && *device && gemm_class, "device or gemm_class is missing");
    GK_TRY(gk_gemm_key_read(gemm_class, gk_name_hash(device), &key));
    const gk_cuda_instance *found = instance ? gemm_instance_named(instance) : NULL;
    GK_REQUIRE(
        !instance || found,
        "instance '%.80s' does not exist in this library; gk_cuda_kernels() names those that do",
        instance);
    GK_REQUIRE(!instance || (int)found->dtype == key.dtype,
               "instance '%s' is for %s, the class for %s", instance, gk_dtype_name(found->dtype),
               gk_dtype_name((gk_dtype)key.dtype));
    return gk_prefer(&key, found);
}
#else
static gk_status no_cuda(void) {
    return gk_fail(GK_ERR_UNSUPPORTED, "this library was built without CUDA kernels");
}
#define prefer(ctx, args, instance) ((void)(ctx), (void)(args), (void)(instance), no_cuda())
#define prefer_key(device, gemm_class, instance) \
    ((void)(device), (void)(gemm_class), (void)(instance), no_cuda())
#define gk_prefer_none() ((void)0)
#endif

gk_status gk_gemm_instances(const gk_context *ctx, const gk_gemm_args *args,
                            const char **instances) {
    return gk_named("gk_gemm_instances", list_instances(ctx, args, instances));
}
gk_status gk_gemm_class(const gk_context *ctx, const gk_gemm_args *args, const char **gemm_class) {
    return gk_named("gk_gemm_class", key_text(ctx, args, gemm_class));
}
gk_status gk_gemm_prefer(const gk_context *ctx, const gk_gemm_args *args, const char *instance) {
    return gk_named("gk_gemm_prefer", prefer(ctx, args, instance));
}
gk_status gk_gemm_prefer_class(const char *device, const char *gemm_class, const char *instance) {
    return gk_named("gk_gemm_prefer_class", prefer_key(device, gemm_class, instance));
}
void gk_gemm_prefer_none(void) { gk_prefer_none(); }
gk_status gk_cuda_device_name(int32_t index, const char **name) {
    return gk_named("gk_cuda_device_name", device_name(index, name));
}
