/* SPDX-License-Identifier: BSD-3-Clause */
/* mainloop_sm80.cuh: the main loop that multiplies a tile BM x BN over k by mma.sync. gemm_sm80 and
 * the sm_80 kernels of quant/ call multiply_sm80.
 *
 * A template parameter, the Product, says how fragments are prepared and multiplied, and what
 * follows a step. MmaProduct below is the plain one. quant/ has others.
 *
 * Shared memory: STAGES stages of two tiles, swizzled (banks.cuh):
 *   a  [BM][BK], or [BK][BM] if a is MN-major
 *   b  [BN][BK], or [BK][BN] if b is MN-major
 * MN-major tf32 tiles are padded instead, because ldmatrix cannot transpose 32-bit elements.
 *
 * Pipeline: a step multiplies the BK of k of one stage. One mma takes 16 of k for 16-bit elements,
 * 8 for tf32, 32 for 8 bits; the comments call this a k16. Copies run STAGES - 1 steps ahead of the
 * products. Fragments are loaded one k16 before their mma. This also holds for the first k16 of the
 * next step. Below, fjq and jq are the fragments and the products of k16 number q of step j:
 *   copy       k0 k1 | k2                k3
 *   fragments      f00 | f01  f02  f03 | f10  f11 ..
 *   mma                |  00   01   02   03   10  ..
 * The barrier (|) stands before the last k16 of a step. At that point the step's last fragments
 * are in registers. So after the barrier, all threads have read the stage, and it may be refilled.
 *
 * Mode ANY takes rows of any alignment. It loads elements one by one at the start of a step and
 * stores them to shared memory before the step's barrier. */
#ifndef GPUKERN_CUDA_GEMM_MAINLOOP_SM80_CUH
#define GPUKERN_CUDA_GEMM_MAINLOOP_SM80_CUH

#include "../../tile/convert.cuh"
#include "../../tile/copy.cuh"
#include "../../tile/fragment.cuh"
#include "../../tile/pipeline.cuh"
#include "mode.h"

