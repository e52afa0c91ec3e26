/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_plain: out = activation(alpha a b + beta c + bias) on the ordinary multiply-add units,
 * for float32 and float64. Volkov and Demmel 2008, "Benchmarking GPUs to tune dense linear
 * algebra": sums in registers, operands in shared memory.
 *
 * a [batch, M, K], b [batch, K, N]: any strides and alignment, also zero and negative strides.
 * out [batch, M, N].
 *
 * Grid: one block for each tile BM x BN of one split of k of one batch entry. With few tiles, k is
 * split (split.cuh); plain_plan.c decides this. A block has WARPS_M x WARPS_N warps, and a warp has
 * 4 x 8 lanes. A thread owns GM x GN groups of V x V sums, where V elements are 16 bytes. Its
 * groups are interleaved with those of the other lanes, so that the lanes of one load read
 * neighbours.
 *
 * Shared memory, STAGES stages of
 *   a [BK][BM + V]   k outermost, so that a thread's V rows are one 16-byte load
 *   b [BK][BN + V]   padded by V, so that elements along k fall into different banks
 *
 * Pipeline (pipeline.cuh), one barrier a step:
 *   copy     k0 k1 | k2   k3   k4  ..
 *   compute        | k0   k1   k2  ..
 * cp.async copies 16 bytes at a time. If an operand is K-major, it copies single elements, which
 * transposes the operand. For elements outside the matrix, a copy of 0 bytes writes zeros.
 *
 * Refuses: 16-bit dtypes. gemm_sm80 serves these and, if it can, tf32. */
#include "../../ptx/cp_async.cuh"
#include "../../layout/banks.cuh"
#include "../../tile/pipeline.cuh"
#include "order.cuh"
#include "plain_plan.h"
#include "split.cuh"
#include "tiles.h"

