/* SPDX-License-Identifier: BSD-3-Clause */
/* copies.cuh: which parts of a tile's operands a block of Hopper's gemm copies, and how. S is
 * the kernel's Smem, Params its Params. */
#ifndef GPUKERN_CUDA_GEMM_COPIES_CUH
#define GPUKERN_CUDA_GEMM_COPIES_CUH

#include "../../ptx/tma.cuh"
#include "../../layout/wgmma.cuh"

/* The source of one operand's part. Rows outside the matrix are not copied, because TMA takes
 * three times as long for them as for rows inside. Their places in shared memory hold old
 * values, which only reach sums that are not stored. TMA fills k up with zeros. */
struct PartSource {
    const CUtensorMap *map;
    int x, boxes, bytes; /* first row of the tile; boxes of this part; bytes of all parts of the
                            tile, for K_BLOCK of k */
    tma_at at;           /* coordinates of the batch entry */
};

/* x: the tile's first row. end: the map with the lower box, for last rows that do not fill a
 * box. */
template <class Part>
__device__ __forceinline__ PartSource source_of(const CUtensorMap &inside, const CUtensorMap &end,
                                                int x, int64_t rows, int part) {
    const int left = (int)rows - x;
    return {Part::ends(part, left) ? &end : &inside,
            x,
            Part::boxes_of(part, left),
            Part::bytes_of(left),
            {}};
}

/* Copies part `part` of K_BLOCK elements of k, from k on, into the cluster's blocks that the bit
 * mask `blocks` names. FIRST_OUT: L2 should evict these lines first. */
template <class Part, bool ALONG_X, int SHARERS, bool FIRST_OUT>
__device__ __forceinline__ void copy_part(smem_addr to_s, const PartSource &from, int k, int part,
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

/* A block's copies. A_SHARERS blocks of consecutive ranks read the same part of a. B_SHARERS
 * blocks, A_SHARERS ranks apart, read the same part of b. A_ONCE: no other block reads a. */
template <class S, int A_SHARERS, int B_SHARERS, bool A_ONCE> struct Copies {
    typedef typename S::template APart<A_SHARERS> APart;
    typedef typename S::template BPart<B_SHARERS> BPart;
    static constexpr bool GRID = A_SHARERS > 1 && B_SHARERS > 1;
    static constexpr unsigned column() { /* bit mask of the blocks in the cluster's first column */
        unsigned blocks = 0;
        for (int i = 0; i < B_SHARERS; ++i) blocks |= 1u << i * A_SHARERS;
        return blocks;
    }
    static __device__ __forceinline__ int b_part(int rank) { return rank / A_SHARERS % B_SHARERS; }

    template <class Params>
    static __device__ __forceinline__ void find(const Params &x, coord tile, int rank,
                                                PartSource &a, PartSource &b) {
        a = source_of<APart>(x.a, x.a_end, tile.row, x.p.m, rank % A_SHARERS);
        b = source_of<BPart>(x.b, x.b_end, tile.col, x.p.n, b_part(rank));
    }
    static __device__ __forceinline__ void copy(const PartSource &a, const PartSource &b,
                                                smem_addr to_s, int k, int rank, smem_addr full) {
        const int at_a = rank % A_SHARERS, at_b = b_part(rank);
        copy_part<APart, S::ALONG_M, A_SHARERS, A_ONCE>(
            to_s, a, k, at_a, full, ((1 << A_SHARERS) - 1) << (GRID ? at_b * A_SHARERS : 0));
        copy_part<BPart, S::ALONG_N, B_SHARERS, false>(to_s + S::A::bytes, b, k, at_b, full,
                                                       column() << (GRID ? at_a : 0));
    }
    /* Copies all parts of a halved tile into this block alone. a, b: sources at its first rows. */
    template <class Params>
    static __device__ __forceinline__ void copy_alone(const Params &x, PartSource a, PartSource b,
                                                      smem_addr to_s, int k, smem_addr full) {
#pragma unroll
        for (int part = 0; part < A_SHARERS; ++part) {
            const PartSource from = source_of<APart>(x.a, x.a_end, a.x, x.p.m, part);
            a.map = from.map;
            a.boxes = from.boxes;
            copy_part<APart, S::ALONG_M, 1, A_ONCE>(to_s, a, k, part, full, 1);
        }
#pragma unroll
        for (int part = 0; part < B_SHARERS; ++part) {
            const PartSource from = source_of<BPart>(x.b, x.b_end, b.x, x.p.n, part);
            b.map = from.map;
            b.boxes = from.boxes;
            copy_part<BPart, S::ALONG_N, 1, false>(to_s + S::A::bytes, b, k, part, full, 1);
        }
    }
};

#endif
