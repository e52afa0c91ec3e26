/* SPDX-License-Identifier: BSD-3-Clause */
/* check_types: tests the table of element types (types.h). Every type has one entry, is found by
 * its value and by its name, and is loaded and stored as the entry says. An unknown type gives
 * the last entry. */
#include "check.h"

#include "core/types.h"

static void check_type(const gk_type *type) {
    snprintf(check_case, sizeof check_case, "type %s", type->name);
    int found = 0;
    for (const gk_type *x = gk_types; x->kind != GK_KIND_NONE; ++x)
        found += x->dtype == type->dtype || strcmp(x->name, type->name) == 0 ||
                 strcmp(x->short_name, type->short_name) == 0;
    check_result(found == 1, "described %d times", found);
    check_result(gk_type_of(type->dtype) == type && gk_type_named(type->name) == type, "not found");
    check_result(strcmp(gk_dtype_name(type->dtype), type->name) == 0, "named %s",
                 gk_dtype_name(type->dtype));
    check_result(gk_bytes_of(type->dtype, 3) == (3 * type->bits + 7) / 8 &&
                     gk_bytes_of(type->dtype, 0) == 0,
                 "3 elements take %lld bytes", (long long)gk_bytes_of(type->dtype, 3));
    check_result(gk_is_float(type->dtype) == (type->kind == GK_KIND_FLOAT), "kind %d",
                 (int)type->kind);
    check_result(gk_is_float(gk_stats_dtype(type->dtype)), "stats in %s",
                 gk_dtype_name(gk_stats_dtype(type->dtype)));

    /* a load returns what was stored if the type can represent it: its bits, its steps, its
     * largest value */
    double room[4] = {0};
    const int64_t last = (int64_t)sizeof room * 8 / type->bits - 1;
    const double one_more = 1 + ldexp(1, -type->fraction_bits);
    const bool is_signed = type->dtype != GK_U8 && type->kind != GK_KIND_SCALE;
    const double values[] = {is_signed ? -3 : 2, one_more,
                             is_signed ? -type->largest : type->largest};
    for (int v = 0; v < (type->kind == GK_KIND_FLOAT ? 3 : 1); ++v) {
        gk_store(room, type->dtype, last, values[v]);
        const double got = gk_load(room, type->dtype, last);
        check_result(got == values[v], "%.17g comes back as %.17g", values[v], got);
    }
    if (type->kind != GK_KIND_FLOAT) return;
    gk_store(room, type->dtype, 0, 1 + ldexp(0.49, -type->fraction_bits));
    check_result(gk_load(room, type->dtype, 0) == 1, "more than %d bits after the point",
                 type->fraction_bits);
}

/* ---- 8-bit types, code by code --------------------------------------------------------------- */
/* A code's value by the definition of the format; NaN if the code has none. */
static double value_of(gk_dtype dtype, int code) {
    const int fraction = dtype == GK_E4M3 ? 3 : 2, bias = dtype == GK_E4M3 ? 7 : 15;
    const int exponent = (code & 0x7f) >> fraction, rest = code & ((1 << fraction) - 1);
    const double sign = code & 0x80 ? -1 : 1;
    switch (dtype) {
    case GK_I8: return (int8_t)code;
    case GK_U8: return code;
    case GK_E8M0: return code == 255 ? NAN : ldexp(1, code - 127);
    case GK_E4M3:
        if ((code & 0x7f) == 0x7f) return NAN;
        break;
    default:
        if ((code & 0x7f) >= 0x7c) return (code & 0x7f) == 0x7c ? sign * INFINITY : NAN;
    }
    return sign * (exponent ? ldexp((1 << fraction) + rest, exponent - bias - fraction)
                            : ldexp(rest, 1 - bias - fraction));
}

static int stored(gk_dtype dtype, double x) {
    uint8_t code = 0x55;
    gk_store(&code, dtype, 0, x);
    return code;
}

/* Codes from `first` to `last` have increasing values. Storing a code's value gives the code. A
 * value between two codes rounds to the nearer one and the middle to the even one, also for
 * doubles that float32 cannot represent. Values outside the range give the last code. */
