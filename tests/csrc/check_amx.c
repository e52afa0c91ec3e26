/* SPDX-License-Identifier: BSD-3-Clause */
/* check_amx: AMX's instructions and their emulation give the same bits. On a machine without
 * AMX, asking for it by name is an error. check_gemm runs the emulation over its whole grid. */
#include "check.h"

#include "cpu/kernels.h"

enum {
    MOST = 200
};
static uint16_t a[MOST * MOST], b[MOST * MOST], out[4][MOST * MOST];
static char workspace[1 << 24] __attribute__((aligned(64)));

static gk_tensor matrix(void *data, int64_t rows, int64_t cols, bool transposed) {
    gk_tensor t = {
        .data = data, .dtype = GK_BF16, .ndim = 2, .shape = {rows, cols}, .stride = {cols, 1}};
    if (transposed) {
        t.stride[0] = 1;
        t.stride[1] = rows;
    }
    return t;
}

static gk_status product(const char *isa, int32_t num_threads, int64_t m, int64_t n, int64_t k,
                         int layout, uint16_t *to) {
    gk_context ctx = check_context(isa, num_threads);
    gk_gemm_args args = GK_GEMM_ARGS_INIT;
    args.a = matrix(a, m, k, layout & 1);
    args.b = matrix(b, k, n, layout & 2);
    args.out = matrix(to, m, n, false);
    args.workspace_bytes = gk_gemm_workspace_bytes(&ctx, &args);
    args.workspace = workspace;
    return gk_gemm(&ctx, &args);
}

int main(void) {
    const bool emulated = gk_cpu_has(GK_ISA_AMX_EMULATED), real = gk_cpu_has(GK_ISA_AMX);
    for (int i = 0; i < MOST * MOST; ++i) {
        a[i] = gk_f32_to_bf16((float)check_uniform(-1, 1));
        b[i] = gk_f32_to_bf16((float)check_uniform(-1, 1));
        if (i % 97 == 0) a[i] = 0x0003; /* a subnormal number */
    }
    check_result(!emulated || gk_tiles_multiply_amx_emulated(),
                 "the emulation multiplies tiles wrongly");
    check_result(real || product("amx", 1, 64, 64, 64, 0, out[0]) == GK_ERR_DEVICE,
                 "amx is taken where there is none");
    check_result(real || strstr(gk_last_error(), "\"amx\""), "the error does not name amx: %s",
                 gk_last_error());
    for (int i = 0; emulated && i < 40; ++i) {
        const int64_t m = 25 + check_below(MOST - 25), n = 1 + check_below(MOST),
                      k = check_below(MOST), layout = i % 4;
        const size_t bytes = 2 * (size_t)(m * n);
        snprintf(check_case, sizeof check_case, "%lld x %lld x %lld layout %d", (long long)m,
                 (long long)n, (long long)k, (int)layout);
        check_result(product("amx_emulated", 1, m, n, k, (int)layout, out[0]) == GK_OK, "%s",
                     gk_last_error());
        check_result(product("amx_emulated", CHECK_WORKERS, m, n, k, (int)layout, out[1]) == GK_OK,
                     "%s", gk_last_error());
        check_result(memcmp(out[0], out[1], bytes) == 0, "bits depend on the threads");
        if (!real) continue;
        check_result(product("amx", 1, m, n, k, (int)layout, out[2]) == GK_OK, "%s",
                     gk_last_error());
        check_result(memcmp(out[0], out[2], bytes) == 0,
                     "the instructions and their emulation differ");
    }
    return check_end();
}
