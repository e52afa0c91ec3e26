/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_sm80: out = activation(alpha a b + beta c + bias) on the tensor cores by mma.sync: bfloat16, float16, tf32.
 *
 * a [batch, M, K]  b [batch, K, N]   each K-major or MN-major, other strides any (NN NT TN TT)
 * bias [N], c broadcasts, out [batch, M, N], preact like out; float32 sums, one rounding
 * Grid: a block per tile BM x BN of one split of k of one batch entry, in the order of order.cuh; a warp owns WM x WN.
 *
 * Shared memory, STAGES stages of two tiles; afterwards the same bytes hold the sums, a warp each:
 *   a  [BM][BK], or [BK][BM] where a is MN-major        swizzled (banks.cuh); tf32 [BK][BM] is padded instead,
 *   b  [BN][BK], or [BK][BN] where b is MN-major        since ldmatrix cannot transpose 32-bit elements
 *   sums  [warp][WM][WN + 8] float
 *
 * Pipeline: copies run STAGES - 1 steps ahead, fragments one k16 (tf32: k8) ahead of their mma, across the barrier too:
 *   copy       k0 k1 | k2                k3
 *   fragments      f00 | f01  f02  f03 | f10  f11 ..       the barrier stands between the last two of a step:
 *   mma                |  00   01   02   03   10  ..       all have read stage j when j's last fragments are in
 *
 * Rows of ANY alignment: plain loads at the step's start, stores to shared memory at its end, else the same.
 * Few tiles: k is split (split.cuh). The instance is the one of least time by `plan_of`: whole waves first.
 * Not here: ieee float32, float64, misaligned tf32 (gemm_plain). */
#include "../tile/copy.cuh"
#include "../tile/convert.cuh"
#include "../tile/fragment.cuh"
#include "../tile/pipeline.cuh"
#include "order.cuh"
#include "split.cuh"
#include "tiles.h"

