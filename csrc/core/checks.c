/* SPDX-License-Identifier: BSD-3-Clause */
/* checks.c: the building blocks of the ops' checks (checks.h), and the checks that every call
 * passes (io.h). */
#include "checks.h"
#include "dispatch.h"
#include "paged.h"

#include <stdio.h>

static _Thread_local int64_t num_checks;
int64_t gk_num_checks(void) { return num_checks; }

void gk_io_begin(gk_io *io, gk_depth depth) {
    ++num_checks;
    io->depth = depth;
    io->num_inputs = io->num_results = 0;
    io->dtype_name = gk_dtype_name;
}

gk_status gk_check_args_size(size_t args_size, size_t expected) {
    GK_REQUIRE(args_size >= expected, "args.size is %zu, expected at least %zu", args_size,
               expected);
    return GK_OK;
}

gk_status gk_check_context(const gk_context *ctx, size_t args_size, size_t expected) {
    GK_REQUIRE(ctx && ctx->size >= sizeof(gk_context),
               "context is missing or its size field is not sizeof(gk_context)");
    GK_TRY(gk_check_args_size(args_size, expected));
#ifdef GPUKERN_HAS_CUDA
    GK_REQUIRE(ctx->device == GK_CPU || ctx->device == GK_CUDA, "context.device is %d",
               (int)ctx->device);
#else
    if (ctx->device != GK_CPU && !(ctx->device == GK_CUDA && ctx->index >= GK_FIRST_DESCRIBED_GPU))
        return gk_fail(GK_ERR_UNSUPPORTED,
                       "this library was built without CUDA kernels; expected a CPU context");
#endif
    GK_REQUIRE(ctx->device != GK_CPU || ctx->num_threads >= 1,
               "context.num_threads is %d, expected 1 or more", (int)ctx->num_threads);
    return GK_OK;
}

/* ---- texts ----------------------------------------------------------------------------------- */
gk_shape_text gk_text_of(int ndim, const int64_t *shape) {
    gk_shape_text out;
    size_t at = (size_t)snprintf(out.text, sizeof out.text, "[");
    for (int d = 0; d < ndim; ++d)
        at += (size_t)snprintf(out.text + at, sizeof out.text - at, d ? ", %lld" : "%lld",
                               (long long)shape[d]);
    snprintf(out.text + at, sizeof out.text - at, "]");
    return out;
}

static gk_shape_text text_of(const gk_tensor *t) { return gk_text_of(t->ndim, t->shape); }

static const char *plural(int n) { return n == 1 ? "dimension" : "dimensions"; }

/* ---- inputs ---------------------------------------------------------------------------------- */
/* No address space holds more elements. Up to this limit no product of sizes, strides and
 * workers overflows 64 bits. A size of 0 counts as 1, because an empty tensor's other sizes
 * still size workspaces. */
#define MAX_ELEMENTS (INT64_C(1) << 48)

/* A stride must not span more than MAX_ELEMENTS, even in a dimension of size 0 or 1. */
static gk_status check_extent(const char *name, const gk_tensor *t) {
    GK_REQUIRE(t->ndim >= 0, "%s has %d dimensions", name, (int)t->ndim);
    GK_REQUIRE(t->ndim <= GK_MAX_DIMS, "%s must have at most %d dimensions, got %d", name,
               GK_MAX_DIMS, (int)t->ndim);
    int64_t elements = 1;
    for (int d = 0; d < t->ndim; ++d) {
        const int64_t size = t->shape[d], stride = t->stride[d];
        int64_t span;
        GK_REQUIRE(size >= 0, "%s has size %lld in dimension %d", name, (long long)size, d);
        GK_REQUIRE(!__builtin_mul_overflow(elements, gk_max_i64(1, size), &elements) &&
                       elements <= MAX_ELEMENTS,
                   "%s has more than 2^48 elements, sizes of 0 counted as 1", name);
        GK_REQUIRE(
            !__builtin_mul_overflow(stride, gk_max_i64(1, size - 1), &span) &&
                span >= -MAX_ELEMENTS && span <= MAX_ELEMENTS,
            "%s has stride %lld in dimension %d of size %lld, which spans more than 2^48 elements",
            name, (long long)stride, d, (long long)size);
    }
    return GK_OK;
}

gk_status gk_take_unread(gk_io *io, const char *name, const gk_tensor *t) {
    io->input[io->num_inputs++] = (gk_input){.name = name, .tensor = t};
    return check_extent(name, t);
}

gk_status gk_take(gk_io *io, const char *name, const gk_tensor *t, gk_strides strides) {
    io->input[io->num_inputs++] = (gk_input){.name = name, .tensor = t, .strides = strides};
    GK_TRY(check_extent(name, t));
    GK_REQUIRE(io->depth == GK_SHAPES || t->data || gk_numel(t) == 0, "%s has no data", name);
    return GK_OK;
}

