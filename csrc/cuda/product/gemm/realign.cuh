/* SPDX-License-Identifier: BSD-3-Clause */
/* realign.cuh: the index arithmetic of an aligned copy (realign.h): where each 16-byte chunk comes
 * from and where it goes. gemm_realign_sm90a.cu has the kernels that use it.
 *
 * Everything here is plain C++, so that the tests run the same functions. */
#ifndef GPUKERN_CUDA_GEMM_REALIGN_CUH
#define GPUKERN_CUDA_GEMM_REALIGN_CUH

#include "../../kernels.h"
#include "../../layout/layout.cuh"
#include "realign.h"
#include "tiles.h"

/* ---- where a chunk comes from ---------------------------------------------------------------- */
struct RealignPlace {
    const uint16_t *row; /* the row's first element */
    int64_t at;          /* offset of the chunk's first element in the batch entry */
    int col;             /* offset of the chunk's first element in the row */
};

/* Offset of a batch entry. */
GK_HD inline int64_t realign_entry(const RealignMatrix &x, uint32_t entry) {
    int64_t at = 0;
    for (int d = x.ndim - 1; d > 0; --d) {
        const uint32_t rest = x.batch[d].into(entry);
        at += (int64_t)(entry - rest * x.batch[d].by) * x.stride[d];
        entry = rest;
    }
    return x.ndim > 0 ? at + (int64_t)entry * x.stride[0] : at;
}

/* Where chunk number `chunk` of the copy comes from. BATCHED: there may be more than one entry. */
template <bool BATCHED = true>
GK_HD inline RealignPlace realign_place(const RealignMatrix &x, uint32_t chunk) {
    const uint32_t row = x.chunks.into(chunk), entry = BATCHED ? x.outer.into(row) : 0;
    const int64_t at = (int64_t)(row - entry * x.outer.by) * x.outer_stride;
    const int col = (int)(chunk - row * x.chunks.by) * REALIGN_EACH;
    return {x.from + (BATCHED ? realign_entry(x, entry) : 0) + at, at + col, col};
}

/* True if a chunk can be read as aligned 16-byte chunks: the one that begins `shift` elements
 * before it, and if shift > 0 also the next one. Both must lie inside the batch entry, but they may
 * extend beyond the row. If the ends of rows needed separate loads, the whole copy would wait for
 * them. */
GK_HD inline bool realign_whole(const RealignMatrix &x, const RealignPlace &place, int shift) {
    const int64_t from = place.at - shift;
    return (from >= x.begin) & (from + (shift ? 2 : 1) * REALIGN_EACH <= x.end);
}

/* Moves the 8 elements that begin at element `shift` of 32 bytes to the front. */
GK_HD inline void realign_shift(uint32_t (&words)[8], int shift) {
    for (int i = 0; i < 6; ++i) words[i] = shift & 4 ? words[i + 2] : words[i];
    for (int i = 0; i < 5; ++i) words[i] = shift & 2 ? words[i + 1] : words[i];
    for (int i = 0; i < 4; ++i)
        words[i] = (uint32_t)((((uint64_t)words[i + 1] << 32) | words[i]) >> (shift & 1) * 16);
}

/* Keeps the first `valid` of 8 elements in 4 words and clears the others. */
GK_HD inline void realign_cut(uint32_t *words, int valid) {
    for (int i = 0; i < 4; ++i) words[i] &= valid >= 2 * i + 2 ? ~0u : valid > 2 * i ? 0xffffu : 0;
}

/* ---- transposed ------------------------------------------------------------------------------ */
/* The parameters of a transposed copy. A block takes a tile of REALIGN_TRANSPOSE x
 * REALIGN_TRANSPOSE 32-bit elements. */
struct Transpose {
    RealignMatrix matrix;
    uint32_t tiles_inner, tiles_outer;
};

/* A block's tile: its batch entry, where it begins, and how much of the matrix is left from
 * there. */
struct TransposeTile {
    uint32_t entry;
    int inner0, outer0, inner, outer;
};

/* The tile of a block. Neighbouring blocks take neighbouring tiles along `outer`, because these
 * read the same rows of `from`. */
