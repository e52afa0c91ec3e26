/* SPDX-License-Identifier: BSD-3-Clause */
/* attention.c: one attention layer in C: q, k, v = x w (gk_gemm), then causal attention
 * (gk_flash_attn_fwd).
 *
 * x [SEQ, MODEL]   w [MODEL, 3 * MODEL]   q, k, v [1, HEADS, SEQ, HEAD_DIM]
 *
 * q, k and v are views of x w, so nothing is copied between the two ops. Every result is checked
 * against plain loops in double; the program exits with 1 if one is wrong. */
#include <gpukern.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    SEQ = 100,
    HEADS = 4,
    HEAD_DIM = 32,
    MODEL = HEADS * HEAD_DIM
};

static void must(gk_status status, const char *what) {
    if (status == GK_OK) return;
    fprintf(stderr, "%s: %s: %s\n", what, gk_status_name(status), gk_last_error());
    exit(1);
}

/* The program provides the workspace: 64-byte aligned, of the size that the op asks for; NULL for
 * none. */
static void *workspace(size_t bytes) {
    if (bytes == 0) return NULL;
    void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p) {
        fprintf(stderr, "out of memory: %zu bytes of workspace\n", bytes);
        exit(1);
    }
    return p;
}

static gk_tensor matrix(float *data, int64_t rows, int64_t columns) { /* a result */
    return (gk_tensor){
        .data = data, .dtype = GK_F32, .ndim = 2, .shape = {rows, columns}, .stride = {columns, 1}};
}

static gk_tensor const_matrix(const float *data, int64_t rows, int64_t columns) { /* an input */
    return (gk_tensor){.const_data = data,
                       .dtype = GK_F32,
                       .ndim = 2,
                       .shape = {rows, columns},
                       .stride = {columns, 1}};
}

/* The heads of a [SEQ, columns] matrix as [1, HEADS, SEQ, HEAD_DIM], transposed by strides. */
static gk_tensor heads_of(float *data, int64_t columns) {
    return (gk_tensor){.data = data,
                       .dtype = GK_F32,
                       .ndim = 4,
                       .shape = {1, HEADS, SEQ, HEAD_DIM},
                       .stride = {SEQ * columns, HEAD_DIM, columns, 1}};
}

/* A random number, uniform in [-amplitude, amplitude]. */
static void fill(float *data, int64_t n, uint32_t seed, float amplitude) {
    for (int64_t i = 0; i < n; ++i) {
        seed = seed * 1664525u + 1013904223u;
        data[i] = ((float)(seed >> 8) / 8388608.0f - 1.0f) * amplitude;
    }
}

/* The largest error of `out`, in units of float's rounding at the largest expected value. */
static double error_ulp(const float *out, const double *expected, int64_t n) {
    double worst = 0, largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        double error = fabs(out[i] - expected[i]);
        if (!(error <= worst)) worst = error; /* a NaN counts as an error */
        largest = fmax(largest, fabs(expected[i]));
    }
    return worst / (largest * 0x1p-24);
}

static float x[SEQ * MODEL], w[MODEL * 3 * MODEL], qkv[SEQ * 3 * MODEL], out[SEQ * MODEL];
static float lse[HEADS * SEQ];
static double qkv_expected[SEQ * 3 * MODEL], out_expected[SEQ * MODEL];

static void expect_qkv(void) {
    for (int i = 0; i < SEQ; ++i)
        for (int j = 0; j < 3 * MODEL; ++j) {
            double sum = 0;
            for (int k = 0; k < MODEL; ++k) sum += (double)x[i * MODEL + k] * w[k * 3 * MODEL + j];
            qkv_expected[i * 3 * MODEL + j] = sum;
        }
}

