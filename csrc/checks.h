/* checks.h: what the entry points of csrc/api/ ask of their arguments before a kernel sees them. Each check names op, argument,
 * what was expected and what came, and returns GK_ERR_ARGUMENT or GK_ERR_UNSUPPORTED. */
#ifndef GPUKERN_CHECKS_H
#define GPUKERN_CHECKS_H

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

bool gk_is_contiguous(const gk_tensor *t);

/* The first check of every call, which counts it, on this thread. */
gk_status gk_check_context(const char *op, const gk_context *ctx, size_t args_size, size_t expected);
gk_status gk_check_args_size(const char *op, size_t args_size, size_t expected); /* of arguments within arguments */
int64_t gk_num_checks(void);

/* Sizes of several tensors that kernels multiply, then by the bytes of a row. */
gk_status gk_check_product(const char *op, const char *what, int64_t a, int64_t b, int64_t c);
/* Dimensions, dtype, and that sizes and strides stay where 64 bits count them; its data may be missing. */
gk_status gk_check_layout(const char *op, const char *name, const gk_tensor *t, gk_dtype dtype, int min_ndim,
                          int max_ndim);
gk_status gk_check_tensor(const char *op, const char *name, const gk_tensor *t, gk_dtype dtype, int min_ndim,
                          int max_ndim);
/* A dtype beside the one that picks the kernel: one that every kernel converts. */
gk_status gk_check_converted(const char *op, const char *name, gk_dtype dtype);
gk_status gk_check_size(const char *op, const char *name, const gk_tensor *t, int dim, int64_t expected);
gk_status gk_check_dense_last(const char *op, const char *name, const gk_tensor *t);

/* attention */
gk_status gk_check_rules(const char *op, const gk_attn_rules *r, gk_dtype dtype, int64_t batch, int64_t heads_q);
/* An int32 for each sequence; t may be NULL. */
gk_status gk_check_of_sequences(const char *op, const char *name, const gk_tensor *t, int64_t batch);
gk_status gk_check_heads(const char *op, int64_t heads_q, int64_t heads_kv);
gk_status gk_check_head_dim(const char *op, const char *name, const gk_context *ctx, int64_t d);
gk_status gk_check_length(const char *op, const char *name, const gk_context *ctx, int64_t n);

#endif
