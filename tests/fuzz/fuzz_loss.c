/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_loss: gk_cross_entropy_fwd, gk_cross_entropy_bwd and gk_rope, each against the same call in
 * float64. */
#include "fuzz.h"
#include "gpukern_train.h"

static gk_context ctx;
static gk_dtype dtype;

static gk_status call_fwd(const gk_context *c, const void *args) {
    return gk_cross_entropy_fwd(c, args);
}
static gk_status call_bwd(const gk_context *c, const void *args) {
    return gk_cross_entropy_bwd(c, args);
}
static gk_status call_rope(const gk_context *c, const void *args) { return gk_rope(c, args); }

static double unit(void) { return dtype == GK_F64 ? 0x1p-53 : 0x1p-24; }

/* The arguments of both passes. Sometimes a target is not a class. */
static gk_cross_entropy_args loss_args(int nd, const int64_t *shape, gk_tensor *weight) {
    const int64_t v = shape[nd - 1];
    gk_cross_entropy_args a = GK_CROSS_ENTROPY_ARGS_INIT;
    a.logits = fz_make(dtype, nd, shape, FZ_INPUT | FZ_LAST_DENSE);
    a.target = fz_make(GK_I64, nd - 1, shape, FZ_INPUT);
    for (int64_t i = 0; i < gk_numel(&a.target); ++i)
        fz_set(&a.target, i, fz_int(0, 4) ? (double)fz_int(0, v - 1) : 7);
    for (int64_t i = 0; i < gk_numel(&a.target); ++i) /* several elements may share one place */
        if (fz_get(&a.target, i) >= (double)v) fz_set(&a.target, i, fz_one_in(40) ? (double)v : 0);
    a.ignore_index = fz_int(0, 1) ? 7 : -100;
    *weight = fz_make(fz_stats(dtype), 1, &v, FZ_INPUT);
    if (fz_int(0, 1)) a.weight = weight;
    a.label_smoothing = (double)fz_int(0, 4) / 4;
    a.softcap = (double)fz_int(0, 2);
    a.logit_scale = (double)fz_int(-2, 2);
    return a;
}

/* A valid dtype of dlogits. */
static gk_dtype narrow(void) {
    const gk_dtype dtypes[] = {dtype, dtype == GK_F32 ? GK_BF16 : dtype,
                               dtype == GK_F32 ? GK_F16 : dtype};
    return dtypes[fz_int(0, 2)];
}

static gk_tensor of_rows(int nd, const int64_t *shape, int flags) {
    return fz_make(fz_stats(dtype), nd - 1, shape, flags);
}

static void fuzz_fwd(int nd, const int64_t *shape) {
    gk_tensor weight, weight2, dlogits, dlogits2;
    gk_cross_entropy_more_args a = GK_CROSS_ENTROPY_MORE_ARGS_INIT, wide;
    a.fwd = loss_args(nd, shape, &weight);
    a.fwd.size = sizeof a;
    a.z_loss = (double)fz_int(0, 2) / 8;
    a.fwd.loss = of_rows(nd, shape, FZ_RESULT | FZ_CONTIGUOUS);
    a.fwd.lse = of_rows(nd, shape, FZ_RESULT | FZ_CONTIGUOUS);
    dlogits = fz_make(narrow(), nd, shape, FZ_RESULT | FZ_LAST_DENSE);
    if (fz_int(0, 1)) a.dlogits = &dlogits;
    wide = a;
    wide.fwd.logits = fz_wide(&a.fwd.logits);
    wide.fwd.weight = fz_wide_of(a.fwd.weight, &weight2);
    wide.fwd.loss = fz_wide(&a.fwd.loss);
    wide.fwd.lse = fz_wide(&a.fwd.lse);
    wide.dlogits = fz_wide_of(a.dlogits, &dlogits2);
    gk_context plain = GK_CONTEXT_INIT;
    gk_tensor *const all[] = {&a.fwd.logits, &a.fwd.target, &a.fwd.loss, &a.fwd.lse, &dlogits};
    const bool wrong = fz_corrupt(all, a.dlogits ? 5 : 4, 4);
    const gk_status status =
        fz_call("gk_cross_entropy_fwd", &ctx, &a.fwd, NULL, call_fwd, NULL, NULL, wrong);
    if (wrong || !fz_agree("gk_cross_entropy_fwd", status, gk_cross_entropy_fwd(&plain, &wide.fwd),
                           gk_last_error()))
        return;
    fz_close("loss", &a.fwd.loss, &wide.fwd.loss, 512 * unit());
    fz_close("lse", &a.fwd.lse, &wide.fwd.lse, 64 * unit());
    if (a.dlogits) fz_close("dlogits", &dlogits, &dlogits2, 256 * unit());
}