namespace {

constexpr int LANES_M = 4, LANES_N = 8;

template <class Tile> constexpr int threads_of() { return Tile::WARPS_M * Tile::WARPS_N * 32; }

/* ---- 1 the tile ------------------------------------------------------------------------------ */
template <class T, class Tile> struct Map {
    static constexpr int V = 16 / (int)sizeof(T);
    /* Rows and columns of a warp's tile. */
    static constexpr int WM = Tile::BM / Tile::WARPS_M, WN = Tile::BN / Tile::WARPS_N;
    /* Groups of a thread. */
    static constexpr int GM = WM / (V * LANES_M), GN = WN / (V * LANES_N);
    /* Sums of a thread. */
    static constexpr int TM = GM * V, TN = GN * V;
    static constexpr int A_LD = Tile::BM + V, B_LD = Tile::BN + V;
    static constexpr int A_BYTES = Tile::BK * A_LD * (int)sizeof(T),
                         B_BYTES = Tile::BK * B_LD * (int)sizeof(T);
    static constexpr int SMEM_BYTES = Tile::STAGES * (A_BYTES + B_BYTES);
    /* Lanes l and l ^ 1 share columns, and lanes l and l ^ 2 share rows. So a 16-byte load does
     * not take one pass for every 8 lanes. */
    static_assert(WM == TM * LANES_M && WN == TN * LANES_N,
                  "whole groups of V rows and of V columns a thread");
    static constexpr GK_HD int row(int warp, int lane, int group) {
        return warp % Tile::WARPS_M * WM + group * (WM / GM) + (lane / 16 * 2 + lane % 2) * V;
    }
    static constexpr GK_HD int col(int warp, int lane, int group) {
        return warp / Tile::WARPS_M * WN + group * (WN / GN) + lane / 2 % LANES_N * V;
    }
};

/* Copies one operand into the ring by cp.async, [BK][BX] elements in a step. If ALONG_K, 8 lanes
 * run along k. Otherwise lanes run along x, with 16-byte copies if rows are aligned. */
template <class T, int BX, class Tile, bool ALONG_K> struct PlainCopy {
    static constexpr int BK = Tile::BK, THREADS = threads_of<Tile>();
    static constexpr int V = 16 / (int)sizeof(T), LD = BX + V, EACH = BX * BK / THREADS;
    /* A thread's elements: X_PASSES along x times K_PASSES along k. */
    static constexpr int K_PASSES = ALONG_K ? BK / 8 : EACH, X_PASSES = EACH / K_PASSES;
    /* The distance between passes. */
    static constexpr int K_STEP = ALONG_K ? 8 : THREADS / BX, X_STEP = THREADS / 8;
    static constexpr int VECTOR_ROWS = THREADS * V / BX;
    static_assert(BX * BK % THREADS == 0 && BK % 8 == 0 && BX % 32 == 0 &&
                      (THREADS % BX == 0 || ALONG_K),
                  "whole passes");
    static constexpr GK_HD int thread_k(int thread) { return ALONG_K ? thread % 8 : thread / BX; }
    static constexpr GK_HD int thread_x(int thread) { return ALONG_K ? thread / 8 : thread % BX; }
    static constexpr GK_HD int conflicts() { /* 32 lanes store an element each */
        int bytes[32] = {};
        for (int lane = 0; lane < 32; ++lane)
            bytes[lane] = (thread_k(lane) * LD + thread_x(lane)) * (int)sizeof(T);
        return ways(bytes, (int)sizeof(T));
    }
    static_assert(conflicts() == 1,
                  "8 rows of LD elements and 4 neighbours fall into different banks");

    const T *from_g; /* this thread's element of pass 0 */
    int64_t step_x, step_k;
    int k, x;
    bool vectors;

    __device__ __forceinline__ PlainCopy(const T *tile_g, int64_t x_stride, int64_t k_stride,
                                         bool aligned, int thread)
        : step_x(x_stride), step_k(k_stride), vectors(!ALONG_K && aligned) {
        k = vectors ? thread * V / BX : thread_k(thread);
        x = vectors ? thread * V % BX : thread_x(thread);
        from_g = tile_g + x * step_x + k * step_k;
    }

    /* Copies one step and advances to the next. Columns from x_valid on and rows of k from
     * k_valid on become zeros. */
    __device__ __forceinline__ void run(smem_addr tile_s, int x_valid, int k_valid) {
        const smem_addr to_s = tile_s + (k * LD + x) * (int)sizeof(T);
        if (vectors) {
            const int bytes = min(max(x_valid - x, 0), V) * (int)sizeof(T);
#pragma unroll
            for (int i = 0; i < EACH / V; ++i)
                cp_async_cg_16(to_s + i * VECTOR_ROWS * LD * (int)sizeof(T),
                               from_g + i * VECTOR_ROWS * step_k,
                               k + i * VECTOR_ROWS < k_valid ? bytes : 0);
        } else {
            const T *at_g = from_g;
#pragma unroll
            for (int i = 0; i < X_PASSES; ++i, at_g += X_STEP * step_x)
#pragma unroll
                for (int j = 0; j < K_PASSES; ++j)
                    cp_async_ca<sizeof(T)>(
                        to_s + (j * K_STEP * LD + i * X_STEP) * (int)sizeof(T),
                        at_g + j * K_STEP * step_k,
                        k + j * K_STEP < k_valid && x + i * X_STEP < x_valid ? (int)sizeof(T) : 0);
        }
        from_g += BK * step_k;
    }
};

typedef PlainPlan Params;

/* ---- 2 the kernel ---------------------------------------------------------------------------- */
template <class T, int V> __device__ __forceinline__ void load_group(T *v, const T *from_s) {
    union {
        uint4 quad;
        T x[V];
    } u;
    u.quad = *(const uint4 *)from_s;
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = u.x[i];
}

template <class T, class Tile, bool A_ALONG_K, bool B_ALONG_K>
__global__ void __launch_bounds__(threads_of<Tile>(), Tile::PER_SM)
    gemm_plain_kernel(Params params) {
    typedef Map<T, Tile> M;
    constexpr int BM = Tile::BM, BN = Tile::BN, BK = Tile::BK, STAGES = Tile::STAGES, V = M::V,
                  TM = M::TM, TN = M::TN;
    extern __shared__ __align__(16) unsigned char smem[];
    const GemmProblem &p = params.p;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const unsigned tiles = (unsigned)p.tiles_m * p.tiles_n;
    const TilePlace tile = tile_place(blockIdx.x % tiles, p.tiles_m, p.tiles_n, p.group);
    const int split = blockIdx.x / tiles % p.splits;
    const int64_t batch = blockIdx.x / tiles / p.splits;
    const GemmPlace at = gemm_place(p, batch);
    const int64_t row0 = (int64_t)tile.row * BM, col0 = (int64_t)tile.col * BN;
    const int64_t k0 = split * p.split_k, k_end = min(p.k, k0 + p.split_k);
    const int m_valid = (int)min((int64_t)BM, p.m - row0),
              n_valid = (int)min((int64_t)BN, p.n - col0);
    const int steps = (int)((k_end - k0 + BK - 1) / BK);

    PlainCopy<T, BM, Tile, A_ALONG_K> a_copy((const T *)p.a + at.a + row0 * p.a_m + k0 * p.a_k,
                                             p.a_m, p.a_k, params.a_vectors, thread);
    PlainCopy<T, BN, Tile, B_ALONG_K> b_copy((const T *)p.b + at.b + col0 * p.b_n + k0 * p.b_k,
                                             p.b_n, p.b_k, params.b_vectors, thread);
    const smem_addr a_s = cvta_to_shared(smem), b_s = a_s + STAGES * M::A_BYTES;
    int64_t k_left = k_end - k0; /* elements of k that are not copied yet */
    cp_ring<STAGES> ring;
    for (int j = 0; j < STAGES - 1; ++j) {
        if (j < steps) {
            const int k_valid = (int)min((int64_t)BK, k_left);
            a_copy.run(a_s + j * M::A_BYTES, m_valid, k_valid);
            b_copy.run(b_s + j * M::B_BYTES, n_valid, k_valid);
            k_left -= BK;
        }
        ring.commit();
    }

    T sum[TM][TN] = {}, total[Tile::TWO_SUMS ? TM : 1][TN] = {};
    const int row = M::row(warp, lane, 0), col = M::col(warp, lane, 0);
    for (int j = 0; j < steps; ++j) {
        ring.wait(); /* step j has arrived; all threads have read stage ring.write */
        if (j + STAGES - 1 < steps) {
            const int k_valid = (int)min((int64_t)BK, k_left);
            a_copy.run(a_s + ring.write * M::A_BYTES, m_valid, k_valid);
            b_copy.run(b_s + ring.write * M::B_BYTES, n_valid, k_valid);
            k_left -= BK;
        }
        ring.commit();
        const T *a_at = (const T *)(smem + ring.read * M::A_BYTES) + row;
        const T *b_at = (const T *)(smem + STAGES * M::A_BYTES + ring.read * M::B_BYTES) + col;
#pragma unroll
        for (int k = 0; k < BK; ++k) {
            T a[TM], b[TN];
#pragma unroll
            for (int g = 0; g < M::GM; ++g)
                load_group<T, V>(a + g * V, a_at + k * M::A_LD + g * (M::WM / M::GM));
#pragma unroll
            for (int g = 0; g < M::GN; ++g)
                load_group<T, V>(b + g * V, b_at + k * M::B_LD + g * (M::WN / M::GN));
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int n = 0; n < TN; ++n) sum[i][n] = fma(a[i], b[n], sum[i][n]);
        }
        if constexpr (Tile::TWO_SUMS) {
#pragma unroll
            for (int i = 0; i < TM; ++i)
#pragma unroll
                for (int n = 0; n < TN; ++n) {
                    total[i][n] += sum[i][n];
                    sum[i][n] = 0;
                }
        }
        ring.advance();
    }
    if constexpr (Tile::TWO_SUMS) {
#pragma unroll
        for (int i = 0; i < TM; ++i)
#pragma unroll
            for (int n = 0; n < TN; ++n) sum[i][n] = total[i][n];
    }

