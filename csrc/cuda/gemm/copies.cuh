/* copies.cuh: what of a tile's operands a block of gemm_sm90a copies, and how. S: the kernel's Smem, Params: its Params. */
#ifndef GPUKERN_CUDA_GEMM_COPIES_CUH
#define GPUKERN_CUDA_GEMM_COPIES_CUH

#include "../ptx/tma.cuh"
#include "../layout/wgmma.cuh"

/* Where a tile's part comes from. Rows outside a matrix take tma three times as long as rows inside, so none are copied: what
 * their places in shared memory hold goes into sums that are not stored. k is filled up with zeros. */
struct Source {
    const CUtensorMap *map;
    int x, boxes, bytes; /* of the part; of all parts of the tile, for K_BLOCK of k */
    tma_at at;           /* the batch entry */
};

/* x: the tile's first row. end: describes the box that the last rows do not fill */
template <class Part>
__device__ __forceinline__ Source source_of(const CUtensorMap &inside, const CUtensorMap &end, int x, int64_t rows,
                                            int part) {
    const int left = (int)rows - x;
    return {Part::ends(part, left) ? &end : &inside, x, Part::boxes_of(part, left), Part::bytes_of(left), {}};
}

/* Part `part` of K_BLOCK of k from k on; SHARED: into both blocks of the cluster. FIRST_OUT: of L2. */
template <class Part, bool ALONG_X, bool SHARED, bool FIRST_OUT>
__device__ __forceinline__ void copy_part(smem_addr to_s, const Source &from, int k, int part, smem_addr full) {
    tma_at at = from.at;
#pragma unroll
    for (int i = 0; i < Part::boxes; ++i) {
        if (i >= from.boxes) break;
        const int x_at = from.x + Part::x(part, i), k_at = k + Part::k(part);
        at.c[0] = ALONG_X ? x_at : k_at, at.c[1] = ALONG_X ? k_at : x_at;
        if (SHARED)
            tma_load_5d_multicast(to_s + Part::offset(part, i), from.map, at, full, 3);
        else if (FIRST_OUT)
            tma_load_5d_by(to_s + Part::offset(part, i), from.map, at, full, l2_first_out());
        else
            tma_load_5d(to_s + Part::offset(part, i), from.map, at, full);
    }
}

/* A block's copies where A_SHARERS blocks read the same of a and B_SHARERS the same of b. A_ONCE: nobody else reads a. */
template <class S, int A_SHARERS, int B_SHARERS, bool A_ONCE> struct Copies {
    typedef typename S::template APart<A_SHARERS> APart;
    typedef typename S::template BPart<B_SHARERS> BPart;

    template <class Params>
    static __device__ __forceinline__ void find(const Params &x, coord tile, int rank, Source &a, Source &b) {
        a = source_of<APart>(x.a, x.a_end, tile.row, x.p.m, rank % A_SHARERS);
        b = source_of<BPart>(x.b, x.b_end, tile.col, x.p.n, rank % B_SHARERS);
    }
    static __device__ __forceinline__ void copy(const Source &a, const Source &b, smem_addr to_s, int k, int rank,
                                                smem_addr full) {
        copy_part<APart, S::ALONG_M, (A_SHARERS > 1), A_ONCE>(to_s, a, k, rank % A_SHARERS, full);
        copy_part<BPart, S::ALONG_N, (B_SHARERS > 1), false>(to_s + S::A::bytes, b, k, rank % B_SHARERS, full);
    }
    /* All parts, into this block alone. a, b: where their tiles begin. */
    template <class Params>
    static __device__ __forceinline__ void copy_alone(const Params &x, Source a, Source b, smem_addr to_s, int k,
                                                      smem_addr full) {
#pragma unroll
        for (int part = 0; part < A_SHARERS; ++part) {
            const Source from = source_of<APart>(x.a, x.a_end, a.x, x.p.m, part);
            a.map = from.map, a.boxes = from.boxes;
            copy_part<APart, S::ALONG_M, false, A_ONCE>(to_s, a, k, part, full);
        }
#pragma unroll
        for (int part = 0; part < B_SHARERS; ++part) {
            const Source from = source_of<BPart>(x.b, x.b_end, b.x, x.p.n, part);
            b.map = from.map, b.boxes = from.boxes;
            copy_part<BPart, S::ALONG_N, false, false>(to_s + S::A::bytes, b, k, part, full);
        }
    }
};

#endif
