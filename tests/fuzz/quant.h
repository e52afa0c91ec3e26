/* SPDX-License-Identifier: BSD-3-Clause */
/* quant.h: shared by the fuzz targets of quantised products.
 *
 * csrc/ref is the judge: it gets the same arguments and a result of its own. It accepts every dtype
 * and sums in double. A float32 sum of k products of codes differs from it by at most k roundings
 * of the largest partial sum. */
#ifndef GPUKERN_FUZZ_QUANT_H
#define GPUKERN_FUZZ_QUANT_H

#include "fuzz.h"
#include "core/op.h"

/* Fills t with integers of up to `most`. Smaller numbers would be 0 as int8 codes. */
static void fz_whole(const gk_tensor *t, int most) {
    for (int64_t i = 0; i < gk_numel(t); ++i) fz_set(t, i, rint(fz_uniform() * most));
}

FZ_UNUSED static gk_tensor fz_codes(gk_dtype dtype, int64_t rows, int64_t cols, int flags) {
    const int64_t shape[2] = {rows, cols};
    const gk_tensor t = fz_make(dtype, 2, shape, flags);
    fz_whole(&t, 3);
    return t;
}

/* A scale of shape [], [1] or [rows, cols]. Values are 1/2, 1 or 2, and rarely one is invalid. */
FZ_UNUSED static gk_tensor fz_scale(gk_dtype dtype, int64_t rows, int64_t cols) {
    const int64_t form = fz_int(0, 3), shape[2] = {rows, cols}, one = 1;
    const gk_tensor t = form == 0   ? fz_make(dtype, 0, NULL, FZ_INPUT)
                        : form == 1 ? fz_make(dtype, 1, &one, FZ_INPUT)
                                    : fz_make(dtype, 2, shape, FZ_INPUT);
    for (int64_t i = 0; i < gk_numel(&t); ++i) fz_set(&t, i, exp2(rint(fz_uniform())));
    if (gk_numel(&t) && fz_one_in(16)) fz_set(&t, 0, dtype == GK_E8M0 ? 1 : (double)NAN);
    return t;
}

/* The number of scales for n rows: one in all, one for each 128, or one for each row. Along k
 * (`summed`) it is one for each 32 instead of one for each row. */
FZ_UNUSED static int64_t fz_blocks(int64_t n, bool summed) {
    const int64_t form = fz_int(0, 3);
    return form == 0 ? 1 : form == 1 ? gk_ceil_div(n, 128) : summed ? gk_ceil_div(n, 32) : n;
}

FZ_UNUSED static gk_dtype fz_code_dtype(void) {
    static const gk_dtype dtypes[] = {GK_E4M3, GK_E5M2, GK_I8};
    return dtypes[fz_int(0, 2)];
}

/* A result for the judge. It has the same dtype, so that both are rounded alike. */
FZ_UNUSED static gk_tensor fz_judged(const gk_tensor *out) {
    return fz_make(out->dtype, out->ndim, out->shape, FZ_CONTIGUOUS | FZ_RESULT);
}

/* Compares two results of one dtype. Sums may differ by `bound`, so their roundings may differ by
 * one ulp. */
FZ_UNUSED static void fz_near(const char *name, const gk_tensor *got, const gk_tensor *want,
                              double bound) {
    const double ulp = got->dtype == GK_E4M3   ? 0x1p-3
                       : got->dtype == GK_E5M2 ? 0x1p-2
                                               : 2 * fz_unit(got->dtype);
    for (int64_t i = 0; i < gk_numel(got); ++i) {
        const double x = fz_get(got, i), y = fz_get(want, i);
        if (x == y || (isnan(x) && isnan(y))) continue;
        FZ_REQUIRE(fabs(x - y) <=
                       bound + 1.01 * ulp * fmax(fabs(x), fabs(y)) + (got->dtype == GK_I8),
                   "%s[%lld of %lld] %s is %.9g, expected %.9g +- %.3g", name, (long long)i,
                   (long long)gk_numel(got), gk_dtype_name(got->dtype), x, y, bound);
    }
}

#endif