namespace {

enum Mode {
    A_ALONG_M = 1,
    B_ALONG_N = 2,
    ANY = 4 /* alignment and strides */
};

/* ---- 1 tiles in shared memory -------------------------------------------------------------------------------- */
/* 32-bit elements [k][x], read one by one: 8 elements more a row put the 4 k and 8 x of a fragment into 32 banks. */
template <int ROWS, int ROW_BYTES> struct PaddedTile {
    static constexpr int rows = ROWS, chunks = ROW_BYTES / 16, ld_bytes = ROW_BYTES + 32, bytes = ROWS * ld_bytes;
    static constexpr GK_HD int offset(int row, int chunk) { return row * ld_bytes + chunk * 16; }
    static constexpr GK_HD unsigned down(unsigned at, int rows_down) { return at + rows_down * ld_bytes; }
    static constexpr GK_HD int fragment_ways() {
        int bytes_of[32] = {};
        for (int lane = 0; lane < 32; ++lane)
            bytes_of[lane] = frag_b32(lane, 0).row * ld_bytes + frag_b32(lane, 0).col * 4;
        return ways(bytes_of, 4);
    }
    static_assert(ROW_BYTES % 128 == 0 && fragment_ways() == 1, "no bank conflict between the lanes of a fragment");
};

template <class T, int BX, int BK, bool ALONG_X> struct OperandTile {
    typedef smem_tile<BX, BK *(int)sizeof(T)> type;
};
template <class T, int BX, int BK> struct OperandTile<T, BX, BK, true> {
    typedef smem_tile<BK, BX *(int)sizeof(T)> type;
};
template <int BX, int BK> struct OperandTile<float, BX, BK, true> {
    typedef PaddedTile<BK, BX * 4> type;
};

/* ---- 2 from global memory into a tile ------------------------------------------------------------------------ */
/* Tile row r, column c is element r row_stride + c col_stride; a thread keeps its chunk of the rows r0, r0 + STEP .. */
template <class T, class Tile, int THREADS> struct Feed {
    static constexpr int STEP = THREADS / Tile::chunks, PASSES = Tile::rows / STEP, EACH = 16 / (int)sizeof(T);
    static_assert(THREADS % Tile::chunks == 0 && Tile::rows % STEP == 0, "whole passes");
    static_assert(STEP % 8 == 0 || sizeof(T) == 4, "one swizzle for all rows of a thread");

    const T *from_g, *at_g; /* the thread's chunk of row r0 in the next step; of the next pass in this one */
    int64_t pass_step, col_stride, k_step;
    int row, chunk, rows_left, bytes;
    unsigned offset;

    __device__ __forceinline__ Feed(const T *tile_g, int64_t row_stride, int64_t col_stride_, int64_t k_step_,
                                    int thread)
        : pass_step(STEP * row_stride), col_stride(col_stride_), k_step(k_step_) {
        row = thread / Tile::chunks, chunk = thread % Tile::chunks;
        offset = Tile::offset(row, chunk);
        from_g = tile_g + row * row_stride + chunk * EACH * col_stride;
    }
    /* a step is begin, then pass 0 .. PASSES - 1, in order */
    __device__ __forceinline__ void begin(int rows_valid, int cols_valid) {
        rows_left = rows_valid - row, bytes = chunk_bytes<T>(chunk, cols_valid);
        at_g = from_g, from_g += k_step;
    }
    __device__ __forceinline__ void pass(smem_addr tile_s, int i) {
        cp_async_cg_16(Tile::down(tile_s + offset, i * STEP), at_g, i * STEP < rows_left ? bytes : 0);
        at_g += pass_step;
    }
    __device__ __forceinline__ void fetch(uint4 *chunks, int rows_valid, int cols_valid) {
        const int count = cols_valid - chunk * EACH;
        at_g = from_g, from_g += k_step;
#pragma unroll
        for (int i = 0; i < PASSES; ++i, at_g += pass_step) {
            union {
                uint4 quad;
                unsigned short halves[8];
            } u;
            const int valid = row + i * STEP < rows_valid ? count : 0;
#pragma unroll
            for (int c = 0; c < 8; ++c)
                u.halves[c] = c < valid ? ((const unsigned short *)at_g)[c * col_stride] : (unsigned short)0;
            chunks[i] = u.quad;
        }
    }
    __device__ __forceinline__ void put(smem_addr tile_s, const uint4 *chunks) const {
#pragma unroll
        for (int i = 0; i < PASSES; ++i) st_shared_128(Tile::down(tile_s + offset, i * STEP), chunks[i]);
    }
};

/* ---- 3 from a tile into fragments ---------------------------------------------------------------------------- */
/* kk counts k16 (tf32: k8) of the step, i blocks of 16 rows of a or columns of b. */
template <class T, class Tile, bool ALONG_X> struct LoadA {
    static __device__ __forceinline__ smem_addr base(smem_addr tile_s, int lane, int m) {
        return ALONG_X ? frag_a_trans_base<Tile>(tile_s, lane, 0, m / 8) : frag_a_base<Tile>(tile_s, lane, m, 0);
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
        return ALONG_X ? frag_b_trans_base<Tile>(tile_s, lane, 0, n / 8) : frag_b_base<Tile>(tile_s, lane, n, 0);
    }
    static __device__ __forceinline__ void load(uint32_t *b, smem_addr at_s, int kk, int i) {
        if constexpr (ALONG_X)
            load_frag_b_trans(b, Tile::along(Tile::down(at_s, 16 * kk), 2 * i));
        else
            load_frag_b(b, Tile::down(Tile::along(at_s, 2 * kk), 16 * i));
    }
};
/* tf32 from [k][x]; either operand's element e of a lane is (k, x) = (lane % 4, lane / 4) plus a constant */
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

/* The tensor cores cut tf32 operands off. A factor of 1 + 2^-10 / 3 first adds a third to two thirds of a unit in the
 * last place: rounding to 5% more error than to nearest, in one instruction instead of two, exact where x is exact. */
template <class T> __device__ __forceinline__ void round_operand(uint32_t *x) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = __float_as_uint(__uint_as_float(x[e]) * 1.00032552f);
    }
}

