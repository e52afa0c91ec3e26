/* SPDX-License-Identifier: BSD-3-Clause */
/* check_new_type: an element type that is in the table but in no kernel. Every op must refuse it
 * by name. Functions that cannot refuse must abort instead of reading it as another type. This
 * program's table replaces the library's. */
#define GK_MORE_TYPES {(gk_dtype)90, GK_KIND_FLOAT, 4, 1, 6, "float4_of_a_test", "f4"},
#include "../../csrc/core/types.c"

#include "check.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static const gk_dtype fake = (gk_dtype)90;
static double room[1 << 16];
static int used; /* bytes used of room; every tensor has its own memory */

static gk_tensor tensor(gk_dtype dtype, int ndim, const int64_t *shape) {
    used = (used + 512) % (1 << 16);
    gk_tensor t = {.data = room + used, .dtype = dtype, .ndim = ndim};
    for (int64_t d = ndim - 1, stride = 1; d >= 0; stride *= shape[d--]) {
        t.shape[d] = shape[d];
        t.stride[d] = stride;
    }
    return t;
}
#define TENSOR(dtype, ...)                                                         \
    tensor(dtype, (int)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), \
           (const int64_t[]){__VA_ARGS__})

/* The text must contain the type's name, and the call must not succeed. */
static void refused(const char *what, gk_status got) {
    check_result(got == GK_ERR_ARGUMENT || got == GK_ERR_UNSUPPORTED, "%s: %s", what,
                 gk_status_name(got));
    check_result(strstr(gk_last_error(), "float4_of_a_test") != NULL, "%s: \"%s\"", what,
                 gk_last_error());
}

/* ---- the ops --------------------------------------------------------------------------------- */
static void check_gemm(const gk_context *ctx, bool explain) {
    /* a and b, then each other operand beside bfloat16 */
    for (int which = 0; which < 5; ++which) {
        const gk_dtype dtype = which == 0 ? fake : GK_BF16;
        const gk_tensor bias = TENSOR(which == 1 ? fake : dtype, 16),
                        c = TENSOR(which == 2 ? fake : dtype, 16, 16);
        const gk_tensor preact = TENSOR(which == 3 ? fake : dtype, 16, 16);
        gk_gemm_args g = GK_GEMM_ARGS_INIT;
        gk_explanation e = GK_EXPLANATION_INIT;
        g.a = TENSOR(dtype, 16, 16);
        g.b = TENSOR(dtype, 16, 16);
        g.out = TENSOR(which == 4 ? fake : dtype, 16, 16);
        g.alpha = g.beta = 1;
        if (which == 1) g.bias = &bias;
        if (which == 2) g.c = &c;
        if (which == 3) g.preact = &preact;
        static const char *const names[] = {"a, b and out", "bias", "c", "preact", "out"};
        refused(names[which], explain ? gk_explain_gemm(ctx, &g, &e) : gk_gemm(ctx, &g));
    }
}

