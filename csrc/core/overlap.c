/* SPDX-License-Identifier: BSD-3-Clause */
/* overlap.c: whether two tensors share memory.
 *
 * Both lie on lattices of byte offsets; the question is whether
 *   sum_i step_i * d_i = y - x   has a solution with low_i <= d_i <= high_i.
 * One term per distinct stride (of two views of one tensor all are shared), largest first: what is
 * left after a term must be within reach of the rest, which leaves two or three candidates per
 * term. */
#include "io.h"
#include "internal.h"

typedef struct term {
    int64_t step, low, high;
} term;

typedef struct lattice {
    term terms[2 * GK_MAX_DIMS + 1];
    /* reach of the terms from i on */
    int64_t least[2 * GK_MAX_DIMS + 2], most[2 * GK_MAX_DIMS + 2];
    int count;
    int64_t budget; /* candidates; strides that need more are taken for an overlap */
} lattice;

static void add(lattice *l, int64_t step, int64_t low, int64_t high) {
    if (step < 0) {
        const int64_t was_low = low;
        step = -step;
        low = -high;
        high = -was_low;
    }
    if (step == 0 || low == high) return; /* all low == high terms are 0 .. 0 */
    int i = 0;
    while (i < l->count && l->terms[i].step > step) ++i;
    if (i < l->count && l->terms[i].step == step) {
        l->terms[i].low += low;
        l->terms[i].high += high;
        return;
    }
    memmove(&l->terms[i + 1], &l->terms[i], (size_t)(l->count - i) * sizeof(term));
    l->terms[i] = (term){step, low, high};
    ++l->count;
}

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static bool hits(lattice *l, int i, int64_t rest) {
    if (rest < l->least[i] || rest > l->most[i]) return false;
    if (i == l->count || --l->budget < 0) return true;
    const term t = l->terms[i];
    const int64_t first = gk_max_i64(t.low, -floor_div(l->most[i + 1] - rest, t.step));
    const int64_t last = gk_min_i64(t.high, floor_div(rest - l->least[i + 1], t.step));
    for (int64_t d = first; d <= last; ++d)
        if (hits(l, i + 1, rest - d * t.step)) return true;
    return false;
}

static bool overlap(const gk_tensor *x, const gk_tensor *y) {
    const int64_t bytes_x = (int64_t)gk_dtype_bytes(x->dtype),
                  bytes_y = (int64_t)gk_dtype_bytes(y->dtype);
    lattice l = {.budget = 1 << 20};
    for (int d = 0; d < x->ndim; ++d) add(&l, x->stride[d] * bytes_x, 0, x->shape[d] - 1);
    for (int d = 0; d < y->ndim; ++d) add(&l, y->stride[d] * bytes_y, 1 - y->shape[d], 0);
    add(&l, 1, 1 - bytes_y, bytes_x - 1);
    l.least[l.count] = l.most[l.count] = 0;
    for (int i = l.count - 1; i >= 0; --i) {
        l.least[i] = l.least[i + 1] + l.terms[i].step * l.terms[i].low;
        l.most[i] = l.most[i + 1] + l.terms[i].step * l.terms[i].high;
    }
    return hits(&l, 0, (const char *)y->data - (const char *)x->data);
}

/* The bytes from the first element to behind the last. */
typedef struct range {
    uintptr_t begin, end;
} range;

static range range_of(const gk_tensor *t) {
    int64_t below = 0, above = 1;
    for (int d = 0; d < t->ndim; ++d)
        *(t->stride[d] < 0 ? &below : &above) += t->stride[d] * (t->shape[d] - 1);
    const int64_t bytes = (int64_t)gk_dtype_bytes(t->dtype);
    return (range){(uintptr_t)t->data + (uintptr_t)(below * bytes),
                   (uintptr_t)t->data + (uintptr_t)(above * bytes)};
}

bool gk_shares_memory(const gk_tensor *x, const gk_tensor *y) {
    if (gk_numel(x) == 0 || gk_numel(y) == 0) return false;
    const range a = range_of(x), b = range_of(y); /* tells nearly all tensors apart */
    return a.begin < b.end && b.begin < a.end && overlap(x, y);
}
