/* SPDX-License-Identifier: BSD-3-Clause */
/* paged_fetch.h: prefetches the rows of a paged cache that are read next, while others are
 * computed. */
#ifndef GPUKERN_CPU_PAGED_FETCH_H
#define GPUKERN_CPU_PAGED_FETCH_H

#include "vec.h"

/* Rows of K or V. first[i] is the row of key i and the first head; the rows of the other heads
 * follow at steps of head_bytes. */
typedef struct key_rows {
    const char *const *first;
    int64_t num_keys, num_heads, head_bytes;
} key_rows;

/* Prefetches the lines of `rows` in the order of their addresses. The L2's own prefetcher then sees
 * streams and runs ahead; the few misses that a core can have in flight would not allow as much. */
typedef struct fetch {
    key_rows rows;
    int64_t row_bytes, key, head; /* the next row */
    const char *const *later;     /* rows of a later tile: their first line is prefetched, too */
    int64_t num_later;            /* at most rows.num_keys */
    const char *at, *end;         /* the rest of the current row */
    int64_t moves;                /* all ones; 0: always the same lines */
    bool near;                    /* into the L1 */
} fetch;

INLINE fetch fetch_make(key_rows rows, int64_t row_bytes, const char *const *later,
                        int64_t num_later, bool near) {
    /* the heads of a key are one long row */
    if (rows.head_bytes == row_bytes) {
        row_bytes *= rows.num_heads;
        rows.num_heads = 1;
    }
    return (fetch){rows, row_bytes, 0, 0, later, num_later, NULL, NULL, -1, near};
}

/* A fetch that asks for one cached line again and again, so that loops need not test whether there
 * is anything to fetch. */
INLINE fetch fetch_none(const char *line) {
    return (fetch){.at = line, .end = (const char *)UINTPTR_MAX};
}

/* The address of the next row; after the last row, its end. */
static __attribute__((noinline)) const char *fetch_row(fetch *f) {
    if (f->head == f->rows.num_heads) return f->end;
    const char *at = f->rows.first[f->key] + f->head * f->rows.head_bytes;
    f->end = at + f->row_bytes;
    if (f->key < f->num_later)
        __builtin_prefetch(f->later[f->key] + f->head * f->rows.head_bytes, 0, 2);
    if (++f->key == f->rows.num_keys) {
        f->key = 0;
        ++f->head;
    }
    return at;
}

/* Prefetches the next `bytes` bytes and returns the address behind them. `at` is f->at, which the
 * caller keeps in a register. */
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

/* Loads the rows of a chunk's first tile, which nothing has prefetched. Plain loads in the order of
 * addresses reach the speed of a loop that only reads; the products would ask head by head. */
INLINE void read_rows(key_rows rows, int64_t row_bytes) {
    const fetch f = fetch_make(rows, row_bytes, NULL, 0, false);
    for (int64_t h = 0; h < f.rows.num_heads; ++h)
        for (int64_t i = 0; i < rows.num_keys; ++i)
            for (int64_t at = 0; at < f.row_bytes; at += 64)
                (void)*(const volatile char *)(rows.first[i] + h * rows.head_bytes + at);
}

#endif
