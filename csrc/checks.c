/* checks.c: what the entry points ask of their arguments (checks.h). */
#include "checks.h"

static _Thread_local int64_t num_checks;
int64_t gk_num_checks(void) { return num_checks; }

gk_status gk_check_args_size(const char *op, size_t args_size, size_t expected) {
    GK_REQUIRE(args_size >= expected, "%s: args.size is %zu, expected at least %zu", op, args_size, expected);
    return GK_OK;
}

gk_status gk_check_context(const char *op, const gk_context *ctx, size_t args_size, size_t expected) {
    ++num_checks;
    GK_REQUIRE(ctx && ctx->size >= sizeof(gk_context),
               "%s: context is missing or its size field is not sizeof(gk_context)", op);
    GK_TRY(gk_check_args_size(op, args_size, expected));
#ifdef GPUKERN_HAS_CUDA
    GK_REQUIRE(ctx->device == GK_CPU || ctx->device == GK_CUDA, "%s: context.device is %d", op, (int)ctx->device);
#else
    if (ctx->device != GK_CPU)
        return gk_fail(GK_ERR_UNSUPPORTED, "%s: this library was built without CUDA kernels; expected a CPU context",
                       op);
#endif
    return GK_OK;
}

/* More elements than any address space holds: below it no product of sizes, strides and workers overflows 64 bits. A size
 * of 0 counts as 1, because workspaces are also sized by what an empty tensor has most of. */
#define MAX_ELEMENTS (INT64_C(1) << 48)

/* ndim must have been checked. A stride must reach no further than MAX_ELEMENTS, in a dimension of size 0 or 1, too. */
static gk_status check_extent(const char *op, const char *name, const gk_tensor *t) {
    int64_t elements = 1;
    for (int d = 0; d < t->ndim; ++d) {
        const int64_t size = t->shape[d], stride = t->stride[d], most = MAX_ELEMENTS / gk_max_i64(1, size - 1);
        GK_REQUIRE(size >= 0, "%s: %s has size %lld in dimension %d", op, name, (long long)size, d);
        GK_REQUIRE(size <= MAX_ELEMENTS / elements, "%s: %s has more than 2^48 elements, sizes of 0 counted as 1", op,
                   name);
        GK_REQUIRE(stride >= -most && stride <= most,
                   "%s: %s has stride %lld in dimension %d of size %lld, which spans more than 2^48 elements", op, name,
                   (long long)stride, d, (long long)size);
        elements *= gk_max_i64(1, size);
    }
    return GK_OK;
}

/* Sizes of several tensors that kernels multiply, then by the bytes of a row. */
gk_status gk_check_product(const char *op, const char *what, int64_t a, int64_t b, int64_t c) {
    const int64_t most = MAX_ELEMENTS / 16;
    GK_REQUIRE(a <= most / gk_max_i64(1, b) / gk_max_i64(1, c) && b <= most / gk_max_i64(1, c) && c <= most,
               "%s: %s are %lld x %lld x %lld, expected at most 2^44", op, what, (long long)a, (long long)b,
               (long long)c);
    return GK_OK;
}

gk_status gk_check_layout(const char *op, const char *name, const gk_tensor *t, gk_dtype dtype, int min_ndim,
                          int max_ndim) {
    GK_REQUIRE(t->ndim >= min_ndim && t->ndim <= max_ndim, "%s: %s has %d dimensions, expected %d to %d", op, name,
               (int)t->ndim, min_ndim, max_ndim);
    GK_REQUIRE(t->dtype == dtype, "%s: %s is %s, expected %s", op, name, gk_dtype_name(t->dtype), gk_dtype_name(dtype));
    return check_extent(op, name, t);
}

gk_status gk_check_tensor(const char *op, const char *name, const gk_tensor *t, gk_dtype dtype, int min_ndim,
                          int max_ndim) {
    GK_TRY(gk_check_layout(op, name, t, dtype, min_ndim, max_ndim));
    GK_REQUIRE(t->data || gk_numel(t) == 0, "%s: %s has no data", op, name);
    return GK_OK;
}

gk_status gk_check_converted(const char *op, const char *name, gk_dtype dtype) {
    GK_REQUIRE(dtype == GK_F32 || dtype == GK_BF16 || dtype == GK_F16 || dtype == GK_F64,
               "%s: %s is %s, expected float32, bfloat16, float16 or float64", op, name, gk_dtype_name(dtype));
    return GK_OK;
}

gk_status gk_check_size(const char *op, const char *name, const gk_tensor *t, int dim, int64_t expected) {
    GK_REQUIRE(t->shape[dim] == expected, "%s: %s has size %lld in dimension %d, expected %lld", op, name,
               (long long)t->shape[dim], dim, (long long)expected);
    return GK_OK;
}