GK_HD inline TransposeTile transpose_tile(const Transpose &p, uint32_t block) {
    const uint32_t outer = block % p.tiles_outer, rest = block / p.tiles_outer,
                   inner = rest % p.tiles_inner;
    const int inner0 = (int)inner * REALIGN_TRANSPOSE, outer0 = (int)outer * REALIGN_TRANSPOSE;
    return {rest / p.tiles_inner, inner0, outer0, p.matrix.inner / 2 - inner0,
            (int)p.matrix.outer.by - outer0};
}

/* Offset of element (inner, outer) of a tile, in elements of `from`. */
GK_HD inline int64_t transpose_from(const RealignMatrix &x, const TransposeTile &t, int inner,
                                    int outer) {
    return realign_entry(x, t.entry) + (int64_t)(t.inner0 + inner) * x.inner_stride +
           (int64_t)(t.outer0 + outer) * x.outer_stride;
}

/* The element {inner, outer} that thread t reads in pass c. A warp reads along `outer`. */
constexpr int TRANSPOSE_PASS_ROWS = REALIGN_THREADS / REALIGN_TRANSPOSE,
              TRANSPOSE_PASSES = REALIGN_TRANSPOSE / TRANSPOSE_PASS_ROWS;
static_assert(REALIGN_TRANSPOSE % 32 == 0 && REALIGN_THREADS % REALIGN_TRANSPOSE == 0 &&
                  REALIGN_TRANSPOSE % TRANSPOSE_PASS_ROWS == 0,
              "a warp reads along `outer`");
constexpr GK_HD coord transpose_read(int t, int c) {
    return {t / REALIGN_TRANSPOSE + c * TRANSPOSE_PASS_ROWS, t % REALIGN_TRANSPOSE};
}

/* True if the element lies inside the matrix. Elements outside it become 0. */
GK_HD inline bool transpose_has(const TransposeTile &t, int inner, int outer) {
    return inner < t.inner && outer < t.outer;
}

/* Layout in shared memory: [inner][outer + 1]. */
constexpr int TRANSPOSE_LD = REALIGN_TRANSPOSE + 1;
constexpr GK_HD int transpose_at(int inner, int outer) { return inner * TRANSPOSE_LD + outer; }

/* Thread t's chunk c of a tile, four elements along `inner`: {outer, inner}. */
constexpr int TRANSPOSE_CHUNKS = REALIGN_TRANSPOSE * REALIGN_TRANSPOSE / (REALIGN_THREADS * 4);
static_assert(REALIGN_TRANSPOSE * REALIGN_TRANSPOSE % (REALIGN_THREADS * 4) == 0, "whole passes");
constexpr GK_HD coord transpose_chunk(int t, int c) {
    const int at = c * REALIGN_THREADS + t;
    return {at / (REALIGN_TRANSPOSE / 4), at % (REALIGN_TRANSPOSE / 4) * 4};
}

/* The index of the chunk in the copy. */
GK_HD inline int64_t transpose_to(const RealignMatrix &x, const TransposeTile &t, coord chunk) {
    const uint32_t row = t.entry * x.outer.by + (uint32_t)(t.outer0 + chunk.row);
    return (int64_t)row * x.chunks.by + (t.inner0 + chunk.col) / 4;
}

/* ---- host ------------------------------------------------------------------------------------ */
/* Plans a transposed copy and its number of blocks. Every block has at least one chunk, so the
 * number fits 32 bits. */
inline Transpose transpose_of(const RealignMatrix &x, uint32_t *blocks) {
    const int64_t inner = x.inner / 2;
    const Transpose p = {x, (uint32_t)gk_ceil_div(inner, REALIGN_TRANSPOSE),
                         (uint32_t)gk_ceil_div(x.outer.by, REALIGN_TRANSPOSE)};
    *blocks = x.total / x.chunks.by / x.outer.by * p.tiles_inner * p.tiles_outer;
    return p;
}

/* Copies one or two matrices on the context's stream. They share one launch, but a transposed copy
 * has a launch of its own. */
gk_status realign(const char *op, const gk_context *ctx, const RealignMatrix *matrices, int count);

#endif
