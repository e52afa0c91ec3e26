/* SPDX-License-Identifier: BSD-3-Clause */
/* check_flash_attn_fp8: compares gk_flash_attn_fp8 of every instruction set with csrc/ref: codes
 * of all sizes, each form of scales, means of v, groups of heads, masks. Any number of workers
 * must give the same bits. */
#include "../../csrc/formats/attn_scales.h"
#include "check.h"

typedef struct fp8_case {
    int64_t batch, heads_q, heads_kv, seq_q, seq_k, head_dim, head_dim_v;
    int scales; /* number of dimensions of each, -1: none */
    int means;  /* likewise */
    bool is_causal;
} fp8_case;

static const fp8_case cases[] = {
    {1, 1, 1, 1, 1, 1, 1, -1, -1, false},     {2, 4, 2, 33, 130, 64, 64, 0, 2, true},
    {1, 3, 3, 40, 300, 40, 72, 1, 3, false},  {2, 4, 1, 17, 257, 128, 16, 2, -1, true},
    {2, 2, 2, 140, 140, 16, 128, 3, 3, true}, {1, 8, 2, 5, 500, 256, 250, 3, 2, false},
};

static check_tensor codes(int64_t batch, int64_t heads, int64_t seq, int64_t dim) {
    const int64_t shape[4] = {batch, heads, seq, dim};
    check_tensor t = check_tensor_make(GK_E4M3, 4, shape, NULL, 1, 3);
    for (int64_t i = 0; i < gk_numel(&t.t); ++i)
        check_set(&t.t, i, check_uniform(-2, 2) * exp2(check_uniform(-6, 2)));
    return t;
}

static check_tensor numbers(int ndim, const int64_t *shape, double lo, double hi) {
    check_tensor t = check_tensor_make(GK_F32, ndim, shape, NULL, 1, 0);
    for (int64_t i = 0; i < gk_numel(&t.t); ++i) check_set(&t.t, i, check_uniform(lo, hi));
    return t;
}

static check_tensor scale(const fp8_case *x, int64_t heads, int64_t tokens) {
    const int64_t all[3] = {x->batch, heads, gk_ceil_div(tokens, GK_ATTN_SCALE_TOKENS)};
    return numbers(x->scales, x->scales == 1 ? all + 1 : all, 0.1, 2);
}

/* The largest error of x divided by the largest element of `exact`. */
static double error_of(const gk_tensor *x, const gk_tensor *exact) {
    double error = 0, largest = 1e-30;
    for (int64_t i = 0; i < gk_numel(x); ++i) {
        const double want = check_get(exact, i);
        error = fmax(error, fabs(check_get(x, i) - want));
        largest = fmax(largest, fabs(want));
    }
    return error / largest;
}

