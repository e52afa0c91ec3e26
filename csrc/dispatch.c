/* dispatch.c: the entry points. Checks what a kernel could crash on, picks the table row, hands over.
 * The only file that knows every room: ref/, cpu/ and (where built) cuda/. */
#include "cpu/kernels.h"
#ifdef GPUKERN_HAS_CUDA
#include "cuda/kernels.h"
#include "prefer.h"
#endif

#include <stddef.h>
#include <stdio.h>

/* ---- checks shared by the ops -------------------------------------------------------------------- */
static bool is_float(gk_dtype d) { return d == GK_F32 || d == GK_BF16 || d == GK_F16 || d == GK_F64; }
static gk_dtype stats_dtype(gk_dtype d) { return d == GK_F64 ? GK_F64 : GK_F32; }

#define REQUIRE(condition, ...)                                         \
    do {                                                                \
        if (!(condition)) return gk_fail(GK_ERR_ARGUMENT, __VA_ARGS__); \
    } while (0)

#define TRY(call)                             \
    do {                                      \
        gk_status status_ = (call);           \
        if (status_ != GK_OK) return status_; \
    } while (0)

static gk_status check_context(const char *op, const gk_context *ctx, size_t args_size, size_t expected) {
    REQUIRE(ctx && ctx->size >= sizeof(gk_context),
            "%s: context is missing or its size field is not sizeof(gk_context)", op);
    REQUIRE(args_size >= expected, "%s: args.size is %zu, expected at least %zu", op, args_size, expected);
#ifdef GPUKERN_HAS_CUDA
    REQUIRE(ctx->device == GK_CPU || ctx->device == GK_CUDA, "%s: context.device is %d", op, (int)ctx->device);
#else
    if (ctx->device != GK_CPU)
        return gk_fail(GK_ERR_UNSUPPORTED, "%s: this library was built without CUDA kernels; expected a CPU context",
                       op);
#endif
    return GK_OK;
}

/* More elements than any address space holds: below it no product of sizes, strides and workers overflows 64 bits. A size
 * of 0 counts as 1, because workspaces are also sized by what an empty tensor has most of. */
#define MAX_ELEMENTS (INT64_C(1) << 48)

/* ndim must have been checked. A stride must reach no further than MAX_ELEMENTS, in a dimension of size 0 or 1, too. */
static gk_status check_extent(const char *op, const char *name, const gk_tensor *t) {
    int64_t elements = 1;
    for (int d = 0; d < t->ndim; ++d) {
        const int64_t size = t->shape[d], stride = t->stride[d], most = MAX_ELEMENTS / gk_max_i64(1, size - 1);
        REQUIRE(size >= 0, "%s: %s has size %lld in dimension %d", op, name, (long long)size, d);
        REQUIRE(size <= MAX_ELEMENTS / elements, "%s: %s has more than 2^48 elements, sizes of 0 counted as 1", op,
                name);
        REQUIRE(stride >= -most && stride <= most,
                "%s: %s has stride %lld in dimension %d of size %lld, which spans more than 2^48 elements", op, name,
                (long long)stride, d, (long long)size);
        elements *= gk_max_i64(1, size);
    }
    return GK_OK;
}

/* Sizes of several tensors that kernels multiply, then by the bytes of a row. */
static gk_status check_product(const char *op, const char *what, int64_t a, int64_t b, int64_t c) {
    const int64_t most = MAX_ELEMENTS / 16;
    REQUIRE(a <= most / gk_max_i64(1, b) / gk_max_i64(1, c) && b <= most / gk_max_i64(1, c) && c <= most,
            "%s: %s are %lld x %lld x %lld, expected at most 2^44", op, what, (long long)a, (long long)b, (long long)c);
    return GK_OK;
}

static gk_status check_layout(const char *op, const char *name, const gk_tensor *t, gk_dtype dtype, int min_ndim,
                              int max_ndim) {
    REQUIRE(t->ndim >= min_ndim && t->ndim <= max_ndim, "%s: %s has %d dimensions, expected %d to %d", op, name,
            (int)t->ndim, min_ndim, max_ndim);
    REQUIRE(t->dtype == dtype, "%s: %s is %s, expected %s", op, name, gk_dtype_name(t->dtype), gk_dtype_name(dtype));
    return check_extent(op, name, t);
}

static gk_status check_tensor(const char *op, const char *name, const gk_tensor *t, gk_dtype dtype, int min_ndim,
                              int max_ndim) {
    TRY(check_layout(op, name, t, dtype, min_ndim, max_ndim));
    REQUIRE(t->data || gk_numel(t) == 0, "%s: %s has no data", op, name);
    return GK_OK;
}

static gk_status check_size(const char *op, const char *name, const gk_tensor *t, int dim, int64_t expected) {
    REQUIRE(t->shape[dim] == expected, "%s: %s has size %lld in dimension %d, expected %lld", op, name,
            (long long)t->shape[dim], dim, (long long)expected);
    return GK_OK;
}

static gk_status check_dense_last(const char *op, const char *name, const gk_tensor *t) {
    const int d = t->ndim - 1;
    REQUIRE(t->stride[d] == 1 || t->shape[d] <= 1 || gk_numel(t) == 0,
            "%s: %s has stride %lld in its last dimension, expected 1", op, name, (long long)t->stride[d]);
    return GK_OK;
}

/* ---- the row ---------------------------------------------------------------------------------------- */
static gk_status find_isa(const char *op, const gk_context *ctx, gk_isa *isa) {
    const char *asked = ctx->cpu_isa ? ctx->cpu_isa : gk_cpu_isa();
    for (int i = 0; i < GK_NUM_ISAS; ++i)
        if (strcmp(asked, gk_isa_names[i]) == 0 && gk_cpu_has((gk_isa)i)) {
            *isa = (gk_isa)i;
            return GK_OK;
        }
    return gk_fail(GK_ERR_DEVICE, "%s: the instruction set asked for is \"%s\"; this machine has %s", op, asked,
                   gk_cpu_isas());
}

static gk_status find_row(const char *name, const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                          const gk_cpu_row **row) {
    gk_isa isa = GK_ISA_BASE;
    int n;
    TRY(find_isa(name, ctx, &isa));
    const gk_cpu_row *rows = gk_cpu_rows(op, &n);
    for (int i = 0; i < n; ++i)
        if (rows[i].dtype == dtype && rows[i].isa <= isa && (!rows[i].takes || rows[i].takes(args))) {
            *row = &rows[i];
            return GK_OK;
        }
    return gk_fail(GK_ERR_UNSUPPORTED, "%s: no kernel for %s; supported are float32, bfloat16, float16, float64", name,
                   gk_dtype_name(dtype));
}

static bool workspace_fits(const void *workspace, size_t workspace_bytes, size_t needed) {
    return needed == 0 || (needed <= workspace_bytes && workspace && (uintptr_t)workspace % 64 == 0);
}

#ifdef GPUKERN_HAS_CUDA
/* A table of sm_90a code serves that arch alone; compute_80 code every arch from 80 on. */
static bool runs_on(const gk_cuda_table *table, const gk_gpu *gpu) {
    return table->arch == 90 ? gpu->arch == 90 : gpu->arch >= table->arch;
}

