/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz_weight_gemm: gk_pack_weight, its inverse gk_unpack_weight, and gk_weight_gemm against its
 * definition. */
#include "quant.h"

#include "formats/weight_tile.h"

static size_t bytes_of(const gk_context *ctx, const void *args) {
    return gk_weight_gemm_workspace_bytes(ctx, args);
}
static gk_status call(const gk_context *ctx, const void *args) { return gk_weight_gemm(ctx, args); }
static gk_status pack(const gk_context *ctx, const void *args) { return gk_pack_weight(ctx, args); }
static gk_status unpack(const gk_context *ctx, const void *args) {
    return gk_unpack_weight(ctx, args);
}

/* Packs q [n, k] through the C API and checks that unpacking returns it. */
static gk_tensor packed_of(const gk_context *ctx, gk_weight_format format, int64_t n, int64_t k) {
    const gk_dtype dtype = gk_code_dtype(format);
    const int64_t shape[2] = {n, k}, tiles[3] = {gk_ceil_div(n, GK_TILE), gk_ceil_div(k, GK_TILE),
                                                 gk_tile_bytes(format)};
    gk_pack_weight_args to = GK_PACK_WEIGHT_ARGS_INIT;
    to.q = fz_make(dtype, 2, shape, FZ_INPUT);
    to.format = format;
    for (int64_t i = 0; i < gk_numel(&to.q); ++i)
        fz_set(&to.q, i, dtype == GK_U8 ? rint(fz_uniform() * 7.5 + 7.5) : rint(fz_uniform() * 7));
    to.packed = fz_make(GK_U8, 3, tiles, FZ_RESULT | FZ_CONTIGUOUS);
    FZ_REQUIRE(fz_call("gk_pack_weight", ctx, &to, NULL, pack, NULL, NULL, false) == GK_OK,
               "pack: %s", gk_last_error());
    gk_unpack_weight_args back = GK_UNPACK_WEIGHT_ARGS_INIT;
    back.packed = to.packed;
    back.n = n;
    back.k = k;
    back.format = format;
    back.q = fz_make(dtype, 2, shape, FZ_RESULT | FZ_CONTIGUOUS);
    FZ_REQUIRE(fz_call("gk_unpack_weight", ctx, &back, NULL, unpack, NULL, NULL, false) == GK_OK,
               "unpack: %s", gk_last_error());
    for (int64_t i = 0; i < gk_numel(&to.q); ++i)
        FZ_REQUIRE(fz_get(&to.q, i) == fz_get(&back.q, i),
                   "code %lld is %g, packed and unpacked %g", (long long)i, fz_get(&to.q, i),
                   fz_get(&back.q, i));
    return to.packed;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fz_begin(data, size);
    const gk_context ctx = fz_context();
    static const gk_dtype dtypes[] = {GK_BF16, GK_F16, GK_E4M3};
    static const int64_t groups[] = {16, 32, 64, 128, 256, INT64_MAX};
    const gk_weight_format format = (gk_weight_format)fz_int(0, 5);
    const gk_dtype dtype = dtypes[fz_int(0, 2)], out = fz_one_in(3)       ? GK_F32
                                                       : dtype == GK_E4M3 ? GK_BF16
                                                                          : dtype;
    const int64_t m = fz_size(129), n = fz_size(129), k = fz_size(129), of_out[2] = {m, n},
                  of_a1[2] = {m, 1};
    const bool grouped = fz_one_in(2);
    const int64_t ends = fz_int(0, 5), of_bias[2] = {ends, n};
    const int64_t rows = grouped ? ends * gk_round_up(n, GK_TILE) : n;
    const int64_t group = format == GK_MXFP4 ? 32 : format == GK_NVFP4 ? 16 : groups[fz_int(0, 5)];
    const int64_t of_scale[2] = {k ? gk_ceil_div(k, gk_min_i64(group, k)) : 0, rows};
    gk_weight_gemm_args args = GK_WEIGHT_GEMM_ARGS_INIT;
    args.format = format;
    args.n = n;
    args.packed = packed_of(&ctx, format, rows, k);
    args.a = fz_codes(dtype, m, k, FZ_INPUT);
    const gk_dtype of_format = format == GK_MXFP4   ? GK_E8M0
                               : format == GK_NVFP4 ? GK_E4M3
                               : dtype == GK_E4M3   ? GK_F32
                                                    : dtype;
    args.scale = fz_make(fz_one_in(2) ? GK_F32 : of_format, 2, of_scale, FZ_INPUT);
    for (int64_t i = 0; i < gk_numel(&args.scale); ++i)
        fz_set(&args.scale, i, exp2(rint(fz_uniform())));
    gk_tensor zero, whole, scale_a, bias, offs;
    bool bad = false;
    if (grouped) {
        offs = fz_make(GK_I32, 1, &ends, FZ_RESULT);
        fz_all[fz_count - 1].result = false;
        args.offs = &offs;
        int64_t end = 0;
        for (int64_t g = 0; g < ends; ++g) {
            const int64_t step = fz_int(0, 60);
            if (step == 60) bad = true;
            end =
                step == 60 ? (fz_one_in(2) ? -1 : m + 1) : gk_min_i64(m, gk_max_i64(end, 0) + step);
            fz_set(&offs, g, (double)end);
        }
    }
    const int extra = (int)fz_int(0, 7);
    if (extra & 1 && format == GK_UINT4) {
        zero = fz_make(GK_U8, 2, of_scale, FZ_INPUT);
        args.zero = &zero;
        for (int64_t i = 0; i < gk_numel(&zero); ++i)
            fz_set(&zero, i, rint(fz_uniform() * 7.5 + 7.5));
    }
    if (extra & 1 && format == GK_NVFP4) {
        whole = fz_make(GK_F32, 0, NULL, FZ_INPUT);
        fz_set(&whole, 0, 0.5);
        args.global_scale = &whole;
    }
    if (dtype == GK_E4M3) {
        scale_a = fz_make(GK_F32, 2 * (int)fz_int(0, 1), of_a1, FZ_INPUT);
        args.scale_a = &scale_a;
    }
    if (extra & 2) {
        const int one = grouped ? (int)fz_int(0, 1) : 1;
        bias = fz_make(extra & 4 ? GK_F32 : out, 2 - one, of_bias + one, FZ_INPUT);
        args.bias = &bias;
    }
    args.activation = (gk_activation)fz_int(0, 4);
    args.out = fz_make(out, 2, of_out, FZ_RESULT | FZ_CONTIGUOUS);

    gk_weight_gemm_args judge = args;
    judge.out = fz_judged(&args.out);
    gk_tensor *const all[] = {&args.a,
                              &args.packed,
                              &args.scale,
                              &args.out,
                              args.bias ? &bias : NULL,
                              grouped ? &offs : NULL};
    const bool wrong = fz_corrupt(all, 6, 6);
    const gk_status status = fz_call("gk_weight_gemm", &ctx, &args, bytes_of, call, &args.workspace,
                                     &args.workspace_bytes, wrong);
    FZ_REQUIRE(wrong || !bad || status != GK_OK, "weight_gemm took bad ends");
    FZ_REQUIRE(wrong || status != GK_ERR_ARGUMENT || k == 0, "weight_gemm refused a good call: %s",
               gk_last_error());
    if (!wrong && status == GK_OK) {
        gk_context plain = GK_CONTEXT_INIT;
        gk_ref_weight_gemm(&plain, &judge);
        /* codes of at most 15, scales of at most 2, so that weights have 7 bits and are exact in
         * a's dtype */
        fz_near("out", &args.out, &judge.out,
                (96 * (double)k + 8) * (16 + sqrt((double)k)) * 0x1p-24);
    }
    fz_free();
    return 0;
}
