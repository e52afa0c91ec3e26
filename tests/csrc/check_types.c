/* The element types (types.h): every one described once, found by its value and by its name, and loaded and stored as it says;
 * what is none is told from them. */
#include "check.h"

#include "types.h"

static void check_type(const gk_type *type) {
    snprintf(check_case, sizeof check_case, "type %s", type->name);
    int found = 0;
    for (const gk_type *x = gk_types; x->kind != GK_KIND_NONE; ++x)
        found +=
            x->dtype == type->dtype || strcmp(x->name, type->name) == 0 || strcmp(x->short_name, type->short_name) == 0;
    check_result(found == 1, "described %d times", found);
    check_result(gk_type_of(type->dtype) == type && gk_type_named(type->name) == type, "not found");
    check_result(strcmp(gk_dtype_name(type->dtype), type->name) == 0, "named %s", gk_dtype_name(type->dtype));
    check_result(gk_bytes_of(type->dtype, 3) == (3 * type->bits + 7) / 8 && gk_bytes_of(type->dtype, 0) == 0,
                 "3 elements take %lld bytes", (long long)gk_bytes_of(type->dtype, 3));
    check_result(gk_is_float(type->dtype) == (type->kind == GK_KIND_FLOAT), "kind %d", (int)type->kind);
    check_result(gk_is_float(gk_stats_dtype(type->dtype)), "stats in %s", gk_dtype_name(gk_stats_dtype(type->dtype)));

    /* a load gives back what a store was given, where the type has it: its bits, its steps, its largest value */
    double room[4] = {0};
    const int64_t last = (int64_t)sizeof room * 8 / type->bits - 1;
    const double one_more = 1 + ldexp(1, -type->fraction_bits), values[] = {-3, one_more, -type->largest};
    for (int v = 0; v < (type->kind == GK_KIND_FLOAT ? 3 : 1); ++v) {
        gk_store(room, type->dtype, last, values[v]);
        const double got = gk_load(room, type->dtype, last);
        check_result(got == values[v], "%.17g comes back as %.17g", values[v], got);
    }
    if (type->kind != GK_KIND_FLOAT) return;
    gk_store(room, type->dtype, 0, 1 + ldexp(0.49, -type->fraction_bits));
    check_result(gk_load(room, type->dtype, 0) == 1, "more than %d bits after the point", type->fraction_bits);
}

int main(void) {
    for (const gk_type *type = gk_types; type->kind != GK_KIND_NONE; ++type) check_type(type);
    snprintf(check_case, sizeof check_case, "no type");
    const gk_dtype none = (gk_dtype)77;
    check_result(gk_type_of(none)->kind == GK_KIND_NONE && !gk_is_float(none), "77 is a type");
    check_result(gk_type_named("float31")->kind == GK_KIND_NONE, "float31 is a type");
    check_result(gk_dtype_bytes(none) == 0 && strcmp(gk_dtype_name(none), "unknown dtype") == 0,
                 "of %zu bytes, named %s", gk_dtype_bytes(none), gk_dtype_name(none));
    return check_end();
}
