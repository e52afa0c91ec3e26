/* SPDX-License-Identifier: BSD-3-Clause */
/* copies.cuh: what of a tile's operands a block of gemm_sm90a copies, and how. S: the kernel's
 * Smem, Params: its Params. */
#ifndef GPUKERN_CUDA_GEMM_COPIES_CUH
#define GPUKERN_CUDA_GEMM_COPIES_CUH

#include "../../ptx/tma.cuh"
#include "../../layout/wgmma.cuh"

/* Where a tile's part comes from. Rows outside a matrix take tma three times as long as rows
 * inside, so none are copied: what their places in shared memory hold goes into sums that are not
 * stored. k is filled up with zeros. */
struct Source {
    const CUtensorMap *map;
    int x, boxes, bytes; /* of the part; of all parts of the tile, for K_BLOCK of k */
    tma_at at;           /* the batch entry */
};

/* x: the tile's first row. end: describes the box that the last rows do not fill */
template <class Part>
__device__ __forceinline__ Source source_of(const CUtensorMap &inside, const CUtensorMap &end,
                                            int x, int64_t rows, int part) {
    const int left = (int)rows - x;
    return {Part::ends(part, left) ? &end : &inside,
            x,
            Part::boxes_of(part, left),
            Part::bytes_of(left),
            {}};
}

/* Part `part` of K_BLOCK of k from k on, into the blocks of the cluster whose bits `blocks` has.
 * FIRST_OUT: of L2. */
template <class Part, bool ALONG_X, int SHARERS, bool FIRST_OUT>
__device__ __forceinline__ void copy_part(smem_addr to_s, const Source &from, int k, int part,
                                          smem_addr full, uint16_t blocks) {
    tma_at at = from.at;
#pragma unroll
    for (int i = 0; i < Part::boxes; ++i) {
        if (i >= from.boxes) break;
        const int x_at = from.x + Part::x(part, i), k_at = k + Part::k(part);
        at.c[0] = ALONG_X ? x_at : k_at;
        at.c[1] = ALONG_X ? k_at : x_at;
        if (SHARERS > 1)
            tma_load_5d_multicast(to_s + Part::offset(part, i), from.map, at, full, blocks);
        else if (FIRST_OUT)
            tma_load_5d_by(to_s + Part::offset(part, i), from.map, at, full, l2_first_out());
        else
            tma_load_5d(to_s + Part::offset(part, i), from.map, at, full);
    }
}

/* A block's copies where A_SHARERS blocks, of ranks that follow each other, read the same of a, and
 * B_SHARERS, of every A_SHARERS-th rank, the same of b. A_ONCE: nobody else reads a. */
template <class S, int A_SHARERS, int B_SHARERS, bool A_ONCE> struct Copies {
    typedef typename S::template APart<A_SHARERS> APart;
    typedef typename S::template BPart<B_SHARERS> BPart;
    static constexpr bool GRID = A_SHARERS > 1 && B_SHARERS > 1;
    static constexpr unsigned column() { /* of the cluster's blocks, the first one */
        unsigned blocks = 0;
        for (int i = 0; i < B_SHARERS; ++i) blocks |= 1u << i * A_SHARERS;
        return blocks;
    }
    static __device__ __forceinline__ int b_part(int rank) { return rank / A_SHARERS % B_SHARERS; }

    template <class Params>
    static __device__ __forceinline__ void find(const Params &x, coord tile, int rank, Source &a,
                                                Source &b) {
        a = source_of<APart>(x.a, x.a_end, tile.row, x.p.m, rank % A_SHARERS);
        b = source_of<BPart>(x.b, x.b_end, tile.col, x.p.n, b_part(rank));
    }
    static __device__ __forceinline__ void copy(const Source &a, const Source &b, smem_addr to_s,
                                                int k, int rank, smem_addr full) {
        const int at_a = rank % A_SHARERS, at_b = b_part(rank);
        copy_part<APart, S::ALONG_M, A_SHARERS, A_ONCE>(
            to_s, a, k, at_a, full, ((1 << A_SHARERS) - 1) << (GRID ? at_b * A_SHARERS : 0));
        copy_part<BPart, S::ALONG_N, B_SHARERS, false>(to_s + S::A::bytes, b, k, at_b, full,
                                                       column() << (GRID ? at_a : 0));
    }
    /* All parts, into this block alone. a, b: where their tiles begin. */
    template <class Params>
    static __device__ __forceinline__ void copy_alone(const Params &x, Source a, Source b,
                                                      smem_addr to_s, int k, smem_addr full) {
#pragma unroll
        for (int part = 0; part < A_SHARERS; ++part) {
            const Source from = source_of<APart>(x.a, x.a_end, a.x, x.p.m, part);
            a.map = from.map;
            a.boxes = from.boxes;
            copy_part<APart, S::ALONG_M, 1, A_ONCE>(to_s, a, k, part, full, 1);
        }
#pragma unroll
        for (int part = 0; part < B_SHARERS; ++part) {
            const Source from = source_of<BPart>(x.b, x.b_end, b.x, x.p.n, part);
            b.map = from.map;
            b.boxes = from.boxes;
            copy_part<BPart, S::ALONG_N, 1, false>(to_s + S::A::bytes, b, k, part, full, 1);
        }
    }
};

#endif