static void fuzz_bwd(int nd, const int64_t *shape) {
    gk_tensor weight, weight2;
    gk_cross_entropy_bwd_more_args b = GK_CROSS_ENTROPY_BWD_MORE_ARGS_INIT, wide;
    gk_cross_entropy_args *a = &b.bwd.fwd, *t = &wide.bwd.fwd;
    *a = loss_args(nd, shape, &weight);
    b.z_loss = (double)fz_int(0, 2) / 8;
    a->loss = of_rows(nd, shape, FZ_RESULT | FZ_CONTIGUOUS);
    a->lse = of_rows(nd, shape, FZ_INPUT | FZ_CONTIGUOUS);
    b.bwd.grad_loss = of_rows(nd, shape, FZ_INPUT);
    b.bwd.dlogits = fz_make(narrow(), nd, shape, FZ_RESULT | FZ_LAST_DENSE);
    if (fz_one_in(4)) {
        b.first_class = fz_int(-1, 3);
        b.num_classes = shape[nd - 1] + fz_int(0, 3);
    }
    wide = b;
    t->logits = fz_wide(&a->logits);
    t->weight = fz_wide_of(a->weight, &weight2);
    /* lse comes from the forward call, so that no exponential overflows */
    t->loss = fz_make(GK_F64, nd - 1, shape, FZ_RESULT | FZ_CONTIGUOUS);
    t->lse = fz_wide(&a->lse);
    gk_context plain = GK_CONTEXT_INIT;
    if (gk_cross_entropy_fwd(&plain, t) != GK_OK) return;
    for (int64_t i = 0; i < gk_numel(&a->lse); ++i) {
        fz_set(&a->lse, i, fz_get(&t->lse, i));
        fz_set(&t->lse, i, fz_get(&a->lse, i));
    }
    wide.bwd.grad_loss = fz_wide(&b.bwd.grad_loss);
    wide.bwd.dlogits = fz_wide(&b.bwd.dlogits);
    gk_tensor *const more[] = {&a->logits, &a->target, &b.bwd.grad_loss, &b.bwd.dlogits};
    const bool wrong = fz_corrupt(more, 4, 4);
    const gk_status status =
        fz_call("gk_cross_entropy_bwd", &ctx, &b.bwd, NULL, call_bwd, NULL, NULL, wrong);
    if (wrong || !fz_agree("gk_cross_entropy_bwd", status, gk_cross_entropy_bwd(&plain, &wide.bwd),
                           gk_last_error()))
        return;
    fz_close("dlogits", &b.bwd.dlogits, &wide.bwd.dlogits, 256 * unit());
}

static void fuzz_rope(void) {
    const bool packed = fz_int(0, 1);
    const int nd = packed ? 3 : 4;
    const int64_t batch = packed ? 1 : fz_int(0, 3), tokens = fz_int(0, 6), width = 2 * fz_size(33);
    const int64_t angles[] = {fz_int(1, 5), fz_int(0, 1) ? width / 2 : fz_int(0, width / 2)};
    int64_t q[] = {batch, fz_int(1, 3), tokens, width}, k[] = {batch, fz_int(1, 2), tokens, width};
    if (packed) {
        const int64_t q3[] = {tokens, q[1], width}, k3[] = {tokens, k[1], width};
        memcpy(q, q3, sizeof q3);
        memcpy(k, k3, sizeof k3);
    }
    gk_rope_args a = GK_ROPE_ARGS_INIT, wide;
    a.q = fz_make(dtype, nd, q, FZ_INPUT | FZ_LAST_DENSE);
    a.out_q = fz_make(dtype, nd, q, FZ_RESULT | FZ_LAST_DENSE);
    gk_tensor keys = fz_make(dtype, nd, k, FZ_INPUT | FZ_LAST_DENSE),
              out = fz_make(dtype, nd, k, FZ_RESULT | FZ_LAST_DENSE);
    gk_tensor positions = fz_make(fz_int(0, 1) ? GK_I32 : GK_I64, 1, &tokens, FZ_INPUT), keys2,
              out2;
    for (int64_t i = 0; i < gk_numel(&positions); ++i)
        fz_set(&positions, i, fz_one_in(40) ? (double)angles[0] : (double)fz_int(0, angles[0] - 1));
    a.cos = fz_make(fz_stats(dtype), 2, angles, FZ_INPUT | FZ_LAST_DENSE);
    a.sin = fz_make(fz_stats(dtype), 2, angles, FZ_INPUT | FZ_LAST_DENSE);
    if (fz_int(0, 2)) {
        a.k = &keys;
        a.out_k = &out;
    }
    if (fz_int(0, 3))
        a.positions = &positions; /* otherwise 0 .. S - 1, which may exceed the table of angles */
    a.interleaved = (int32_t)fz_int(0, 1);
    a.inverse = (int32_t)fz_int(0, 1);
    wide = a;
    wide.q = fz_wide(&a.q);
    wide.out_q = fz_wide(&a.out_q);
    wide.cos = fz_wide(&a.cos);
    wide.sin = fz_wide(&a.sin);
    wide.k = fz_wide_of(a.k, &keys2);
    wide.out_k = fz_wide_of(a.out_k, &out2);
    gk_tensor *const all[] = {&a.q, &a.out_q, &a.cos, &a.sin};
    const bool wrong = fz_corrupt(all, 4, 4);
    const gk_status status = fz_call("gk_rope", &ctx, &a, NULL, call_rope, NULL, NULL, wrong);
    gk_context plain = GK_CONTEXT_INIT;
    if (wrong || !fz_agree("gk_rope", status, gk_rope(&plain, &wide), gk_last_error())) return;
    fz_close("out_q", &a.out_q, &wide.out_q, 8 * unit());
    if (a.k) fz_close("out_k", a.out_k, wide.out_k, 8 * unit());
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const int64_t op = fz_int(0, 3);
    ctx = fz_context();
    dtype = fz_dtype();
    if (op == 3) {
        fuzz_rope();
    } else {
        const int nd = (int)fz_int(1, 3);
        int64_t shape[3];
        for (int d = 0; d < nd; ++d)
            shape[d] = d == nd - 1         ? gk_max_i64(1, fz_size(129))
                       : fz_int(0, 9) == 9 ? 0
                                           : fz_int(1, 6);
        if (op == 2)
            fuzz_bwd(nd, shape);
        else
            fuzz_fwd(nd, shape);
    }
    fz_free();
    return 0;
}