/* ---- 4 the kernel -------------------------------------------------------------------------------------------- */
template <class T, class Tile, int MODE> struct Smem {
    typedef typename OperandTile<T, Tile::BM, Tile::BK, (MODE & A_ALONG_M) != 0>::type A;
    typedef typename OperandTile<T, Tile::BN, Tile::BK, (MODE & B_ALONG_N) != 0>::type B;
    static constexpr int SUM_LD = Tile::WN + 8, WARP_SUMS = Tile::WM * SUM_LD * 4;
    static constexpr int RING = Tile::STAGES * (A::bytes + B::bytes), SUMS = Tile::THREADS / 32 * WARP_SUMS;
    static constexpr int BYTES = RING > SUMS ? RING : SUMS;
    static_assert(A::bytes % 128 == 0 && B::bytes % 128 == 0, "every tile starts on a multiple of 128");

    /* byte of a lane's pair of sums; of the two halves of the octet that a lane reads, the later first in lanes 4-7 */
    static constexpr GK_HD int pair_at(int lane) { return (lane / 4 * SUM_LD + lane % 4 * 2) * 4; }
    static constexpr GK_HD int octet_at(int lane) {
        return (lane / (Tile::WN / 8) * SUM_LD + lane % (Tile::WN / 8) * 8) * 4;
    }
    static constexpr GK_HD int half_at(int lane) { return octet_at(lane) + lane / 4 % 2 * 16; }
    static constexpr GK_HD int sum_ways(bool halves) {
        int bytes[32] = {};
        for (int lane = 0; lane < 32; ++lane) bytes[lane] = halves ? half_at(lane) : pair_at(lane);
        return ways(bytes, halves ? 16 : 8);
    }
    static_assert(sum_ways(false) == 1 && sum_ways(true) == 1, "sums go through shared memory without conflicts");
};

