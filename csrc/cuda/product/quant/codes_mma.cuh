/* SPDX-License-Identifier: BSD-3-Clause */
/* codes_mma.cuh: the Products of mainloop_sm80.cuh for 8-bit operands. Int8Product multiplies int8.
 * FloatProduct converts 8-bit floats to float16 in registers and multiplies those. BlockProduct
 * adds scales along k to either. scaled_gemm_sm80.cu uses them.
 *
 * In a fragment of 16 x 32 bytes, each register has four consecutive codes along k. FloatProduct
 * converts codes 0 and 2 to one register of float16, and codes 1 and 3 to another. This makes two
 * fragments of k16. Their order of k differs from that in memory, but it is the same for a and b.
 *   e5m2: the code is the upper byte of a float16.
 *   e4m3: the code is placed one bit lower, which gives its value times 2^-8, also for subnormal
 *         codes. The sums are multiplied by 2^8 for each e4m3 operand at the end (down_of). */
#ifndef GPUKERN_CUDA_QUANT_CODES_MMA_CUH
#define GPUKERN_CUDA_QUANT_CODES_MMA_CUH

#include "../gemm/mainloop_sm80.cuh"
#include "../../ptx/mma_s8.cuh"
#include "../../tile/codes_f16.cuh"
#include "product.cuh"

namespace {

/* How to convert a code to float16 if its format is known at run time only. A code in the upper
 * byte of a half is shifted right by `shift` and masked with `size`. Adding `nan` carries into
 * bit 14 if the code is a NaN, whose bits other than the sign are all ones. */
struct CodeBits {
    int shift;
    uint32_t size, nan;
};
struct TwoCodeBits {
    CodeBits a, b;
};

inline CodeBits code_bits_of(gk_dtype dtype) {
    if (dtype == GK_E4M3) return {1, 0x3f803f80u, 0x00800080u};
    return {0, 0x7f007f00u, 0};
}
inline int down_of(gk_dtype dtype) { return dtype == GK_E4M3 ? 8 : 0; }

/* ---- 1 int8 ---------------------------------------------------------------------------------- */
struct Int8Product : DefaultProduct {
    typedef int Sum;
    struct A {
        uint32_t r[4];
    };
    typedef A B;

    __device__ __forceinline__ explicit Int8Product(const TwoCodeBits &) {}
    static __device__ __forceinline__ A ready_a(const uint32_t *x) {
        return {{x[0], x[1], x[2], x[3]}};
    }
    static __device__ __forceinline__ B ready_b(const uint32_t *x) { return ready_a(x); }
    template <int NT>
    static __device__ __forceinline__ void multiply(Sum (&sum)[2 * NT][4], const A &a,
                                                    const B (&b)[NT], int, int) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            mma_m16n8k32_s8(sum[2 * n], a.r, b[n].r);
            mma_m16n8k32_s8(sum[2 * n + 1], a.r, b[n].r + 2);
        }
    }
};

/* ---- 2 8-bit floats -------------------------------------------------------------------------- */
__device__ __forceinline__ uint32_t any_pair(uint32_t x, const CodeBits &bits) {
    const uint32_t size = x >> bits.shift & bits.size;
    return (size | (x & 0x80008000u)) | ((size + bits.nan) & 0x40004000u);
}

/* OF_A, OF_B: the formats of the codes of a and b. GK_U8: any format, described by CodeBits. */
template <gk_dtype OF_A, gk_dtype OF_B> struct FloatProduct : DefaultProduct {
    typedef float Sum;
    struct A { /* register 2 i + j of x becomes [j][i] and [j][i + 2] */
        uint32_t r[2][4];
    };
    struct B {
        uint32_t r[2][4];
    };
    const TwoCodeBits &bits;

    __device__ __forceinline__ explicit FloatProduct(const TwoCodeBits &x) : bits(x) {}
    template <gk_dtype OF>
    static __device__ __forceinline__ uint32_t pair(uint32_t x, const CodeBits &of) {
        return OF == GK_E4M3 ? e4m3_pair(x) : OF == GK_E5M2 ? x & 0xff00ff00u : any_pair(x, of);
    }
    /* x[h + 2 j]: rows 8 h, bytes 16 j of k. */
    __device__ __forceinline__ A ready_a(const uint32_t *x) const {
        A y;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            y.r[i / 2][i % 2] = pair<OF_A>(x[i] << 8, bits.a);
            y.r[i / 2][i % 2 + 2] = pair<OF_A>(x[i], bits.a);
        }
        return y;
    }
    /* x[j + 2 h]: columns 8 h. */
    __device__ __forceinline__ B ready_b(const uint32_t *x) const {
        B y;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            y.r[i % 2][i / 2 * 2] = pair<OF_B>(x[i] << 8, bits.b);
            y.r[i % 2][i / 2 * 2 + 1] = pair<OF_B>(x[i], bits.b);
        }
        return y;
    }
    template <int NT>
    static __device__ __forceinline__ void multiply(Sum (&sum)[2 * NT][4], const A &x,
                                                    const B (&y)[NT], int, int) {
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                mma_add<__half>(sum[2 * n], x.r[j], y[n].r[j]);
                mma_add<__half>(sum[2 * n + 1], x.r[j], y[n].r[j] + 2);
            }
    }
};

