/* SPDX-License-Identifier: BSD-3-Clause */
/* explain_twice: asks two libraries which kernels random products would run on described GPUs, and
 * compares the answers. One library is linked in, the functions of the other are arguments.
 * tests/cli/test_explained.py links the parts of csrc that explain a call in a build without nvcc,
 * and passes the functions of a library that nvcc built. */
#include "gpukern.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static uint64_t state = 88172645463325252u;

static int64_t pick(int64_t low, int64_t high) { /* xorshift */
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return low + (int64_t)(state % (uint64_t)(high - low + 1));
}

static int64_t size(void) {
    switch (pick(0, 6)) {
    case 0: return pick(0, 20);
    case 1: return pick(1, 70);
    case 2: return pick(60, 300);
    case 3: return 8 * pick(1, 1200);
    case 4: return 128 * pick(1, 220);
    case 5: return (int64_t)1 << pick(0, 13);
    default: return pick(1, 9000);
    }
}

static _Alignas(256) char memory[4096];

/* A tensor [batch.., rows, cols]. Most have dense rows or columns and an aligned address. No
 * element is read. */
static gk_tensor tensor(gk_dtype dtype, int num_batch, const int64_t *batch, int64_t rows,
                        int64_t cols, bool is_result) {
    const int64_t bytes = dtype == GK_F64 ? 8 : dtype == GK_F32 ? 4 : 2;
    gk_tensor t = {.data = memory + (pick(0, 6) == 0 ? bytes * pick(1, 7) : 0), .dtype = dtype};
    const int64_t how = is_result ? 0 : pick(0, 9);
    const int64_t pad = pick(0, 4) == 0 ? pick(1, 17) : 8 * pick(0, 1);
    const bool along_rows = how >= 5 && how < 9;
    const int64_t inner = (along_rows ? rows : cols) * (how == 9 ? 2 : 1) + pad;
    int64_t step = (inner ? inner : 1) * (along_rows ? cols : rows);
    t.ndim = num_batch + 2;
    t.shape[num_batch] = rows;
    t.shape[num_batch + 1] = cols;
    if (along_rows) {
        t.stride[num_batch] = 1;
        t.stride[num_batch + 1] = inner ? inner : 1;
    } else {
        t.stride[num_batch] = inner ? inner : 1;
        t.stride[num_batch + 1] = how == 9 ? 2 : 1;
    }
    step = step ? step : 1;
    for (int d = num_batch - 1; d >= 0; --d) {
        t.shape[d] = batch[d];
        t.stride[d] = step;
        step *= batch[d];
    }
    return t;
}

typedef struct library {
    gk_status (*arch)(const char *arch, int32_t *index);
    gk_status (*explain)(const gk_context *ctx, const gk_gemm_args *args, gk_explanation *out);
    gk_status (*instances)(const gk_context *ctx, const gk_gemm_args *args, const char **names);
    const char *(*error)(void);
} library;

enum {
    ANSWER_BYTES = 8192
};

static void answer(const library *of, const char *arch, const gk_gemm_args *args, char *text) {
    gk_context ctx = {.size = sizeof ctx, .device = GK_CUDA, .num_threads = 1};
    gk_explanation x = {.size = sizeof x};
    const char *names = "";
    if (of->arch(arch, &ctx.index) != GK_OK || of->explain(&ctx, args, &x) != GK_OK ||
        of->instances(&ctx, args, &names) != GK_OK) {
        snprintf(text, ANSWER_BYTES, "%s", of->error());
        return;
    }
    snprintf(text, ANSWER_BYTES,
             "%s %s, tile %lld %lld %lld %lld, %lld tasks, %lld chunks, %lld bytes of workspace, "
             "%.17g waves, %.17g us, %.17g bytes, %.17g FLOPs, of %s",
             x.instance, x.isa, (long long)x.tile[0], (long long)x.tile[1], (long long)x.tile[2],
             (long long)x.tile[3], (long long)x.tasks, (long long)x.chunks,
             (long long)x.workspace_bytes, x.waves, x.bound_us, x.bytes, x.flops, names);
}

/* Compares the answers to `calls` random calls. Returns the number that differ, and the first of
 * them in `difference`, of at least 3 * 8192 bytes. */
GK_API int64_t explain_twice(const library *other, int64_t calls, char *difference) {
    static const char *const archs[] = {"sm_90", "sm_90", "sm_90", "sm_80", "sm_86", "sm_89"};
    static const gk_dtype dtypes[] = {GK_BF16, GK_BF16, GK_F16, GK_F32, GK_F32, GK_F64};
    static const library own = {gk_cuda_arch, gk_explain_gemm, gk_gemm_instances, gk_last_error};
    static char texts[2][ANSWER_BYTES];
    int64_t different = 0;
    for (int64_t i = 0; i < calls; ++i) {
        const char *arch = archs[pick(0, 5)];
        const gk_dtype dtype = dtypes[pick(0, 5)];
        const int64_t m = size(), n = size(), k = size();
        const int64_t batch[] = {pick(1, 5), pick(1, 5), pick(1, 5)};
        const int num_batch = pick(0, 5) == 0 ? (int)pick(1, 3) : 0;
        gk_gemm_args g = {.size = sizeof g, .alpha = 1};
        gk_tensor bias = {.data = memory, .dtype = dtype, .ndim = 1, .shape = {n}, .stride = {1}};
        g.a = tensor(dtype, num_batch, batch, m, k, false);
        g.b = tensor(dtype, pick(0, 1) ? num_batch : 0, batch, k, n, false);
        g.out = tensor(dtype, num_batch, batch, m, n, true);
        if ((dtype == GK_BF16 || dtype == GK_F16) && pick(0, 5) == 0) g.out.dtype = GK_F32;
        if (pick(0, 3) == 0) g.bias = &bias;
        gk_tensor c = g.out;
        c.dtype = dtype;
        if (pick(0, 7) == 0) {
            g.c = &c;
            g.beta = 1;
        }
        if (pick(0, 3) == 0) g.activation = (gk_activation)pick(0, 3);
        if (dtype == GK_F32 && pick(0, 2)) g.fp32_precision = GK_TF32;
        answer(&own, arch, &g, texts[0]);
        answer(other, arch, &g, texts[1]);
        if (strcmp(texts[0], texts[1]) == 0) continue;
        if (different++ == 0)
            snprintf(difference, 3 * ANSWER_BYTES,
                     "call %lld, %s, dtype %d, %lld x %lld x %lld:\n%s\n%s", (long long)i, arch,
                     (int)dtype, (long long)m, (long long)n, (long long)k, texts[0], texts[1]);
    }
    return different;
}