template <class T, class Tile, int MODE>
__global__ void __launch_bounds__(Tile::THREADS, Tile::PER_SM) gemm_sm80_kernel(GemmProblem p) {
    typedef Smem<T, Tile, MODE> S;
    typedef typename S::A A;
    typedef typename S::B B;
    typedef LoadA<T, A, (MODE & A_ALONG_M) != 0> LA;
    typedef LoadB<T, B, (MODE & B_ALONG_N) != 0> LB;
    constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, STAGES = Tile::STAGES, THREADS = Tile::THREADS;
    constexpr int WM = Tile::WM, WN = Tile::WN, MT = WM / 16, NT = WN / 16, KK = BK * (int)sizeof(T) / 32;
    constexpr int AP = Feed<T, A, THREADS>::PASSES, BP = Feed<T, B, THREADS>::PASSES;
    constexpr int GROUPS = (KK - 1) * MT; /* of products in a step, before its barrier; the copies spread over them */
    static_assert(KK % 2 == 0, "fragments alternate between two buffers, and a step ends where it began");
    extern __shared__ __align__(128) unsigned char smem[];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int warp_m = warp % (BM / WM) * WM, warp_n = warp / (BM / WM) * WN;

    const unsigned tiles = (unsigned)p.tiles_m * p.tiles_n;
    const TilePlace tile = tile_place(blockIdx.x % tiles, p.tiles_m, p.tiles_n, p.group);
    const int split = blockIdx.x / tiles % p.splits;
    const int64_t batch = blockIdx.x / tiles / p.splits;
    const int64_t row0 = (int64_t)tile.row * BM, col0 = (int64_t)tile.col * BN;
    const int64_t k0 = split * p.split_k, k_end = min(p.k, k0 + p.split_k);
    const int m_valid = (int)min((int64_t)BM, p.m - row0), n_valid = (int)min((int64_t)BN, p.n - col0);
    const int steps = (int)((k_end - k0 + BK - 1) / BK);

    const GemmPlace at = gemm_place(p, batch);
    const T *a_g = (const T *)p.a + at.a + row0 * p.a_m + k0 * p.a_k;
    const T *b_g = (const T *)p.b + at.b + col0 * p.b_n + k0 * p.b_k;
    Feed<T, A, THREADS> a_feed(a_g, MODE & A_ALONG_M ? p.a_k : p.a_m, MODE & A_ALONG_M ? p.a_m : p.a_k, BK * p.a_k,
                               thread);
    Feed<T, B, THREADS> b_feed(b_g, MODE & B_ALONG_N ? p.b_k : p.b_n, MODE & B_ALONG_N ? p.b_n : p.b_k, BK * p.b_k,
                               thread);
    const smem_addr a_s = cvta_to_shared(smem), b_s = a_s + STAGES * A::bytes;
    int64_t k_left = k_end - k0; /* from the step that is copied next on */
    uint4 a_chunks[MODE & ANY ? AP : 1], b_chunks[MODE & ANY ? BP : 1];

/* rows and columns of a tile that lie inside the matrix, k of it ending at k_valid */
#define A_VALID (MODE & A_ALONG_M ? k_valid : m_valid), (MODE & A_ALONG_M ? m_valid : k_valid)
#define B_VALID (MODE & B_ALONG_N ? k_valid : n_valid), (MODE & B_ALONG_N ? n_valid : k_valid)
    cp_ring<STAGES> ring;
    for (int j = 0; j < STAGES - 1; ++j) {
        const int k_valid = (int)max((int64_t)0, min((int64_t)BK, k_left));
        k_left -= BK;
        if constexpr (MODE & ANY) {
            a_feed.fetch(a_chunks, A_VALID), b_feed.fetch(b_chunks, B_VALID);
            a_feed.put(a_s + j * A::bytes, a_chunks), b_feed.put(b_s + j * B::bytes, b_chunks);
        } else {
            a_feed.begin(A_VALID), b_feed.begin(B_VALID);
#pragma unroll
            for (int i = 0; i < AP; ++i) a_feed.pass(a_s + j * A::bytes, i);
#pragma unroll
            for (int i = 0; i < BP; ++i) b_feed.pass(b_s + j * B::bytes, i);
        }
        ring.commit();
    }

    float sum[MT][2 * NT][4] = {};
    uint32_t a[2][MT][4], b[2][NT][4];
    const smem_addr a_base = LA::base(a_s, lane, warp_m), b_base = LB::base(b_s, lane, warp_n);
    ring.wait(); /* step 0 is in, for all threads */
    if (steps > 0) {
#pragma unroll
        for (int i = 0; i < MT; ++i) LA::load(a[0][i], a_base, 0, i);
#pragma unroll
        for (int i = 0; i < NT; ++i) LB::load(b[0][i], b_base, 0, i);
    }
    for (int j = 0; j < steps; ++j) {
        smem_addr a_at = a_base + ring.read * A::bytes, b_at = b_base + ring.read * B::bytes;
        const smem_addr a_fill = a_s + ring.write * A::bytes,
                        b_fill = b_s + ring.write * B::bytes;               /* read in step j - 1 */
        const int k_valid = (int)max((int64_t)0, min((int64_t)BK, k_left)); /* 0 past the end: nothing is read */
        k_left -= BK;
        if constexpr (MODE & ANY)
            a_feed.fetch(a_chunks, A_VALID), b_feed.fetch(b_chunks, B_VALID);
        else
            a_feed.begin(A_VALID), b_feed.begin(B_VALID);
#pragma unroll
        for (int kk = 0; kk < KK; ++kk) {
            if (kk == KK - 1) {
                if constexpr (MODE & ANY) a_feed.put(a_fill, a_chunks), b_feed.put(b_fill, b_chunks);
                ring.commit();
                ring.wait(); /* step j + 1 is in; all have read the last fragments of step j */
                ring.advance();
                a_at = a_base + ring.read * A::bytes, b_at = b_base + ring.read * B::bytes;
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) round_operand<T>(b[kk % 2][n]);
            /* loads of the next fragments and copies stand between the products, so that neither starves the other;
             * after the last step they read a stage of zeros */
#pragma unroll
            for (int i = 0; i < MT; ++i) {
                round_operand<T>(a[kk % 2][i]);
                LA::load(a[(kk + 1) % 2][i], a_at, (kk + 1) % KK, i);
#pragma unroll
                for (int n = i * NT / MT; n < (i + 1) * NT / MT; ++n)
                    LB::load(b[(kk + 1) % 2][n], b_at, (kk + 1) % KK, n);
                if constexpr (!(MODE & ANY)) {
                    const int group = kk * MT + i;
                    if (group < GROUPS) {
#pragma unroll
                        for (int c = group * (AP + BP) / GROUPS; c < (group + 1) * (AP + BP) / GROUPS; ++c) {
                            if (c < AP)
                                a_feed.pass(a_fill, c);
                            else
                                b_feed.pass(b_fill, c - AP);
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    mma_add<T>(sum[i][2 * n], a[kk % 2][i], b[kk % 2][n]);
                    mma_add<T>(sum[i][2 * n + 1], a[kk % 2][i], b[kk % 2][n] + 2);
                }
            }
        }
    }
#undef A_VALID
#undef B_VALID

    /* ---- 5 the results: a warp's sums through shared memory, 8 columns a lane ---- */
    cp_async_wait_group<0>();
    __syncthreads(); /* no thread reads the ring any more, and no copy writes it: the sums may lie there */
    float *sums = (float *)(smem + warp * S::WARP_SUMS);
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int n = 0; n < 2 * NT; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *(float2 *)((char *)(sums + (i * 16 + h * 8) * S::SUM_LD + n * 8) + S::pair_at(lane)) =
                    make_float2(sum[i][n][2 * h], sum[i][n][2 * h + 1]);
    __syncwarp(); /* the warp's lanes read what the others stored */

    constexpr int OCTETS = WN / 8, ROWS = 32 / OCTETS; /* lanes of a row; rows of a pass */
    const int64_t col = col0 + warp_n + lane % OCTETS * 8;
    const int valid = (int)min((int64_t)8, p.n - col);
    if (valid <= 0) return;
    float bias[8];
    if (p.splits == 1) epilogue_bias<T, 8>(p.epilogue, 0, col, valid, bias);
#pragma unroll 1
    for (int r = 0; r < WM; r += ROWS) {
        const int64_t row = row0 + warp_m + r + lane / OCTETS;
        if (row >= p.m) break;
        const float *from_s = (const float *)((const char *)(sums + r * S::SUM_LD) + S::octet_at(lane));
        const bool late = lane / 4 % 2;
        const float4 x = *(const float4 *)(from_s + (late ? 4 : 0)), y = *(const float4 *)(from_s + (late ? 0 : 4));
        float v[8] = {late ? y.x : x.x, late ? y.y : x.y, late ? y.z : x.z, late ? y.w : x.w,
                      late ? x.x : y.x, late ? x.y : y.y, late ? x.z : y.z, late ? x.w : y.w};
        if (p.splits > 1)
            write_partials<8>(p, split, batch, row, col, v);
        else
            epilogue_cols<T, 8>(p.epilogue, at, row, col, valid, v, bias);
    }
}

/* ---- 6 the plan ---------------------------------------------------------------------------------------------- */
/* Mode of a problem for elements of `dtype`: ANY where either operand's rows are not whole chunks of 16 bytes. */
int mode_of(const GemmProblem &p, gk_dtype dtype) {
    const bool a_k = p.a_k == 1 && gemm_aligned(p.a, dtype, p.a_m, p.a_batch, p.ndim);
    const bool a_m = p.a_m == 1 && gemm_aligned(p.a, dtype, p.a_k, p.a_batch, p.ndim);
    const bool b_k = p.b_k == 1 && gemm_aligned(p.b, dtype, p.b_n, p.b_batch, p.ndim);
    const bool b_n = p.b_n == 1 && gemm_aligned(p.b, dtype, p.b_k, p.b_batch, p.ndim);
    if ((a_k || a_m) && (b_k || b_n)) return (a_k ? 0 : A_ALONG_M) | (b_k ? 0 : B_ALONG_N);
    return ANY | (llabs(p.a_m) < llabs(p.a_k) && p.m > 1 ? A_ALONG_M : 0) |
           (llabs(p.b_n) < llabs(p.b_k) && p.n > 1 ? B_ALONG_N : 0);
}

enum Key { /* of a row */
    KEY_BM,
    KEY_BN,
    KEY_BK,
    KEY_PER_SM,
    KEY_PERCENT, /* of the dense peak */
    KEY_SMEM,    /* bytes of a block, in the mode that needs most */
    KEY_ANY      /* ANY in the rows that serve every alignment, else 0 */
};

struct Plan {
    int splits;
    int64_t split_k;
    double us;
};
constexpr double FOREVER_US = 1e30;

/* Time of a row: the busiest SM's blocks, one after the other or together, and the pass that adds split sums. Only a time
 * below `below` counts: where there is none, us is `below` itself. */
Plan plan_of(const gk_cuda_instance *row, const gk_gpu *gpu, const GemmProblem &p, double below) {
    const int32_t *key = row->key;
    const int64_t bm = key[KEY_BM], bn = key[KEY_BN], bk = key[KEY_BK], per_sm = key[KEY_PER_SM];
    const int64_t tiles = gk_ceil_div(p.m, bm) * gk_ceil_div(p.n, bn) * p.batch;
    const int64_t steps = gk_max_i64(1, gk_ceil_div(p.k, bk));
    const double peak = (gpu->arch == 90 ? 4096 : 2048) / (row->dtype == GK_F32 ? 2.0 : 1.0) * gpu->clock_khz * 1e-3;
    const double step_us = 2.0 * (double)(bm * bn * bk) / (peak * key[KEY_PERCENT] * 0.01);
    Plan best = {1, steps * bk, below};
    const int64_t most = gk_clamp_i64(steps / 4, 1, MAX_SPLITS);
    int64_t each = 0;
    for (int64_t s = 1; s <= most; ++s) {
        const int64_t before = each;
        each = gk_ceil_div(steps, s);
        if (each == before) continue; /* the same parts */
        const int64_t parts = gk_ceil_div(steps, each);
        const double reduce = reduce_us(p, parts);
        if (parts > 1 && BLOCK_US + reduce >= best.us) break; /* it only grows with s */
        const int64_t busiest = gk_ceil_div(tiles * parts, gpu->num_sms);
        const double alone = busiest < per_sm ? PERCENT_ALONE * 0.01 : 1; /* nothing hides a lone block's waits */
        const double us =
            (double)(busiest * each) * step_us * alone + BLOCK_US * (double)gk_ceil_div(busiest, per_sm) + reduce;
        if (us < best.us) best = {(int)parts, each * bk, us};
    }
    return best;
}

extern const gk_cuda_instance *const sm80_rows;
extern const int num_sm80_rows;

/* Whether any row serves the call. */
bool serves(const gk_gemm_args *args, const GemmProblem &p) {
    if (args->a.dtype == GK_F64) return false;
    if (args->a.dtype != GK_F32) return true;
    /* a matrix times a vector is bound by memory: gemm_plain gives it whole float32 at the same speed */
    return args->fp32_precision == GK_TF32 && p.m > 1 && p.n > 1 && !(mode_of(p, GK_F32) & ANY);
}

bool plan_row(const gk_cuda_instance *row, const GemmProblem &problem, const Plan &best, gk_plan *to) {
    GemmProblem &p = gk_own<GemmProblem>(to) = problem;
    p.tiles_m = (int)gk_ceil_div(p.m, row->key[KEY_BM]), p.tiles_n = (int)gk_ceil_div(p.n, row->key[KEY_BN]);
    p.group = GROUP_ROWS, p.splits = best.splits, p.split_k = best.split_k;
    to->kernel = row, to->us = best.us;
    to->tile[0] = row->key[KEY_BM], to->tile[1] = row->key[KEY_BN], to->tile[2] = row->key[KEY_BK];
    to->tasks = (int64_t)p.tiles_m * p.tiles_n * p.splits * p.batch, to->chunks = p.splits;
    to->workspace_bytes = partials_bytes(p, p.splits, sizeof(float));
    return true;
}

bool plan(const gk_cuda_instance *row, const gk_context *ctx, const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = (const gk_gemm_args *)arguments;
    const GemmProblem p = gemm_problem_of(args);
    if (!serves(args, p) || row->key[KEY_ANY] != (mode_of(p, row->dtype) & ANY) || !smem_fits(ctx, row->key[KEY_SMEM]))
        return false;
    return plan_row(row, p, plan_of(row, gk_gpu_of(ctx->index), p, FOREVER_US), to);
}

/* By the row of least time among those that fit the GPU and serve the mode. */
bool plan_best(const gk_context *ctx, const void *arguments, gk_plan *to) {
    const gk_gemm_args *args = (const gk_gemm_args *)arguments;
    const GemmProblem p = gemm_problem_of(args);
    if (!serves(args, p)) return false;
    const gk_gpu *gpu = gk_gpu_of(ctx->index);
    const int any = mode_of(p, args->a.dtype) & ANY;
    const gk_cuda_instance *best = NULL;
    Plan best_plan = {1, 0, FOREVER_US};
    for (int i = 0; i < num_sm80_rows; ++i) {
        const gk_cuda_instance *r = &sm80_rows[i];
        if (r->dtype != args->a.dtype || r->key[KEY_ANY] != any || r->key[KEY_SMEM] > gpu->smem_per_block) continue;
        const Plan plan = plan_of(r, gpu, p, best_plan.us);
        if (!best || plan.us < best_plan.us) best = r, best_plan = plan;
    }
    return best && plan_row(best, p, best_plan, to);
}

/* ---- 7 the launch -------------------------------------------------------------------------------------------- */
template <class T, class Tile, int MODE> gk_status start(const gk_context *ctx, const GemmProblem &p) {
    const dim3 grid((unsigned)((int64_t)p.tiles_m * p.tiles_n * p.splits * p.batch));
    return launch<gemm_sm80_kernel<T, Tile, MODE>>("gk_gemm", ctx, grid, Tile::THREADS, Smem<T, Tile, MODE>::BYTES, p);
}

/* FIRST: 0, or ANY for the rows that serve every alignment. */
template <class T, class Tile, int FIRST>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *workspace) {
    GemmProblem p = gk_own<GemmProblem>(plan);
    if (p.m == 0 || p.n == 0 || p.batch == 0) return GK_OK;
    p.partials = workspace;
    gk_status status;
    switch (mode_of(p, element<T>::dtype) & 3) {
    case 0: status = start<T, Tile, FIRST>(ctx, p); break;
    case 1: status = start<T, Tile, FIRST + 1>(ctx, p); break;
    case 2: status = start<T, Tile, FIRST + 2>(ctx, p); break;
    default: status = start<T, Tile, FIRST + 3>(ctx, p); break;
    }
    return status == GK_OK && p.splits > 1 ? launch_reduce<T>(ctx, p) : status;
}

template <class T, class Tile, int FIRST> int blocks_an_sm() {
    return blocks_per_sm<gemm_sm80_kernel<T, Tile, FIRST>>(Tile::THREADS, Smem<T, Tile, FIRST>::BYTES);
}

#define ROW(name, T, Tile, first, percent)                                                          \
    {name,                                                                                          \
     element<T>::dtype,                                                                             \
     plan,                                                                                          \
     run<T, Tile, first>,                                                                           \
     {Tile::BM, Tile::BN, Tile::BK, Tile::PER_SM, percent, Smem<T, Tile, first + 3>::BYTES, first}, \
     blocks_an_sm<T, Tile, first>}
#define ROWS_16(name, T)                                                             \
    ROW("gemm_sm80_" name "_256x128x64", T, Tile16_256x128, 0, PERCENT_256x128),     \
        ROW("gemm_sm80_" name "_128x128x64", T, Tile16_128x128, 0, PERCENT_128x128), \
        ROW("gemm_sm80_" name "_64x128x64", T, Tile16_64x128, 0, PERCENT_64x128),    \
        ROW("gemm_sm80_" name "_64x64x64", T, Tile16_64x64, 0, PERCENT_64x64),       \
        ROW("gemm_sm80_any_" name "_128x128x32", T, Tile16_any, ANY, PERCENT_ANY)

const gk_cuda_instance instances[] = {
    ROWS_16("bf16", __nv_bfloat16),
    ROWS_16("f16", __half),
    ROW("gemm_sm80_tf32_128x128x32", float, Tile32_128x128, 0, PERCENT_TF32),
    ROW("gemm_sm80_tf32_64x64x32", float, Tile32_64x64, 0, PERCENT_TF32_64x64),
};
const gk_cuda_instance *const sm80_rows = instances;
const int num_sm80_rows = sizeof instances / sizeof instances[0];

} // namespace

extern "C" const gk_cuda_table gk_gemm_sm80_table = {instances, sizeof instances / sizeof instances[0], 80, plan_best};
