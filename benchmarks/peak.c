/* SPDX-License-Identifier: BSD-3-Clause */
/* peak: what this machine's cores and memory can do at most, for the percent of the roofline that
 * the benchmarks print.
 *
 * peak_madd(isa, bf16, n)  n rounds of independent multiply-adds on one thread; returns the FLOPs
 * peak_read(data, n)       reads n floats once; returns their sum, which keeps the loop alive
 * peak_read_pages(..)      reads pages of two caches in the order of a table, on threads of its own
 * peak_has(isa)            whether this machine can run an instruction set
 * isa: 0 base, 1 avx2, 2 avx512, 3 avx512bf16. But for peak_read_pages, threads are the caller's
 * business: every function is reentrant, and devices.py runs one call per thread.
 */
#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Latency 4 times 2 ports asks for 8 chains, multiply and add one after the other for 14; with the
 * two constants they fill the 16 registers of the baseline. */
enum {
    CHAINS = 14,
    ROUNDS_INNER = 64
};

typedef float f32x4 __attribute__((vector_size(16)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));

#if defined(__x86_64__)
#define TARGET(isa) __attribute__((target(isa), noinline))
#else
#define TARGET(isa) __attribute__((noinline))
#endif

/* x <- x * 0.999 + 0.001 stays near 1: no denormals, no overflow, and nothing to simplify. */
#define MADD_LOOP(NAME, VEC, TARGET_ATTRIBUTE)                                          \
    TARGET_ATTRIBUTE static double NAME(int64_t n, volatile float *sink) {              \
        VEC x[CHAINS], scale = {0}, shift = {0};                                        \
        scale += 0.999f;                                                                \
        shift += 0.001f;                                                                \
        for (int i = 0; i < CHAINS; i++) x[i] = shift * (float)i;                       \
        for (int64_t round = 0; round < n; round++)                                     \
            for (int inner = 0; inner < ROUNDS_INNER; inner++)                          \
                for (int i = 0; i < CHAINS; i++) x[i] = x[i] * scale + shift;           \
        for (int i = 1; i < CHAINS; i++) x[0] += x[i];                                  \
        *sink = x[0][0];                                                                \
        return 2.0 * n * ROUNDS_INNER * CHAINS * (double)(sizeof(VEC) / sizeof(float)); \
    }

MADD_LOOP(madd_base, f32x4, __attribute__((noinline)))
#if defined(__x86_64__)
MADD_LOOP(madd_avx2, f32x8, TARGET("avx2,fma"))
MADD_LOOP(madd_avx512, f32x16, TARGET("avx512f"))

/* x <- x + a . b over pairs of bf16: 64 FLOPs an instruction. */
TARGET("avx512f,avx512bf16") static double dot_avx512bf16(int64_t n, volatile float *sink) {
    __m512 x[CHAINS];
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3c003c00), b = a; /* pairs of 2^-7 */
    for (int i = 0; i < CHAINS; i++) x[i] = _mm512_set1_ps((float)i);
    for (int64_t round = 0; round < n; round++)
        for (int inner = 0; inner < ROUNDS_INNER; inner++)
            for (int i = 0; i < CHAINS; i++) x[i] = _mm512_dpbf16_ps(x[i], a, b);
    for (int i = 1; i < CHAINS; i++) x[0] = _mm512_add_ps(x[0], x[i]);
    *sink = _mm512_cvtss_f32(x[0]);
    return 2.0 * n * ROUNDS_INNER * CHAINS * 32;
}

TARGET("avx512f") static float read_avx512(const float *data, int64_t n) {
    f32x16 sum[4] = {{0}};
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 4; j++) sum[j] += (f32x16)_mm512_loadu_ps(data + i + 16 * j);
    sum[0] += sum[1] + sum[2] + sum[3];
    float total = 0;
    for (int j = 0; j < 16; j++) total += sum[0][j];
    for (; i < n; i++) total += data[i];
    return total;
}
#endif

static float read_base(const float *data, int64_t n) {
    f32x4 sum[8] = {{0}};
    int64_t i = 0;
    for (; i + 32 <= n; i += 32)
        for (int j = 0; j < 8; j++) sum[j] += *(const f32x4 *)(data + i + 4 * j);
    float total = 0;
    for (int j = 0; j < 8; j++) total += sum[j][0] + sum[j][1] + sum[j][2] + sum[j][3];
    for (; i < n; i++) total += data[i];
    return total;
}

int peak_has(int isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    switch (isa) {
    case 0: return 1;
    case 1: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case 2: return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
    case 3: return __builtin_cpu_supports("avx512bf16") != 0;
    }
    return 0;
#else
    return isa == 0;
#endif
}

double peak_madd(int isa, int bf16, int64_t n) {
    volatile float sink;
#if defined(__x86_64__)
    if (isa == 3 && bf16) return dot_avx512bf16(n, &sink);
    if (isa >= 2) return madd_avx512(n, &sink);
    if (isa == 1) return madd_avx2(n, &sink);
#else
    (void)isa;
    (void)bf16;
#endif
    return madd_base(n, &sink);
}

/* data 16-byte aligned. */
float peak_read(const float *data, int64_t n) {
#if defined(__x86_64__)
    if (peak_has(2)) return read_avx512(data, n);
#endif
    return read_base(data, n);
}

static float read_page(const char *page, const char *next, const char *later, int64_t bytes) {
    float total = 0;
    for (int64_t frame = 0; frame < bytes; frame += 4096) {
        const int64_t here = bytes - frame < 4096 ? bytes - frame : 4096;
        if (later) __builtin_prefetch(later + frame);
        for (int64_t line = frame; next && line < frame + here; line += 64)
            __builtin_prefetch(next + line);
        total += peak_read((const float *)(page + frame), here / 4);
    }
    return total;
}

/* k, v [num_pages][page_bytes], 16-byte aligned; table [n] page numbers; page_bytes a multiple of
 * 16. With fetch, the page that comes next is prefetched and the memory frames of the one after it
 * are touched. Needs OpenMP. */
float peak_read_pages(const char *k, const char *v, const int32_t *table, int64_t n,
                      int64_t page_bytes, int fetch, int threads) {
    float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
    for (int worker = 0; worker < threads; worker++) {
        const int64_t first = 2 * (n * worker / threads), end = 2 * (n * (worker + 1) / threads);
        for (int64_t i = first; i < end; i++) {
            const char *page[3] = {0};
            for (int64_t j = 0; j < (fetch ? 3 : 1) && i + j < end; j++)
                page[j] = ((i + j) % 2 ? v : k) + page_bytes * table[(i + j) / 2];
            total += read_page(page[0], page[1], page[2], page_bytes);
        }
    }
    return total;
}