static void check_others(const gk_context *ctx) {
    gk_gemm_act_bwd_args act = GK_GEMM_ACT_BWD_ARGS_INIT;
    act.activation = GK_ACT_GELU;
    act.grad_out = TENSOR(GK_BF16, 16, 16);
    act.grad_in = TENSOR(GK_BF16, 16, 16);
    act.saved = TENSOR(fake, 16, 16);
    refused("gemm_act_bwd, saved", gk_gemm_act_bwd(ctx, &act));
    act.grad_out = TENSOR(fake, 16, 16);
    act.grad_in = TENSOR(fake, 16, 16);
    refused("gemm_act_bwd", gk_gemm_act_bwd(ctx, &act));

    gk_flash_attn_bwd_args bwd = GK_FLASH_ATTN_BWD_ARGS_INIT;
    gk_flash_attn_args *fwd = &bwd.fwd;
    gk_tensor *const of_q[] = {&fwd->q,       &fwd->k, &fwd->v, &fwd->out,
                               &bwd.grad_out, &bwd.dq, &bwd.dk, &bwd.dv};
    for (int i = 0; i < CHECK_COUNT(of_q); ++i) *of_q[i] = TENSOR(fake, 1, 2, 4, 16);
    fwd->lse = TENSOR(GK_F32, 1, 2, 4);
    fwd->rules.scale = 1;
    refused("flash_attn_fwd", gk_flash_attn_fwd(ctx, fwd));
    refused("flash_attn_bwd", gk_flash_attn_bwd(ctx, &bwd));

    gk_paged_attn_args paged = GK_PAGED_ATTN_ARGS_INIT;
    paged.q = TENSOR(fake, 1, 2, 16);
    paged.out = TENSOR(fake, 1, 2, 16);
    paged.k_cache = TENSOR(fake, 4, 4, 2, 16);
    paged.v_cache = TENSOR(fake, 4, 4, 2, 16);
    paged.block_table = TENSOR(GK_I32, 1, 1);
    paged.seq_lens = TENSOR(GK_I32, 1);
    paged.lse = TENSOR(GK_F32, 1, 2);
    paged.rules.scale = 1;
    refused("paged_attn", gk_paged_attn(ctx, &paged));

    gk_kv_cache_write_args write = GK_KV_CACHE_WRITE_ARGS_INIT;
    write.k = TENSOR(fake, 1, 2, 16);
    write.v = TENSOR(fake, 1, 2, 16);
    write.k_cache = TENSOR(fake, 4, 4, 2, 16);
    write.v_cache = TENSOR(fake, 4, 4, 2, 16);
    write.slots = TENSOR(GK_I32, 1);
    refused("kv_cache_write", gk_kv_cache_write(ctx, &write));

    gk_attn_merge_args merge = GK_ATTN_MERGE_ARGS_INIT;
    merge.out_a = TENSOR(fake, 4, 16);
    merge.out_b = TENSOR(fake, 4, 16);
    merge.out = TENSOR(fake, 4, 16);
    merge.lse_a = TENSOR(GK_F32, 4);
    merge.lse_b = TENSOR(GK_F32, 4);
    merge.lse = TENSOR(GK_F32, 4);
    refused("attn_merge", gk_attn_merge(ctx, &merge));
}

/* ---- functions that cannot refuse ------------------------------------------------------------ */
static void loads(void) { room[0] = gk_load(room, fake, 0); }
static void stores(void) { gk_store(room, fake, 0, 1); }

/* A child process that calls `act` must abort and print the type's name. */
static void check_stops(const char *what, void (*act)(void)) {
    int from[2], state = 0;
    char text[256] = "";
    if (pipe(from) != 0) abort();
    const pid_t child = fork();
    if (child == 0) {
        dup2(from[1], STDERR_FILENO);
        act();
        _exit(0);
    }
    close(from[1]);
    const ssize_t bytes = read(from[0], text, sizeof text - 1);
    close(from[0]);
    waitpid(child, &state, 0);
    check_result(bytes > 0 && strstr(text, "float4_of_a_test") != NULL, "%s says \"%s\"", what,
                 text);
    check_result(WIFSIGNALED(state) && WTERMSIG(state) == SIGABRT, "%s goes on, state %d", what,
                 state);
}

int main(void) {
    snprintf(check_case, sizeof check_case, "sizes");
    check_result(gk_bits_of(fake) == 4 && gk_bytes_of(fake, 3) == 2 && gk_chunk_of(fake) == 32,
                 "bits");
    check_result(gk_whole_chunks(fake, 32) && !gk_whole_chunks(fake, 16),
                 "16 bytes are 32 elements");
    const int num_isas = check_isas();
    for (int i = 0; i < num_isas; ++i) {
        const gk_context ctx = check_context(check_isa_names[i], 1);
        snprintf(check_case, sizeof check_case, "CPU");
        check_gemm(&ctx, false);
        check_others(&ctx);
    }
    snprintf(check_case, sizeof check_case, "CUDA");
    gk_context ctx = check_context(NULL, 1);
    for (const char *const *arch = (const char *const[]){"sm_80", "sm_90", NULL}; *arch; ++arch) {
        if (gk_cuda_arch(*arch, &ctx.index) != GK_OK) break; /* built without CUDA */
        ctx.device = GK_CUDA;
        check_gemm(&ctx, true);
    }
    snprintf(check_case, sizeof check_case, "what cannot refuse");
    check_stops("gk_load", loads);
    check_stops("gk_store", stores);
    return check_end();
}
