/* SPDX-License-Identifier: BSD-3-Clause */
/* check_vec: tests what vec.h computes, value by value, through the ops of every instruction
 * set.
 *
 * A gemm with K = 0 is activation(beta * c): it loads c, applies a vector function and stores.
 * All 65536 values of each 16-bit dtype thus pass through the loads, float32 values of every
 * magnitude through the rounding stores, and dense sweeps through erf, tanh and exp. Attention
 * over two keys turns a logit into 1 / (1 + exp(-x)). The bounds are those that vec.h states. */
#include "check.h"

#include <time.h>

static int num_isas;

/* ---- gemm with K = 0 as a vector function ---------------------------------------------------- */
/* out [rows, n] = activation(beta * c [rows, n]). Operands have `dtype`, c has c_dtype. */
static void apply(const char *isa, gk_dtype dtype, const check_tensor *c, const check_tensor *out,
                  double beta, gk_activation activation) {
    int64_t rows = c->t.shape[0], n = c->t.shape[1], a_shape[2] = {rows, 0}, b_shape[2] = {0, n};
    int mark = check_num_owned;
    check_tensor a = check_dense(dtype, 2, a_shape), b = check_dense(dtype, 2, b_shape);
    gk_gemm_args args = {.size = sizeof args,
                         .a = a.t,
                         .b = b.t,
                         .c = &c->t,
                         .out = out->t,
                         .alpha = 1,
                         .beta = beta,
                         .activation = activation};
    gk_context ctx = check_context(isa, 1);
    check_workspace w = check_workspace_make(gk_gemm_workspace_bytes(&ctx, &args));
    args.workspace = w.data;
    args.workspace_bytes = w.bytes;
    gk_status status = gk_gemm(&ctx, &args);
    check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
    check_workspace_end(&w);
    check_free(mark);
}

/* ---- 16-bit loads and stores ----------------------------------------------------------------- */
/* Converts every 16-bit value to float32, in rows of an odd length so that every lane of a tail
 * meets all kinds of values. */
static void check_loads(const char *isa, gk_dtype dtype) {
    snprintf(check_case, sizeof check_case, "loads of %s %s", gk_dtype_name(dtype), isa);
    int64_t shape[2] = {65536 / 64, 64}, odd[2] = {1213, 54}; /* 65502 values */
    for (int turn = 0; turn < 2; ++turn) {
        const int64_t *s = turn ? odd : shape;
        check_tensor c = check_dense(dtype, 2, s), out = check_dense(GK_F32, 2, s),
                     expected = check_dense(GK_F32, 2, s);
        for (int64_t i = 0; i < s[0] * s[1]; ++i) {
            uint16_t bits = (uint16_t)i;
            ((uint16_t *)c.t.data)[i] = bits;
            ((float *)expected.t.data)[i] =
                dtype == GK_F16 ? gk_f16_to_f32(bits) : gk_bf16_to_f32(bits);
        }
        apply(isa, dtype, &c, &out, 1, GK_ACT_NONE);
        check_equal("float32", &out.t, &expected.t);
        check_free(0);
    }
}

/* Rounds float32 values to 16 bits: to nearest even, ties, subnormals, overflow, NaN. */
static void check_stores(const char *isa, gk_dtype dtype) {
    snprintf(check_case, sizeof check_case, "stores of %s %s", gk_dtype_name(dtype), isa);
    static const float betas[] = {1.0f,         1.00390625f, 1.001953125f, 1.00146484375f,
                                  0.333333343f, 1e-5f,       300.0f};
    int64_t shape[2] = {1213, 54};
    for (int b = 0; b < CHECK_COUNT(betas); ++b) {
        check_tensor c = check_dense(dtype, 2, shape), out = check_dense(dtype, 2, shape),
                     expected = check_dense(dtype, 2, shape);
        for (int64_t i = 0; i < shape[0] * shape[1]; ++i) {
            uint16_t bits = (uint16_t)i;
            float x = betas[b] * (dtype == GK_F16 ? gk_f16_to_f32(bits) : gk_bf16_to_f32(bits));
            /* float32 subnormals may be flushed, and bfloat16 has the same range */
            if (dtype == GK_BF16 && fabsf(x) < 0x1p-126f) {
                bits = 0;
                x = 0;
            }
            ((uint16_t *)c.t.data)[i] = bits;
            ((uint16_t *)expected.t.data)[i] =
                dtype == GK_F16 ? gk_f32_to_f16(x) : gk_f32_to_bf16(x);
        }
        apply(isa, dtype, &c, &out, betas[b], GK_ACT_NONE);
        check_equal("rounded", &out.t, &expected.t);
        check_free(0);
    }
}

