/* SPDX-License-Identifier: BSD-3-Clause */
/* internal.h: what the files of csrc share and users do not see: failure texts, loads and stores
 * of one element, the keys that a row of attention sees, and the worker loop. */
#ifndef GPUKERN_INTERNAL_H
#define GPUKERN_INTERNAL_H

#include "../formats/codes.h"
#include "gpukern_quant.h"
#include "types.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* status.c: records the detail text of this thread and returns `code`. */
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
gk_status gk_fail(gk_status code, const char *format, ...);

/* The default case of a switch over a dtype: fails with the type's name. A type that is in the
 * table but not in the switch must not be read as another type. */
gk_status gk_no_case(const char *what, gk_dtype dtype);
/* The same where no status can be returned. The checks refuse such a call earlier, so reaching
 * this is a bug of the library, and it aborts. */
#if defined(__GNUC__)
__attribute__((noreturn, cold))
#endif
void gk_stop_without_case(const char *what, gk_dtype dtype);

static inline int64_t gk_min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t gk_max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t gk_clamp_i64(int64_t x, int64_t lo, int64_t hi) {
    return gk_max_i64(lo, gk_min_i64(x, hi));
}
static inline int64_t gk_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t gk_round_up(int64_t a, int64_t b) { return gk_ceil_div(a, b) * b; }

/* base + bytes, or NULL if base is NULL (a workspace that is only sized, the data of an empty
 * tensor). */
static inline void *gk_at(const void *base, int64_t bytes) {
    return base ? (char *)base + bytes : NULL;
}

static inline int64_t gk_numel(const gk_tensor *t) {
    int64_t n = 1;
    for (int d = 0; d < t->ndim; ++d) n *= t->shape[d];
    return n;
}

/* The stride of t along dimension d of ndim. As in torch, dimensions are aligned at the last one;
 * missing ones and those of size 1 broadcast, so their stride is 0. */
static inline int64_t gk_broadcast_stride(const gk_tensor *t, int ndim, int d) {
    const int i = d - (ndim - t->ndim);
    return i < 0 || t->shape[i] == 1 ? 0 : t->stride[i];
}

/* The offset of element i of t's first `dims` dimensions, which are numbered in row-major order. */
static inline int64_t gk_offset_of(const gk_tensor *t, int dims, int64_t i) {
    int64_t offset = 0;
    if (dims == 1) return i * t->stride[0];
    for (int d = dims - 1; d >= 0; --d) {
        offset += i % t->shape[d] * t->stride[d];
        i /= t->shape[d];
    }
    return offset;
}

/* ---- loads and stores of one element, for every dtype ---------------------------------------- */
static inline float gk_bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint16_t gk_f32_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f != f) return (uint16_t)((u >> 16) | 0x40);          /* keep a NaN a NaN */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16); /* to nearest even */
}

static inline float gk_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, bits = h & 0x7fff, u;
    float f;
    if (bits >= 0x7c00) { /* inf, NaN */
        u = sign | 0x7f800000u | ((bits & 0x3ff) << 13);
        memcpy(&f, &u, 4);
        return f;
    }
    if (bits < 0x400) { /* subnormal: bits * 2^-24 is exact */
        f = (float)bits * 0x1p-24f;
        return sign ? -f : f;
    }
    u = sign | ((bits << 13) + 0x38000000u);
    memcpy(&f, &u, 4);
    return f;
}

static inline uint16_t gk_f32_to_f16(float f) {
    uint32_t u, sign;
    memcpy(&u, &f, 4);
    sign = (u >> 16) & 0x8000;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00);  /* NaN */
    if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00); /* rounds past 65504 */
    /* subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits */
    if (u < 0x38800000u) {
        float g;
        memcpy(&g, &u, 4);
        g += 0.5f;
        memcpy(&u, &g, 4);
        return (uint16_t)(sign | (u - 0x3f000000u));
    }
    return (uint16_t)(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1)) >> 13));
}

static inline double gk_load(const void *p, gk_dtype dtype, int64_t i) {
    switch (dtype) {
    case GK_F32: return ((const float *)p)[i];
    case GK_BF16: return gk_bf16_to_f32(((const uint16_t *)p)[i]);
    case GK_F16: return gk_f16_to_f32(((const uint16_t *)p)[i]);
    case GK_F64: return ((const double *)p)[i];
    case GK_I32: return ((const int32_t *)p)[i];
    case GK_I64: return (double)((const int64_t *)p)[i];
    case GK_E4M3: return gk_e4m3_to_f32(((const uint8_t *)p)[i]);
    case GK_E5M2: return gk_e5m2_to_f32(((const uint8_t *)p)[i]);
    case GK_I8: return ((const int8_t *)p)[i];
    case GK_U8: return ((const uint8_t *)p)[i];
    case GK_E8M0: return gk_e8m0_to_f32(((const uint8_t *)p)[i]);
    default: gk_stop_without_case("gk_load", dtype);
    }
}

