/* SPDX-License-Identifier: BSD-3-Clause */
/* gemm_sm80: out = activation(alpha a b + beta c + bias) on the tensor cores by mma.sync, for
 * bfloat16, float16 and tf32.
 *
 * a [batch, M, K] and b [batch, K, N] are each K-major or MN-major (NN, NT, TN, TT). The "any"
 * instances take any strides. bias has shape [N], c broadcasts to out, out has shape [batch, M, N],
 * and preact has that of out. Sums are float32 and are rounded once.
 *
 * Grid: a block for each tile BM x BN of one split of k of one batch entry, in the order of
 * order.cuh. A warp owns WM x WN. With few tiles, k is split (split.cuh). sm80_plan.c chooses the
 * instance.
 *
 * Shared memory: the ring of mainloop_sm80.cuh. After the last step the same bytes hold the
 * sums:
 *   sums  [warp][WM][WN + 8] float
 *
 * Refuses: float32 in full precision, float64, misaligned tf32 (gemm_plain). */
#include "mainloop_sm80.cuh"
#include "order.cuh"
#include "sm80_plan.h"
#include "split.cuh"
#include "tiles.h"

namespace {

/* ---- 1 the kernel ---------------------------------------------------------------------------- */
template <class T, class Tile, int MODE> struct Smem {
    static constexpr int SUM_LD = Tile::WN + 8, WARP_SUMS = Tile::WM * SUM_LD * 4;
    static constexpr int RING = Ring<T, Tile, MODE>::BYTES, SUMS = Tile::THREADS / 32 * WARP_SUMS;
    static constexpr int BYTES = RING > SUMS ? RING : SUMS;

    /* Byte offsets that the lanes access in `sums`. A lane writes pairs of sums and reads 8
     * columns. The 8 columns are two halves of 16 bytes. Every second group of four lanes reads the
     * later half first, which avoids bank conflicts. */
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
    static_assert(sum_ways(false) == 1 && sum_ways(true) == 1,
                  "sums go through shared memory without conflicts");
};

template <class T, class Tile, int MODE>
__global__ void __launch_bounds__(Tile::THREADS, Tile::PER_SM) gemm_sm80_kernel(OwnProblem p) {
    typedef Smem<T, Tile, MODE> S;
    constexpr int BM = Tile::BM, BN = Tile::BN, WM = Tile::WM, WN = Tile::WN, MT = WM / 16,
                  NT = WN / 16;
    extern __shared__ __align__(128) unsigned char smem[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_m = warp % (BM / WM) * WM, warp_n = warp / (BM / WM) * WN;

    const unsigned tiles = (unsigned)p.tiles_m * p.tiles_n;
    const TilePlace tile = tile_place(blockIdx.x % tiles, p.tiles_m, p.tiles_n, p.group);
    const int split = blockIdx.x / tiles % p.splits;
    const int64_t batch = blockIdx.x / tiles / p.splits;
    const int64_t row0 = (int64_t)tile.row * BM, col0 = (int64_t)tile.col * BN;
    const int64_t k0 = split * p.split_k, k_end = min(p.k, k0 + p.split_k);
    const int m_valid = (int)min((int64_t)BM, p.m - row0),
              n_valid = (int)min((int64_t)BN, p.n - col0);

    const OwnPlace at = gemm_place(p, batch);
    const Operand<T> a = {(const T *)p.a + at.a + row0 * p.a_m + k0 * p.a_k, p.a_m, p.a_k, m_valid};
    const Operand<T> b = {(const T *)p.b + at.b + col0 * p.b_n + k0 * p.b_k, p.b_n, p.b_k, n_valid};
    float sum[MT][2 * NT][4] = {};
    MmaProduct<T> product;
    multiply_sm80<T, Tile, MODE>(product, sum, a, b, k_end - k0, cvta_to_shared(smem), warp_m,
                                 warp_n);

    /* ---- 2 the results: a warp's sums go through shared memory, then a lane takes 8 columns
     * ---- */
    cp_async_wait_group<0>();
    /* No thread reads the ring any more and no copy writes it, so the sums may overwrite it. */
    __syncthreads();
    float *sums = (float *)(smem + warp * S::WARP_SUMS);
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int n = 0; n < 2 * NT; ++n)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *(float2 *)((char *)(sums + (i * 16 + h * 8) * S::SUM_LD + n * 8) +
                            S::pair_at(lane)) = make_float2(sum[i][n][2 * h], sum[i][n][2 * h + 1]);
    __syncwarp(); /* lanes read what other lanes wrote */

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
        const float *from_s =
            (const float *)((const char *)(sums + r * S::SUM_LD) + S::octet_at(lane));
        const bool late = lane / 4 % 2;
        const float4 x = *(const float4 *)(from_s + (late ? 4 : 0)),
                     y = *(const float4 *)(from_s + (late ? 0 : 4));
        float v[8] = {late ? y.x : x.x, late ? y.y : x.y, late ? y.z : x.z, late ? y.w : x.w,
                      late ? x.x : y.x, late ? x.y : y.y, late ? x.z : y.z, late ? x.w : y.w};
        if (p.splits > 1)
            write_partials<8>(p, split, batch, row, col, v);
        else
            epilogue_cols<T, 8>(p.epilogue, at, row, col, valid, v, bias);
    }
}

