/* SPDX-License-Identifier: BSD-3-Clause */
/* vec_int8.h: products of 8-bit integers in vectors. Part of vec.h for the one file that needs
 * it, int8_ukr.c.
 *
 * A cell is 32 bits of values that are neighbours along k:
 *  quads  four of 8 bits. VPDPBUSD adds their products to an int32. One operand is unsigned, so
 *         its codes get 128 added.
 *  pairs  two of 16 bits. PMADDWD, which every x86 has, adds their products to an int32. The sum
 *         of two products of codes fits an int32.
 *
 * Sums wrap modulo 2^32, so intermediate sums may overflow if a later subtraction corrects them.
 * AVX-512 VNNI and AVX-VNNI are not instruction sets of the build: quads are compiled beside
 * avx512 and avx2, and features.c says whether the machine has them (gk_cpu_multiplies_quads). */
#ifndef GPUKERN_VEC_INT8_H
#define GPUKERN_VEC_INT8_H

#include "vec.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

typedef uint32_t vw __attribute__((vector_size(4 * W)));

INLINE vw vw_load(const uint32_t *p) { return (vw) * (const vu_mem *)p; }
INLINE void vw_store(uint32_t *p, vw v) { *(vu_mem *)p = (vu_mem)v; }
INLINE vw vw_set1(uint32_t x) { return x - (vw){0}; }

#if ISA_LEVEL >= 3
INLINE vw vw_dot_pairs(vw acc, vw a, vw b) {
    return acc + (vw)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
#elif ISA_LEVEL >= 2
INLINE vw vw_dot_pairs(vw acc, vw a, vw b) {
    return acc + (vw)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
#elif defined(__SSE2__)
INLINE vw vw_dot_pairs(vw acc, vw a, vw b) {
    return acc + (vw)_mm_madd_epi16((__m128i)a, (__m128i)b);
}
#else
INLINE vw vw_dot_pairs(vw acc, vw a, vw b) {
    const vi a_low = (vi)(a << 16) >> 16, b_low = (vi)(b << 16) >> 16, a_high = (vi)a >> 16,
             b_high = (vi)b >> 16;
    return acc + (vw)(a_low * b_low + a_high * b_high);
}
#endif

/* W bytes at any address, each converted to an int32. gcc 12 compiles __builtin_convertvector of
 * these byte by byte. */
INLINE vi vi_from_bytes(const uint8_t *p) {
#if ISA_LEVEL >= 3
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif ISA_LEVEL >= 2
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi x;
    for (int i = 0; i < W; ++i) x[i] = p[i];
    return x;
#endif
}

/* 2 W signed bytes at any address, as pairs. */
INLINE vw vw_pairs_of(const int8_t *p) {
#if ISA_LEVEL >= 3
    return (vw)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)p));
#elif ISA_LEVEL >= 2
    return (vw)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
#else
    vw x;
    for (int i = 0; i < W; ++i)
        x[i] = (uint32_t)(uint16_t)p[2 * i] | (uint32_t)(uint16_t)p[2 * i + 1] << 16;
    return x;
#endif
}

/* acc + the four products of each lane; a is unsigned, b is signed. QUADS: 1 if the compiler has
 * the instruction for this set. */
#if ISA_LEVEL >= 4
#define QUADS 1
#define QUADS_TARGET
#elif ISA_LEVEL >= 3
#define QUADS 1
#define QUADS_TARGET __attribute__((target("avx512vnni")))
#elif ISA_LEVEL >= 2 && ((defined(__clang__) && __clang_major__ >= 12) || \
                         (!defined(__clang__) && defined(__GNUC__) && __GNUC__ >= 11))
#define QUADS 1
#define QUADS_TARGET __attribute__((target("avxvnni")))
#else
#define QUADS 0
#define QUADS_TARGET
#endif
#if QUADS && ISA_LEVEL >= 3
QUADS_TARGET INLINE vw vw_dot_quads(vw acc, vw a, vw b) {
    return (vw)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
}
#elif QUADS
QUADS_TARGET INLINE vw vw_dot_quads(vw acc, vw a, vw b) {
    return (vw)_mm256_dpbusd_avx_epi32((__m256i)acc, (__m256i)a, (__m256i)b);
}
#endif

#endif
