/* SPDX-License-Identifier: BSD-3-Clause */
/* fuzz.h: what the harnesses share: a decoder of bytes, tensors, the call itself, and the checks
 * after it.
 *
 * Every byte decides one thing, and any bytes are a call. So the fuzzer can vary one thing at a
 * time. Reads behind the end of the bytes give 0. Numbers come from a generator that one byte
 * seeds.
 *
 * Checked for every call:
 *   - memory is exactly as large as the strides say, so that the address sanitizer sees an access
 *     that is one element too far
 *   - inputs, and the gaps between the elements of results, are never written
 *   - a refused call has written nothing
 *   - a call with a wrong field (fz_corrupt) or a wrong workspace is refused
 *   - results equal those of the same call in float64 on dense copies (csrc/ref), within a bound */
#ifndef GPUKERN_FUZZ_H
#define GPUKERN_FUZZ_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* posix_memalign, pthread */
#endif

#include "core/internal.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define FZ_UNUSED __attribute__((unused))
#define FZ_REQUIRE(condition, ...)        \
    do {                                  \
        if (!(condition)) {               \
            fprintf(stderr, __VA_ARGS__); \
            fprintf(stderr, "\n");        \
            abort();                      \
        }                                 \
    } while (0)

/* ---- bytes ----------------------------------------------------------------------------------- */
static const uint8_t *fz_next, *fz_end;
static uint64_t fz_seed;

static int64_t fz_int(int64_t lo, int64_t hi) { /* reads one byte; 0 gives lo */
    const int64_t byte = fz_next < fz_end ? *fz_next++ : 0;
    return lo + byte % (hi - lo + 1);
}
FZ_UNUSED static bool fz_one_in(int64_t n) { return fz_int(0, n - 1) == n - 1; }
FZ_UNUSED static int64_t
fz_size(int64_t most) { /* small sizes, and sizes around the kernels' tiles */
    static const int64_t edges[] = {1,  2,  3,  5,  0,  7,  8,  9,  13,  15,  16,
                                    17, 31, 32, 33, 47, 63, 64, 65, 100, 127, 129};
    const int64_t n = edges[fz_int(0, (int64_t)(sizeof edges / sizeof *edges) - 1)];
    return gk_min_i64(n, most);
}

static double fz_uniform(void) { /* in [-1, 1), splitmix64 */
    uint64_t z = (fz_seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-52 - 1;
}

/* ---- memory ---------------------------------------------------------------------------------- */
typedef struct fz_memory {
    unsigned char *now, *before;
    size_t bytes;
    gk_tensor t;
    bool result;
} fz_memory;
static fz_memory fz_all[64];
static int fz_count;

FZ_UNUSED static void fz_begin(const uint8_t *data, size_t bytes) {
    fz_next = data;
    fz_end = data + bytes;
    fz_count = 0;
    fz_seed = (uint64_t)fz_int(0, 255);
}
FZ_UNUSED static void fz_free(void) {
    while (fz_count > 0) {
        --fz_count;
        free(fz_all[fz_count].now);
        free(fz_all[fz_count].before);
    }
}

static int64_t fz_offset(const gk_tensor *t, int64_t i) {
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; --d) {
        offset += i % t->shape[d] * t->stride[d];
        i /= t->shape[d];
    }
    return offset;
}
static double fz_get(const gk_tensor *t, int64_t i) {
    return gk_load(t->data, t->dtype, fz_offset(t, i));
}
static void fz_set(const gk_tensor *t, int64_t i, double x) {
    gk_store(t->data, t->dtype, fz_offset(t, i), x);
}

enum {
    FZ_INPUT = 0,
    FZ_RESULT = 1,     /* no two elements share a place */
    FZ_LAST_DENSE = 2, /* the last dimension has stride 1 */
    FZ_CONTIGUOUS = 4,
    FZ_FILLED = 8 /* a result that the op also reads */
};

/* Makes a tensor with exactly the memory that its strides need. Elements are uniform numbers. Gaps
 * between them hold NaN, and so do all elements of a result that the op does not read. */
