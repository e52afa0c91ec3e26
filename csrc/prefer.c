/* prefer.c: the tuning key of a gemm call, its text, and the table from keys to preferred instances.
 *
 * The table is open addressing in an array of 64-byte slots, half of them empty. A slot is filled once, key first, and
 * `filled` published behind it; after that only its instance changes, by one atomic store, NULL for a forgotten key.
 * An array that gets too full is copied to one of twice the size. Readers may still walk the old one, so it is kept: all
 * outgrown arrays together are no larger than the one in use. Writers exclude each other. */
#include "prefer.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- the key of a call -------------------------------------------------------------------------- */
uint64_t gk_name_hash(const char *name) {
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (; *name; ++name) h = (h ^ (uint8_t)*name) * UINT64_C(0x100000001b3);
    return h;
}

/* A stride along a dimension of size 1 says nothing. */
static uint8_t layout_of(const gk_tensor *t) {
    const int d = t->ndim;
    if (t->stride[d - 1] == 1 || t->shape[d - 1] == 1) return 'N';
    return t->stride[d - 2] == 1 || t->shape[d - 2] == 1 ? 'T' : 'S';
}

static bool is_aligned(const gk_tensor *t, uint8_t layout) {
    const int outer = layout == 'N' ? t->ndim - 2 : t->ndim - 1;
    bool good = layout != 'S' && (uintptr_t)t->data % 16 == 0;
    good = good && (t->shape[outer] == 1 || gk_whole_chunks(t->dtype, t->stride[outer]));
    for (int d = 0; d < t->ndim - 2; ++d) good = good && (t->shape[d] == 1 || gk_whole_chunks(t->dtype, t->stride[d]));
    return good;
}

/* Whether all batch dimensions are rows of one matrix: b does not change along them, a walks them in one stride. */
static bool batch_is_rows(const gk_gemm_args *g, int64_t batch) {
    const gk_tensor *a = &g->a, *b = &g->b;
    for (int d = 0; d < b->ndim - 2; ++d)
        if (b->shape[d] != 1 && b->stride[d] != 0) return false;
    int64_t rows = a->shape[a->ndim - 2], stride = a->stride[a->ndim - 2];
    const int64_t all = rows * batch;
    for (int d = a->ndim - 3; d >= 0; --d) {
        if (a->shape[d] == 1) continue;
        if (rows == 1) stride = a->stride[d];
        if (a->stride[d] != rows * stride) return false;
        rows *= a->shape[d];
    }
    return rows == all; /* else a is broadcast */
}

void gk_gemm_key_of(uint64_t device, const gk_gemm_args *g, gk_gemm_key *key) {
    const int nd = g->out.ndim;
    memset(key, 0, sizeof *key);
    key->device = device;
    key->m = g->out.shape[nd - 2], key->n = g->out.shape[nd - 1], key->k = g->a.shape[g->a.ndim - 1];
    key->batch = 1;
    for (int d = 0; d < nd - 2; ++d) key->batch *= g->out.shape[d];
    if (key->batch != 1 && batch_is_rows(g, key->batch)) key->m *= key->batch, key->batch = 1;
    key->dtype = (uint8_t)g->a.dtype, key->out_dtype = (uint8_t)g->out.dtype;
    key->precision = g->a.dtype == GK_F32 && g->fp32_precision == GK_TF32 ? GK_TF32 : GK_IEEE;
    key->activation = (uint8_t)g->activation;
    key->a = layout_of(&g->a), key->b = layout_of(&g->b);
    if (is_aligned(&g->a, key->a)) key->aligned |= GK_ALIGNED_A;
    if (is_aligned(&g->b, key->b)) key->aligned |= GK_ALIGNED_B;
    if (is_aligned(&g->out, 'N')) key->aligned |= GK_ALIGNED_OUT;
    if (g->c && g->beta != 0) key->extras |= GK_READS_C;
    if (g->preact) key->extras |= GK_WRITES_PREACT;
}

