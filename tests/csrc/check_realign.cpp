/* check_realign: csrc/cuda/gemm/realign.cuh on the host: random matrices through the functions that the kernel is made of, a
 * chunk after the other. Every element of the copy must be the right one, and every aligned read of 16 bytes must lie between
 * the first and the last element of its batch entry. Exits with 1 on a failure. */
#include "check_model.h"
#include "cuda/gemm/realign.cuh"

#include <stdlib.h>

static void check_divisors() {
    for (int i = 0; i < 200000; ++i) {
        const uint32_t by = i < 3000 ? i + 1 : (uint32_t)(1 + below((int64_t)1 << (1 + below(31))));
        const uint32_t last = INT32_MAX - INT32_MAX % by, numbers[] = {0, by - 1, by, last, last - 1, INT32_MAX};
        const Divisor d = divisor_of(by);
        for (uint32_t n : numbers)
            if (n <= INT32_MAX) check(d.into(n) == n / by, "division", n, by);
        const uint32_t n = (uint32_t)below(INT32_MAX);
        check(d.into(n) == n / by, "division", n, by);
    }
}

alignas(16) static uint16_t memory[1 << 20];

/* The chunk as a thread of the kernel makes it. */
static void copy_chunk(const RealignMatrix &x, uint32_t i, uint16_t *to) {
    const RealignPlace at = realign_place(x, i);
    const int skew = (int)((uintptr_t)at.row / 2 % REALIGN_EACH);
    if (!realign_whole(x, at, skew)) {
        for (int e = 0; e < REALIGN_EACH; ++e) to[e] = at.col + e < x.inner ? at.row[(at.col + e) * x.inner_stride] : 0;
        return;
    }
    const uint16_t *from = at.row + at.col - skew, *end = from + (skew ? 16 : 8);
    const uint16_t *one = x.from + realign_entry(x, i / x.chunks.by / x.outer.by); /* the ends of its entry */
    const uint16_t *other = one + ((int64_t)x.outer.by - 1) * x.outer_stride;
    check(x.inner_stride == 1 && (uintptr_t)from % 16 == 0, "an aligned read of dense rows", at.col, skew);
    check(from >= (one < other ? one : other) && end <= (one < other ? other : one) + x.inner,
          "a read within the entry", at.col, skew);
    uint32_t words[8] = {};
    memcpy(words, from, (size_t)(end - from) * 2);
    realign_shift(words, skew), realign_cut(words, x.inner - at.col);
    memcpy(to, words, 16);
}

static void check_matrix() {
    const int64_t inner = 1 + below(below(2) ? 40 : 150), outer = 1 + below(9);
    const int64_t dense = below(3) ? 1 : below(4) - 1, outer_stride = (below(4) ? inner * 3 : 0) + below(20);
    const int ndim = (int)below(4);
    int64_t shape[4], stride[4], origin = 400000 + below(16), entries = 1, copied[4];
    for (int d = 0; d < ndim; ++d) {
        shape[d] = 1 + below(4), stride[d] = below(3) ? below(9000) - 4500 : 0;
        copied[d] = stride[d], entries *= stride[d] ? shape[d] : 1;
    }
    RealignMatrix x;
    const bool good = realign_plan(memory + origin, inner, outer, dense, outer_stride, ndim, shape, copied, &x);
    const int64_t ld = gk_round_up(inner, 8);
    check(good && realign_bytes(x) == entries * outer * ld * 2, "bytes", realign_bytes(x), entries * outer * ld * 2);
    check(x.turned == (dense != 1 && outer_stride == 1 ? 2 : 0) && x.inner == inner, "turned", dense, x.turned);
    uint16_t *copy = (uint16_t *)malloc((size_t)realign_bytes(x));
    for (uint32_t i = 0; i < x.total; ++i) copy_chunk(x, i, copy + i * 8);
    int64_t at[4] = {};
    for (bool more = true; more;) { /* every entry of the batch, repeated ones too */
        const uint16_t *from = memory + origin, *to = copy;
        for (int d = 0; d < ndim; ++d) from += at[d] * stride[d], to += at[d] * copied[d];
        for (int64_t r = 0; r < outer; ++r)
            for (int64_t c = 0; c < ld; ++c)
                check(to[r * ld + c] == (c < inner ? from[r * outer_stride + c * dense] : 0), "element", r, c);
        more = false;
        for (int d = 0; d < ndim && !more; ++d) more = ++at[d] < shape[d], at[d] = more ? at[d] : 0;
    }
    free(copy);
}

