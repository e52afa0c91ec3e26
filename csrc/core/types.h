/* SPDX-License-Identifier: BSD-3-Clause */
/* types.h: what the library knows of an element type beyond its kernels. A new type is a line in
 * types.c, a load and a store in internal.h, and the kernels' instances that read it; nothing is
 * indexed by the value of a gk_dtype. */
#ifndef GPUKERN_TYPES_H
#define GPUKERN_TYPES_H

#include "gpukern.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum gk_kind {
    GK_KIND_NONE, /* of what is no type of this library */
    GK_KIND_FLOAT,
    GK_KIND_INT,
    GK_KIND_CODE, /* 8 bits of a quantised tensor: worth something with a scale alone, so no operand
                     of the floating ops */
    GK_KIND_SCALE /* powers of two */
} gk_kind;

typedef struct gk_type {
    gk_dtype dtype;
    gk_kind kind;
    int bits;          /* of an element in memory; several may share a byte */
    int fraction_bits; /* FLOAT: after the leading one; rounding moves a value by 2^-(fraction_bits
                          + 1) of itself */
    double largest;    /* finite value */
    const char *name, *short_name; /* as Python spells it; as kernels' names do */
} gk_type;

/* Types that kernels compute in, the integers of index tensors, 8-bit codes and scales, and at the
 * end the one of GK_KIND_NONE, 0 bits and the name "unknown dtype", which is what an unknown dtype
 * has. */
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

/* Of n elements one behind the other, the last byte counted whole. */
static inline int64_t gk_bytes_of(gk_dtype dtype, int64_t n) {
    return (n * gk_bits_of(dtype) + 7) / 8;
}

/* Elements in 16 bytes, what kernels copy at once. */
static inline int64_t gk_chunk_of(gk_dtype dtype) { return 128 / gk_bits_of(dtype); }

/* Whether n elements on from a multiple of 16 bytes is one, too. */
static inline bool gk_whole_chunks(gk_dtype dtype, int64_t n) {
    return n * gk_bits_of(dtype) % 128 == 0;
}

/* Of lse, sinks, slopes and scales: what sums over elements of `dtype` are kept in. */
static inline gk_dtype gk_stats_dtype(gk_dtype dtype) {
    const gk_type *type = gk_type_of(dtype);
    return type->kind == GK_KIND_FLOAT && type->bits > 32 ? dtype : GK_F32;
}

#ifdef __cplusplus
}
#endif
#endif
