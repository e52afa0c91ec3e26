/* SPDX-License-Identifier: BSD-3-Clause */
/* check_realign: tests csrc/cuda/product/gemm/realign.cuh and misaligned.cuh on the host, chunk
 * by chunk on random matrices. Every element must be the right one. Every aligned 16-byte read
 * of a copy must be between the first and the last element of its batch entry. When a row is
 * copied into a tile, no read may be behind the row's end. Exits with 1 on a failure. */
#include "check_model.h"
#include "cuda/product/gemm/misaligned.cuh"

#include <stdlib.h>

static void check_divisors() {
    for (int i = 0; i < 200000; ++i) {
        const uint32_t by = i < 3000 ? i + 1 : (uint32_t)(1 + below((int64_t)1 << (1 + below(31))));
        const uint32_t last = INT32_MAX - INT32_MAX % by,
                       numbers[] = {0, by - 1, by, last, last - 1, INT32_MAX};
        const Divisor d = divisor_of(by);
        for (uint32_t n : numbers)
            if (n <= INT32_MAX) check(d.into(n) == n / by, "division", n, by);
        const uint32_t n = (uint32_t)below(INT32_MAX);
        check(d.into(n) == n / by, "division", n, by);
    }
}

alignas(16) static uint16_t memory[1 << 20];

/* The chunk as a thread of the kernel computes it. */
static void copy_chunk(const RealignMatrix &x, uint32_t i, uint16_t *to) {
    const RealignPlace at = realign_place(x, i);
    const int shift = (int)((uintptr_t)at.row / 2 % REALIGN_EACH);
    if (!realign_whole(x, at, shift)) {
        for (int e = 0; e < REALIGN_EACH; ++e)
            to[e] = at.col + e < x.inner ? at.row[(at.col + e) * x.inner_stride] : 0;
        return;
    }
    const uint16_t *from = at.row + at.col - shift, *end = from + (shift ? 16 : 8);
    /* the ends of its batch entry */
    const uint16_t *one = x.from + realign_entry(x, i / x.chunks.by / x.outer.by);
    const uint16_t *other = one + ((int64_t)x.outer.by - 1) * x.outer_stride;
    check(x.inner_stride == 1 && (uintptr_t)from % 16 == 0, "an aligned read of dense rows", at.col,
          shift);
    check(from >= (one < other ? one : other) && end <= (one < other ? other : one) + x.inner,
          "a read within the entry", at.col, shift);
    uint32_t words[8] = {};
    memcpy(words, from, (size_t)(end - from) * 2);
    realign_shift(words, shift);
    realign_cut(words, x.inner - at.col);
    memcpy(to, words, 16);
}

/* A transposed copy as the other kernel makes it, block by block. Reads must be inside the
 * matrix, and only values that were read are written. */
static void copy_transposed(const RealignMatrix &x, uint32_t *to) {
    uint32_t blocks;
    const Transpose p = transpose_of(x, &blocks);
    check(x.transposed && blocks > 0 && blocks <= x.total, "blocks", blocks, x.total);
    const int inner = x.inner / 2, outer = (int)x.outer.by;
    for (uint32_t block = 0; block < blocks; ++block) {
        static uint32_t tile[REALIGN_TRANSPOSE * TRANSPOSE_LD];
        static bool there[REALIGN_TRANSPOSE * TRANSPOSE_LD];
        memset(there, 0, sizeof there);
        int cells = 0;
        const TransposeTile t = transpose_tile(p, block);
        check(t.inner > 0 && t.outer > 0 && t.inner0 + t.inner == inner &&
                  t.outer0 + t.outer == outer,
              "tile", t.inner0, t.outer0);
        for (int thread = 0; thread < REALIGN_THREADS; ++thread)
            for (int c = 0; c < TRANSPOSE_PASSES; ++c) {
                const coord at = transpose_read(thread, c), first = transpose_read(thread, 0);
                const int64_t from = transpose_from(x, t, at.row, at.col);
                check(from == transpose_from(x, t, first.row, first.col) +
                                  c * TRANSPOSE_PASS_ROWS * x.inner_stride,
                      "a pass on", from, c);
                check(at.row < REALIGN_TRANSPOSE && at.col < REALIGN_TRANSPOSE &&
                          !there[transpose_at(at.row, at.col)],
                      "read once", at.row, at.col);
                const bool has = transpose_has(t, at.row, at.col);
                check(has == (t.inner0 + at.row < inner && t.outer0 + at.col < outer),
                      "the matrix has it", at.row, at.col);
                tile[transpose_at(at.row, at.col)] = has ? ((const uint32_t *)x.from)[from] : 0;
                there[transpose_at(at.row, at.col)] = true;
                ++cells;
            }
        check(cells == REALIGN_TRANSPOSE * REALIGN_TRANSPOSE, "all of the tile", cells, block);
        for (int thread = 0; thread < REALIGN_THREADS; ++thread)
            for (int c = 0; c < TRANSPOSE_CHUNKS; ++c) {
                const coord chunk = transpose_chunk(thread, c);
                if (!transpose_has(t, chunk.col, chunk.row)) continue;
                const int64_t i = transpose_to(x, t, chunk);
                check(i >= 0 && i < x.total, "a chunk of the copy", i, x.total);
                for (int e = 0; e < 4; ++e)
                    to[i * 4 + e] = tile[transpose_at(chunk.col + e, chunk.row)];
            }
    }
}

