/* realign.cuh: an aligned copy, in a call's workspace, of a matrix of 16-bit elements that cannot be read 16 bytes at a time
 * where it lies. Dense rows of float32 are rows of twice as many. Where inner is not dense it is `turned`, in tiles: float32 in any
 * case, 16 bits where outer is dense.
 *   from [entries][outer][inner], any strides   ->   to [entries][outer][ld], ld = inner rounded up to 8, zeros from inner on
 * inner is the dimension that is dense, or whose stride is smaller. An entry that the batch repeats is copied once.
 * Plain C++ but for the kernel (gemm_realign_sm90a.cu), so that the tests walk the same functions. */
#ifndef GPUKERN_CUDA_GEMM_REALIGN_CUH
#define GPUKERN_CUDA_GEMM_REALIGN_CUH

#include "../kernels.h"
#include "../tile/layout.cuh"
#include "divisor.cuh"
#include "tiles.h"

constexpr int REALIGN_DIMS = GK_MAX_DIMS - 2, REALIGN_EACH = 8; /* batch dimensions; elements of a 16-byte chunk */

struct RealignMatrix {
    const uint16_t *from;
    void *to;
    int64_t inner_stride, outer_stride; /* of `from` */
    int64_t begin, end;                 /* of an entry, from its first row's first element on; 0, 0: not dense */
    int32_t inner, ndim;
    uint32_t total;                             /* chunks of the copy */
    int32_t turned;                             /* 0, or bytes of the elements that strides count; inner: 16 bits */
    Divisor chunks, outer, batch[REALIGN_DIMS]; /* sizes; of batch dimensions those that `from` walks */
    int64_t stride[REALIGN_DIMS];
};

/* ---- where a chunk comes from ------------------------------------------------------------------------------ */
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
template <bool BATCHED = true> GK_HD inline RealignPlace realign_place(const RealignMatrix &x, uint32_t chunk) {
    const uint32_t row = x.chunks.into(chunk), entry = BATCHED ? x.outer.into(row) : 0;
    const int64_t at = (int64_t)(row - entry * x.outer.by) * x.outer_stride;
    const int col = (int)(chunk - row * x.chunks.by) * REALIGN_EACH;
    return {x.from + (BATCHED ? realign_entry(x, entry) : 0) + at, at + col, col};
}

/* A chunk `skew` elements past a multiple of 16 bytes lies in the 16 aligned bytes that begin skew elements before and, where
 * there is skew, in the next 16; they are read where all of them lie in the entry, of this row or not: an end of a row that
 * waited for loads of its own would be what the whole copy waits for. */
GK_HD inline bool realign_whole(const RealignMatrix &x, const RealignPlace &place, int skew) {
    const int64_t from = place.at - skew;
    return (from >= x.begin) & (from + (skew ? 2 : 1) * REALIGN_EACH <= x.end);
}

/* The 8 elements from `skew` on of 32 bytes, moved to their front. */
GK_HD inline void realign_shift(uint32_t (&words)[8], int skew) {
    for (int i = 0; i < 6; ++i) words[i] = skew & 4 ? words[i + 2] : words[i];
    for (int i = 0; i < 5; ++i) words[i] = skew & 2 ? words[i + 1] : words[i];
    for (int i = 0; i < 4; ++i) words[i] = (uint32_t)((((uint64_t)words[i + 1] << 32) | words[i]) >> (skew & 1) * 16);
}

/* Of 8 elements in 4 words the first `valid`, zeros for the others. */
GK_HD inline void realign_cut(uint32_t *words, int valid) {
    for (int i = 0; i < 4; ++i) words[i] &= valid >= 2 * i + 2 ? ~0u : valid > 2 * i ? 0xffffu : 0;
}

/* ---- host -------------------------------------------------------------------------------------------------- */
/* The copy of a matrix of batch dimensions shape[ndim], of which stride 0 repeats an entry; `stride` becomes the copy's.
 * false: it has too many chunks. */
inline bool realign_plan(const void *from, int64_t inner, int64_t outer, int64_t inner_stride, int64_t outer_stride,
                         int ndim, const int64_t *shape, int64_t *stride, RealignMatrix *x) {
    const int64_t chunks = gk_ceil_div(inner, REALIGN_EACH);
    double total = (double)outer * (double)chunks;
    for (int d = 0; d < ndim; ++d) total *= stride[d] ? (double)shape[d] : 1;
    if (inner < 1 || outer < 1 || inner > INT32_MAX - 2 * REALIGN_EACH || total < 1 || total > INT32_MAX) return false;
    x->from = (const uint16_t *)from, x->to = NULL, x->inner_stride = inner_stride, x->outer_stride = outer_stride;
    const int64_t last = (outer - 1) * outer_stride;
    x->begin = inner_stride == 1 ? gk_min_i64(0, last) : 0;
    x->end = inner_stride == 1 ? gk_max_i64(0, last) + inner : 0;
    x->inner = (int32_t)inner, x->ndim = 0, x->total = (uint32_t)total;
    x->turned = inner_stride != 1 && outer_stride == 1 ? 2 : 0;
    x->chunks = divisor_of((uint32_t)chunks), x->outer = divisor_of((uint32_t)outer);
    for (int d = 0; d < ndim; ++d)
        if (stride[d]) x->batch[x->ndim] = divisor_of((uint32_t)shape[d]), x->stride[x->ndim++] = stride[d];
    int64_t step = outer * chunks * REALIGN_EACH;
    for (int d = ndim - 1; d >= 0; --d)
        if (stride[d]) stride[d] = step, step *= shape[d];
    return true;
}

/* The same for elements of 32 bits, which strides count. */
inline bool realign_plan_32(const void *from, int64_t inner, int64_t outer, int64_t inner_stride, int64_t outer_stride,
                            int ndim, const int64_t *shape, int64_t *stride, RealignMatrix *x) {
    const bool turned = inner_stride != 1;
    const int64_t from_unit = turned ? 1 : 2;
    int64_t copied[REALIGN_DIMS];
    for (int d = 0; d < ndim; ++d) copied[d] = from_unit * stride[d];
    if (!realign_plan(from, 2 * inner, outer, inner_stride, from_unit * outer_stride, ndim, shape, copied, x))
        return false;
    for (int d = 0; d < ndim; ++d) stride[d] = copied[d] / 2;
    x->turned = turned ? 4 : 0;
    return true;
}

inline int64_t realign_bytes(const RealignMatrix &x) { return (int64_t)x.total * 16; }

/* Copies one or two matrices on the context's stream: in one launch, but a turned one in its own. */
gk_status realign(const char *op, const gk_context *ctx, const RealignMatrix *matrices, int count);

#endif