static gk_tensor fz_make(gk_dtype dtype, int ndim, const int64_t *shape, int flags) {
    gk_tensor t = {.dtype = dtype, .ndim = ndim};
    const int64_t es = (int64_t)gk_dtype_bytes(dtype);
    const int layout = flags & FZ_CONTIGUOUS ? 0 : (int)fz_int(0, 255),
              dense = flags & FZ_LAST_DENSE ? 1 : 0;
    const int turn = ndim - dense > 1 ? layout % (ndim - dense) : 0;
    int64_t stride = layout & 64 && !dense ? 2 : 1, lo = 0, hi = 0;
    for (int i = ndim - 1; i >= 0; --i) {
        const int d = dense && i == ndim - 1 ? i : (i + turn) % gk_max_i64(1, ndim - dense);
        t.shape[d] = shape[d];
        t.stride[d] = stride;
        stride = stride * gk_max_i64(1, shape[d]) + (layout & 8 ? 3 : 0);
        const bool fixed = dense && d == ndim - 1;
        if (layout & 16 && !fixed && i % 2 == 0) t.stride[d] = -t.stride[d];
        if (layout & 32 && !fixed && !(flags & FZ_RESULT) && i == 0) t.stride[d] = 0;
        if (layout & 128 && shape[d] == 1) t.stride[d] = layout & 1 ? -123456789 : INT64_C(1) << 47;
    }
    for (int d = 0; d < ndim; ++d) {
        const int64_t reach = gk_max_i64(0, shape[d] - 1) * t.stride[d];
        *(reach < 0 ? &lo : &hi) += reach;
    }
    const int64_t numel = gk_numel(&t);
    fz_memory *m = &fz_all[fz_count++];
    FZ_REQUIRE(fz_count < 64, "fuzz.h: too many tensors");
    *m =
        (fz_memory){.bytes = numel ? (size_t)((hi - lo + 1) * es) : 0, .result = flags & FZ_RESULT};
    if (numel || layout & 2) m->now = malloc(m->bytes ? m->bytes : 1);
    if (m->bytes) memset(m->now, 0xff, m->bytes);
    t.data = m->now ? m->now - lo * es * (numel != 0) : NULL;
    for (int64_t i = 0; i < numel && (!(flags & FZ_RESULT) || flags & FZ_FILLED); ++i)
        fz_set(&t, i, fz_uniform());
    m->t = t;
    return t;
}

/* Slots of a cache of `capacity` tokens. None occurs twice; some are negative, some past the end.
 * The tensor is an input, although no two of its elements share a place. */
FZ_UNUSED static gk_tensor fz_slots(gk_dtype dtype, int64_t tokens, int64_t capacity) {
    const gk_tensor slots = fz_make(dtype, 1, &tokens, FZ_RESULT | FZ_FILLED);
    const int64_t first = fz_int(0, 20), bad = fz_int(0, 9);
    for (int64_t i = 0; i < tokens; ++i) {
        int64_t slot = i < capacity ? (first + i) % capacity : -1 - i;
        if (bad == 9 && i == tokens - 1) slot = capacity + first;
        if (bad == 8 && i % 2) slot = -slot - 1;
        fz_set(&slots, i, (double)slot);
    }
    fz_all[fz_count - 1].result = false;
    return slots;
}

/* A dense copy in float64. */
FZ_UNUSED static gk_tensor fz_wide(const gk_tensor *t) {
    gk_tensor x = fz_make(GK_F64, t->ndim, t->shape, FZ_CONTIGUOUS | FZ_RESULT);
    for (int64_t i = 0; i < gk_numel(t); ++i) fz_set(&x, i, fz_get(t, i));
    return x;
}
/* The same for a tensor that may be NULL. */
FZ_UNUSED static const gk_tensor *fz_wide_of(const gk_tensor *t, gk_tensor *place) {
    return t ? (*place = fz_wide(t), place) : NULL;
}