namespace {

/* ---- 1 tiles in shared memory ---------------------------------------------------------------- */
/* A tile of 32-bit elements [k][x], which lanes read one by one. Rows are padded by 8 elements.
 * Then the elements of a fragment, at 4 different k and 8 different x, lie in 32 different banks.
 */
template <int ROWS, int ROW_BYTES> struct PaddedTile {
    static constexpr int rows = ROWS, chunks = ROW_BYTES / 16, ld_bytes = ROW_BYTES + 32,
                         bytes = ROWS * ld_bytes;
    static constexpr GK_HD int offset(int row, int chunk) { return row * ld_bytes + chunk * 16; }
    static constexpr GK_HD unsigned down(unsigned at, int rows_down) {
        return at + rows_down * ld_bytes;
    }
    static constexpr GK_HD int fragment_ways() {
        int bytes_of[32] = {};
        for (int lane = 0; lane < 32; ++lane)
            bytes_of[lane] = frag_b32(lane, 0).row * ld_bytes + frag_b32(lane, 0).col * 4;
        return ways(bytes_of, 4);
    }
    static_assert(ROW_BYTES % 128 == 0 && fragment_ways() == 1,
                  "no bank conflict between the lanes of a fragment");
};

/* The tile of an operand with BX rows of m or n. ALONG_X: it is MN-major. */
template <class T, int BX, int BK, bool ALONG_X> struct OperandTile {
    typedef smem_tile<BX, BK *(int)sizeof(T)> type;
};
template <class T, int BX, int BK> struct OperandTile<T, BX, BK, true> {
    typedef smem_tile<BK, BX *(int)sizeof(T)> type;
};
template <int BX, int BK> struct OperandTile<float, BX, BK, true> {
    typedef PaddedTile<BK, BX * 4> type;
};

/* ---- 2 from global memory into a tile -------------------------------------------------------- */
/* Copies the tiles of one operand from global memory. Element (r, c) of a tile is at r row_stride +
 * c col_stride. A thread copies the same 16-byte chunk of rows r0, r0 + STEP and so on, one row in
 * each pass. begin and pass copy asynchronously. fetch and put go through registers (mode ANY). */
template <class T, class Tile, int THREADS> struct Feed {
    static constexpr int STEP = THREADS / Tile::chunks, PASSES = Tile::rows / STEP,
                         EACH = 16 / (int)sizeof(T);
    static_assert(THREADS % Tile::chunks == 0 && Tile::rows % STEP == 0, "whole passes");
    static_assert(STEP % 8 == 0 || sizeof(T) == 4, "one swizzle for all rows of a thread");

    /* from_g: address of the thread's chunk of row r0 in the next step. at_g: address of its chunk
     * in the next pass of this step. */
    const T *from_g, *at_g;
    int64_t pass_step, col_stride, k_step;
    int row, chunk, rows_left, bytes;
    unsigned offset;

    __device__ __forceinline__ Feed(const T *tile_g, int64_t row_stride, int64_t col_stride_,
                                    int64_t k_step_, int thread)
        : pass_step(STEP * row_stride), col_stride(col_stride_), k_step(k_step_) {
        row = thread / Tile::chunks;
        chunk = thread % Tile::chunks;
        offset = Tile::offset(row, chunk);
        from_g = tile_g + row * row_stride + chunk * EACH * col_stride;
    }
    /* To copy the tile of a step, call begin(), then pass() for 0 to PASSES - 1 in order. */
    __device__ __forceinline__ void begin(int rows_valid, int cols_valid) {
        rows_left = rows_valid - row;
        bytes = chunk_bytes<T>(chunk, cols_valid);
        at_g = from_g;
        from_g += k_step;
    }
    __device__ __forceinline__ void pass(smem_addr tile_s, int i) {
        cp_async_cg_16(Tile::down(tile_s + offset, i * STEP), at_g,
                       i * STEP < rows_left ? bytes : 0);
        at_g += pass_step;
    }
    __device__ __forceinline__ void fetch(uint4 *chunks, int rows_valid, int cols_valid) {
        const int count = cols_valid - chunk * EACH;
        at_g = from_g;
        from_g += k_step;
#pragma unroll
        for (int i = 0; i < PASSES; ++i, at_g += pass_step) {
            union {
                uint4 quad;
                unsigned short halves[8];
            } u;
            const int valid = row + i * STEP < rows_valid ? count : 0;
#pragma unroll
            for (int c = 0; c < 8; ++c)
                u.halves[c] =
                    c < valid ? ((const unsigned short *)at_g)[c * col_stride] : (unsigned short)0;
            chunks[i] = u.quad;
        }
    }
    __device__ __forceinline__ void put(smem_addr tile_s, const uint4 *chunks) const {
#pragma unroll
        for (int i = 0; i < PASSES; ++i)
            st_shared_128(Tile::down(tile_s + offset, i * STEP), chunks[i]);
    }
};

/* ---- 3 from a tile into fragments ------------------------------------------------------------ */
/* LoadA and LoadB load a fragment of k16 number kk of the step. i counts blocks of 16 rows of a or
 * 16 columns of b. base() is the lane's address for kk = 0 and i = 0. */
template <class T, class Tile, bool ALONG_X> struct LoadA {
    static __device__ __forceinline__ smem_addr base(smem_addr tile_s, int lane, int m) {
        return ALONG_X ? frag_a_trans_base<Tile>(tile_s, lane, 0, m / 8)
                       : frag_a_base<Tile>(tile_s, lane, m, 0);
    }
    static __device__ __forceinline__ void load(uint32_t *a, smem_addr at_s, int kk, int i) {
        if constexpr (ALONG_X)
            load_frag_a_trans(a, Tile::along(Tile::down(at_s, 16 * kk), 2 * i));
        else
            load_frag_a(a, Tile::down(Tile::along(at_s, 2 * kk), 16 * i));
    }
};
template <class T, class Tile, bool ALONG_X> struct LoadB {
    static __device__ __forceinline__ smem_addr base(smem_addr tile_s, int lane, int n) {
        return ALONG_X ? frag_b_trans_base<Tile>(tile_s, lane, 0, n / 8)
                       : frag_b_base<Tile>(tile_s, lane, n, 0);
    }
    static __device__ __forceinline__ void load(uint32_t *b, smem_addr at_s, int kk, int i) {
        if constexpr (ALONG_X)
            load_frag_b_trans(b, Tile::along(Tile::down(at_s, 16 * kk), 2 * i));
        else
            load_frag_b(b, Tile::down(Tile::along(at_s, 2 * kk), 16 * i));
    }
};
/* The same for MN-major tf32, [k][x]. In both operands, a lane's element e lies at (k, x) =
 * (lane % 4, lane / 4) plus a constant. */
template <class Tile> struct LoadA<float, Tile, true> {
    static __device__ __forceinline__ smem_addr base(smem_addr tile_s, int lane, int m) {
        return tile_s + lane % 4 * Tile::ld_bytes + (lane / 4 + m) * 4;
    }
    static __device__ __forceinline__ void load(uint32_t *a, smem_addr at_s, int kk, int i) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            a[e] = ld_shared_32(Tile::down(at_s, 8 * kk + e / 2 * 4) + (i * 16 + e % 2 * 8) * 4);
    }
};
template <class Tile> struct LoadB<float, Tile, true> {
    static __device__ __forceinline__ smem_addr base(smem_addr tile_s, int lane, int n) {
        return tile_s + lane % 4 * Tile::ld_bytes + (lane / 4 + n) * 4;
    }
    static __device__ __forceinline__ void load(uint32_t *b, smem_addr at_s, int kk, int i) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
            b[e] = ld_shared_32(Tile::down(at_s, 8 * kk + e % 2 * 4) + (i * 16 + e / 2 * 8) * 4);
    }
};