static void check_fp8(const fp8_case *x) {
    const int mark = check_num_owned;
    const int64_t out_shape[4] = {x->batch, x->heads_q, x->seq_q, x->head_dim_v};
    const int64_t mean_shape[3] = {x->batch, x->heads_kv, x->head_dim_v};
    check_tensor q = codes(x->batch, x->heads_q, x->seq_q, x->head_dim);
    check_tensor k = codes(x->batch, x->heads_kv, x->seq_k, x->head_dim);
    check_tensor v = codes(x->batch, x->heads_kv, x->seq_k, x->head_dim_v);
    check_tensor exact = check_tensor_make(GK_F64, 4, out_shape, NULL, 1, 0);
    check_tensor exact_lse = check_tensor_make(GK_F64, 3, out_shape, NULL, 1, 0);
    gk_flash_attn_fp8_args args = GK_FLASH_ATTN_FP8_ARGS_INIT;
    args.fwd.q = q.t;
    args.fwd.k = k.t;
    args.fwd.v = v.t;
    args.fwd.rules.scale = 1 / sqrt((double)x->head_dim);
    args.fwd.rules.is_causal = x->is_causal;
    args.fwd.rules.diagonal = x->seq_k - x->seq_q;
    check_tensor q_scale, k_scale, v_scale, mean;
    if (x->scales >= 0) {
        q_scale = scale(x, x->heads_q, x->seq_q);
        args.q_scale = &q_scale.t;
        k_scale = scale(x, x->heads_kv, x->seq_k);
        args.k_scale = &k_scale.t;
        v_scale = scale(x, x->heads_kv, x->seq_k);
        args.v_scale = &v_scale.t;
    }
    if (x->means >= 0) {
        mean = numbers(x->means, x->means == 2 ? mean_shape + 1 : mean_shape, -3, 3);
        args.v_mean = &mean.t;
    }
    gk_context serial = check_context(NULL, 1);
    args.fwd.out = exact.t;
    args.fwd.lse = exact_lse.t;
    gk_ref_flash_attn_fp8(&serial, &args);

    const int isas = check_isas();
    for (int i = 0; i < isas; ++i) {
        check_isa = check_isa_names[i];
        check_tensor out[2], lse[2];
        for (int w = 0; w < 2; ++w) {
            out[w] = check_tensor_make(GK_F32, 4, out_shape, NULL, 1, 0);
            lse[w] = check_tensor_make(GK_F32, 3, out_shape, NULL, 1, 0);
            args.fwd.out = out[w].t;
            args.fwd.lse = lse[w].t;
            gk_context ctx = check_context(check_isa_names[i], w == 0 ? 1 : CHECK_WORKERS);
            check_workspace space =
                check_workspace_make(gk_flash_attn_fp8_workspace_bytes(&ctx, &args));
            args.workspace = space.data;
            args.workspace_bytes = space.bytes;
            gk_explanation told = {.size = sizeof told};
            check_result(gk_explain_flash_attn_fp8(&ctx, &args, &told) == GK_OK, "%s",
                         gk_last_error());
            check_see(&told, space.bytes);
            const gk_status status = gk_flash_attn_fp8(&ctx, &args);
            check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
            check_workspace_end(&space);
        }
        check_result(error_of(&out[0].t, &exact.t) < 2e-6, "out errs by %g",
                     error_of(&out[0].t, &exact.t));
        check_result(error_of(&lse[0].t, &exact_lse.t) < 2e-6, "lse errs by %g",
                     error_of(&lse[0].t, &exact_lse.t));
        check_result(check_same_bits(&out[0].t, &out[1].t) && check_same_bits(&lse[0].t, &lse[1].t),
                     "1 and %d workers differ", CHECK_WORKERS);
    }
    check_free(mark);
}

/* args.fwd.size must not claim a longer struct: args.fwd is followed by the scales, which would be
 * read as a mask or an accumulation. */
static void check_longer_structs(void) {
    snprintf(check_case, sizeof check_case, "flash_attn_fp8, fwd.size");
    const int mark = check_num_owned;
    const int64_t shape[4] = {1, 1, 2, 8};
    check_tensor q = codes(1, 1, 2, 8), out = check_tensor_make(GK_F32, 4, shape, NULL, 1, 0);
    gk_flash_attn_fp8_args args = GK_FLASH_ATTN_FP8_ARGS_INIT;
    args.fwd.q = args.fwd.k = args.fwd.v = q.t;
    args.fwd.out = out.t;
    args.fwd.rules.scale = 1;
    gk_context ctx = check_context(NULL, 1);
    check_workspace space = check_workspace_make(gk_flash_attn_fp8_workspace_bytes(&ctx, &args));
    args.workspace = space.data;
    args.workspace_bytes = space.bytes;
    const size_t sizes[] = {0, sizeof args.fwd, sizeof(gk_flash_attn_accumulate_args),
                            sizeof(gk_flash_attn_masked_args)};
    for (int i = 0; i < CHECK_COUNT(sizes); ++i) {
        args.fwd.size = sizes[i];
        const gk_status status = gk_flash_attn_fp8(&ctx, &args);
        check_result(status == (sizes[i] <= sizeof args.fwd ? GK_OK : GK_ERR_ARGUMENT), "%s: %s",
                     gk_status_name(status), gk_last_error());
    }
    check_workspace_end(&space);
    check_free(mark);
}

int main(void) {
    check_longer_structs();
    for (int i = 0; i < CHECK_COUNT(cases); ++i) {
        snprintf(check_case, sizeof check_case, "flash_attn_fp8 %d", i);
        check_fp8(&cases[i]);
    }
    check_every_instance_seen(GK_OP_FLASH_ATTN_FP8);
    return check_end();
}