/* ---- 3 scales along k ------------------------------------------------------------------------ */
/* A matrix's scales along x (rows of a, or columns of b) and k. */
struct ScalesAlongK {
    const void *data;
    gk_dtype dtype;
    int x_log2, k_log2;
    int64_t x, k;
};

struct Blocks {
    ScalesAlongK a, b;
    int64_t m, n, k;
    int mask;     /* a block is (mask + 1) 32 of k; mask is 0 or 3 */
    bool along_k; /* false: all of k is one block without scales */
};

/* Multiplies the sums of each block of k by the block's scales in float32, and adds them to
 * `total`.
 *
 * Shared memory holds the scales of three steps as floats: of the current step, of the next one,
 * and of the previous one, which slower warps may still read. Each thread loads the scales of one
 * row or column from global memory two steps before they are used. */
template <class Inner, class Tile> struct BlockProduct : Inner {
    typedef typename Inner::Sum Sum;
    static constexpr int MT = Tile::WM / 16, NT = Tile::WN / 16, KK = Tile::BK / 32,
                         ROWS = Tile::BM + Tile::BN;
    static constexpr int STEP_BYTES = KK * ROWS * 4, BYTES = 3 * STEP_BYTES;
    static_assert(Tile::THREADS >= ROWS, "a row or a column a thread");

    float total[MT][2 * NT][4];
    const Blocks &p;
    smem_addr scales_s;
    int mine; /* this thread's row or column, whose scales it reads */
    int warp_m, warp_n;
    float ahead[KK]; /* scales of the next step to write */

    __device__ __forceinline__ BlockProduct(const Inner &inner, const Blocks &blocks,
                                            smem_addr at_s, int row0, int col0, int m, int n)
        : Inner(inner), p(blocks), scales_s(at_s), warp_m(m), warp_n(n) {
#pragma unroll
        for (int i = 0; i < MT * 2 * NT * 4; ++i)
            total[i / (2 * NT * 4)][i / 4 % (2 * NT)][i % 4] = 0;
        const int thread = threadIdx.x;
        mine = thread < Tile::BM ? min(row0 + thread, (int)p.m - 1)
                                 : min(col0 + thread - Tile::BM, (int)p.n - 1);
        if (!p.along_k) return;
        read(0);
        write(0);
        read(1);
    }
    __device__ __forceinline__ void read(int j) {
        const ScalesAlongK &s = threadIdx.x < Tile::BM ? p.a : p.b;
        const int64_t at = (mine >> min(s.x_log2, 31)) * s.x;
#pragma unroll
        for (int i = 0; i < KK; ++i) {
            if (i && p.mask) break;
            const int64_t k = (int64_t)(j * KK + i) * 32;
            ahead[i] = 1; /* beyond the end of k, sums are 0 and need a finite scale */
            if (k < p.k && threadIdx.x < ROWS)
                ahead[i] = scale_value(s.data, s.dtype, at + (k >> s.k_log2) * s.k);
        }
    }
    __device__ __forceinline__ void write(int j) const {
        const smem_addr to_s = scales_s + 4 * threadIdx.x + (unsigned)j % 3 * STEP_BYTES;
#pragma unroll
        for (int i = 0; i < KK; ++i) {
            if (i && p.mask) break;
            if (threadIdx.x < ROWS) st_shared_f32(to_s + i * ROWS * 4, ahead[i]);
        }
    }
    __device__ __forceinline__ void before_barrier(int j) {
        if (p.along_k) {
            write(j + 1);
            read(j + 2);
        }
    }
    __device__ __forceinline__ void join(Sum (&sum)[MT][2 * NT][4], int q, bool last) {
        if (!last && (!p.along_k || (q & p.mask) != p.mask)) return;
        float a[MT][2];
#pragma unroll
        for (int i = 0; i < 2 * MT; ++i) a[i / 2][i % 2] = 1;
        const int lane = threadIdx.x % 32;
        const smem_addr of_q =
            scales_s + (unsigned)(q / KK) % 3 * STEP_BYTES + (p.mask ? 0 : q % KK) * (ROWS * 4);
        const smem_addr cols_s = of_q + 4 * (Tile::BM + warp_n + lane % 4 * 2);
        if (p.along_k) {
            const smem_addr rows_s = of_q + 4 * (warp_m + lane / 4);
#pragma unroll
            for (int i = 0; i < 2 * MT; ++i) a[i / 2][i % 2] = ld_shared_f32(rows_s + 4 * 8 * i);
        }
        /* The scales of b are read two at a time, because all of them would not fit into registers.
         */
#pragma unroll
        for (int n = 0; n < 2 * NT; ++n) {
            float b[2] = {1, 1};
            if (p.along_k) {
                const uint2 x = ld_shared_64(cols_s + 4 * 8 * n);
                b[0] = __uint_as_float(x.x);
                b[1] = __uint_as_float(x.y);
            }
#pragma unroll
            for (int i = 0; i < MT; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    total[i][n][e] =
                        fmaf((float)sum[i][n][e] * a[i][e / 2], b[e % 2], total[i][n][e]);
                    sum[i][n][e] = 0;
                }
        }
    }
};

} // namespace

#endif
