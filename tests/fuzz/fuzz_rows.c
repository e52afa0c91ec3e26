/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_rows: gk_norm_fwd, gk_norm_bwd, gk_softmax_fwd, gk_softmax_bwd, gk_glu_fwd, gk_glu_bwd,
 * gk_dropout and gk_adamw. Each is compared with the same call in float64, whose arguments are
 * named `wide`. */
#include "fuzz.h"
#include "gpukern_train.h"

static gk_context ctx;
static gk_dtype dtype;
static int64_t shape[4];
static int nd;

static gk_tensor rows(void) { return fz_make(dtype, nd, shape, FZ_INPUT | FZ_LAST_DENSE); }
static gk_tensor result(void) { return fz_make(dtype, nd, shape, FZ_RESULT | FZ_LAST_DENSE); }
static gk_tensor vector(void) {
    return fz_make(fz_int(0, 1) ? dtype : fz_stats(dtype), 1, &shape[nd - 1], FZ_INPUT);
}

/* Calls an op and the same op in float64, and compares the pairs of results in `...`. The two calls
 * must end with the same status. */
#define BOTH(op, args, wide, wrong, workspace, bound, ...)                                        \
    do {                                                                                          \
        const gk_status status =                                                                  \
            fz_call("gk_" #op, &ctx, &(args), NULL, call_##op, NULL, NULL, wrong);                \
        gk_context plain = GK_CONTEXT_INIT;                                                       \
        if (!(wrong) && fz_agree("gk_" #op, status, gk_##op(&plain, &(wide)), gk_last_error())) { \
            const gk_tensor *pairs[][2] = {__VA_ARGS__};                                          \
            for (size_t i = 0; i < sizeof pairs / sizeof *pairs; ++i)                             \
                if (pairs[i][0]) fz_close("result", pairs[i][0], pairs[i][1], bound);             \
        }                                                                                         \
    } while (0)

/* Calls with a workspace of exactly the requested size. float64 requests none. */
#define CALL_WITH_WORKSPACE(op, arguments)                                     \
    static gk_status call_##op(const gk_context *c, const void *given) {       \
        arguments args = *(const arguments *)given;                            \
        void *block = NULL;                                                    \
        const size_t bytes = gk_##op##_workspace_bytes(c, &args);              \
        FZ_REQUIRE(bytes < (size_t)1 << 31, "gk_" #op " asks for %zu", bytes); \
        if (bytes && posix_memalign(&block, 64, bytes) != 0) abort();          \
        if (bytes) memset(block, 0xff, bytes);                                 \
        args.workspace = block;                                                \
        args.workspace_bytes = bytes;                                          \
        const gk_status status = gk_##op(c, &args);                            \
        free(block);                                                           \
        return status;                                                         \
    }
#define CALL(op) \
    static gk_status call_##op(const gk_context *c, const void *given) { return gk_##op(c, given); }
CALL_WITH_WORKSPACE(norm_fwd, gk_norm_args)
CALL_WITH_WORKSPACE(norm_bwd, gk_norm_bwd_args)
CALL_WITH_WORKSPACE(softmax_fwd, gk_softmax_args)
CALL(softmax_bwd)
CALL(glu_fwd)
CALL(glu_bwd)
CALL(dropout)
CALL(adamw)

static double loss(void) { return 256 * (dtype == GK_F64 ? 0x1p-53 : 0x1p-24); }

static void fuzz_norm(void) {
    gk_norm_args a = GK_NORM_ARGS_INIT;
    a.kind = (gk_norm_kind)fz_int(0, 1);
    a.x = rows();
    a.out = result();
    a.eps = 0.1;
    a.weight_offset = (double)fz_int(0, 1);
    gk_tensor w = vector(), b = vector(), r = rows(), sum = result(), w2, b2, r2, sum2;
    if (fz_int(0, 1)) a.weight = &w;
    if (fz_int(0, 1)) a.bias = &b;
    if (dtype == GK_F32 && fz_int(0, 1)) {
        a.residual = &r;
        a.sum = &sum;
    } /* h is rounded to x's dtype */
    gk_norm_args wide = a;
    wide.x = fz_wide(&a.x);
    wide.weight = fz_wide_of(a.weight, &w2);
    wide.bias = fz_wide_of(a.bias, &b2);
    wide.residual = fz_wide_of(a.residual, &r2);
    wide.out = fz_wide(&a.out);
    wide.sum = fz_wide_of(a.sum, &sum2);
    gk_tensor *const all[] = {&a.x, &a.out, &w, &b};
    const bool wrong = fz_corrupt(all, 2, 2);
    BOTH(norm_fwd, a, wide, wrong, 1, 16 * loss(), {&a.out, &wide.out}, {a.sum, wide.sum});
}

static void fuzz_norm_bwd(void) {
    gk_norm_bwd_args a = GK_NORM_BWD_ARGS_INIT;
    a.kind = (gk_norm_kind)fz_int(0, 1);
    a.grad_out = rows();
    a.h = rows();
    a.dx = result();
    a.eps = 0.1;
    gk_tensor w = vector(), more = rows(), dw, db, w2, more2, dw2, db2;
    dw = fz_make(dtype, 1, &shape[nd - 1], FZ_RESULT);
    db = fz_make(dtype, 1, &shape[nd - 1], FZ_RESULT);
    if (fz_int(0, 1)) a.weight = &w;
    if (fz_int(0, 1)) a.grad_sum = &more;
    if (fz_int(0, 1)) a.dweight = &dw;
    if (fz_int(0, 1)) a.dbias = &db;
    gk_norm_bwd_args wide = a;
    wide.grad_out = fz_wide(&a.grad_out);
    wide.h = fz_wide(&a.h);
    wide.dx = fz_wide(&a.dx);
    wide.weight = fz_wide_of(a.weight, &w2);
    wide.grad_sum = fz_wide_of(a.grad_sum, &more2);
    wide.dweight = fz_wide_of(a.dweight, &dw2);
    wide.dbias = fz_wide_of(a.dbias, &db2);
    gk_tensor *const all[] = {&a.grad_out, &a.h, &a.dx};
    const bool wrong = fz_corrupt(all, 3, 3);
    BOTH(norm_bwd, a, wide, wrong, 1, 64 * loss(), {&a.dx, &wide.dx}, {a.dweight, wide.dweight},
         {a.dbias, wide.dbias});
}

static gk_tensor lengths(void) {
    gk_tensor t = fz_make(GK_I32, nd - 1, shape, FZ_INPUT);
    for (int64_t i = 0; i < gk_numel(&t); ++i) fz_set(&t, i, (double)fz_int(-2, 40));
    return t;
}

static void fuzz_softmax(void) {
    gk_softmax_args a = GK_SOFTMAX_ARGS_INIT;
    a.x = rows();
    a.out = result();
    a.scale = (double)fz_int(-3, 3);
    a.log = (int32_t)fz_int(0, 1);
    gk_tensor n = lengths();
    if (fz_int(0, 1)) a.lengths = &n;
    gk_softmax_args wide = a;
    wide.x = fz_wide(&a.x);
    wide.out = fz_wide(&a.out);
    gk_tensor *const all[] = {&a.x, &a.out};
    const bool wrong = fz_corrupt(all, 2, 2);
    BOTH(softmax_fwd, a, wide, wrong, 1, 4 * loss(), {&a.out, &wide.out});
}

static void fuzz_softmax_bwd(void) {
    gk_softmax_bwd_args a = GK_SOFTMAX_BWD_ARGS_INIT;
    a.grad_out = rows();
    a.out = rows();
    a.dx = result();
    a.scale = (double)fz_int(-3, 3);
    a.log = (int32_t)fz_int(0, 1);
    gk_tensor n = lengths();
    if (fz_int(0, 1)) a.lengths = &n;
    gk_softmax_bwd_args wide = a;
    wide.grad_out = fz_wide(&a.grad_out);
    wide.out = fz_wide(&a.out);
    wide.dx = fz_wide(&a.dx);
    gk_tensor *const all[] = {&a.grad_out, &a.out, &a.dx};
    const bool wrong = fz_corrupt(all, 3, 3);
    BOTH(softmax_bwd, a, wide, wrong, 1, 512 * loss(), {&a.dx, &wide.dx});
}

static void fuzz_glu(bool backward) {
    static const gk_activation gates[] = {GK_ACT_SILU, GK_ACT_GELU, GK_ACT_GELU_TANH};
    gk_tensor gate = rows(), up = rows(), grad = rows(), out = result(), more = result();
    const gk_activation activation = gates[fz_int(0, 2)];
    gk_tensor gate2 = fz_wide(&gate), up2 = fz_wide(&up), grad2 = fz_wide(&grad),
              out2 = fz_wide(&out);
    gk_tensor more2 = fz_wide(&more);
    if (backward) {
        gk_glu_bwd_args a = {sizeof a, grad, gate, &up, out, &more, activation};
        gk_glu_bwd_args wide = {sizeof a, grad2, gate2, &up2, out2, &more2, activation};
        gk_tensor *const all[] = {&a.grad_out, &a.gate, &a.dgate};
        const bool wrong = fz_corrupt(all, 3, 3);
        BOTH(glu_bwd, a, wide, wrong, 1, loss(), {&a.dgate, &wide.dgate}, {&more, &more2});
    } else {
        gk_glu_args a = {sizeof a, gate, &up, out, activation},
                    wide = {sizeof a, gate2, &up2, out2, activation};
        gk_tensor *const all[] = {&a.gate, &a.out};
        const bool wrong = fz_corrupt(all, 2, 2);
        BOTH(glu_fwd, a, wide, wrong, 1, loss(), {&a.out, &wide.out});
    }
}

static gk_tensor seed(void) {
    const int64_t two = 2;
    gk_tensor t = fz_make(GK_I64, 1, &two, FZ_RESULT | FZ_FILLED);
    for (int i = 0; i < 2; ++i)
        ((int64_t *)t.data)[i * t.stride[0]] = fz_int(0, 255) << fz_int(0, 55);
    return t;
}

static void fuzz_dropout(void) {
    gk_dropout_args a = GK_DROPOUT_ARGS_INIT;
    a.x = rows();
    a.out = result();
    a.seed = seed();
    a.p = (double)fz_int(0, 8) / 8;
    a.activation = (gk_activation[]){GK_ACT_NONE, GK_ACT_GELU, GK_ACT_GELU_TANH}[fz_int(0, 2)];
    gk_tensor b = fz_make(dtype, 1, &shape[nd - 1], FZ_INPUT | FZ_CONTIGUOUS), more = rows(), b2,
              more2;
    if (fz_int(0, 1)) a.bias = &b;
    const int64_t kind = fz_int(0, 2);
    if (kind == 1) a.residual = &more;
    if (kind == 2) a.grad_out = &more;
    gk_dropout_args wide = a;
    wide.x = fz_wide(&a.x);
    wide.out = fz_wide(&a.out);
    wide.bias = fz_wide_of(a.bias, &b2);
    wide.residual = fz_wide_of(a.residual, &more2);
    wide.grad_out = fz_wide_of(a.grad_out, &more2);
    gk_tensor *const all[] = {&a.x, &a.out};
    const bool wrong = fz_corrupt(all, 2, 2);
    BOTH(dropout, a, wide, wrong, 1, 8 * loss(), {&a.out, &wide.out});
}

/* A dense tensor. Its float64 copy keeps the values from before the call. */
static void fuzz_adamw(void) {
    const int read = FZ_RESULT | FZ_FILLED | FZ_CONTIGUOUS;
    const gk_dtype state = fz_int(0, 1) ? dtype : fz_stats(dtype);
    gk_tensor w = fz_make(dtype, nd, shape, read),
              g = fz_make(dtype, nd, shape, FZ_INPUT | FZ_CONTIGUOUS);
    gk_tensor m = fz_make(state, nd, shape, read), v = fz_make(state, nd, shape, read),
              step = fz_make(GK_F32, 0, shape, read);
    gk_tensor most = fz_make(state, nd, shape, read), clip = fz_make(GK_F32, 0, shape, read), most2;
    for (int64_t i = 0; i < gk_numel(&v); ++i) {
        fz_set(&v, i, fabs(fz_get(&v, i)) + 0.1);
        fz_set(&most, i, fz_get(&v, i));
    }
    fz_set(&step, 0, (double)fz_int(1, 50));
    gk_adamw_args a = GK_ADAMW_ARGS_INIT;
    a.num = 1;
    a.params = &w;
    a.grads = &g;
    a.exp_avgs = &m;
    a.exp_avg_sqs = &v;
    a.steps = &step;
    a.lr = 0.01;
    a.maximize = (int32_t)fz_int(0, 1);
    if (fz_int(0, 1)) a.max_exp_avg_sqs = &most;
    if (fz_int(0, 1)) a.clip = &clip;
    gk_tensor w2 = fz_wide(&w), g2 = fz_wide(&g), m2 = fz_wide(&m), v2 = fz_wide(&v);
    gk_adamw_args wide = a;
    wide.params = &w2;
    wide.grads = &g2;
    wide.exp_avgs = &m2;
    wide.exp_avg_sqs = &v2;
    wide.max_exp_avg_sqs = fz_wide_of(a.max_exp_avg_sqs, &most2);
    gk_tensor *const all[] = {&w, &g, &m, &v};
    const bool wrong = fz_corrupt(all, 4, 4);
    /* 16-bit moments are rounded as 16-bit parameters are */
    BOTH(adamw, a, wide, wrong, 1, loss() + (state == dtype ? fz_loss(dtype, 0) / 4 : 0), {&w, &w2},
         {&m, &m2}, {&v, &v2});
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const int64_t op = fz_int(0, 8);
    ctx = fz_context();
    dtype = fz_dtype();
    nd = (int)fz_int(1, 3);
    for (int d = 0; d < nd; ++d)
        shape[d] = d == nd - 1         ? gk_max_i64(op < 6 ? 1 : 0, fz_size(129))
                   : fz_int(0, 9) == 9 ? 0
                                       : fz_int(1, 6);
    switch (op) {
    case 0: fuzz_norm(); break;
    case 1: fuzz_norm_bwd(); break;
    case 2: fuzz_softmax(); break;
    case 3: fuzz_softmax_bwd(); break;
    case 4: fuzz_glu(false); break;
    case 5: fuzz_glu(true); break;
    case 6: fuzz_dropout(); break;
    default: fuzz_adamw(); break;
    }
    fz_free();
    return 0;
}
