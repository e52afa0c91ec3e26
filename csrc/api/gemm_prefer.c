/* gemm_prefer: which kernels serve a gemm call on CUDA, and which one is asked for (prefer.h). */
#include "gemm.h"
#ifdef GPUKERN_HAS_CUDA
#include "../prefer.h"

#include <stdio.h>
#endif

#ifdef GPUKERN_HAS_CUDA
static gk_status check_cuda_gemm(const char *op, const gk_context *ctx, const gk_gemm_args *args, const void *result) {
    GK_REQUIRE(result, "%s: the place for the result is NULL", op);
    GK_TRY(gk_check_gemm(ctx, args));
    if (ctx->device != GK_CUDA)
        return gk_fail(GK_ERR_UNSUPPORTED,
                       "%s: the context is a CPU's, whose row follows from dtype and instruction set", op);
    return gk_dispatch_gpu(op, ctx) ? GK_OK : GK_ERR_DEVICE;
}

static const gk_cuda_instance *named_gemm_row(const char *name) {
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(GK_OP_GEMM, &num_tables);
    for (int t = 0; t < num_tables; ++t)
        for (int i = 0; i < tables[t]->num_instances; ++i)
            if (strcmp(tables[t]->instances[i].name, name) == 0) return &tables[t]->instances[i];
    return NULL;
}

gk_status gk_gemm_rows(const gk_context *ctx, const gk_gemm_args *args, const char **rows) {
    const char *op = "gk_gemm_rows";
    static _Thread_local char text[4096];
    gk_plan plan;
    GK_TRY(check_cuda_gemm(op, ctx, args, rows));
    GK_TRY(gk_dispatch_plan_default(op, ctx, GK_OP_GEMM, args->a.dtype, args, &plan));
    const gk_cuda_instance *const first = plan.kernel;
    size_t length = (size_t)snprintf(text, sizeof text, "%s", first->name);
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(GK_OP_GEMM, &num_tables);
    for (int t = 0; t < num_tables; ++t)
        for (int i = 0; i < tables[t]->num_instances; ++i) {
            const gk_cuda_instance *r = &tables[t]->instances[i];
            if (r == first || !gk_dispatch_plan_gemm_row(r, ctx, gk_gpu_of(ctx->index), args, &plan)) continue;
            if (length + strlen(r->name) + 2 > sizeof text)
                return gk_fail(GK_ERR_UNSUPPORTED, "%s: the rows' names take more than %zu bytes", op, sizeof text);
            length += (size_t)snprintf(text + length, sizeof text - length, ",%s", r->name);
        }
    *rows = text;
    return GK_OK;
}

gk_status gk_gemm_class(const gk_context *ctx, const gk_gemm_args *args, const char **gemm_class) {
    static _Thread_local char text[GK_KEY_TEXT_BYTES];
    gk_gemm_key key;
    GK_TRY(check_cuda_gemm("gk_gemm_class", ctx, args, gemm_class));
    gk_gemm_key_of(0, args, &key);
    gk_gemm_key_write(&key, text);
    *gemm_class = text;
    return GK_OK;
}

gk_status gk_gemm_prefer(const gk_context *ctx, const gk_gemm_args *args, const char *row) {
    const char *op = "gk_gemm_prefer", *others;
    GK_TRY(check_cuda_gemm(op, ctx, args, op));
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const gk_cuda_instance *found = row ? named_gemm_row(row) : NULL;
    gk_plan plan;
    if (row && !(found && gk_dispatch_plan_gemm_row(found, ctx, gpu, args, &plan))) {
        GK_TRY(gk_gemm_rows(ctx, args, &others));
        return gk_fail(GK_ERR_ARGUMENT, "%s: row '%.80s' %s; on cuda:%d (%s) these take the call: %s", op, row,
                       found ? "does not take this call" : "does not exist", (int)ctx->index, gpu->name, others);
    }
    gk_gemm_key key;
    gk_gemm_key_of(gpu->name_hash, args, &key);
    return gk_prefer(op, &key, found);
}

gk_status gk_gemm_prefer_class(const char *device, const char *gemm_class, const char *row) {
    const char *op = "gk_gemm_prefer_class";
    gk_gemm_key key;
    GK_REQUIRE(device && *device && gemm_class, "%s: device or gemm_class is missing", op);
    GK_TRY(gk_gemm_key_read(op, gemm_class, gk_name_hash(device), &key));
    const gk_cuda_instance *found = row ? named_gemm_row(row) : NULL;
    GK_REQUIRE(!row || found, "%s: row '%.80s' does not exist in this library; gk_cuda_kernels() names those that do",
               op, row);
    GK_REQUIRE(!row || (int)found->dtype == key.dtype, "%s: row '%s' is for %s, the class for %s", op, row,
               gk_dtype_name(found->dtype), gk_dtype_name((gk_dtype)key.dtype));
    return gk_prefer(op, &key, found);
}

void gk_gemm_prefer_none(void) { gk_prefer_none(); }

gk_status gk_cuda_device_name(int32_t index, const char **name) {
    GK_REQUIRE(name, "%s: the place for the result is NULL", "gk_cuda_device_name");
    const gk_gpu *gpu = gk_gpu_of(index);
    if (!gpu) return GK_ERR_DEVICE;
    *name = gpu->name;
    return GK_OK;
}
#else
static gk_status no_cuda(const char *op) {
    return gk_fail(GK_ERR_UNSUPPORTED, "%s: this library was built without CUDA kernels", op);
}
gk_status gk_gemm_rows(const gk_context *ctx, const gk_gemm_args *args, const char **rows) {
    (void)ctx, (void)args, (void)rows;
    return no_cuda("gk_gemm_rows");
}
gk_status gk_gemm_class(const gk_context *ctx, const gk_gemm_args *args, const char **gemm_class) {
    (void)ctx, (void)args, (void)gemm_class;
    return no_cuda("gk_gemm_class");
}
gk_status gk_gemm_prefer(const gk_context *ctx, const gk_gemm_args *args, const char *row) {
    (void)ctx, (void)args, (void)row;
    return no_cuda("gk_gemm_prefer");
}
gk_status gk_gemm_prefer_class(const char *device, const char *gemm_class, const char *row) {
    (void)device, (void)gemm_class, (void)row;
    return no_cuda("gk_gemm_prefer_class");
}
void gk_gemm_prefer_none(void) {}
gk_status gk_cuda_device_name(int32_t index, const char **name) {
    (void)index, (void)name;
    return no_cuda("gk_cuda_device_name");
}
#endif
