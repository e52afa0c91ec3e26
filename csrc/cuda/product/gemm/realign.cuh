/* SPDX-License-Identifier: BSD-3-Clause */
/* realign.cuh: an aligned copy, in a call's workspace, of a matrix of 16-bit elements that cannot
 * be read 16 bytes at a time where it lies. Dense rows of float32 are rows of twice as many.
 * Float32 whose inner is not dense is transposed, in tiles.
 *   from [entries][outer][inner], any strides   ->   to [entries][outer][ld], ld = inner rounded up to 8, zeros from inner on
 * inner is the dimension that is dense, or whose stride is smaller. An entry that the batch repeats
 * is copied once. Plain C++ but for the kernel (gemm_realign_sm90a.cu), so that the tests walk the
 * same functions. */
#ifndef GPUKERN_CUDA_GEMM_REALIGN_CUH
#define GPUKERN_CUDA_GEMM_REALIGN_CUH

#include "../../kernels.h"
#include "../../layout/layout.cuh"
#include "../../tile/divisor.cuh"
#include "tiles.h"

/* batch dimensions; elements of a 16-byte chunk */
constexpr int REALIGN_DIMS = GK_MAX_DIMS - 2, REALIGN_EACH = 8;

struct RealignMatrix {
    const uint16_t *from;
    void *to;
    int64_t inner_stride, outer_stride; /* of `from` */
    int64_t begin, end; /* of an entry, from its first row's first element on; 0, 0: not dense */
    int32_t inner, ndim;
    uint32_t total;  /* chunks of the copy */
    bool transposed; /* elements of 32 bits, as strides count them (inner: 16 bits) */
    Divisor chunks, outer,
        batch[REALIGN_DIMS]; /* sizes; of batch dimensions those that `from` walks */
    int64_t stride[REALIGN_DIMS];
};

/* ---- where a chunk comes from ---------------------------------------------------------------- */
struct RealignPlace {
    const uint16_t *row; /* its first element */
    int64_t at;          /* the chunk's first element, in the entry */
    int col;             /* and in the row */
};

/* Where a batch entry begins. */
GK_HD inline int64_t realign_entry(const RealignMatrix &x, uint32_t entry) {
    int64_t at = 0;
    for (int d = x.ndim - 1; d > 0; --d) {
        const uint32_t rest = x.batch[d].into(entry);
        at += (int64_t)(entry - rest * x.batch[d].by) * x.stride[d];
        entry = rest;
    }
    return x.ndim > 0 ? at + (int64_t)entry * x.stride[0] : at;
}

/* BATCHED: there may be more than one entry. */
template <bool BATCHED = true>
GK_HD inline RealignPlace realign_place(const RealignMatrix &x, uint32_t chunk) {
    const uint32_t row = x.chunks.into(chunk), entry = BATCHED ? x.outer.into(row) : 0;
    const int64_t at = (int64_t)(row - entry * x.outer.by) * x.outer_stride;
    const int col = (int)(chunk - row * x.chunks.by) * REALIGN_EACH;
    return {x.from + (BATCHED ? realign_entry(x, entry) : 0) + at, at + col, col};
}

/* A chunk `shift` elements past a multiple of 16 bytes lies in the 16 aligned bytes that begin
 * shift elements before and, where there is shift, in the next 16; they are read where all of them
 * lie in the entry, of this row or not: an end of a row that waited for loads of its own would be
 * what the whole copy waits for. */
GK_HD inline bool realign_whole(const RealignMatrix &x, const RealignPlace &place, int shift) {
    const int64_t from = place.at - shift;
    return (from >= x.begin) & (from + (shift ? 2 : 1) * REALIGN_EACH <= x.end);
}

/* The 8 elements from `shift` on of 32 bytes, moved to their front. */
GK_HD inline void realign_shift(uint32_t (&words)[8], int shift) {
    for (int i = 0; i < 6; ++i) words[i] = shift & 4 ? words[i + 2] : words[i];
    for (int i = 0; i < 5; ++i) words[i] = shift & 2 ? words[i + 1] : words[i];
    for (int i = 0; i < 4; ++i)
        words[i] = (uint32_t)((((uint64_t)words[i + 1] << 32) | words[i]) >> (shift & 1) * 16);
}