/* Elements of 32 bits: as pairs of 16 where rows are dense, else for the tiles of the other kernel, which are read here as
 * it reads them: an element at a time, from its batch entry on. */
static void check_matrix_32() {
    const uint32_t *words = (const uint32_t *)memory;
    const int64_t inner = 1 + below(below(2) ? 40 : 150), outer = 1 + below(9);
    const int64_t step = below(2) ? 1 : below(40) - 20, outer_stride = below(4) ? inner * 3 + below(20) : 1;
    const int ndim = (int)below(4);
    int64_t shape[4], stride[4], origin = 200000 + below(8), entries = 1, copied[4];
    for (int d = 0; d < ndim; ++d) {
        shape[d] = 1 + below(4), stride[d] = below(3) ? below(9000) - 4500 : 0;
        copied[d] = stride[d], entries *= stride[d] ? shape[d] : 1;
    }
    RealignMatrix x;
    const bool good = realign_plan_32(words + origin, inner, outer, step, outer_stride, ndim, shape, copied, &x);
    const int64_t ld = gk_round_up(inner, 4);
    check(good && realign_bytes(x) == entries * outer * ld * 4, "bytes", realign_bytes(x), entries * outer * ld * 4);
    check(x.turned == (step != 1 ? 4 : 0) && x.chunks.by == ld / 4 && x.inner == 2 * inner, "turned", step, x.turned);
    uint32_t *copy = (uint32_t *)malloc((size_t)realign_bytes(x));
    for (uint32_t i = 0; !x.turned && i < x.total; ++i) copy_chunk(x, i, (uint16_t *)copy + i * 8);
    for (uint32_t e = 0; x.turned && e < x.total / x.chunks.by / x.outer.by; ++e)
        for (int64_t r = 0; r < outer; ++r)
            for (int64_t c = 0; c < ld; ++c) {
                const uint32_t *from = (const uint32_t *)x.from + realign_entry(x, e);
                copy[(e * outer + r) * ld + c] = c < inner ? from[c * x.inner_stride + r * x.outer_stride] : 0;
            }
    int64_t at[4] = {};
    for (bool more = true; more;) {
        const uint32_t *from = words + origin, *to = copy;
        for (int d = 0; d < ndim; ++d) from += at[d] * stride[d], to += at[d] * copied[d];
        for (int64_t r = 0; r < outer; ++r)
            for (int64_t c = 0; c < ld; ++c)
                check(to[r * ld + c] == (c < inner ? from[r * outer_stride + c * step] : 0), "word", r, c);
        more = false;
        for (int d = 0; d < ndim && !more; ++d) more = ++at[d] < shape[d], at[d] = more ? at[d] : 0;
    }
    free(copy);
}

static void check_refusals() {
    RealignMatrix x;
    int64_t shape = 1 << 20, stride = 7;
    check(!realign_plan(memory, 1 << 20, 1 << 20, 1, 1 << 20, 1, &shape, &stride, &x), "too many chunks", 0, 0);
    check(!realign_plan(memory, 0, 5, 1, 1, 0, NULL, NULL, &x), "nothing to copy", 0, 0);
    check(realign_plan(memory, 65537, 65536, 1, 65537, 0, NULL, NULL, &x) && x.total == 8193u * 65536, "large", 0, 0);
}

int main() {
    for (size_t i = 0; i < sizeof memory / 2; ++i) memory[i] = (uint16_t)(1 + i * 40503u % 65535);
    check_divisors();
    for (int i = 0; i < 3000; ++i) check_matrix(), check_matrix_32();
    check_refusals();
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