static void fz_remember(void) {
    for (int i = 0; i < fz_count; ++i) {
        fz_memory *m = &fz_all[i];
        if (!m->bytes) continue;
        if (!m->before) m->before = malloc(m->bytes);
        memcpy(m->before, m->now, m->bytes);
    }
}
static void fz_held(const char *op, gk_status status) {
    for (int i = 0; i < fz_count; ++i) {
        const fz_memory *m = &fz_all[i];
        if (!m->bytes || !m->before) continue;
        const size_t es = gk_dtype_bytes(m->t.dtype);
        for (int64_t e = 0; status == GK_OK && m->result && e < gk_numel(&m->t); ++e) {
            const int64_t at =
                (unsigned char *)m->t.data - m->now + fz_offset(&m->t, e) * (int64_t)es;
            memcpy(m->before + at, m->now + at, es);
        }
        FZ_REQUIRE(memcmp(m->before, m->now, m->bytes) == 0, "%s: %s, and tensor %d was written %s",
                   op, gk_status_name(status), i,
                   m->result && status == GK_OK ? "between its elements" : "");
    }
}

/* ---- context --------------------------------------------------------------------------------- */
typedef struct fz_thread {
    gk_task_fn task;
    void *arg;
    int64_t i;
} fz_thread;
static void *fz_thread_main(void *p) {
    fz_thread *t = p;
    t->task(t->arg, t->i);
    return NULL;
}
static void fz_parallel_for(void *pool, int64_t n, gk_task_fn task, void *arg) {
    pthread_t threads[8];
    fz_thread starts[8];
    (void)pool;
    FZ_REQUIRE(n <= 8, "%lld workers of at most 8", (long long)n);
    for (int64_t i = 1; i < n; ++i) {
        starts[i] = (fz_thread){task, arg, i};
        if (pthread_create(&threads[i], NULL, fz_thread_main, &starts[i]) != 0) abort();
    }
    task(arg, 0);
    for (int64_t i = 1; i < n; ++i) pthread_join(threads[i], NULL);
}

static gk_context fz_context(void) {
    static const char *const isas[] = {"base",       "avx2",         "avx512",
                                       "avx512bf16", "amx_emulated", "amx"};
    gk_context ctx = GK_CONTEXT_INIT;
    ctx.cpu_isa = isas[fz_int(0, 5)];
    const bool emulated =
        strcmp(ctx.cpu_isa, "amx_emulated") == 0 && strstr(gk_cpu_isas(), "avx512bf16");
    if (!emulated && !strstr(gk_cpu_isas(), ctx.cpu_isa)) ctx.cpu_isa = gk_cpu_isa();
    const int64_t threads =
        fz_int(0, 15); /* large counts without a pool: plans depend on the count */
    ctx.num_threads = threads == 15   ? INT32_MAX
                      : threads == 14 ? 4097
                                      : (int32_t)(threads > 8 || threads == 0 ? 1 : threads);
    if (threads <= 8 && threads >= 2) ctx.parallel_for = fz_parallel_for;
    return ctx;
}

FZ_UNUSED static gk_dtype fz_dtype(void) {
    static const gk_dtype dtypes[] = {GK_F32, GK_BF16, GK_F16, GK_F64};
    return dtypes[fz_int(0, 3)];
}
FZ_UNUSED static gk_dtype fz_stats(gk_dtype d) { return d == GK_F64 ? GK_F64 : GK_F32; }

/* ---- one call -------------------------------------------------------------------------------- */
/* Sets one field of one tensor to an invalid value. Tensors from index `optional` on may have NULL
 * data, so that is not used for them. */
FZ_UNUSED static bool fz_corrupt(gk_tensor *const *t, int n, int optional) {
    const int64_t kind = fz_int(0, 39);
    if (kind < 32) return false;
    const int i = (int)fz_int(0, n - 1);
    gk_tensor *x = t[i];
    const int d = (int)fz_int(0, 7);
    if (!x) return false;
    const bool in_use = x->ndim > 0;
    switch (kind) {
    case 32: x->ndim = -1 - d; return true;
    case 33: x->ndim = GK_MAX_DIMS + 1 + d; return true;
    case 34: x->dtype = (gk_dtype)(64 + d); return true;
    case 35: return in_use && (x->shape[d % x->ndim] = -1 - d, true);
    case 36: return in_use && (x->shape[d % x->ndim] = INT64_C(1) << (49 + d), true);
    case 37: return in_use && (x->stride[d % x->ndim] = INT64_MIN + d, true);
    case 38: return in_use && (x->stride[d % x->ndim] = INT64_MAX - d, true);
    default: return i < optional && gk_numel(x) > 0 && (x->data = NULL, true);
    }
}

