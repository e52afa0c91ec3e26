/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_fetch: rows of a paged cache that are read next, fetched while others are computed. */
#ifndef GPUKERN_CPU_PAGED_FETCH_H
#define GPUKERN_CPU_PAGED_FETCH_H

#include "vec.h"

/* Rows of some keys, K or V: of the first head, the others' lie head_bytes behind each other. */
typedef struct key_rows {
    const char *const *first;
    int64_t num_keys, num_heads, head_bytes;
} key_rows;

/* The rows of the keys to come, fetched line by line in the order of their addresses: then the
 * prefetcher of the L2 sees streams and runs ahead, which the few misses that a core can wait for
 * at once would not allow. */
typedef struct fetch {
    key_rows rows;
    int64_t row_bytes, key, head; /* the row that comes next */
    const char *const *touched;   /* rows of a later unit, as many or fewer */
    int64_t num_touched;
    const char *at, *end; /* what is left of the row under way */
    int64_t moves;        /* all ones; 0: always the same lines */
    bool near;            /* into the L1 */
} fetch;

INLINE fetch fetch_make(key_rows rows, int64_t row_bytes, const char *const *touched,
                        int64_t num_touched, bool near) {
    /* the heads of a key are one long row */
    if (rows.head_bytes == row_bytes) {
        row_bytes *= rows.num_heads;
        rows.num_heads = 1;
    }
    return (fetch){rows, row_bytes, 0, 0, touched, num_touched, NULL, NULL, -1, near};
}

/* Asks for a line that is there: the loops that fetch need not ask whether they shall. */
INLINE fetch fetch_none(const char *line) {
    return (fetch){.at = line, .end = (const char *)UINTPTR_MAX};
}

/* The beginning of the row that comes next; after the last one, its end. */
static __attribute__((noinline)) const char *fetch_row(fetch *f) {
    if (f->head == f->rows.num_heads) return f->end;
    const char *at = f->rows.first[f->key] + f->head * f->rows.head_bytes;
    f->end = at + f->row_bytes;
    if (f->key < f->num_touched)
        __builtin_prefetch(f->touched[f->key] + f->head * f->rows.head_bytes, 0, 2);
    if (++f->key == f->rows.num_keys) {
        f->key = 0;
        ++f->head;
    }
    return at;
}

/* The lines of some bytes more; at is f->at in a register. The products ask with each step that
 * takes a line or more, or for some keys at once where a step takes less. */
INLINE const char *fetch_bytes(fetch *f, const char *at, int64_t bytes) {
    if (at >= f->end) at = fetch_row(f);
#pragma GCC unroll 4
    for (int64_t i = 0; i < bytes; i += 64)
        if (f->near)
            __builtin_prefetch(at + i, 0, 3);
        else
            __builtin_prefetch(at + i, 0, 2);
    return at + (bytes & f->moves);
}

/* The rows that a chunk begins with, which nobody fetched: plain loads in the order of addresses
 * have the machine's prefetcher bring them at the speed of a loop that only reads; the products
 * would ask for them head by head. */
INLINE void read_rows(key_rows rows, int64_t row_bytes) {
    const fetch f = fetch_make(rows, row_bytes, NULL, 0, false);
    for (int64_t h = 0; h < f.rows.num_heads; ++h)
        for (int64_t i = 0; i < rows.num_keys; ++i)
            for (int64_t at = 0; at < f.row_bytes; at += 64)
                (void)*(const volatile char *)(rows.first[i] + h * rows.head_bytes + at);
}

#endif
