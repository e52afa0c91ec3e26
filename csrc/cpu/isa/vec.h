/* SPDX-License-Identifier: BSD-3-Clause */
/* vec.h: the vector types and operations of one instruction set. Files in csrc/cpu/isa/ include
 * it and are compiled once per ISA with -DGK_ISA=<name>. Only this file,
 * vec_int8.h and features.c ask for an ISA; kernels use W, MR, NV, PAIR and the operations below.
 *
 *  vf    W floats      vi   W int32      vm   a mask of W lanes
 *  cell  one 32-bit operand of a multiplication: a float, or (avx512bf16) a pair of bfloat16
 *        that are neighbours along k. PAIR is the number of values of k in a cell.
 *  vc    W cells. vc_dot adds the PAIR products of each lane to a vf. */
#ifndef GPUKERN_VEC_H
#define GPUKERN_VEC_H

#include "../../core/internal.h"

#ifndef GK_ISA
#error "compile once per instruction set with -DGK_ISA=base|avx2|avx512|avx512bf16|amx|amx_emulated"
#endif
#define GK_CAT_(a, b) a##_##b
#define GK_CAT(a, b) GK_CAT_(a, b)
#define SYM(name) GK_CAT(name, GK_ISA) /* gk_x -> gk_x_avx2; the full list is in tables.c */

#if defined(GK_SANITIZED) /* functions put into one another take clang's sanitizers ten times as \
                             long to compile */
#define INLINE static inline __attribute__((unused))
#else
#define INLINE static inline __attribute__((always_inline, unused))
#endif

/* The compiler flags must match GK_ISA exactly. With fewer features the file does not compile.
 * With more, the compiler would put instructions into a set that also runs on machines without
 * them. */
#define GK_LEVEL_base 1
#define GK_LEVEL_avx2 2
#define GK_LEVEL_avx512 3
#define GK_LEVEL_avx512bf16 4
#define GK_LEVEL_amx 5 /* the vectors of avx512bf16 */
#define GK_LEVEL_amx_emulated 5
#define ISA_LEVEL GK_CAT(GK_LEVEL, GK_ISA)
#if ISA_LEVEL < 1
#error "GK_ISA is none of base, avx2, avx512, avx512bf16, amx, amx_emulated"
#elif ISA_LEVEL >= 2 && !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#error "compile this instruction set with -mavx2 -mfma -mf16c"
#elif ISA_LEVEL >= 3 && !(defined(__AVX512F__) && defined(__AVX512BW__) && \
                          defined(__AVX512DQ__) && defined(__AVX512VL__))
#error "compile this instruction set with -mavx512f -mavx512bw -mavx512dq -mavx512vl"
#elif ISA_LEVEL >= 4 && !(defined(__AVX512BF16__) && defined(__AVX512VNNI__))
#error "compile this instruction set with -mavx512bf16 -mavx512vnni"
#elif ISA_LEVEL < 2 && defined(__AVX__)
#error \
    "the base set is compiled without AVX: put -march=x86-64 last, and leave -mavx and what implies it out of CFLAGS"
#elif ISA_LEVEL < 3 && defined(__AVX512F__)
#error \
    "the avx2 set is compiled without AVX-512: put -march=x86-64 last, and leave -mavx512 out of CFLAGS"
#elif ISA_LEVEL < 4 && defined(__AVX512BF16__)
#error \
    "the avx512 set is compiled without AVX-512 BF16: put -march=x86-64 last, and leave it out of CFLAGS"
#endif
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error \
    "compile without -Ofast, -ffast-math and -ffinite-math-only: NaN, inf and subnormals keep their meaning"
#endif

#if ISA_LEVEL >= 3
#include <immintrin.h>
#define W 16
#define MR          \
    (ISA_LEVEL >= 5 \
         ? 32       \
         : 14) /* two tiles | 28 accumulators: 12, 13, 14 rows all reach 99 % of the peak */