/* Of 8 elements in 4 words the first `valid`, zeros for the others. */
GK_HD inline void realign_cut(uint32_t *words, int valid) {
    for (int i = 0; i < 4; ++i) words[i] &= valid >= 2 * i + 2 ? ~0u : valid > 2 * i ? 0xffffu : 0;
}

/* ---- transposed: tiles of REALIGN_TRANSPOSE x REALIGN_TRANSPOSE elements of 32 bits, a block each
 * ---- */
struct Transpose {
    RealignMatrix matrix;
    uint32_t tiles_inner, tiles_outer;
};

/* A block's tile: of which entry, where it begins, how much of the matrix is left there. */
struct TransposeTile {
    uint32_t entry;
    int inner0, outer0, inner, outer;
};

/* Neighbours along `outer` run together: they read the same rows of `from`. */
GK_HD inline TransposeTile transpose_tile(const Transpose &p, uint32_t block) {
    const uint32_t outer = block % p.tiles_outer, rest = block / p.tiles_outer,
                   inner = rest % p.tiles_inner;
    const int inner0 = (int)inner * REALIGN_TRANSPOSE, outer0 = (int)outer * REALIGN_TRANSPOSE;
    return {rest / p.tiles_inner, inner0, outer0, p.matrix.inner / 2 - inner0,
            (int)p.matrix.outer.by - outer0};
}

/* Element (inner, outer) of a tile, in elements from `from` on. */
GK_HD inline int64_t transpose_from(const RealignMatrix &x, const TransposeTile &t, int inner,
                                    int outer) {
    return realign_entry(x, t.entry) + (int64_t)(t.inner0 + inner) * x.inner_stride +
           (int64_t)(t.outer0 + outer) * x.outer_stride;
}

/* What thread t reads in pass c: {inner, outer}; a warp reads along `outer`. */
constexpr int TRANSPOSE_PASS_ROWS = REALIGN_THREADS / REALIGN_TRANSPOSE,
              TRANSPOSE_PASSES = REALIGN_TRANSPOSE / TRANSPOSE_PASS_ROWS;
static_assert(REALIGN_TRANSPOSE % 32 == 0 && REALIGN_THREADS % REALIGN_TRANSPOSE == 0 &&
                  REALIGN_TRANSPOSE % TRANSPOSE_PASS_ROWS == 0,
              "a warp reads along `outer`");
constexpr GK_HD coord transpose_read(int t, int c) {
    return {t / REALIGN_TRANSPOSE + c * TRANSPOSE_PASS_ROWS, t % REALIGN_TRANSPOSE};
}

/* Whether the matrix has it; else it is 0. */
GK_HD inline bool transpose_has(const TransposeTile &t, int inner, int outer) {
    return inner < t.inner && outer < t.outer;
}

/* In shared memory, [inner][outer + 1]. */
constexpr int TRANSPOSE_LD = REALIGN_TRANSPOSE + 1;
constexpr GK_HD int transpose_at(int inner, int outer) { return inner * TRANSPOSE_LD + outer; }

/* Thread t's chunk c of a tile, four elements along `inner`: {outer, inner}. */
constexpr int TRANSPOSE_CHUNKS = REALIGN_TRANSPOSE * REALIGN_TRANSPOSE / (REALIGN_THREADS * 4);
static_assert(REALIGN_TRANSPOSE * REALIGN_TRANSPOSE % (REALIGN_THREADS * 4) == 0, "whole passes");
constexpr GK_HD coord transpose_chunk(int t, int c) {
    const int at = c * REALIGN_THREADS + t;
    return {at / (REALIGN_TRANSPOSE / 4), at % (REALIGN_TRANSPOSE / 4) * 4};
}

