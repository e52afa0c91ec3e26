/* SPDX-License-Identifier: BSD-3-Clause */
/* few_bits.c: a 4-bit weight. It is rounded in groups of 32 along k, packed (gk_pack_weight) and
 * multiplied (gk_weight_gemm).
 *
 * x [M, K] bfloat16   w [N, K], codes -8 to 7 times a scale per group   out [M, N] float32
 *
 * The result is checked against plain loops in double over the rounded weight. Then a call with a
 * wrong shape must be refused. The program exits with 1 if either check fails. */
#include <gpukern_quant.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    M = 3,
    N = 70,
    K = 100,
    GROUP = 32,
    GROUPS = (K + GROUP - 1) / GROUP,
    TILE = 64, /* a packed weight has tiles of 64 x 64 codes, 2,048 bytes each */
    DOWN = (N + TILE - 1) / TILE,
    ACROSS = (K + TILE - 1) / TILE,
    BYTES = 2048
};

static float w[N][K], scale[GROUPS][N], out[M][N];
static int8_t q[N][K];
static uint16_t x[M][K]; /* bfloat16: the upper half of a float */
static uint8_t packed[DOWN][ACROSS][BYTES];

static void must(gk_status status, const char *what) {
    if (status == GK_OK) return;
    fprintf(stderr, "%s: %s: %s\n", what, gk_status_name(status), gk_last_error());
    exit(1);
}

static gk_tensor matrix(void *data, gk_dtype dtype, int64_t rows, int64_t columns) {
    return (gk_tensor){
        .data = data, .dtype = dtype, .ndim = 2, .shape = {rows, columns}, .stride = {columns, 1}};
}

static float of_bfloat16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void round_weight(void) {
    for (int n = 0; n < N; ++n)
        for (int g = 0; g < GROUPS; ++g) {
            const int end = (g + 1) * GROUP < K ? (g + 1) * GROUP : K;
            float most = 0;
            for (int k = g * GROUP; k < end; ++k) most = fmaxf(most, fabsf(w[n][k]));
            scale[g][n] = fmaxf(most / 7, 1e-30f);
            for (int k = g * GROUP; k < end; ++k) q[n][k] = (int8_t)lrintf(w[n][k] / scale[g][n]);
        }
}

static void pack_weight(const gk_context *ctx, gk_pack_weight_args *pack) {
    pack->q = matrix(q, GK_I8, N, K);
    pack->format = GK_INT4;
    pack->packed = (gk_tensor){.data = packed,
                               .dtype = GK_U8,
                               .ndim = 3,
                               .shape = {DOWN, ACROSS, BYTES},
                               .stride = {ACROSS * BYTES, BYTES, 1}};
    must(gk_pack_weight(ctx, pack), "gk_pack_weight");
}

static void multiply(const gk_context *ctx, gk_weight_gemm_args *call) {
    call->a = matrix(x, GK_BF16, M, K);
    call->scale = matrix(scale, GK_F32, GROUPS, N);
    call->n = N;
    call->format = GK_INT4;
    call->out = matrix(out, GK_F32, M, N);
    call->workspace_bytes = gk_weight_gemm_workspace_bytes(ctx, call);
    if (call->workspace_bytes)
        call->workspace = aligned_alloc(64, (call->workspace_bytes + 63) / 64 * 64);
    must(gk_weight_gemm(ctx, call), "gk_weight_gemm");
    free(call->workspace);
    call->workspace = NULL;
}

/* Returns the largest error of out, relative to the sum of |x w|. Prints it beside the error that
 * the rounding of the weight makes. */
static double check(void) {
    double worst = 0, lost = 0;
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
            double rounded = 0, exact = 0, size = 0;
            for (int k = 0; k < K; ++k) {
                const double a = of_bfloat16(x[m][k]);
                rounded += a * q[n][k] * scale[k / GROUP][n];
                exact += a * w[n][k];
                size += fabs(a * w[n][k]);
            }
            worst = fmax(worst, fabs(out[m][n] - rounded) / size);
            lost = fmax(lost, fabs(rounded - exact) / size);
        }
    printf("weight_gemm [%d, %d] x [%d, %d] in 4 bits: error %.1e; rounding the weight to 4 bits "
           "costs %.1e\n",
           M, K, N, K, worst, lost);
    return worst;
}

int main(void) {
    for (int n = 0; n < N; ++n)
        for (int k = 0; k < K; ++k) w[n][k] = 0.02f * sinf(1.7f * (float)n + 0.3f * (float)k);
    for (int m = 0; m < M; ++m)
        for (int k = 0; k < K; ++k) x[m][k] = (uint16_t)(0x3f80 + (m * K + k) % 64); /* 1 to 1.5 */
    round_weight();

    const gk_context ctx = GK_CONTEXT_INIT;
    gk_pack_weight_args pack = GK_PACK_WEIGHT_ARGS_INIT;
    gk_weight_gemm_args call = GK_WEIGHT_GEMM_ARGS_INIT;
    pack_weight(&ctx, &pack);
    call.packed = pack.packed;
    multiply(&ctx, &call);
    const double worst = check();

    call.scale.shape[0] = GROUPS + 1; /* a wrong shape is refused with the argument's name */
    const gk_status status = gk_weight_gemm(&ctx, &call);
    printf("%s: %s\n", gk_status_name(status), gk_last_error());
    /* the op rounds decoded weights to bfloat16 once */
    return worst < 4e-3 && status == GK_ERR_ARGUMENT ? 0 : 1;
}