/* ---- its text ----------------------------------------------------------------------------------- */
typedef struct named {
    int value;
    const char *name;
} named;
static const named activations[] = {{GK_ACT_NONE, "none"},
                                    {GK_ACT_RELU, "relu"},
                                    {GK_ACT_GELU, "gelu"},
                                    {GK_ACT_GELU_TANH, "gelu_tanh"},
                                    {GK_ACT_SILU, "silu"}};
static const named precisions[] = {{GK_IEEE, "ieee"}, {GK_TF32, "tf32"}};

static const char *name_of(int value, const named *names, int count) {
    for (int i = 0; i < count; ++i)
        if (names[i].value == value) return names[i].name;
    return "unknown";
}
#define NAME_OF(value, names) name_of(value, names, (int)(sizeof(names) / sizeof(names)[0]))

void gk_gemm_key_write(const gk_gemm_key *key, char text[GK_KEY_TEXT_BYTES]) {
    snprintf(text, GK_KEY_TEXT_BYTES,
             "%" PRId64 "x%" PRId64 "x%" PRId64 ":%c%c batch=%" PRId64
             " dtype=%s out=%s precision=%s activation=%s c=%d preact=%d aligned=%c%c%c",
             key->m, key->n, key->k, key->a, key->b, key->batch, gk_dtype_name((gk_dtype)key->dtype),
             gk_dtype_name((gk_dtype)key->out_dtype), NAME_OF(key->precision, precisions),
             NAME_OF(key->activation, activations), (key->extras & GK_READS_C) != 0,
             (key->extras & GK_WRITES_PREACT) != 0, key->aligned & GK_ALIGNED_A ? 'a' : '-',
             key->aligned & GK_ALIGNED_B ? 'b' : '-', key->aligned & GK_ALIGNED_OUT ? 'o' : '-');
}

static bool find_name(const char *name, const named *names, int count, uint8_t *found) {
    for (int i = 0; i < count; ++i)
        if (strcmp(name, names[i].name) == 0) {
            *found = (uint8_t)names[i].value;
            return true;
        }
    return false;
}
static bool find_float(const char *name, uint8_t *found) {
    const gk_type *type = gk_type_named(name);
    *found = (uint8_t)type->dtype;
    return type->kind == GK_KIND_FLOAT;
}
#define FIND_NAME(name, names, found) find_name(name, names, (int)(sizeof(names) / sizeof(names)[0]), found)

gk_status gk_gemm_key_read(const char *text, uint64_t device, gk_gemm_key *key) {
    char a, b, dtype[16], out[16], precision[16], activation[16], aligned[4], again[GK_KEY_TEXT_BYTES];
    int c, preact;
    memset(key, 0, sizeof *key);
    key->device = device;
    bool good = sscanf(text,
                       "%19" SCNd64 "x%19" SCNd64 "x%19" SCNd64 ":%c%c batch=%19" SCNd64
                       " dtype=%15s out=%15s precision=%15s activation=%15s c=%1d preact=%1d aligned=%3s",
                       &key->m, &key->n, &key->k, &a, &b, &key->batch, dtype, out, precision, activation, &c, &preact,
                       aligned) == 13;
    good = good && find_float(dtype, &key->dtype) && find_float(out, &key->out_dtype) &&
           FIND_NAME(precision, precisions, &key->precision) && FIND_NAME(activation, activations, &key->activation);
    if (good) {
        key->a = (uint8_t)a, key->b = (uint8_t)b;
        key->extras = (uint8_t)((c ? GK_READS_C : 0) | (preact ? GK_WRITES_PREACT : 0));
        for (const char *x = aligned; *x; ++x)
            key->aligned |= *x == 'a' ? GK_ALIGNED_A : *x == 'b' ? GK_ALIGNED_B : *x == 'o' ? GK_ALIGNED_OUT : 0;
        good = strchr("NTS", a) && strchr("NTS", b) && key->m >= 0 && key->n >= 0 && key->k >= 0 && key->batch >= 0;
        gk_gemm_key_write(key, again);
        good = good && strcmp(text, again) == 0; /* nothing before, between or behind */
    }
    if (good) return GK_OK;
    return gk_fail(GK_ERR_ARGUMENT, "'%.200s' is not a class of gemm calls as gk_gemm_class writes it", text);
}

