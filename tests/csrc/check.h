/* SPDX-License-Identifier: BSD-3-Clause */
/* check.h: the parts that the C tests share: random numbers, tensors between guards, contexts,
 * comparisons, and the last line of output.
 *
 * A test runs every instruction set and dtype through the public C API and compares each result
 * with csrc/ref on the same inputs with float64 results. The bound is derived from what the
 * arithmetic must lose, element by element:
 *
 *  |got - exact| <= loss * size + u(output dtype) * |exact|
 *
 *  size  the same sum with every term replaced by its absolute value (no cancellation), computed
 *        beside the result
 *  loss  relative error of a term: u(accumulator) times the number of roundings that the test
 *        counts, plus u(dtype) in 16-bit attention, whose probabilities are rounded to the dtype
 *        before they are multiplied by the values
 *  u(t)  half a unit in the last place of t at 1: 2^-24 float32, 2^-8 bfloat16, 2^-11 float16,
 *        2^-53 float64
 *
 * GK_CHECK_SMALL=1 runs a part of each grid, for runs under a sanitizer. */
#ifndef GPUKERN_CHECK_H
#define GPUKERN_CHECK_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* posix_memalign, pthread */
#endif

#include "cpu/kernels.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK_COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

#if defined(__GNUC__)
#define CHECK_UNUSED __attribute__((unused))
#else
#define CHECK_UNUSED
#endif

/* ---- counting -------------------------------------------------------------------------------- */
static int64_t check_num_passed, check_num_failed;
/* A failure names the case, then the instruction set and, if there is one, the pass or the
 * number of workers. */
static char check_case[512];
static const char *check_isa = "", *check_pass = "";

static void check_result(bool good, const char *format, ...) {
    if (good) {
        ++check_num_passed;
        return;
    }
    if (++check_num_failed > 40) return; /* enough to see a pattern */
    va_list list;
    va_start(list, format);
    printf("FAILED %s %s %s: ", check_case, check_isa, check_pass);
    vprintf(format, list);
    printf("\n");
    va_end(list);
}

static int check_end(void) {
    printf("%lld passed, %lld failed\n", (long long)check_num_passed, (long long)check_num_failed);
    return check_num_failed != 0 || check_num_passed == 0;
}

CHECK_UNUSED static bool check_small(void) {
    const char *value = getenv("GK_CHECK_SMALL");
    return value && strcmp(value, "0") != 0;
}

/* The call must be refused with this status and with a text that contains `words`. */
CHECK_UNUSED static void check_refused(gk_status got, gk_status expected, const char *words) {
    const char *text = gk_last_error();
    check_result(got == expected && strstr(text, words),
                 "expected %s with \"%s\", got %s with \"%s\"", gk_status_name(expected), words,
                 gk_status_name(got), got == GK_OK ? "" : text);
}

/* ---- random numbers (splitmix64) ------------------------------------------------------------- */
static uint64_t check_seed;