static inline void gk_store(void *p, gk_dtype dtype, int64_t i, double x) {
    switch (dtype) {
    case GK_F32: ((float *)p)[i] = (float)x; break;
    case GK_BF16: ((uint16_t *)p)[i] = gk_f32_to_bf16((float)x); break;
    case GK_F16: ((uint16_t *)p)[i] = gk_f32_to_f16((float)x); break;
    case GK_F64: ((double *)p)[i] = x; break;
    case GK_I32: ((int32_t *)p)[i] = (int32_t)x; break;
    case GK_I64: ((int64_t *)p)[i] = (int64_t)x; break;
    case GK_E4M3: ((uint8_t *)p)[i] = gk_f32_to_e4m3(gk_f64_to_odd_f32(x)); break;
    case GK_E5M2: ((uint8_t *)p)[i] = gk_f32_to_e5m2(gk_f64_to_odd_f32(x)); break;
    case GK_I8: ((int8_t *)p)[i] = gk_f32_to_i8(gk_f64_to_odd_f32(x)); break;
    case GK_U8:
        ((uint8_t *)p)[i] = (uint8_t)rintf(fminf(fmaxf(gk_f64_to_odd_f32(x), 0), 255));
        break;
    case GK_E8M0: ((uint8_t *)p)[i] = gk_f32_to_e8m0(gk_f64_to_odd_f32(x)); break;
    default: gk_stop_without_case("gk_store", dtype);
    }
}

/* ---- numbers of a call, in the precision that its dtype is computed in ----------------------- */
/* True if alpha or beta keeps its value in float32, which has no full-precision numbers between
 * 0 and FLT_MIN and none above FLT_MAX. */
static inline bool gk_holds(gk_dtype dtype, double x) {
    const double size = fabs(x);
    return dtype == GK_F64 || !isfinite(x) || size == 0 ||
           (size >= 1.17549436e-38 && size <= 3.40282346e38);
}

/* The largest scale whose product with log2(e) is finite. */
static inline double gk_scale_limit(gk_dtype dtype) { return dtype == GK_F64 ? INFINITY : 1e38; }

/* The softcap that a kernel computes with. scale / softcap and softcap log2(e) must both be
 * numbers of full precision. A softcap that no score comes near becomes 0 (off). A very small
 * softcap is raised to the smallest usable one: scores below either are 0 to the precision in
 * which they are added. */
static inline double gk_usable_softcap(const gk_attn_rules *r, gk_dtype dtype) {
    const bool wide = dtype == GK_F64;
    const double far = wide ? 1e290 : 1e30, scale = fabs(r->scale);
    if (r->softcap == 0 || r->softcap > (wide ? 1e307 : 1e37) || r->softcap > far * scale) return 0;
    return fmax(r->softcap, fmax(1 / far, scale * (wide ? 1e-307 : 1e-37)));
}

/* With a scale above 1e27 the smallest usable softcap would change scores, so a softcap below it
 * is refused. */
static inline bool gk_softcap_is_usable(const gk_attn_rules *r, gk_dtype dtype) {
    return r->softcap == 0 || fabs(r->scale) <= (dtype == GK_F64 ? 1e290 : 1e27) ||
           gk_usable_softcap(r, dtype) <= r->softcap;
}

/* ---- which keys a row sees (the C counterpart of cuda/attn/span.cuh) ------------------------- */
/* One sequence of one call. Rows i in [0, seq_q) and keys j in [0, seq_k) count from the
 * sequence's start. */
typedef struct gk_span {
    int64_t key_lo, key_hi; /* bounds that hold for every row: [0, seq_k) cut by kv_start, kv_end */
    int64_t diagonal;       /* row i stands at key position i + diagonal */
    int64_t left, right;    /* keys seen left and right of that position; GK_UNBOUNDED = all */
} gk_span;

#define GK_UNBOUNDED (INT64_C(1) << 62)

/* Both operands are within +-2^62, so the sum does not overflow; the result is clamped to that
 * range. */
static inline int64_t gk_sat_add(int64_t a, int64_t b) {
    return gk_clamp_i64(a + b, -GK_UNBOUNDED, GK_UNBOUNDED);
}