#elif ISA_LEVEL >= 2
#include <immintrin.h>
#define W 8
#define MR 6 /* 12 accumulators of 16 registers */
#else
#define W 4
#define MR 6 /* the same with vectors of any machine */
#endif
#define NV 2        /* vectors in a row of the register tile */
#define NR (NV * W) /* its columns */
#define TILED     \
    (ISA_LEVEL >= \
     5) /* products run on AMX tiles, which take K_CELLS cells of k at a time and A by rows */
#define K_CELLS (TILED ? 16 : 1)

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef float vf_mem __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t vu_mem __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef uint32_t vu_bytes_mem __attribute__((vector_size(4 * W), aligned(1), may_alias));

/* ---- float ---------------------------------------------------------------------------------- */
INLINE vf vf_set1(float x) { return x - (vf){0}; }
INLINE vf vf_load(const float *p) { return *(const vf_mem *)p; }
INLINE void vf_store(float *p, vf v) { *(vf_mem *)p = v; }
INLINE vi vi_set1(int32_t x) { return x - (vi){0}; }
INLINE vi vi_load(const int32_t *p) { return (vi) * (const vu_mem *)p; }
INLINE vi vi_load_bytes(const uint8_t *p) {
    return (vi) * (const vu_bytes_mem *)p;
} /* at any address */