static const gk_gpu *find_gpu(const char *name, const gk_context *ctx) {
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    if (!gpu) gk_fail(GK_ERR_DEVICE, "%s: there is no CUDA device %d", name, (int)ctx->index);
    return gpu;
}

static gk_status find_default_row(const char *name, const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                                  const gk_cuda_row **row) {
    const gk_gpu *gpu = find_gpu(name, ctx);
    if (!gpu) return GK_ERR_DEVICE;
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(op, &num_tables);
    for (int t = 0; t < num_tables; ++t) {
        if (!runs_on(tables[t], gpu)) continue;
        if (tables[t]->choose) {
            *row = tables[t]->choose(ctx, args);
            if (*row) return GK_OK;
            continue;
        }
        for (int i = 0; i < tables[t]->num_rows; ++i) {
            const gk_cuda_row *r = &tables[t]->rows[i];
            if (r->dtype != dtype || (r->takes && !r->takes(r, ctx, args))) continue;
            *row = r;
            return GK_OK;
        }
    }
    return gk_fail(GK_ERR_UNSUPPORTED,
                   "%s: no kernel for %s on cuda:%d (%s, compute capability %d.%d); supported are float32, bfloat16, "
                   "float16, float64 from compute capability 8.0 on",
                   name, gk_dtype_name(dtype), (int)ctx->index, gpu->name, gpu->arch / 10, gpu->arch % 10);
}

/* Whether a row of gemm's tables serves this call on its device. */
static bool gemm_row_takes(const gk_cuda_row *row, const gk_context *ctx, const gk_gpu *gpu, const gk_gemm_args *args) {
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(GK_OP_GEMM, &num_tables);
    for (int t = 0; t < num_tables; ++t)
        if (row >= tables[t]->rows && row < tables[t]->rows + tables[t]->num_rows)
            return runs_on(tables[t], gpu) && row->dtype == args->a.dtype &&
                   (!row->takes || row->takes(row, ctx, args));
    return false;
}

/* The row that was asked for, where it takes this very call; else NULL. */
static const gk_cuda_row *preferred_row(const gk_context *ctx, gk_op op, const void *args) {
    if (op != GK_OP_GEMM || !gk_any_preferred()) return NULL;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    if (!gpu) return NULL;
    gk_gemm_key key;
    gk_gemm_key_of(gpu->name_hash, args, &key);
    const gk_cuda_row *row = gk_preferred(&key);
    return row && gemm_row_takes(row, ctx, gpu, args) ? row : NULL;
}

static size_t row_bytes(const gk_cuda_row *row, const gk_context *ctx, const void *args) {
    return row->workspace_bytes ? row->workspace_bytes(row, ctx, args) : 0;
}

/* Enough for the preferred row and for the default one: whichever of the two the call then meets has room. */
static size_t cuda_bytes(const char *name, const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args) {
    const gk_cuda_row *preferred = preferred_row(ctx, op, args), *row;
    const size_t bytes = preferred ? row_bytes(preferred, ctx, args) : 0;
    if (find_default_row(name, ctx, op, dtype, args, &row) != GK_OK) return bytes;
    const size_t default_bytes = row_bytes(row, ctx, args);
    return bytes > default_bytes ? bytes : default_bytes;
}

static gk_status cuda_run(const char *name, const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                          const void *workspace, size_t workspace_bytes) {
    const gk_cuda_row *row = preferred_row(ctx, op, args);
    size_t needed = row ? row_bytes(row, ctx, args) : 0;
    /* preferred since the workspace was sized: the call still is the default row's */
    if (!row || !workspace_fits(workspace, workspace_bytes, needed)) {
        TRY(find_default_row(name, ctx, op, dtype, args, &row));
        needed = row_bytes(row, ctx, args);
    }
    if (!workspace_fits(workspace, workspace_bytes, needed))
        return gk_fail(GK_ERR_WORKSPACE, "%s: workspace of %zu bytes at %p, expected %zu bytes, 64-byte aligned", name,
                       workspace_bytes, workspace, needed);
    const int32_t before = gk_gpu_enter(name, ctx->index);
    if (before < 0) return GK_ERR_DEVICE;
    const gk_status status = row->run(row, ctx, args);
    gk_gpu_leave(before);
    return status;
}

static gk_status cuda_explain(const char *name, const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                              gk_explanation *out) {
    const gk_cuda_row *row = preferred_row(ctx, op, args);
    out->preferred = row != NULL;
    if (!row) TRY(find_default_row(name, ctx, op, dtype, args, &row));
    const int32_t before = gk_gpu_enter(name, ctx->index);
    if (before < 0) return GK_ERR_DEVICE;
    snprintf(out->row, sizeof out->row, "%s", row->name);
    snprintf(out->isa, sizeof out->isa, "%s", strstr(row->name, "_sm90a") ? "sm_90a" : "sm_80");
    out->chunks = 1;
    if (row->explain) row->explain(row, ctx, args, out);
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    if (out->waves == 0) out->waves = (double)out->tasks / gpu->num_sms;
    out->workspace_bytes = (int64_t)cuda_bytes(name, ctx, op, dtype, args);
    gk_gpu_leave(before);
    return GK_OK;
}

/* FLOPs a clock of one SM: tensor cores for 16-bit dtypes, plain multiply-adds for the others. */
static double flops_per_clock(int arch, gk_dtype dtype) {
    if (dtype == GK_BF16 || dtype == GK_F16) return arch == 90 ? 4096 : arch == 80 ? 2048 : 1024;
    if (dtype == GK_F64) return arch == 90 || arch == 80 ? 128 : 4;
    return arch == 80 ? 128 : 256;
}
#endif

const char *gk_cuda_kernels(void) {
    static _Thread_local char text[16384];
    text[0] = 0;
#ifdef GPUKERN_HAS_CUDA
    size_t length = 0;
    for (int op = 0; op < GK_NUM_OPS; ++op) {
        int num_tables;
        const gk_cuda_table *const *tables = gk_cuda_tables((gk_op)op, &num_tables);
        for (int t = 0; t < num_tables; ++t)
            for (int i = 0; i < tables[t]->num_rows && length < sizeof text - 80; ++i)
                length += (size_t)snprintf(text + length, sizeof text - length, "%s%s", length ? "," : "",
                                           tables[t]->rows[i].name);
    }
#endif
    return text;
}

#ifndef GPUKERN_HAS_CUDA
uint8_t *gk_cuda_error_word(void) { return NULL; }
#endif

typedef union held_args {
    gk_flash_attn_args fwd;
    gk_flash_attn_bwd_args bwd;
    gk_paged_attn_args paged;
} held_args;