/* ---- activations in float32 ------------------------------------------------------------------ */
/* The error that vec.h states for the inner function, carried through x/2 (1 + f) or x f, plus
 * the op's own roundings. */
static double act_bound(gk_activation activation, double x, double y) {
    double u = 0x1p-24, own = 6 * u * fabs(y);
    switch (activation) {
    case GK_ACT_GELU: return own + 0.5 * fabs(x) * (2e-7 + 2 * u); /* erf: absolute error 2e-7 */
    case GK_ACT_GELU_TANH:
        /* tanh: absolute error 3e-7, argument 4 roundings */
        return own + 0.5 * fabs(x) * (3e-7 + 6 * u);
    case GK_ACT_SILU: /* exp: relative 2e-7 + 1.2e-7 |x|; its argument is limited to 126 log 2 */
        return own + fabs(y) * (2e-7 + 2 * u * (1 + fabs(x))) + fabs(x) * 0x1p-125;
    default: return 0;
    }
}

static double act_exact(gk_activation activation, double x) {
    switch (activation) {
    case GK_ACT_RELU: return x < 0 ? 0 : x;
    case GK_ACT_GELU: return 0.5 * x * erfc(-x * sqrt(0.5));
    case GK_ACT_GELU_TANH:
        return x / (1 + exp(-2 * sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x)));
    case GK_ACT_SILU: return x / (1 + exp(-x));
    default: return x;
    }
}

static void check_activation(const char *isa, gk_activation activation) {
    static const char *const names[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};
    static const float special[] = {0.0f, -0.0f, 1e-30f, -1e-30f, 100.0f,  -50.0f,
                                    1e4f, -1e4f, 1e30f,  NAN,     INFINITY};
    snprintf(check_case, sizeof check_case, "activation %s %s", names[activation], isa);
    int64_t shape[2] = {check_small() ? 101 : 2003, 99}, count = shape[0] * shape[1];
    check_tensor c = check_dense(GK_F32, 2, shape), out = check_dense(GK_F32, 2, shape);
    for (int64_t i = 0; i < count; ++i) {
        double x = -20 + 40 * (double)i / (double)count;
        if (i % 5 == 0) x = ldexp(x, -(int)(i % 30)); /* small arguments */
        ((float *)c.t.data)[i] = i < CHECK_COUNT(special) ? special[i] : (float)x;
    }
    apply(isa, GK_F32, &c, &out, 1, activation);
    bool good = true;
    for (int64_t i = 0; i < count && good; ++i) {
        double x = ((float *)c.t.data)[i], got = ((float *)out.t.data)[i],
               y = act_exact(activation, x);
        good = got == y || (isnan(y) && isnan(got)) ||
               fabs(got - y) <= act_bound(activation, x, y) + 0x1p-120;
        if (!good)
            check_result(false, "f(%.9g) is %.9g, expected %.9g +- %.3g", x, got, y,
                         act_bound(activation, x, y));
    }
    if (good) check_result(true, "all");
    check_free(0);
}

/* ---- exp, by attention over two keys --------------------------------------------------------- */
/* Row i: q = x_i, keys 0 and 1, values 0 and 1. out = 1 / (1 + exp(-x_i)), lse = log(1 +
 * exp(x_i)). exp has a relative error of 2e-7 + |x| u; a sum or a quotient adds u each. bfloat16
 * instances may use the shorter polynomial, whose error of 4e-6 disappears in bfloat16's
 * rounding of out, but not in lse. */