/* Loads the fragments of two consecutive k16. Register 4 h + j holds 8 columns from 8 h on and 8 of
 * k from 8 j on (8-bit elements: 16 of k from 16 j on). */
template <class Tile> struct LoadTwoB {
    static __device__ __forceinline__ smem_addr base(smem_addr tile_s, int lane, int n) {
        return tile_s + Tile::offset(n + lane % 8, lane / 8);
    }
    static __device__ __forceinline__ void load(uint32_t *b, smem_addr at_s, int kk, int i) {
        const smem_addr from_s = Tile::down(Tile::along(at_s, 4 * kk), 16 * i);
        ldmatrix_x4(b, from_s);
        ldmatrix_x4(b + 4, Tile::down(from_s, 8));
    }
};
template <int SHARE, class T, class Tile, bool ALONG_X> struct LoadBs {
    typedef LoadB<T, Tile, ALONG_X> type;
};
template <class T, class Tile> struct LoadBs<2, T, Tile, false> {
    typedef LoadTwoB<Tile> type;
};

/* Rounds a tf32 operand before its mma, because the tensor cores truncate. It multiplies by
 * 1 + 2^-10 / 3, which adds one to two thirds of a unit in the last place of tf32. The error is 5 %
 * above that of rounding to nearest, but this takes one instruction instead of two. Values that
 * tf32 can represent stay exact. */
template <class T> __device__ __forceinline__ void round_operand(uint32_t *x) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = __float_as_uint(__uint_as_float(x[e]) * 1.00032552f);
    }
}
/* The tiles of a stage, and the bytes of all stages. SHARE: the tile of a holds 1 / SHARE of k
 * (2 for 2:4 sparsity). */
template <class T, class Tile, int MODE, int SHARE = 1> struct Ring {
    typedef typename OperandTile<T, Tile::BM, Tile::BK / SHARE, (MODE & A_ALONG_M) != 0>::type A;
    typedef typename OperandTile<T, Tile::BN, Tile::BK, (MODE & B_ALONG_N) != 0>::type B;
    static constexpr int BYTES = Tile::STAGES * (A::bytes + B::bytes);
    static_assert(A::bytes % 128 == 0 && B::bytes % 128 == 0,
                  "every tile starts on a multiple of 128");
};

/* ---- 4 what is multiplied -------------------------------------------------------------------- */
/* Defaults of a Product: hooks around the steps, which do nothing. */
struct DefaultProduct {
    /* 1, or 2 for 2:4 sparsity: a has two of every four elements along k, and one fragment of a is
     * multiplied with two of b. */
    static constexpr int SHARE = 1;
    /* Called when the copies of step 0 have arrived. */
    __device__ __forceinline__ void begin() {}
    /* Called before the barrier of step j. After that barrier, the copies of step j + 1 have
     * arrived. */
    __device__ __forceinline__ void before_barrier(int) { /* nothing */ }
    /* Called after k16 number q of all steps. The bool is true for the last one. */
    template <class Sums> __device__ __forceinline__ void join(Sums &, int, bool) {}
};

