/* SPDX-License-Identifier: BSD-3-Clause */
/* prefer.c: the tuning key of a gemm call, the key as text, and the table from keys to preferred
 * instances.
 *
 * gk_gemm_prefer writes the table and dispatch.c reads it. The table is an array sorted by the
 * keys' hash. New keys replace the whole array. For a key that is in the array only the instance
 * changes, by one atomic store; a forgotten key has the instance NULL. Readers take no lock. A
 * reader may still use a replaced array, so arrays are never freed: loading a file of keys makes
 * one array, and tuning makes one for each product. Writers exclude each other by a mutex. */
#include "prefer.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- the key of a call ----------------------------------------------------------------------- */
uint64_t gk_name_hash(const char *name) {
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (; *name; ++name) h = (h ^ (uint8_t)*name) * UINT64_C(0x100000001b3);
    return h;
}

/* The stride along a dimension of size 1 is ignored. */
static uint8_t layout_of(const gk_tensor *t) {
    const int d = t->ndim;
    if (t->stride[d - 1] == 1 || t->shape[d - 1] == 1) return 'N';
    return t->stride[d - 2] == 1 || t->shape[d - 2] == 1 ? 'T' : 'S';
}

static bool is_aligned(const gk_tensor *t, uint8_t layout) {
    const int outer = layout == 'N' ? t->ndim - 2 : t->ndim - 1;
    bool good = layout != 'S' && (uintptr_t)t->data % 16 == 0;
    good = good && (t->shape[outer] == 1 || gk_whole_chunks(t->dtype, t->stride[outer]));
    for (int d = 0; d < t->ndim - 2; ++d)
        good = good && (t->shape[d] == 1 || gk_whole_chunks(t->dtype, t->stride[d]));
    return good;
}

/* True if all batch dimensions are rows of one matrix: b is the same for all of them, and a
 * covers them with one stride. */
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
    return rows == all; /* unequal if a is broadcast */
}

void gk_gemm_key_of(uint64_t device, const gk_gemm_args *g, gk_gemm_key *key) {
    const int nd = g->out.ndim;
    memset(key, 0, sizeof *key);
    key->device = device;
    key->m = g->out.shape[nd - 2];
    key->n = g->out.shape[nd - 1];
    key->k = g->a.shape[g->a.ndim - 1];
    key->batch = 1;
    for (int d = 0; d < nd - 2; ++d) key->batch *= g->out.shape[d];
    if (key->batch != 1 && batch_is_rows(g, key->batch)) {
        key->m *= key->batch;
        key->batch = 1;
    }
    key->dtype = (uint8_t)g->a.dtype;
    key->out_dtype = (uint8_t)g->out.dtype;
    key->precision = g->a.dtype == GK_F32 && g->fp32_precision == GK_TF32 ? GK_TF32 : GK_IEEE;
    key->activation = (uint8_t)g->activation;
    key->a = layout_of(&g->a);
    key->b = layout_of(&g->b);
    if (is_aligned(&g->a, key->a)) key->aligned |= GK_ALIGNED_A;
    if (is_aligned(&g->b, key->b)) key->aligned |= GK_ALIGNED_B;
    if (is_aligned(&g->out, 'N')) key->aligned |= GK_ALIGNED_OUT;
    if (g->c && g->beta != 0) key->extras |= GK_READS_C;
    if (g->preact) key->extras |= GK_WRITES_PREACT;
}

/* ---- the key as text ------------------------------------------------------------------------- */
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
             key->m, key->n, key->k, key->a, key->b, key->batch,
             gk_dtype_name((gk_dtype)key->dtype), gk_dtype_name((gk_dtype)key->out_dtype),
             NAME_OF(key->precision, precisions), NAME_OF(key->activation, activations),
             (key->extras & GK_READS_C) != 0, (key->extras & GK_WRITES_PREACT) != 0,
             key->aligned & GK_ALIGNED_A ? 'a' : '-', key->aligned & GK_ALIGNED_B ? 'b' : '-',
             key->aligned & GK_ALIGNED_OUT ? 'o' : '-');
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
#define FIND_NAME(name, names, found) \
    find_name(name, names, (int)(sizeof(names) / sizeof(names)[0]), found)

gk_status gk_gemm_key_read(const char *text, uint64_t device, gk_gemm_key *key) {
    char a, b, dtype[16], out[16], precision[16], activation[16], aligned[4],
        again[GK_KEY_TEXT_BYTES];
    int c, preact;
    memset(key, 0, sizeof *key);
    key->device = device;
    bool good =
        sscanf(text,
               "%19" SCNd64 "x%19" SCNd64 "x%19" SCNd64 ":%c%c batch=%19" SCNd64
               " dtype=%15s out=%15s precision=%15s activation=%15s c=%1d preact=%1d aligned=%3s",
               &key->m, &key->n, &key->k, &a, &b, &key->batch, dtype, out, precision, activation,
               &c, &preact, aligned) == 13;
    good = good && find_float(dtype, &key->dtype) && find_float(out, &key->out_dtype) &&
           FIND_NAME(precision, precisions, &key->precision) &&
           FIND_NAME(activation, activations, &key->activation);
    if (good) {
        key->a = (uint8_t)a;
        key->b = (uint8_t)b;
        key->extras = (uint8_t)((c ? GK_READS_C : 0) | (preact ? GK_WRITES_PREACT : 0));
        for (const char *x = aligned; *x; ++x)
            key->aligned |= *x == 'a'   ? GK_ALIGNED_A
                            : *x == 'b' ? GK_ALIGNED_B
                            : *x == 'o' ? GK_ALIGNED_OUT
                                        : 0;
        good = strchr("NTS", a) && strchr("NTS", b) && key->m >= 0 && key->n >= 0 && key->k >= 0 &&
               key->batch >= 0;
        gk_gemm_key_write(key, again);
        good = good && strcmp(text, again) == 0; /* refuses extra characters anywhere */
    }
    if (good) return GK_OK;
    return gk_fail(GK_ERR_ARGUMENT,
                   "'%.200s' is not a class of gemm calls as gk_gemm_class writes it", text);
}

