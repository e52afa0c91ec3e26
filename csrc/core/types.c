/* SPDX-License-Identifier: BSD-3-Clause */
/* types.c: the table of element types, and gpukern.h's functions on dtypes. */
#include "types.h"
#include "../formats/codes.h"

#include <float.h>
#include <string.h>

const gk_type gk_types[] = {
    {GK_F32, GK_KIND_FLOAT, 32, 23, FLT_MAX, "float32", "f32"},
    {GK_BF16, GK_KIND_FLOAT, 16, 7, 0x1.fep127, "bfloat16", "bf16"},
    {GK_F16, GK_KIND_FLOAT, 16, 10, 65504, "float16", "f16"},
    {GK_F64, GK_KIND_FLOAT, 64, 52, DBL_MAX, "float64", "f64"},
    {GK_I32, GK_KIND_INT, 32, 0, INT32_MAX, "int32", "i32"},
    {GK_I64, GK_KIND_INT, 64, 0, 0x1p63, "int64", "i64"},
    {GK_E4M3, GK_KIND_CODE, 8, 3, GK_E4M3_MAX, "float8_e4m3fn", "e4m3"},
    {GK_E5M2, GK_KIND_CODE, 8, 2, GK_E5M2_MAX, "float8_e5m2", "e5m2"},
    {GK_I8, GK_KIND_CODE, 8, 0, 127, "int8", "i8"},
    {GK_U8, GK_KIND_CODE, 8, 0, 255, "uint8", "u8"},
    {GK_E8M0, GK_KIND_SCALE, 8, 0, 0x1p127, "float8_e8m0fnu", "e8m0"},
#ifdef GK_MORE_TYPES /* set by a test */
    GK_MORE_TYPES
#endif
    {(gk_dtype)-1, GK_KIND_NONE, 0, 0, 0, "unknown dtype", "unknown"},
};

const gk_type *gk_type_named(const char *name) {
    const gk_type *type = gk_types;
    while (type->kind != GK_KIND_NONE && strcmp(type->name, name) != 0) ++type;
    return type;
}

size_t gk_dtype_bytes(gk_dtype dtype) { return (size_t)gk_bytes_of(dtype, 1); }

const char *gk_dtype_name(gk_dtype dtype) { return gk_type_of(dtype)->name; }