#if ISA_LEVEL >= 3
typedef __mmask16 vm;
INLINE vm vm_first(int64_t n) { return (vm)(n >= W ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* max and min return b if either operand is NaN, so the running value is a and new data is b */
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vm vf_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vm vi_lt(vi a, vi b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
INLINE vm vm_and(vm a, vm b) { return a & b; }
INLINE bool vm_any(vm m) { return m != 0; }
INLINE vf vf_select(vm m, vf yes, vf no) { return _mm512_mask_blend_ps(m, no, yes); }
INLINE vf vf_load_first(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(vm_first(n), p); }
INLINE void vf_store_first(float *p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, vm_first(n), v); }
INLINE vf vf_round(vf x) {
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
typedef vi vm;
INLINE vm vm_first(int64_t n) {
    vi m;
    for (int i = 0; i < W; ++i) m[i] = i < n ? -1 : 0;
    return m;
}
#if ISA_LEVEL >= 2
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf vf_select(vm m, vf yes, vf no) { return _mm256_blendv_ps(no, yes, (vf)m); }
INLINE vf vf_round(vf x) {
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE bool vm_any(vm m) { return _mm256_movemask_ps((vf)m) != 0; }
#else
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf vf_select(vm m, vf yes, vf no) { return (vf)(((vi)yes & m) | ((vi)no & ~m)); }
INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); }
INLINE vf vf_min(vf a, vf b) { return vf_select(a < b, a, b); }
INLINE bool vm_any(vm m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
/* adding 1.5 * 2^23 rounds to an integer if |x| < 2^22; larger values are returned unchanged */
INLINE vf vf_round(vf x) {
    const float magic = 0x1.8p23f;
    vf t = x + magic, r = t - magic;
    return vf_select((x < 0x1p22f) & (x > -0x1p22f), r, x);
}
#endif
INLINE vm vf_lt(vf a, vf b) { return a < b; }
INLINE vm vi_lt(vi a, vi b) { return a < b; }
INLINE vm vm_and(vm a, vm b) { return a & b; }
INLINE vf vf_load_first(const float *p, int64_t n) {
    if (n >= W) return vf_load(p);
    float t[W] = {0};
    if (n > 0) memcpy(t, p, 4 * (size_t)n);
    return vf_load(t);
}
INLINE void vf_store_first(float *p, vf v, int64_t n) {
    if (n >= W) {
        vf_store(p, v);
        return;
    }
    float t[W];
    vf_store(t, v);
    if (n > 0) memcpy(p, t, 4 * (size_t)n);
}
#endif

/* ---- functions -------------------------------------------------------------------------------
 * Minimax polynomials found by a weighted Remez exchange. The stated bound is that of the
 * polynomial plus float32 rounding. */

/* 2^x for x <= 127. Relative error below 1.3e-7, or 4e-6 with poly4 (for results that are
 * rounded to bfloat16). 2^-inf = 0, NaN stays NaN, results below 2^-125 may be flushed to 0. If
 * `low` is given, it is the rounding error of x and the result is 2^(x + low). */
INLINE vf vf_exp2_sum(vf x, const vf *low, bool poly4) {
#if ISA_LEVEL >= 3
    vf f = _mm512_reduce_ps(x, (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)), p;
#else
    vf clamped = vf_max(vf_set1(-126.0f), x), n = vf_round(clamped), f, p;
    n = n - vf_select(vf_lt(clamped, n), vf_set1(1.0f), vf_set1(0.0f)); /* floor */
    f = clamped - n;
#endif
    if (low) f += *low;
    if (poly4) {
        p = vf_fma(vf_set1(0.01353416784837063f), f, vf_set1(0.05201146077575801f));
        p = vf_fma(p, f, vf_set1(0.24144275679619323f));
        p = vf_fma(p, f, vf_set1(0.6930038344841342f));
        p = vf_fma(p, f, vf_set1(1.0000025933651813f));
    } else {
        p = vf_fma(vf_set1(0.00021702255684156885f), f, vf_set1(0.0012439687700471446f));
        p = vf_fma(p, f, vf_set1(0.00967884101830565f));
        p = vf_fma(p, f, vf_set1(0.05548334196828718f));
        p = vf_fma(p, f, vf_set1(0.24022983627902042f));
        p = vf_fma(p, f, vf_set1(0.6931469838401201f));
        p = vf_fma(p, f, vf_set1(1.0000000018557926f));
    }
#if ISA_LEVEL >= 3
    return _mm512_scalef_ps(p, x); /* p * 2^floor(x) */
#else
    vi e;
#if ISA_LEVEL >= 2
    e = (vi)_mm256_cvtps_epi32(n);
#else
    e = (vi)(n + 0x1.8p23f) - 0x4b400000;
#endif
    p = (vf)((vi)p + (e << 23));
    p = vf_select(vf_lt(x, vf_set1(-125.0f)), vf_set1(0.0f), p);
    return vf_select(x == x, p, x);
#endif
}
INLINE vf vf_exp2_poly(vf x, bool poly4) { return vf_exp2_sum(x, NULL, poly4); }
INLINE vf vf_exp2(vf x) { return vf_exp2_poly(x, false); }

#define GK_LOG2E 1.4426950408889634f
#define GK_LOG2E_LOW 1.92596299e-8f /* log2(e) - GK_LOG2E */
/* e^x for x <= 88: relative error below 2e-7 + 1.2e-7 |x| */
INLINE vf vf_exp(vf x) { return vf_exp2(x * GK_LOG2E); }
/* e^x for x <= 88: relative error below 1.4e-7 */
INLINE vf vf_exp_near(vf x) {
    /* clamps x; the result there is 0. NaN stays NaN. */
    const vf within = vf_max(vf_set1(-200.0f), x), log2 = within * GK_LOG2E;
    const vf low = vf_fma(within, vf_set1(GK_LOG2E_LOW), vf_fma(within, vf_set1(GK_LOG2E), -log2));
    return vf_exp2_sum(log2, &low, false);
}

/* ---- 16-bit floats --------------------------------------------------------------------------- */
#if ISA_LEVEL >= 3
INLINE vf vf_from_bf16(__m256i h) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16); }
INLINE __m256i vf_to_bf16(vf v) {
#if ISA_LEVEL >= 4
    return (__m256i)_mm512_cvtneps_pbh(v);
#else
    __m512i u = (__m512i)v, odd = _mm512_and_epi32(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q),
                              _mm512_or_epi32(u, _mm512_set1_epi32(0x400000)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
}
INLINE vf vf_load_bf16(const uint16_t *p) {
    return vf_from_bf16(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vf vf_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE vf vf_load_bf16_first(const uint16_t *p, int64_t n) {
    return vf_from_bf16(_mm256_maskz_loadu_epi16(vm_first(n), p));
}
INLINE vf vf_load_f16_first(const uint16_t *p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vm_first(n), p));
}
INLINE void vf_store_bf16_first(uint16_t *p, vf v, int64_t n) {
    _mm256_mask_storeu_epi16(p, vm_first(n), vf_to_bf16(v));
}
INLINE void vf_store_f16_first(uint16_t *p, vf v, int64_t n) {
    _mm256_mask_storeu_epi16(p, vm_first(n),
                             _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif ISA_LEVEL >= 2
INLINE vf vf_load_bf16(const uint16_t *p) {
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
INLINE vf vf_load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
#else
INLINE vf vf_load_bf16(const uint16_t *p) {
    vi u;
    for (int i = 0; i < W; ++i) u[i] = (int32_t)((uint32_t)p[i] << 16);
    return (vf)u;
}
/* reinterpreting exponent and mantissa of a half as a float gives 2^-112 times its value; inf
 * and NaN are handled apart */
INLINE vf vf_load_f16(const uint16_t *p) {
    vi u, sign, mag;
    for (int i = 0; i < W; ++i) u[i] = p[i];
    sign = (u & 0x8000) << 16;
    mag = u & 0x7fff;
    vf f = (vf)(mag << 13) * 0x1p112f;
    vi special = (vi)((mag << 13) | 0x7f800000);
    return (vf)((vi)vf_select(mag >= 0x7c00, (vf)special, f) | sign);
}
#endif

#if ISA_LEVEL < 3
INLINE vf vf_load_bf16_first(const uint16_t *p, int64_t n) {
    uint16_t t[W] = {0};
    if (n >= W) return vf_load_bf16(p);
    if (n > 0) memcpy(t, p, 2 * (size_t)n);
    return vf_load_bf16(t);
}
INLINE vf vf_load_f16_first(const uint16_t *p, int64_t n) {
    uint16_t t[W] = {0};
    if (n >= W) return vf_load_f16(p);
    if (n > 0) memcpy(t, p, 2 * (size_t)n);
    return vf_load_f16(t);
}
INLINE void vf_store_bf16_first(uint16_t *p, vf v, int64_t n) {
    vi u = (vi)v, r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    r = (vi)vf_select(v == v, (vf)r, (vf)((u >> 16) | 0x40));
    for (int i = 0; i < W && i < n; ++i) p[i] = (uint16_t)r[i];
}
INLINE void vf_store_f16_first(uint16_t *p, vf v, int64_t n) {
#if ISA_LEVEL >= 2
    uint16_t t[W];
    _mm_storeu_si128((__m128i *)t,
                     _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    memcpy(p, t, 2 * (size_t)gk_clamp_i64(n, 0, W));
#else
    for (int i = 0; i < W && i < n; ++i) p[i] = gk_f32_to_f16(v[i]);
#endif
}
#endif

/* ---- memory of a dtype that the caller names -------------------------------------------------- */
/* n values of a floating dtype (float32, bfloat16, float16) at p[i], the other lanes 0. */
INLINE vf vf_load_dtype(const void *p, gk_dtype dtype, int64_t i, int64_t n) {
    switch (dtype) {
    case GK_BF16:
        return n >= W ? vf_load_bf16((const uint16_t *)p + i)
                      : vf_load_bf16_first((const uint16_t *)p + i, n);
    case GK_F16:
        return n >= W ? vf_load_f16((const uint16_t *)p + i)
                      : vf_load_f16_first((const uint16_t *)p + i, n);
    case GK_F32:
        return n >= W ? vf_load((const float *)p + i) : vf_load_first((const float *)p + i, n);
    default: gk_stop_without_case("vf_load_dtype", dtype);
    }
}
INLINE void vf_store_dtype(void *p, gk_dtype dtype, int64_t i, vf v, int64_t n) {
    switch (dtype) {
    case GK_BF16: vf_store_bf16_first((uint16_t *)p + i, v, n); break;
    case GK_F16: vf_store_f16_first((uint16_t *)p + i, v, n); break;
    case GK_F32: n >= W ? vf_store((float *)p + i, v) : vf_store_first((float *)p + i, v, n); break;
    default: gk_stop_without_case("vf_store_dtype", dtype);
    }
}

/* 2 W whole values at p[i] in the order that costs least: "split", of bfloat16 first the ones of
 * even index, then the odd ones, a shift and a mask of what is loaded; of other dtypes as they
 * stand. Cells of pairs are never split. */
typedef uint32_t vu_pairs __attribute__((vector_size(4 * W), aligned(2), may_alias));
INLINE void vf_load2_split(const void *p, gk_dtype dtype, int64_t i, vf to[2]) {
    if (dtype == GK_BF16) {
        const vu_pairs u = *(const vu_pairs *)((const uint16_t *)p + i);
        to[0] = (vf)(u << 16);
        to[1] = (vf)(u & 0xffff0000);
    } else {
        to[0] = vf_load_dtype(p, dtype, i, W);
        to[1] = vf_load_dtype(p, dtype, i + W, W);
    }
}
/* Of 2 W whole bfloat16 those of even index (half 0) or the odd ones (1), as floats. */
INLINE vf vf_load_half(const void *p, int half) {
    const vu_pairs u = *(const vu_pairs *)p;
    return half ? (vf)(u & 0xffff0000) : (vf)(u << 16);
}
/* the way back */
INLINE void vf_unsplit(vf x[2], gk_dtype dtype) {
    if (dtype != GK_BF16) return;
    float t[2][W], u[2 * W];
    vf_store(t[0], x[0]);
    vf_store(t[1], x[1]);
    for (int i = 0; i < 2 * W; ++i) u[i] = t[i % 2][i / 2];
    x[0] = vf_load(u);
    x[1] = vf_load(u + W);
}

/* ---- cells ----------------------------------------------------------------------------------- */
#if ISA_LEVEL >= 4
#define PAIR 2
typedef uint32_t cell;
typedef __m512i vc;
INLINE vf vc_dot(vf acc, vc a, vc b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
INLINE vc vc_set1(cell x) { return _mm512_set1_epi32((int)x); }
INLINE vc vc_load(const cell *p) { return _mm512_loadu_si512(p); }
INLINE void vc_store(cell *p, vc v) { _mm512_storeu_si512(p, v); }
INLINE void vc_store_first(cell *p, vc v, int64_t n) {
    _mm512_mask_storeu_epi32(p, vm_first(n), v);
}
/* n values along k from p[i] on, two to a cell; values beyond n are 0 */
INLINE vc vc_load_along_k(const void *p, gk_dtype dtype, int64_t i, int64_t n) {
    (void)dtype;
    if (n >= 2 * W) return _mm512_loadu_si512((const uint16_t *)p + i);
    return _mm512_maskz_loadu_epi16(n <= 0 ? 0u : (1u << n) - 1, (const uint16_t *)p + i);
}
/* lane l of the result is the pair row0[l] (low half), row1[l] */
INLINE vc vc_zip_bf16(__m256i row0, __m256i row1) {
    return _mm512_or_epi32(_mm512_cvtepu16_epi32(row0),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(row1), 16));
}
/* pairs lanes 0 .. 2 W - 1 of rows k and k + 1; all lanes exist */
INLINE void vc_zip_two(const uint16_t *row0, const uint16_t *row1, vc out[2]) {
    /* unpack pairs 4 + 4 neighbours within each 128-bit lane; the permutation first moves them
     * to their lane */
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    __m512i r0 = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(row0));
    __m512i r1 = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(row1));
    out[0] = _mm512_unpacklo_epi16(r0, r1);
    out[1] = _mm512_unpackhi_epi16(r0, r1);
}
/* n lanes of row k and, if row1 is given, of row k + 1 */
INLINE vc vc_load_across_k(const void *row0, const void *row1, gk_dtype dtype, int64_t i,
                           int64_t n) {
    (void)dtype;
    __m256i r0 = _mm256_maskz_loadu_epi16(vm_first(n), (const uint16_t *)row0 + i),
            r1 = _mm256_setzero_si256();
    if (row1) r1 = _mm256_maskz_loadu_epi16(vm_first(n), (const uint16_t *)row1 + i);
    return vc_zip_bf16(r0, r1);
}
/* 2 W lanes of rows k and k + 1 as two vectors; all lanes exist */
INLINE void vc_load2_across_k(const void *row0, const void *row1, gk_dtype dtype, int64_t i,
                              vc to[2]) {
    (void)dtype;
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40,
                                         8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    const __m512i r0 = _mm512_loadu_si512((const uint16_t *)row0 + i);
    const __m512i r1 =
        row1 ? _mm512_loadu_si512((const uint16_t *)row1 + i) : _mm512_setzero_si512();
    to[0] = _mm512_permutex2var_epi16(r0, low, r1);
    to[1] = _mm512_permutex2var_epi16(r0, high, r1);
}
/* as vf_load2_split: 2 W cells along k, or 2 W lanes across k; pairs keep their order */
INLINE void vc_load2_split_along_k(const void *p, gk_dtype dtype, int64_t i, vc to[2]) {
    to[0] = vc_load_along_k(p, dtype, i, 2 * W);
    to[1] = vc_load_along_k(p, dtype, i + 2 * W, 2 * W);
}
INLINE void vc_load2_split_across_k(const void *row0, const void *row1, gk_dtype dtype, int64_t i,
                                    vc to[2]) {
    vc_load2_across_k(row0, row1, dtype, i, to);
}
#define VC_SPLITS false /* true if the split loads change the order of bfloat16 values */
/* float32 rows k and k + 1 as cells */
INLINE vc vc_from_rows(vf row0, vf row1) {
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24,
                                         8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(zip, (__m512i)_mm512_cvtne2ps_pbh(row1, row0));
}
/* 2 W float32 values along k as W cells */
INLINE vc vc_from_run(const vf x[PAIR]) { return (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]); }
/* scales cells that are floats; pairs stay unchanged */
INLINE vc vc_scale(vc x, float scale) {
    (void)scale;
    return x;
}
INLINE cell cell_from_bits(uint16_t lo, uint16_t hi) { return lo | (uint32_t)hi << 16; }
#else
#define PAIR 1
typedef float cell;
typedef vf vc;
INLINE vf vc_dot(vf acc, vc a, vc b) { return vf_fma(a, b, acc); }
INLINE vc vc_set1(cell x) { return vf_set1(x); }
INLINE vc vc_load(const cell *p) { return vf_load(p); }
INLINE void vc_store(cell *p, vc v) { vf_store(p, v); }
INLINE void vc_store_first(cell *p, vc v, int64_t n) { vf_store_first(p, v, n); }
INLINE vc vc_load_along_k(const void *p, gk_dtype dtype, int64_t i, int64_t n) {
    return vf_load_dtype(p, dtype, i, n);
}
INLINE vc vc_load_across_k(const void *row0, const void *row1, gk_dtype dtype, int64_t i,
                           int64_t n) {
    (void)row1;
    return vf_load_dtype(row0, dtype, i, n);
}
INLINE void vc_load2_across_k(const void *row0, const void *row1, gk_dtype dtype, int64_t i,
                              vc to[2]) {
    (void)row1;
    to[0] = vf_load_dtype(row0, dtype, i, W);
    to[1] = vf_load_dtype(row0, dtype, i + W, W);
}
INLINE void vc_load2_split_along_k(const void *p, gk_dtype dtype, int64_t i, vc to[2]) {
    vf_load2_split(p, dtype, i, to);
}
INLINE void vc_load2_split_across_k(const void *row0, const void *row1, gk_dtype dtype, int64_t i,
                                    vc to[2]) {
    (void)row1;
    vf_load2_split(row0, dtype, i, to);
}
#define VC_SPLITS true
INLINE vc vc_from_rows(vf row0, vf row1) {
    (void)row1;
    return row0;
}
INLINE vc vc_from_run(const vf x[PAIR]) { return x[0]; }
INLINE vc vc_scale(vc x, float scale) { return x * scale; }
#endif

/* Transposes W vectors of W cells in place. */
#if ISA_LEVEL >= 3
INLINE void vc_transpose(vc r[W]) {
    __m512i t[16], u[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32((__m512i)r[i], (__m512i)r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32((__m512i)r[i], (__m512i)r[i + 1]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* In 128-bit lane q, u[4 g + c] holds rows 4 g .. 4 g + 3 of column 4 q + c. Collect the
     * four g of each column. */
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
        __m512i a = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88),
                b = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd);
        __m512i d = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88),
                e = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
        r[c] = (vc)_mm512_shuffle_i32x4(a, d, 0x88);
        r[8 + c] = (vc)_mm512_shuffle_i32x4(a, d, 0xdd);
        r[4 + c] = (vc)_mm512_shuffle_i32x4(b, e, 0x88);
        r[12 + c] = (vc)_mm512_shuffle_i32x4(b, e, 0xdd);
    }
}
#elif ISA_LEVEL >= 2
INLINE void vc_transpose(vc r[W]) {
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int c = 0; c < 4; ++c) {
        r[c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x20);
        r[4 + c] = _mm256_permute2f128_ps(u[c], u[4 + c], 0x31);
    }
}
#else
#if defined(__clang__)
#define SHUFFLE(x, y, i, j, k, l) __builtin_shufflevector(x, y, i, j, k, l)
#else
/* gcc has __builtin_shufflevector from version 12 on */
#define SHUFFLE(x, y, i, j, k, l) __builtin_shuffle(x, y, (vi){i, j, k, l})
#endif
INLINE void vc_transpose(vc r[W]) {
    vf a = SHUFFLE(r[0], r[1], 0, 4, 1, 5), b = SHUFFLE(r[0], r[1], 2, 6, 3, 7);
    vf c = SHUFFLE(r[2], r[3], 0, 4, 1, 5), d = SHUFFLE(r[2], r[3], 2, 6, 3, 7);
    r[0] = SHUFFLE(a, c, 0, 1, 4, 5);
    r[1] = SHUFFLE(a, c, 2, 3, 6, 7);
    r[2] = SHUFFLE(b, d, 0, 1, 4, 5);
    r[3] = SHUFFLE(b, d, 2, 3, 6, 7);
}
#endif

/* Lane i of the result is the sum of x[i]. */
#if ISA_LEVEL >= 3
INLINE vf vf_sums(const vf x[W]) {
    /* y: two sums in each 128-bit lane, z: four; then the 128-bit lanes are added up */
    __m512 y[8], z[4], u[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
        y[i] =
            _mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]) + _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
        z[i] = _mm512_shuffle_ps(y[2 * i], y[2 * i + 1], 0x44) +
               _mm512_shuffle_ps(y[2 * i], y[2 * i + 1], 0xee);
    for (int i = 0; i < 2; ++i)
        u[i] = _mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0x88) +
               _mm512_shuffle_f32x4(z[2 * i], z[2 * i + 1], 0xdd);
    return _mm512_shuffle_f32x4(u[0], u[1], 0x88) + _mm512_shuffle_f32x4(u[0], u[1], 0xdd);
}
#elif ISA_LEVEL >= 2
INLINE vf vf_sums(const vf x[W]) {
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}
#else
INLINE vf vf_sums(const vf x[W]) {
    vf t[W] = {x[0], x[1], x[2], x[3]};
    vc_transpose(t);
    return (t[0] + t[1]) + (t[2] + t[3]);
}
#endif

#endif