/* Which chunk of the copy it is. */
GK_HD inline int64_t transpose_to(const RealignMatrix &x, const TransposeTile &t, coord chunk) {
    const uint32_t row = t.entry * x.outer.by + (uint32_t)(t.outer0 + chunk.row);
    return (int64_t)row * x.chunks.by + (t.inner0 + chunk.col) / 4;
}

/* ---- host ------------------------------------------------------------------------------------ */
/* The copy of a matrix of batch dimensions shape[ndim], of which stride 0 repeats an entry;
 * `stride` becomes the copy's. false: it has too many chunks. */
inline bool realign_plan(const void *from, int64_t inner, int64_t outer, int64_t inner_stride,
                         int64_t outer_stride, int ndim, const int64_t *shape, int64_t *stride,
                         RealignMatrix *x) {
    const int64_t chunks = gk_ceil_div(inner, REALIGN_EACH);
    double total = (double)outer * (double)chunks;
    for (int d = 0; d < ndim; ++d) total *= stride[d] ? (double)shape[d] : 1;
    if (inner < 1 || outer < 1 || inner > INT32_MAX - 2 * REALIGN_EACH || total < 1 ||
        total > INT32_MAX)
        return false;
    x->from = (const uint16_t *)from;
    x->to = NULL;
    x->inner_stride = inner_stride;
    x->outer_stride = outer_stride;
    const int64_t last = (outer - 1) * outer_stride;
    x->begin = inner_stride == 1 ? gk_min_i64(0, last) : 0;
    x->end = inner_stride == 1 ? gk_max_i64(0, last) + inner : 0;
    x->inner = (int32_t)inner;
    x->ndim = 0;
    x->total = (uint32_t)total;
    x->transposed = false;
    x->chunks = divisor_of((uint32_t)chunks);
    x->outer = divisor_of((uint32_t)outer);
    for (int d = 0; d < ndim; ++d)
        if (stride[d]) {
            x->batch[x->ndim] = divisor_of((uint32_t)shape[d]);
            x->stride[x->ndim++] = stride[d];
        }
    int64_t step = outer * chunks * REALIGN_EACH;
    for (int d = ndim - 1; d >= 0; --d)
        if (stride[d]) {
            stride[d] = step;
            step *= shape[d];
        }
    return true;
}

/* The same for elements of 32 bits, which strides count. */
inline bool realign_plan_32(const void *from, int64_t inner, int64_t outer, int64_t inner_stride,
                            int64_t outer_stride, int ndim, const int64_t *shape, int64_t *stride,
                            RealignMatrix *x) {
    const bool transposed = inner_stride != 1;
    const int64_t from_unit = transposed ? 1 : 2;
    int64_t copied[REALIGN_DIMS];
    for (int d = 0; d < ndim; ++d) copied[d] = from_unit * stride[d];
    if (!realign_plan(from, 2 * inner, outer, inner_stride, from_unit * outer_stride, ndim, shape,
                      copied, x))
        return false;
    for (int d = 0; d < ndim; ++d) stride[d] = copied[d] / 2;
    x->transposed = transposed;
    return true;
}

/* Of a transposed copy, and how many blocks it takes: each has a chunk, so that so many fit. */
inline Transpose transpose_of(const RealignMatrix &x, uint32_t *blocks) {
    const int64_t inner = x.inner / 2;
    const Transpose p = {x, (uint32_t)gk_ceil_div(inner, REALIGN_TRANSPOSE),
                         (uint32_t)gk_ceil_div(x.outer.by, REALIGN_TRANSPOSE)};
    *blocks = x.total / x.chunks.by / x.outer.by * p.tiles_inner * p.tiles_outer;
    return p;
}

inline int64_t realign_bytes(const RealignMatrix &x) { return (int64_t)x.total * 16; }

/* Copies one or two matrices on the context's stream: in one launch, but a transposed one in its
 * own. */
gk_status realign(const char *op, const gk_context *ctx, const RealignMatrix *matrices, int count);

#endif