/* ---- the table ---------------------------------------------------------------------------------- */
typedef struct slot {
    gk_gemm_key key;
    const void *row; /* atomic; NULL = forgotten */
    int64_t filled;  /* atomic; from then on the key stays as it is */
} slot;

typedef struct table {
    struct table *outgrown; /* by this one */
    size_t size, used;      /* slots, a power of two; those that are filled */
    slot slots[];
} table;

enum {
    FIRST_SIZE = 64
};

int32_t gk_num_preferred;
static table *current;
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

static size_t hash_of(const gk_gemm_key *key) {
    uint64_t words[sizeof *key / 8], h = 0;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / 8; ++i) {
        h = (h ^ words[i]) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 32;
    }
    return (size_t)h;
}

/* The key's slot, or the empty one where it would go; there always is an empty one. */
static slot *find_slot(table *t, const gk_gemm_key *key) {
    for (size_t i = hash_of(key);; ++i) {
        slot *s = &t->slots[i & (t->size - 1)];
        if (!__atomic_load_n(&s->filled, __ATOMIC_ACQUIRE) || memcmp(&s->key, key, sizeof *key) == 0) return s;
    }
}

static void fill(table *t, slot *s, const gk_gemm_key *key, const void *row) {
    s->key = *key;
    __atomic_store_n(&s->row, row, __ATOMIC_RELAXED);
    __atomic_store_n(&s->filled, 1, __ATOMIC_RELEASE);
    ++t->used;
}

/* A table with room for one more; NULL without memory. Classes that were forgotten stay behind. */
static table *with_room(table *old) {
    if (old && 2 * (old->used + 1) <= old->size) return old;
    const size_t size = old ? 2 * old->size : FIRST_SIZE;
    table *t = calloc(1, sizeof *t + size * sizeof(slot));
    if (!t) return NULL;
    t->size = size, t->outgrown = old;
    for (size_t i = 0; old && i < old->size; ++i) {
        const slot *s = &old->slots[i];
        const void *row = __atomic_load_n(&s->row, __ATOMIC_RELAXED);
        if (row) fill(t, find_slot(t, &s->key), &s->key, row);
    }
    __atomic_store_n(&current, t, __ATOMIC_RELEASE);
    return t;
}

const void *gk_preferred(const gk_gemm_key *key) {
    table *t = __atomic_load_n(&current, __ATOMIC_ACQUIRE);
    if (!t) return NULL;
    const slot *s = find_slot(t, key);
    /* an empty slot may be filled at this moment: its row counts only behind `filled` */
    return __atomic_load_n(&s->filled, __ATOMIC_ACQUIRE) && memcmp(&s->key, key, sizeof *key) == 0
               ? __atomic_load_n(&s->row, __ATOMIC_RELAXED)
               : NULL;
}

gk_status gk_prefer(const gk_gemm_key *key, const void *row) {
    gk_status status = GK_OK;
    pthread_mutex_lock(&writing);
    table *t = current;
    slot *s = t ? find_slot(t, key) : NULL;
    if (s && s->filled) {
        const bool had = s->row != NULL;
        __atomic_store_n(&s->row, row, __ATOMIC_RELAXED);
        __atomic_fetch_add(&gk_num_preferred, (row != NULL) - had, __ATOMIC_RELAXED);
    } else if (row) {
        t = with_room(t);
        if (t) {
            fill(t, find_slot(t, key), key, row);
            __atomic_fetch_add(&gk_num_preferred, 1, __ATOMIC_RELAXED);
        } else {
            status = gk_fail(GK_ERR_DEVICE, "out of memory");
        }
    }
    pthread_mutex_unlock(&writing);
    return status;
}

void gk_prefer_none(void) {
    pthread_mutex_lock(&writing);
    for (size_t i = 0; current && i < current->size; ++i)
        __atomic_store_n(&current->slots[i].row, NULL, __ATOMIC_RELAXED);
    __atomic_store_n(&gk_num_preferred, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&writing);
}