/* args, or where the softcap is none that the kernels can take, a copy with one that they can. */
static const void *hold(gk_op op, gk_dtype dtype, const void *args, held_args *copy) {
    if (op != GK_OP_FLASH_ATTN_FWD && op != GK_OP_FLASH_ATTN_BWD && op != GK_OP_PAGED_ATTN) return args;
    const gk_attn_rules *given = op == GK_OP_PAGED_ATTN       ? &((const gk_paged_attn_args *)args)->rules
                                 : op == GK_OP_FLASH_ATTN_FWD ? &((const gk_flash_attn_args *)args)->rules
                                                              : &((const gk_flash_attn_bwd_args *)args)->fwd.rules;
    const double softcap = gk_held_softcap(given, dtype);
    if (softcap == given->softcap) return args;
    if (op == GK_OP_PAGED_ATTN)
        copy->paged = *(const gk_paged_attn_args *)args, copy->paged.rules.softcap = softcap;
    else if (op == GK_OP_FLASH_ATTN_FWD)
        copy->fwd = *(const gk_flash_attn_args *)args, copy->fwd.rules.softcap = softcap;
    else
        copy->bwd = *(const gk_flash_attn_bwd_args *)args, copy->bwd.fwd.rules.softcap = softcap;
    return copy;
}

/* The time no kernel can beat on this device; explain's last field, once bytes and flops are known. */
static void bound(const gk_context *ctx, gk_dtype dtype, gk_explanation *out) {
#ifdef GPUKERN_HAS_CUDA
    const gk_gpu *gpu = ctx->device == GK_CUDA ? gk_gpu_of(ctx->index) : NULL;
    if (!gpu) return;
    const double flops_per_us = flops_per_clock(gpu->arch, dtype) * gpu->num_sms * gpu->clock_khz / 1e3;
    out->bound_us = fmax(out->bytes / (gpu->memory_gbs * 1e3), out->flops / flops_per_us);
#else
    (void)ctx, (void)dtype, (void)out;
#endif
}

static size_t workspace_of(const char *name, const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args) {
    held_args held;
    args = hold(op, dtype, args, &held);
#ifdef GPUKERN_HAS_CUDA
    if (ctx->device == GK_CUDA) return cuda_bytes(name, ctx, op, dtype, args);
#endif
    const gk_cpu_row *row;
    if (find_row(name, ctx, op, dtype, args, &row) != GK_OK) return 0;
    return row->kernel->workspace_bytes(ctx, args);
}

static gk_status run(const char *name, const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                     const void *workspace, size_t workspace_bytes) {
    held_args held;
    args = hold(op, dtype, args, &held);
#ifdef GPUKERN_HAS_CUDA
    if (ctx->device == GK_CUDA) return cuda_run(name, ctx, op, dtype, args, workspace, workspace_bytes);
#endif
    const gk_cpu_row *row;
    TRY(find_row(name, ctx, op, dtype, args, &row));
    const size_t needed = row->kernel->workspace_bytes(ctx, args);
    if (!workspace_fits(workspace, workspace_bytes, needed))
        return gk_fail(GK_ERR_WORKSPACE, "%s: workspace of %zu bytes at %p, expected %zu bytes, 64-byte aligned", name,
                       workspace_bytes, workspace, needed);
    row->kernel->run(ctx, args);
    return GK_OK;
}

static gk_status cpu_explain(const char *name, const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                             gk_explanation *out) {
    const gk_cpu_row *row;
    TRY(find_row(name, ctx, op, dtype, args, &row));
    static const char *const short_names[] = {"f32", "bf16", "f16", "f64"};
    if (dtype == GK_F64)
        snprintf(out->row, sizeof out->row, "%s_f64", row->name);
    else
        snprintf(out->row, sizeof out->row, "%s_%s_%s", row->name, short_names[dtype], gk_isa_names[row->isa]);
    snprintf(out->isa, sizeof out->isa, "%s", dtype == GK_F64 ? "ref" : gk_isa_names[row->isa]);
    row->kernel->explain(ctx, args, out);
    out->workspace_bytes = (int64_t)row->kernel->workspace_bytes(ctx, args);
    return GK_OK;
}

static gk_status explain(const char *name, const gk_context *ctx, gk_op op, gk_dtype dtype, const void *args,
                         gk_explanation *out) {
    /* a caller built before `preferred` was there has a struct that ends before it */
    REQUIRE(out && out->size >= offsetof(gk_explanation, preferred),
            "%s: explanation.size is not sizeof(gk_explanation)", name);
    gk_explanation found = {.size = out->size};
    held_args held;
    args = hold(op, dtype, args, &held);
#ifdef GPUKERN_HAS_CUDA
    if (ctx->device == GK_CUDA)
        TRY(cuda_explain(name, ctx, op, dtype, args, &found));
    else
#endif
        TRY(cpu_explain(name, ctx, op, dtype, args, &found));
    memcpy(out, &found, out->size < sizeof found ? out->size : sizeof found);
    return GK_OK;
}

/* 0 for a result that is not wanted. */
static double tensor_bytes(const gk_tensor *t) {
    return t->data ? (double)gk_numel(t) * (double)gk_dtype_bytes(t->dtype) : 0;
}

/* ---- gemm ------------------------------------------------------------------------------------------- */
static gk_status check_gemm(const gk_context *ctx, const gk_gemm_args *g) {
    const char *op = "gk_gemm";
    REQUIRE(g, "%s: args is NULL", op);
    TRY(check_context(op, ctx, g->size, sizeof *g));
    REQUIRE(is_float(g->a.dtype), "%s: a is %s, expected a floating dtype", op, gk_dtype_name(g->a.dtype));
    TRY(check_tensor(op, "a", &g->a, g->a.dtype, 2, GK_MAX_DIMS));
    TRY(check_tensor(op, "b", &g->b, g->a.dtype, 2, GK_MAX_DIMS));
    REQUIRE(g->out.dtype == g->a.dtype || (g->out.dtype == GK_F32 && g->a.dtype != GK_F64),
            "%s: out is %s, expected %s or float32", op, gk_dtype_name(g->out.dtype), gk_dtype_name(g->a.dtype));
    TRY(check_tensor(op, "out", &g->out, g->out.dtype, 2, GK_MAX_DIMS));
    const int nd = g->out.ndim;
    const int64_t k = g->a.shape[g->a.ndim - 1];
    TRY(check_size(op, "b", &g->b, g->b.ndim - 2, k));
    TRY(check_size(op, "out", &g->out, nd - 2, g->a.shape[g->a.ndim - 2]));
    TRY(check_size(op, "out", &g->out, nd - 1, g->b.shape[g->b.ndim - 1]));
    TRY(check_dense_last(op, "out", &g->out));
    const gk_tensor *in[3] = {&g->a, &g->b, g->c};
    const char *const names[3] = {"a", "b", "c"};
    for (int x = 0; x < 3; ++x) {
        if (!in[x]) continue;
        REQUIRE(in[x]->ndim <= nd, "%s: %s has %d dimensions, out has %d", op, names[x], (int)in[x]->ndim, nd);
        for (int i = 0; i < in[x]->ndim - (x < 2 ? 2 : 0); ++i) {
            int64_t size = in[x]->shape[i], want = g->out.shape[i + nd - in[x]->ndim];
            REQUIRE(size == want || size == 1, "%s: %s has size %lld in dimension %d, expected %lld or 1", op, names[x],
                    (long long)size, i, (long long)want);
        }
    }
    if (g->bias) {
        REQUIRE(g->bias->dtype == g->a.dtype || g->bias->dtype == g->out.dtype, "%s: bias is %s, expected %s or %s", op,
                gk_dtype_name(g->bias->dtype), gk_dtype_name(g->a.dtype), gk_dtype_name(g->out.dtype));
        TRY(check_tensor(op, "bias", g->bias, g->bias->dtype, 1, 1));
        TRY(check_size(op, "bias", g->bias, 0, g->out.shape[nd - 1]));
    }
    if (g->c) {
        REQUIRE(g->c->dtype == g->a.dtype || g->c->dtype == g->out.dtype, "%s: c is %s, expected %s or %s", op,
                gk_dtype_name(g->c->dtype), gk_dtype_name(g->a.dtype), gk_dtype_name(g->out.dtype));
        /* with beta 0 its data is not read and may be missing */
        TRY(g->beta != 0 ? check_tensor(op, "c", g->c, g->c->dtype, 0, nd)
                         : check_layout(op, "c", g->c, g->c->dtype, 0, nd));
    }
    if (g->preact) {
        TRY(check_tensor(op, "preact", g->preact, g->out.dtype, nd, nd));
        for (int d = 0; d < nd; ++d) TRY(check_size(op, "preact", g->preact, d, g->out.shape[d]));
        TRY(check_dense_last(op, "preact", g->preact));
    }
    REQUIRE((unsigned)g->activation <= GK_ACT_SILU, "%s: activation is %d", op, (int)g->activation);
    REQUIRE((unsigned)g->fp32_precision <= GK_TF32, "%s: fp32_precision is %d", op, (int)g->fp32_precision);
    REQUIRE(gk_holds(g->a.dtype, g->alpha), "%s: alpha is %g, expected a number that float32 holds", op, g->alpha);
    REQUIRE(gk_holds(g->a.dtype, g->beta), "%s: beta is %g, expected a number that float32 holds", op, g->beta);
    return GK_OK;
}