void gk_taken_is_written(gk_io *io) { io->input[io->num_inputs - 1].written = true; }

gk_status gk_check_float(gk_io *io, const char *name, const gk_tensor *t) {
    /* the types that kernels compute in, which are not all floating types of the table */
    const gk_dtype dtype = t->dtype;
    GK_REQUIRE(dtype == GK_F32 || dtype == GK_BF16 || dtype == GK_F16 || dtype == GK_F64,
               "%s must be float32, bfloat16, float16 or float64, got %s", name,
               io->dtype_name(dtype));
    return GK_OK;
}

const char *gk_bytes_hint(gk_dtype got) {
    return got == GK_U8
               ? "; bytes that are 8-bit floats must be viewed as such, x.view(torch.float8_e4m3fn)"
               : "";
}

static const char *hint_of(gk_dtype got, gk_dtype one, gk_dtype other) {
    if (got != GK_U8) return "";
    if (one == GK_E8M0 || other == GK_E8M0) return "; view the bytes, x.view(torch.float8_e8m0fnu)";
    return one == GK_E4M3 || other == GK_E4M3 || one == GK_E5M2 || other == GK_E5M2
               ? gk_bytes_hint(got)
               : "";
}

gk_status gk_check_dtype(gk_io *io, const char *name, const gk_tensor *t, gk_dtype expected) {
    GK_REQUIRE(t->dtype == expected, "%s must be %s, got %s%s", name, gk_dtype_name(expected),
               io->dtype_name(t->dtype), hint_of(t->dtype, expected, expected));
    return GK_OK;
}

gk_status gk_check_dtypes(gk_io *io, const char *name, const gk_tensor *t, gk_dtype one,
                          gk_dtype other) {
    if (one == other) return gk_check_dtype(io, name, t, one);
    GK_REQUIRE(t->dtype == one || t->dtype == other, "%s must be %s or %s, got %s%s", name,
               gk_dtype_name(one), gk_dtype_name(other), io->dtype_name(t->dtype),
               hint_of(t->dtype, one, other));
    return GK_OK;
}

gk_status gk_check_same_dtype(gk_io *io, const char *name, const gk_tensor *t,
                              const char *first_name, const gk_tensor *first) {
    GK_REQUIRE(t->dtype == first->dtype, "%s has dtype %s, %s has %s; they must match", name,
               io->dtype_name(t->dtype), first_name, io->dtype_name(first->dtype));
    return GK_OK;
}

gk_status gk_check_dims(const char *name, const gk_tensor *t, int ndim, const char *letters) {
    GK_REQUIRE(t->ndim == ndim, "%s must have %d %s %s, got %d", name, ndim, plural(ndim), letters,
               (int)t->ndim);
    return GK_OK;
}

gk_status gk_check_least_dims(const char *name, const gk_tensor *t, int least) {
    GK_REQUIRE(t->ndim >= least, "%s must have at least %d %s, got %d", name, least, plural(least),
               (int)t->ndim);
    return GK_OK;
}

gk_status gk_check_shape(const char *name, const gk_tensor *t, int ndim, const int64_t *expected) {
    bool same = t->ndim == ndim;
    for (int d = 0; same && d < ndim; ++d) same = t->shape[d] == expected[d];
    GK_REQUIRE(same, "%s must have shape %s, got %s", name, gk_text_of(ndim, expected).text,
               text_of(t).text);
    return GK_OK;
}

gk_status gk_check_length_of(const char *name, const gk_tensor *t, int64_t n) {
    return gk_check_shape(name, t, 1, &n);
}

gk_status gk_check_same(const char *name, const char *what, int64_t got, const char *other,
                        int64_t expected) {
    GK_REQUIRE(got == expected, "%s has %s %lld, %s has %lld; they must match", name, what,
               (long long)got, other, (long long)expected);
    return GK_OK;
}

gk_status gk_take_index(gk_io *io, const char *name, const gk_tensor *t, int64_t n) {
    if (!t) return GK_OK;
    GK_TRY(gk_take(io, name, t, GK_ANY_STRIDES));
    GK_TRY(gk_check_dtype(io, name, t, GK_I32));
    return gk_check_length_of(name, t, n);
}

bool gk_has_strides(const gk_tensor *t, gk_strides strides) {
    if (strides == GK_ANY_STRIDES || gk_numel(t) == 0) return true;
    int64_t dense = 1;
    for (int d = t->ndim - 1; d >= (strides == GK_CONTIGUOUS ? 0 : t->ndim - 1); --d) {
        if (t->shape[d] != 1 && t->stride[d] != dense) return false;
        dense *= t->shape[d];
    }
    return true;
}