/* ---- the preferred instances ----------------------------------------------------------------- */
typedef struct entry {
    uint64_t hash; /* of the key */
    gk_gemm_key key;
    const void *instance; /* atomic; NULL = forgotten */
} entry;

/* Sorted by hash. Its keys never change. */
typedef struct entries {
    struct entries *replaced; /* the array that this one replaced; a reader may still use it */
    size_t count;
    entry all[];
} entries;

int32_t gk_num_preferred;
static entries *current; /* atomic */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static entry *
    /* keys that `current` does not have yet; the next call that looks a key up merges them all
     * at once */
    added;
static size_t num_added, room_for_added;
static int32_t any_added; /* atomic */

static uint64_t hash_of(const gk_gemm_key *key) {
    uint64_t words[sizeof *key / 8], h = 0;
    memcpy(words, key, sizeof words);
    for (size_t i = 0; i < sizeof words / 8; ++i) {
        h = (h ^ words[i]) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 32;
    }
    return h;
}

static int compare(const void *x, const void *y) {
    const uint64_t a = ((const entry *)x)->hash, b = ((const entry *)y)->hash;
    return (a > b) - (a < b);
}

static entry *find(entries *in, const gk_gemm_key *key) {
    if (!in) return NULL;
    const uint64_t hash = hash_of(key);
    size_t first = 0;
    /* binary search for the first entry whose hash is not less */
    for (size_t left = in->count; left > 0;) {
        const size_t half = left / 2;
        const bool less = in->all[first + half].hash < hash;
        first = less ? first + half + 1 : first;
        left = less ? left - half - 1 : half;
    }
    for (; first < in->count && in->all[first].hash == hash; ++first)
        if (memcmp(&in->all[first].key, key, sizeof *key) == 0) return &in->all[first];
    return NULL;
}

/* Merges `added` into a new array. If there is no memory, the keys stay in `added` until the
 * next call. */
static void sort_in(void) {
    pthread_mutex_lock(&writing);
    const size_t before = current ? current->count : 0;
    entries *const all =
        num_added ? malloc(sizeof *all + (before + num_added) * sizeof(entry)) : NULL;
    if (all) {
        for (size_t i = 0; i < before; ++i) {
            all->all[i].hash = current->all[i].hash;
            all->all[i].key = current->all[i].key;
            all->all[i].instance = __atomic_load_n(&current->all[i].instance, __ATOMIC_RELAXED);
        }
        memcpy(all->all + before, added, num_added * sizeof(entry));
        all->count = before + num_added;
        all->replaced = current;
        qsort(all->all, all->count, sizeof(entry), compare);
        __atomic_store_n(&current, all, __ATOMIC_RELEASE);
        num_added = 0;
        __atomic_store_n(&any_added, 0, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&writing);
}

const void *gk_preferred(const gk_gemm_key *key) {
    if (__atomic_load_n(&any_added, __ATOMIC_ACQUIRE)) sort_in();
    const entry *found = find(__atomic_load_n(&current, __ATOMIC_ACQUIRE), key);
    return found ? __atomic_load_n(&found->instance, __ATOMIC_RELAXED) : NULL;
}

/* Appends a new key to `added`. NULL if there is no memory. */
static entry *add(const gk_gemm_key *key) {
    if (num_added == room_for_added) {
        const size_t room = room_for_added ? 2 * room_for_added : 16;
        entry *const larger = realloc(added, room * sizeof(entry));
        if (!larger) return NULL;
        added = larger;
        room_for_added = room;
    }
    added[num_added] = (entry){hash_of(key), *key, NULL};
    return &added[num_added++];
}

gk_status gk_prefer(const gk_gemm_key *key, const void *instance) {
    gk_status status = GK_OK;
    pthread_mutex_lock(&writing);
    entry *found = find(current, key);
    for (size_t i = 0; !found && i < num_added; ++i)
        if (memcmp(&added[i].key, key, sizeof *key) == 0) found = &added[i];
    if (!found && instance) {
        found = add(key);
        if (found)
            __atomic_store_n(&any_added, 1, __ATOMIC_RELAXED);
        else
            status = gk_fail(GK_ERR_DEVICE, "out of memory");
    }
    if (found) {
        __atomic_fetch_add(&gk_num_preferred, (instance != NULL) - (found->instance != NULL),
                           __ATOMIC_RELAXED);
        __atomic_store_n(&found->instance, instance, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&writing);
    return status;
}

void gk_prefer_none(void) {
    pthread_mutex_lock(&writing);
    for (size_t i = 0; current && i < current->count; ++i)
        __atomic_store_n(&current->all[i].instance, NULL, __ATOMIC_RELAXED);
    num_added = 0;
    __atomic_store_n(&any_added, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&gk_num_preferred, 0, __ATOMIC_RELAXED);
    pthread_mutex_unlock(&writing);
}