size_t gk_gemm_workspace_bytes(const gk_context *ctx, const gk_gemm_args *args) {
    if (check_gemm(ctx, args) != GK_OK) return 0;
    return workspace_of("gk_gemm", ctx, GK_OP_GEMM, args->a.dtype, args);
}

gk_status gk_gemm(const gk_context *ctx, const gk_gemm_args *args) {
    TRY(check_gemm(ctx, args));
    return run("gk_gemm", ctx, GK_OP_GEMM, args->a.dtype, args, args->workspace, args->workspace_bytes);
}

gk_status gk_explain_gemm(const gk_context *ctx, const gk_gemm_args *args, gk_explanation *out) {
    TRY(check_gemm(ctx, args));
    TRY(explain("gk_explain_gemm", ctx, GK_OP_GEMM, args->a.dtype, args, out));
    out->bytes = tensor_bytes(&args->a) + tensor_bytes(&args->b) + tensor_bytes(&args->out);
    if (args->bias) out->bytes += tensor_bytes(args->bias);
    if (args->c && args->beta != 0) out->bytes += tensor_bytes(args->c);
    if (args->preact) out->bytes += tensor_bytes(args->preact);
    out->flops = 2.0 * (double)gk_numel(&args->out) * (double)args->a.shape[args->a.ndim - 1];
    bound(ctx, args->a.dtype, out);
    return GK_OK;
}

/* ---- gemm: which row serves a class of calls ------------------------------------------------------------ */
#ifdef GPUKERN_HAS_CUDA
static gk_status check_cuda_gemm(const char *op, const gk_context *ctx, const gk_gemm_args *args, const void *result) {
    REQUIRE(result, "%s: the place for the result is NULL", op);
    TRY(check_gemm(ctx, args));
    if (ctx->device != GK_CUDA)
        return gk_fail(GK_ERR_UNSUPPORTED,
                       "%s: the context is a CPU's, whose row follows from dtype and instruction set", op);
    return find_gpu(op, ctx) ? GK_OK : GK_ERR_DEVICE;
}

static const gk_cuda_row *named_gemm_row(const char *name) {
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(GK_OP_GEMM, &num_tables);
    for (int t = 0; t < num_tables; ++t)
        for (int i = 0; i < tables[t]->num_rows; ++i)
            if (strcmp(tables[t]->rows[i].name, name) == 0) return &tables[t]->rows[i];
    return NULL;
}

