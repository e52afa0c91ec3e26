/* SPDX-License-Identifier: BSD-3-Clause */
/* checks.h: what the checks of csrc/api/ are made of. Each names the argument, what was expected
 * and what came, and returns GK_ERR_ARGUMENT or GK_ERR_UNSUPPORTED. `letters` names dimensions as
 * gpukern.h does, "[B, Hq, Sq, D]". */
#ifndef GPUKERN_CHECKS_H
#define GPUKERN_CHECKS_H

#include "io.h"
#include "internal.h"

#define GK_REQUIRE(condition, ...)                                      \
    do {                                                                \
        if (!(condition)) return gk_fail(GK_ERR_ARGUMENT, __VA_ARGS__); \
    } while (0)

#define GK_TRY(call)                          \
    do {                                      \
        gk_status status_ = (call);           \
        if (status_ != GK_OK) return status_; \
    } while (0)

/* status.c: what an entry point of gpukern.h returns: a failure's text gets the entry point's name
 * in front. */
gk_status gk_named(const char *name, gk_status status);

/* The first check of an entry point. */
gk_status gk_check_context(const gk_context *ctx, size_t args_size, size_t expected);
gk_status gk_check_args_size(size_t args_size, size_t expected); /* of arguments within arguments */
int64_t gk_num_checks(void);

/* ---- inputs, in the order of the arguments: first take one, then say what it must be --------- */
/* At most GK_MAX_DIMS dimensions, sizes and strides that 64 bits count, and data where the depth
 * asks for it. */
gk_status gk_take(gk_io *io, const char *name, const gk_tensor *t, gk_strides strides);
/* whose data may be missing */
gk_status gk_take_unread(gk_io *io, const char *name, const gk_tensor *t);
/* It is written in place: its elements share no memory, with each other or with another input. */
void gk_taken_is_written(gk_io *io);

gk_status gk_check_float(gk_io *io, const char *name, const gk_tensor *t);
/* Ends the refusal of a dtype where 8-bit floats are taken: caches and checkpoints often hold them
 * as bytes. */
const char *gk_bytes_hint(gk_dtype got);
gk_status gk_check_dtype(gk_io *io, const char *name, const gk_tensor *t, gk_dtype expected);
gk_status gk_check_dtypes(gk_io *io, const char *name, const gk_tensor *t, gk_dtype one,
                          gk_dtype other);
gk_status gk_check_same_dtype(gk_io *io, const char *name, const gk_tensor *t,
                              const char *first_name, const gk_tensor *first);
gk_status gk_check_dims(const char *name, const gk_tensor *t, int ndim, const char *letters);
gk_status gk_check_least_dims(const char *name, const gk_tensor *t, int least);
gk_status gk_check_shape(const char *name, const gk_tensor *t, int ndim, const int64_t *expected);
/* of one dimension, [n] */
gk_status gk_check_length_of(const char *name, const gk_tensor *t, int64_t n);
/* "k has head_dim 64, q has 128; they must match" */
gk_status gk_check_same(const char *name, const char *what, int64_t got, const char *other,
                        int64_t expected);
/* An int32 [n] at any stride; t NULL: nothing to check. */
gk_status gk_take_index(gk_io *io, const char *name, const gk_tensor *t, int64_t n);

/* A vector [N] of the dtype of rows [.., N], or float32 beside 16-bit rows; NULL: none. */
gk_status gk_take_vector(gk_io *io, const char *name, const gk_tensor *t, const gk_tensor *rows);
/* The tables of a rotation, [P, R / 2] each, of rows of head_dim columns of that dtype. */
gk_status gk_take_cos_sin(gk_io *io, const gk_tensor *cos, const gk_tensor *sin, gk_dtype dtype,
                          int64_t head_dim);

/* ---- values ---------------------------------------------------------------------------------- */
gk_status gk_check_held(gk_io *io, const char *name, double x, const char *first_name,
                        const gk_tensor *first);
gk_status gk_check_not_negative(const char *name, int64_t x);
/* Sizes of several tensors that kernels multiply, then by the bytes of a row. */
gk_status gk_check_product(const char *what, int64_t a, int64_t b, int64_t c);

/* ---- results --------------------------------------------------------------------------------- */
/* Adds a result; `shape` is of ndim sizes. */
gk_result *gk_give(gk_io *io, const char *name, const gk_tensor *given, gk_dtype dtype, int ndim,
                   const int64_t *shape, gk_strides strides);

/* ---- attention ------------------------------------------------------------------------------- */
gk_status gk_check_rules(gk_io *io, const gk_attn_rules *r, const gk_tensor *q, int64_t batch,
                         int64_t heads_q);
gk_status gk_check_heads(int64_t heads_q, const char *name, int64_t heads_kv);
gk_status gk_check_head_dim(const char *name, gk_device device, int64_t d);
gk_status gk_check_tokens(const char *name, const gk_context *ctx, int64_t n);

/* ---- contents.c: on the CPU the contents of index tensors are read before anything is written
 * (GK_ERR_INDEX) ---- */
gk_status gk_check_cu_seqlens(const char *name, const gk_tensor *cu_seqlens, int64_t total,
                              int64_t max_seqlen);
gk_status gk_check_paged_contents(const gk_paged_attn_args *args);
gk_status gk_check_slots(const gk_kv_cache_write_args *args);
gk_status gk_check_positions(const gk_rope_args *args);
gk_status gk_check_targets(const gk_cross_entropy_args *args, int64_t classes);

static inline bool gk_reads_contents(const gk_io *io, const gk_context *ctx) {
    return io->depth == GK_CONTENTS && ctx->device == GK_CPU;
}

/* Of shapes in failure texts, "[2, 3]". */
typedef struct gk_shape_text {
    char text[GK_MAX_DIMS * 22 + 3];
} gk_shape_text;
gk_shape_text gk_text_of(int ndim, const int64_t *shape);

#endif