static uint64_t check_random(void) {
    uint64_t z = (check_seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

CHECK_UNUSED static int64_t check_below(int64_t n) {
    return (int64_t)(check_random() % (uint64_t)n);
}

static double check_uniform(double lo, double hi) {
    return lo + (hi - lo) * (double)(check_random() >> 11) * 0x1p-53;
}

/* Approximately normal: the sum of twelve uniform numbers. */
CHECK_UNUSED static double check_normal(void) {
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += check_uniform(0, 1);
    return sum;
}

/* ---- memory ---------------------------------------------------------------------------------- */
#if defined(__SANITIZE_ADDRESS__)
/* the sanitizer detects accesses out of bounds itself, more precisely than a guard */
#define CHECK_GUARD 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CHECK_GUARD 0
#endif
#endif
#ifndef CHECK_GUARD
#define CHECK_GUARD 256
#endif

static void *check_owned[4096];
static int check_num_owned;

static void *check_own(void *p) {
    if (!p || check_num_owned == CHECK_COUNT(check_owned)) {
        printf("FAILED %s: out of memory\n", check_case);
        exit(2);
    }
    return check_owned[check_num_owned++] = p;
}

static void *check_alloc(size_t bytes) { return check_own(malloc(bytes ? bytes : 1)); }

/* Frees everything allocated since check_num_owned was `mark`. 0 frees everything of a case and
 * ends it. */
CHECK_UNUSED static void check_free(int mark) {
    while (check_num_owned > mark) free(check_owned[--check_num_owned]);
    if (mark == 0) check_isa = check_pass = "";
}

/* ---- tensors --------------------------------------------------------------------------------- */
/* A tensor whose memory holds NaN outside its elements: in the guards and between the elements. */
typedef struct check_tensor {
    gk_tensor t;
    unsigned char *memory, *before; /* before: a copy of memory, for check_unchanged */
    size_t bytes;
} check_tensor;

/* order lists the dimensions from the slowest to the fastest; NULL keeps their order. step is
 * the stride of the fastest dimension, pad the number of elements left out after each run of it.
 * Data starts one element past any alignment. */
static check_tensor check_tensor_make(gk_dtype dtype, int ndim, const int64_t *shape,
                                      const int *order, int64_t step, int64_t pad) {
    check_tensor x;
    size_t es = gk_dtype_bytes(dtype), lead = CHECK_GUARD + es;
    int64_t stride = step, last = 0;
    memset(&x, 0, sizeof x);
    x.t.dtype = dtype;
    x.t.ndim = ndim;
    for (int i = ndim - 1; i >= 0; --i) {
        int d = order ? order[i] : i;
        x.t.shape[d] = shape[d];
        x.t.stride[d] = stride;
        last += gk_max_i64(shape[d] - 1, 0) * stride;
        stride = gk_max_i64(shape[d], 1) * stride + (i == ndim - 1 ? pad : 0);
    }
    x.bytes = lead + (gk_numel(&x.t) ? (size_t)(last + 1) * es : 0) + CHECK_GUARD;
    x.memory = check_alloc(x.bytes);
    memset(x.memory, 0xff, x.bytes); /* NaN in every floating dtype, -1 in integers */
    x.t.data = x.memory + lead;
    return x;
}

CHECK_UNUSED static check_tensor check_dense(gk_dtype dtype, int ndim, const int64_t *shape) {
    return check_tensor_make(dtype, ndim, shape, NULL, 1, 0);
}

/* Offset in elements of element i, counted with the last dimension fastest. */
CHECK_UNUSED static int64_t check_offset(const gk_tensor *t, int64_t i) {
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; --d) {
        offset += i % t->shape[d] * t->stride[d];
        i /= t->shape[d];
    }
    return offset;
}

/* Iterates over the elements, the last dimension fastest. */
typedef struct check_walk {
    const gk_tensor *t;
    int64_t at[GK_MAX_DIMS], offset;
} check_walk;

CHECK_UNUSED static check_walk check_first(const gk_tensor *t) { return (check_walk){.t = t}; }

CHECK_UNUSED static void check_next(check_walk *w) {
    for (int d = w->t->ndim - 1; d >= 0; --d) {
        w->offset += w->t->stride[d];
        if (++w->at[d] < w->t->shape[d]) return;
        w->offset -= w->t->shape[d] * w->t->stride[d];
        w->at[d] = 0;
    }
}

CHECK_UNUSED static double check_here(const check_walk *w) {
    return gk_load(w->t->data, w->t->dtype, w->offset);
}

CHECK_UNUSED static double check_get(const gk_tensor *t, int64_t i) {
    return gk_load(t->data, t->dtype, check_offset(t, i));
}

CHECK_UNUSED static void check_set(const gk_tensor *t, int64_t i, double x) {
    gk_store(t->data, t->dtype, check_offset(t, i), x);
}

CHECK_UNUSED static void check_fill_normal(const check_tensor *x, double size) {
    check_walk w = check_first(&x->t);
    for (int64_t i = gk_numel(&x->t); i > 0; --i, check_next(&w))
        gk_store(x->t.data, x->t.dtype, w.offset, size * check_normal());
}

CHECK_UNUSED static void check_fill(const check_tensor *x, double value) {
    check_walk w = check_first(&x->t);
    for (int64_t i = gk_numel(&x->t); i > 0; --i, check_next(&w))
        gk_store(x->t.data, x->t.dtype, w.offset, value);
}

/* A copy with the same shape and strides in its own memory. f is applied to every element, and
 * to the gaps between elements. */
CHECK_UNUSED static check_tensor check_map(const check_tensor *x, double (*f)(double)) {
    check_tensor y = *x;
    size_t es = gk_dtype_bytes(x->t.dtype), lead = CHECK_GUARD + es;
    y.memory = check_alloc(x->bytes);
    y.before = NULL;
    memcpy(y.memory, x->memory, x->bytes);
    y.t.data = y.memory + ((unsigned char *)x->t.data - x->memory);
    for (size_t i = 0; i < (x->bytes - lead - CHECK_GUARD) / es; ++i) {
        gk_store(y.memory + lead, y.t.dtype, (int64_t)i,
                 f(gk_load(y.memory + lead, y.t.dtype, (int64_t)i)));
    }
    return y;
}

/* Remembers the memory. check_unchanged then fails if any byte differs, check_untouched if a
 * byte outside the elements differs. */
CHECK_UNUSED static void check_remember(check_tensor *x) {
    if (!x->before) x->before = check_alloc(x->bytes);
    memcpy(x->before, x->memory, x->bytes);
}

CHECK_UNUSED static void check_unchanged(const check_tensor *x, const char *name) {
    check_result(memcmp(x->before, x->memory, x->bytes) == 0, "%s was changed", name);
}

CHECK_UNUSED static void check_untouched(check_tensor *x, const char *name) {
    size_t es = gk_dtype_bytes(x->t.dtype);
    ptrdiff_t data = (unsigned char *)x->t.data - x->memory;
    check_walk w = check_first(&x->t);
    for (int64_t i = gk_numel(&x->t); i > 0; --i, check_next(&w)) {
        ptrdiff_t at = data + w.offset * (ptrdiff_t)es;
        memcpy(x->before + at, x->memory + at, es);
    }
    check_result(memcmp(x->before, x->memory, x->bytes) == 0,
                 "memory beside the elements of %s was written", name);
}

CHECK_UNUSED static bool check_same_bits(const gk_tensor *a, const gk_tensor *b) {
    size_t es = gk_dtype_bytes(a->dtype);
    check_walk p = check_first(a), q = check_first(b);
    for (int64_t i = gk_numel(a); i > 0; --i, check_next(&p), check_next(&q))
        if (memcmp((const char *)a->data + p.offset * (int64_t)es,
                   (const char *)b->data + q.offset * (int64_t)es, es))
            return false;
    return true;
}

/* ---- comparison ------------------------------------------------------------------------------ */
/* Half a unit in the last place at 1. Integers are exact. */
static double check_unit(gk_dtype dtype) {
    const gk_type *type = gk_type_of(dtype);
    return type->kind == GK_KIND_FLOAT ? ldexp(1, -type->fraction_bits - 1) : 0;
}

/* u of the accumulator: float64 for float64, otherwise float32. */
CHECK_UNUSED static double check_acc_unit(gk_dtype dtype) {
    return check_unit(gk_stats_dtype(dtype));
}

/* Every element of got must be within loss * size + u |exact| of exact. size NULL: |exact|. NaN
 * and infinities must be equal. */
CHECK_UNUSED static void check_close(const char *name, const gk_tensor *got, const gk_tensor *exact,
                                     const gk_tensor *size, double loss) {
    double u = check_unit(got->dtype), tiny = got->dtype == GK_F16   ? 0x1p-25
                                              : got->dtype == GK_F64 ? 0
                                                                     : 0x1p-126;
    check_walk at[3] = {check_first(got), check_first(exact), check_first(size ? size : exact)};
    for (int64_t i = 0; i < gk_numel(got);
         ++i, check_next(&at[0]), check_next(&at[1]), check_next(&at[2])) {
        double x = check_here(&at[0]), y = check_here(&at[1]), s = fabs(check_here(&at[2]));
        bool good = x == y || (isnan(x) && isnan(y));
        if (!good && isfinite(y)) good = fabs(x - y) <= loss * s + u * fabs(y) + tiny;
        if (!good) {
            check_result(false, "%s[%lld of %lld] is %.9g, expected %.9g +- %.3g", name,
                         (long long)i, (long long)gk_numel(got), x, y,
                         loss * s + u * fabs(y) + tiny);
            return;
        }
    }
    check_result(true, "%s", name);
}

/* Values must be equal; NaN equals NaN. */
CHECK_UNUSED static void check_equal(const char *name, const gk_tensor *got,
                                     const gk_tensor *expected) {
    check_walk at[2] = {check_first(got), check_first(expected)};
    for (int64_t i = 0; i < gk_numel(got); ++i, check_next(&at[0]), check_next(&at[1])) {
        double x = check_here(&at[0]), y = check_here(&at[1]);
        if (x == y || (isnan(x) && isnan(y))) continue;
        check_result(false, "%s[%lld of %lld] is %.9g, expected exactly %.9g", name, (long long)i,
                     (long long)gk_numel(got), x, y);
        return;
    }
    check_result(true, "%s", name);
}

/* Euclidean length of the longest row (last dimension) without NaN. The product of two of them
 * bounds every dot product. */
CHECK_UNUSED static double check_longest_row(const gk_tensor *t) {
    int64_t n = t->shape[t->ndim - 1];
    double longest = 0;
    check_walk w = check_first(t);
    for (int64_t i = 0; i < gk_numel(t); i += n) {
        double sum = 0;
        for (int64_t e = 0; e < n; ++e, check_next(&w)) {
            const double x = check_here(&w);
            sum += x * x;
        }
        if (sum > longest) longest = sum; /* false for a row with NaN */
    }
    return sqrt(longest);
}

/* ---- contexts -------------------------------------------------------------------------------- */
typedef struct check_thread {
    gk_task_fn task;
    void *arg;
    int64_t i;
} check_thread;

static void *check_thread_main(void *p) {
    check_thread *t = p;
    t->task(t->arg, t->i);
    return NULL;
}

/* A parallel_for with one thread per index, all at once. */
static void check_parallel_for(void *pool, int64_t n, gk_task_fn task, void *arg) {
    (void)pool;
    pthread_t threads[16];
    check_thread starts[16];
    if (n > CHECK_COUNT(threads)) abort(); /* more than num_threads */
    for (int64_t i = 0; i < n; ++i) {
        starts[i] = (check_thread){task, arg, i};
        if (pthread_create(&threads[i], NULL, check_thread_main, &starts[i]) != 0) abort();
    }
    for (int64_t i = 0; i < n; ++i) pthread_join(threads[i], NULL);
}

CHECK_UNUSED static gk_context check_context(const char *isa, int32_t num_threads) {
    gk_context ctx = {
        .size = sizeof ctx, .device = GK_CPU, .num_threads = num_threads, .cpu_isa = isa};
    if (num_threads > 1) ctx.parallel_for = check_parallel_for;
    return ctx;
}

enum {
    CHECK_MAX_ISAS = 8,
    CHECK_WORKERS = 3
};
static char check_isa_names[CHECK_MAX_ISAS][16];

/* The instruction sets of this machine, and AMX's emulation. */
CHECK_UNUSED static int check_isas(void) {
    int n = 0;
    for (const char *p = gk_cpu_isas(); *p && n < CHECK_MAX_ISAS; ++n) {
        size_t length = strcspn(p, ",");
        snprintf(check_isa_names[n], sizeof check_isa_names[n], "%.*s", (int)length, p);
        p += length + (p[length] == ',');
    }
    if (gk_cpu_has(GK_ISA_AMX_EMULATED))
        snprintf(check_isa_names[n++], sizeof check_isa_names[0], "amx_emulated");
    return n;
}

/* True if a set has no kernels of its own for a dtype: AMX's emulation multiplies bfloat16 and
 * uses avx512 for the others. */
CHECK_UNUSED static bool check_repeats(const char *isa, gk_dtype dtype) {
    return dtype != GK_BF16 && strcmp(isa, "amx_emulated") == 0;
}

/* ---- instances ------------------------------------------------------------------------------- */
static char check_seen[128][64];
static int check_num_seen;

/* Remembers the instance that served a call. Its explained workspace must be the number of bytes
 * that the caller was told. */
CHECK_UNUSED static void check_see(const gk_explanation *e, size_t workspace_bytes) {
    check_result(e->workspace_bytes == (int64_t)workspace_bytes,
                 "%s explains %lld bytes of workspace, asks for %zu", e->instance,
                 (long long)e->workspace_bytes, workspace_bytes);
    for (int i = 0; i < check_num_seen; ++i) {
        if (strcmp(check_seen[i], e->instance) == 0) return;
    }
    if (check_num_seen < CHECK_COUNT(check_seen))
        memcpy(check_seen[check_num_seen++], e->instance, sizeof check_seen[0]);
}

/* Every instance of the op that this machine can run must have served a call. */
CHECK_UNUSED static void check_every_instance_seen(gk_op op) {
    int count;
    const gk_cpu_instance *all = gk_cpu_instances(op, &count);
    snprintf(check_case, sizeof check_case, "table");
    for (int n = 0; n < count; ++n) {
        char name[64];
        if (!gk_cpu_has(all[n].isa)) continue;
        if (all[n].dtype == GK_F64)
            snprintf(name, sizeof name, "%s_f64", all[n].name);
        else
            snprintf(name, sizeof name, "%s_%s_%s", all[n].name,
                     gk_type_of(all[n].dtype)->short_name, gk_isa_names[all[n].isa]);
        bool seen = false;
        for (int i = 0; i < check_num_seen; ++i) seen = seen || strcmp(check_seen[i], name) == 0;
        check_result(seen, "instance %s served no call", name);
    }
}

/* ---- workspace ------------------------------------------------------------------------------- */
/* A workspace of exactly the bytes asked for, 64-byte aligned, full of NaN, with a guard behind
 * it (or the sanitizer's). */
typedef struct check_workspace {
    unsigned char *data;
    size_t bytes;
} check_workspace;

CHECK_UNUSED static check_workspace check_workspace_make(size_t bytes) {
    check_workspace w = {NULL, bytes};
    void *block = NULL;
    if (posix_memalign(&block, 64, bytes + CHECK_GUARD ? bytes + CHECK_GUARD : 1) != 0) abort();
    w.data = check_own(block);
    memset(w.data, 0xff, bytes + CHECK_GUARD);
    return w;
}

CHECK_UNUSED static void check_workspace_end(const check_workspace *w) {
    bool good = true;
    for (size_t i = 0; i != CHECK_GUARD; ++i) good = good && w->data[w->bytes + i] == 0xff;
    check_result(good, "memory behind the workspace of %zu bytes was written", w->bytes);
}

#endif