static void check_codes(gk_dtype dtype, int first, int last) {
    snprintf(check_case, sizeof check_case, "codes of %s", gk_dtype_name(dtype));
    const bool power = dtype == GK_E8M0; /* e8m0 rounds up */
    for (int code = 0; code < 256; ++code) {
        const uint8_t byte = (uint8_t)code;
        const double got = gk_load(&byte, dtype, 0), want = value_of(dtype, code);
        check_result(got == want || (got != got && want != want), "%d is %g, expected %g", code,
                     got, want);
    }
    for (int code = first; code < last; ++code) {
        const double x = value_of(dtype, code), next = value_of(dtype, code + 1),
                     middle = (x + next) / 2;
        const int even = power || code & 1 ? code + 1 : code;
        check_result(stored(dtype, x) == code, "%g is stored as %d, expected %d", x,
                     stored(dtype, x), code);
        check_result(stored(dtype, middle) == even, "%.17g as %d, expected %d", middle,
                     stored(dtype, middle), even);
        check_result(stored(dtype, middle * (1 - 1e-14)) == (power ? code + 1 : code),
                     "just below %g", middle);
        check_result(stored(dtype, middle * (1 + 1e-14)) == code + 1, "just above %g", middle);
    }
    const double beyond[] = {value_of(dtype, last), 1.2 * value_of(dtype, last), 1e30, 1e300};
    for (int i = 0; i < 4; ++i)
        check_result(beyond[i] < value_of(dtype, last) || stored(dtype, beyond[i]) == last ||
                         (power && beyond[i] > 1e299),
                     "%g as %d", beyond[i], stored(dtype, beyond[i]));
}

static void check_8_bits(void) {
    check_codes(GK_E4M3, 0, 0x7e);
    check_codes(GK_E5M2, 0, 0x7b);
    check_codes(GK_I8, 0, 127);
    check_codes(GK_U8, 0, 255);
    check_codes(GK_E8M0, 1, 254); /* 2^-127, code 0, is not a normal float32 */
    snprintf(check_case, sizeof check_case, "signs, infinities, NaN");
    for (int code = 1; code < 0x7c; ++code) {
        check_result(stored(GK_E4M3, -value_of(GK_E4M3, code)) == (0x80 | code), "e4m3 -%d", code);
        check_result(stored(GK_E5M2, -value_of(GK_E5M2, code)) == (0x80 | code), "e5m2 -%d", code);
        check_result((int8_t)stored(GK_I8, -code) == -code, "int8 -%d", code);
    }
    check_result(stored(GK_E4M3, INFINITY) == 0x7e && stored(GK_E4M3, -INFINITY) == 0xfe,
                 "e4m3 of infinity");
    check_result(stored(GK_E5M2, INFINITY) == 0x7b && stored(GK_E5M2, -INFINITY) == 0xfb,
                 "e5m2 of infinity");
    check_result(stored(GK_I8, INFINITY) == 127 && (int8_t)stored(GK_I8, -INFINITY) == -128,
                 "int8 of infinity");
    check_result(stored(GK_E4M3, NAN) % 128 == 0x7f && stored(GK_E5M2, NAN) % 128 == 0x7f,
                 "fp8 of NaN");
    check_result(stored(GK_I8, NAN) == 0 && stored(GK_E8M0, NAN) == 255 &&
                     stored(GK_E8M0, INFINITY) == 255,
                 "of NaN");
    check_result(stored(GK_E8M0, 0) == 0 && stored(GK_E8M0, 0x1p-127) == 0 &&
                     stored(GK_E8M0, 0x1p-140) == 0,
                 "of 0");
}

int main(void) {
    check_8_bits();
    for (const gk_type *type = gk_types; type->kind != GK_KIND_NONE; ++type) check_type(type);
    snprintf(check_case, sizeof check_case, "no type");
    const gk_dtype none = (gk_dtype)77;
    check_result(gk_type_of(none)->kind == GK_KIND_NONE && !gk_is_float(none), "77 is a type");
    check_result(gk_type_named("float31")->kind == GK_KIND_NONE, "float31 is a type");
    check_result(gk_dtype_bytes(none) == 0 && strcmp(gk_dtype_name(none), "unknown dtype") == 0,
                 "of %zu bytes, named %s", gk_dtype_bytes(none), gk_dtype_name(none));
    return check_end();
}