gk_status gk_gemm_rows(const gk_context *ctx, const gk_gemm_args *args, const char **rows) {
    const char *op = "gk_gemm_rows";
    static _Thread_local char text[4096];
    const gk_cuda_row *first;
    TRY(check_cuda_gemm(op, ctx, args, rows));
    TRY(find_default_row(op, ctx, GK_OP_GEMM, args->a.dtype, args, &first));
    size_t length = (size_t)snprintf(text, sizeof text, "%s", first->name);
    int num_tables;
    const gk_cuda_table *const *tables = gk_cuda_tables(GK_OP_GEMM, &num_tables);
    for (int t = 0; t < num_tables; ++t)
        for (int i = 0; i < tables[t]->num_rows; ++i) {
            const gk_cuda_row *r = &tables[t]->rows[i];
            if (r == first || !gemm_row_takes(r, ctx, gk_gpu_of(ctx->index), args)) continue;
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
    TRY(check_cuda_gemm("gk_gemm_class", ctx, args, gemm_class));
    gk_gemm_key_of(0, args, &key);
    gk_gemm_key_write(&key, text);
    *gemm_class = text;
    return GK_OK;
}

gk_status gk_gemm_prefer(const gk_context *ctx, const gk_gemm_args *args, const char *row) {
    const char *op = "gk_gemm_prefer", *others;
    TRY(check_cuda_gemm(op, ctx, args, op));
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const gk_cuda_row *found = row ? named_gemm_row(row) : NULL;
    if (row && !(found && gemm_row_takes(found, ctx, gpu, args))) {
        TRY(gk_gemm_rows(ctx, args, &others));
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
    REQUIRE(device && *device && gemm_class, "%s: device or gemm_class is missing", op);
    TRY(gk_gemm_key_read(op, gemm_class, gk_name_hash(device), &key));
    const gk_cuda_row *found = row ? named_gemm_row(row) : NULL;
    REQUIRE(!row || found, "%s: row '%.80s' does not exist in this library; gk_cuda_kernels() names those that do", op,
            row);
    REQUIRE(!row || (int)found->dtype == key.dtype, "%s: row '%s' is for %s, the class for %s", op, row,
            gk_dtype_name(found->dtype), gk_dtype_name((gk_dtype)key.dtype));
    return gk_prefer(op, &key, found);
}

void gk_gemm_prefer_none(void) { gk_prefer_none(); }

gk_status gk_cuda_device_name(int32_t index, const char **name) {
    REQUIRE(name, "%s: the place for the result is NULL", "gk_cuda_device_name");
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

gk_status gk_gemm_act_bwd(const gk_context *ctx, const gk_gemm_act_bwd_args *args) {
    const char *op = "gk_gemm_act_bwd";
    REQUIRE(args, "%s: args is NULL", op);
    TRY(check_context(op, ctx, args->size, sizeof *args));
    REQUIRE(is_float(args->grad_out.dtype) && is_float(args->saved.dtype), "%s: grad_out and saved must be floating",
            op);
    TRY(check_tensor(op, "grad_out", &args->grad_out, args->grad_out.dtype, 0, GK_MAX_DIMS));
    const int nd = args->grad_out.ndim;
    TRY(check_tensor(op, "saved", &args->saved, args->saved.dtype, nd, nd));
    TRY(check_tensor(op, "grad_in", &args->grad_in, args->grad_out.dtype, nd, nd));
    REQUIRE((args->saved.dtype == GK_F64) == (args->grad_out.dtype == GK_F64), "%s: saved is %s, grad_out is %s", op,
            gk_dtype_name(args->saved.dtype), gk_dtype_name(args->grad_out.dtype));
    for (int d = 0; d < nd; ++d) {
        TRY(check_size(op, "saved", &args->saved, d, args->grad_out.shape[d]));
        TRY(check_size(op, "grad_in", &args->grad_in, d, args->grad_out.shape[d]));
    }
    REQUIRE((unsigned)args->activation <= GK_ACT_SILU, "%s: activation is %d", op, (int)args->activation);
    return run(op, ctx, GK_OP_GEMM_ACT_BWD, args->grad_out.dtype, args, NULL, 0);
}

/* ---- flash_attn ---------------------------------------------------------------------------------------- */
static gk_status check_rules(const char *op, const gk_attn_rules *r, gk_dtype dtype, int64_t batch, int64_t heads_q) {
    REQUIRE(isfinite(r->scale), "%s: scale is %g, expected a finite value", op, r->scale);
    REQUIRE(fabs(r->scale) <= gk_scale_limit(dtype), "%s: scale is %g, expected at most 1e38 in size with %s", op,
            r->scale, gk_dtype_name(dtype));
    REQUIRE(isfinite(r->softcap) && r->softcap >= 0, "%s: softcap is %g, expected 0 or more", op, r->softcap);
    REQUIRE(gk_holds_softcap(r, dtype), "%s: scale is %g and softcap %g, expected a quotient of at most 1e37 with %s",
            op, r->scale, r->softcap, gk_dtype_name(dtype));
    REQUIRE(r->window_left >= -1, "%s: window_left is %lld, expected -1 or more", op, (long long)r->window_left);
    REQUIRE(r->window_right >= -1, "%s: window_right is %lld, expected -1 or more", op, (long long)r->window_right);
    if (r->alibi_slopes) {
        TRY(check_tensor(op, "alibi_slopes", r->alibi_slopes, stats_dtype(dtype), 1, 2));
        TRY(check_size(op, "alibi_slopes", r->alibi_slopes, r->alibi_slopes->ndim - 1, heads_q));
        if (r->alibi_slopes->ndim == 2) TRY(check_size(op, "alibi_slopes", r->alibi_slopes, 0, batch));
    }
    if (r->sinks) {
        TRY(check_tensor(op, "sinks", r->sinks, stats_dtype(dtype), 1, 1));
        TRY(check_size(op, "sinks", r->sinks, 0, heads_q));
    }
    return GK_OK;
}

static gk_status check_heads(const char *op, int64_t heads_q, int64_t heads_kv) {
    REQUIRE(heads_kv > 0 ? heads_q % heads_kv == 0 : heads_q == 0,
            "%s: q has %lld heads, expected a multiple of the %lld of k", op, (long long)heads_q, (long long)heads_kv);
    return GK_OK;
}

static gk_status check_head_dim(const char *op, const char *name, const gk_context *ctx, int64_t d) {
    if (ctx->device == GK_CUDA) {
        if (d < 8 || d > 256 || d % 8 != 0)
            return gk_fail(GK_ERR_UNSUPPORTED,
                           "%s: %s has head_dim %lld; supported on CUDA are multiples of 8 from 8 to 256", op, name,
                           (long long)d);
        return GK_OK;
    }
    if (d < 1 || d > 512)
        return gk_fail(GK_ERR_UNSUPPORTED, "%s: %s has head_dim %lld; supported are 1 to 512", op, name, (long long)d);
    return GK_OK;
}

/* CUDA kernels count tokens in 32 bits, with a bit to spare for sums. */
static gk_status check_length(const char *op, const char *name, const gk_context *ctx, int64_t n) {
    if (ctx->device == GK_CUDA && n > INT64_C(1) << 30)
        return gk_fail(GK_ERR_UNSUPPORTED, "%s: %s has %lld tokens; supported on CUDA are up to 2^30", op, name,
                       (long long)n);
    return GK_OK;
}

static bool is_contiguous(const gk_tensor *t) {
    int64_t s = 1;
    for (int d = t->ndim - 1; d >= 0; --d) {
        if (t->shape[d] != 1 && t->stride[d] != s) return false;
        s *= t->shape[d];
    }
    return true;
}

/* lse may have no data, which only forward allows. */
static gk_status check_flash(const char *op, const gk_context *ctx, const gk_flash_attn_args *f, bool contents) {
    REQUIRE(f, "%s: args is NULL", op);
    TRY(check_context(op, ctx, f->size, sizeof *f));
    const bool packed = f->cu_seqlens_q != NULL;
    const int nd = packed ? 3 : 4, last = nd - 1, row = packed ? 0 : 2;
    const gk_dtype dtype = f->q.dtype;
    REQUIRE(is_float(dtype), "%s: q is %s, expected a floating dtype", op, gk_dtype_name(dtype));
    TRY(check_tensor(op, "q", &f->q, dtype, nd, nd));
    TRY(check_tensor(op, "k", &f->k, dtype, nd, nd));
    TRY(check_tensor(op, "v", &f->v, dtype, nd, nd));
    TRY(check_tensor(op, "out", &f->out, dtype, nd, nd));
    TRY(check_layout(op, "lse", &f->lse, stats_dtype(dtype), nd - 1, nd - 1));
    TRY(check_size(op, "k", &f->k, last, f->q.shape[last]));
    TRY(check_head_dim(op, "q", ctx, f->q.shape[last]));
    TRY(check_head_dim(op, "v", ctx, f->v.shape[last]));
    TRY(check_size(op, "v", &f->v, 1, f->k.shape[1]));
    TRY(check_size(op, "v", &f->v, row, f->k.shape[row]));
    TRY(check_heads(op, f->q.shape[1], f->k.shape[1]));
    for (int d = 0; d < last; ++d) {
        TRY(check_size(op, "out", &f->out, d, f->q.shape[d]));
        TRY(check_size(op, "lse", &f->lse, d, f->q.shape[d]));
    }
    TRY(check_size(op, "out", &f->out, last, f->v.shape[last]));
    REQUIRE(is_contiguous(&f->lse) || gk_numel(&f->lse) == 0, "%s: lse is not contiguous", op);
    const gk_tensor *dense[4] = {&f->q, &f->k, &f->v, &f->out};
    const char *const names[4] = {"q", "k", "v", "out"};
    for (int i = 0; i < 4; ++i) TRY(check_dense_last(op, names[i], dense[i]));
    int64_t batch = f->q.shape[0];
    if (packed) {
        REQUIRE(f->cu_seqlens_k, "%s: cu_seqlens_k is missing", op);
        TRY(check_tensor(op, "cu_seqlens_q", f->cu_seqlens_q, GK_I32, 1, 1));
        TRY(check_tensor(op, "cu_seqlens_k", f->cu_seqlens_k, GK_I32, 1, 1));
        batch = f->cu_seqlens_q->shape[0] - 1;
        REQUIRE(batch >= 0, "%s: cu_seqlens_q is empty, expected batch + 1 entries", op);
        TRY(check_size(op, "cu_seqlens_k", f->cu_seqlens_k, 0, batch + 1));
        REQUIRE(f->max_seqlen_q >= 0, "%s: max_seqlen_q is %lld, expected 0 or more", op, (long long)f->max_seqlen_q);
        REQUIRE(f->max_seqlen_k >= 0, "%s: max_seqlen_k is %lld, expected 0 or more", op, (long long)f->max_seqlen_k);
        TRY(check_product(op, "sequences, heads and the longest sequence of q", batch, f->q.shape[1],
                          gk_min_i64(f->max_seqlen_q, f->q.shape[0])));
        REQUIRE(!f->rules.kv_start && !f->rules.kv_end, "%s: kv_start and kv_end are for dense calls", op);
    } else {
        TRY(check_size(op, "k", &f->k, 0, batch));
        TRY(check_size(op, "v", &f->v, 0, batch));
        const gk_tensor *bound[2] = {f->rules.kv_start, f->rules.kv_end};
        for (int i = 0; i < 2; ++i) {
            if (!bound[i]) continue;
            TRY(check_tensor(op, i ? "kv_end" : "kv_start", bound[i], GK_I32, 1, 1));
            TRY(check_size(op, i ? "kv_end" : "kv_start", bound[i], 0, batch));
        }
    }
    TRY(check_rules(op, &f->rules, dtype, batch, f->q.shape[1]));
    TRY(check_length(op, "q", ctx, f->q.shape[row]));
    TRY(check_length(op, "k", ctx, f->k.shape[row]));
    if (packed && contents && ctx->device == GK_CPU) {
        TRY(gk_check_cu_seqlens(op, "cu_seqlens_q", f->cu_seqlens_q, f->q.shape[0], f->max_seqlen_q));
        TRY(gk_check_cu_seqlens(op, "cu_seqlens_k", f->cu_seqlens_k, f->k.shape[0], f->max_seqlen_k));
    }
    return GK_OK;
}

/* Keys that each row sees, summed over rows and sequences; contents of packed calls must have been checked. Index tensors on
 * a GPU are not read: kv_start and kv_end then count as 0 and Sk, and every packed sequence as one of equal share. */
static double visible_pairs(const gk_context *ctx, const gk_flash_attn_args *f) {
    const bool packed = f->cu_seqlens_q != NULL, readable = ctx->device == GK_CPU;
    const int64_t batch = packed ? f->cu_seqlens_q->shape[0] - 1 : f->q.shape[0];
    double pairs = 0;
    for (int64_t b = 0; b < batch; ++b) {
        int64_t seq_q = packed ? 0 : f->q.shape[2], seq_k = packed ? 0 : f->k.shape[2], diagonal = f->rules.diagonal;
        if (packed && !readable) {
            seq_q = gk_ceil_div(f->q.shape[0], batch), seq_k = gk_ceil_div(f->k.shape[0], batch);
            diagonal = seq_k - seq_q;
        } else if (packed) {
            const int32_t *cq = f->cu_seqlens_q->data, *ck = f->cu_seqlens_k->data;
            const int64_t sq = f->cu_seqlens_q->stride[0], sk = f->cu_seqlens_k->stride[0];
            seq_q = cq[(b + 1) * sq] - cq[b * sq], seq_k = ck[(b + 1) * sk] - ck[b * sk];
            diagonal = seq_k - seq_q;
        }
        gk_span span = gk_span_make(&f->rules, seq_k, diagonal);
        if (f->rules.kv_start && readable)
            span.key_lo =
                gk_clamp_i64(((const int32_t *)f->rules.kv_start->data)[b * f->rules.kv_start->stride[0]], 0, seq_k);
        if (f->rules.kv_end && readable)
            span.key_hi =
                gk_clamp_i64(((const int32_t *)f->rules.kv_end->data)[b * f->rules.kv_end->stride[0]], 0, seq_k);
        span.key_hi = gk_max_i64(span.key_lo, span.key_hi);
        for (int64_t i = 0; i < seq_q; ++i) pairs += (double)gk_max_i64(0, gk_span_hi(&span, i) - gk_span_lo(&span, i));
    }
    return pairs;
}

static void attn_cost(const gk_context *ctx, const gk_flash_attn_args *f, double products, gk_explanation *out) {
    const int last = f->q.ndim - 1;
    out->bytes =
        tensor_bytes(&f->q) + tensor_bytes(&f->k) + tensor_bytes(&f->v) + tensor_bytes(&f->out) + tensor_bytes(&f->lse);
    out->flops =
        products * visible_pairs(ctx, f) * (double)f->q.shape[1] * (double)(f->q.shape[last] + f->v.shape[last]);
}

size_t gk_flash_attn_fwd_workspace_bytes(const gk_context *ctx, const gk_flash_attn_args *args) {
    if (check_flash("gk_flash_attn_fwd", ctx, args, false) != GK_OK) return 0;
    return workspace_of("gk_flash_attn_fwd", ctx, GK_OP_FLASH_ATTN_FWD, args->q.dtype, args);
}

gk_status gk_flash_attn_fwd(const gk_context *ctx, const gk_flash_attn_args *args) {
    TRY(check_flash("gk_flash_attn_fwd", ctx, args, true));
    return run("gk_flash_attn_fwd", ctx, GK_OP_FLASH_ATTN_FWD, args->q.dtype, args, args->workspace,
               args->workspace_bytes);
}

gk_status gk_explain_flash_attn_fwd(const gk_context *ctx, const gk_flash_attn_args *args, gk_explanation *out) {
    TRY(check_flash("gk_explain_flash_attn_fwd", ctx, args, true));
    TRY(explain("gk_explain_flash_attn_fwd", ctx, GK_OP_FLASH_ATTN_FWD, args->q.dtype, args, out));
    attn_cost(ctx, args, 2, out);
    bound(ctx, args->q.dtype, out);
    return GK_OK;
}

static gk_status check_flash_bwd(const char *op, const gk_context *ctx, const gk_flash_attn_bwd_args *g,
                                 bool contents) {
    REQUIRE(g, "%s: args is NULL", op);
    TRY(check_context(op, ctx, g->size, sizeof *g));
    const gk_flash_attn_args *f = &g->fwd;
    TRY(check_flash(op, ctx, f, contents));
    const int nd = f->q.ndim;
    TRY(check_tensor(op, "lse", &f->lse, f->lse.dtype, nd - 1, nd - 1));
    const gk_tensor *grads[4] = {&g->grad_out, &g->dq, &g->dk, &g->dv}, *like[4] = {&f->out, &f->q, &f->k, &f->v};
    const char *const names[4] = {"grad_out", "dq", "dk", "dv"};
    for (int i = 0; i < 4; ++i) {
        TRY(check_tensor(op, names[i], grads[i], f->q.dtype, nd, nd));
        for (int d = 0; d < nd; ++d) TRY(check_size(op, names[i], grads[i], d, like[i]->shape[d]));
        TRY(check_dense_last(op, names[i], grads[i]));
    }
    if (g->grad_lse) {
        TRY(check_tensor(op, "grad_lse", g->grad_lse, f->lse.dtype, nd - 1, nd - 1));
        for (int d = 0; d < nd - 1; ++d) TRY(check_size(op, "grad_lse", g->grad_lse, d, f->lse.shape[d]));
    }
    if (g->dsinks) {
        REQUIRE(f->rules.sinks, "%s: dsinks is given but sinks is not", op);
        TRY(check_tensor(op, "dsinks", g->dsinks, f->lse.dtype, 1, 1));
        TRY(check_size(op, "dsinks", g->dsinks, 0, f->q.shape[1]));
    }
    return GK_OK;
}

size_t gk_flash_attn_bwd_workspace_bytes(const gk_context *ctx, const gk_flash_attn_bwd_args *args) {
    if (check_flash_bwd("gk_flash_attn_bwd", ctx, args, false) != GK_OK) return 0;
    return workspace_of("gk_flash_attn_bwd", ctx, GK_OP_FLASH_ATTN_BWD, args->fwd.q.dtype, args);
}

gk_status gk_flash_attn_bwd(const gk_context *ctx, const gk_flash_attn_bwd_args *args) {
    TRY(check_flash_bwd("gk_flash_attn_bwd", ctx, args, true));
    return run("gk_flash_attn_bwd", ctx, GK_OP_FLASH_ATTN_BWD, args->fwd.q.dtype, args, args->workspace,
               args->workspace_bytes);
}

gk_status gk_explain_flash_attn_bwd(const gk_context *ctx, const gk_flash_attn_bwd_args *args, gk_explanation *out) {
    TRY(check_flash_bwd("gk_explain_flash_attn_bwd", ctx, args, true));
    TRY(explain("gk_explain_flash_attn_bwd", ctx, GK_OP_FLASH_ATTN_BWD, args->fwd.q.dtype, args, out));
    attn_cost(ctx, &args->fwd, 5,
              out); /* five products, of which three have head_dim and two head_dim_v: 2.5 x forward */
    out->bytes +=
        tensor_bytes(&args->grad_out) + tensor_bytes(&args->dq) + tensor_bytes(&args->dk) + tensor_bytes(&args->dv);
    bound(ctx, args->fwd.q.dtype, out);
    return GK_OK;
}

/* ---- paged_attn -------------------------------------------------------------------------------------------- */
static gk_status check_scales(const char *op, const char *name, const gk_tensor *t, gk_dtype dtype, int64_t heads_kv) {
    if (!t) return GK_OK;
    TRY(check_tensor(op, name, t, stats_dtype(dtype), 0, 1));
    if (t->ndim == 1) TRY(check_size(op, name, t, 0, heads_kv));
    return GK_OK;
}

static gk_status check_paged(const char *op, const gk_context *ctx, const gk_paged_attn_args *p, bool contents) {
    REQUIRE(p, "%s: args is NULL", op);
    TRY(check_context(op, ctx, p->size, sizeof *p));
    const gk_dtype dtype = p->q.dtype;
    REQUIRE(is_float(dtype), "%s: q is %s, expected a floating dtype", op, gk_dtype_name(dtype));
    TRY(check_tensor(op, "q", &p->q, dtype, 3, 3));
    TRY(check_tensor(op, "k_cache", &p->k_cache, dtype, 4, 4));
    TRY(check_tensor(op, "v_cache", &p->v_cache, dtype, 4, 4));
    TRY(check_tensor(op, "block_table", &p->block_table, GK_I32, 2, 2));
    TRY(check_tensor(op, "seq_lens", &p->seq_lens, GK_I32, 1, 1));
    TRY(check_tensor(op, "out", &p->out, dtype, 3, 3));
    const int64_t tokens = p->q.shape[0], heads_q = p->q.shape[1], heads_kv = p->k_cache.shape[2];
    const int64_t batch = p->seq_lens.shape[0];
    TRY(check_heads(op, heads_q, heads_kv));
    TRY(check_size(op, "k_cache", &p->k_cache, 3, p->q.shape[2]));
    for (int d = 0; d < 3; ++d) TRY(check_size(op, "v_cache", &p->v_cache, d, p->k_cache.shape[d]));
    REQUIRE(p->k_cache.shape[1] > 0 || p->k_cache.shape[0] == 0, "%s: k_cache has block_size 0, expected 1 or more",
            op);
    TRY(check_head_dim(op, "q", ctx, p->q.shape[2]));
    TRY(check_head_dim(op, "v_cache", ctx, p->v_cache.shape[3]));
    TRY(check_size(op, "block_table", &p->block_table, 0, batch));
    TRY(check_size(op, "out", &p->out, 0, tokens));
    TRY(check_size(op, "out", &p->out, 1, heads_q));
    TRY(check_size(op, "out", &p->out, 2, p->v_cache.shape[3]));
    REQUIRE(is_contiguous(&p->out) || gk_numel(&p->out) == 0, "%s: out is not contiguous", op);
    if (p->lse.data) {
        TRY(check_tensor(op, "lse", &p->lse, stats_dtype(dtype), 2, 2));
        TRY(check_size(op, "lse", &p->lse, 0, tokens));
        TRY(check_size(op, "lse", &p->lse, 1, heads_q));
        REQUIRE(is_contiguous(&p->lse) || gk_numel(&p->lse) == 0, "%s: lse is not contiguous", op);
    }
    TRY(check_dense_last(op, "q", &p->q));
    TRY(check_dense_last(op, "k_cache", &p->k_cache));
    TRY(check_dense_last(op, "v_cache", &p->v_cache));
    if (p->cu_seqlens_q) {
        TRY(check_tensor(op, "cu_seqlens_q", p->cu_seqlens_q, GK_I32, 1, 1));
        TRY(check_size(op, "cu_seqlens_q", p->cu_seqlens_q, 0, batch + 1));
        REQUIRE(p->max_seqlen_q >= 0, "%s: max_seqlen_q is %lld, expected 0 or more", op, (long long)p->max_seqlen_q);
    } else {
        REQUIRE(batch ? tokens % batch == 0 : tokens == 0,
                "%s: q has %lld tokens, expected a multiple of the %lld sequences", op, (long long)tokens,
                (long long)batch);
    }
    TRY(check_rules(op, &p->rules, dtype, batch, heads_q));
    TRY(check_scales(op, "k_scale", p->k_scale, dtype, heads_kv));
    TRY(check_scales(op, "v_scale", p->v_scale, dtype, heads_kv));
    TRY(check_length(op, "q", ctx, tokens));
    TRY(check_product(op, "sequences, heads and tokens", batch, heads_q,
                      p->cu_seqlens_q ? gk_min_i64(p->max_seqlen_q, tokens) : 1));
    TRY(check_product(op, "sequences, columns of block_table and block_size", batch, p->block_table.shape[1],
                      p->k_cache.shape[1]));
    TRY(check_length(op, "block_table", ctx, p->block_table.shape[1] * p->k_cache.shape[1]));
    if (contents && ctx->device == GK_CPU) TRY(gk_check_paged_contents(p));
    return GK_OK;
}

size_t gk_paged_attn_workspace_bytes(const gk_context *ctx, const gk_paged_attn_args *args) {
    if (check_paged("gk_paged_attn", ctx, args, false) != GK_OK) return 0;
    return workspace_of("gk_paged_attn", ctx, GK_OP_PAGED_ATTN, args->q.dtype, args);
}

gk_status gk_paged_attn(const gk_context *ctx, const gk_paged_attn_args *args) {
    TRY(check_paged("gk_paged_attn", ctx, args, true));
    return run("gk_paged_attn", ctx, GK_OP_PAGED_ATTN, args->q.dtype, args, args->workspace, args->workspace_bytes);
}

gk_status gk_explain_paged_attn(const gk_context *ctx, const gk_paged_attn_args *args, gk_explanation *out) {
    TRY(check_paged("gk_explain_paged_attn", ctx, args, true));
    TRY(explain("gk_explain_paged_attn", ctx, GK_OP_PAGED_ATTN, args->q.dtype, args, out));
    const int64_t batch = args->seq_lens.shape[0], heads_kv = args->k_cache.shape[2];
    const double dims = (double)(args->q.shape[2] + args->v_cache.shape[3]);
    double keys = 0, pairs = 0;
    for (int64_t b = 0; b < batch; ++b) {
        /* on a GPU lengths are not read: every sequence then counts with all that its table row holds */
        const bool readable = ctx->device == GK_CPU;
        const int64_t len = readable ? ((const int32_t *)args->seq_lens.data)[b * args->seq_lens.stride[0]]
                                     : args->block_table.shape[1] * args->k_cache.shape[1];
        int64_t n = batch ? args->q.shape[0] / batch : 0;
        if (args->cu_seqlens_q && readable) {
            const int32_t *cu = args->cu_seqlens_q->data;
            const int64_t s = args->cu_seqlens_q->stride[0];
            n = cu[(b + 1) * s] - cu[b * s];
        }
        gk_attn_rules rules = args->rules;
        rules.window_right = -1;
        gk_span span = gk_span_make(&rules, len, len - n);
        if (n == 0 || len == 0) continue;
        keys += (double)(gk_span_hi(&span, n - 1) - gk_span_lo(&span, 0));
        for (int64_t i = 0; i < n; ++i) pairs += (double)gk_max_i64(0, gk_span_hi(&span, i) - gk_span_lo(&span, i));
    }
    out->bytes = keys * (double)heads_kv * dims * (double)gk_dtype_bytes(args->q.dtype) + tensor_bytes(&args->q) +
                 tensor_bytes(&args->out) + tensor_bytes(&args->lse);
    out->flops = 2 * pairs * (double)args->q.shape[1] * dims;
    bound(ctx, args->q.dtype, out);
    return GK_OK;
}

gk_status gk_kv_cache_write(const gk_context *ctx, const gk_kv_cache_write_args *args) {
    const char *op = "gk_kv_cache_write";
    REQUIRE(args, "%s: args is NULL", op);
    TRY(check_context(op, ctx, args->size, sizeof *args));
    const gk_dtype dtype = args->k.dtype;
    REQUIRE(is_float(dtype), "%s: k is %s, expected a floating dtype", op, gk_dtype_name(dtype));
    TRY(check_tensor(op, "k", &args->k, dtype, 3, 3));
    TRY(check_tensor(op, "v", &args->v, dtype, 3, 3));
    TRY(check_tensor(op, "k_cache", &args->k_cache, dtype, 4, 4));
    TRY(check_tensor(op, "v_cache", &args->v_cache, dtype, 4, 4));
    REQUIRE(args->slots.dtype == GK_I32 || args->slots.dtype == GK_I64, "%s: slots is %s, expected int64 or int32", op,
            gk_dtype_name(args->slots.dtype));
    TRY(check_tensor(op, "slots", &args->slots, args->slots.dtype, 1, 1));
    const int64_t tokens = args->k.shape[0], heads_kv = args->k.shape[1];
    TRY(check_size(op, "v", &args->v, 0, tokens));
    TRY(check_size(op, "v", &args->v, 1, heads_kv));
    TRY(check_size(op, "k_cache", &args->k_cache, 2, heads_kv));
    TRY(check_size(op, "k_cache", &args->k_cache, 3, args->k.shape[2]));
    for (int d = 0; d < 3; ++d) TRY(check_size(op, "v_cache", &args->v_cache, d, args->k_cache.shape[d]));
    TRY(check_size(op, "v_cache", &args->v_cache, 3, args->v.shape[2]));
    TRY(check_size(op, "slots", &args->slots, 0, tokens));
    TRY(check_scales(op, "k_scale", args->k_scale, dtype, heads_kv));
    TRY(check_scales(op, "v_scale", args->v_scale, dtype, heads_kv));
    if (ctx->device == GK_CPU) TRY(gk_check_slots(args));
    return run(op, ctx, GK_OP_KV_CACHE_WRITE, dtype, args, NULL, 0);
}

/* ---- attn_merge ------------------------------------------------------------------------------------------------ */
gk_status gk_attn_merge(const gk_context *ctx, const gk_attn_merge_args *args) {
    const char *op = "gk_attn_merge";
    REQUIRE(args, "%s: args is NULL", op);
    TRY(check_context(op, ctx, args->size, sizeof *args));
    const gk_dtype dtype = args->out_a.dtype;
    REQUIRE(is_float(dtype), "%s: out_a is %s, expected a floating dtype", op, gk_dtype_name(dtype));
    TRY(check_tensor(op, "out_a", &args->out_a, dtype, 1, GK_MAX_DIMS));
    const int nd = args->out_a.ndim;
    TRY(check_tensor(op, "out_b", &args->out_b, dtype, nd, nd));
    TRY(check_tensor(op, "out", &args->out, dtype, nd, nd));
    TRY(check_tensor(op, "lse_a", &args->lse_a, stats_dtype(dtype), nd - 1, nd - 1));
    TRY(check_tensor(op, "lse_b", &args->lse_b, stats_dtype(dtype), nd - 1, nd - 1));
    TRY(check_tensor(op, "lse", &args->lse, stats_dtype(dtype), nd - 1, nd - 1));
    for (int d = 0; d < nd; ++d) {
        TRY(check_size(op, "out_b", &args->out_b, d, args->out_a.shape[d]));
        TRY(check_size(op, "out", &args->out, d, args->out_a.shape[d]));
        if (d == nd - 1) break;
        TRY(check_size(op, "lse_a", &args->lse_a, d, args->out_a.shape[d]));
        TRY(check_size(op, "lse_b", &args->lse_b, d, args->out_a.shape[d]));
        TRY(check_size(op, "lse", &args->lse, d, args->out_a.shape[d]));
    }
    REQUIRE((is_contiguous(&args->out) && is_contiguous(&args->lse)) || gk_numel(&args->out) == 0,
            "%s: out and lse must be contiguous", op);
    return run(op, ctx, GK_OP_ATTN_MERGE, dtype, args, NULL, 0);
}