/* ---- 3 the launch ---------------------------------------------------------------------------- */
template <class T, class Tile, int MODE>
gk_status start(const gk_context *ctx, const OwnProblem &p) {
    const dim3 grid((unsigned)((int64_t)p.tiles_m * p.tiles_n * p.splits * p.batch));
    return launch<gemm_sm80_kernel<T, Tile, MODE>>("gk_gemm", ctx, grid, Tile::THREADS,
                                                   Smem<T, Tile, MODE>::BYTES, p);
}

/* FIRST: 0, or ANY for the instances that serve every alignment. */
template <class T, class Tile, int FIRST>
gk_status run(const gk_context *ctx, const void *args, const gk_plan *plan, void *workspace) {
    const Sm80Plan &own = gk_own<Sm80Plan>(plan);
    OwnProblem p = own_problem(own.p, args);
    if (p.m == 0 || p.n == 0 || p.batch == 0) return GK_OK;
    p.partials = workspace;
    gk_status status;
    switch (own.mode & 3) {
    case 0: status = start<T, Tile, FIRST>(ctx, p); break;
    case 1: status = start<T, Tile, FIRST + 1>(ctx, p); break;
    case 2: status = start<T, Tile, FIRST + 2>(ctx, p); break;
    default: status = start<T, Tile, FIRST + 3>(ctx, p); break;
    }
    return status == GK_OK && p.splits > 1 ? launch_reduce<T>(ctx, p) : status;
}

template <class T, class Tile, int FIRST> int blocks_an_sm() {
    return blocks_per_sm<gemm_sm80_kernel<T, Tile, FIRST>>(Tile::THREADS,
                                                           Smem<T, Tile, FIRST>::BYTES);
}

} // namespace

#define INSTANCE(id, T, type, any, bytes)                                                    \
    static_assert(Smem<T, type, (any) * ANY + 3>::BYTES == (bytes), "instances.def: BYTES"); \
    GK_DEFINE_LAUNCH(gemm_sm80_##id##_##type, run<T, type, (any) * ANY>)                     \
    GK_DEFINE_BLOCKS(gemm_sm80_##id##_##type, blocks_an_sm<T, type, (any) * ANY>)
#define SM80_16(type, name, bm, bn, bk, stages, wm, wn, per_sm, any, percent, bytes) \
    INSTANCE(bf16, __nv_bfloat16, type, any, bytes)                                  \
    INSTANCE(f16, __half, type, any, bytes)
#define SM80_TF32(type, name, bm, bn, bk, stages, wm, wn, per_sm, any, percent, bytes) \
    INSTANCE(tf32, float, type, any, bytes)
#include "instances.def"