gk_status gk_check_dense_last(const char *op, const char *name, const gk_tensor *t) {
    const int d = t->ndim - 1;
    GK_REQUIRE(t->stride[d] == 1 || t->shape[d] <= 1 || gk_numel(t) == 0,
               "%s: %s has stride %lld in its last dimension, expected 1", op, name, (long long)t->stride[d]);
    return GK_OK;
}

/* ---- attention ---------------------------------------------------------------------------------------- */
gk_status gk_check_rules(const char *op, const gk_attn_rules *r, gk_dtype dtype, int64_t batch, int64_t heads_q) {
    GK_REQUIRE(isfinite(r->scale), "%s: scale is %g, expected a finite value", op, r->scale);
    GK_REQUIRE(fabs(r->scale) <= gk_scale_limit(dtype), "%s: scale is %g, expected at most 1e38 in size with %s", op,
               r->scale, gk_dtype_name(dtype));
    GK_REQUIRE(isfinite(r->softcap) && r->softcap >= 0, "%s: softcap is %g, expected 0 or more", op, r->softcap);
    GK_REQUIRE(gk_holds_softcap(r, dtype),
               "%s: scale is %g and softcap %g, expected a quotient of at most 1e37 with %s", op, r->scale, r->softcap,
               gk_dtype_name(dtype));
    GK_REQUIRE(r->window_left >= -1, "%s: window_left is %lld, expected -1 or more", op, (long long)r->window_left);
    GK_REQUIRE(r->window_right >= -1, "%s: window_right is %lld, expected -1 or more", op, (long long)r->window_right);
    if (r->alibi_slopes) {
        GK_TRY(gk_check_tensor(op, "alibi_slopes", r->alibi_slopes, gk_stats_dtype(dtype), 1, 2));
        GK_TRY(gk_check_size(op, "alibi_slopes", r->alibi_slopes, r->alibi_slopes->ndim - 1, heads_q));
        if (r->alibi_slopes->ndim == 2) GK_TRY(gk_check_size(op, "alibi_slopes", r->alibi_slopes, 0, batch));
    }
    if (r->sinks) {
        const bool own = r->sinks->dtype == dtype; /* q's dtype is as good */
        GK_TRY(gk_check_tensor(op, "sinks", r->sinks, own ? dtype : gk_stats_dtype(dtype), 1, 1));
        GK_TRY(gk_check_size(op, "sinks", r->sinks, 0, heads_q));
    }
    return GK_OK;
}

gk_status gk_check_of_sequences(const char *op, const char *name, const gk_tensor *t, int64_t batch) {
    if (!t) return GK_OK;
    GK_TRY(gk_check_tensor(op, name, t, GK_I32, 1, 1));
    return gk_check_size(op, name, t, 0, batch);
}

gk_status gk_check_heads(const char *op, int64_t heads_q, int64_t heads_kv) {
    GK_REQUIRE(heads_kv > 0 ? heads_q % heads_kv == 0 : heads_q == 0,
               "%s: q has %lld heads, expected a multiple of the %lld of k", op, (long long)heads_q,
               (long long)heads_kv);
    return GK_OK;
}

gk_status gk_check_head_dim(const char *op, const char *name, const gk_context *ctx, int64_t d) {
    if (ctx->device == GK_CUDA) {
        if (d < 8 || d > 256 || d % 8 != 0)
            return gk_fail(GK_ERR_UNSUPPORTED,
                           "%s: %s has head_dim %lld; supported on CUDA are multiples of 8 from 8 to 256", op, name,
                           (long long)d);
        return GK_OK;
    }
    if (d < 1 || d > 512)
        return gk_fail(GK_ERR_UNSUPPORTED, "%s: %s has head_dim %lld; supported are 1 to 512", op, name, (long long)d);
    return GK_OK;
}

/* CUDA kernels count tokens in 32 bits, with a bit to spare for sums. */
gk_status gk_check_length(const char *op, const char *name, const gk_context *ctx, int64_t n) {
    if (ctx->device == GK_CUDA && n > INT64_C(1) << 30)
        return gk_fail(GK_ERR_UNSUPPORTED, "%s: %s has %lld tokens; supported on CUDA are up to 2^30", op, name,
                       (long long)n);
    return GK_OK;
}

bool gk_is_contiguous(const gk_tensor *t) {
    int64_t s = 1;
    for (int d = t->ndim - 1; d >= 0; --d) {
        if (t->shape[d] != 1 && t->stride[d] != s) return false;
        s *= t->shape[d];
    }
    return true;
}