static void check_matrix() {
    const int64_t inner = 1 + below(below(2) ? 40 : 150), outer = 1 + below(below(8) ? 9 : 150);
    const bool columns = below(4) == 0; /* stride 1 in outer */
    const int64_t dense = columns ? outer + below(20) : below(3) ? 1 : below(4) - 1;
    const int64_t outer_stride = columns ? 1 : (below(4) ? inner * 3 : 0) + below(20);
    const int ndim = (int)below(4);
    int64_t shape[4], stride[4], origin = 400000 + below(16), entries = 1, copied[4];
    for (int d = 0; d < ndim; ++d) {
        shape[d] = 1 + below(4);
        stride[d] = below(3) ? below(9000) - 4500 : 0;
        copied[d] = stride[d];
        entries *= stride[d] ? shape[d] : 1;
    }
    RealignMatrix x;
    const bool good =
        realign_plan(memory + origin, inner, outer, dense, outer_stride, ndim, shape, copied, &x);
    const int64_t ld = gk_round_up(inner, 8);
    check(good && realign_bytes(&x) == entries * outer * ld * 2, "bytes", realign_bytes(&x),
          entries * outer * ld * 2);
    check(!x.transposed && x.inner == inner, "16 bits are not transposed", dense, x.transposed);
    uint16_t *copy = (uint16_t *)malloc((size_t)realign_bytes(&x));
    memset(copy, 0xa5, (size_t)realign_bytes(&x));
    for (uint32_t i = 0; i < x.total; ++i) copy_chunk(x, i, copy + i * 8);
    int64_t at[4] = {};
    for (bool more = true; more;) { /* every entry of the batch, repeated ones too */
        const uint16_t *from = memory + origin, *to = copy;
        for (int d = 0; d < ndim; ++d) {
            from += at[d] * stride[d];
            to += at[d] * copied[d];
        }
        for (int64_t r = 0; r < outer; ++r)
            for (int64_t c = 0; c < ld; ++c)
                check(to[r * ld + c] == (c < inner ? from[r * outer_stride + c * dense] : 0),
                      "element", r, c);
        more = false;
        for (int d = 0; d < ndim && !more; ++d) {
            more = ++at[d] < shape[d];
            at[d] = more ? at[d] : 0;
        }
    }
    free(copy);
}