static gk_status check_strides(const char *name, const gk_tensor *t, gk_strides strides) {
    if (gk_has_strides(t, strides)) return GK_OK;
    GK_REQUIRE(strides == GK_DENSE_LAST, "%s must be contiguous", name);
    return gk_fail(GK_ERR_ARGUMENT, "%s has stride %lld in its last dimension, expected 1", name,
                   (long long)t->stride[t->ndim - 1]);
}

gk_status gk_check_strides(gk_io *io) {
    for (int i = 0; i < io->num_inputs; ++i)
        GK_TRY(check_strides(io->input[i].name, io->input[i].tensor, io->input[i].strides));
    return GK_OK;
}

/* ---- values ---------------------------------------------------------------------------------- */
gk_status gk_check_representable(gk_io *io, const char *name, double x, const char *first_name,
                                 const gk_tensor *first) {
    GK_REQUIRE(!isnan(x), "%s must be a number, got nan", name);
    GK_REQUIRE(
        gk_holds(first->dtype, x),
        "%s must be 0 or a number that float32 holds (1.2e-38 to 3.4e38) where %s is %s, got %g",
        name, first_name, io->dtype_name(first->dtype), x);
    return GK_OK;
}

gk_status gk_check_not_negative(const char *name, int64_t x) {
    GK_REQUIRE(x >= 0, "%s must be 0 or more, got %lld", name, (long long)x);
    return GK_OK;
}

gk_status gk_check_product(const char *what, int64_t a, int64_t b, int64_t c) {
    const int64_t most = MAX_ELEMENTS / 16;
    GK_REQUIRE(a <= most / gk_max_i64(1, b) / gk_max_i64(1, c) && b <= most / gk_max_i64(1, c) &&
                   c <= most,
               "%s are %lld x %lld x %lld, expected at most 2^44", what, (long long)a, (long long)b,
               (long long)c);
    return GK_OK;
}

/* ---- results --------------------------------------------------------------------------------- */
gk_result *gk_give(gk_io *io, const char *name, const gk_tensor *given, gk_dtype dtype, int ndim,
                   const int64_t *shape, gk_strides strides) {
    gk_result *r = &io->result[io->num_results++];
    r->name = name;
    r->given = given;
    r->strides = strides;
    r->optional = r->in_place = false;
    r->as.data = NULL;
    r->as.dtype = dtype;
    r->as.ndim = ndim;
    int64_t dense = 1;
    for (int d = ndim - 1; d >= 0; --d) {
        r->as.shape[d] = shape[d];
        r->as.stride[d] = dense;
        dense = (int64_t)((uint64_t)dense *
                          /* an overflow here is refused where the tensor is made */
                          (uint64_t)gk_max_i64(1, shape[d]));
    }
    return r;
}

static bool same_elements(const gk_tensor *x, const gk_tensor *y) {
    bool same = x->data == y->data && x->dtype == y->dtype && x->ndim == y->ndim;
    for (int d = 0; same && d < x->ndim; ++d)
        same = x->shape[d] == y->shape[d] && (x->shape[d] == 1 || x->stride[d] == y->stride[d]);
    return same;
}

gk_status gk_check_given(gk_io *io, int i) {
    const gk_result *r = &io->result[i];
    const gk_tensor *t = r->given;
    GK_TRY(gk_check_dtype(io, r->name, t, r->as.dtype));
    GK_TRY(check_extent(r->name, t));
    GK_TRY(gk_check_shape(r->name, t, r->as.ndim, r->as.shape));
    GK_REQUIRE(t->data || gk_numel(t) == 0, "%s has no data", r->name);
    return check_strides(r->name, t, r->strides);
}

gk_status gk_check_apart(gk_io *io, int i) {
    const gk_result *r = &io->result[i];
    const gk_tensor *t = r->given;
    for (int n = 0; n < io->num_inputs; ++n) {
        const gk_tensor *in = io->input[n].tensor;
        if (!in->data || (r->in_place && same_elements(t, in))) continue;
        GK_REQUIRE(!gk_shares_memory(in, t), "%s shares memory with %s; it must not", r->name,
                   io->input[n].name);
    }
    return GK_OK;
}

/* ---- attention ------------------------------------------------------------------------------- */
static gk_status check_window(const char *name, int64_t window) {
    GK_REQUIRE(window >= -1, "%s must be -1 (unbounded), 0 or more, got %lld", name,
               (long long)window);
    return GK_OK;
}

