/* SPDX-License-Identifier: BSD-3-Clause */
/* checks.h: the building blocks of the argument checks in csrc/api/.
 *
 * The text of a failed check names the argument, what was expected and what was passed. The status
 * is GK_ERR_ARGUMENT or GK_ERR_UNSUPPORTED. `letters` names dimensions as in gpukern.h:
 * "[B, Hq, Sq, D]". */
#ifndef GPUKERN_CHECKS_H
#define GPUKERN_CHECKS_H

#include "io.h"
#include "gpukern_moe.h"
#include "gpukern_sample.h"
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

/* status.c: puts the name of an entry point of gpukern.h in front of a failure's text and
 * returns the status. */
gk_status gk_named(const char *name, gk_status status);

/* The first check of every entry point: the context and the size of the arguments. */
gk_status gk_check_context(const gk_context *ctx, size_t args_size, size_t expected);
/* Checks the `size` of an argument struct that is a member of another one. */
gk_status gk_check_args_size(size_t args_size, size_t expected);
int64_t gk_num_checks(void);

/* ---- inputs ---------------------------------------------------------------------------------- */
/* Registers an input; a check calls it for each input, in the order of the arguments. Refuses more
 * than GK_MAX_DIMS dimensions, sizes and strides whose products overflow, and missing data unless
 * the depth is GK_SHAPES. */
gk_status gk_take(gk_io *io, const char *name, const gk_tensor *t, gk_strides strides);
/* The same for a tensor whose data may be missing. */
gk_status gk_take_unread(gk_io *io, const char *name, const gk_tensor *t);
/* Marks the last input as written in place: its elements may share memory neither with each
 * other nor with another input. */
void gk_taken_is_written(gk_io *io);

gk_status gk_check_float(gk_io *io, const char *name, const gk_tensor *t);
/* Text to append when a check that takes 8-bit floats refuses uint8: caches and checkpoints
 * often hold such floats as bytes. */
const char *gk_bytes_hint(gk_dtype got);
gk_status gk_check_dtype(gk_io *io, const char *name, const gk_tensor *t, gk_dtype expected);
gk_status gk_check_dtypes(gk_io *io, const char *name, const gk_tensor *t, gk_dtype one,
                          gk_dtype other);
gk_status gk_check_same_dtype(gk_io *io, const char *name, const gk_tensor *t,
                              const char *first_name, const gk_tensor *first);
gk_status gk_check_dims(const char *name, const gk_tensor *t, int ndim, const char *letters);
gk_status gk_check_least_dims(const char *name, const gk_tensor *t, int least);
gk_status gk_check_shape(const char *name, const gk_tensor *t, int ndim, const int64_t *expected);
/* The tensor has one dimension, of size n. */
gk_status gk_check_length_of(const char *name, const gk_tensor *t, int64_t n);
/* "k has head_dim 64, q has 128; they must match" */
gk_status gk_check_same(const char *name, const char *what, int64_t got, const char *other,
                        int64_t expected);
/* An int32 vector [n] of any stride. t may be NULL; then there is nothing to check. */
gk_status gk_take_index(gk_io *io, const char *name, const gk_tensor *t, int64_t n);

/* A vector [N] for rows [.., N]. Its dtype is that of the rows, or float32 if the rows have 16
 * bits. t may be NULL. */
gk_status gk_take_vector(gk_io *io, const char *name, const gk_tensor *t, const gk_tensor *rows);
/* The tables cos and sin of a rotation, [P, R / 2] each, for rows of head_dim columns of this
 * dtype. */
gk_status gk_take_cos_sin(gk_io *io, const gk_tensor *cos, const gk_tensor *sin, gk_dtype dtype,
                          int64_t head_dim);

/* ---- values ---------------------------------------------------------------------------------- */
gk_status gk_check_representable(gk_io *io, const char *name, double x, const char *first_name,
                                 const gk_tensor *first);
gk_status gk_check_not_negative(const char *name, int64_t x);
/* Refuses sizes whose product a b c exceeds 2^44: kernels multiply them and then multiply by the
 * bytes of a row. */
gk_status gk_check_product(const char *what, int64_t a, int64_t b, int64_t c);

/* ---- results --------------------------------------------------------------------------------- */
/* Adds a result. `shape` has ndim sizes. */
gk_result *gk_give(gk_io *io, const char *name, const gk_tensor *given, gk_dtype dtype, int ndim,
                   const int64_t *shape, gk_strides strides);

/* ---- attention ------------------------------------------------------------------------------- */
gk_status gk_check_rules(gk_io *io, const gk_attn_rules *r, const gk_tensor *q, int64_t batch,
                         int64_t heads_q);
gk_status gk_check_heads(int64_t heads_q, const char *name, int64_t heads_kv);
/* t: the tensor whose last dimension is d; its dtype decides, too. */
gk_status gk_check_head_dim(const char *name, gk_device device, const gk_tensor *t, int64_t d);
/* The same for q and the caches of paged_attn, whose head_dim may be up to GK_CACHE_HEAD_DIM. */
gk_status gk_check_cache_head_dim(const char *name, gk_device device, int64_t d);
gk_status gk_check_tokens(const char *name, const gk_context *ctx, int64_t n);

/* ---- contents.c ------------------------------------------------------------------------------ */
/* On the CPU the contents of index tensors are checked before anything is written: GK_ERR_INDEX. */
gk_status gk_check_cu_seqlens(const char *name, const gk_tensor *cu_seqlens, int64_t total,
                              int64_t max_seqlen);
gk_status gk_check_paged_contents(const gk_paged_attn_args *args);
gk_status gk_check_slots(const gk_kv_cache_write_args *args);
gk_status gk_check_positions(const gk_rope_args *args);
gk_status gk_check_targets(const gk_cross_entropy_args *args, int64_t classes);
gk_status gk_check_count_slots(const gk_sample_tokens_args *args);
/* The places of moe_unpermute, which name one of `rows` rows or are negative. */
gk_status gk_check_places(const gk_tensor *place, int64_t rows);

static inline bool gk_reads_contents(const gk_io *io, const gk_context *ctx) {
    return io->depth == GK_CONTENTS && ctx->device == GK_CPU;
}

/* A shape as text, "[2, 3]", for failure texts. */
typedef struct gk_shape_text {
    char text[GK_MAX_DIMS * 22 + 3];
} gk_shape_text;
gk_shape_text gk_text_of(int ndim, const int64_t *shape);

#endif
