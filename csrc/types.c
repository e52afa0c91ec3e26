/* types.c: the element types, and what gpukern.h says of them. */
#include "types.h"

#include <float.h>
#include <string.h>

const gk_type gk_types[] = {
    {GK_F32, GK_KIND_FLOAT, 32, 23, FLT_MAX, "float32", "f32"},
    {GK_BF16, GK_KIND_FLOAT, 16, 7, 0x1.fep127, "bfloat16", "bf16"},
    {GK_F16, GK_KIND_FLOAT, 16, 10, 65504, "float16", "f16"},
    {GK_F64, GK_KIND_FLOAT, 64, 52, DBL_MAX, "float64", "f64"},
    {GK_I32, GK_KIND_INT, 32, 0, INT32_MAX, "int32", "i32"},
    {GK_I64, GK_KIND_INT, 64, 0, 0x1p63, "int64", "i64"},
};
const int gk_num_types = (int)(sizeof gk_types / sizeof gk_types[0]);

static const gk_type unknown = {.kind = GK_KIND_NONE, .name = "unknown dtype", .short_name = "unknown"};

const gk_type *gk_type_of(gk_dtype dtype) {
    for (int i = 0; i < gk_num_types; ++i)
        if (gk_types[i].dtype == dtype) return &gk_types[i];
    return &unknown;
}

const gk_type *gk_type_named(const char *name) {
    for (int i = 0; i < gk_num_types; ++i)
        if (strcmp(gk_types[i].name, name) == 0) return &gk_types[i];
    return &unknown;
}

size_t gk_dtype_bytes(gk_dtype dtype) { return (size_t)gk_bytes_of(dtype, 1); }

const char *gk_dtype_name(gk_dtype dtype) { return gk_type_of(dtype)->name; }