    /* ---- 3 the results ----------------------------------------------------------------------- */
    /* One row of sums at a time, V columns at once. The loop is not unrolled, so that its code
     * exists once: each pass takes row 0 of the sums and shifts the others up. */
#pragma unroll 1
    for (int i = 0; i < TM; ++i) {
        const int64_t r = row0 + M::row(warp, lane, i / V) + i % V;
#pragma unroll
        for (int g = 0; g < M::GN; ++g) {
            const int64_t c = col0 + M::col(warp, lane, g);
            if (r >= p.m || c >= p.n) continue;
            if (p.splits > 1)
                write_partials<V>(p, split, batch, r, c, &sum[0][g * V]);
            else
                epilogue_row<T, V>(p.epilogue, at, r, c, (int)min((int64_t)V, p.n - c),
                                   &sum[0][g * V]);
        }
#pragma unroll
        for (int n = 0; n + 1 < TM; ++n)
#pragma unroll
            for (int g = 0; g < TN; ++g) sum[n][g] = sum[n + 1][g];
    }
}

/* ---- 4 the launch ---------------------------------------------------------------------------- */
template <class T, class Tile> int blocks_an_sm() {
    return blocks_per_sm<gemm_plain_kernel<T, Tile, true, false>>(threads_of<Tile>(),
                                                                  Map<T, Tile>::SMEM_BYTES);
}

template <class T, class Tile>
gk_status run(const gk_context *ctx, const void *, const gk_plan *plan, void *workspace) {
    Params x = gk_own<Params>(plan);
    GemmProblem &p = x.p;
    if (p.m == 0 || p.n == 0 || p.batch == 0) return GK_OK;
    p.partials = workspace;
    const dim3 grid((unsigned)plan->tasks);
    constexpr int THREADS = threads_of<Tile>();
    const int bytes = Map<T, Tile>::SMEM_BYTES;
    gk_status status;
    if (x.a_along_k)
        status = x.b_along_k ? launch<gemm_plain_kernel<T, Tile, true, true>>("gk_gemm", ctx, grid,
                                                                              THREADS, bytes, x)
                             : launch<gemm_plain_kernel<T, Tile, true, false>>("gk_gemm", ctx, grid,
                                                                               THREADS, bytes, x);
    else
        status = x.b_along_k ? launch<gemm_plain_kernel<T, Tile, false, true>>("gk_gemm", ctx, grid,
                                                                               THREADS, bytes, x)
                             : launch<gemm_plain_kernel<T, Tile, false, false>>(
                                   "gk_gemm", ctx, grid, THREADS, bytes, x);
    return status == GK_OK && p.splits > 1 ? launch_reduce<T>(ctx, p) : status;
}

} // namespace

#define PLAIN(type, name, dtype, T, ...)              \
    GK_DEFINE_LAUNCH(gemm_plain_##type, run<T, type>) \
    GK_DEFINE_BLOCKS(gemm_plain_##type, blocks_an_sm<T, type>)
#include "instances.def"