gk_status gk_check_rules(gk_io *io, const gk_attn_rules *r, const gk_tensor *q, int64_t batch,
                         int64_t heads_q) {
    const gk_dtype stats = gk_stats_dtype(q->dtype);
    GK_REQUIRE(isfinite(r->scale), "scale must be finite, got %g", r->scale);
    GK_REQUIRE(fabs(r->scale) <= gk_scale_limit(q->dtype),
               "scale must be at most 1e38 in size where q is %s, got %g", gk_dtype_name(q->dtype),
               r->scale);
    GK_TRY(check_window("window_left", r->window_left));
    GK_TRY(check_window("window_right", r->window_right));
    GK_REQUIRE(isfinite(r->softcap) && r->softcap >= 0,
               "softcap must be 0 (off) or a positive finite number, got %g", r->softcap);
    GK_REQUIRE(gk_softcap_is_usable(r, q->dtype),
               "scale must be at most 1e%d times softcap in size where q is %s, got %g and %g",
               stats == GK_F64 ? 307 : 37, gk_dtype_name(q->dtype), r->scale, r->softcap);
    if (r->alibi_slopes) {
        const gk_tensor *t = r->alibi_slopes;
        const int64_t each[2] = {batch, heads_q};
        GK_TRY(gk_take(io, "alibi_slopes", t, GK_ANY_STRIDES));
        GK_TRY(gk_check_dtype(io, "alibi_slopes", t, stats));
        GK_REQUIRE((t->ndim == 1 && t->shape[0] == heads_q) ||
                       (t->ndim == 2 && t->shape[0] == batch && t->shape[1] == heads_q),
                   "alibi_slopes must have shape %s or %s, got %s", gk_text_of(1, each + 1).text,
                   gk_text_of(2, each).text, text_of(t).text);
    }
    if (r->sinks) {
        GK_TRY(gk_take(io, "sinks", r->sinks, GK_ANY_STRIDES));
        GK_TRY(gk_check_dtypes(io, "sinks", r->sinks, stats, q->dtype));
        GK_TRY(gk_check_length_of("sinks", r->sinks, heads_q));
    }
    return GK_OK;
}

gk_status gk_check_heads(int64_t heads_q, const char *name, int64_t heads_kv) {
    GK_REQUIRE(heads_kv > 0 ? heads_q % heads_kv == 0 : heads_q == 0,
               "%s has %lld heads, q has %lld; q's must be a multiple of %s's", name,
               (long long)heads_kv, (long long)heads_q, name);
    return GK_OK;
}

static bool head_dim_fits(gk_device device, int64_t d, int64_t most) {
    return device == GK_CUDA ? d >= 8 && d <= most && d % 8 == 0 : d >= 1 && d <= most;
}

static gk_status refuse_head_dim(const char *name, gk_device device, int64_t d, int64_t most) {
    return gk_fail(GK_ERR_UNSUPPORTED, "%s has head_dim %lld; %s %lld", name, (long long)d,
                   device == GK_CUDA ? "supported on CUDA are multiples of 8 from 8 to"
                                     : "it must be 1 to",
                   (long long)most);
}

enum {
    MOST_HEAD_DIM = GK_CACHE_HEAD_DIM, /* of flash_attn: a latent row fits, as in paged_attn */
    MOST_CODES_DIM = 256               /* of flash_attn on CUDA if q, k and v are e4m3 codes */
};

bool gk_serves_head_dim(gk_device device, int64_t d) {
    return head_dim_fits(device, d, MOST_HEAD_DIM);
}

gk_status gk_check_head_dim(const char *name, gk_device device, const gk_tensor *t, int64_t d) {
    if (device == GK_CUDA && gk_is_code(t->dtype) && !head_dim_fits(device, d, MOST_CODES_DIM) &&
        gk_serves_head_dim(device, d))
        return gk_fail(GK_ERR_UNSUPPORTED,
                       "%s has head_dim %lld; supported on CUDA for float8_e4m3fn are multiples of "
                       "8 from 8 to %d; pass bfloat16 or float16",
                       name, (long long)d, MOST_CODES_DIM);
    return gk_serves_head_dim(device, d) ? GK_OK : refuse_head_dim(name, device, d, MOST_HEAD_DIM);
}

gk_status gk_check_cache_head_dim(const char *name, gk_device device, int64_t d) {
    if (head_dim_fits(device, d, GK_CACHE_HEAD_DIM)) return GK_OK;
    return refuse_head_dim(name, device, d, GK_CACHE_HEAD_DIM);
}

/* CUDA kernels count tokens in 32 bits. The limit leaves one bit for sums of two counts. */
gk_status gk_check_tokens(const char *name, const gk_context *ctx, int64_t n) {
    if (ctx->device == GK_CUDA && n > INT64_C(1) << 30)
        return gk_fail(GK_ERR_UNSUPPORTED, "%s has %lld tokens; supported on CUDA are up to 2^30",
                       name, (long long)n);
    return GK_OK;
}