/* Elements of 32 bits: as pairs of 16 bits if rows are contiguous, otherwise transposed. */
static void check_matrix_32() {
    const uint32_t *words = (const uint32_t *)memory;
    const int64_t inner = 1 + below(below(2) ? 40 : 150), outer = 1 + below(below(8) ? 9 : 150);
    const int64_t step = below(2) ? 1 : below(40) - 20,
                  outer_stride = below(4) ? inner * 3 + below(20) : 1;
    const int ndim = (int)below(4);
    int64_t shape[4], stride[4], origin = 200000 + below(8), entries = 1, copied[4];
    for (int d = 0; d < ndim; ++d) {
        shape[d] = 1 + below(4);
        stride[d] = below(3) ? below(9000) - 4500 : 0;
        copied[d] = stride[d];
        entries *= stride[d] ? shape[d] : 1;
    }
    RealignMatrix x;
    const bool good =
        realign_plan_32(words + origin, inner, outer, step, outer_stride, ndim, shape, copied, &x);
    const int64_t ld = gk_round_up(inner, 4);
    check(good && realign_bytes(&x) == entries * outer * ld * 4, "bytes", realign_bytes(&x),
          entries * outer * ld * 4);
    check(x.transposed == (step != 1) && x.chunks.by == ld / 4 && x.inner == 2 * inner,
          "transposed", step, x.transposed);
    uint32_t *copy = (uint32_t *)malloc((size_t)realign_bytes(&x));
    memset(copy, 0xa5, (size_t)realign_bytes(&x));
    for (uint32_t i = 0; step == 1 && i < x.total; ++i) copy_chunk(x, i, (uint16_t *)copy + i * 8);
    if (step != 1) copy_transposed(x, copy);
    int64_t at[4] = {};
    for (bool more = true; more;) {
        const uint32_t *from = words + origin, *to = copy;
        for (int d = 0; d < ndim; ++d) {
            from += at[d] * stride[d];
            to += at[d] * copied[d];
        }
        for (int64_t r = 0; r < outer; ++r)
            for (int64_t c = 0; c < ld; ++c)
                check(to[r * ld + c] == (c < inner ? from[r * outer_stride + c * step] : 0), "word",
                      r, c);
        more = false;
        for (int d = 0; d < ndim && !more; ++d) {
            more = ++at[d] < shape[d];
            at[d] = more ? at[d] : 0;
        }
    }
    free(copy);
}

/* A row as a warp of gemm_skinny copies it into a tile, at any alignment, of any length up to
 * the tile's. */
template <int CHUNKS> struct OneRow {
    static constexpr int rows = 1, chunks = CHUNKS;
};
template <int CHUNKS> static void check_row() {
    typedef raw_rows<OneRow<CHUNKS>> Raw;
    const uint16_t *row = memory + 64 + below(4000);
    const int valid = (int)below(CHUNKS * REALIGN_EACH + 1),
              before = elements_before((uintptr_t)row);
    const char *first = (const char *)(row - before);
    check((uintptr_t)first % 16 == 0 && before >= 0 && before < REALIGN_EACH, "what lies before",
          before, valid);
    uint32_t raw[Raw::chunks * 4] = {};
    for (int c = 0; c < Raw::chunks; ++c) {
        const int bytes = raw_bytes(c, before, valid);
        check(bytes >= 0 && bytes <= 16 &&
                  (bytes == 0 || first + c * 16 + bytes <= (const char *)(row + valid)),
              "nothing behind the row", c, bytes);
        memcpy(raw + c * 4, first + c * 16, (size_t)bytes);
    }
    for (int c = 0; c < CHUNKS; ++c) {
        uint32_t words[8];
        uint16_t elements[REALIGN_EACH];
        memcpy(words, raw + c * 4, 32);
        realign_shift(words, before);
        memcpy(elements, words, 16);
        for (int e = 0; e < REALIGN_EACH; ++e) {
            const int i = c * REALIGN_EACH + e;
            check(elements[e] == (i < valid ? row[i] : 0), "element of a row", i, valid);
        }
    }
}

static void check_refusals() {
    RealignMatrix x;
    int64_t shape = 1 << 20, stride = 7;
    check(!realign_plan(memory, 1 << 20, 1 << 20, 1, 1 << 20, 1, &shape, &stride, &x),
          "too many chunks", 0, 0);
    check(!realign_plan(memory, 0, 5, 1, 1, 0, NULL, NULL, &x), "nothing to copy", 0, 0);
    check(realign_plan(memory, 65537, 65536, 1, 65537, 0, NULL, NULL, &x) &&
              x.total == 8193u * 65536,
          "large", 0, 0);
}

int main() {
    for (size_t i = 0; i < sizeof memory / 2; ++i) memory[i] = (uint16_t)(1 + i * 40503u % 65535);
    check_divisors();
    for (int i = 0; i < 3000; ++i) {
        check_matrix();
        check_matrix_32();
        check_row<4>();
        check_row<8>();
    }
    check_refusals();
    printf("%ld passed, %ld failed\n", num_passed, num_failed);
    return num_failed != 0 || num_passed == 0;
}