static inline gk_span gk_span_make(const gk_attn_rules *r, int64_t seq_k, int64_t diagonal) {
    gk_span s = {0, seq_k, gk_clamp_i64(diagonal, -GK_UNBOUNDED / 2, GK_UNBOUNDED / 2),
                 r->window_left < 0 ? GK_UNBOUNDED : gk_min_i64(r->window_left, GK_UNBOUNDED / 4),
                 r->window_right < 0 ? GK_UNBOUNDED
                                     : gk_min_i64(r->window_right, GK_UNBOUNDED / 4)};
    if (r->is_causal) s.right = gk_min_i64(s.right, 0);
    return s;
}

static inline int32_t gk_i32_at(const gk_tensor *t, int64_t i) {
    return ((const int32_t *)t->data)[i * t->stride[0]];
}

/* kv_start and kv_end of sequence b; the span is then [key_lo, key_hi) with key_lo <= key_hi. */
static inline void gk_span_cut(gk_span *s, const gk_attn_rules *r, int64_t b) {
    const int64_t seq_k = s->key_hi;
    if (r->kv_start) s->key_lo = gk_clamp_i64(gk_i32_at(r->kv_start, b), 0, seq_k);
    if (r->kv_end) s->key_hi = gk_clamp_i64(gk_i32_at(r->kv_end, b), 0, seq_k);
    s->key_hi = gk_max_i64(s->key_lo, s->key_hi);
}

/* Sequence b of a paged call. Its queries end at its last key. kv_start applies, kv_end does
 * not. */
static inline gk_span gk_span_paged(const gk_paged_attn_args *args, int64_t b, int64_t seq_q,
                                    int64_t seq_k) {
    gk_attn_rules r = args->rules;
    if (!(args->flags & GK_PAGED_WINDOW_RIGHT)) r.window_right = -1;
    r.kv_end = NULL;
    gk_span s = gk_span_make(&r, seq_k, seq_k - seq_q);
    gk_span_cut(&s, &r, b);
    return s;
}

/* A head's sink, -inf where there is none. */
static inline double gk_sink_of(const gk_attn_rules *r, int64_t h) {
    return r->sinks ? gk_load(r->sinks->data, r->sinks->dtype, h * r->sinks->stride[0]) : -INFINITY;
}

/* Row i sees keys [lo, hi); hi <= lo means none. Both ends grow with i. */
static inline int64_t gk_span_lo(const gk_span *s, int64_t i) {
    if (s->left == GK_UNBOUNDED) return s->key_lo;
    return gk_clamp_i64(gk_sat_add(i + s->diagonal, -s->left), s->key_lo, s->key_hi);
}

static inline int64_t gk_span_hi(const gk_span *s, int64_t i) {
    if (s->right == GK_UNBOUNDED) return s->key_hi;
    return gk_clamp_i64(gk_sat_add(i + s->diagonal, s->right) + 1, s->key_lo, s->key_hi);
}

/* ---- rows ------------------------------------------------------------------------------------ */
/* gate (which 0) or up (which 1) of a gated linear unit: a tensor of its own if `other` is
 * given, else a half of `both`. */
static inline gk_tensor gk_glu_half(const gk_tensor *both, const gk_tensor *other, int which) {
    if (other) return which ? *other : *both;
    gk_tensor half = *both;
    half.shape[half.ndim - 1] /= 2;
    if (which)
        half.data =
            gk_at(half.data, half.shape[half.ndim - 1] * (gk_type_of(half.dtype)->bits / 8));
    return half;
}

/* Heads as [B, H, S, D]. Packed heads [T, H, D] become one sequence. */
static inline gk_tensor gk_heads_of(const gk_tensor *t) {
    if (t->ndim == 4) return *t;
    gk_tensor x = *t;
    x.ndim = 4;
    x.shape[0] = 1;
    x.stride[0] = 0;
    x.shape[1] = t->shape[1];
    x.stride[1] = t->stride[1];
    x.shape[2] = t->shape[0];
    x.stride[2] = t->stride[0];
    x.shape[3] = t->shape[2];
    x.stride[3] = t->stride[2];
    return x;
}

/* ---- parallel work --------------------------------------------------------------------------- */
/* A worker is one thread's share of a call; it owns slice `worker` of the workspace. */
typedef void (*gk_work_fn)(void *arg, int64_t task, int64_t worker);

/* parallel.c: at most gk_num_workers workers take the tasks [0, num_tasks) one by one and call
 * fn for each. */
int64_t gk_num_workers(const gk_context *ctx, int64_t num_tasks);

/* num_threads as the kernels use it: at least 1, and small enough that its product with a
 * workspace does not overflow. */
#define GK_MAX_THREADS 4096
static inline int64_t gk_num_threads(const gk_context *ctx) {
    return gk_clamp_i64(ctx->num_threads, 1, GK_MAX_THREADS);
}
void gk_parallel(const gk_context *ctx, int64_t num_tasks, gk_work_fn fn, void *arg);

#ifdef __cplusplus
}
#endif
#endif