static void check_softmax(const char *isa, gk_dtype dtype) {
    snprintf(check_case, sizeof check_case, "softmax of two keys %s %s", gk_dtype_name(dtype), isa);
    int64_t rows = check_small() ? 301 : 2001, q_shape[4] = {1, 1, rows, 1},
            k_shape[4] = {1, 1, 2, 1};
    check_tensor q = check_dense(dtype, 4, q_shape), k = check_dense(dtype, 4, k_shape),
                 v = check_dense(dtype, 4, k_shape);
    check_tensor out = check_dense(dtype, 4, q_shape), lse = check_dense(GK_F32, 3, q_shape);
    for (int64_t i = 0; i < rows; ++i) {
        double x = -60 + 120 * (double)i / (double)rows;
        check_set(&q.t, i, i % 7 == 0 ? x * 1e-3 : i % 501 == 1 ? x * 1000 : x);
    }
    for (int64_t j = 0; j < 2; ++j) {
        check_set(&k.t, j, (double)j);
        check_set(&v.t, j, (double)j);
    }
    gk_flash_attn_args args = {.size = sizeof args,
                               .q = q.t,
                               .k = k.t,
                               .v = v.t,
                               .out = out.t,
                               .lse = lse.t,
                               .rules = {.scale = 1, .window_left = -1, .window_right = -1}};
    gk_context ctx = check_context(isa, 1);
    check_workspace w = check_workspace_make(gk_flash_attn_fwd_workspace_bytes(&ctx, &args));
    args.workspace = w.data;
    args.workspace_bytes = w.bytes;
    gk_status status = gk_flash_attn_fwd(&ctx, &args);
    check_result(status == GK_OK, "%s: %s", gk_status_name(status), gk_last_error());
    double u = 0x1p-24, half = dtype == GK_F32 ? 0 : 2.25 * check_unit(dtype),
           poly = dtype == GK_BF16 ? 4e-6 : 2e-7;
    bool good = true;
    for (int64_t i = 0; i < rows && good; ++i) {
        double x = check_get(&q.t, i), p = 1 / (1 + exp(-x)),
               l = x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
        double p_bound =
            p * (2 * poly + half + u * (8 + 2 * fabs(x))) + (dtype == GK_F16 ? 0x1p-25 : 0x1p-120);
        double l_bound = poly + u * (4 + 3 * fabs(x)); /* the logit is rounded in units of log 2 */
        double got_p = check_get(&out.t, i), got_l = check_get(&lse.t, i);
        good = fabs(got_p - p) <= p_bound && fabs(got_l - l) <= l_bound;
        if (!good) {
            check_result(false,
                         "x %.9g: p %.9g, expected %.9g +- %.3g; lse %.9g, expected %.9g +- %.3g",
                         x, got_p, p, p_bound, got_l, l, l_bound);
        }
    }
    if (good) check_result(true, "all");
    check_free(0);
}

/* Every call asks for the instruction set. A cpuid takes 0.1 us on a machine and 20 to 70 us
 * under a hypervisor, so a call must not execute one. */
static void check_isa_is_known(void) {
    struct timespec start, end;
    snprintf(check_case, sizeof check_case, "the instruction set");
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < 10000; ++i)
        check_result(gk_cpu_has(GK_ISA_BASE) && gk_cpu_isa() && gk_cpu_isas(), "none");
    clock_gettime(CLOCK_MONOTONIC, &end);
    const double us =
        (double)(end.tv_sec - start.tv_sec) * 1e6 + (double)(end.tv_nsec - start.tv_nsec) * 1e-3;
    check_result(us < 2e5, "10000 questions took %.0f us", us);
}

int main(void) {
    check_isa_is_known();
    num_isas = check_isas();
    for (int i = 0; i < num_isas; ++i) {
        const char *isa = check_isa_names[i];
        for (const gk_type *type = gk_types; type->kind != GK_KIND_NONE; ++type) {
            /* float64 has no vectors */
            if (type->kind != GK_KIND_FLOAT || type->bits > 32) continue;
            if (type->bits == 16) {
                check_loads(isa, type->dtype);
                check_stores(isa, type->dtype);
            }
            check_softmax(isa, type->dtype);
        }
        for (int act = GK_ACT_NONE; act <= GK_ACT_SILU; ++act)
            check_activation(isa, (gk_activation)act);
    }
    return check_end();
}