/* The Product of gemm_sm80: multiplies fragments of 16-bit or tf32 operands as they are. */
template <class T> struct MmaProduct : DefaultProduct {
    typedef float Sum;
    struct A {
        uint32_t r[4];
    };
    typedef A B;
    static __device__ __forceinline__ A ready(const uint32_t *x) {
        A a = {{x[0], x[1], x[2], x[3]}};
        round_operand<T>(a.r);
        return a;
    }
    static __device__ __forceinline__ A ready_a(const uint32_t *x) { return ready(x); }
    static __device__ __forceinline__ B ready_b(const uint32_t *x) { return ready(x); }
    /* Multiplies block i of the warp's 16-row blocks by 16 NT columns. The last two arguments are
     * i and kk, the number of the k16 in the step. */
    template <int NT>
    static __device__ __forceinline__ void multiply(Sum (&sum)[2 * NT][4], const A &a,
                                                    const B (&b)[NT], int, int) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            mma_add<T>(sum[2 * n], a.r, b[n].r);
            mma_add<T>(sum[2 * n + 1], a.r, b[n].r + 2);
        }
    }
};

/* ---- 5 the loop ------------------------------------------------------------------------------ */
/* Where a tile of an operand lies in global memory. */
template <class T> struct Operand {
    const T *from_g; /* the tile's first element */
    int64_t x, k;    /* strides along m or n, and along k, in elements */
    int valid;       /* rows of m or n from the tile's first one on that lie inside the matrix */
};

/* Adds the product of a and b over k to `sum`. The warp computes rows from warp_m on and columns
 * from warp_n on of the block's tile. All threads of the block call it. The ring's shared memory
 * may be reused after a following cp_async_wait_group<0> and a barrier. */