static void expect_attention(double scale) {
    for (int h = 0; h < HEADS; ++h)
        for (int i = 0; i < SEQ; ++i) {
            const float *q = qkv + i * 3 * MODEL + h * HEAD_DIM;
            double p[SEQ], top = -INFINITY, sum = 0;
            for (int j = 0; j <= i; ++j) {
                const float *k = qkv + j * 3 * MODEL + MODEL + h * HEAD_DIM;
                p[j] = 0;
                for (int d = 0; d < HEAD_DIM; ++d) p[j] += (double)q[d] * k[d] * scale;
                top = fmax(top, p[j]);
            }
            for (int j = 0; j <= i; ++j) sum += p[j] = exp(p[j] - top);
            for (int d = 0; d < HEAD_DIM; ++d) {
                double value = 0;
                for (int j = 0; j <= i; ++j)
                    value += p[j] / sum * qkv[j * 3 * MODEL + 2 * MODEL + h * HEAD_DIM + d];
                out_expected[i * MODEL + h * HEAD_DIM + d] = value;
            }
        }
}

int main(void) {
    /* parallel_for is NULL: one thread. A program with a thread pool passes it here. */
    gk_context ctx = GK_CONTEXT_INIT;
    gk_explanation found = GK_EXPLANATION_INIT;
    double scale = 1 / sqrt(HEAD_DIM);

    printf("gpukern %s on %s (this machine has %s)\n", gk_version(), gk_cpu_isa(), gk_cpu_isas());
    fill(x, SEQ * MODEL, 1, 1.0f);
    fill(w, MODEL * 3 * MODEL, 2, 0.3f);

    gk_gemm_args gemm = GK_GEMM_ARGS_INIT;
    gemm.a = const_matrix(x, SEQ, MODEL);
    gemm.b = const_matrix(w, MODEL, 3 * MODEL);
    gemm.out = matrix(qkv, SEQ, 3 * MODEL);
    gemm.workspace_bytes = gk_gemm_workspace_bytes(&ctx, &gemm);
    gemm.workspace = workspace(gemm.workspace_bytes);
    must(gk_explain_gemm(&ctx, &gemm, &found), "gk_explain_gemm");
    must(gk_gemm(&ctx, &gemm), "gk_gemm");
    expect_qkv();
    double gemm_error = error_ulp(qkv, qkv_expected, SEQ * 3 * MODEL);
    printf("gemm       by %-32s error %5.2f ulp of the largest value\n", found.instance,
           gemm_error);

    gk_flash_attn_args attn = GK_FLASH_ATTN_ARGS_INIT;
    attn.q = heads_of(qkv, 3 * MODEL);
    attn.k = heads_of(qkv + MODEL, 3 * MODEL);
    attn.v = heads_of(qkv + 2 * MODEL, 3 * MODEL);
    attn.rules.scale = scale;
    attn.rules.is_causal = 1;
    attn.out = heads_of(out, MODEL);
    attn.lse = (gk_tensor){.data = lse,
                           .dtype = GK_F32,
                           .ndim = 3,
                           .shape = {1, HEADS, SEQ},
                           .stride = {HEADS * SEQ, SEQ, 1}};
    attn.workspace_bytes = gk_flash_attn_fwd_workspace_bytes(&ctx, &attn);
    attn.workspace = workspace(attn.workspace_bytes);
    must(gk_explain_flash_attn_fwd(&ctx, &attn, &found), "gk_explain_flash_attn_fwd");
    must(gk_flash_attn_fwd(&ctx, &attn), "gk_flash_attn_fwd");
    expect_attention(scale);
    double attn_error = error_ulp(out, out_expected, SEQ * MODEL);
    printf("flash_attn by %-32s error %5.2f ulp of the largest value\n", found.instance,
           attn_error);

    /* A wrong argument gives an error text, and nothing is written. */
    gemm.b.shape[0] = MODEL - 1;
    gk_status refused = gk_gemm(&ctx, &gemm);
    printf("a wrong shape gives %s: %s\n", gk_status_name(refused), gk_last_error());

    free(gemm.workspace);
    free(attn.workspace);
    /* float32 sums of MODEL products are far below these bounds; a wrong element would be millions
     * of ulp off. */
    return !(gemm_error < 32 && attn_error < 32 && refused == GK_ERR_ARGUMENT);
}
