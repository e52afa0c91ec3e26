/* SPDX-License-Identifier: BSD-3-Clause */
/* types.h: the properties of an element type that are not the business of a kernel. To add a
 * type: a line in types.c, a load and a store in internal.h, and instances of the kernels that
 * read it. Nothing is indexed by the value of a gk_dtype. */
#ifndef GPUKERN_TYPES_H
#define GPUKERN_TYPES_H

#include "gpukern.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gk_kind {
    GK_KIND_NONE, /* not a type of this library */
    GK_KIND_FLOAT,
    GK_KIND_INT,
    GK_KIND_CODE, /* 8 bits of a quantised tensor; needs a scale, so the floating ops do not take it
                   */
    GK_KIND_SCALE /* powers of two */
} gk_kind;

typedef struct gk_type {
    gk_dtype dtype;
    gk_kind kind;
    int bits;          /* per element in memory; several elements may share a byte */
    int fraction_bits; /* FLOAT: explicit bits of the significand; rounding changes a value by at
                          most 2^-(fraction_bits + 1) of itself */
    double largest;    /* finite value */
    const char *name, *short_name; /* as in Python; as in the names of kernels */
} gk_type;

/* Types that kernels compute in, the integers of index tensors, 8-bit codes and scales. The last
 * entry, GK_KIND_NONE with 0 bits and the name "unknown dtype", stands for every unknown dtype. */
extern const gk_type gk_types[];

static inline const gk_type *gk_type_of(gk_dtype dtype) {
    const gk_type *type = gk_types;
    while (type->dtype != dtype && type->kind != GK_KIND_NONE) ++type;
    return type;
}

const gk_type *gk_type_named(const char *name); /* the same, by `name` */

static inline bool gk_is_code(gk_dtype dtype) { return gk_type_of(dtype)->kind == GK_KIND_CODE; }
static inline bool gk_is_float(gk_dtype dtype) { return gk_type_of(dtype)->kind == GK_KIND_FLOAT; }

static inline int64_t gk_bits_of(gk_dtype dtype) { return gk_type_of(dtype)->bits; }

/* Bytes of n consecutive elements, rounded up. */
static inline int64_t gk_bytes_of(gk_dtype dtype, int64_t n) {
    return (n * gk_bits_of(dtype) + 7) / 8;
}

/* Elements in 16 bytes, the size of one vector load or copy. */
static inline int64_t gk_chunk_of(gk_dtype dtype) { return 128 / gk_bits_of(dtype); }

/* True if n elements are a multiple of 16 bytes. */
static inline bool gk_whole_chunks(gk_dtype dtype, int64_t n) {
    return n * gk_bits_of(dtype) % 128 == 0;
}

/* dtype of lse, sinks, slopes and scales, and of sums over elements of `dtype`. */
static inline gk_dtype gk_stats_dtype(gk_dtype dtype) {
    const gk_type *type = gk_type_of(dtype);
    return type->kind == GK_KIND_FLOAT && type->bits > 32 ? dtype : GK_F32;
}

#ifdef __cplusplus
}
#endif
#endif
