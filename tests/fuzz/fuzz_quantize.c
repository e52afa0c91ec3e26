/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_quantize: compares gk_quantize and gk_dequantize with csrc/ref. Codes and scales must have
 * the same bits, for numbers, infinities and NaN. */
#include "quant.h"

static size_t bytes_of(const gk_context *ctx, const void *args) {
    return gk_quantize_workspace_bytes(ctx, args);
}
static gk_status call(const gk_context *ctx, const void *args) { return gk_quantize(ctx, args); }
static gk_status back(const gk_context *ctx, const void *args) { return gk_dequantize(ctx, args); }

static void same(const char *name, const gk_tensor *got, const gk_tensor *want) {
    for (int64_t i = 0; i < gk_numel(got); ++i) {
        const double x = fz_get(got, i), y = fz_get(want, i);
        FZ_REQUIRE(x == y || (isnan(x) && isnan(y)), "%s[%lld of %lld] is %.9g, expected %.9g",
                   name, (long long)i, (long long)gk_numel(got), x, y);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    const gk_dtype dtype = fz_dtype(), codes = fz_code_dtype();
    const gk_granularity granularity = (gk_granularity)fz_int(0, 4);
    const int64_t shape[3] = {fz_int(0, 2), fz_size(129), fz_size(129)};
    const int nd = (int)fz_int(1, 3), lead = 3 - nd;
    int64_t of_scale[3] = {shape[0], shape[1],
                           gk_ceil_div(shape[2], granularity == GK_PER_1X32 ? 32 : 128)};
    if (granularity == GK_PER_ROW) of_scale[2] = 1;
    if (granularity == GK_PER_128X128) of_scale[1] = gk_ceil_div(shape[1], 128);
    const int of_nd = granularity == GK_PER_TENSOR ? 0 : nd;
    gk_quantize_args args = GK_QUANTIZE_ARGS_INIT;
    args.x = fz_make(dtype, nd, shape + lead, FZ_INPUT);
    args.granularity = granularity;
    for (int64_t i = 0; i < gk_numel(&args.x); ++i)
        fz_set(&args.x, i, fz_uniform() * exp2(rint(fz_uniform() * 12)) * (fz_uniform() > -0.9));
    static const double strange[] = {INFINITY, -INFINITY, NAN, 1e-40, 60000};
    if (gk_numel(&args.x) && fz_one_in(4))
        fz_set(&args.x, fz_int(0, 255) % gk_numel(&args.x), strange[fz_int(0, 4)]);
    gk_tensor bound, given;
    if (fz_one_in(4)) {
        bound = fz_make(GK_F32, 0, NULL, FZ_INPUT);
        fz_set(&bound, 0, 0.5);
        args.scale_ub = &bound;
    }
    if (fz_one_in(4)) {
        given = fz_make(GK_F32, of_nd, of_scale + lead, FZ_INPUT | FZ_CONTIGUOUS);
        args.given = &given;
        for (int64_t i = 0; i < gk_numel(&given); ++i)
            fz_set(&given, i, exp2(rint(fz_uniform() * 4)));
    }
    args.codes = fz_make(codes, nd, shape + lead, FZ_RESULT | FZ_CONTIGUOUS);
    const int64_t none = 0;
    args.scale = args.given ? fz_make(GK_F32, 1, &none, FZ_RESULT | FZ_CONTIGUOUS)
                            : fz_make(GK_F32, of_nd, of_scale + lead, FZ_RESULT | FZ_CONTIGUOUS);

    gk_quantize_args judge = args;
    judge.codes = fz_judged(&args.codes);
    judge.scale = fz_judged(&args.scale);
    gk_tensor *const all[] = {&args.x, &args.codes, args.scale_ub ? &bound : NULL,
                              args.given ? &given : NULL};
    const bool wrong = fz_corrupt(all, 4, 4);
    const gk_status status = fz_call("gk_quantize", &ctx, &args, bytes_of, call, &args.workspace,
                                     &args.workspace_bytes, wrong);
    if (!wrong && status == GK_OK) {
        gk_context plain = GK_CONTEXT_INIT;
        gk_ref_quantize(&plain, &judge);
        same("codes", &args.codes, &judge.codes);
        same("scale", &args.scale, &judge.scale);
        gk_dequantize_args again = GK_DEQUANTIZE_ARGS_INIT;
        again.codes = args.codes;
        again.scale = args.given ? given : args.scale;
        again.out = fz_make(fz_dtype(), nd, shape + lead, FZ_RESULT | FZ_CONTIGUOUS);
        gk_dequantize_args judged = again;
        judged.out = fz_judged(&again.out);
        const gk_status ended =
            fz_call("gk_dequantize", &ctx, &again, NULL, back, NULL, NULL, false);
        if (ended == GK_OK) {
            gk_ref_dequantize(&plain, &judged);
            same("values", &again.out, &judged.out);
        }
    }
    fz_free();
    return 0;
}