typedef size_t (*fz_bytes_fn)(const gk_context *, const void *);
typedef gk_status (*fz_call_fn)(const gk_context *, const void *);

/* Calls with a workspace of exactly the requested bytes. Sometimes it is NULL, misaligned or too
 * small, and then the call must be refused. */
static gk_status fz_call(const char *op, const gk_context *ctx, const void *args,
                         fz_bytes_fn bytes_of, fz_call_fn call, void **workspace,
                         size_t *workspace_bytes, bool wrong) {
    const size_t bytes = bytes_of ? bytes_of(ctx, args) : 0;
    const int64_t kind = bytes ? fz_int(0, 19) : 0;
    void *block = NULL;
    FZ_REQUIRE(bytes < (size_t)1 << 31, "%s asks for %zu bytes of workspace", op, bytes);
    if (bytes && posix_memalign(&block, 64, bytes) != 0) abort();
    if (bytes) memset(block, 0xff, bytes);
    if (workspace) {
        *workspace = kind == 17 ? NULL : kind == 18 ? (char *)block + 4 : block;
        *workspace_bytes = kind == 19 ? bytes - 1 : bytes;
    }
    fz_remember();
    const gk_status status = call(ctx, args);
    fz_held(op, status);
    free(block);
    FZ_REQUIRE(!wrong || status != GK_OK, "%s took a call with a wrong field", op);
    FZ_REQUIRE(kind < 17 || wrong || status != GK_OK, "%s took a wrong workspace", op);
    return kind >= 17 && status == GK_ERR_WORKSPACE ? GK_ERR_WORKSPACE : status;
}

/* Requires the same status as the call in float64. Returns false if there is nothing to compare. */
FZ_UNUSED static bool fz_agree(const char *op, gk_status got, gk_status wide, const char *text) {
    if (got == GK_ERR_WORKSPACE) return false;
    FZ_REQUIRE(got == wide, "%s: %s (%s), in float64 %s", op, gk_status_name(got), text,
               gk_status_name(wide));
    return got == GK_OK;
}

/* ---- comparison ------------------------------------------------------------------------------ */
FZ_UNUSED static double fz_unit(gk_dtype d) {
    return d == GK_BF16 ? 0x1p-8 : d == GK_F16 ? 0x1p-11 : d == GK_F64 ? 0x1p-53 : 0x1p-24;
}
/* An error bound: 4 unit roundoffs of a 16-bit dtype, plus `roundings` unit roundoffs of the
 * accumulator. */
FZ_UNUSED static double fz_loss(gk_dtype d, double roundings) {
    const double u = d == GK_F64 ? 0x1p-53 : 0x1p-24;
    return (d == GK_BF16 || d == GK_F16 ? 4 * fz_unit(d) : 0) + roundings * u;
}
FZ_UNUSED static void fz_close(const char *name, const gk_tensor *got, const gk_tensor *exact,
                               double bound) {
    for (int64_t i = 0; i < gk_numel(got); ++i) {
        const double x = fz_get(got, i), y = fz_get(exact, i);
        if (x == y || (isnan(x) && isnan(y))) continue;
        FZ_REQUIRE(fabs(x - y) <=
                       bound + fz_unit(got->dtype) * fabs(y) + 0x1p-24 * (got->dtype == GK_F16),
                   "%s[%lld of %lld] %s is %.9g, expected %.9g +- %.3g", name, (long long)i,
                   (long long)gk_numel(got), gk_dtype_name(got->dtype), x, y, bound);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