template <class T, class Tile, int MODE, class Product>
__device__ __forceinline__ void
multiply_sm80(Product &product, typename Product::Sum (&sum)[Tile::WM / 16][Tile::WN / 8][4],
              const Operand<T> &a_from, const Operand<T> &b_from, int64_t k, smem_addr ring_s,
              int warp_m, int warp_n) {
    constexpr int SHARE = Product::SHARE;
    typedef Ring<T, Tile, MODE, SHARE> R;
    typedef typename R::A A;
    typedef typename R::B B;
    typedef LoadA<T, A, (MODE & A_ALONG_M) != 0> LA;
    typedef typename LoadBs<SHARE, T, B, (MODE & B_ALONG_N) != 0>::type LB;
    constexpr int BK = Tile::BK, STAGES = Tile::STAGES, THREADS = Tile::THREADS;
    constexpr int WM = Tile::WM, WN = Tile::WN, MT = WM / 16, NT = WN / 16,
                  KK = BK * (int)sizeof(T) / (32 * SHARE);
    constexpr int AP = Feed<T, A, THREADS>::PASSES, BP = Feed<T, B, THREADS>::PASSES;
    /* Groups of products in a step before its barrier. The passes of the copies are spread over
     * these groups. */
    constexpr int GROUPS = (KK - 1) * MT;
    static_assert(KK % 2 == 0,
                  "fragments alternate between two buffers, and a step ends where it began");
    const int thread = threadIdx.x, lane = thread % 32, steps = (int)((k + BK - 1) / BK);
    const int m_valid = a_from.valid, n_valid = b_from.valid;
    Feed<T, A, THREADS> a_feed(a_from.from_g, MODE & A_ALONG_M ? a_from.k : a_from.x,
                               MODE & A_ALONG_M ? a_from.x : a_from.k, BK / SHARE * a_from.k,
                               thread);
    Feed<T, B, THREADS> b_feed(b_from.from_g, MODE & B_ALONG_N ? b_from.k : b_from.x,
                               MODE & B_ALONG_N ? b_from.x : b_from.k, BK * b_from.k, thread);
    const smem_addr a_s = ring_s, b_s = a_s + STAGES * A::bytes;
    int64_t k_left = k; /* elements of k that are not copied yet */
    uint4 a_chunks[MODE & ANY ? AP : 1], b_chunks[MODE & ANY ? BP : 1];

/* The valid rows and columns of a tile whose k ends at k_valid. */
#define A_VALID \
    (MODE & A_ALONG_M ? k_valid : m_valid), (MODE & A_ALONG_M ? m_valid : k_valid / SHARE)
#define B_VALID (MODE & B_ALONG_N ? k_valid : n_valid), (MODE & B_ALONG_N ? n_valid : k_valid)
    cp_ring<STAGES> ring;
    for (int j = 0; j < STAGES - 1; ++j) {
        const int k_valid = (int)max((int64_t)0, min((int64_t)BK, k_left));
        k_left -= BK;
        if constexpr (MODE & ANY) {
            a_feed.fetch(a_chunks, A_VALID);
            b_feed.fetch(b_chunks, B_VALID);
            a_feed.put(a_s + j * A::bytes, a_chunks);
            b_feed.put(b_s + j * B::bytes, b_chunks);
        } else {
            a_feed.begin(A_VALID);
            b_feed.begin(B_VALID);
#pragma unroll
            for (int i = 0; i < AP; ++i) a_feed.pass(a_s + j * A::bytes, i);
#pragma unroll
            for (int i = 0; i < BP; ++i) b_feed.pass(b_s + j * B::bytes, i);
        }
        ring.commit();
    }

    uint32_t a[2][MT][4], b[2][NT][4 * SHARE];
    const smem_addr a_base = LA::base(a_s, lane, warp_m), b_base = LB::base(b_s, lane, warp_n);
    ring.wait(); /* the copies of step 0 by all threads have arrived */
    product.begin();
    if (steps > 0) {
#pragma unroll
        for (int i = 0; i < MT; ++i) LA::load(a[0][i], a_base, 0, i);
#pragma unroll
        for (int i = 0; i < NT; ++i) LB::load(b[0][i], b_base, 0, i);
    }
    for (int j = 0; j < steps; ++j) {
        smem_addr a_at = a_base + ring.read * A::bytes, b_at = b_base + ring.read * B::bytes;
        /* The stage to fill. It was read in step j - 1. */
        const smem_addr a_fill = a_s + ring.write * A::bytes, b_fill = b_s + ring.write * B::bytes;
        /* k_valid is 0 if no step is left to copy. */
        const int k_valid = (int)max((int64_t)0, min((int64_t)BK, k_left));
        k_left -= BK;
        if constexpr (MODE & ANY) {
            a_feed.fetch(a_chunks, A_VALID);
            b_feed.fetch(b_chunks, B_VALID);
        } else {
            a_feed.begin(A_VALID);
            b_feed.begin(B_VALID);
        }
#pragma unroll
        for (int kk = 0; kk < KK; ++kk) {
            if (kk == KK - 1) {
                if constexpr (MODE & ANY) {
                    a_feed.put(a_fill, a_chunks);
                    b_feed.put(b_fill, b_chunks);
                }
                product.before_barrier(j);
                ring.commit();
                /* After this barrier, the copies of step j + 1 have arrived, and all threads have
                 * read the last fragments of step j. */
                ring.wait();
                ring.advance();
                a_at = a_base + ring.read * A::bytes;
                b_at = b_base + ring.read * B::bytes;
            }
            typename Product::B b_now[NT];
#pragma unroll
            for (int n = 0; n < NT; ++n) b_now[n] = product.ready_b(b[kk % 2][n]);
            /* The loads of the next fragments and the copies are placed between the products, so
             * that loads, copies and products are issued evenly. In the last step, the loads of
             * the next one read a stage of zeros. */
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                const typename Product::A a_now = product.ready_a(a[kk % 2][i]);
                LA::load(a[(kk + 1) % 2][i], a_at, (kk + 1) % KK, i);
#pragma unroll
                for (int n = i * NT / MT; n < (i + 1) * NT / MT; ++n)
                    LB::load(b[(kk + 1) % 2][n], b_at, (kk + 1) % KK, n);
                if constexpr (!(MODE & ANY)) {
                    const int group = kk * MT + i;
                    if (group < GROUPS) {
#pragma unroll
                        for (int c = group * (AP + BP) / GROUPS;
                             c < (group + 1) * (AP + BP) / GROUPS; ++c) {
                            if (c < AP)
                                a_feed.pass(a_fill, c);
                            else
                                b_feed.pass(b_fill, c - AP);
                        }
                    }
                }
                product.multiply(sum[i], a_now, b_now, i, kk);
            }
            product.join(sum, j * KK + kk, kk == KK - 1 && j == steps - 1);
        }
    }
#undef A_VALID
#undef B_VALID
}

} // namespace

#endif
